"""Random numbers and permutations that are functions of seed, epoch and place, for many images.

TensorFlow's stateless operations have one seed per tensor, so a seed per image would take an
operation per image. SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators") allows random access to its sequence.
"""

from __future__ import annotations

import zlib

import tensorflow as tf

_GOLDEN = 0x9E3779B97F4A7C15
_MAX_COUNT = 2**16  # of numbers per image and purpose
_FRACTION_BITS = 24
_ROUNDS = 8


def uniform(identities: tf.Tensor, purpose: str, count: int) -> tf.Tensor:
    """Returns independent random numbers, uniform in [0, 1).

    Args:
      identities: int64 [images, 3]: seed, epoch and place in the epoch's order of each image.
      purpose: name of their use; different purposes have independent numbers.
      count: number per image.

    Returns:
      float32 [images, count], multiples of 2**-24.
    """
    # GPUs have no unstack of uint64.
    seeds, epochs, places = (
        tf.cast(column, tf.uint64) for column in tf.unstack(identities, axis=1)
    )
    streams = _streams(seeds, epochs, purpose)
    indices = places[:, tf.newaxis] * _MAX_COUNT + tf.cast(tf.range(count), tf.uint64)
    mixed = splitmix64(streams[:, tf.newaxis], indices)
    high = tf.bitwise.right_shift(mixed, tf.constant(64 - _FRACTION_BITS, tf.uint64))
    return tf.cast(high, tf.float32) * 2.0**-_FRACTION_BITS


def permuted(
    places: tf.Tensor, count: int, seed: tf.Tensor | int, epoch: tf.Tensor | int, purpose: str
) -> tf.Tensor:
    """Returns the values of a random permutation of ``0 .. count - 1`` at some places.

    It is a Feistel network over the next power of two, repeated until the value is in the range
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). The cost is proportional to
    the number of places, and no memory is needed for the others.

    Args:
      places: int64, in [0, count).
      count: length of the permutation.
      seed: of the run.
      epoch: different epochs have independent permutations.
      purpose: likewise different purposes.

    Returns:
      int64, of the shape of ``places``.
    """
    bits = max(2, (count - 1).bit_length())
    low = bits // 2
    masks = [tf.constant(2**size - 1, tf.uint64) for size in (bits - low, low)]
    stream = _streams(tf.cast(seed, tf.uint64), tf.cast(epoch, tf.uint64), purpose)
    keys = splitmix64(stream, tf.cast(tf.range(_ROUNDS), tf.uint64))
    size, shift = tf.constant(count, tf.uint64), tf.constant(low, tf.uint64)

    def walk(x: tf.Tensor) -> tf.Tensor:
        halves = [tf.bitwise.right_shift(x, shift), tf.bitwise.bitwise_and(x, masks[1])]
        for step in range(_ROUNDS):
            half = step % 2
            noise = tf.bitwise.bitwise_and(_mix(halves[1 - half] + keys[step]), masks[half])
            halves[half] = tf.bitwise.bitwise_xor(halves[half], noise)
        return tf.bitwise.bitwise_or(tf.bitwise.left_shift(halves[0], shift), halves[1])

    (permuted_places,) = tf.while_loop(
        lambda x: tf.reduce_any(x >= size),
        lambda x: (tf.where(x >= size, walk(x), x),),
        (walk(tf.cast(places, tf.uint64)),),
        parallel_iterations=1,
    )
    return tf.cast(permuted_places, tf.int64)


def splitmix64(states: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """Returns the numbers at some indices of SplitMix64 sequences with initial states: uint64."""
    return _mix(states + (indices + 1) * tf.constant(_GOLDEN, tf.uint64))


def _streams(seeds: tf.Tensor, epochs: tf.Tensor, purpose: str) -> tf.Tensor:
    """Returns initial states for seeds, epochs and a purpose: all uint64."""
    return _mix(_mix(_mix(seeds) + epochs) + zlib.crc32(purpose.encode()))


def _mix(x: tf.Tensor) -> tf.Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(shift, tf.uint64)))
        x = x * tf.constant(factor, tf.uint64)
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(31, tf.uint64)))
