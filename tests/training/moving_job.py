"""Trains a run of a small network with dropout, on whatever strategy the arguments ask for.

Argument: the path of a JSON object of options of Config.
"""

import json
import pathlib
import sys

import keras

from imagenet_fast import Config
from imagenet_fast.training.train import train


def network(num_classes, image_shape):
    images = x = keras.Input(image_shape)
    for filters in (8, 16):
        x = keras.layers.Conv2D(filters, 3, strides=2, activation="relu")(x)
        x = keras.layers.Dropout(0.2)(x)
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(x)))


if __name__ == "__main__":
    train(Config(**json.loads(pathlib.Path(sys.argv[1]).read_text())), model=network)
