"""Networks of other libraries by name: ``keras:NAME`` and ``keras_hub:PRESET``.

All functions take such a name as ``model``, and raise a ``UserError`` if there is no such network.
"""

from __future__ import annotations

from typing import Any

import keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.models.applications import (
    Normalization,
    application_normalization,
    build_application,
    pretrained_application,
)
from imagenet_fast.models.keras_hub import (
    build_preset,
    preset_folder,
    preset_image_size,
    preset_normalization,
    preset_weights,
)
from imagenet_fast.models.options import library_of, own_image_size


def build_by_name(
    model: str,
    num_classes: int,
    image_shape: tuple[int | None, int | None, int],
    *,
    download: bool = False,
) -> keras.Model:
    """Makes a network of a library, with random weights, from normalized images to logits.

    Args:
        model: ``keras:NAME`` or ``keras_hub:PRESET``.
        num_classes: number of logits.
        image_shape: of an image; None: any size.
        download: whether to download a preset's configuration.

    Raises:
        UserError: if there is no such network, or it cannot be made.
    """
    library, name = _parts(model)
    if library == "keras":
        return build_application(name, num_classes, image_shape)
    return build_preset(preset_folder(name, download), num_classes, image_shape)


def own_normalization(model: str) -> Normalization | None:
    """Returns the normalization that pretrained weights of a network need; None: it is unknown.

    Args:
        model: ``keras:NAME`` or ``keras_hub:PRESET``.

    Raises:
        UserError: if there is no such network.
    """
    library, name = _parts(model)
    if library == "keras":
        return application_normalization(name)
    return preset_normalization(preset_folder(name))


def trained_on(model: str) -> int | None:
    """Returns the size of the images on which a network of a library was trained; None: unknown.

    Args:
        model: ``keras:NAME`` or ``keras_hub:PRESET``.

    Raises:
        UserError: if there is no such network.
    """
    library, name = _parts(model)
    return own_image_size(model) if library == "keras" else preset_image_size(preset_folder(name))


def pretrained_weights(model: str) -> list[Any]:
    """Returns the pretrained weights of a network without its head, in the order of its own.

    Raises:
        UserError: if they can neither be found nor downloaded.
    """
    library, name = _parts(model)
    if library == "keras":
        return pretrained_application(name)
    return preset_weights(preset_folder(name, download=True))


def _parts(model: str) -> tuple[str, str]:
    if KERAS_2:
        raise UserError(f"model {model} needs Keras 3, which TensorFlow 2.16 and newer have")
    parts = library_of(model)
    assert parts is not None
    return parts
