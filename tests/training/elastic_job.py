"""Takes steps of a few logical replicas, carried by different numbers of devices of one process.

Arguments: the path of an .npz file, which gets the weights after these steps by case, and the
number of devices.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast.layers import GroupedBatchNormalization, PixelNormalization
from imagenet_fast.layers.batch_normalization import BatchNormalization
from imagenet_fast.layers.seeds import UnseededDraws, draw_by_replica
from imagenet_fast.training.step.classifier import Classifier
from imagenet_fast.training.step.mix import Mixer
from imagenet_fast.training.step.selection import Selection

REPLICAS = 4
BATCH = 48
STEPS = 3
# Options of the step, with the arguments of a mixer and a selection; whether the network draws; the
# replicas of a batch-norm group.
CASES = {
    "plain": ({}, True, 1),
    "accumulated": ({"accumulation_steps": 3}, True, 1),
    "mixed": ({"mixer": (0.4, 1.0), "accumulation_steps": 2}, True, 1),
    "selected": ({"selection": 0.5, "accumulation_steps": 2}, True, 1),
    "grouped": ({"mixer": (0.4, 1.0)}, False, 2),
    "all_in_a_group": ({}, False, 4),
    "xla": ({"xla": True, "mixer": (0.4, 0.0)}, False, 1),
}


def build(strategy, options, draws, group):
    """Returns a compiled model for a strategy with any number of devices."""
    each = REPLICAS // strategy.num_replicas_in_sync
    together = min(each, group)
    options = dict(options)
    if "mixer" in options:  # made here, after the devices
        options["mixer"] = Mixer(*options["mixer"], seed=5)
    if "selection" in options:
        options["selection"] = Selection(options["selection"])
    keras.utils.set_random_seed(3)
    with strategy.scope():
        norm = BatchNormalization
        if group > together:
            norm = lambda: GroupedBatchNormalization(group_size=group // together)  # noqa: E731
        inputs = x = keras.Input((8, 8, 3), dtype="uint8")
        x = PixelNormalization([100.0] * 3, [60.0] * 3)(x)
        x = norm()(keras.layers.Conv2D(4, 3)(x))
        if draws:
            x = keras.layers.Dropout(0.3, seed=7)(x)
            x = _DropOfNoSeed()(x)
        x = keras.layers.Flatten()(keras.layers.ReLU()(x))
        outputs = keras.layers.Dense(10, kernel_regularizer=keras.regularizers.L2(0.01))(x)
        model = Classifier(
            inputs,
            outputs,
            replicas_each=each,
            replicas_together=together,
            unseeded_draws=UnseededDraws(11) if draws else None,
            **options,
        )
        draw_by_replica(model)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        model.make_slots()
    return model


@keras.saving.register_keras_serializable("tests")
class _DropOfNoSeed(keras.layers.Layer):
    """Draws without a generator of its own, as layers of ConvNeXt do."""

    def call(self, inputs, training=False):
        return inputs * keras.random.uniform((1, 1, 1, 4)) if training else inputs


def train(strategy, *case):
    """Returns the weights after the steps."""
    model = build(strategy, *case)
    random = np.random.default_rng(1)
    size = BATCH // strategy.num_replicas_in_sync
    step = tf.function(lambda batch: strategy.run(model.train_step, (batch,)))
    for _ in range(STEPS):
        images = random.integers(0, 256, (BATCH, 8, 8, 3), np.uint8)
        labels = random.integers(0, 10, BATCH).astype(np.int32)

        def part(context, images=images, labels=labels):
            first = context.replica_id_in_sync_group * size
            own = slice(first, first + size)
            return tuple(tf.constant(values[own]) for values in (images, labels))

        step(strategy.experimental_distribute_values_from_function(part))
    model.average_batch_norm_statistics()
    metrics = model.metric_sums.results()
    return [*(np.array(weight) for weight in model.get_weights()), np.array(metrics["loss"])]


def main():
    out, devices = sys.argv[1], int(sys.argv[2])
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * devices
    tf.config.set_logical_device_configuration(cpu, parts)
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    strategy = tf.distribute.MirroredStrategy(names)
    if devices == 1:
        strategy = tf.distribute.OneDeviceStrategy(names[0])
    found = {case: train(strategy, *options) for case, options in CASES.items()}
    np.savez(out, **{f"{case} {n}": own for case in found for n, own in enumerate(found[case])})


if __name__ == "__main__":
    main()
