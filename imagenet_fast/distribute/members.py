"""The files by which the workers of a job know which of them are there, and which are to train.

They lie in a folder that all workers see. Each worker's supervisor rewrites a small file of its own
every few seconds; whose file no longer changes is lost. One more file has the last start of the
training: the workers that take part in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
from collections.abc import Callable
from typing import Optional

from imagenet_fast.base.files import write_file
from imagenet_fast.base.outside import Count, read_json
from imagenet_fast.base.paths import Path

_START = "start.json"


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a supervisor says of itself.

    Attributes:
      process: distinguishes it from earlier supervisors of the same worker.
      count: number of times that it has said so.
      start: the number of the last start in which it took part; 0: none.
      running: whether its training process runs.
      status: with which the training process of that start ended; None: not yet.
    """

    process: str
    count: Count
    start: Count = 0
    running: bool = False
    status: Optional[int] = None  # noqa: UP045 - read by msgspec, also under Python 3.9


@dataclasses.dataclass(frozen=True)
class Start:
    """A start of the training.

    Attributes:
      number: counts the starts.
      workers: the indices of those that take part, ascending; the first one writes the run's files.
      processes: their supervisors, as in ``Beat.process``.
      step: of the newest checkpoint then; -1: none.
      fruitless: number of starts before it, one after another, that wrote no checkpoint.
      over: why its training processes are to end: ``lost``, a worker is; ``failed``, one has;
        ``back``, there are more workers; ``done``; empty: they are not.
      status: with which the job is to end; None: it is not.
    """

    number: Count
    workers: tuple[Count, ...]
    processes: tuple[str, ...]
    step: int = -1
    fruitless: Count = 0
    over: str = ""
    status: Optional[int] = None  # noqa: UP045

    def __post_init__(self) -> None:
        """Checks what the types do not say.

        Raises:
          ValueError: if it is no start.
        """
        if not self.workers or sorted(set(self.workers)) != list(self.workers):
            raise ValueError("its workers are not in ascending order")
        if len(self.processes) != len(self.workers):
            raise ValueError("it has not a process for each worker")


class Board:
    """The folder with the files.

    Args:
      folder: is created.
      workers: of the job.

    Raises:
      OSError: if it cannot be used; all methods raise it.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        if folder.is_symlink():
            reason = "is a link, through which nothing is written"
            raise OSError(errno.ELOOP, reason, str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._workers = workers

    def write_beat(self, index: int, beat: Beat) -> None:
        """Replaces a worker's beat."""
        write_file(self._beat(index), json.dumps(dataclasses.asdict(beat)))

    def remove_beat(self, index: int) -> None:
        """Removes a worker's beat, so that the others need not wait to see that it is lost."""
        self._beat(index).unlink(missing_ok=True)

    def beats(self) -> dict[int, Beat]:
        """Returns the beats by the workers' indices; a damaged one counts as missing."""
        found = {}
        for index in range(self._workers):
            with contextlib.suppress(FileNotFoundError, ValueError):
                found[index] = read_json(self._beat(index), Beat)
        return found

    def write_start(self, start: Start) -> None:
        """Replaces the last start."""
        write_file(self._folder / _START, json.dumps(dataclasses.asdict(start)))

    def start(self) -> Start | None:
        """Returns the last start; None: there is none, it is damaged, or of a larger job."""
        try:
            start = read_json(self._folder / _START, Start)
        except (FileNotFoundError, ValueError):
            return None
        return start if start.workers[-1] < self._workers else None

    def _beat(self, index: int) -> Path:
        return self._folder / f"{index}.json"


class Presence:
    """Which workers are there: those whose beats change, by this process' own clock.

    Args:
      lost_after: seconds without a change after which a worker is lost.
      clock: returns seconds.
    """

    def __init__(self, lost_after: float, clock: Callable[[], float]) -> None:
        self._lost_after, self._clock = lost_after, clock
        self._seen: dict[int, tuple[Beat, float]] = {}

    def since(self, time: float) -> set[int]:
        """Returns the workers that have given a beat since a time of the clock."""
        return {index for index, (_, changed) in self._seen.items() if changed >= time}

    def update(self, beats: dict[int, Beat]) -> dict[int, Beat]:
        """Returns those beats of all that are of workers that are there.

        A beat that is seen for the first time may be of a job that ended long ago.
        """
        now, seen = self._clock(), self._seen
        self._seen = {}
        for index, beat in beats.items():
            before, changed = seen.get(index, (beat, -self._lost_after))
            differs = (beat.process, beat.count) != (before.process, before.count)
            self._seen[index] = beat, now if differs else changed
        return {
            index: beat
            for index, (beat, changed) in self._seen.items()
            if now - changed < self._lost_after
        }
