"""Random changes to the colours and the side of an image, each a pure function of its seed.

Images are uint8 or float32 [height, width, 3] in 0..255; seeds are int32 [2].
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from imagenet_fast.config import Config

# The principal components of ImageNet's colours, scaled to 0..1: Krizhevsky et al. 2012, in
# fb.resnet.torch's digits.
_EIGENVALUES = np.array([0.2175, 0.0188, 0.0045], np.float32)
_EIGENVECTORS = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]],
    np.float32,
)
_GREY = np.array([0.299, 0.587, 0.114], np.float32)


def augment(image: tf.Tensor, seed: tf.Tensor, config: Config) -> tf.Tensor:
    """Applies what ``config`` asks for, in fb.resnet.torch's order: jitter, lighting, flip.

    Returns:
      uint8, clipped to 0..255, of the image's shape.
    """
    seeds = tf.unstack(tf.random.experimental.stateless_split(seed, 3))
    if config.color_jitter or config.lighting:
        pixels = tf.cast(image, tf.float32)
        if config.color_jitter:
            pixels = color_jitter(pixels, config.color_jitter, seeds[0])
        if config.lighting:
            pixels = lighting(pixels, config.lighting, seeds[1])
        image = tf.saturate_cast(tf.round(pixels), tf.uint8)
    if config.flip:
        image = tf.image.stateless_random_flip_left_right(image, seeds[2])
    return image


def color_jitter(image: tf.Tensor, strength: float, seed: tf.Tensor) -> tf.Tensor:
    """Changes brightness, contrast and saturation.

    Each blends the image with a plainer one: black, the grey of its mean, its own greys. The
    image's share is drawn from ``[1 - strength, 1 + strength]`` for each of the three. Their order,
    random in fb.resnet.torch, makes no difference, since nothing is clipped in between.

    Args:
      image: float32 [height, width, 3].
      strength: in [0, 1).
      seed: int32 [2].

    Returns:
      float32 [height, width, 3], not clipped.
    """
    shares = tf.random.stateless_uniform([3], seed, 1 - strength, 1 + strength)
    brightness, contrast, saturation = tf.unstack(shares)
    grey = tf.tensordot(image, _GREY, 1)[..., tf.newaxis]
    image = saturation * image + (1 - saturation) * grey
    image = contrast * image + (1 - contrast) * tf.reduce_mean(grey)
    return brightness * image


def lighting(image: tf.Tensor, std: float, seed: tf.Tensor) -> tf.Tensor:
    """Adds noise along the principal components of ImageNet's colours.

    Args:
      image: float32 [height, width, 3].
      std: standard deviation of the noise along each component, in units of its eigenvalue.
      seed: int32 [2].

    Returns:
      float32 [height, width, 3], not clipped.
    """
    amounts = tf.random.stateless_normal([3], seed, stddev=std)
    return image + 255 * tf.linalg.matvec(_EIGENVECTORS, amounts * _EIGENVALUES)
