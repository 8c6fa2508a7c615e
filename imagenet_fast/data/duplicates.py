"""Images that are in a data set twice: equal files, and images that look alike.

A set of m equal images is m - 1 pairs, each of the set's first image and another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

# Of a hash's bits, so many may differ between images that look alike.
DISTANCE = 12
# A hash with fewer bits set is one of an image without structure, as one of a single color: to the
# hash all of those are one.
_LEAST_BITS = 16
# Of fewer parts than this, one had more bits than the numbers that they become.
_LEAST_PARTS = 8
# Of data whose images all look alike, not all pairs are searched for.
_MOST_PAIRS = 200_000
_MOST_COMPARED = 2_000_000_000

# The number of bits that are set in each number of 16 bits.
_BITS_SET = np.array([bin(number).count("1") for number in range(1 << 16)], np.uint8)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs of images.

    Attributes:
      first: Places of images in the data set, int64 of shape (pairs,).
      second: Likewise; each greater than that in ``first``.
      distance: Number of bits in which their hashes differ, int64 of shape (pairs,).
      complete: Whether these are all; otherwise there were too many.
    """

    first: np.ndarray
    second: np.ndarray
    distance: np.ndarray
    complete: bool = True


def equal_files(digests: np.ndarray) -> Pairs:
    """Returns the images that are equal byte for byte.

    Args:
      digests: A number that tells files apart, of shape (images,).
    """
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    second = np.arange(len(digests))
    first = first[inverse.reshape(-1)]
    others = second != first
    return Pairs(first[others], second[others], np.zeros(others.sum(), np.int64))


def look_alike(hashes: np.ndarray, images: np.ndarray, distance: int = DISTANCE) -> Pairs:
    """Returns images whose hashes differ in at most ``distance`` bits.

    Of images with equal hashes only the first is compared with others. Hashes of so few set bits
    that the image has no structure are left out.

    Two hashes that differ in d bits are equal in at least one of any d + 1 parts of their bits. So
    only images are compared that are equal in one of these parts.

    Args:
      hashes: uint64 of shape (images, words).
      images: Places of the images to look at, in order, int64 of shape (looked at,).
      distance: The most bits.
    """
    images = images[_bits_set(hashes[images]) >= _LEAST_BITS]
    found = np.ascontiguousarray(hashes[images])
    same = equal_files(found.view(f"V{found.itemsize * found.shape[1]}").reshape(-1))
    alone = np.ones(len(images), bool)
    alone[same.second] = False
    unlike = images[alone]
    near, complete = _near(found[alone], distance)
    first = np.concatenate([images[same.first], unlike[near[:, 0]]])
    second = np.concatenate([images[same.second], unlike[near[:, 1]]])
    return Pairs(first, second, _bits_set(hashes[first] ^ hashes[second]), complete)


def _near(hashes: np.ndarray, distance: int) -> tuple[np.ndarray, bool]:
    """Returns the pairs of hashes that differ in at most ``distance`` bits.

    Args:
      hashes: All different, uint64 of shape (images, words).
      distance: The most bits.

    Returns:
      Two places each, the smaller one first, int64 of shape (pairs, 2); whether these are all.
    """
    pairs: set[int] = set()
    compared = 0
    for part in _parts(hashes, max(distance + 1, _LEAST_PARTS)):
        order = np.argsort(part, kind="stable")
        part = part[order]
        # Places in that order, of those that have equals behind them; each is compared with the
        # next one, then with the next but one, and so on.
        places, step = np.arange(len(part)), 1
        while True:
            places = places[: np.searchsorted(places, len(part) - step)]
            places = places[part[places] == part[places + step]]
            if not len(places):
                break
            first, second = order[places], order[places + step]
            near = _bits_set(hashes[first] ^ hashes[second]) <= distance
            pairs.update((first[near] * len(part) + second[near]).tolist())
            compared += len(places)
            if compared > _MOST_COMPARED or len(pairs) > _MOST_PAIRS:
                return _places(pairs, len(part)), False
            step += 1
    return _places(pairs, len(hashes)), True


def _places(pairs: set[int], images: int) -> np.ndarray:
    found = np.array(sorted(pairs), np.int64)
    return np.stack([found // max(images, 1), found % max(images, 1)], axis=1)


def _parts(hashes: np.ndarray, number: int) -> Iterator[np.ndarray]:
    """Yields the number that each hash has in each of so many parts, uint32 of shape (images,)."""
    bits = 64 * hashes.shape[1]
    octets = hashes.astype("<u8").view(np.uint8).reshape(-1, bits // 8)
    for bounds in np.array_split(np.arange(bits), number):
        start, stop = int(bounds[0]), int(bounds[-1]) + 1
        value = np.zeros(len(hashes), np.uint64)
        for octet in range(start // 8, (stop + 7) // 8):
            value = value << np.uint64(8) | octets[:, octet]
        value >>= np.uint64(-stop % 8)
        yield (value & np.uint64((1 << (stop - start)) - 1)).astype(np.uint32)


def _bits_set(words: np.ndarray) -> np.ndarray:
    """Returns the number of bits set in each row, int64 of shape (rows,)."""
    halves = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 4 * words.shape[1])
    return _BITS_SET[halves].sum(axis=1, dtype=np.int64)
