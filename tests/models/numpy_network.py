"""Networks in NumPy and float64, forward and backward: an oracle that shares no code with Keras.

Activations are [images, height, width, channels], weights laid out as Keras does. ``backward``
takes the loss' derivative by a layer's outputs and returns that by its inputs; what it finds for
the weights it puts into ``Variables.gradients``.
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from imagenet_fast.base.keras_2 import name_of


class Variables(dict):
    """Weights by name, and what backward passes found for them."""

    def __init__(self, model):
        super().__init__((name_of(v), v.numpy().astype(np.float64)) for v in model.weights)
        self.gradients = {}


class Conv:
    """Stride 1."""

    def __init__(self, variables, name, padding="same"):
        self.variables, self.name = variables, name
        self.kernel = variables[f"{name}/kernel"]
        self.bias = variables.get(f"{name}/bias", 0)
        self.pad = self.kernel.shape[0] // 2 if padding == "same" else 0

    def forward(self, x):
        pad = self.pad
        self.x = np.pad(x, [(0, 0), (pad, pad), (pad, pad), (0, 0)])
        return sum(window @ self.kernel[at] for at, window in self.windows(self.x)) + self.bias

    def backward(self, dy):
        kernel, dx = np.zeros_like(self.kernel), np.zeros_like(self.x)
        for at, window in self.windows(self.x):
            kernel[at] = np.tensordot(window, dy, axes=([0, 1, 2], [0, 1, 2]))
        for at, window in self.windows(dx):
            window += dy @ self.kernel[at].T
        self.variables.gradients[f"{self.name}/kernel"] = kernel
        if f"{self.name}/bias" in self.variables:
            self.variables.gradients[f"{self.name}/bias"] = dy.sum((0, 1, 2))
        pad = self.pad
        return dx[:, pad : dx.shape[1] - pad, pad : dx.shape[2] - pad]

    def windows(self, x):
        """What each element of the kernel is multiplied by."""
        size = self.kernel.shape[0]
        height, width = x.shape[1] - size + 1, x.shape[2] - size + 1
        for i in range(size):
            for j in range(size):
                yield (i, j), x[:, i : i + height, j : j + width]


class BatchNorm:
    """In training. With a ghost batch, image n is in group n mod (images / ghost batch)."""

    def __init__(self, variables, name, epsilon, ghost_batch_size=None):
        self.variables, self.name, self.epsilon = variables, name, epsilon
        self.gamma = variables.get(f"{name}/gamma", 1)
        self.beta = variables[f"{name}/beta"]
        self.ghost_batch_size = ghost_batch_size

    def forward(self, x):
        self.shape = x.shape
        self.grouped = (self.ghost_batch_size or len(x), -1, *x.shape[1:])
        x = x.reshape(self.grouped)
        mean = x.mean((0, 2, 3), keepdims=True)
        self.deviation = np.sqrt(x.var((0, 2, 3), keepdims=True) + self.epsilon)
        self.normalized = (x - mean) / self.deviation
        return (self.normalized * self.gamma + self.beta).reshape(self.shape)

    def backward(self, dy):
        dy = dy.reshape(self.grouped)
        self.variables.gradients[f"{self.name}/beta"] = dy.sum((0, 1, 2, 3))
        if f"{self.name}/gamma" in self.variables:
            self.variables.gradients[f"{self.name}/gamma"] = (dy * self.normalized).sum(
                (0, 1, 2, 3)
            )
        dy = dy * self.gamma
        shared = dy.mean((0, 2, 3), keepdims=True)
        along = (dy * self.normalized).mean((0, 2, 3), keepdims=True)
        return ((dy - shared - self.normalized * along) / self.deviation).reshape(self.shape)


class MaxPool:
    """Of windows that do not overlap; what does not fill one is left out. No size: of the image."""

    def __init__(self, size=None):
        self.size = size

    def forward(self, x):
        self.shape = x.shape
        images, height, width, channels = x.shape
        rows, columns = (self.size, self.size) if self.size else (height, width)
        down, across = height // rows, width // columns
        x = x[:, : down * rows, : across * columns]
        x = x.reshape(images, down, rows, across, columns, channels).swapaxes(2, 3)
        x = x.reshape(images, down, across, rows * columns, channels)
        self.windows = (images, down, across, rows, columns, channels)
        self.at = x.argmax(3)[:, :, :, None]
        return np.take_along_axis(x, self.at, 3)[:, :, :, 0]

    def backward(self, dy):
        images, down, across, rows, columns, channels = self.windows
        windows = np.zeros((images, down, across, rows * columns, channels))
        np.put_along_axis(windows, self.at, dy[:, :, :, None], 3)
        dx = np.zeros(self.shape)
        dx[:, : down * rows, : across * columns] = (
            windows.reshape(self.windows)
            .swapaxes(2, 3)
            .reshape(images, down * rows, across * columns, channels)
        )
        return dx


class Activation:
    """A function of each element and its derivative."""

    def __init__(self, function, derivative):
        self.function, self.derivative = function, derivative

    def forward(self, x):
        self.x = x
        return self.function(x)

    def backward(self, dy):
        return dy * self.derivative(self.x)


def relu():
    return Activation(lambda x: np.maximum(x, 0), lambda x: x > 0)


def celu(alpha):
    return Activation(
        lambda x: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0) / alpha)),
        lambda x: np.exp(np.minimum(x, 0) / alpha),
    )


def gelu():
    """x times the share of N(0, 1) below x."""
    below = np.vectorize(lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2))))
    return Activation(
        lambda x: x * below(x),
        lambda x: below(x) + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi),
    )


def silu():
    """x times the logistic function."""
    logistic = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    return Activation(
        lambda x: x * logistic(x),
        lambda x: logistic(x) * (1 + x * (1 - logistic(x))),
    )


class Logits:
    """A dense layer without bias of what is left of the image, one pixel, times a scale."""

    def __init__(self, variables, scale):
        self.variables, self.scale = variables, scale
        self.kernel = variables["logits/kernel"]

    def forward(self, x):
        self.x = x[:, 0, 0]
        return self.x @ self.kernel * self.scale

    def backward(self, dy):
        self.variables.gradients["logits/kernel"] = self.scale * self.x.T @ dy
        return (self.scale * dy @ self.kernel.T)[:, None, None]


class Chain:
    def __init__(self, *layers):
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def backward(self, dy):
        for layer in reversed(self.layers):
            dy = layer.backward(dy)
        return dy


class Residual(Chain):
    def forward(self, x):
        return x + super().forward(x)

    def backward(self, dy):
        return dy + super().backward(dy)


def cross_entropy(logits, labels):
    """The mean over the images, and its derivative by the logits."""
    odds = np.exp(logits - logits.max(1, keepdims=True))
    shares = odds / odds.sum(1, keepdims=True)
    images = np.arange(len(labels))
    loss = -np.log(shares[images, labels]).mean()
    shares[images, labels] -= 1
    return loss, shares / len(labels)


def randomise(model, seed=0):
    """Gives every variable values that a mistake in its place or sign would show."""
    rng = np.random.default_rng(seed)
    for variable in model.weights:
        role = name_of(variable).split("/")[-1]
        if role == "kernel":
            fan_in = math.prod(variable.shape[:-1])
            value = rng.normal(0, math.sqrt(2 / fan_in), variable.shape)
        elif role in ("gamma", "moving_variance"):
            value = rng.uniform(0.5, 1.5, variable.shape)
        else:
            value = rng.normal(0, 0.2, variable.shape)
        variable.assign(value)


def step(model, images, labels, **options):
    """The logits, the loss and its gradients by name, of Keras in training."""

    def compute(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            )
        return logits, loss, tape.gradient(loss, model.trainable_variables)

    logits, loss, gradients = tf.function(compute, **options)(images, labels)
    names = map(name_of, model.trainable_variables)
    return logits, loss, {name: g.numpy() for name, g in zip(names, gradients)}


def assert_same_step(model, make_reference, shape=(8, 32, 32, 3), seed=1, **options):
    """Keras' logits, loss and gradients are the reference's, to 1e-4 of the largest element.

    Args:
      model: of which every variable is made random first.
      make_reference: from ``Variables`` to a layer of this module, with logits at its end.
      shape: of the images.
      seed: of the images and labels.
      **options: of ``tf.function``.
    """
    randomise(model)
    rng = np.random.default_rng(seed)
    images = rng.normal(size=shape).astype("float32")
    labels = rng.integers(0, model.output_shape[-1], shape[0])

    variables = Variables(model)
    reference = make_reference(variables)
    expected_logits = reference.forward(images.astype(np.float64))
    expected_loss, derivative = cross_entropy(expected_logits, labels)
    reference.backward(derivative)
    logits, loss, gradients = step(model, images, labels, **options)

    assert_close(logits, expected_logits, "logits")
    assert_close(loss, expected_loss, "loss")
    frozen = {name_of(v) for v in model.non_trainable_variables}
    assert gradients.keys() == variables.gradients.keys() - frozen
    for name, gradient in gradients.items():
        assert_close(gradient, variables.gradients[name], name)


def assert_close(actual, expected, name):
    scale = np.abs(expected).max()
    assert scale > 1e-6, name
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * scale, err_msg=name)
