"""Networks of which tools/elastic trains logical replicas."""

from __future__ import annotations

import keras

from imagenet_fast.models.resnet import resnet


def plain(num_classes: int, image_shape: tuple[int, int, int]) -> keras.Model:
    """Convolutions and dropout, without batch norm, which would amplify rounding."""
    images = x = keras.Input(image_shape)
    for filters in (16, 32):
        x = keras.layers.Conv2D(filters, 3, strides=2, activation="relu")(x)
        x = keras.layers.Dropout(0.2)(x)
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(x)))


def small_resnet(num_classes: int, image_shape: tuple[int, int, int]) -> keras.Model:
    """ResNet-50 of an eighth of the channels, with dropout before its last layer."""
    network = resnet(50, num_classes, image_shape, width=8, stem="small")
    *_, last = network.layers
    x = keras.layers.Dropout(0.2)(last.input)
    return keras.Model(network.inputs, keras.layers.Dense(num_classes, name="logits")(x))


def narrow_resnet(num_classes: int, image_shape: tuple[int, int, int]) -> keras.Model:
    """ResNet-50 of an eighth of the channels."""
    return resnet(50, num_classes, image_shape, width=8)
