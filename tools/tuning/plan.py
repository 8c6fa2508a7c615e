"""The search space: options and the values of each."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Union

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.base.option import option_text
from imagenet_fast.config import Config, option_names, option_type, parse_option

if typing.TYPE_CHECKING:
    import optuna

_DIGITS = 4
# Added at both ends of the best values, as a fraction of the range.
_MARGIN = 0.1
_HINT = "write OPTION=[log:][UNIT:]LOWEST:HIGHEST or, in quotes, 'OPTION=VALUE|VALUE'"


@dataclasses.dataclass(frozen=True)
class Range:
    """A closed range of values of a numeric option or a duration.

    Attributes:
      option: its name.
      low: the lowest value.
      high: the highest value.
      log: whether values are distributed on a logarithmic scale.
      unit: of a duration; otherwise empty.
      whole: whether values are integers.
    """

    option: str
    low: float
    high: float
    log: bool = False
    unit: str = ""
    whole: bool = False

    def suggest(self, trial: optuna.trial.Trial) -> Any:
        """Returns a value of the option's type for ``trial``."""
        if self.whole:
            low, high = int(self.low), int(self.high)
            return self.value(trial.suggest_int(self.option, low, high, log=self.log))
        return self.value(trial.suggest_float(self.option, self.low, self.high, log=self.log))

    def value(self, parameter: float) -> Any:
        """Converts Optuna's number into the option's value, rounded to few digits."""
        number = parameter
        if not self.whole:
            number = min(max(_shorten(parameter), self.low), self.high)
        return Duration(number, self.unit) if self.unit else number

    def narrowed(self, values: Sequence[Any]) -> Range:
        """Returns the range of ``values``, extended by a tenth of this range at both ends."""
        numbers = [self.number(value) for value in values]
        scale, back = (math.log, math.exp) if self.log else (float, float)
        margin = _MARGIN * (scale(self.high) - scale(self.low))
        low = back(scale(min(numbers)) - margin)
        high = back(scale(max(numbers)) + margin)
        low, high = (
            (math.floor(low), math.ceil(high)) if self.whole else (_shorten(low), _shorten(high))
        )
        return dataclasses.replace(self, low=max(low, self.low), high=min(high, self.high))

    def number(self, value: Any) -> float:
        """Returns a value of the option as a number."""
        return value.amount if self.unit else value

    def ends(self) -> tuple[Any, Any]:
        """Returns the lowest and the highest value."""
        return self.value(self.low), self.value(self.high)

    def __str__(self) -> str:
        log, unit = "log:" * self.log, f"{self.unit}:" * bool(self.unit)
        return f"{self.option}={log}{unit}{option_text(self.low)}:{option_text(self.high)}"


@dataclasses.dataclass(frozen=True)
class Choices:
    """Discrete values of an option of any type.

    Attributes:
      option: its name.
      texts: the values as in a flagfile.
    """

    option: str
    texts: tuple[str, ...]

    def suggest(self, trial: optuna.trial.Trial) -> Any:
        """Returns a value of the option's type for ``trial``."""
        return self.value(trial.suggest_categorical(self.option, self.texts))

    def value(self, parameter: str) -> Any:
        """Returns the option's value for a text."""
        return parse_option(self.option, parameter)

    def narrowed(self, values: Sequence[Any]) -> Choices:
        """Returns all choices: Optuna requires that they stay, and prefers the better ones."""
        return self

    def ends(self) -> tuple[Any, ...]:
        """Returns all values."""
        return tuple(map(self.value, self.texts))

    def __str__(self) -> str:
        return f"{self.option}={'|'.join(self.texts)}"


