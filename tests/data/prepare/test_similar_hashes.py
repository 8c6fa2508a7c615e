import numpy as np
import pytest

from imagenet_fast.data.prepare import similar_hashes
from imagenet_fast.data.prepare.similar_hashes import equal_pairs, similar_pairs


def random_hashes(count, seed=0):
    """Returns hashes whose second half are variants of others with some bits changed."""
    draw = np.random.RandomState(seed)
    bits = draw.randint(0, 2, (count, 256)).astype(bool)
    for place in range(count // 2):
        changed = draw.permutation(256)[: draw.randint(0, 20)]
        bits[-1 - place] = bits[place // 4]
        bits[-1 - place, changed] ^= True
    return bits, np.packbits(bits, axis=1).view("<u8")


def by_force(bits, distance):
    """Returns all pairs within the distance; of equal hashes, the first with each other one."""
    firsts = {}
    for place, row in enumerate(bits):
        firsts.setdefault(row.tobytes(), place)
    first = np.array([firsts[row.tobytes()] for row in bits])
    found = {(own, place, 0) for place, own in enumerate(first.tolist()) if own != place}
    alone = [place for place in range(len(bits)) if first[place] == place]
    for number, place in enumerate(alone):
        distances = (bits[alone[number + 1 :]] ^ bits[place]).sum(axis=1)
        found |= {
            (place, other, int(own))
            for other, own in zip(alone[number + 1 :], distances)
            if own <= distance
        }
    return found


def as_set(pairs):
    return set(zip(pairs.first.tolist(), pairs.second.tolist(), pairs.distance.tolist()))


@pytest.mark.parametrize("distance", [0, 5, 12])
def test_pairs_equal_those_of_comparing_all_with_all(distance):
    bits, hashes = random_hashes(400)
    found = similar_pairs(hashes, np.arange(len(hashes)), distance)
    assert found.complete
    assert len(found.first) == len(as_set(found))
    assert as_set(found) == by_force(bits, distance)


@pytest.mark.parametrize("clean", range(13))
def test_pairs_with_a_single_equal_part_are_found(clean):
    parts = np.array_split(np.arange(256), 13)
    bits = np.random.RandomState(clean).randint(0, 2, (2, 256)).astype(bool)
    bits[1] = bits[0]
    # Next to the clean part where that is possible.
    bits[1, [part[-1] for part in parts[:clean]] + [part[0] for part in parts[clean + 1 :]]] ^= True
    found = similar_pairs(np.packbits(bits, axis=1).view("<u8"), np.arange(2))
    assert as_set(found) == {(0, 1, 12)}


def test_only_the_given_images_are_compared():
    _, hashes = random_hashes(60)
    images = np.r_[0:10, 40:60]
    found = as_set(similar_pairs(hashes, images))
    everything = as_set(similar_pairs(hashes, np.arange(60)))
    assert len(found) > 3
    assert found == {pair for pair in everything if {*pair[:2]} <= {*images.tolist()}}
    assert found < everything


def test_hashes_of_images_without_structure_are_ignored():
    hashes = np.zeros((5, 4), "<u8")
    hashes[:, 0] = 1
    assert not len(similar_pairs(hashes, np.arange(5)).first)
    hashes[:2] = 0x0F0F0F0F0F0F0F0F
    assert as_set(similar_pairs(hashes, np.arange(5))) == {(0, 1, 0)}


def test_search_ends_if_all_images_are_similar(monkeypatch):
    monkeypatch.setattr(similar_hashes, "_MAX_PAIRS", 50)
    bits = np.random.RandomState(0).randint(0, 2, (1, 256)).astype(bool).repeat(40, axis=0)
    bits[np.arange(40), np.arange(40)] ^= True
    found = similar_pairs(np.packbits(bits, axis=1).view("<u8"), np.arange(40))
    assert not found.complete
    assert 50 < len(found.first) <= 50 + 40
    assert set(found.distance.tolist()) == {2}


def test_no_images_give_no_pairs():
    for found in (
        equal_pairs(np.zeros(0, "<u8")),
        similar_pairs(np.zeros((0, 4), "<u8"), np.arange(0)),
    ):
        assert found.complete and not len(found.first)


def test_equal_digests_are_paired_with_the_first():
    found = equal_pairs(np.array([7, 3, 7, 5, 3, 7], "<u8"))
    assert sorted(as_set(found)) == [(0, 2, 0), (0, 5, 0), (1, 4, 0)]
