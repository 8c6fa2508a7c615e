"""Pickled dictionaries of lists, text and arrays of integers, read without running any code.

Python's own ``pickle`` calls what a file names. Even with just NumPy's functions for arrays, a file
can make an array of objects over bytes of its choice. Here the few opcodes that such dictionaries
need build plain values, and an array is made once its dtype, shape and bytes are known to match.
"""

from __future__ import annotations

import dataclasses
import math
import pickletools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

# A batch of CIFAR-100 has 200,000; each can take some hundred bytes of memory.
_MAX_OPCODES = 500_000
_INTEGERS = re.compile(r"[ui][1248]")
_BYTE_ORDERS = ("|", "<", ">", "=")
# In NumPy's private modules, which have other names in each of its versions.
_FUNCTIONS = ("_reconstruct", "_frombuffer", "ndarray", "dtype")
_MAX_DIMENSIONS = 4
_SHOWN = 100  # characters of a name in a message

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_IGNORED = ("PROTO", "FRAME")
_NUMBERS = ("INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2")
_TEXT = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_BYTES = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8")
_STRINGS = ("STRING", "BINSTRING", "SHORT_BINSTRING")  # of Python 2
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_GETS = ("GET", "BINGET", "LONG_BINGET")


@dataclasses.dataclass(eq=False)
class _Global:
    """A function or class that the pickle names, which is never imported."""

    name: str


@dataclasses.dataclass(eq=False)
class _Dtype:
    """A dtype of integers, such as ``u1``, whose byte order may follow."""

    code: str
    order: str = "|"


@dataclasses.dataclass(eq=False)
class _Array:
    """An array, whose content may follow."""

    content: np.ndarray | None = None


def read_numeric_pickle(data: bytes) -> dict[str, Any]:
    """Returns a pickled dictionary.

    Args:
      data: its pickle in any of the protocols 0 to 5, by Python 2 or 3 and any version of NumPy.

    Returns:
      By key: an integer array, int, bool, None, str, bytes (also of Python 2's strings), or a dict,
      list or tuple of such values without arrays in it.

    Raises:
      ValueError: it is another value, refers to anything else, or is damaged or too long.
    """
    try:
        values = _Machine().run(data)
        if not isinstance(values, dict):
            raise ValueError(f"it holds {type(values).__name__}, not a dictionary")
        return {_text(key): _finished(value) for key, value in values.items()}
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"it is damaged: {error!r}") from error


def _finished(value: Any) -> Any:
    if isinstance(value, _Array):
        if value.content is None:
            raise ValueError("it has an array without content")
        return value.content
    return value


class _Machine:
    """The stack and the memo of a pickle that is being read."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """Returns the value of a pickle."""
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number == _MAX_OPCODES:
                raise ValueError(f"it has more than {_MAX_OPCODES:,} parts")
            if opcode.name == "STOP":
                return self._stack.pop()
            if opcode.name not in _IGNORED:
                self._step(opcode.name, argument)
        raise ValueError("it is incomplete")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _NUMBERS or name in _TEXT or name in _BYTES:
            stack.append(argument)
        elif name in _STRINGS:
            stack.append(argument.encode("latin-1"))
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _PUTS:
            self._memo[len(self._memo) if argument is None else argument] = stack[-1]
        elif name in _GETS:
            stack.append(self._memo[argument])
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in _TUPLES:
            stack.append(tuple(self._pop(_TUPLES[name])))
        elif name in ("TUPLE", "LIST"):
            stack.append((tuple if name == "TUPLE" else list)(self._pop_to_mark()))
        elif name == "DICT":
            stack.append(_set_items({}, self._pop_to_mark()))
        elif name in ("APPEND", "APPENDS"):
            items = self._pop_to_mark() if name == "APPENDS" else self._pop(1)
            _of(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop_to_mark() if name == "SETITEMS" else self._pop(2)
            _set_items(stack[-1], items)
        elif name == "GLOBAL":
            stack.append(_global(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack.append(_global(*map(_text, self._pop(2))))
        elif name == "REDUCE":
            function, arguments = self._pop(2)
            stack.append(_call(_of(_Global, function).name, _of(tuple, arguments)))
        elif name == "BUILD":
            (state,) = self._pop(1)
            _build(stack[-1], _of(tuple, state))
        else:
            raise ValueError(f"it has the opcode {name}, which arrays of numbers do not need")

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise ValueError("it is damaged: its stack is empty")
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def _pop_to_mark(self) -> list[Any]:
        values = self._stack[self._marks.pop() :]
        del self._stack[len(self._stack) - len(values) :]
        return values


def _of(kind: type, value: Any) -> Any:
    # Not a subclass, as bool is of int.
    if type(value) is not kind:
        raise ValueError(f"it has {type(value).__name__} in place of {kind.__name__}")
    return value


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else _of(str, value)


def _set_items(target: Any, items: Sequence[Any]) -> dict[Any, Any]:
    values = _of(dict, target)
    for key, value in zip(items[::2], items[1::2]):
        # Only text: to hash a deeply nested tuple would overflow the stack.
        values[key if type(key) is str else _of(bytes, key)] = value
    return values


def _global(module: str, name: str) -> _Global:
    if module.split(".")[0] == "numpy" and name in _FUNCTIONS:
        return _Global(name)
    shown = f"{module}.{name}"[:_SHOWN]
    raise ValueError(f"it refers to {shown}, which arrays of numbers do not need")


def _call(name: str, arguments: tuple[Any, ...]) -> Any:
    """Returns what a call of one of the functions in a pickle stands for."""
    if name == "_reconstruct":
        kind, shape, _ = arguments
        if _of(_Global, kind).name == "ndarray" and shape == (0,):
            return _Array()
    elif name == "dtype":
        code = _text(arguments[0])
        if _INTEGERS.fullmatch(code):
            return _Dtype(code)
        raise ValueError(f"it has an array of the dtype {code[:_SHOWN]!r}, not of integers")
    elif name == "_frombuffer":
        content, dtype, shape, order = arguments
        if order in ("C", "F"):
            return _Array(_array(content, dtype, shape, order == "F"))
    raise ValueError(f"it calls {name} in another way than NumPy's arrays")


def _build(target: Any, state: tuple[Any, ...]) -> None:
    """Completes a dtype or an array."""
    if isinstance(target, _Dtype):
        order, details = _text(state[1]), state[2:5]
        if order not in _BYTE_ORDERS or details != (None, None, None):
            raise ValueError("it has an array of another dtype than integers")
        target.order = order
    else:
        _, shape, dtype, is_fortran, content = state
        _of(_Array, target).content = _array(content, dtype, shape, is_fortran)


def _array(content: Any, dtype: Any, shape: Any, is_fortran: bool) -> np.ndarray:
    if not isinstance(content, (bytes, bytearray)):
        raise ValueError("it has an array without bytes")
    kind = np.dtype(_of(_Dtype, dtype).order + dtype.code)
    sizes = [_of(int, size) for size in _of(tuple, shape)[: _MAX_DIMENSIONS + 1]]
    if (
        len(sizes) > _MAX_DIMENSIONS
        or not all(0 <= size <= len(content) for size in sizes)
        or math.prod(sizes) * kind.itemsize != len(content)
    ):
        raise ValueError(f"it has an array of another size than its {len(content):,} bytes")
    return np.frombuffer(content, kind).reshape(sizes, order="F" if is_fortran else "C")
