"""Parsing of TensorFlow's HLO modules."""

import pytest
import tensorflow as tf

from imagenet_fast.distribute.groups import columns, consecutive
from imagenet_fast.distribute.virtual import xla_sum
from imagenet_fast.lab.xla_compile.module import Array, Instruction, Module, read_module

ROWS = consecutive(8, 4)


def module_of(function, *specs):
    compiled = tf.function(function, jit_compile=True, autograph=False)
    with tf.device("CPU:0"):
        return read_module(compiled.experimental_get_compiler_ir(*specs)(stage="hlo_serialized"))


def test_types_and_shapes():
    def products(images, matrix):
        return tf.cast(tf.cast(images, tf.bfloat16) @ matrix, tf.float32), tf.shape(images)[0]

    module = module_of(
        products, tf.TensorSpec([2, 3], tf.uint8), tf.TensorSpec([3, 5], tf.bfloat16)
    )
    assert module.parameters == (Array("u8", (2, 3)), Array("bf16", (3, 5)))
    assert module.results == (Array("f32", (2, 5)), Array("s32", ()))
    (dot,) = module.of("dot")
    assert dot.operands == (Array("bf16", (2, 3)), Array("bf16", (3, 5)))
    assert dot.arrays == (Array("bf16", (2, 5)),)
    assert dot.arrays[0].elements == 10
    assert dot.source == "matmul"
    assert not any(own.is_dynamic for own in module.instructions)


def test_shapes_that_are_bounds():
    module = module_of(lambda numbers: tf.boolean_mask(numbers, numbers > 0), tf.TensorSpec([9]))
    assert any(own.is_dynamic for own in module.instructions)


def test_sums_and_what_they_go_on_with():
    def sums(numbers):
        first = xla_sum(numbers, ROWS)
        second = xla_sum(tf.reshape(tf.cast(first, tf.bfloat16), [3, 2]), columns(ROWS))
        return second, xla_sum(2 * numbers, ROWS)

    one, two, other = module_of(sums, tf.TensorSpec([6])).of("all-reduce")
    assert one.groups == other.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert two.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert (one.before, two.before, other.before) == ((), one.groups, ())
    assert two.arrays == (Array("bf16", (3, 2)),)


def test_variables_that_results_take_the_place_of():
    read, changed = tf.Variable(tf.zeros([2])), tf.Variable(tf.zeros([3]))

    def change(numbers):
        changed.assign_add(numbers)
        return tf.reduce_sum(read)

    module = module_of(change, tf.TensorSpec([3]))
    ((result, parameter),) = module.updates.items()
    assert module.results[result] == module.parameters[parameter] == Array("f32", (3,))


@pytest.mark.parametrize(
    ("message", "sources"),
    [
        ("only 4: %sum.1 = f32[8]{0} all-reduce(%x)", ["norm/XlaAllReduce"]),
        ("Custom emitter for Nobody not found", ["spy/XlaCustomCall"]),
        ("Unexpected operand type for FFT: c128[8]{0}", ["wave/FFT"]),
        ("out of luck", []),
    ],
)
def test_what_a_message_is_about(message, sources):
    array = (Array("f32", (8,)),)
    instructions = (
        Instruction("sum.1", "all-reduce", array, (), "norm/XlaAllReduce"),
        Instruction("sum.2", "all-reduce", array, (), "other/XlaAllReduce"),
        Instruction("call.3", "custom-call", array, (), "spy/XlaCustomCall", target="Nobody"),
        Instruction("wave.4", "fft", array, (), "wave/FFT"),
    )
    assert Module(instructions, (), (), {}).sources_in(message) == sources


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"batch_norm_batch_size": 16}, marks=pytest.mark.long)]
)
def test_parameters_are_the_arguments(lowered, options):
    step = lowered(**options).step
    assert len(step.arguments) == len(step.module.parameters)
    assert step.arguments[:3] == ("images", "labels", "weights")
    for own, array in zip(step.arguments[3:], step.module.parameters[3:]):
        assert tuple(own.shape) == array.shape
