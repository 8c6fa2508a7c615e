"""Plans of pipelines, against the network's counts and the simulation."""

import csv
import dataclasses
import io
import itertools
import json
import math
import re
import xml.etree.ElementTree

import pytest
from small_config import SMALL

from imagenet_fast import UserError
from imagenet_fast.lab.planning.gantt import gantt
from imagenet_fast.lab.planning.pipeline import PipelinePlan, plan_pipeline
from imagenet_fast.pipeline_parallel.simulation import BlockCost, simulate

CONFIG = SMALL.replace(accumulation_steps=4, pipeline_stages=3, optimizer="adam")
# Of ResNet-8: convolutions, two values for each channel of a batch norm, a dense layer.
CONVOLUTIONS = 9 * (3 * 16 + 2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64)
PARAMETERS = CONVOLUTIONS + 2 * (3 * 16 + 2 * 32 + 2 * 64) + 64 * 10 + 10


@pytest.fixture(scope="module")
def plan():
    return plan_pipeline(CONFIG)


def test_parameters_and_memory(plan):
    assert sum(own.parameters for own in plan.stages) == PARAMETERS
    assert sum(plan.balance) == len(plan.costs)
    assert plan.slots == 2
    weights = sum(own.weights + own.gradients + own.slots for own in plan.memory)
    others = sum(own.other_bytes for own in plan.costs)
    assert weights == 4 * 4 * PARAMETERS + others
    # All 32 images of 16 x 16 wait in the first stage, as float32.
    assert plan.memory[0].inputs == 32 * 16 * 16 * 3 * 4


@pytest.mark.long
def test_copies_of_weights_are_counted():
    config = CONFIG.replace(optimizer="sgd", ema_decay=0.9, lookahead_every=5)
    assert plan_pipeline(config).slots == 3


@pytest.mark.long
def test_mixed_precision(plan):
    half = plan_pipeline(CONFIG.replace(precision="mixed_bfloat16"))
    assert half.memory[0].inputs == 32 * 16 * 16 * 3 * 2
    assert half.memory[0].weights == plan.memory[0].weights


@pytest.mark.long
def test_a_given_balance(plan):
    balance = (1, 1, len(plan.costs) - 2)
    own = plan_pipeline(CONFIG.replace(pipeline_balance=balance))
    assert own.balance == balance
    assert own.costs == plan.costs
    assert own.speed_up < plan.speed_up


@pytest.mark.long
def test_stages_fit(plan):
    most = max(own.total for own in plan.memory)
    assert plan_pipeline(CONFIG, limit=most).balance == plan.balance
    less = plan_pipeline(CONFIG, limit=0.97 * most)
    assert max(own.total for own in less.memory) <= 0.97 * most
    assert less.balance != plan.balance
    assert "memory      at most" in less.table()
    assert "GiB for what is not included" in less.table()
    with pytest.raises(UserError, match=r"do not fit into 3 stages of .* needs at least"):
        plan_pipeline(CONFIG, limit=0.1 * most)


@pytest.mark.long
def test_a_balance_that_does_not_fit_is_reported(plan):
    config = CONFIG.replace(pipeline_balance=plan.balance)
    assert "DOES NOT FIT" in plan_pipeline(config, limit=1000.0).table()


@pytest.mark.long
def test_seconds_of_this_machine(plan):
    own = plan_pipeline(CONFIG, "measured")
    assert "CPU:0" in own.device
    assert 0 < own.simulation.seconds < 60
    assert "s per image forward and backward, measured on" in own.table()
    assert [(c.name, c.activation_bytes) for c in own.costs] == [
        (c.name, c.activation_bytes) for c in plan.costs
    ]


def made_up(**changes):
    """Equal blocks with 1 TFLOP forward and 2 backward."""
    values = dict.fromkeys(BlockCost._fields, 2**20)
    costs = [
        BlockCost(**{**values, "name": f"block{n}", "forward": 1e12, "backward": 2e12})
        for n in range(4)
    ]
    options = {"accumulation_steps": 32, "rematerialize": "never", **changes}
    config = SMALL.replace(batch_size=64, pipeline_stages=4, **options)
    return PipelinePlan(config, tuple(costs), "", (1, 1, 1, 1), 1.0)


def test_table():
    """The bubble and the speed-up are those of Huang et al. 2018: (K - 1) / (M + K - 1)."""
    lines = made_up().table().splitlines()
    assert "batch       64 images of 16 px in 32 micro-batches of 2" in lines
    # For two images.
    assert "costs       6000 GFLOPs per image forward and backward, counted" in lines
    assert "balance     --pipeline_balance=1,1,1,1" in lines
    assert "busiest     stage 0, 91.4% of the time; least busy: stage 0, 91.4%" in lines
    assert any(re.match(r"bubble +8\.6% .*; 8\.6% with equal stages", line) for line in lines)
    assert any(line.startswith("speed-up    3.66 over one device") for line in lines)
    # weights and others, gradients, slots; 32 inputs; activations of 32.
    (row,) = (line.split() for line in lines if line.strip().startswith("2 "))
    assert row == ["2", "1", "block2", "1,048,576", "25.0%", "4.00", "32.00", "32.00", "68.00"]
    (row,) = (line.split() for line in lines if line.strip().startswith("all"))
    assert row == ["all", "4", "4,194,304", "100.0%", "16.00", "128.00", "128.00", "272.00"]


