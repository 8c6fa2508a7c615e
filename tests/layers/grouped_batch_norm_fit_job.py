"""A user's own Keras model under fit, on the strategy that the arguments name.

Arguments: ``strategy``, ``logical_cpus``, the path of an .npz file, and a folder for the model,
both written by the chief.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast import Config, make_strategy
from imagenet_fast.distribute.exchange import wait_for_all
from imagenet_fast.distribute.workers import is_chief
from imagenet_fast.layers import GroupedBatchNormalization

BATCH = 24
STEPS = 5


def arrays():
    """Returns inputs [examples, 6] and targets [examples, 1]."""
    generator = np.random.default_rng(1)
    inputs = generator.normal(1, 2, size=(BATCH * STEPS, 6)).astype("float32")
    return inputs, (inputs[:, :1] * inputs[:, 1:2]).astype("float32")


def build(norm):
    """Returns a compiled model with two layers that ``norm`` makes."""
    keras.utils.set_random_seed(2)
    layers = [keras.layers.Dense(8, use_bias=False), norm(), keras.layers.ReLU()]
    layers += [keras.layers.Dense(8, use_bias=False), norm(), keras.layers.ReLU()]
    layers += [keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def dataset():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH).with_options(options)


def main():
    kind, logical_cpus, out, path = sys.argv[1:]
    strategy = make_strategy(
        Config(strategy=kind, logical_cpus=int(logical_cpus), batch_size=BATCH)
    )
    with strategy.scope():
        model = build(GroupedBatchNormalization)
    model.fit(dataset(), epochs=2, verbose=0)
    loss = model.evaluate(dataset(), verbose=0)
    # All workers save, since they read variables together; each to a place of its own.
    model.save(path if is_chief(strategy) else f"{path}.other.keras")
    weights = [variable.numpy() for variable in model.weights]
    if is_chief(strategy):
        np.savez(out, *weights, loss=loss)
    wait_for_all(strategy)


if __name__ == "__main__":
    main()