Searched = Union[Range, Choices]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A search.

    Attributes:
      config: of each trial, except for searched options and ``model_dir``.
      space: the searched options, in the order of ``Config``.
      trials: runs of the first, coarse round.
      fine_trials: runs of the second round, in ranges around the best of the first.
      seed: of the values that are tried.
      directory: of the search.
    """

    config: Config
    space: tuple[Searched, ...]
    trials: int
    fine_trials: int
    seed: int
    directory: pathlib.Path


def parse_space(texts: Sequence[str]) -> tuple[Searched, ...]:
    """Parses a search space, such as ``learning_rate=log:0.1:10`` or ``schedule=steps|cosine``.

    Args:
      texts: one for each option.

    Raises:
      UserError: if a text is malformed.
    """
    space: list[Searched] = []
    for text in texts:
        try:
            searched = _parse(text)
        except UserError as error:
            raise UserError(f"--search={text}: {error}") from None
        if searched.option in [other.option for other in space]:
            raise UserError(f"--search names {searched.option} twice")
        space.append(searched)
    return tuple(sorted(space, key=lambda searched: option_names().index(searched.option)))


def common_config(values: Mapping[str, Any], space: Sequence[Searched]) -> Config:
    """Returns a configuration from which those of all trials differ in the searched options.

    In it these have values with which the others have an effect: ``warmup_start=0`` has none where
    ``warmup`` is 0, as in the recipe and perhaps in some of the trials.

    Args:
      values: of the options that are given.
      space: is checked: both ends of each range, and each choice.

    Raises:
      UserError: if a value is invalid.
    """
    for searched in space:
        candidates = [values, *({**values, searched.option: end} for end in searched.ends())]
        values = min(candidates, key=lambda each: len(Config.without_effect(each)))
    config = Config().replace(**values)
    for searched in space:
        try:
            for value in searched.ends():
                config.replace(**{searched.option: value})
        except UserError as error:
            raise UserError(f"--search={searched}: {error}") from None
    return config


def _parse(text: str) -> Searched:
    option, equals, values = (part.strip() for part in text.partition("="))
    if not equals:
        raise UserError(_HINT)
    fields = {field.name: field for field in dataclasses.fields(Config)}
    if option not in fields:
        raise UserError(f"there is no option {option!r}{nearest(option, fields)}")
    field = fields[option]
    if field.metadata["may_change_on_resume"] or field.metadata["group"] == "run":
        raise UserError(f"{option} does not affect training results")
    if "|" in values:
        return _parse_choices(option, values)
    return _parse_range(option, values)


def _parse_choices(option: str, values: str) -> Choices:
    texts = tuple(option_text(parse_option(option, value)) for value in values.split("|"))
    if len(set(texts)) < len(texts):
        raise UserError("the same value is given twice")
    return Choices(option, texts)


def _parse_range(option: str, values: str) -> Range:
    kind = option_type(option)
    if kind not in (int, float, Duration):
        raise UserError(f"{option} is not a number: write its values as '{option}=VALUE|VALUE'")
    parts = values.split(":")
    if len(parts) < 2:
        raise UserError(f"{values!r} is not a range; {_HINT}")
    *marks, low_text, high_text = parts
    units = [mark for mark in marks if mark != "log"]
    if kind is Duration:
        if len(units) != 1:
            raise UserError(f"{option} is a duration: write one unit, as {option}=epochs:1:5")
        unit = Duration(0, units[0]).unit
    elif units:
        raise UserError(f"{option} has no unit, but {units[0]!r} is given; {_HINT}")
    else:
        unit = ""
    whole = kind is int or unit in ("steps", "examples")
    low, high = (_parse_number(text, whole) for text in (low_text, high_text))
    log = "log" in marks
    if low >= high:
        raise UserError(f"the range is empty: {low_text} is not below {high_text}")
    if log and low <= 0:
        raise UserError(f"the range is logarithmic, but {low_text} is not positive")
    return Range(option, low, high, log, unit, whole)


def _parse_number(text: str, whole: bool) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{text!r} is not a number; {_HINT}")
    if not whole:
        return number
    if number != int(number):
        raise UserError(f"{text} is not a whole number")
    return int(number)


def _shorten(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")
