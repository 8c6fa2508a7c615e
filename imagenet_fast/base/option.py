"""How an option is declared, checked, read from text and written as text.

A folder's ``options.py`` declares its own options as a frozen dataclass that inherits
:class:`Options`; :class:`~imagenet_fast.config.Config` inherits them all. Nothing here imports
TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError, nearest, require_choice

_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Duration: "a duration, as '90 epochs'",
}
_NUMBERS = {int: numbers.Integral, float: numbers.Real}
_Own = TypeVar("_Own", bound="Options")


class Check(NamedTuple):
    """Which values an option may have.

    Attributes:
      allows: tells whether a value is allowed.
      must: what it asks for, to complete "... must ...".
    """

    allows: Callable[[Any], bool]
    must: str


class Beside(NamedTuple):
    """A condition on another option, without which this one has no effect.

    Attributes:
      option: the other's name.
      values: those that meet the condition; none: all but its default.
      unless: whether the condition is the opposite: any other value, or the default.
    """

    option: str
    values: tuple[Any, ...] = ()
    unless: bool = False

    def holds(self, value: Any, default: Any) -> bool:
        """Returns whether a value of the other option, which has this default, meets it."""
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
    beside: Beside | tuple[Beside, ...] = (),
    free: bool = False,
) -> Any:
    """Declares a field of :class:`Options`.

    Args:
      default: its value where none is given.
      help: one line for ``--helpfull``.
      group: the heading in ``--helpfull`` under which it stands.
      choices: the values allowed, if they can be listed.
      check: which values are allowed; None: all.
      beside: unless all of these hold, a value other than the default is refused.
      free: whether it may change when a run is resumed, because it has no part in the weights.
    """
    metadata = {
        "help": help,
        "group": group,
        "choices": choices,
        "check": check,
        "beside": (beside,) if isinstance(beside, Beside) else beside,
        "free": free,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    """A group of options, checked when it is made.

    Durations may be given as text (``"90 epochs"``).

    Raises:
      UserError: if an option has a value that it cannot have, or contradicts another one.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = self.convert(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            _check(field, value)
        self._check_effects()
        self._check_together()

    def _check_effects(self) -> None:
        """Refuses options that nothing would read, because of another one's value.

        Raises:
          UserError: if one has another value than its default.
        """
        fields = {field.name: field for field in dataclasses.fields(self)}
        for name, beside in self.without_effect(vars(self)).items():
            other = option_text(getattr(self, beside.option))
            if not beside.values:
                reason = f"has no effect, because {beside.option} is {other}"
            elif beside.unless:
                reason = f"is not for {beside.option}={other}"
            else:
                needed = " or ".join(f"{beside.option}={own}" for own in beside.values)
                reason = f"is for {needed}, but {beside.option} is {other}"
            default = option_text(fields[name].default) or "empty"
            text = option_text(getattr(self, name))
            raise UserError(f"{name}={text} {reason}: leave it out; its default is {default}")

    def _check_together(self) -> None:
        """Checks options against each other; what needs data or devices is checked by their users.

        A group that has such checks adds them to those of ``super()``.
        """

    def replace(self: _Own, **changes: Any) -> _Own:
        """Returns a copy with other values for some options.

        What is left without effect by these goes back to its default: with ``optimizer="sgd"`` the
        options of LARS do.

        Raises:
          UserError: if there is no such option, or its value cannot be used.
        """
        fields = {field.name: field for field in dataclasses.fields(self)}
        for name in changes:
            require_option(name, fields)
        values = {name: getattr(self, name) for name in fields} | changes
        for name in self.without_effect(values):
            if name not in changes:
                values[name] = fields[name].default
        return type(self)(**values)

    @classmethod
    @functools.cache
    def types(cls) -> Mapping[str, Any]:
        """Returns the Python type of each option, by name."""
        return typing.get_type_hints(cls)

    @classmethod
    def convert(cls, name: str, value: Any) -> Any:
        """Returns ``value`` as the type of an option.

        Text stands for any type, a whole number for a float, a list for a tuple.

        Raises:
          UserError: if it is of another type.
        """
        kind = cls.types()[name]
        if typing.get_origin(kind) is not tuple:
            return _convert(name, kind, value)
        if isinstance(value, str):
            return parse(name, kind, value)
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{name} is {value!r}, but must be a list")
        item = typing.get_args(kind)[0]
        return tuple(_convert(name, item, entry) for entry in value)

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> dict[str, Beside]:
        """Returns the options whose values, not their defaults, nothing reads, and why.

        Args:
          values: of options, by name; those left out have their defaults.

        Returns:
          By name, the first condition that does not hold.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}

        def effective(name: str) -> Any:
            default = fields[name].default
            return default if unmet(name) else cls.convert(name, values.get(name, default))

        def unmet(name: str) -> Beside | None:
            for beside in fields[name].metadata["beside"]:
                other = fields.get(beside.option)  # None: of a group that is not in use
                if other and not beside.holds(effective(beside.option), other.default):
                    return beside
            return None

        given = {
            name: unmet(name)
            for name, value in values.items()
            if name in fields and cls.convert(name, value) != fields[name].default
        }
        return {name: beside for name in fields if (beside := given.get(name))}


def require_option(name: str, names: typing.Iterable[str]) -> None:
    """Checks that an option is one of those that there are.

    Raises:
      UserError: if it is not, with the nearest of them.
    """
    names = list(names)
    if name not in names:
        raise UserError(f"there is no option {name!r}{nearest(name, names)}")


def option_text(value: Any) -> str:
    """Returns an option's value as it is written in a flagfile."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, tuple):
        return ",".join(option_text(item) for item in value)
    return str(value)


def parse(name: str, kind: Any, text: str) -> Any:
    """Returns the value that ``text`` stands for.

    Args:
      name: of the option, for messages.
      kind: its type.
      text: as in a flagfile.

    Raises:
      UserError: if it is no value of that type.
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
        if text.lower() not in ("true", "false", "1", "0"):
            raise UserError(f"{name} is {text!r}, but must be {_KINDS[bool]}")
        return text.lower() in ("true", "1")
    try:
        value = kind(text)
    except ValueError:
        raise UserError(f"{name} is {text!r}, but must be {_KINDS[kind]}") from None
    return _finite(name, value) if kind is float else value


def _check(field: dataclasses.Field, value: Any) -> None:
    choices, check = field.metadata["choices"], field.metadata["check"]
    if choices:
        require_choice(field.name, value, choices)
    if check and not check.allows(value):
        raise UserError(f"{field.name} is {option_text(value)}, but must {check.must}")


def _convert(name: str, kind: Any, value: Any) -> Any:
    """Returns ``value`` as ``kind``, if it is that, text for it, or a whole number for a float.

    Numbers may be NumPy's.
    """
    if isinstance(value, str) and kind is not str:
        return parse(name, kind, value)
    number = not isinstance(value, bool) and _NUMBERS.get(kind)
    if number and isinstance(value, number):
        return _finite(name, kind(value))
    if type(value) is not kind:
        raise UserError(f"{name} is {value!r}, but must be {_KINDS[kind]}")
    return value


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise UserError(f"{name} is {value}, but must be finite")
    return value
