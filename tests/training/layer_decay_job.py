"""Trains by optimizers of Keras with layer-wise learning rates, on what the arguments ask for.

Arguments: options of Config, as JSON; a folder for checkpoints; and the path of an .npz file.
"""

import itertools
import json
import sys

import keras
import numpy as np

from imagenet_fast import Config, build_model, make_dataset
from imagenet_fast.optimizers.slots import variables_of
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints

STEPS = 2
ARGUMENTS = {
    "lion": ("beta_1=0.95", "beta_2=0.98"),
    "adamw": ("beta_2=0.99",),
    "lamb": (),
    "adafactor": ("beta_2_decay=-0.7",),
}


def network(num_classes, image_shape):
    """Without batch norm, whose statistics are each replica's own."""
    x = images = keras.Input(image_shape)
    for filters in (8, 8, 16):
        x = keras.layers.Conv2D(filters, 3, strides=2, activation="relu")(x)
    logits = keras.layers.Dense(num_classes)(keras.layers.Flatten()(x))
    return keras.Model(images, logits)


def train(config, model):
    model.fit(make_dataset(config, "train"), epochs=1, steps_per_epoch=STEPS, verbose=0)


def main():
    options, folder, out = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
    results = {}
    for name, arguments in ARGUMENTS.items():
        config = Config(
            **options,
            optimizer=name,
            optimizer_arguments=arguments,
            layer_decay=0.5,
            model_dir=f"{folder}/{name}",
        )

        model = build_model(config, model=network)
        train(config, model)
        results |= {f"{name}/{i}": own.numpy() for i, own in enumerate(model.trainable_variables)}
        results |= {
            f"{name}/slot{i}": own.numpy() for i, own in enumerate(variables_of(model.optimizer))
        }
        if config.strategy == "one_device":
            checkpoints = Checkpoints(model, config)
            checkpoints.save(1, {})
            train(config, model)
            other = build_model(config, model=network)
            Checkpoints(other, config).restore()
            train(config, other)
            for one, two in itertools.zip_longest(
                [*model.weights, *variables_of(model.optimizer)],
                [*other.weights, *variables_of(other.optimizer)],
            ):
                np.testing.assert_array_equal(one.numpy(), two.numpy(), err_msg=name)
    np.savez(out, **results)


if __name__ == "__main__":
    main()
