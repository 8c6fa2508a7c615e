"""Trains a small network on images with several labels.

Argument: a JSON object of options of Config.
"""

import json
import sys

import keras

from imagenet_fast import Config, train


def network(num_classes, image_shape):
    """Without batch norm, whose statistics depend on the number of replicas."""
    images = x = keras.Input(image_shape)
    x = keras.layers.Conv2D(8, 5, strides=4, activation="relu")(x)
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(x)))


if __name__ == "__main__":
    train(Config(**json.loads(sys.argv[1])), model=network)
