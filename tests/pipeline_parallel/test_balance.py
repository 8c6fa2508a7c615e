"""Balances by costs, against the simulated time of all that there are."""

import functools
import itertools
import math
import random

import keras
import pytest

from imagenet_fast import UserError
from imagenet_fast.pipeline_parallel import balance
from imagenet_fast.pipeline_parallel.balance import balance_for, best_balance
from imagenet_fast.pipeline_parallel.in_stages import build_in_stages
from imagenet_fast.pipeline_parallel.schedules import tasks
from imagenet_fast.pipeline_parallel.simulation import (
    BlockCost,
    micro_batches_in_memory,
    simulate,
    stage_memory,
)


def block(forward, backward, **sizes):
    given = {"name": "block", "forward": forward, "backward": backward, **sizes}
    return BlockCost(**{**dict.fromkeys(BlockCost._fields, 0), **given})


def balances(blocks, stages):
    for cuts in itertools.combinations(range(1, blocks), stages - 1):
        yield [end - first for first, end in zip((0, *cuts), (*cuts, blocks))]


def stages_of(costs, balance):
    ends = itertools.accumulate(balance)
    return [
        functools.reduce(BlockCost.followed_by, costs[end - own : end])
        for own, end in zip(balance, ends)
    ]


def seconds(costs, balance, order, rematerialize):
    stages = stages_of(costs, balance)
    forward, backward = ([getattr(own, x) for own in stages] for x in ("forward", "backward"))
    return simulate(order, forward, backward, rematerialize=rematerialize).seconds


