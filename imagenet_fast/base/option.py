"""Declaration, checks and text format of options.

Each folder's ``options.py`` declares its options as a frozen dataclass that inherits from
:class:`Options`; :class:`~imagenet_fast.config.Config` inherits from all of them. This module does
not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import os
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError, choices_hint, nearest
from imagenet_fast.base.former_names import advice

_TYPE_TEXTS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Duration: "a duration, as '90 epochs'",
}
_NUMBERS = {int: numbers.Integral, float: numbers.Real}
# Of a side of the network's images: more would not fit into any accelerator's memory.
MOST_PIXELS = 8192
_MOST_VALUES = 1000  # of a list
_Self = TypeVar("_Self", bound="Options")
_Part = TypeVar("_Part", bound="Options")


class Check(NamedTuple):
    """A condition on an option's value.

    Attributes:
      allows: returns whether a value is allowed.
      must: the condition, to complete "... must ...".
    """

    allows: Callable[[Any], bool]
    must: str


class OnlyIf(NamedTuple):
    """A condition on another option, without which this one has no effect.

    Attributes:
      option: the other option's name.
      values: the values that meet the condition; empty: all but the other's default.
      unless: whether to invert the condition.
      alternative: another condition that suffices; None: none.
    """

    option: str
    values: tuple[Any, ...] = ()
    unless: bool = False
    alternative: OnlyIf | None = None

    def holds(self, value: Any, default: Any) -> bool:
        """Whether the condition holds for the other option's value, given its default."""
        given = value in self.values if self.values else value != default
        return given != self.unless


def _is_address(value: str) -> bool:
    host, _, port = value.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def _ordered(value: tuple[Duration, ...]) -> bool:
    amounts = [at.amount for at in value]
    return len({at.unit for at in value}) <= 1 and amounts == sorted(amounts)


POSITIVE = Check(lambda value: value > 0, "be positive")
ALL_POSITIVE = Check(lambda value: all(entry > 0 for entry in value), "be positive")
LASTS = Check(lambda value: value.amount > 0, "be positive")
NOT_NEGATIVE = Check(lambda value: value >= 0, "not be negative")
BELOW_ONE = Check(lambda value: 0 <= value < 1, "be in [0, 1)")
IMAGE_SIDE = Check(lambda value: 0 < value <= MOST_PIXELS, f"be in [1, {MOST_PIXELS}]")
FRACTION = Check(lambda value: 0 < value <= 1, "be in (0, 1]")
PROBABILITY = Check(lambda value: 0 <= value <= 1, "be in [0, 1]")
IN_ORDER = Check(_ordered, "be in one unit and in order")
ADDRESSES = Check(lambda value: all(map(_is_address, value)), "be host:port, each")


