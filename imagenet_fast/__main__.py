"""``imagenet-fast COMMAND``, also as ``python -m imagenet_fast``."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pathlib
import signal
import sys

from imagenet_fast.base.terminal import PrintableStream
from imagenet_fast.commands import run


def main() -> None:
    """Runs the command line and exits with its status."""
    # They are None where the shell has closed them, as `>&-` does; the places must not be taken by
    # the next file that is opened.
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            setattr(sys, stream, pathlib.Path(os.devnull).open("w"))  # noqa: SIM115
    # As stderr has it: names of files need not be text.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    # Names of files and classes reach the terminal here, and only here.
    sys.stdout, sys.stderr = PrintableStream(sys.stdout), PrintableStream(sys.stderr)
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    """Runs a command line whose output may have a reader that ends early, as ``| head``.

    The status is then that of a shell's command that SIGPIPE has ended, unless the command only
    prints. An output on a full disk is a user error.
    """
    try:
        status = run(arguments)
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        prints = {"recipes", "version", "help", "--version", "--help", "-h", "--helpfull"}
        return 0 if prints & set(arguments) else 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename:
            raise
        reason = f"the output cannot be written: {error.strerror}"
        print(f"imagenet-fast: error: {reason}", file=sys.stderr)
        return 2
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                # Otherwise Python would flush it again at its end, complain, and exit with 120.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
