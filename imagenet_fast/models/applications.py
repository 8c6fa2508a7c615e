"""Networks of Keras Applications by name, with their normalization and pretrained weights."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import inspect
import os
import pathlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from imagenet_fast.base.errors import UserError, choices_hint, first_line
from imagenet_fast.base.outside import read_bounded
from imagenet_fast.base.paths import Path
from imagenet_fast.models.hdf5 import read_hdf5
from imagenet_fast.models.keras_file import set_all_weights

# What EfficientNet's published weights have as variances, and mean as standard deviations: their
# network divides by the root once more, but only if Keras makes it with these weights.
_STDS_AS_VARIANCES = (0.229, 0.224, 0.225)

# ConvNeXtXLarge has 1.3 GB.
_LARGEST_FILE = 2**32


class Normalization(NamedTuple):
    """What a network's weights expect of pixels in 0..255.

    Attributes:
        mean: of red, green and blue.
        std: by which the differences are divided.
        reverse: whether the network takes blue, green and red.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    reverse: bool = False


@functools.cache
def application_names() -> tuple[str, ...]:
    """Returns the names of all networks of Keras Applications."""
    functions = inspect.getmembers(keras.applications, inspect.isfunction)
    return tuple(
        name for name, own in functions if "include_top" in inspect.signature(own).parameters
    )


def build_application(
    name: str, num_classes: int, image_shape: tuple[int | None, int | None, int]
) -> keras.Model:
    """Makes a network of Keras Applications with random weights and a classification head.

    The head is Keras' average pool, in ConvNeXt with its layer norm, and a dense layer, ``logits``.

    Args:
        name: one of :func:`application_names`.
        num_classes: number of logits.
        image_shape: of an image; None: any size.

    Raises:
        UserError: if there is no such network.
    """
    make = _maker(name)
    images = keras.Input(image_shape)
    channels = images[..., ::-1] if application_normalization(name).reverse else images
    backbone = make(
        include_top=False,
        weights=None,
        input_tensor=channels,
        input_shape=image_shape,
        pooling="avg",
    )
    logits = keras.layers.Dense(num_classes, dtype="float32", name="logits")(backbone.output)
    return keras.Model(images, logits, name=backbone.name)


@functools.cache
def application_normalization(name: str) -> Normalization:
    """Returns the normalization that the ``preprocess_input`` of a network computes.

    It is a linear function of each pixel, so four pixels tell all of it.

    Raises:
        UserError: if there is no such network.
    """
    pixels = 255 * np.concatenate([np.zeros([1, 3]), np.eye(3)])
    preprocess = vars(inspect.getmodule(_maker(name)))["preprocess_input"]
    outputs = preprocess(pixels.reshape([1, 1, 4, 3]), data_format="channels_last")[0, 0]
    slopes = (outputs[1:] - outputs[0]) / 255  # from each color to each channel
    channel_of = np.argmax(np.abs(slopes), axis=1)
    slope = slopes[[0, 1, 2], channel_of]
    return Normalization(
        tuple((-outputs[0, channel_of] / slope).tolist()),
        tuple((1 / slope).tolist()),
        reverse=channel_of.tolist() == [2, 1, 0],
    )


def application_weights(name: str, path: Path) -> list[Any]:
    """Returns the weights of a network without its head from a ``.weights.h5`` file of Keras 3.

    Raises:
        UserError: if it is of another network, or damaged.
    """
    backbone = _maker(name)(include_top=False, weights=None, pooling="avg")
    try:
        set_all_weights(backbone, read_hdf5(read_bounded(path, _LARGEST_FILE)))
    except (KeyError, OSError, ValueError) as error:
        raise UserError(
            f"initial_weights: {path} does not hold the weights of keras:{name}: "
            f"{first_line(error)}"
        ) from None
    return backbone.weights


def pretrained_application(name: str) -> list[Any]:
    """Returns the pretrained weights of a network without its head, as Keras reads them.

    Keras takes the file from its cache, or downloads it; of several processes of a machine, one at
    a time.

    Raises:
        UserError: if it can do neither.
    """
    make = _maker(name)
    try:
        with one_process_downloads():
            return make(include_top=False, weights="imagenet", pooling="avg").weights
    # Keras raises Exception itself.
    except Exception as error:
        target = _download_target(error)
        if target is None:
            raise
        raise UserError(
            f"pretrained: the weights of keras:{name} are not in Keras' cache and cannot be "
            f"downloaded ({first_line(error)}): put the file at {target}, or give "
            "--initial_weights=FILE"
        ) from None


def corrected_variance(value: np.ndarray) -> np.ndarray:
    """Returns the variance for EfficientNet's normalization, to which its weights were trained."""
    published = value.size == 3 and np.allclose(value, _STDS_AS_VARIANCES, rtol=0, atol=1e-6)
    return np.square(value) if published else value


@contextlib.contextmanager
def one_process_downloads() -> Iterator[None]:
    """Waits in the context until no other process of this account and machine is in it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # without a home, or without locks in its file system
            home = os.open(pathlib.Path.home(), os.O_RDONLY)
            stack.callback(os.close, home)
            fcntl.flock(home, fcntl.LOCK_EX)  # released with the process
        yield


def _maker(name: str) -> Callable[..., keras.Model]:
    names = application_names()
    if name not in names:
        raise UserError(f"there is no model keras:{name}{choices_hint(name, names)}")
    return getattr(keras.applications, name)


def _download_target(error: BaseException) -> str | None:
    """Returns where Keras would have stored a file that it failed to download; None: no file."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    frames = [frame for frame in frames if frame.f_code.co_name == "get_file"]
    targets = [frame.f_locals.get("download_target") for frame in frames]
    return next(filter(None, targets), None)
