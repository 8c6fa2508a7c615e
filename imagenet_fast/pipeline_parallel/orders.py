"""In which order a pipeline's devices work on the micro-batches of a batch.

``gpipe``, all forward and then all backward (Huang et al. 2018)::

    device 2            F0 F1 F2 F3 B3 B2 B1 B0
    device 1         F0 F1 F2 F3       B3 B2 B1 B0
    device 0      F0 F1 F2 F3             B3 B2 B1 B0      -> time

``1f1b``, one forward and one backward in turn (Narayanan et al. 2019 and 2020, "PipeDream-flush"):
as long, but of stage k of K at most K - k micro-batches wait for their turn backward::

    device 2            F0 B0 F1 B1 F2 B2 F3 B3
    device 1         F0 F1    B0 F2 B1 F3 B2    B3
    device 0      F0 F1 F2       B0 F3 B1    B2    B3      -> time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Task(NamedTuple):
    """What a device does at one go.

    Attributes:
      stage: whose device.
      micro_batch: its number.
      backward: whether it goes back.
    """

    stage: int
    micro_batch: int
    backward: bool


def gpipe(stages: int, micro_batches: int) -> list[Task]:
    """Returns the tasks of all stages, each after those whose results it needs."""
    forward = [Task(k, m, False) for m in range(micro_batches) for k in range(stages)]
    return [*forward, *(Task(k, m, True) for k, m, _ in reversed(forward))]


def one_forward_one_backward(stages: int, micro_batches: int) -> list[Task]:
    """The same in the other order."""
    rows = []
    for stage in range(stages):
        ahead = min(stages - stage, micro_batches)
        row = [Task(stage, number, False) for number in range(ahead)]
        for number in range(micro_batches):
            row.append(Task(stage, number, True))
            if ahead + number < micro_batches:
                row.append(Task(stage, ahead + number, False))
        rows.append(row)
    return _merged(rows)


ORDERS = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def tasks(schedule: str, stages: int, micro_batches: int) -> list[Task]:
    """Returns the tasks of a schedule, each after those whose results it needs.

    Args:
      schedule: as of :class:`~imagenet_fast.pipeline_parallel.model.GPipe`.
      stages: how many there are.
      micro_batches: the same.
    """
    return ORDERS["1f1b" if schedule == "1f1b" else "gpipe"](stages, micro_batches)


def needed_by(task: Task, stages: int) -> list[Task]:
    """Returns the tasks whose results one needs."""
    stage, number, backward = task
    if not backward:
        return [Task(stage - 1, number, False)] if stage else []
    after = [Task(stage + 1, number, True)] if stage < stages - 1 else []
    return [Task(stage, number, False), *after]


def _merged(rows: Sequence[Sequence[Task]]) -> list[Task]:
    """Joins the orders of all devices to one in which each task comes after those that it needs."""
    done: dict[Task, None] = {}
    places = [0] * len(rows)
    while any(place < len(row) for place, row in zip(places, rows)):
        for stage, row in enumerate(rows):
            while places[stage] < len(row):
                task = row[places[stage]]
                if not all(own in done for own in needed_by(task, len(rows))):
                    break
                done[task] = None
                places[stage] += 1
    return list(done)
