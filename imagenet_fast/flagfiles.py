"""Flagfiles, and the options of a run as layers: included files, the file, the command line.

What a layer gives replaces what is below it. If it gives another duration, the times below keep
their fractions of the run. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Union

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.base.former_names import with_todays_names
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.option import Options, option_text, parse, require_option
from imagenet_fast.base.paths import Path, to_path
from imagenet_fast.recipes import find_recipe, recipe_names

# Options that are times since the start of a run, or lengths of its parts.
TIMES = (
    *("warmup", "whitening_bias_until", "decay_at", "decay_every", "knots_at"),
    *("train_until", "size_ramp_at"),
)
_COMMENT_MARKS = ("#", "//")

Times = Union[Duration, tuple[Duration, ...]]


@dataclasses.dataclass(frozen=True)
class Layers:
    """Options that flagfiles give, each over those that it includes or that are before it.

    Attributes:
      options: the class of the options.
      values: their values, by name.
      lengths: all durations given, the lowest layer's first, each with its batch size in images.
      given_for: by option, the position in ``lengths`` of the duration to which a time belongs.
        Others, and default times, belong to the first.
    """

    options: type[Options]
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lengths: tuple[tuple[Duration, int], ...] = ()
    given_for: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def _value(self, name: str) -> Any:
        """Returns an option's value, or its default."""
        return self.values.get(name, getattr(self.options, name))

    def then(self, given: Mapping[str, Any]) -> Layers:
        """Returns the layers with one more, of what a flagfile itself or the command line gives.

        Args:
          given: values by option, or texts.

        Raises:
          UserError: if a value is of another type than the option.
        """
        values = {name: self.options.convert(name, value) for name, value in given.items()}
        batch_size = values.get("batch_size", self._value("batch_size"))
        lengths = ((values["duration"], batch_size),) if "duration" in values else ()
        return Layers(self.options, values, lengths).over(self)

    def over(self, below: Layers) -> Layers:
        """Returns the layers with others below them.

        Options below that these make ineffective fall away: ``decay_at`` by ``schedule="cosine"``.
        """
        values = {**below.values, **self.values}
        ineffective = self.options.without_effect(values)

        def falls_away(name: str) -> bool:
            if name in self.values or name not in ineffective:
                return False
            other = ineffective[name].option
            return other in self.values or falls_away(other)

        # Times that are given without any duration belong to the last one below.
        start = len(below.lengths) if self.lengths else max(0, len(below.lengths) - 1)
        own = {name: start + self.given_for.get(name, 0) for name in TIMES if name in self.values}
        kept = {name: value for name, value in values.items() if not falls_away(name)}
        return Layers(
            self.options,
            kept,
            below.lengths + self.lengths,
            {name: at for name, at in {**below.given_for, **own}.items() if name in kept},
        )

    def with_flags(self, flags: Mapping[str, Any], run: Options | None = None) -> dict[str, Any]:
        """Returns the options of a run: these, and those of the command line over them.

        A run that resumes keeps its times unless the command line gives others: scaled to a new
        duration, they would change the learning rates of steps that are done.

        Args:
          flags: what the command line gives: values by option, or texts.
          run: the configuration of the run that resumes; None: none.

        Raises:
          UserError: if a value is of another type than the option.
        """
        layers = self.then(flags)
        if run is None:
            return {**layers.values, **layers._scaled()}
        of_run = vars(run)
        times = {name: of_run[name] for name in TIMES if name not in flags}
        # Without sizes or knots it has no times for them.
        times = {name: value for name, value in times.items() if value != ()}
        ineffective = self.options.without_effect({**layers.values, **times})
        times = {name: value for name, value in times.items() if name not in ineffective}
        changed = {name: value for name, value in times.items() if value != layers._value(name)}
        if changed:
            warn_once(f"the run in {of_run['model_dir']} keeps its times: {_flags(changed)}")
        return {**layers.values, **times}

    def _scaled(self) -> dict[str, Any]:
        """Returns the times that the last duration changes, and says so."""
        durations = [duration for duration, _ in self.lengths]
        replaced = [duration for duration in durations if duration != durations[-1]]
        if not replaced:
            return {}
        after, scaled = durations[-1], {}
        what = f"duration={after} instead of {replaced[-1]}"
        for name in TIMES:
            before, batch_size = self.lengths[self.given_for.get(name, 0)]
            if before == after or not before.amount:
                continue
            # "1 step", because `without_effect` leaves default values out.
            if name in self.options.without_effect({**self.values, name: "1 step"}):
                continue
            times, growth = self._value(name), self._value("batch_size") / max(1, batch_size)
            try:
                scaled[name] = scale_times(times, before, after, growth)
            except UserError:
                warn_once(
                    f"{what} does not scale {name}={option_text(times)}, which is in another unit: "
                    f"give --{name}, too"
                )
        changed = {name: times for name, times in scaled.items() if times != self._value(name)}
        if changed:
            warn_once(f"{what} scales the schedule: {_flags(changed)}")
        return changed


