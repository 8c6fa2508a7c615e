"""A process of its own that is asked by lines and answers in JSON."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from imagenet_fast.base.errors import UserError

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl.h


class WorkerTimeout(UserError):  # noqa: N818 - like subprocess.TimeoutExpired
    """A worker process has not answered in time."""


@contextlib.contextmanager
def start_worker(
    command: Sequence[str],
    job: Any,
    *,
    name: str,
    advice: str = "",
    environment: Mapping[str, str] | None = None,
    limit_seconds: float | None = None,
) -> Iterator[Worker]:
    """Starts a program, and ends it and its own processes at the end.

    Args:
      command: the program and its arguments. It must answer each line of its input with one of
        JSON. If it leads a process group before it answers the first one, it is stopped between
        answers; then it must also see to its own end if this process is killed.
      job: the first line for it, as JSON.
      name: of what it does, for people.
      advice: what to do if it fails, if there is something.
      environment: variables besides those of this process.
      limit_seconds: in which it must answer each line; None: no limit.

    Raises:
      UserError: if it cannot be started, or fails.
      WorkerTimeout: if it does not answer in time.
    """
    # Its remarks are shown only if it fails.
    with tempfile.TemporaryFile("w+") as remarks:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=remarks,
                text=True,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            raise UserError(_failure(name, command[0], error.strerror, advice)) from None
        try:
            yield Worker(
                process,
                command[0],
                remarks,
                json.dumps(job),
                name=name,
                advice=advice,
                limit_seconds=limit_seconds,
            )
        finally:
            # It may not have come so far as to have a group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            # Also closes the pipes.
            process.communicate()


class Worker:
    """A program that :func:`start_worker` has started.

    Between its answers it stands still with all its threads and processes, if it leads a process
    group, so that it neither takes time from others nor gets ahead of its own clock.

    Args:
      process: the program, with pipes.
      program: its name.
      remarks: the file that its errors go to.
      job: the first line for it.
      name: of what it does, for people.
      advice: what to do if it fails.
      limit_seconds: in which it must answer each line; None: no limit.

    Attributes:
      answer: to the first line.

    Raises:
      UserError: if it fails.
      WorkerTimeout: if it does not answer in time.
    """

    def __init__(
        self,
        process: subprocess.Popen[str],
        program: str,
        remarks: IO[str],
        job: str,
        *,
        name: str,
        advice: str,
        limit_seconds: float | None = None,
    ) -> None:
        assert process.stdout
        self._process = process
        self._answers = process.stdout
        self._program = program
        self._remarks = remarks
        self._name = name
        self._advice = advice
        self._limit = limit_seconds
        self.answer = self._ask(job)
        self._signal(signal.SIGSTOP)

    def ask(self, message: str) -> Any:
        """Returns the answer to a line.

        Raises:
          UserError: if the program fails.
          WorkerTimeout: if it does not answer in time.
        """
        self._signal(signal.SIGCONT)
        answer = self._ask(message)
        self._signal(signal.SIGSTOP)
        return answer

    def _ask(self, message: str) -> Any:
        try:
            print(message, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            answer = ""
        else:
            # An answer is one line, so that nothing of it waits in Python's own buffer.
            if not select.select([self._answers], [], [], self._limit)[0]:
                raise WorkerTimeout(f"{self._name} did not answer in {self._limit:g} s")
            answer = self._answers.readline()
        if not answer:
            status = self._process.wait()
            self._remarks.seek(0)
            *_, reason = ["no reason told", *self._remarks.read().strip().splitlines()]
            if status < 0:
                reason = f"ended by {signal.Signals(-status).name}: {reason}"
            raise UserError(_failure(self._name, self._program, reason, self._advice))
        return json.loads(answer)

    def _signal(self, number: signal.Signals) -> None:
        # A program that has ended is told of by the next line.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _failure(name: str, program: str, reason: str | None, advice: str) -> str:
    return f"{name} failed under {program}: {reason}{advice and '; '}{advice}"


def end_with_parent() -> None:
    """Has the system end this process when its parent has ended, even if it stands still then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
