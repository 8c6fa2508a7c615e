"""What the moving average of weights and lookahead share."""

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import UserError
from imagenet_fast.optimizers import Lookahead, WeightAverage


@pytest.mark.parametrize(
    ("decay", "every", "message"),
    [
        (1.0, 5, "decay is 1.0, but must be at least 0 and below 1"),
        (-0.1, 5, "decay is -0.1"),
        (0.9, 0, "every is 0, but must be a positive number of steps"),
    ],
)
def test_bad_options(decay, every, message):
    variables = [tf.Variable(1.0)]
    with pytest.raises(UserError, match=message):
        WeightAverage(variables, decay, every)
    with pytest.raises(UserError, match=message):
        Lookahead(variables, decay, every, total_steps=10)


@pytest.mark.parametrize(
    "make",
    [
        lambda variables: WeightAverage(variables, 0.9),
        lambda variables: WeightAverage(variables, 0.9, every=3),
        lambda variables: Lookahead(variables, 0.9, every=3, total_steps=8),
    ],
    ids=["each step", "each third", "lookahead"],
)
def test_in_one_program_of_xla(make):
    generator = np.random.default_rng(0)
    start, *moves = (generator.normal(size=(9, 4)).astype("float32") for _ in range(9))

    def run(jit_compile):
        variable = tf.Variable(start)
        slow = make([variable])

        @tf.function(jit_compile=jit_compile)
        def train_step(step, move):
            variable.assign_add(move)
            slow.update(step)

        for step, move in enumerate(moves, start=1):
            train_step(tf.constant(step, tf.int64), move)
        return variable.numpy(), slow.averages[0].numpy()

    found, expected = run(True), run(False)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert np.abs(expected[1] - start).max() > 0.1


ON_TWO_DEVICES = """
import numpy as np, tensorflow as tf, keras
from imagenet_fast import Config, make_strategy
from imagenet_fast.base.keras_2 import tensorflow_variables
from imagenet_fast.layers import BatchNormalization
from imagenet_fast.optimizers import SGD, Lookahead, WeightAverage

strategy = make_strategy(Config(strategy="mirrored", logical_cpus=2, batch_size=2))
with strategy.scope():
    dense = keras.layers.Dense(2, use_bias=False)
    dense.build([None, 3])
    norm = BatchNormalization()
    norm.build([None, 2])
    optimizer = SGD(0.5, momentum=0.0)
    optimizer.build([dense.kernel])
    variables = tensorflow_variables([dense.kernel, norm.moving_mean])
    average = WeightAverage(variables, 0.9, every=2)
    lookahead = Lookahead(variables, 0.9, every=3, total_steps=8)

def own_step(gradient):
    # The weights are the replicas' together, the moving average is each one's own.
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    share = (tf.cast(replica, tf.float32) + 1) / 3
    optimizer.apply_gradients([(share * gradient, dense.kernel)])
    norm.moving_mean.assign_add([1.0, 2.0 + tf.cast(replica, tf.float32)])
    average.update(tf.convert_to_tensor(optimizer.iterations) - 1)
    lookahead.update(tf.convert_to_tensor(optimizer.iterations))

step = tf.function(lambda gradient: strategy.run(own_step, args=(gradient,)))
fast = [[dense.kernel.numpy(), np.zeros(2)] for _ in range(2)]
slow, mean = [list(values) for values in fast], [list(values) for values in fast]
for t in range(1, 9):
    gradient = np.random.default_rng(t).normal(size=(3, 2)).astype("float32")
    step(tf.constant(gradient))
    for replica in range(2):
        fast[replica][0] = fast[replica][0] - 0.5 * gradient
        fast[replica][1] = fast[replica][1] + [1.0, 2.0 + replica]
        for i in range(2):
            if (t - 1) % 2 == 0:
                mean[replica][i] = 0.81 * mean[replica][i] + 0.19 * fast[replica][i]
            if t % 3 == 0:
                keep = 0.9**3 * (t / 8) ** 3
                slow[replica][i] = keep * slow[replica][i] + (1 - keep) * fast[replica][i]
                fast[replica][i] = slow[replica][i]
            if t == 8:
                fast[replica][i] = slow[replica][i]
            for found, expected in (
                (variables[i], fast), (lookahead.averages[i], slow), (average.averages[i], mean)
            ):
                np.testing.assert_allclose(
                    found.values[replica].numpy(), expected[replica][i], rtol=1e-5, atol=1e-5)
"""


def test_two_devices(run_python):
    run_python(["-c", ON_TWO_DEVICES])