def option(
    default: Any,
    help: str,
    *,
    group: str,
    choices: tuple[str, ...] = (),
    check: Check | None = None,
    only_if: OnlyIf | tuple[OnlyIf, ...] = (),
    may_change_on_resume: bool = False,
    in_files_of_runs: bool = True,
    in_evaluation: bool = False,
) -> Any:
    """Declares a field of :class:`Options`.

    Args:
      default: the default value.
      help: one line for ``--helpfull``.
      group: the heading in ``--helpfull``.
      choices: the allowed values, if they can be listed.
      check: the condition on values; with ``choices``, on others that are allowed, too; None: none.
      only_if: conditions on other options, without all of which only the default is allowed.
      may_change_on_resume: whether it may change when a run resumes, because it does not affect
        the weights.
      in_files_of_runs: whether a run's own file may give it to ``read_config``. Whoever made a run
        must not choose servers, or where this account writes.
      in_evaluation: whether trained weights compute something else with another value, so that
        evaluation and export need the run's.
    """
    metadata = {
        "help": help,
        "group": group,
        "choices": choices,
        "check": check,
        "only_if": (only_if,) if isinstance(only_if, OnlyIf) else only_if,
        "may_change_on_resume": may_change_on_resume,
        "in_files_of_runs": in_files_of_runs,
        "in_evaluation": in_evaluation,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    """A group of options, checked at construction.

    Durations may be given as text (``"90 epochs"``).

    Raises:
      UserError: if an option does not exist, has an invalid value, or options contradict each
        other.
    """

    def __new__(cls: type[_Self], *args: Any, **options: Any) -> _Self:
        """Checks the names, for which Python would raise a TypeError."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            require_option(name, names)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = self.convert(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            _check(field, value)
        self._check_effects()
        self._check_together()

    def _check_effects(self) -> None:
        """Refuses values that have no effect because of another option's value.

        Raises:
          UserError: if such an option does not have its default.
        """
        fields = {field.name: field for field in dataclasses.fields(self)}
        for name, condition in self.without_effect(vars(self)).items():
            other = option_text(getattr(self, condition.option)) or "empty"
            field = fields.get(condition.option)
            choices = field.metadata["choices"] if field else ()
            if not condition.values or condition.unless:
                reason = f"has no effect, because {condition.option} is {other}"
            elif condition.values == choices:
                reason = f"is not for {condition.option}={other}"
            else:
                needed = " or ".join(f"{condition.option}={own}" for own in condition.values)
                reason = f"is for {needed}, but {condition.option} is {other}"
            default = option_text(fields[name].default) or "empty"
            text = option_text(getattr(self, name))
            raise UserError(f"{name}={text} {reason}: leave it out; its default is {default}")

    def _check_together(self) -> None:
        """Checks options against each other. Subclasses extend it.

        Checks that need data or devices belong to the code that has them.
        """

    def replace(self: _Self, **changes: Any) -> _Self:
        """Returns a copy with some options changed.

        Options that no longer have an effect return to their defaults, such as those of LARS with
        ``optimizer="sgd"``.

        Raises:
          UserError: if an option is unknown or its value invalid.
        """
        fields = {field.name: field for field in dataclasses.fields(self)}
        for name in changes:
            require_option(name, fields)
        values = {name: getattr(self, name) for name in fields} | changes
        for name in self.without_effect(values):
            if name not in changes:
                values[name] = fields[name].default
        return type(self)(**values)

    def part(self, kind: type[_Part]) -> _Part:
        """Returns the options of one of the groups that these consist of."""
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})

    @classmethod
    @functools.cache
    def types(cls) -> Mapping[str, Any]:
        """Returns each option's Python type, by name."""
        return typing.get_type_hints(cls)

    @classmethod
    def convert(cls, name: str, value: Any) -> Any:
        """Returns ``value`` converted to an option's type.

        Accepts text for any type, integers for floats, lists for tuples and paths for text.

        Raises:
          UserError: if the value cannot be converted.
        """
        kind = cls.types()[name]
        if typing.get_origin(kind) is not tuple:
            return _convert(name, kind, value)
        if isinstance(value, str):
            value = parse(name, kind, value)
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{name} is {value!r}, but must be a list")
        if len(value) > _MOST_VALUES:
            raise UserError(f"{name} has {len(value):,} values, but may have {_MOST_VALUES:,}")
        item = typing.get_args(kind)[0]
        return tuple(_convert(name, item, entry) for entry in value)

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> dict[str, OnlyIf]:
        """Returns the options with a value other than the default that has no effect.

        Args:
          values: the options' values, by name; missing ones have their defaults.

        Returns:
          The first condition that does not hold, by option name.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}

        def effective(name: str) -> Any:
            default = fields[name].default
            return default if unmet(name) else cls.convert(name, values.get(name, default))

        def holds(condition: OnlyIf) -> bool:
            other = fields.get(condition.option)  # None: the option is in another group
            return (
                not other
                or condition.holds(effective(condition.option), other.default)
                or (condition.alternative is not None and holds(condition.alternative))
            )

        def unmet(name: str) -> OnlyIf | None:
            conditions = fields[name].metadata["only_if"]
            return next((condition for condition in conditions if not holds(condition)), None)

        given = {
            name: unmet(name)
            for name, value in values.items()
            if name in fields and cls.convert(name, value) != fields[name].default
        }
        return {name: condition for name in fields if (condition := given.get(name))}


def require_option(name: str, names: typing.Iterable[str]) -> None:
    """Checks that an option exists.

    Raises:
      UserError: if it does not, with what replaces it if it is gone, or the closest names.
    """
    names = list(names)
    if name not in names:
        if instead := advice(name):
            raise UserError(f"the option {name!r} is gone: {instead}")
        raise UserError(f"there is no option {name!r}{nearest(name, names)}")


def option_text(value: Any) -> str:
    """Returns an option's value as text, in the format of flagfiles."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, tuple):
        return ",".join(option_text(item) for item in value)
    return str(value)


def parse(name: str, kind: Any, text: str) -> Any:
    """Returns the value of an option given as text.

    Args:
      name: the option, for messages.
      kind: the option's type.
      text: the value, in the format of flagfiles.

    Raises:
      UserError: if the text is not a value of that type.
    """
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return tuple(parse(name, item, part) for part in text.split(",") if part.strip())
    text = text.strip()
    if kind is Duration:
        try:
            return Duration.parse(text)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    if kind is bool:
        if text.lower() not in ("true", "false", "t", "f", "1", "0"):
            raise UserError(f"{name} is {text!r}, but must be {_TYPE_TEXTS[bool]}")
        return text.lower() in ("true", "t", "1")
    try:
        value = kind(text)
    except ValueError:
        raise UserError(f"{name} is {text!r}, but must be {_TYPE_TEXTS[kind]}") from None
    return _checked(name, value)


def _check(field: dataclasses.Field, value: Any) -> None:
    choices, check = field.metadata["choices"], field.metadata["check"]
    if check and check.allows(value):
        return
    if choices and value not in choices:
        also = f"; it may also {check.must}" if check else ""
        hint = choices_hint(value, choices)
        raise UserError(f"{field.name}={value!r} does not exist{hint}{also}")
    if check and not choices:
        text = repr(value) if isinstance(value, str) else option_text(value)
        raise UserError(f"{field.name} is {text}, but must {check.must}")


def _convert(name: str, kind: Any, value: Any) -> Any:
    """Returns a single ``value`` converted to ``kind``; numbers may be NumPy's, text a path."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and kind is not str:
        return parse(name, kind, value)
    number = not isinstance(value, bool) and _NUMBERS.get(kind)
    if number and isinstance(value, number):
        return _checked(name, kind(_checked(name, value)))
    if type(value) is not kind:
        raise UserError(f"{name} is {value!r}, but must be {_TYPE_TEXTS[kind]}")
    return _checked(name, value)


def _checked(name: str, value: Any) -> Any:
    """Returns a value that TensorFlow and the file system can take."""
    if isinstance(value, numbers.Integral) and abs(int(value)) >= 2**63:
        raise UserError(f"{name} is a whole number of more than 64 bits: too large")
    if isinstance(value, numbers.Real) and not math.isfinite(value):
        raise UserError(f"{name} is {value}, but must be finite")
    if isinstance(value, str) and "\0" in value:
        raise UserError(f"{name} is {value!r}, but must be text without control characters")
    return value