@pytest.mark.parametrize("rematerialize", ["always", "except_last", "never"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_few_balances_are_faster(schedule, rematerialize):
    ratios = []
    for seed in range(30):
        draw = random.Random(seed)
        blocks, stages, parts = draw.randint(6, 12), draw.choice([2, 3, 4]), draw.choice([4, 16])
        forward = [draw.uniform(1, 4) for _ in range(blocks)]
        costs = [block(own, own * draw.uniform(1.8, 2.2)) for own in forward]
        order = tasks(schedule, stages, parts)
        found = best_balance(costs, order, rematerialize)
        least = min(seconds(costs, own, order, rematerialize) for own in balances(blocks, stages))
        ratios.append(seconds(costs, found, order, rematerialize) / least)
    assert max(ratios) < 1.15
    assert sum(ratios) / len(ratios) < 1.02


def passes_of(schedule, stage, stages, parts, rematerialize):
    """The forward passes of a stage, with the second ones, and its backward passes."""
    stored = {"never": parts, "except_last": 1, "always": 0}[rematerialize]
    last = stage == stages - 1
    if schedule == "1f1b":  # The backward pass follows at once.
        again = 0 if last else parts - stored
    else:
        again = parts - max(stored, 1) if last else parts - stored
    return parts + again, parts


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("rematerialize", ["always", "except_last", "never"])
def test_the_slowest_stage_has_the_least_work_of_all_balances(schedule, rematerialize):
    """Also with few micro-batches, and where the backward pass is cheap."""
    for seed in range(25):
        draw = random.Random(seed)
        blocks, stages, parts = draw.randint(3, 8), draw.choice([2, 3]), draw.choice([1, 2, 3, 8])
        costs = [block(draw.uniform(1, 9), draw.uniform(0, 9)) for _ in range(blocks)]
        passes = [passes_of(schedule, k, stages, parts, rematerialize) for k in range(stages)]

        def slowest(balance, costs=costs, passes=passes):
            return max(
                forward * cost.forward + backward * cost.backward
                for cost, (forward, backward) in zip(stages_of(costs, balance), passes)
            )

        found = best_balance(costs, tasks(schedule, stages, parts), rematerialize)
        assert slowest(found) == pytest.approx(min(map(slowest, balances(blocks, stages))))


def test_the_last_stage_gets_more_where_it_computes_nothing_twice():
    costs = [block(1.0, 2.0)] * 14
    assert best_balance(costs, tasks("1f1b", 2, 8), "always") == [6, 8]
    assert best_balance(costs, tasks("1f1b", 2, 2), "always") == [6, 8]
    assert best_balance(costs, tasks("1f1b", 2, 8), "never") == [7, 7]
    # There, others recompute while it makes its only forward pass.
    assert best_balance(costs, tasks("gpipe", 2, 8), "always") == [7, 7]


@pytest.mark.parametrize("seed", range(10))
def test_stages_fit(seed):
    draw = random.Random(seed)
    names = ("parameter_bytes", "input_bytes", "output_bytes", "activation_bytes")
    costs = [
        block(draw.uniform(1, 4), 2.0, **{name: draw.randint(1, 100) for name in names})
        for _ in range(9)
    ]
    order = tasks("1f1b", 3, 4)
    holds = micro_batches_in_memory(order, "except_last")

    def most(balance):
        stages = stages_of(costs, balance)
        return max(stage_memory(own, hold, 2).total for own, hold in zip(stages, holds))

    needed = sorted(map(most, balances(9, 3)))
    free = best_balance(costs, order, "except_last", slots=2)
    for limit in (needed[0], needed[3]):
        found = best_balance(costs, order, "except_last", slots=2, limit=limit)
        assert most(found) <= limit
    assert best_balance(costs, order, "except_last", slots=2, limit=needed[-1]) == free
    with pytest.raises(UserError, match="do not fit"):
        best_balance(costs, order, "except_last", slots=2, limit=needed[0] - 1)


def test_of_a_network_that_is_built_in_stages():
    def make():
        x = images = keras.Input((8, 8, 3))
        for number, filters in enumerate((4, 4, 4, 4, 24)):
            x = keras.layers.Conv2D(filters, 3, padding="same", name=f"conv{number}")(x)
        return keras.Model(images, x)

    balancer = functools.partial(
        balance_for,
        inputs=make().input,
        stages=2,
        batch_size=9,
        micro_batches=2,
        schedule="gpipe",
        rematerialize="always",
    )
    model, _, balance = build_in_stages(make, ["CPU:0", "CPU:0"], balancer)
    assert balance == [4, 1]
    assert model.built


@pytest.mark.parametrize("searched", [False, True])
def test_devices_with_several_stages(monkeypatch, searched):
    """The fastest of all balances that fit, by trying all, or half as many in a search."""
    if searched:
        monkeypatch.setattr("imagenet_fast.pipeline_parallel.balance._MOST_TASKS", 165 * 32 // 2)
    order = tasks("interleaved_1f1b", 4, 4, 2)
    holds = micro_batches_in_memory(order, "except_last")
    for seed in range(4):
        draw = random.Random(seed)
        costs = [
            block(work := draw.randint(1, 9), 2 * work, parameter_bytes=draw.choice([1, 4, 20]))
            for _ in range(12)
        ]

        def batch(balance, costs=costs):
            stages = stages_of(costs, balance)
            forward, backward = [own.forward for own in stages], [own.backward for own in stages]
            return simulate(order, forward, backward, devices=2).seconds

        def most(balance, costs=costs):
            pairs = zip(stages_of(costs, balance), holds)
            totals = [stage_memory(*pair, 0).total for pair in pairs]
            return max(totals[0] + totals[2], totals[1] + totals[3])

        possible = {tuple(own): (most(own), batch(own)) for own in balances(12, 4)}
        least = min(memory for memory, _ in possible.values())
        find = functools.partial(best_balance, costs, order, "except_last", devices=2)
        for limit in (least, 1.2 * least, math.inf):
            memory, time = possible[tuple(find(limit=limit))]
            assert memory <= limit
            assert time == min(time for memory, time in possible.values() if memory <= limit)
        with pytest.raises(UserError, match=r"4 stages on 2 devices of .* one needs"):
            find(limit=0.99 * least)


@pytest.mark.parametrize(("batch_size", "micro_batches", "examples"), [(12, 4, 3), (10, 4, 3)])
def test_blocks_cost_what_a_micro_batch_does(monkeypatch, batch_size, micro_batches, examples):
    asked = []

    def estimate(blocks, inputs, batch):
        asked.append(batch)
        return [block(1, 2)] * len(blocks)

    monkeypatch.setattr(balance, "estimate", estimate)
    found = balance_for(
        [None] * 4,
        None,
        stages=2,
        batch_size=batch_size,
        micro_batches=micro_batches,
        schedule="gpipe",
        rematerialize="never",
    )
    assert found == [2, 2]
    assert asked == [examples]
