"""The contents of HLO modules: instructions, parameters and results."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2

Groups = tuple[tuple[int, ...], ...]

# Operations whose shapes are known only at run time, besides those with a dynamic result.
_DYNAMIC = ("get-dimension-size", "dynamic-reshape")
# Punctuation around names in messages.
_PUNCTUATION = "%'\".,:;()"
_MAX_SOURCES = 3
# Operations that only change a tensor's type, layout or shape.
_PASSING = ("bitcast", "convert", "copy", "reshape")
# GPU compilers use the asynchronous form, for whose end another instruction waits.
ALL_REDUCES = ("all-reduce", "all-reduce-start")


class Array(NamedTuple):
    """The type of an array.

    Attributes:
      dtype: as XLA writes it: ``f32``, ``bf16``, ``s64``, ``u8``, ``pred``, ...
      shape: its dimensions.
      dynamic: whether a dimension is only an upper bound.
    """

    dtype: str
    shape: tuple[int, ...]
    dynamic: bool = False

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class Instruction(NamedTuple):
    """One instruction of a module.

    Attributes:
      name: unique in the module.
      opcode: such as ``convolution``.
      arrays: the result: one array, or those of a tuple.
      operands: the arrays of all operands.
      source: name of the TensorFlow operation that it belongs to, including the layer's name.
      groups: of replicas in an all-reduce; empty: all replicas, or not an all-reduce.
      before: the groups of the all-reduce that is an all-reduce's operand, if there is one.
      target: of a ``custom-call``.
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
        """Whether the result's shape is known only at run time."""
        return self.opcode in _DYNAMIC or any(array.dynamic for array in self.arrays)


class Module(NamedTuple):
    """A program that all replicas run.

    Attributes:
      instructions: of all its computations.
      parameters: their arrays.
      results: their arrays.
      updates: maps results that replace a parameter, such as a variable's new value, to that
        parameter, both by number.
    """

    instructions: tuple[Instruction, ...]
    parameters: tuple[Array, ...]
    results: tuple[Array, ...]
    updates: dict[int, int]

    def of(self, *opcodes: str) -> list[Instruction]:
        """Returns the instructions with these opcodes."""
        return [instruction for instruction in self.instructions if instruction.opcode in opcodes]

    def sources_in(self, message: str) -> list[str]:
        """Returns the sources of the instructions that a compiler's message mentions."""
        words = {word.strip(_PUNCTUATION) for word in message.split()}
        known = [instruction for instruction in self.instructions if instruction.source]
        # From the most to the least specific. Messages write opcodes in capitals, which tells them
        # from ordinary words.
        sources = (
            [instruction.source for instruction in known if instruction.name in words]
            or [instruction.source for instruction in known if instruction.target in words]
            or [instruction.source for instruction in known if instruction.opcode.upper() in words]
        )
        return sources[:_MAX_SOURCES]


def read_module(serialized: bytes) -> Module:
    """Parses a serialized ``HloModuleProto``."""
    proto = hlo_pb2.HloModuleProto.FromString(serialized)
    instructions = []
    for computation in proto.computations:
        by_number = {proto.id: proto for proto in computation.instructions}
        instructions += [_instruction(proto, by_number) for proto in computation.instructions]
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


def _instruction(proto: Any, by_number: dict[int, Any]) -> Instruction:
    operands = [by_number[number] for number in proto.operand_ids]
    is_all_reduce = proto.opcode in ALL_REDUCES
    return Instruction(
        proto.name,
        proto.opcode,
        _arrays(proto.shape),
        tuple(array for operand in operands for array in _arrays(operand.shape)),
        proto.metadata.op_name,
        _groups(proto) if is_all_reduce else (),
        _groups_before(operands[0], by_number) if is_all_reduce else (),
        proto.custom_call_target,
    )


def _groups_before(operand: Any, by_number: dict[int, Any]) -> Groups:
    """Returns the groups of the all-reduce whose result an operand is, if it is one."""
    while operand.opcode in _PASSING:
        operand = by_number[operand.operand_ids[0]]
    return _groups(operand) if operand.opcode in ALL_REDUCES else ()


def _groups(proto: Any) -> Groups:
    """Returns the groups of replicas of an all-reduce."""
    # Newer versions of TensorFlow nest them one level deeper.
    listed = proto.replica_groups or getattr(proto, "collective_device_list", proto).replica_groups
    return tuple(tuple(group.replica_ids) for group in listed)


def _arrays(shape: Any) -> tuple[Array, ...]:
    kind = xla_data_pb2.PrimitiveType.Name(shape.element_type).lower()
    if kind == "tuple":
        return tuple(array for part in shape.tuple_shapes for array in _arrays(part))
    if kind in ("token", "opaque_type"):
        return ()
    return (Array(kind, tuple(shape.dimensions), any(shape.is_dynamic_dimension)),)
