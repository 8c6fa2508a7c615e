"""Starts the training of several workers again with those that are left, and with lost ones later.

Each worker's supervisor runs the training as a process of its own. The first worker that is there
leads: it decides when the training starts, and with which workers, from the files of
:mod:`~imagenet_fast.distribute.members`, so that any other one can lead after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import say
from imagenet_fast.base.paths import Path
from imagenet_fast.base.worker_process import end_with_parent
from imagenet_fast.distribute.cluster import TAKING_PART, Cluster
from imagenet_fast.distribute.members import Beat, Board, Presence, Start

# Starts in a row without a new checkpoint after which a job whose workers are killed ends.
_FRUITLESS = 3
# How often to look whether the training process has ended, or a signal has come.
_GLANCE = 0.2


class _ReplacedError(UserError):
    """Another process supervises the same worker."""


@dataclasses.dataclass(frozen=True)
class Patience:
    """Times in seconds.

    Attributes:
      wait: how long to wait for workers that are not there before a start without them.
      beat: between two looks at the others.
      lost_after: after which a worker that has not given a beat is lost.
      end: after which a training process that SIGTERM does not end, as in a collective, is killed.
    """

    wait: float
    beat: float = 2.0
    lost_after: float = 60.0
    end: float = 25.0


class Supervisor:
    """Runs a worker's training process, again and again, until the job is done.

    Args:
      cluster: all workers of the job, and the index of this one.
      folder: for the files by which supervisors know of each other.
      command: of the training process, which resumes from the newest checkpoint.
      newest_step: returns the step of the newest checkpoint; -1: there is none.
      patience: how long to wait.
      clock: returns seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        command: Sequence[str],
        newest_step: Callable[[], int],
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._index = cluster, cluster.index
        self._folder, self._command, self._newest_step = folder, command, newest_step
        self._patience, self._clock = patience, clock
        self._beat = Beat(uuid.uuid4().hex, 0)
        self._presence = Presence(patience.lost_after, clock)
        self._began = self._since = self._worked = clock()
        self._training: subprocess.Popen[bytes] | None = None
        self._trains: Start | None = None  # what the training process belongs to
        self._ended_before = 0
        self._last: tuple[int, str] | None = None
        self._signals: list[int] = []
        self._said = ""

    def run(self) -> int:
        """Returns the exit status of the job.

        Raises:
          KeyboardInterrupt: after Ctrl-C, when the training process has ended.
          UserError: if the folder cannot be used, or another process has this worker's place.
        """
        try:
            board = Board(self._folder, len(self._cluster.workers))
            self._check_alone(board)
            board.write_beat(self._index, self._beat)
            earlier = board.start()
        except OSError as error:
            raise UserError(
                f"{self._folder}, by whose files workers know of each other, cannot be used: "
                f"{error.strerror}"
            ) from None
        # That job is over, whatever it ended with.
        self._ended_before = earlier.number if earlier and earlier.status is not None else 0
        try:
            with self._signals_noted():
                while not self._signals:
                    status = self._round_on(board)
                    if status is not None:
                        return status
                    self._pause()
                number = self._signals[0]
                self._end_training(signal.Signals(number))
                if number == signal.SIGINT:
                    raise KeyboardInterrupt
                return 128 + number
        finally:
            self._kill_training()
            with contextlib.suppress(OSError):
                if self._has_place(board.beats()):
                    board.remove_beat(self._index)

    def _check_alone(self, board: Board) -> None:
        """Checks that no other process writes this worker's beats.

        Raises:
          UserError: if one does.
        """
        before = board.beats().get(self._index)
        if before is None:
            return
        # A process that was killed has left it, or another job runs.
        for _ in range(3):
            time.sleep(self._patience.beat)
            if board.beats().get(self._index, before) != before:
                raise self._replaced()
        self._began = self._since = self._worked = self._clock()

    def _has_place(self, beats: Mapping[int, Beat]) -> bool:
        """Returns whether no other process has written this worker's beat."""
        return beats.get(self._index, self._beat).process == self._beat.process

    def _replaced(self) -> UserError:
        return _ReplacedError(
            f"another process is worker {self._index} of a job in {self._folder}: end that job, or "
            "choose another --model_dir"
        )

    def _round_on(self, board: Board) -> int | None:
        """Does what is due; returns the status with which this process is to end, or None.

        Raises:
          UserError: if that has been impossible for too long, or another process does it.
        """
        try:
            status = self._round(board)
            self._worked = self._clock()
            return status
        except _ReplacedError:
            raise
        # The disk is full, or the file server does not answer.
        except (OSError, UserError, subprocess.SubprocessError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.filename:
                reason = f"{error.filename}: {error.strerror}"
        seconds = self._clock() - self._worked
        if seconds >= max(self._patience.wait, self._patience.lost_after):
            raise UserError(f"{reason}; giving up after {seconds:.0f} seconds")
        self._say(f"{reason}; trying again")
        return None

    def _round(self, board: Board) -> int | None:
        if self._training is not None and self._training.poll() is not None:
            status = self._training.returncode
            self._kill_training()  # and what it has started
            self._beat = dataclasses.replace(self._beat, running=False, status=status)
        beats = board.beats()
        if not self._has_place(beats):
            raise self._replaced()
        self._beat = dataclasses.replace(self._beat, count=self._beat.count + 1)
        board.write_beat(self._index, self._beat)
        there = self._presence.update(beats)
        there[self._index] = self._beat
        start = board.start()
        if start is not None and start.number == self._ended_before:
            start = dataclasses.replace(start, over="done", status=None)
        # At first, the others cannot have been seen yet.
        if min(there) == self._index and self._clock() - self._began >= 3 * self._patience.beat:
            decided = self._lead(there, start)
            if decided is not None and decided != start:
                board.write_start(decided)
            start = decided
        if start is not None and (start.number, start.over) != self._last:
            self._last, self._since = (start.number, start.over), self._clock()
        return self._follow(start)

    def _follow(self, start: Start | None) -> int | None:
        """Starts or ends the training process; returns the status with which this one is to end."""
        if start is None:
            return None
        if self._training is not None and (start.over or not _same(start, self._trains)):
            # After SIGTERM all workers save a checkpoint together, unless one is lost.
            self._end_training(signal.SIGKILL if start.over == "lost" else signal.SIGTERM)
            return None
        if start.status is not None:
            return start.status
        takes_part = self._beat.process in start.processes
        if takes_part and not start.over and start.number > self._beat.start:
            self._start_training(start)
        return None

    def _lead(self, there: Mapping[int, Beat], start: Start | None) -> Start | None:
        """Returns the last start as it is to be, or a new one."""
        if start is not None and start.status is not None:
            return start
        if start is not None and not start.over:
            over = self._why_over(there, start)
            return dataclasses.replace(start, over=over) if over else start
        if any(beat.running for beat in there.values()):
            return start
        if start is not None:
            ending = self._ending(there, start)
            if ending is None:
                return start
            if ending >= 0 and start.number != self._ended_before:
                return dataclasses.replace(start, status=ending)
        return self._next(there, start)

    def _why_over(self, there: Mapping[int, Beat], start: Start) -> str:
        """Returns why a start's training processes are to end; empty: they are not."""
        ended = _statuses(there, start)
        if ended.get(start.workers[0]) == 0:
            return "done"
        # One may have followed the file of a leader that wrote too late.
        stopped = any(
            beat.start == start.number and not beat.running and beat.status is None
            for index, beat in there.items()
            if beat.process in start.processes
        )
        if stopped or any(ended.values()):
            self._say("the training has failed; ending it on all workers")
            return "failed"
        lost = _lost(there, start)
        if lost:
            self._say(f"{_names(lost)} lost; ending the training on the others")
            return "lost"
        if len(there) > len(start.workers) and self._newest_step() > start.step:
            return "back"
        return ""

    def _ending(self, there: Mapping[int, Beat], start: Start) -> int | None:
        """Returns the status with which a job ends after a start; -1: it goes on; None: later."""
        if start.over == "done":
            return 0
        if start.over == "back" or self._newest_step() > start.step:
            return -1
        lost = _lost(there, start)
        if len(lost) == len(start.workers):
            return -1  # It was of an earlier job.
        failures = [status for status in _statuses(there, start).values() if status]
        # By a signal, not by an error of its own. A worker that was lost may be there again.
        killed = any(status < 0 or status == 128 + signal.SIGTERM for status in failures)
        if killed or lost or not failures or start.over == "lost":
            if start.fruitless + 1 < _FRUITLESS:
                return -1
        # It may turn out that one is lost, whose last beat may have been seen late.
        elif not self._seen_since(self._since + 3 * self._patience.beat, start.workers):
            return None
        # Not 137, with which Kubernetes would start this process again.
        failure = next((status for status in failures if status > 0), 1)
        self._say(
            f"giving up after {counted(start.fruitless + 1, 'start')} without a new checkpoint"
        )
        return failure

    def _next(self, there: Mapping[int, Beat], start: Start | None) -> Start | None:
        """Returns a start with the workers that are there, or the last one, to wait for others."""
        missing = sorted(set(range(len(self._cluster.workers))) - set(there))
        goes_on = (
            start is not None
            and start.number != self._ended_before
            and len(_lost(there, start)) < len(start.workers)
        )
        # The others have been waited for.
        awaited = set(missing).intersection(start.workers) if start and goes_on else missing
        if not self._seen_since(self._since, there):
            return start  # It is seen in a moment, or lost.
        if awaited and self._clock() - self._since < self._patience.wait:
            minutes = self._patience.wait / 60
            self._say(f"waiting up to {minutes:g} minutes for {_names(sorted(awaited))}")
            return start
        without = f", without {_names(missing)}" if missing else ""
        self._say(f"starting with {counted(len(there), 'worker')}{without}")
        step, fruitless = self._newest_step(), 0
        if start is not None and start.over in ("lost", "failed") and step <= start.step:
            fruitless = start.fruitless + 1 if goes_on else 0
        last = max((beat.start for beat in there.values()), default=0)
        return Start(
            number=max(last, start.number if start else 0) + 1,
            workers=tuple(sorted(there)),
            processes=tuple(there[index].process for index in sorted(there)),
            step=step,
            fruitless=fruitless,
        )

    def _seen_since(self, time: float, workers: Iterable[int]) -> bool:
        """Returns whether beats of workers have been seen since a time of the clock."""
        return self._clock() >= time and set(workers) <= {self._index} | self._presence.since(time)

    def _start_training(self, start: Start) -> None:
        self._trains = start
        environment = {**os.environ, TAKING_PART: ",".join(map(str, start.workers))}
        self._training = subprocess.Popen(
            list(self._command),
            env=environment,
            # Ctrl-C in the terminal then only reaches this process, which ends the group.
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self._beat = dataclasses.replace(self._beat, start=start.number, running=True, status=None)

    def _end_training(self, number: signal.Signals) -> None:
        """Ends the training process by a signal, or at last by SIGKILL."""
        if self._training is None:
            return
        self._send(number)
        given = len(self._signals)
        end = time.monotonic() + self._patience.end
        # A second signal to this process ends it at once.
        while time.monotonic() < end and len(self._signals) == given:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._training.wait(_GLANCE)
                break
        self._kill_training()
        # Not a failure of its own.
        self._beat = dataclasses.replace(self._beat, running=False, status=None)

    def _kill_training(self) -> None:
        """Kills the training process and all that it has started."""
        if self._training is not None:
            self._send(signal.SIGKILL)
            self._training.wait()
            self._training = None

    def _send(self, number: signal.Signals) -> None:
        assert self._training is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._training.pid, number)

    def _pause(self) -> None:
        """Waits for the next beat, a signal, or the end of the training process."""
        end = time.monotonic() + self._patience.beat
        while time.monotonic() < end and not self._signals:
            if self._training is not None and self._training.poll() is not None:
                return
            time.sleep(min(_GLANCE, self._patience.beat))

    @contextlib.contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """In the context, SIGINT, SIGTERM and SIGHUP are noted instead of ending this process."""
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP, which must stay ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda n, _: self._signals.append(n))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _say(self, text: str) -> None:
        """Prints a line, unless it is the last one again."""
        if text != self._said:
            say(f"supervisor of worker {self._index}: {text}")
        self._said = text


def _statuses(there: Mapping[int, Beat], start: Start) -> dict[int, int]:
    """Returns the statuses with which training processes of a start have ended by themselves."""
    return {
        index: beat.status
        for index, beat in there.items()
        if beat.process in start.processes
        and beat.start == start.number
        and beat.status is not None
    }


def _same(start: Start, other: Start | None) -> bool:
    """Returns whether two are the same start; two leaders may have given one number to two."""
    return other is not None and (start.number, start.processes) == (other.number, other.processes)


def _lost(there: Mapping[int, Beat], start: Start) -> list[int]:
    """Returns the workers of a start whose supervisors are not there any more."""
    return [
        index
        for index, process in zip(start.workers, start.processes)
        if index not in there or there[index].process != process
    ]


def _names(workers: Sequence[int]) -> str:
    return f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"
