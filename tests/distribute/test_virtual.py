"""Programs of TPUs and GPUs that are not there, as XLA gets them."""

import contextlib
import re

import pytest
import tensorflow as tf

from imagenet_fast import Config, UserError, build_model
from imagenet_fast.distribute.group_sum import group_sum
from imagenet_fast.distribute.groups import columns, consecutive
from imagenet_fast.distribute.strategy import tpu_coordinates
from imagenet_fast.distribute.tpu import compiles_all_reduces, is_tpu
from imagenet_fast.distribute.virtual import VirtualGPUStrategy, VirtualTPUStrategy

# Those that make a sum of XLA's.
sums = pytest.mark.skipif(
    tf.__version__.startswith("2.15."), reason="TensorFlow 2.15 has no kernel for XlaAllReduce"
)
PLACES = [(x, y, 0, core) for y in range(2) for x in range(2) for core in range(2)]


def lowered(own, replicas=8):
    """Returns the HLO of what a replica makes of two numbers, and the groups of its sums."""
    strategy = VirtualTPUStrategy(PLACES[:replicas])

    @tf.function(jit_compile=True, autograph=False)
    def program(numbers):
        return strategy.run(own, args=(numbers,))

    with tf.device("CPU:0"):
        text = program.experimental_get_compiler_ir(tf.TensorSpec([2]))(stage="hlo")
    return text, re.findall(r" all-reduce\(.*?replica_groups=\{([{}\d,]*)\}", text)


def context():
    return tf.distribute.get_replica_context()


def test_it_stands_for_a_tpu():
    strategy = VirtualTPUStrategy(PLACES)
    assert strategy.device_type == "TPU"
    assert is_tpu(strategy) and compiles_all_reduces(strategy)
    assert strategy.num_replicas_in_sync == 8
    assert tpu_coordinates(strategy) == PLACES
    real = object.__new__(tf.distribute.TPUStrategy)
    assert is_tpu(real) and compiles_all_reduces(real)


def test_it_stands_for_gpus():
    strategy = VirtualGPUStrategy([(gpu, host) for host in range(2) for gpu in range(4)])
    assert strategy.device_type == "GPU"
    assert compiles_all_reduces(strategy) and not is_tpu(strategy)
    assert strategy.num_replicas_in_sync == 8


def test_other_strategies():
    for strategy in (tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy("CPU:0")):
        assert not is_tpu(strategy) and not compiles_all_reduces(strategy)


def test_losses_can_be_scaled_on_gpus_alone():
    for kind, wanted in ((VirtualGPUStrategy, True), (VirtualTPUStrategy, False)):
        strategy = kind(PLACES)
        config = Config(precision="mixed_float16", synthetic=True, num_classes=2, model="resnet8")
        config = config.replace(image_size=16, batch_size=8)
        with contextlib.nullcontext() if wanted else pytest.raises(UserError, match="float16"):
            build_model(config, strategy)


def test_a_replica_finds_out_at_run_time_which_one_it_is():
    def own(numbers):
        return numbers * tf.cast(context().replica_id_in_sync_group, tf.float32)

    assert " replica-id()" in lowered(own)[0]


@sums
@pytest.mark.parametrize("reduce_op", ["SUM", "MEAN"])
def test_sums_over_all(reduce_op):
    text, groups = lowered(lambda numbers: context().all_reduce(reduce_op, [numbers, numbers[0]]))
    assert groups == ["{0,1,2,3,4,5,6,7}"] * 2
    assert (" divide(" in text) == (reduce_op == "MEAN")


@sums
@pytest.mark.parametrize(
    ("groups", "told"),
    [
        (consecutive(8, 2), "{0,1},{2,3},{4,5},{6,7}"),
        (columns(consecutive(8, 4)), "{0,4},{1,5},{2,6},{3,7}"),
    ],
)
def test_sums_over_groups_forward_and_backward(groups, told):
    def own(numbers):
        with tf.GradientTape() as tape:
            tape.watch(numbers)
            total = tf.square(group_sum(numbers, groups, "test"))
        return tape.gradient(total, numbers)

    assert lowered(own)[1] == [told] * 2


def test_variables_are_plain_ones_of_each_replica():
    with VirtualTPUStrategy(PLACES).scope():
        variables = [
            tf.Variable(1.0),
            tf.Variable(
                1.0,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.MEAN,
            ),
        ]
    for variable in variables:
        assert variable.numpy() == 1
        assert not hasattr(variable, "values")
