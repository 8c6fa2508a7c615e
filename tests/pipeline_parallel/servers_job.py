"""A pipeline over this process and two stage servers, against one of this process alone.

Arguments: the path of a JSON file to write, the schedule, and the servers' addresses.
"""

import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast.pipeline_parallel.gpipe import GPipe
from imagenet_fast.pipeline_parallel.placement import stage_devices

IMAGES = np.random.default_rng(0).normal(size=(24, 8, 8, 3)).astype("float32")
LABELS = np.arange(24) % 3


def blocks():
    keras.utils.set_random_seed(0)
    made = []
    for _ in range(2):
        layers = [keras.layers.Conv2D(4, 3, padding="same"), keras.layers.BatchNormalization()]
        made.append(keras.Sequential([*layers, keras.layers.Activation("relu")]))
    return [*made, keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(3)])]


def train(devices, unroll):
    model = GPipe(blocks(), devices, num_micro_batches=3, unroll=unroll)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    losses = model.fit(IMAGES, LABELS, batch_size=12, epochs=2, shuffle=False, verbose=0)
    places = {tf.DeviceSpec.from_string(own.device).job for own in model.variables}
    slots = {tf.DeviceSpec.from_string(own.device).job for own in model.optimizer.variables}
    return {
        "losses": losses.history["loss"],
        "evaluated": model.evaluate(IMAGES, LABELS, verbose=0),
        "predicted": model.predict(IMAGES, verbose=0).tolist(),
        "jobs": sorted(places | slots),
    }


def main():
    path, graph, *servers = sys.argv[1:]
    devices = stage_devices(1 + len(servers), servers)
    found = {
        "devices": devices,
        "alone": train(devices[:1] * len(devices), unroll=True),
        "served": train(devices, unroll=graph == "unrolled"),
    }
    pathlib.Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
