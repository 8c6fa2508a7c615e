"""Groups of replicas."""

import itertools

import pytest

from imagenet_fast import UserError
from imagenet_fast.distribute.groups import columns, consecutive, group_key, torus


def test_consecutive():
    groups = consecutive(8, 4)
    assert groups.members == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups.size == 4
    assert groups.of(5) == (4, 5, 6, 7)


@pytest.mark.parametrize("size", [1, 8])
def test_each_alone_and_all_together(size):
    groups = consecutive(8, size)
    assert len(groups.members) == 8 // size
    assert sorted(itertools.chain(*groups.members)) == list(range(8))


def test_columns():
    assert columns(consecutive(6, 2)).members == ((0, 2, 4), (1, 3, 5))


@pytest.mark.parametrize("size", [0, -1, 4, 7, 12])
def test_sizes_that_do_not_divide(size):
    with pytest.raises(UserError, match=rf"into groups of {size}; possible sizes: 1, 2, 3, 6$"):
        consecutive(6, size)


def test_torus():
    """2 x 3 chips with two cores each, in any order."""
    places = [(x, y, 0, core) for x in range(2) for y in range(3) for core in range(2)]
    rows, across = torus(places)
    assert [[places[r][1] for r in row] for row in rows.members] == [[y] * 4 for y in range(3)]
    for column in across.members:
        assert len({(places[r][0], places[r][3]) for r in column}) == 1
        assert [places[r][1] for r in column] == [0, 1, 2]


@pytest.mark.parametrize(
    "places",
    [
        [(0, 0), (1, 0), (0, 1)],
        [(0, 0), (1, 0), (1, 1), (2, 1)],
    ],
)
def test_not_a_rectangle(places):
    with pytest.raises(UserError, match="do not form a rectangle"):
        torus(places)


def test_group_keys_differ():
    """All groups of 64 replicas in a square; and not TensorFlow's own."""
    groups = [consecutive(64, size) for size in (1, 2, 4, 8, 16, 32, 64)]
    groups += [columns(own) for own in groups]
    members = {group for own in groups for group in own.members}
    keys = {group_key(group) for group in members}
    assert len(keys) == len(members) > 100
    assert min(keys) >= 2**20
    assert max(keys) < 2**31
