"""Trains a small network on images with several labels, and evaluates it.

Argument: a JSON object of options of Config.
"""

import json
import pathlib
import sys

import keras

from imagenet_fast import Config, evaluate, make_strategy, train
from imagenet_fast.distribute.workers import is_chief


def network(num_classes, image_shape):
    """Without batch norm, whose statistics depend on the number of replicas."""
    images = x = keras.Input(image_shape)
    x = keras.layers.Conv2D(8, 5, strides=4, activation="relu")(x)
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(x)))


if __name__ == "__main__":
    config = Config(**json.loads(sys.argv[1]))
    train(config, model=network)
    result = evaluate(config, model=network)
    if is_chief(make_strategy(config)):
        pathlib.Path(config.model_dir, "evaluated.json").write_text(json.dumps(result))
