"""``Config``, all options of a training run, from flagfiles and JSON.

Each option is declared in the ``options.py`` of the folder whose code reads it: its type, default,
help and check, once. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.former_names import with_todays_options
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.option import parse, require_option
from imagenet_fast.base.outside import MAX_JSON, parse_json, read_bounded
from imagenet_fast.base.paths import to_path
from imagenet_fast.data.options import InputOptions
from imagenet_fast.flagfiles import read_flagfile, resolve
from imagenet_fast.models.options import ModelOptions, own_image_size
from imagenet_fast.optimizers.options import UpdateOptions
from imagenet_fast.pipeline_parallel.options import PipelineOptions
from imagenet_fast.training.options import RunOptions

# The headings of ``--helpfull``, in their order.
_GROUPS = ("data", "model", "optimization", "learning rate", "hardware", "run")


# The last base's options come first.
@dataclasses.dataclass(frozen=True)
class Config(RunOptions, PipelineOptions, UpdateOptions, ModelOptions, InputOptions):
    """The options of a training run. ``imagenet-fast train --helpfull`` lists them.

    Durations may be given as text (``duration="90 epochs"``), batch sizes are global: images in a
    weight update, over all replicas and workers.

    Raises:
      UserError: if an option does not exist, has an invalid value, or contradicts another one.
    """

    def _check_together(self) -> None:
        super()._check_together()
        if self.xla and self.strategy == "tpu":
            raise UserError("xla is for GPUs and CPUs: a TPU always compiles")

    def on_one_device(self) -> Config:
        """Returns the configuration of the same network in float32 on one device, unsplit.

        It has the same weights and computes the same outputs, up to rounding.
        """
        return self.replace(
            precision="float32", pipeline_stages=1, batch_norm_batch_size=0, replicas=()
        )

    @classmethod
    def from_flagfile(cls, path: str | os.PathLike[str], **changes: Any) -> Config:
        """Reads a recipe: one ``--option=value`` per line; ``#`` starts a comment.

        Args:
          path: a recipe's name, as ``"digits"``, or a flagfile; it may include others by
            ``--flagfile=other.flags``, relative to its own folder or to the working directory.
          **changes: options that override the recipe's. With another duration, the recipe's times
            (warmup, decays, knots, image sizes) are scaled, unless they are given, too. If
            ``model_dir`` holds a run, which ``train`` would resume, they are those of the run.

        Raises:
          UserError: if the file cannot be read, or has an unknown option.
        """
        for name in changes:
            require_option(name, option_names())
        files = read_flagfile(cls, path)
        given = {name: value for layer in (*files, changes) for name, value in layer.items()}
        run = run_in(given.get("model_dir", ""))
        config = cls.from_changes(resolve(cls, files, changes, run))
        config.warn_of_unused_warmup(changes)
        return config

    @classmethod
    def from_changes(cls, changes: Mapping[str, Any]) -> Config:
        """Returns the defaults with some options changed.

        Args:
          changes: values by option. Without ``image_size``, images have the size for which a
            network of Keras Applications was made.

        Raises:
          UserError: if an option is unknown or its value invalid.
        """
        size = own_image_size(str(changes.get("model", "")))
        return cls().replace(**{**({"image_size": size} if size else {}), **changes})

    def to_json(self) -> str:
        """Returns all options as a JSON object, durations as text."""
        values = {name: _plain(getattr(self, name)) for name in option_names()}
        return json.dumps(values, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Reads what :meth:`to_json` wrote.

        Raises:
          UserError: if ``text`` is not such an object.
        """
        try:
            values = parse_json(text, dict[str, Any])
        except ValueError as error:
            raise UserError(f"not a configuration: {error}") from None
        values, missed = with_todays_options(values)
        for reason in missed:
            warn_once(f"this run's {reason}")
        for name in values:
            require_option(name, option_names())
        # Earlier versions allowed options without effect.
        ignored = cls.without_effect(values)
        return cls().replace(**{k: v for k, v in values.items() if k not in ignored})

    def differences(self, other: Config, *, all_options: bool = True) -> list[str]:
        """Returns the names of options that differ, of all or of those that must not on resume."""
        counted = {
            field.name
            for field in dataclasses.fields(self)
            if all_options or not field.metadata["may_change_on_resume"]
        }
        return [
            name
            for name in option_names()
            if name in counted and getattr(self, name) != getattr(other, name)
        ]


def run_in(model_dir: str) -> Config | None:
    """Returns the configuration of the run in ``model_dir``, if there is one that can be read.

    Does not import TensorFlow; training explains the errors.
    """
    if not model_dir:
        return None
    try:
        text = read_bounded(to_path(model_dir, "config.json"), MAX_JSON).decode()
        return Config.from_json(text).replace(model_dir=model_dir)
    except (OSError, TypeError, ValueError):  # of these, a UserError
        return None


def option_names() -> list[str]:
    """Returns the names of all options, group by group."""
    fields = dataclasses.fields(Config)
    return [field.name for group in _GROUPS for field in fields if field.metadata["group"] == group]


def option_type(name: str) -> Any:
    """Returns the Python type of the option ``name``."""
    return Config.types()[name]


def parse_option(name: str, text: str) -> Any:
    """Returns ``text`` converted to the type of the option ``name``.

    Raises:
      UserError: if there is no such option, or ``text`` is not a valid value.
    """
    require_option(name, option_names())
    return parse(name, option_type(name), text)


def _plain(value: Any) -> Any:
    """Returns ``value`` as a JSON value."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Duration) else value
