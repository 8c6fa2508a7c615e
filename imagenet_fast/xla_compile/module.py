"""What an HLO module, as TensorFlow makes it of a function, is made of."""

from __future__ import annotations

from typing import Any, NamedTuple

from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2

Groups = tuple[tuple[int, ...], ...]

# Operations whose shapes are known only when the program runs.
_DYNAMIC = ("set-dimension-size", "get-dimension-size", "dynamic-reshape")
# Around the names in messages.
_MARKS = "%'\".,:;()"
_MOST_SOURCES = 3
# What hands a tensor on, perhaps as another type or in another form.
_PASSING = ("bitcast", "convert", "copy", "reshape")
# The second is what compilers for GPUs make of the first: another instruction waits for its end.
ALL_REDUCES = ("all-reduce", "all-reduce-start")


class Array(NamedTuple):
    """The type of an array.

    Attributes:
      dtype: as XLA writes it: ``f32``, ``bf16``, ``s64``, ``u8``, ``pred``, ...
      shape: its dimensions.
      dynamic: whether one of them is only a bound.
    """

    dtype: str
    shape: tuple[int, ...]
    dynamic: bool = False

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class Instruction(NamedTuple):
    """One instruction of a module.

    Attributes:
      name: its own, in the module.
      opcode: as ``convolution``.
      arrays: what it returns: one array, or those of a tuple.
      operands: what it takes, likewise.
      source: the operation of TensorFlow's that it is a part of, behind its layer's name.
      groups: of replicas, of an all-reduce; none: all in one, or no all-reduce.
      before: the groups of the sum that an ``all-reduce`` goes on with, if its operand is one.
      target: what a ``custom-call`` calls.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[Array, ...]
    source: str = ""
    groups: Groups = ()
    before: Groups = ()
    target: str = ""

    @property
    def is_dynamic(self) -> bool:
        """Whether the shape of what it returns may change from run to run."""
        return self.opcode in _DYNAMIC or any(array.dynamic for array in self.arrays)


class Module(NamedTuple):
    """A program, the same for all replicas.

    Attributes:
      instructions: all of them, of all its computations.
      parameters: what it takes.
      results: what it returns.
      updates: for results that take the place of a parameter, as those of variables do, by their
        number: that parameter's.
    """

    instructions: tuple[Instruction, ...]
    parameters: tuple[Array, ...]
    results: tuple[Array, ...]
    updates: dict[int, int]

    def of(self, *opcodes: str) -> list[Instruction]:
        """Returns the instructions of these kinds."""
        return [own for own in self.instructions if own.opcode in opcodes]

    def sources_in(self, message: str) -> list[str]:
        """Returns the sources of the instructions that a compiler's message is about, if it is."""
        words = {word.strip(_MARKS) for word in message.split()}
        known = [own for own in self.instructions if own.source]
        # From the most telling to the least; opcodes, many of which are words, as messages have
        # them: in capitals.
        found = (
            [own.source for own in known if own.name in words]
            or [own.source for own in known if own.target in words]
            or [own.source for own in known if own.opcode.upper() in words]
        )
        return found[:_MOST_SOURCES]


def read_module(serialized: bytes) -> Module:
    """Returns what is in a serialized ``HloModuleProto``."""
    proto = hlo_pb2.HloModuleProto.FromString(serialized)
    instructions = []
    for computation in proto.computations:
        by_number = {own.id: own for own in computation.instructions}
        instructions += [_instruction(own, by_number) for own in computation.instructions]
    program = proto.host_program_shape
    return Module(
        tuple(instructions),
        tuple(array for shape in program.parameters for array in _arrays(shape)),
        _arrays(program.result),
        {
            (entry.output_shape_index[0] if entry.output_shape_index else 0): entry.parameter_number
            for entry in proto.input_output_alias.entries
        },
    )


def _instruction(own: Any, by_number: dict[int, Any]) -> Instruction:
    operands = [by_number[number] for number in own.operand_ids]
    is_sum = own.opcode in ALL_REDUCES
    return Instruction(
        own.name,
        own.opcode,
        _arrays(own.shape),
        tuple(array for operand in operands for array in _arrays(operand.shape)),
        own.metadata.op_name,
        _groups(own) if is_sum else (),
        _sum_before(operands[0], by_number) if is_sum else (),
        own.custom_call_target,
    )


def _sum_before(operand: Any, by_number: dict[int, Any]) -> Groups:
    """Returns the groups of the sum that an operand is, or that it is a form of."""
    while operand.opcode in _PASSING:
        operand = by_number[operand.operand_ids[0]]
    return _groups(operand) if operand.opcode in ALL_REDUCES else ()


def _groups(own: Any) -> Groups:
    """Returns the groups of replicas of a sum."""
    # Newer versions of TensorFlow have them one level deeper.
    listed = own.replica_groups or getattr(own, "collective_device_list", own).replica_groups
    return tuple(tuple(group.replica_ids) for group in listed)


def _arrays(shape: Any) -> tuple[Array, ...]:
    kind = xla_data_pb2.PrimitiveType.Name(shape.element_type).lower()
    if kind == "tuple":
        return tuple(array for part in shape.tuple_shapes for array in _arrays(part))
    if kind in ("token", "opaque_type"):
        return ()
    return (Array(kind, tuple(shape.dimensions), any(shape.is_dynamic_dimension)),)
