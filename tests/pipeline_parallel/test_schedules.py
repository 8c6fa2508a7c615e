"""Schedules, drawn, and what must hold of them."""

import collections

import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.config import Config
from imagenet_fast.pipeline_parallel import schedules

SIZES = [(1, 1), (1, 5), (2, 1), (3, 2), (3, 4), (4, 4), (4, 9), (5, 3)]

# Of three devices and four micro-batches, each pass as long as any other.
DRAWN = {
    "gpipe": [
        "      F0 F1 F2 F3 B3 B2 B1 B0",
        "   F0 F1 F2 F3       B3 B2 B1 B0",
        "F0 F1 F2 F3             B3 B2 B1 B0",
    ],
    "1f1b": [
        "      F0 B0 F1 B1 F2 B2 F3 B3",
        "   F0 F1    B0 F2 B1 F3 B2    B3",
        "F0 F1 F2       B0 F3 B1    B2    B3",
    ],
}
# Of two devices with two stages each.
INTERLEAVED = [
    "   F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3",
    "F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1    b2    b3 B2 B3",
]
# Devices and stages of each.
DEVICES = [(1, 1), (1, 3), (2, 2), (2, 3), (3, 2), (4, 3), (8, 2)]


def drawn(tasks, stages, devices=None):
    """The devices' rows, the last one's first, as docstrings show them.

    Each begins a task as soon as it is free and has what the task needs.
    """
    devices = devices or stages
    rows, ends = [[] for _ in range(devices)], {}
    for task in tasks:
        row = rows[task.stage % devices]
        begin = max([len(row), *(ends[own] for own in schedules.dependencies(task, stages))])
        row += ["  "] * (begin - len(row))
        letter = "B" if task.backward else "F"
        row.append(f"{letter if task.stage < devices else letter.lower()}{task.micro_batch}")
        ends[task] = begin + 1
    return [" ".join(row) for row in reversed(rows)]


@pytest.mark.parametrize("name", DRAWN)
def test_diagrams(name):
    rows = drawn(schedules.tasks(name, 3, 4), 3)
    assert rows == DRAWN[name]
    for row in rows:
        assert row in schedules.__doc__


def test_the_interleaved_diagram():
    rows = drawn(schedules.tasks("interleaved_1f1b", 4, 4, devices=2), 4, 2)
    assert rows == INTERLEAVED
    for row in rows:
        assert row in schedules.__doc__


def check_every_task(tasks, stages, count):
    """Each once, and after those it needs."""
    done = set()
    for task in tasks:
        stage, number, backward = task
        needed = {(stage, number, False)} if backward else set()
        if backward and stage < stages - 1:
            needed.add((stage + 1, number, True))
        if not backward and stage:
            needed.add((stage - 1, number, False))
        assert set(schedules.dependencies(task, stages)) == needed
        assert needed <= done
        assert task not in done
        done.add(task)
    assert done == {
        (stage, number, backward)
        for stage in range(stages)
        for number in range(count)
        for backward in (False, True)
    }


@pytest.mark.parametrize(("stages", "count"), SIZES)
@pytest.mark.parametrize("name", DRAWN)
def test_every_task_once_and_after_those_it_needs(name, stages, count):
    check_every_task(schedules.tasks(name, stages, count), stages, count)


@pytest.mark.parametrize(("devices", "each"), DEVICES)
def test_interleaved_tasks(devices, each):
    """Of any number of micro-batches; the last stage goes back at once."""
    stages = devices * each
    for count in range(1, 2 * devices + 2):
        tasks = schedules.tasks("interleaved_1f1b", stages, count, devices)
        check_every_task(tasks, stages, count)
        row = [task for task in tasks if task.stage % devices == devices - 1]
        for task, following in zip(row, row[1:]):
            if task.stage == stages - 1 and not task.backward:
                assert following == task._replace(backward=True)


@pytest.mark.parametrize(("stages", "count"), SIZES)
@pytest.mark.parametrize("name", DRAWN)
def test_the_bubble_is_that_of_the_paper(name, stages, count):
    """(K - 1) / (M + K - 1) of the time (Huang et al. 2018, section 2.3)."""
    rows = drawn(schedules.tasks(name, stages, count), stages)
    slots = (max(map(len, rows)) + 1) // 3
    assert slots == 2 * (count + stages - 1)


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_micro_batches_that_wait(stages, count):
    """Of those forward and not yet backward, the most at a time."""

    def waiting(name):
        now, most = collections.Counter(), collections.Counter()
        for stage, _, backward in schedules.tasks(name, stages, count):
            now[stage] += -1 if backward else 1
            most[stage] = max(most[stage], now[stage])
        return [most[stage] for stage in range(stages)]

    assert waiting("gpipe") == [count] * stages
    assert waiting("1f1b") == [min(stages - stage, count) for stage in range(stages)]


@pytest.mark.parametrize("former", ["unrolled", "while"])
def test_former_names_work_with_a_notice(former, capsys):
    warn_once.cache_clear()
    assert schedules.canonical_schedule(former, "pipeline_schedule") == "gpipe"
    assert f"pipeline_schedule={former} is now called gpipe" in capsys.readouterr().err


def test_unknown_names():
    with pytest.raises(UserError, match="schedule='1b1f' does not exist; did you mean '1f1b'"):
        schedules.canonical_schedule("1b1f")


def test_configurations_of_earlier_versions_are_read():
    assert Config.from_json('{"pipeline_schedule": "while"}') == Config()
    assert Config(pipeline_schedule="unrolled") == Config()
    with pytest.raises(UserError, match="pipeline_schedule='1b1f' does not exist; did you mean"):
        Config(pipeline_schedule="1b1f")
