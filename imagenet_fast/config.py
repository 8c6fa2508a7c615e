"""``Config``, all options of a training run, with flagfiles and JSON.

Each option is declared in the ``options.py`` of the folder whose code reads it: its type, default,
help and check, once. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.base.former_names import with_todays_names, without_removed
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.option import option_text, parse, require_option
from imagenet_fast.base.outside import MAX_JSON, parse_json, read_bounded
from imagenet_fast.base.paths import Path, to_path
from imagenet_fast.data.options import InputOptions
from imagenet_fast.models.options import ModelOptions
from imagenet_fast.optimizers.options import UpdateOptions
from imagenet_fast.optimizers.scaled_times import TIMES, scale_times
from imagenet_fast.pipeline_parallel.options import PipelineOptions
from imagenet_fast.recipes import find_recipe, recipe_names
from imagenet_fast.training.options import RunOptions

_COMMENT_MARKS = ("#", "//")
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
        return self.replace(precision="float32", pipeline_stages=1, batch_norm_batch_size=0)

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
        lines = list(read_flagfile(path))
        values = {line.name: parse_option(line.name, line.text) for line in lines}
        for name in changes:
            require_option(name, option_names())
        sources = in_order(
            [*((line.name, line.source) for line in lines), *((n, "") for n in changes)]
        )
        values = without_superseded({**values, **changes}, sources)
        run = run_in(values.get("model_dir", ""))
        config = cls().replace(**with_times(values, sources, lines, run))
        config.warn_of_unused_warmup(changes)
        return config

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
        values, missed = without_removed(values)
        for reason in missed:
            warn_once(f"this run's {reason}")
        for name in values:
            require_option(name, option_names())
        # Earlier versions allowed options without effect.
        ignored = cls.without_effect(values)
        return cls().replace(**{k: v for k, v in values.items() if k not in ignored})

    def differences(self, other: Config, *, all_options: bool = True) -> list[str]:
        """Returns the names of the options in which two configurations differ.

        Args:
          other: the other configuration.
          all_options: whether to count options that may change on resume, too.
        """
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


class FlagfileLine(NamedTuple):
    """An option that a flagfile gives.

    Attributes:
      name: the option's.
      text: its value.
      source: the path of the file.
      parents: the paths of the files that include it, outermost first.
    """

    name: str
    text: str
    source: str
    parents: tuple[str, ...] = ()


def in_order(given: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns the file that gave each option last, in the order of giving.

    Args:
      given: pairs of an option's name and a file's path; an empty path means no file.
    """
    sources: dict[str, str] = {}
    for name, source in given:
        sources.pop(name, None)
        sources[name] = source
    return sources


