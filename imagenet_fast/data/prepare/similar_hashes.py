"""Search for pairs of equal digests and of perceptual hashes that differ in few bits.

A set of m equal images gives m - 1 pairs: the first image with each of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

# The largest number of bits in which the hashes of similar images differ.
DISTANCE = 12
# Hashes with fewer bits set are of images without structure, such as a single colour, which all
# have nearly the same hash.
_MIN_BITS_SET = 16
# With fewer parts, a part would have more than 32 bits.
_MIN_PARTS = 8
# Limits of the search in data sets with very many similar images.
_MAX_PAIRS = 200_000
_MAX_COMPARISONS = 2_000_000_000

# The number of bits set in each 16-bit number.
_BITS_SET = np.array([bin(number).count("1") for number in range(1 << 16)], np.uint8)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs of images.

    Attributes:
      first: indices of images in the data set, int64 of shape (pairs,).
      second: likewise; each is greater than that in ``first``.
      distance: number of bits in which the hashes differ, int64 of shape (pairs,).
      complete: whether these are all pairs; False if the search reached its limits.
    """

    first: np.ndarray
    second: np.ndarray
    distance: np.ndarray
    complete: bool = True


def equal_pairs(digests: np.ndarray) -> Pairs:
    """Returns the pairs of images with equal digests.

    Args:
      digests: of shape (images,).
    """
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    second = np.arange(len(digests))
    first = first[inverse.reshape(-1)]
    others = second != first
    return Pairs(first[others], second[others], np.zeros(others.sum(), np.int64))


def similar_pairs(hashes: np.ndarray, images: np.ndarray, distance: int = DISTANCE) -> Pairs:
    """Returns the pairs of images whose hashes differ in at most ``distance`` bits.

    Of images with equal hashes, only the first is compared with others. Hashes with very few bits
    set, of images without structure, are left out.

    Two hashes that differ in d bits are equal in at least one of any d + 1 parts of their bits
    (pigeonhole principle), so only hashes with an equal part are compared.

    Args:
      hashes: uint64 of shape (images, words).
      images: indices of the images to compare, in increasing order, int64 of shape (compared,).
      distance: the largest number of bits.
    """
    images = images[_bits_set(hashes[images]) >= _MIN_BITS_SET]
    compared = np.ascontiguousarray(hashes[images])
    same = equal_pairs(compared.view(f"V{compared.itemsize * compared.shape[1]}").reshape(-1))
    is_first = np.ones(len(images), bool)
    is_first[same.second] = False
    distinct = images[is_first]
    near, complete = _near(compared[is_first], distance)
    first = np.concatenate([images[same.first], distinct[near[:, 0]]])
    second = np.concatenate([images[same.second], distinct[near[:, 1]]])
    return Pairs(first, second, _bits_set(hashes[first] ^ hashes[second]), complete)


def _near(hashes: np.ndarray, distance: int) -> tuple[np.ndarray, bool]:
    """Returns the pairs of distinct hashes that differ in at most ``distance`` bits.

    The hashes are uint64 of shape (images, words).

    Returns:
      The pairs' indices, the smaller one first, int64 of shape (pairs, 2); whether these are all.
    """
    pairs: set[int] = set()
    compared = 0
    for part in _parts(hashes, max(distance + 1, _MIN_PARTS)):
        order = np.argsort(part, kind="stable")
        part = part[order]
        # Positions in the sorted order whose `step`-th successor has an equal part; each is
        # compared with the next hash, then with the next but one, and so on.
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
            if compared > _MAX_COMPARISONS or len(pairs) > _MAX_PAIRS:
                return _decode_pairs(pairs, len(part)), False
            step += 1
    return _decode_pairs(pairs, len(hashes)), True


def _decode_pairs(pairs: set[int], images: int) -> np.ndarray:
    found = np.array(sorted(pairs), np.int64)
    return np.stack([found // max(images, 1), found % max(images, 1)], axis=1)


def _parts(hashes: np.ndarray, number: int) -> Iterator[np.ndarray]:
    """Splits the bits into ``number`` parts and yields each as uint32 of shape (images,)."""
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
