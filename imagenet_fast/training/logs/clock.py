"""Training time as DAWNBench and MLPerf define it: without compilation, evaluation and saving."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any


class Clock:
    """Measures a run over all its restarts.

    TensorFlow returns before the devices have finished: callers must read a result before each
    call.

    Attributes:
      train_seconds: in training steps, except those that compile: the first of each process and of
        each program.
      timed_images: images in those steps.
      compile_seconds: until the end of each process' first step, and in the first steps of further
        programs.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.train_seconds = 0.0
        self.timed_images = 0
        self.compile_seconds = 0.0
        self._earlier_wall_seconds = 0.0
        self._process_start = now()
        self._compiling_since = self._process_start
        self._running_since: float | None = None

    @property
    def wall_seconds(self) -> float:
        """Seconds since the first process started, without the times when none ran."""
        return self._earlier_wall_seconds + self._now() - self._process_start

    @property
    def images_per_second(self) -> float:
        """The mean over all timed steps; 0 before there are any."""
        return self.timed_images / self.train_seconds if self.train_seconds else 0.0

    def compiling(self) -> None:
        """Starts counting compile time: the next step compiles a new program."""
        self.stop()
        self._compiling_since = self._now()

    def compiled(self) -> None:
        """Ends compile time, after the first step of a program; training time starts."""
        self.compile_seconds += self._now() - self._compiling_since
        self._running_since = self._now()

    def stop(self) -> None:
        """Stops training time, for evaluation or at the end."""
        self.advance(0)
        self._running_since = None

    def start(self) -> None:
        """Starts training time, unless it is running."""
        if self._running_since is None:
            self._running_since = self._now()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops training time inside, such as for a checkpoint."""
        running = self._running_since is not None
        self.stop()
        yield
        if running:
            self.start()

    def advance(self, images: int) -> None:
        """Counts the time and the images since the last call."""
        if self._running_since is not None:
            now = self._now()
            self.train_seconds += now - self._running_since
            self.timed_images += images
            self._running_since = now

    def state(self) -> dict[str, Any]:
        """Returns the times to save in a checkpoint."""
        return {
            "train_seconds": self.train_seconds,
            "timed_images": self.timed_images,
            "compile_seconds": self.compile_seconds,
            "wall_seconds": self.wall_seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from what :meth:`state` returned in an earlier process."""
        self.train_seconds = state["train_seconds"]
        self.timed_images = state["timed_images"]
        self.compile_seconds = state["compile_seconds"]
        self._earlier_wall_seconds = state["wall_seconds"]
