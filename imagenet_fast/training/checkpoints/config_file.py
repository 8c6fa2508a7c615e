"""The configuration of the run in a ``model_dir``; does not import TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import check_no_pattern
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.option import option_text
from imagenet_fast.base.outside import MAX_JSON, read_bounded
from imagenet_fast.base.paths import Path, is_local, to_path
from imagenet_fast.config import Config, run_in
from imagenet_fast.models.options import CUSTOM, is_custom

CONFIG_FILE = "config.json"


def read_config(model_dir: str) -> Config:
    """Returns the configuration of the run in ``model_dir``, which anybody may have made.

    It names no code, no server, and no folder to write to but ``model_dir``: a ``model`` given as
    ``module:function`` is ``custom``; ``cache_dir``, ``compile_cache``, ``input_servers``,
    ``pipeline_servers`` and ``tpu`` have their defaults, and so has ``data_dir`` if it is in
    another bucket than ``model_dir``. Set them by ``replace`` if they are yours. Nothing is
    downloaded: ``pretrained`` is false and, if it was true, ``freeze_through`` empty.

    Raises:
      UserError: if there is none.
    """
    config = stored_config(model_dir)
    return config.replace(**_left_out(config))


def config_of_run(model_dir: str, changes: Mapping[str, Any]) -> Config:
    """Returns the configuration of a run as :func:`read_config`, with a command line's options.

    Warns of options that the command line would have to repeat.

    Raises:
      UserError: if there is no run, or its network is code that the command line does not name.
    """
    stored = stored_config(model_dir)
    left_out = {name: value for name, value in _left_out(stored).items() if name not in changes}
    if "model" in left_out and stored.model != CUSTOM:
        raise UserError(
            f"the network of the run in {model_dir} is code, {stored.model}, which only the "
            f"command line may name: if you trust it, give --model={stored.model}"
        )
    for name in left_out.keys() & {"data_dir", "pipeline_servers"}:
        warn_once(
            f"{name}={option_text(getattr(stored, name))} of the run in {model_dir} is not used: "
            f"give --{name} to connect to it"
        )
    return stored.replace(**{**left_out, **changes})


def as_begun(config: Config) -> Config:
    """Returns a configuration with the logical replicas of the run in ``model_dir``, if any.

    Raises:
      UserError: if they are not known, and the devices are to be chosen otherwise than when the run
        began; or if the batch is another, which they might not divide.
    """
    earlier = run_in(config.model_dir)
    if earlier is None:
        return config
    if not config.replicas and not earlier.replicas:
        for name in ("strategy", "logical_cpus"):
            here, there = (option_text(getattr(one, name)) for one in (config, earlier))
            if here != there:
                raise UserError(
                    f"the run in {config.model_dir} was begun by a version that did not record the "
                    f"number of replicas, and {name} is {there} there, {here} here: give "
                    f"--{name}={there}, or the number of devices on which it began as --replicas=N"
                )
    if config.replicas not in ((), earlier.replicas[:1]):
        return config
    names = ["batch_size"] if earlier.replicas else []
    if earlier.replicas and config.batch_size % (earlier.replicas[0] * config.accumulation_steps):
        names.append("accumulation_steps")
    changed = [name for name in names if getattr(config, name) != getattr(earlier, name)]
    if changed:
        raise other_options(changed, earlier, config)
    return config.replace(replicas=earlier.replicas)


def other_options(names: Sequence[str], run: Config, config: Config) -> UserError:
    """Returns the error that options are not those of the run in ``model_dir``, to be resumed."""
    return UserError(
        f"{directory_of(config.model_dir)} holds a run with other options "
        f"({differences(names, run, config)}); give its options, as by its --flagfile, to resume "
        "it, or choose another --model_dir"
    )


def differences(names: Sequence[str], run: Config, config: Config) -> str:
    """Returns what options are there, of a run, and here, in words."""
    return "; ".join(
        f"{name} is {option_text(getattr(run, name)) or 'empty'} there, "
        f"{option_text(getattr(config, name)) or 'empty'} here"
        for name in names
    )


def stored_config(model_dir: str) -> Config:
    """Returns all that the run's file says: to compare and to show, not to build from.

    Raises:
      UserError: if there is no run.
    """
    file = directory_of(model_dir) / CONFIG_FILE
    try:
        text = read_bounded(file, MAX_JSON).decode()
        return Config.from_json(text).replace(model_dir=model_dir)
    except OSError as error:
        raise UserError(f"{model_dir} holds no training run: {file}: {error.strerror}") from None
    except ValueError as error:  # a UserError, or bytes that are not UTF-8
        raise UserError(f"{file}: {error}") from None


def directory_of(model_dir: str) -> Path:
    """Returns the path of ``model_dir``.

    Raises:
      UserError: if it is empty, or TensorFlow would read it as a glob pattern.
    """
    if not model_dir:
        raise UserError("no model: give --model_dir, the directory of a training run")
    directory = to_path(model_dir)
    check_no_pattern(directory)
    return directory


def _left_out(stored: Config) -> dict[str, Any]:
    """Returns replacements for the options that a run's file may not give."""
    values = {
        field.name: field.default
        for field in dataclasses.fields(stored)
        if not field.metadata["in_files_of_runs"] and getattr(stored, field.name) != field.default
    }
    if "pretrained" in values:
        values["freeze_through"] = ""
    if is_custom(stored.model):
        values["model"] = CUSTOM
    if not is_local(stored.data_dir) and _bucket(stored.data_dir) != _bucket(stored.model_dir):
        values["data_dir"] = ""
    return values


def _bucket(path: str) -> tuple[str, ...]:
    return () if is_local(path) else to_path(path).parts[:2]
