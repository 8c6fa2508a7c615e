"""Steps of the recipe speedrun_cifar10 against its source's formulas in NumPy.

The source sums the loss over its batch of 1536 images: here a few images, each as often.
"""

import pathlib

import numpy as np
import pytest
from numpy_network import (
    BatchNorm,
    Chain,
    Conv,
    Logits,
    MaxPool,
    Variables,
    gelu,
    randomise,
    silu,
)

from imagenet_fast import Config, build_model
from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.models import network_of

RECIPE = pathlib.Path(__file__).parents[2] / "imagenet_fast" / "flags" / "speedrun_cifar10.flags"
IMAGES, SIZE, BATCH, TOTAL = 6, 24, 1536, 243
DECAY = 1.0418e-6 * BATCH
HEAD_INIT = 256 * 0.1082532  # its head in terms of ours


def our_model(monkeypatch):
    # An epoch of CIFAR-10 instead of synthetic data.
    monkeypatch.setattr("imagenet_fast.training.run.steps_per_epoch", lambda info, config: 32)
    host = {"data_on_device": False, "alternating_flip": False, "xla": False}
    small = {
        "width": 4,
        "num_classes": 10,
        "precision": "float32",
        "synthetic": True,
        "image_size": SIZE,
    }
    model = build_model(Config.from_flagfile(RECIPE, **host, **small))
    model.optimizer.newton_schulz_dtype = "float32"
    randomise(network_of(model))
    return model


def network(variables):
    def group(name):
        return (
            *(Conv(variables, f"{name}_block1_conv"), MaxPool(2)),
            *(BatchNorm(variables, f"{name}_block1_bn", 1e-12), silu()),
            *(Conv(variables, f"{name}_block2_conv"),),
            *(BatchNorm(variables, f"{name}_block2_bn", 1e-12), silu()),
        )

    groups = [layer for number in (1, 2, 3) for layer in group(f"group{number}")]
    first = (Conv(variables, "whitening", padding="valid"), gelu())
    return Chain(*first, *groups, MaxPool(), Logits(variables, 1 / 256))


def summed_gradients(variables, images, labels):
    whole = network(variables)
    logits = whole.forward(images)
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    soft = 0.91 * np.eye(10)[labels] + 0.009
    errors = odds / odds.sum(axis=1, keepdims=True) - soft
    whole.backward(BATCH / len(labels) * errors)
    return variables.gradients


def orthogonal(matrix):
    x = matrix / np.linalg.norm(matrix)
    for _ in range(3):
        gram = x @ x.T
        x = 3.4576 * x + (-4.7391 * gram + 2.0843 * gram @ gram) @ x
    return x


class Source:
    """The optimizers of cifar10_speedrun.py, without what the recipe's header lists."""

    def __init__(self):
        self.buffers, self.latest = {}, 0

    def update(self, variables, gradients, step):
        left = 1 - step / TOTAL
        reset = step + 1 - self.latest >= 2 + int(15 * (step + 1) / TOTAL)
        self.latest = step + 1 if reset else self.latest
        for name, gradient in gradients.items():
            rate = 0.5415 if name == "logits/kernel" else 0.0573
            if name == "whitening/kernel":
                continue
            if gradient.ndim == 4:
                direction = self.nesterov(name, gradient, 0.655)
                w = variables[name]
                if reset:
                    w = w * np.sqrt(w.shape[-1]) / np.linalg.norm(w)
                matrix = direction.reshape(-1, w.shape[-1]).T
                variables[name] = w - 0.205 * left * orthogonal(matrix).T.reshape(w.shape)
                continue
            direction = self.nesterov(name, gradient + DECAY / rate * variables[name], 0.825)
            factor = max(0, 1 - step / 7) if name == "whitening/bias" else left
            variables[name] = variables[name] - rate * factor * direction

    def nesterov(self, name, gradient, momentum):
        self.buffers[name] = momentum * self.buffers.get(name, 0) + gradient
        return gradient + momentum * self.buffers[name]


def differences(monkeypatch, steps):
    """Yields each weight's name, greatest difference after the steps, and change in NumPy."""
    model = our_model(monkeypatch)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (steps, IMAGES, SIZE, SIZE, 3), dtype=np.uint8)
    labels = rng.integers(0, 10, (steps, IMAGES))
    mean, std = 255 * np.array([0.4914, 0.4822, 0.4465]), 255 * np.array([0.247, 0.2435, 0.2616])

    source, variables = Source(), Variables(network_of(model))
    start = dict(variables)
    variables["logits/kernel"] = variables["logits/kernel"] * HEAD_INIT
    for step in range(steps):
        model.train_on_batch(pixels[step], labels[step])
        gradients = summed_gradients(variables, (pixels[step] - mean) / std, labels[step])
        source.update(variables, gradients, step)
    variables["logits/kernel"] = variables["logits/kernel"] / HEAD_INIT

    for variable in network_of(model).trainable_variables:
        name = name_of(variable)
        difference = np.abs(variable.numpy() - variables[name]).max()
        yield name, difference, np.abs(variables[name] - start[name]).max()


def test_three_steps(monkeypatch):
    for name, difference, change in differences(monkeypatch, 3):
        assert change > 1e-3, name
        assert difference < 2e-3 * change, name


@pytest.mark.long
def test_twelve_steps(monkeypatch):
    """Rounding errors have grown to 3e-4 of the changes; later another pixel wins a max pool."""
    for name, difference, change in differences(monkeypatch, 12):
        assert difference < 0.005 * change, name
