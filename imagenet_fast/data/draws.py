"""Random numbers for many images at once, each a function of its seed, epoch and place.

TensorFlow's stateless operations have one seed for all of a tensor, so that images with seeds of
their own would need an operation each. SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable
pseudorandom number generators") can begin anywhere in its sequence.
"""

from __future__ import annotations

import zlib

import tensorflow as tf

_GOLDEN = 0x9E3779B97F4A7C15
_MOST = 2**16  # numbers of an image and purpose
_FRACTION_BITS = 24


def uniform(identities: tf.Tensor, purpose: str, count: int) -> tf.Tensor:
    """Returns independent random numbers, uniform in [0, 1).

    Args:
      identities: int64 [images, 3]: seed, epoch and place in the epoch's order of each image.
      purpose: what they are for; others get other numbers.
      count: how many for each image.

    Returns:
      float32 [images, count], multiples of 2**-24.
    """
    seeds, epochs, places = tf.unstack(tf.cast(identities, tf.uint64), axis=1)
    streams = _mix(_mix(_mix(seeds) + epochs) + zlib.crc32(purpose.encode()))
    indices = places[:, tf.newaxis] * _MOST + tf.cast(tf.range(count), tf.uint64)
    mixed = splitmix64(streams[:, tf.newaxis], indices)
    high = tf.bitwise.right_shift(mixed, tf.constant(64 - _FRACTION_BITS, tf.uint64))
    return tf.cast(high, tf.float32) * 2.0**-_FRACTION_BITS


def splitmix64(states: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """Returns numbers of the sequences of SplitMix64, uint64.

    Args:
      states: uint64, those in which the sequences begin.
      indices: uint64, which numbers of them, from 0.
    """
    return _mix(states + (indices + 1) * tf.constant(_GOLDEN, tf.uint64))


def _mix(x: tf.Tensor) -> tf.Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(shift, tf.uint64)))
        x = x * tf.constant(factor, tf.uint64)
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(31, tf.uint64)))
