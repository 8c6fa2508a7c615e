"""What two steps do with and without rematerialization.

Arguments: options of Config, as JSON.
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast import Config, build_model
from imagenet_fast.training.step.replicated_model import states_in

BATCH = 8


def regularized(num_classes, image_shape):
    """With additions to the loss in each block."""
    return network(num_classes, image_shape, 0.01)


def network(num_classes, image_shape, penalty=0.0):
    """Blocks with all that a second forward pass may do twice, and a model inside."""
    x = images = keras.Input(image_shape)
    x = keras.layers.Conv2D(4, 3, padding="same", trainable=False)(x)
    regularizer = keras.regularizers.L2(penalty) if penalty else None
    for filters in (4, 4, 8):
        y = keras.layers.Conv2D(filters, 3, padding="same", kernel_regularizer=regularizer)(x)
        y = keras.layers.ReLU()(keras.layers.BatchNormalization()(y))
        y = keras.layers.Dropout(0.3)(y)
        y = Unseeded()(y)
        y = keras.layers.ActivityRegularization(l2=penalty)(y) if penalty else y
        x = y + keras.layers.Conv2D(filters, 1)(x)
    inner = keras.Input(x.shape[1:])
    z = inner
    for _ in range(3):
        z = keras.layers.Conv2D(4, 3, padding="same", activation="tanh")(z)
    x = keras.Model(inner, z, name="inside")(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, keras.layers.Dense(num_classes)(x))


class Unseeded(keras.layers.Layer):
    """Noise without a seed, as in ConvNeXt's stochastic depth."""

    def call(self, inputs, training=False):
        """Adds it."""
        return inputs + keras.random.uniform(keras.ops.shape(inputs)) if training else inputs


def steps(config, custom=None):
    """Returns the gradients, the metrics and the states of two steps, and the model."""
    keras.backend.clear_session()
    model = build_model(config, model=custom)
    strategy = model.distribute_strategy
    size, images = config.image_size, BATCH // strategy.num_replicas_in_sync
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 255, (BATCH, size, size, 3)).astype(np.uint8)
    labels = generator.integers(0, 10, BATCH).astype(np.int32)
    states = states_in(model)

    @tf.function(autograph=False)
    def step():
        def in_replica():
            start = tf.distribute.get_replica_context().replica_id_in_sync_group * images
            batch = [
                tf.ensure_shape(values[start : start + images], [images, *values.shape[1:]])
                for values in (tf.constant(pixels), tf.constant(labels), tf.ones(BATCH))
            ]
            values = model.gradients(batch)
            return [*tf.nest.flatten(values), *map(tf.convert_to_tensor, states)]

        return [strategy.experimental_local_results(own) for own in strategy.run(in_replica)]

    return [np.asarray(own) for _ in range(2) for own in tf.nest.flatten(step())], model


def compare(options, custom=None):
    """Returns the arrays of :func:`steps` without and with rematerialization, and the latter's."""
    config = Config(
        synthetic=True,
        num_classes=10,
        batch_size=BATCH,
        train_crop="pad",
        **options,
    )
    plain, _ = steps(config, custom)
    again, model = steps(config.replace(rematerialize="always"), custom)
    return plain, again, model


if __name__ == "__main__":
    for expected, found in zip(*compare(json.loads(sys.argv[1]), network)[:2]):
        np.testing.assert_array_equal(found, expected)
