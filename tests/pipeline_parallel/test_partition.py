"""The partition of blocks into stages, against trying all of them."""

import functools
import itertools
import math
import random

import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.pipeline_parallel.partition import bounds, partition_by


def partition(costs, stages, **limits):
    """Of blocks that cost the same in each stage."""
    cost = lambda stage, first, end: float(sum(costs[first:end]))  # noqa: E731
    return partition_by(cost, len(costs), stages, **limits)


def stages_of(values, balance):
    ends = list(itertools.accumulate(balance))
    return [values[end - own : end] for own, end in zip(balance, ends)]


def all_balances(blocks, stages):
    for cuts in itertools.combinations(range(1, blocks), stages - 1):
        yield [end - first for first, end in zip((0, *cuts), (*cuts, blocks))]


def score(costs, balance):
    sums = [sum(stages_of(own, balance)[stage]) for stage, own in enumerate(costs)]
    return max(sums), sum(own**2 for own in sums)


@pytest.mark.parametrize("seed", range(60))
def test_is_the_best_of_all(seed):
    draw = random.Random(seed)
    blocks = draw.randint(1, 9)
    stages = draw.randint(1, min(4, blocks))
    # Of each block in each stage.
    costs = [[draw.randint(0, 20) for _ in range(blocks)] for _ in range(stages)]
    sizes = [draw.randint(1, 10) for _ in range(blocks)]
    limit = draw.randint(8, 40) if seed % 3 else math.inf

    def memory(stage, first, end):
        """Of later stages less."""
        return sum(sizes[first:end]) * (stages - stage)

    def fits(balance):
        ends = list(itertools.accumulate(balance))
        return all(
            memory(k, end - own, end) <= limit for k, own, end in zip(range(9), balance, ends)
        )

    possible = [own for own in all_balances(blocks, stages) if fits(own)]
    split = functools.partial(partition_by, lambda stage, first, end: sum(costs[stage][first:end]))
    if not possible:
        with pytest.raises(UserError, match="do not fit"):
            split(blocks, stages, memory=memory, limit=limit)
        return
    found = split(blocks, stages, memory=memory, limit=limit)
    assert found in possible
    scores = [score(costs, own) for own in possible]
    assert score(costs, found) == min(scores)


def test_equal_blocks_are_dealt_out_evenly():
    assert partition([1.0] * 24, 8) == [3] * 8
    assert sorted(partition([1.0] * 10, 4)) == [2, 2, 3, 3]


def test_of_equally_slow_ones_the_more_even():
    # 5 in one stage cannot be helped; 1 + 4 and 3 + 2 are as slow.
    assert partition([5, 1, 2, 2], 3) == [1, 2, 1]


def test_of_equally_slow_ones_the_most_even_though_it_begins_worse():
    """5, 3 and 9, before the 9 that cannot be helped, in place of 8, 8 and 1."""
    assert partition([5, 3, 8, 1, 9], 4) == [1, 1, 2, 1]
    for costs in itertools.product((1, 3, 5, 8, 9), repeat=5):
        found = score([costs] * 4, partition(costs, 4))
        assert found == min(score([costs] * 4, own) for own in all_balances(5, 4))


def test_a_limit_moves_the_cut():
    sizes = [1, 9, 1, 1]

    def memory(stage, first, end):
        return sum(sizes[first:end])

    assert partition([1, 1, 1, 1], 2, memory=memory) == [2, 2]
    assert partition([1, 1, 1, 1], 2, memory=memory, limit=11) == [2, 2]
    # 10 would be in the first one.
    assert partition([1, 1, 1, 5], 2, memory=memory, limit=11) == [3, 1]
    assert partition([1, 1, 1, 5], 2, memory=memory, limit=10) == [2, 2]


def test_what_would_be_needed_is_told():
    sizes = [1.0, 3.0, 2.0]

    def memory(stage, first, end):
        return sum(sizes[first:end]) * 2**30

    with pytest.raises(UserError, match=r"2 stages of 3\.5 GiB .* needs at least 4 GiB"):
        partition([1, 1, 1], 2, memory=memory, limit=3.5 * 2**30)
    assert partition([1, 1, 1], 2, memory=memory, limit=4 * 2**30) == [2, 1]


def test_hundreds_of_blocks():
    draw = random.Random(0)
    costs = [draw.random() for _ in range(300)]
    balance = partition(costs, 8)
    assert max(sum(own) for own in stages_of(costs, balance)) < 1.1 * sum(costs) / 8


@pytest.mark.parametrize(("blocks", "stages"), [(3, 4), (3, 0), (0, 1)])
def test_a_block_for_each_stage(blocks, stages):
    with pytest.raises(UserError, match=f"{blocks} blocks cannot be split into {stages} stages"):
        partition([1.0] * blocks, stages)


@pytest.mark.parametrize(
    ("balance", "blocks", "stages", "expected"),
    [
        (None, 6, 3, [(0, 2), (2, 4), (4, 6)]),
        (None, 1, 1, [(0, 1)]),
        ([1, 3, 2], 6, 3, [(0, 1), (1, 4), (4, 6)]),
        ((4, 1), 5, 2, [(0, 4), (4, 5)]),
    ],
)
def test_bounds(balance, blocks, stages, expected):
    assert bounds(balance, blocks, stages) == expected


def test_bounds_of_what_cannot_be_dealt_out_evenly():
    found = bounds(None, 11, 4)
    assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])]
    assert sorted(end - begin for begin, end in found) == [2, 3, 3, 3]


@pytest.mark.parametrize(
    ("balance", "stages", "told"),
    [
        (None, 6, "5 blocks cannot be split into 6 stages: use between 1 and 5 stages"),
        (None, 0, "5 blocks cannot be split into 0 stages"),
        ([2, 2], 2, r"balance \[2, 2\] is of 4 blocks, but there are 5"),
        ([5], 2, r"balance \[5\] has 1 stages, but there are 2"),
        ([5, 0], 2, r"balance \[5, 0\] leaves a stage without blocks"),
        ([2.5, 2.5], 2, r"balance is \[2.5, 2.5\], but must be a list .* such as \[2, 3\]"),
        ("23", 2, "balance is '23', but must be a list"),
    ],
)
def test_no_bounds(balance, stages, told):
    with pytest.raises(UserError, match=told):
        bounds(balance, 5, stages)