def scale_times(times: Times, before: Duration, after: Duration, batch_growth: float = 1) -> Times:
    """Scales times to another duration of a run, of which they stay the same fractions.

    Args:
      times: one or several.
      before: the duration to which they belong, not 0.
      after: the new duration.
      batch_growth: the new batch size over the one to which they belong.

    Returns:
      The times to five digits, in their units, or in the unit of ``after`` if that of ``before``
      differs.

    Raises:
      UserError: if the three units differ, so that no fraction is known.
    """
    several = times if isinstance(times, tuple) else (times,)
    # Zeros keep the unit of the others.
    if any(time.amount for time in several):
        several = tuple(_scale(time, before, after, batch_growth) for time in several)
    return several if isinstance(times, tuple) else several[0]


def _scale(time: Duration, before: Duration, after: Duration, batch_growth: float) -> Duration:
    if time.unit != before.unit != after.unit:
        raise UserError(f"{time} of {before} is no known fraction of {after}")
    factor, unit = after.amount / before.amount, time.unit
    if unit == before.unit:
        unit = after.unit
    # As many steps of larger batches are more images, as many images fewer steps.
    elif before.unit == "steps":
        factor *= batch_growth
    elif unit == "steps":
        factor /= batch_growth
    if factor == 1 and unit == time.unit:
        return time
    return Duration(float(f"{time.amount * factor:.5g}"), unit)


def _flags(values: Mapping[str, Any]) -> str:
    """Returns options as they are written on a command line."""
    return " ".join(f"--{name}={option_text(value)!r}" for name, value in values.items())


def read_flagfile(options: type[Options], path: str | os.PathLike[str]) -> Layers:
    """Reads a flagfile or recipe.

    An included file is below the file's own lines, but wins over those that are before it.

    Args:
      options: the class of the options.
      path: of the file, or a recipe's name.

    Raises:
      UserError: if a file cannot be read, a line is no flag, or a file includes itself.
    """
    return _read(options, _find(os.fspath(path)), ())


def _read(options: type[Options], path: Path, parents: tuple[Path, ...]) -> Layers:
    if path.resolve() in (parent.resolve() for parent in parents):
        raise UserError(f"flagfile {path} includes itself")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise UserError(
            f"cannot read flagfile {path}: {error.strerror}{_nearest_flagfiles(path)}"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read flagfile {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"cannot read flagfile {path}: it is not text") from None
    included = Layers(options)
    own: dict[str, Any] = {}
    for number, line in with_todays_names(lines):
        flag = line.strip()
        if not flag or flag.startswith(_COMMENT_MARKS):
            continue
        if not flag.startswith("-"):
            raise UserError(f"{path}, line {number}: {flag!r} is not a flag (--option=value)")
        name, _, text = flag.lstrip("-").partition("=")
        if name == "flagfile":
            file = _read(options, _find(text, path.parent), (*parents, path))
            included = file.over(included)
            own = {name: value for name, value in own.items() if name not in file.values}
            continue
        try:
            name, value = _parse(options, flag)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        own[name] = value
    return included.then(own)


def _find(text: str, folder: Path | None = None) -> Path:
    """Returns the file or recipe that ``--flagfile`` names.

    Args:
      text: a path, relative to ``folder`` or else to the working directory, or a recipe's name.
      folder: of the flagfile that includes it; None: the flag is none of a flagfile.
    """
    path = to_path(text)
    recipe = find_recipe(text)
    for file in [folder / path, path] if folder else [path]:
        if file.is_file():
            if recipe and file.read_bytes() != recipe.read_bytes():
                warn_once(f"{file} is used, not the recipe {recipe.stem}: its name is the same")
            return file
    return to_path(recipe) if recipe else path


def _nearest_flagfiles(path: Path) -> str:
    """Returns a hint at recipes and files beside ``path`` with similar names."""
    files = {file.stem: repr(str(file)) for file in sorted(path.parent.glob("*.flags"))}
    files |= {name: repr(name) for name in recipe_names()}
    return nearest(path.stem, files, files.__getitem__)


def _parse(options: type[Options], flag: str) -> tuple[str, Any]:
    """Returns the option and value of ``--seed=3``, ``--xla`` or ``--noxla``."""
    name, equals, text = flag.lstrip("-").partition("=")
    types = options.types()
    if not equals:
        text = "true"
        if name.startswith("no") and name[2:] in types:
            name, text = name[2:], "false"
    require_option(name, types)
    if not equals and types[name] is not bool:
        raise UserError(f"{name} needs a value: --{name}=...")
    return name, parse(name, types[name], text)
