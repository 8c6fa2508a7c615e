"""The command line: each command parses its flags, builds a Config and calls one function."""

from __future__ import annotations

import contextlib
import importlib
import logging
import shlex
import sys
from collections.abc import Sequence

import imagenet_fast
from imagenet_fast.base.errors import NotNeeded, UserError, module_missing, nearest

COMMANDS = {
    "prepare": "turn images into TFRecord shards, or verify them",
    "recipes": "list published training runs, or print one",
    "train": "train a model, or resume a run",
    "evaluate": "measure the accuracy of a trained model",
    "history": "show on which devices a run has trained, and how fast",
    "export": "write a SavedModel that takes encoded images, an ONNX or a TFLite file",
    "predict": "classify image files with a SavedModel",
    "plan": "estimate time, memory and cost of a training run",
    "compile": "compile a training step for TPUs or GPUs that this machine lacks",
    "doctor": "check that this machine, or this cluster, is ready for training",
    "input-server": "read and decode images for training on other machines",
    "stage-server": "provide devices to pipelines of other processes",
    "benchmark": "time parts of the package against alternatives",
}
_LONGEST_REASON = 4000  # characters


def run(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit status: 2 after a user error, 130 after Ctrl-C.

    Operating-system errors about files count as user errors.

    Raises:
      BrokenPipeError: if nobody reads the output any more.
    """
    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h", "--helpfull", "help"):
        print(_help())
        return 0
    if name in ("--version", "version"):
        print(f"imagenet_fast {imagenet_fast.__version__}")
        return 0
    try:
        if name not in COMMANDS:
            raise UserError(
                f"there is no command {name!r}"
                f"{nearest(name, COMMANDS) or '; the commands are ' + ', '.join(COMMANDS)}"
            )
        module = importlib.import_module(f"imagenet_fast.commands.{name.replace('-', '_')}")
        return module.main(list(arguments[1:]))
    except NotNeeded as reason:
        print(f"imagenet-fast {name}: {reason}", file=sys.stderr)
        return 0
    except UserError as error:
        return _failed(name, str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("imagenet_fast"):
            raise
        return _failed(name, str(module_missing(error)))
    except OSError as error:
        if (error.strerror or "").startswith("No usable temporary directory"):
            return _failed(name, f"{error.strerror}; set TMPDIR to a writable directory")
        if not error.filename:
            raise
        # For example a file in a folder without read permission.
        return _failed(name, f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt as interrupt:
        resume = ""
        if name == "train":
            # Before training, whether there is a checkpoint is not known.
            how = str(interrupt) or "; start or resume"
            resume = f"{how} with: {shlex.join(['imagenet-fast', *arguments])}"
        with contextlib.suppress(BrokenPipeError):  # it has ended the reader, such as tee, too
            print(f"imagenet-fast {name}: interrupted{resume}", file=sys.stderr)
        return 130


def _failed(name: str, reason: str) -> int:
    """Prints an error, as the last line, and returns the exit status."""
    # Otherwise TensorFlow would warn of what the error has left, such as half a checkpoint.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    # It may quote a file of others.
    more = " ..." if len(reason) > _LONGEST_REASON else ""
    print(f"imagenet-fast {name}: error: {reason[:_LONGEST_REASON]}{more}", file=sys.stderr)
    return 2


def _help() -> str:
    lines = [f"  {name:12} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: imagenet-fast COMMAND [--flag=value ...]",
            "",
            *lines,
            "",
            "imagenet-fast COMMAND --help lists a command's flags, --helpfull all of them;",
            "imagenet-fast --version prints the version.",
        ]
    )
