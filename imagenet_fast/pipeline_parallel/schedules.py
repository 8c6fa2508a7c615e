"""Pipeline schedules: the order in which each stage works on the micro-batches of a batch.

``gpipe`` runs all forward passes, then all backward passes (Huang et al. 2018)::

    device 2            F0 F1 F2 F3 B3 B2 B1 B0
    device 1         F0 F1 F2 F3       B3 B2 B1 B0
    device 0      F0 F1 F2 F3             B3 B2 B1 B0      -> time

``1f1b`` alternates one forward and one backward pass (Narayanan et al. 2019 and 2020,
"PipeDream-flush"). Without recomputation it takes the same time, but stage k of K stores at most
K - k micro-batches::

    device 2            F0 B0 F1 B1 F2 B2 F3 B3
    device 1         F0 F1    B0 F2 B1 F3 B2    B3
    device 0      F0 F1 F2       B0 F3 B1    B2    B3      -> time

``interleaved_1f1b`` does so with several stages on each device (Narayanan et al. 2021): stage k is
on device k % K. Here two devices have two stages each, whose second ones have small letters; a pass
takes half of the time that it takes above. Devices wait less, but store more activations::

    device 1         F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3
    device 0      F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1    b2    b3 B2 B3      -> time
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from imagenet_fast.base.errors import require_choice
from imagenet_fast.base.notices import warn_once

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")
# Before forms of the graph were chosen by size, ``gpipe`` had a name for each form.
_FORMER_NAMES = {"unrolled": "gpipe", "while": "gpipe"}


class Task(NamedTuple):
    """One pass of a micro-batch through a stage, both by index, forward or backward."""

    stage: int
    micro_batch: int
    backward: bool


def canonical_schedule(name: str, option: str = "schedule") -> str:
    """Returns the schedule's name, with a notice if ``name`` is a former one.

    ``option`` is the one that has this value, for the message.

    Raises:
      UserError: if there is no such schedule.
    """
    if name in _FORMER_NAMES:
        warn_once(
            f"{option}={name} is now called {_FORMER_NAMES[name]}: whether its graph is unrolled "
            "or has loops depends on its size"
        )
        name = _FORMER_NAMES[name]
    require_choice(option, name, SCHEDULES)
    return name


def tasks(schedule: str, stages: int, micro_batches: int, devices: int | None = None) -> list[Task]:
    """Returns the tasks of all stages, each after the tasks that it depends on.

    A device runs its tasks in this order.

    Args:
      schedule: ``gpipe``, ``1f1b`` or ``interleaved_1f1b``.
      stages: number of stages.
      micro_batches: number of micro-batches.
      devices: number of devices, of which stage k is on device k % ``devices``, for
        ``interleaved_1f1b``; None: one for each stage.
    """
    if schedule == "gpipe":
        forward = [Task(k, m, False) for m in range(micro_batches) for k in range(stages)]
        return [*forward, *(Task(k, m, True) for k, m, _ in reversed(forward))]
    if schedule == "1f1b":
        return _one_forward_one_backward(stages, micro_batches)
    return _interleaved(stages, micro_batches, devices or stages)


def dependencies(task: Task, stages: int) -> list[Task]:
    """Returns the tasks whose results a task needs."""
    stage, number, backward = task
    if not backward:
        return [Task(stage - 1, number, False)] if stage else []
    after = [Task(stage + 1, number, True)] if stage < stages - 1 else []
    return [Task(stage, number, False), *after]


def _one_forward_one_backward(stages: int, micro_batches: int) -> list[Task]:
    rows = []
    for stage in range(stages):
        ahead = min(stages - stage, micro_batches)
        row = [Task(stage, number, False) for number in range(ahead)]
        for number in range(micro_batches):
            row.append(Task(stage, number, True))
            if ahead + number < micro_batches:
                row.append(Task(stage, ahead + number, False))
        rows.append(row)
    return _merged(rows, stages)


def _interleaved(stages: int, micro_batches: int, devices: int) -> list[Task]:
    # Groups of one micro-batch per device pass through a device's first stage, then through its
    # second one, and so on. A last, smaller group is scheduled as a full one: as it is, it could
    # have devices wait for each other forever.
    groups = range(-(-micro_batches // devices))

    def row(device: int, backward: bool) -> Iterator[Task]:
        places = range(device, stages, devices)
        for group in groups:
            for place in reversed(places) if backward else places:
                for number in range(group * devices, (group + 1) * devices):
                    yield Task(place, number, backward)

    rows = []
    for device in range(devices):
        forward, backward = list(row(device, False)), list(row(device, True))
        # In each round, the backward pass of a group begins when its last forward pass ends.
        ahead = min(2 * (devices - device - 1) + stages - devices, len(forward))
        pairs = zip(forward[ahead:], backward)
        tasks = [*forward[:ahead], *(task for pair in pairs for task in pair)]
        tasks += backward[len(forward) - ahead :]
        rows.append([task for task in tasks if task.micro_batch < micro_batches])
    return _merged(rows, stages)


def _merged(rows: Sequence[Sequence[Task]], stages: int) -> list[Task]:
    """Merges the devices' task lists into one in which each task follows its dependencies."""
    done: dict[Task, None] = {}
    places = [0] * len(rows)
    while any(place < len(row) for place, row in zip(places, rows)):
        for device, row in enumerate(rows):
            while places[device] < len(row):
                task = row[places[device]]
                if not all(needed in done for needed in dependencies(task, stages)):
                    break
                done[task] = None
                places[device] += 1
    return list(done)
