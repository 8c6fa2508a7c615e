"""The network of the runs: small, with all kinds of state that a checkpoint has to have."""

from __future__ import annotations

import keras


def build(num_classes: int, image_shape: tuple[int, int, int]) -> keras.Model:
    """Returns a convolution, batch norm and dropout.

    Without ReLU, at whose kink the rounding of a sum decides whether an activation has a gradient.
    """
    images = keras.Input(image_shape)
    x = keras.layers.Conv2D(8, 3, strides=2, use_bias=False)(images)
    x = keras.layers.Activation("swish")(keras.layers.BatchNormalization()(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dropout(0.2)(x)
    return keras.Model(images, keras.layers.Dense(num_classes, name="logits")(x))