def without_superseded(values: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """Drops options that a later flagfile or flag has made ineffective.

    After ``--flagfile=recipe.flags --schedule=cosine`` nothing reads the recipe's ``decay_at``.

    Args:
      values: values by option.
      sources: from :func:`in_order`.
    """
    order = list(sources)
    without_effect = Config.without_effect(values)

    def superseded(name: str) -> bool:
        if name not in without_effect:
            return False
        other = without_effect[name].option
        later = (
            other in sources
            and sources[other] != sources[name]
            and order.index(other) > order.index(name)
        )
        return later or superseded(other)

    return {name: value for name, value in values.items() if not superseded(name)}


def follow_duration(
    values: Mapping[str, Any], sources: Mapping[str, str], lines: Sequence[FlagfileLine]
) -> dict[str, Any]:
    """Scales a recipe's times to a duration given after it.

    After ``--flagfile=digits --duration='6 epochs'``, on the command line or in a flagfile, half of
    the recipe's duration, the learning rate decays at half of its epochs. Times that are given
    beside the new duration stay. Without a recipe that has a duration, nothing is scaled.

    Args:
      values: of options.
      sources: of :func:`in_order`.
      lines: of all flagfiles, in the order of giving.
    """
    given = [line for line in lines if line.name == "duration"]
    if "duration" not in sources or not given:
        return dict(values)
    after = Config.convert("duration", values["duration"])
    of_files = {line.source: line for line in given}
    parents = {line.source: line.parents for line in lines}
    # Default times, and those of files without a duration, are for the innermost recipe.
    outermost = [(*line.parents, line.source)[0] for line in given]
    default = given[outermost.index(outermost[-1])]
    batch_size = Config.convert("batch_size", values.get("batch_size", Config.batch_size))
    place, unset = sources["duration"], Config()
    others = (line.text for line in reversed(given) if line.source != place)
    replaced = next((text for text in others if Duration.parse(text) != after), "")
    scaled, fixed = {}, []
    for name in TIMES:
        source = sources.get(name)
        if source == place or source == "":
            continue
        if place and source is not None and place not in parents[source]:
            continue  # of another recipe
        times = Config.convert(name, values.get(name, getattr(unset, name)))
        line = default if source is None else of_files.get(source, default)
        before = Duration.parse(line.text)
        if before == after:
            continue
        growth = batch_size / max(1, _batch_size_of(line.source, lines))
        try:
            scaled[name] = scale_times(times, before, after, growth)
        except UserError:
            fixed.append(name)
    ineffective = Config.without_effect({**values, **scaled, **dict.fromkeys(fixed, "1 step")})
    changed = {
        name: times
        for name, times in scaled.items()
        if name not in ineffective and times != values.get(name, getattr(unset, name))
    }
    if changed:
        texts = " ".join(f"--{name}={option_text(times)!r}" for name, times in changed.items())
        warn_once(f"duration={after} instead of {replaced} scales the schedule: {texts}")
    for name in fixed:
        if name not in ineffective:
            text = option_text(values.get(name, getattr(unset, name)))
            warn_once(
                f"duration={after} instead of {replaced} does not scale {name}={text}, which is in "
                f"another unit: give --{name}, too"
            )
    return {**values, **changed}


def _batch_size_of(file: str, lines: Iterable[FlagfileLine]) -> int:
    """Returns the batch size that a flagfile gives, itself or by files that it includes.

    Args:
      file: its path.
      lines: of all flagfiles, in the order of giving.
    """
    texts = [
        line.text
        for line in lines
        if line.name == "batch_size" and file in (line.source, *line.parents)
    ]
    return Config.convert("batch_size", texts[-1]) if texts else Config.batch_size


def with_times(
    values: Mapping[str, Any],
    sources: Mapping[str, str],
    lines: Sequence[FlagfileLine],
    run: Config | None,
) -> dict[str, Any]:
    """Returns the values of options, with a recipe's times scaled to the duration.

    A run that resumes keeps its times unless others are given outside of flagfiles: scaled to a new
    duration, they would change the learning rates of steps that are done.

    Args:
      values: of options.
      sources: of :func:`in_order`.
      lines: of all flagfiles, in the order of giving.
      run: the configuration of the run that resumes; None: none.
    """
    if run is None:
        return follow_duration(values, sources, lines)
    # Without sizes or knots it has no times for them.
    times = {name: getattr(run, name) for name in TIMES if sources.get(name) != ""}
    times = {name: value for name, value in times.items() if value != ()}
    ineffective = Config.without_effect({**values, **times})
    times = {name: value for name, value in times.items() if name not in ineffective}
    default = Config()
    changed = [
        f"--{name}={option_text(value)!r}"
        for name, value in times.items()
        if value != Config.convert(name, values.get(name, getattr(default, name)))
    ]
    if changed:
        warn_once(f"the run in {run.model_dir} keeps its times: {' '.join(changed)}")
    return {**values, **times}


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


def read_flagfile(path: str | os.PathLike[str]) -> Iterator[FlagfileLine]:
    """Yields the options of a flagfile or recipe in order, those of included files in their place.

    Raises:
      UserError: if a file cannot be read, a line is no flag, or a file includes itself.
    """
    yield from _read_flagfile(_flagfile(os.fspath(path)), ())


def _read_flagfile(path: Path, parents: tuple[Path, ...]) -> Iterator[FlagfileLine]:
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
    for number, line in with_todays_names(lines):
        flag = line.strip()
        if not flag or flag.startswith(_COMMENT_MARKS):
            continue
        if not flag.startswith("-"):
            raise UserError(f"{path}, line {number}: {flag!r} is not a flag (--option=value)")
        name, equals, text = flag.lstrip("-").partition("=")
        if name == "flagfile":
            nested = _flagfile(text, path.parent)
            yield from _read_flagfile(nested, (*parents, path))
            continue
        try:
            if not equals:
                name, text = _boolean_flag(name)
            parse_option(name, text)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        yield FlagfileLine(name, text, str(path), tuple(map(str, parents)))


def _flagfile(text: str, folder: Path | None = None) -> Path:
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


def _boolean_flag(flag: str) -> tuple[str, str]:
    """Reads ``--xla`` and ``--noxla``."""
    name, text = flag, "true"
    if flag.startswith("no") and flag[2:] in option_names():
        name, text = flag[2:], "false"
    require_option(name, option_names())
    if option_type(name) is not bool:
        raise UserError(f"{name} needs a value: --{name}=...")
    return name, text


def _plain(value: Any) -> Any:
    """Returns ``value`` as a JSON value."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Duration) else value
