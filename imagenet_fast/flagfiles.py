"""Flagfiles, and the options of a run as layers: included files, the file, the command line.

What a layer gives replaces what is below it. If it gives another duration, the times below keep
their fractions of the run. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union

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


class Length(NamedTuple):
    """The length of a run in any unit, and the images in a weight update."""

    duration: Duration
    batch_size: int


def resolve(
    options: type[Options],
    files: Sequence[Mapping[str, Any]],
    flags: Mapping[str, Any],
    run: Options | None = None,
) -> dict[str, Any]:
    """Returns the options of a run from the layers that flagfiles and the command line give.

    The values of a layer replace those below. Options below that they make ineffective fall away,
    as a recipe's ``decay_at`` by ``--schedule=cosine``.

    A time belongs to the duration that holds where it is given: the layer's own, or the last one
    below, or else the first one above, as default times do. If the last duration is another one,
    the time is scaled to it. But a run that resumes keeps its times unless the command line gives
    others: they would change the learning rates of steps that are done.

    Args:
      options: the class of the options.
      files: the layers of :func:`read_flagfile`, the lowest first: values by option.
      flags: the command line's layer: values by option, or texts.
      run: the configuration of the run that resumes; None: none.

    Raises:
      UserError: if a value is of another type than the option.
    """
    flags = {name: options.convert(name, value) for name, value in flags.items()}
    now = {name: getattr(options, name) for name in ("batch_size", *TIMES)}
    given: dict[str, Any] = {}
    layer_of: dict[str, int] = {}  # by option, the position of the last layer that gives it
    lengths: list[Length] = []
    length_of: dict[str, int] = {}  # by option, the position of the length to which a time belongs
    for position, layer in enumerate((*files, flags)):
        if "batch_size" in layer and layer["batch_size"] != given.get("batch_size"):
            # A recipe's replicas would have other images each, and so other batch norm.
            given.pop("replicas", None)
        given |= layer
        layer_of |= dict.fromkeys(layer, position)
        if "duration" in layer:
            lengths.append(Length(layer["duration"], {**now, **given}["batch_size"]))
        length_of |= dict.fromkeys(layer, max(0, len(lengths) - 1))
    values = _without_replaced(options, given, layer_of)
    now |= values
    times: dict[str, Times | None]
    if run is not None:
        what, does = f"the run in {vars(run)['model_dir']}", "keeps its schedule"
        # Without sizes or knots it has no times for them.
        times = {name: getattr(run, name) or now[name] for name in TIMES if name not in flags}
    elif replaced := [length for length in lengths if length.duration != lengths[-1].duration]:
        last = Length(lengths[-1].duration, now["batch_size"])
        what = f"duration={last.duration} instead of {replaced[-1].duration}"
        does = "scales the schedule"
        before = {name: lengths[length_of.get(name, 0)] for name in TIMES}
        times = {name: scale_times(now[name], before[name], last) for name in TIMES}
    else:
        return values
    tried = {name: "1 step" if time is None else time for name, time in times.items()}
    ineffective = options.without_effect({**values, **tried})
    new = {name: time for name, time in times.items() if name not in ineffective}
    changed = {name: time for name, time in new.items() if time not in (None, now[name])}
    if changed:
        texts = " ".join(f"--{name}={option_text(time)!r}" for name, time in changed.items())
        warn_once(f"{what} {does}: {texts}")
    for name in [name for name, time in new.items() if time is None]:
        warn_once(
            f"{what} does not scale {name}={option_text(now[name])}, which is in another unit: "
            f"give --{name}, too"
        )
    return {**values, **changed}


def _without_replaced(
    options: type[Options], values: Mapping[str, Any], layer_of: Mapping[str, int]
) -> dict[str, Any]:
    """Returns the values without those that an option of a layer above makes ineffective."""
    ineffective = options.without_effect(values)

    def falls_away(name: str) -> bool:
        if name not in ineffective:
            return False
        other = ineffective[name].option
        return layer_of.get(other, 0) > layer_of[name] or falls_away(other)

    return {name: value for name, value in values.items() if not falls_away(name)}


def scale_times(times: Times, before: Length, after: Length) -> Times | None:
    """Scales times to another length of a run, of which they stay the same fractions.

    Returns:
      The times to five digits, in their units, or in that of ``after`` if they are in that of
      ``before``. None if the three units differ, so that no fraction is known.
    """
    several = times if isinstance(times, tuple) else (times,)
    old, new = before.duration, after.duration
    if old == new or not old.amount or not any(time.amount for time in several):
        return times
    if any(time.unit != old.unit != new.unit for time in several):
        return None
    scaled = tuple(_scale(time, before, after) for time in several)
    return scaled if isinstance(times, tuple) else scaled[0]


def _scale(time: Duration, before: Length, after: Length) -> Duration:
    factor, unit = after.duration.amount / before.duration.amount, time.unit
    growth = max(1, after.batch_size) / max(1, before.batch_size)
    if unit == before.duration.unit:
        unit = after.duration.unit
    # As many steps of larger batches are more images, as many images fewer steps.
    elif before.duration.unit == "steps":
        factor *= growth
    elif unit == "steps":
        factor /= growth
    if factor == 1 and unit == time.unit:
        return time
    return Duration(float(f"{time.amount * factor:.5g}"), unit)


def read_flagfile(options: type[Options], path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the values of a flagfile or recipe, the last layer, and of those it includes.

    An included file is below the file's own lines, but wins over those that are before it.

    Raises:
      UserError: if a file cannot be read, a line is no flag, or a file includes itself.
    """
    return _read(options, _find(os.fspath(path)), ())


def _read(options: type[Options], path: Path, parents: tuple[Path, ...]) -> list[dict[str, Any]]:
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
    included: list[dict[str, Any]] = []
    own: dict[str, Any] = {}
    for number, line in with_todays_names(lines):
        flag = line.strip()
        if not flag or flag.startswith(_COMMENT_MARKS):
            continue
        if not flag.startswith("-"):
            raise UserError(f"{path}, line {number}: {flag!r} is not a flag (--option=value)")
        name, _, text = flag.lstrip("-").partition("=")
        if name == "flagfile":
            layers = _read(options, _find(text, path.parent), (*parents, path))
            included += layers
            for name in itertools.chain(*layers):
                own.pop(name, None)
            continue
        try:
            name, value = _parse(options, flag)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        own[name] = value
    return [*included, own]


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