@pytest.mark.parametrize("rematerialize", ["always", "never"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_speed_up_is_over_a_device_that_stores_all_activations(schedule, rematerialize):
    own = made_up(pipeline_schedule=schedule, rematerialize=rematerialize)
    ratio = 32 * 4 * 3e12 / own.simulation.seconds
    assert own.speed_up == pytest.approx(ratio)
    assert f"time        {1 / ratio:.3f} of one device's for a batch; without" in own.table()
    seconds = dataclasses.replace(own, device="GPU:0").table()
    assert f"time        {own.simulation.seconds:.4g} s for a batch, {1 / ratio:.3f} of" in seconds


@pytest.mark.long
def test_a_limit_is_of_each_device():
    """Of the sum of its stages, for which the balance is chosen as for a given one."""
    options = {"pipeline_schedule": "interleaved_1f1b", "pipeline_stages_per_device": 2}
    config = CONFIG.replace(pipeline_stages=4, **options)
    free = plan_pipeline(config)
    cuts = itertools.combinations(range(1, len(free.costs)), 3)
    balances = [(i, j - i, k - j, len(free.costs) - k) for i, j, k in cuts]
    least = min(max(dataclasses.replace(free, balance=own).device_memory) for own in balances)
    less = plan_pipeline(config, limit=least)
    assert max(less.device_memory) == least
    assert "DOES NOT FIT" not in less.table()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_stages": 99}, "11 blocks cannot be split into 99 stages"),
        ({"pipeline_balance": (3, 2, 1)}, "is of 6 blocks, but there are 11"),
    ],
)
def test_stages_are_checked_before_costs_are_counted(monkeypatch, changes, message):
    monkeypatch.setattr("imagenet_fast.lab.planning.pipeline.estimate", None)
    with pytest.raises(UserError, match=message):
        plan_pipeline(CONFIG.replace(**changes))


def test_interleaved_stages():
    """Two devices of two equal stages each: half of the bubble of two stages."""
    own = made_up(
        pipeline_schedule="interleaved_1f1b", pipeline_stages_per_device=2, accumulation_steps=8
    )
    assert own.simulation.devices == 2
    assert own.simulation.bubble == pytest.approx(1 / 17)
    assert any(
        re.match(r"bubble +5\.9% of the devices' time; 5\.9% with equal stages", line)
        for line in own.table().splitlines()
    )
    assert "busiest     device 0" in own.table()
    totals = [memory.total for memory in own.memory]
    assert own.device_memory == [totals[0] + totals[2], totals[1] + totals[3]]
    assert "device" in texts(own.picture())
    with pytest.raises(UserError, match="has several stages on each device, but"):
        made_up(pipeline_schedule="interleaved_1f1b", pipeline_stages_per_device=3)


def test_files(plan):
    rows = list(csv.DictReader(io.StringIO(plan.csv())))
    assert [row["name"] for row in rows] == [own.name for own in plan.costs]
    assert sum(int(row["parameters"]) for row in rows) == PARAMETERS
    assert [sum(row["stage"] == str(k) for row in rows) for k in range(3)] == list(plan.balance)
    values = json.loads(plan.json())
    assert values["balance"] == list(plan.balance)
    assert values["parameters"] == PARAMETERS
    assert values["bubble"] == plan.simulation.bubble
    assert [own["memory"]["total"] for own in values["stages"]] == [
        own.total for own in plan.memory
    ]
    assert values["options"]["accumulation_steps"] == 4


def texts(svg):
    """matplotlib writes texts as comments beside their outlines."""
    xml.etree.ElementTree.fromstring(svg)
    return re.findall(r"<!-- (.*?) -->", svg)


def test_picture(plan):
    svg = plan.picture()
    labels = texts(svg)
    assert {"stage", "0", "1", "2", "time; one device would need 1"} <= set(labels)
    assert {"forward", "recompute", "backward"} <= set(labels)
    assert any(own.startswith("resnet8, batch 32 in 4, gpipe") for own in labels)
    assert plan.picture() == svg


def test_picture_without_recomputation():
    order = [(0, 0, False), (0, 0, True)]
    svg = gantt(simulate(order, [1.0], [2.0], rematerialize="never"), "one stage", "hours", 10)
    labels = texts(svg)
    assert {"one stage", "hours", "forward", "backward", "30"} <= set(labels)
    assert "recompute" not in labels
    assert "#0000a" not in svg  # placeholder colors


def test_limit_is_none_by_default():
    assert math.isinf(made_up().limit)
    assert "memory " not in made_up().table()
