"""Trains small models and evaluates, on whatever strategy the arguments ask for.

Arguments: the path of a JSON object with ``data_dir``, ``out`` (an .npz file that the chief
writes) and ``config``, options of Config.
"""

import json
import pathlib
import sys

import keras
import numpy as np

from imagenet_fast import Config, build_model, make_dataset, make_strategy
from imagenet_fast.data.info import read_info
from imagenet_fast.data.steps import evaluation_steps
from imagenet_fast.distribute.workers import is_chief
from imagenet_fast.layers import PixelNormalization
from imagenet_fast.optimizers.weight_average import WeightAverage
from imagenet_fast.training.build.optimizer import build_optimizer
from imagenet_fast.training.step.classifier import Classifier

STEPS = 20
BATCH_NORM_STEPS = 2
# A young network with batch norm multiplies rounding errors by ten a step at higher rates.
BATCH_NORM_RATE = 0.005
# What works on gradients that are summed already: norms of them, clipping, the average of weights.
# Their scale, which LARS divides out, is seen with batch norm, which SGD trains.
LARS = {
    "optimizer": "lars",
    "nesterov": False,
    "learning_rate": 0.3,  # At 1 the differences of rounding may grow from step to step.
    "lars_eeta": 0.02,
    "clip_norm": 0.5,
    "ema_decay": 0.9,
}


def build_small(config):
    """A small convolutional network, with what make_dataset gives as its input."""
    keras.utils.set_random_seed(config.seed)
    with make_strategy(config).scope():
        size = config.image_size
        inputs = x = keras.Input((size, size, 3), dtype="uint8")
        x = PixelNormalization(config.pixel_mean, config.pixel_std)(x)
        for filters in (8, 16):
            x = keras.layers.Conv2D(filters, 3, strides=2, activation="relu")(x)
        logits = keras.layers.Dense(10)(keras.layers.Flatten()(x))
        model = Classifier(
            inputs,
            logits,
            accumulation_steps=config.accumulation_steps,
            label_smoothing=config.label_smoothing,
        )
        model.class_weights = np.linspace(0.5, 1.5, 10)
        model.steps_per_epoch = 10
        if config.ema_decay:
            model.weight_average = WeightAverage(model.weights, config.ema_decay)
        model.compile(build_optimizer(config, model, model.steps_per_epoch))
    return model


def with_batch_norm(num_classes, image_shape):
    """The same network with batch norm, for build_model."""
    images = x = keras.Input(image_shape)
    for filters in (8, 16):
        x = keras.layers.Conv2D(filters, 3, strides=2)(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=0.9)(x))
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(x)))


def train(model, batches, steps):
    """Returns the weights before and after some steps of fit, and the mean loss."""
    before = numbered("initial", model.trainable_variables)
    history = model.fit(batches, epochs=1, steps_per_epoch=steps, verbose=0)
    model.average_batch_norm_statistics()
    average = model.weight_average
    return {
        **before,
        **numbered("average", average.averages if average else []),
        **numbered("weight", model.trainable_variables),
        **numbered("moving", model.non_trainable_variables),
        "loss": history.history["loss"][-1],
    }


def numbered(name, variables):
    return {f"{name}{i}": variable.numpy() for i, variable in enumerate(variables)}


def evaluate(model, config, batch_size):
    """Returns what evaluation says at a batch size."""
    config = config.replace(eval_batch_size=batch_size)
    steps = evaluation_steps(read_info(config), config, make_strategy(config))
    return model.evaluate(
        make_dataset(config, "validation"), steps=steps, verbose=0, return_dict=True
    )


def main():
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    config = Config(**job["config"])
    # Each fit begins with the first batch.
    batches = make_dataset(config, "train")
    lars = config.replace(**LARS)
    model = build_small(lars)
    results = {f"lars_{k}": v for k, v in train(model, batches, STEPS).items()}
    for batch_size in job["evaluate"]:
        values = evaluate(model, config, batch_size)
        results.update({f"eval{batch_size}_{k}": v for k, v in values.items()})
    config = config.replace(learning_rate=BATCH_NORM_RATE)
    normed = train(build_model(config, model=with_batch_norm), batches, BATCH_NORM_STEPS)
    results.update({f"normed_{k}": v for k, v in normed.items()})
    if is_chief(make_strategy(config)):
        np.savez(job["out"], **results)


if __name__ == "__main__":
    main()
