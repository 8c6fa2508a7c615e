"""Gradients of pipelines against the same network without one, on four CPU devices.

Arguments: the path of a JSON file to write, with the greatest differences by the name of the case;
and the cases, also in JSON: the kind of network, stages, micro-batches, what is computed again, and
the schedule.
"""

import itertools
import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast.layers import Dropout
from imagenet_fast.layers.micro_batch import micro_batch
from imagenet_fast.pipeline_parallel.gpipe import GPipe

CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(CPU, [tf.config.LogicalDeviceConfiguration()] * 4)
DEVICES = [device.name for device in tf.config.list_logical_devices("CPU")]
KINDS = ("noisy", "plain")
EXAMPLES = 13
IMAGES = np.random.default_rng(0).normal(size=(EXAMPLES, 8, 8, 3)).astype("float32")
LABELS = np.arange(EXAMPLES) % 3


class Pair(keras.layers.Layer):
    """Returns two tensors, as the cells of AmoebaNet do."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.conv = keras.layers.Conv2D(6, 1, name="conv")

    def call(self, inputs):
        return self.conv(inputs), inputs


class Join(keras.layers.Layer):
    """Takes two, and returns two, of which the second is as it came."""

    def __init__(self, block, **kwargs):
        super().__init__(**kwargs)
        self.block = block

    def call(self, inputs, training=None):
        one, other = inputs
        return self.block(one, training=training), other


class Head(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.pool = keras.layers.GlobalAveragePooling2D()
        self.dense = keras.layers.Dense(3, name="dense")

    def call(self, inputs):
        return self.dense(self.pool(tf.concat(inputs, axis=-1)))


def blocks(kind):
    """Four blocks; if ``noisy``, with batch norm and dropout."""
    keras.utils.set_random_seed(3)
    made = []
    for number in range(2):
        layers = [keras.layers.Conv2D(6, 3, padding="same", name=f"conv{number}")]
        if kind == "noisy":
            layers.append(keras.layers.BatchNormalization(momentum=0.5, name=f"norm{number}"))
            layers.append(Dropout(0.3, name=f"dropout{number}"))
        layers.append(keras.layers.Activation("tanh"))
        made.append(keras.Sequential(layers, name=f"block{number}"))
    return [made[0], Pair(name="pair"), Join(made[1], name="join"), Head(name="head")]


def sum_of_losses(logits, labels):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_sum(losses) / EXAMPLES


def pipelined(kind, stages, parts, rematerialize, schedule):
    """The model, and its gradients of a batch."""
    model = GPipe(
        blocks(kind),
        DEVICES[: device_count(stages, schedule)],
        num_stages=stages,
        num_micro_batches=parts,
        rematerialize=rematerialize,
        schedule=schedule.removesuffix(", looped"),
        unroll=not schedule.endswith("looped"),
    )

    @tf.function
    def take(images, labels):
        model.build_on(images)
        return model.pipeline.compute(images, labels, sum_of_losses).gradients

    return model, [own.numpy() for own in take(tf.constant(IMAGES), tf.constant(LABELS))]


def device_count(stages, schedule):
    return stages // 2 if schedule == "interleaved_1f1b" else stages


def accumulated(kind, parts):
    """The same on one device, by a loop over the micro-batches."""
    model = GPipe(blocks(kind), DEVICES[:1])
    model.build_on(tf.constant(IMAGES))
    total = None
    pairs = zip(np.array_split(IMAGES, parts), np.array_split(LABELS, parts))
    for number, (images, labels) in enumerate(pairs):
        with micro_batch(number), tf.GradientTape() as tape:
            loss = sum_of_losses(model(tf.constant(images), training=True), labels)
        own = [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]
        total = own if total is None else [a + b for a, b in zip(total, own)]
    return total


def difference(one, other):
    assert len(one) == len(other)
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other))


def main():
    path, cases = sys.argv[1], json.loads(sys.argv[2])
    parts_of_all = sorted({1, *(parts for _, _, parts, _, _ in cases)})
    expected = {own: accumulated(*own) for own in itertools.product(KINDS, parts_of_all)}
    whole = expected["plain", 1]
    found = {}
    for kind, stages, parts, mode, schedule in cases:
        model, gradients = pipelined(kind, stages, parts, mode, schedule)
        name = f"{kind} K={stages} M={parts} {mode} {schedule}"
        places = {variable.device.split("/")[-1] for variable in model.variables}
        devices = range(device_count(stages, schedule))
        assert places == {f"device:CPU:{device}" for device in devices}, places
        found[name] = difference(gradients, expected[kind, parts])
        if kind == "plain":
            found[f"{name}, whole batch"] = difference(gradients, whole)
    found["least gradient"] = min(float(np.abs(own).max()) for own in whole)
    pathlib.Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
