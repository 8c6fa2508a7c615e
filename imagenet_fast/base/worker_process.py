"""Worker processes that answer each line of input with a line of JSON."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from imagenet_fast.base.errors import UserError

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl.h
_RUN = (
    "import sys; sys.path = [sys.argv.pop(1), *filter(None, sys.path)]; "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


class WorkerTimeout(UserError):  # noqa: N818 - like subprocess.TimeoutExpired
    """A worker process did not answer in time."""


def module_command(module: str, python: str = sys.executable) -> list[str]:
    """Returns the command that runs a module of this package.

    With ``python -m``, files in the working directory would replace modules of the same name.
    """
    return [python, "-c", _RUN, str(pathlib.Path(__file__).parents[2]), module]


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
    """Runs a worker process in the context, and kills it and its child processes at the end.

    Args:
      command: the program and its arguments. It must answer each line of its input with a line of
        JSON. If it makes itself the leader of a process group before its first answer, it is
        paused between answers; it must then also end itself if this process is killed
        (:func:`end_with_parent`).
      job: the first line of input, as an object for JSON.
      name: the worker's task, for messages.
      advice: what to do if it fails; may be empty.
      environment: variables added to those of this process.
      limit_seconds: time limit for each answer; None: no limit.

    Raises:
      UserError: if the program cannot be started, or fails.
      WorkerTimeout: if it does not answer in time.
    """

    def failed(reason: str | None) -> UserError:
        return UserError(f"{name} failed under {command[0]}: {reason}{advice and '; '}{advice}")

    # The output is shown only if it fails.
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            raise failed(error.strerror) from None
        try:
            yield Worker(process, errors, json.dumps(job), name, failed, limit_seconds)
        finally:
            # It may not lead a group yet.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.communicate()  # Closes the pipes, too.


class Worker:
    """A program started by :func:`start_worker`.

    If it leads a process group, it and its children are paused between answers, so that it neither
    takes CPU time from others nor works ahead outside of its timings.

    Args:
      process: the process, with pipes.
      program: the program's name.
      errors: the file of its standard error.
      job: the first line of input.
      name: the worker's task, for messages.
      advice: what to do if it fails.
      limit_seconds: time limit for each answer; None: no limit.

    Attributes:
      answer: the answer to ``job``.

    Raises:
      UserError: if the program fails.
      WorkerTimeout: if it does not answer in time.
    """

    def __init__(
        self,
        process: subprocess.Popen[str],
        errors: IO[str],
        job: str,
        name: str,
        failed: Callable[[str], UserError],
        limit_seconds: float | None,
    ) -> None:
        self._process, self._errors = process, errors
        self._name, self._failed, self._limit = name, failed, limit_seconds
        self.answer = self.ask(job)

    def ask(self, message: str) -> Any:
        """Returns the answer to a line of input.

        Raises:
          UserError: if the program fails.
          WorkerTimeout: if it does not answer in time.
        """
        answers = self._process.stdout
        assert answers
        self._signal(signal.SIGCONT)
        try:
            print(message, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            answer = ""
        else:
            # An answer is one line, so Python's buffer is empty and select() sees all input.
            if not select.select([answers], [], [], self._limit)[0]:
                raise WorkerTimeout(f"{self._name} did not answer in {self._limit:g} s")
            answer = answers.readline()
        if not answer:
            status = self._process.wait()
            self._errors.seek(0)
            *_, reason = ["it printed no error", *self._errors.read().strip().splitlines()]
            if status < 0:
                reason = f"ended by {signal.Signals(-status).name}: {reason}"
            raise self._failed(reason)
        self._signal(signal.SIGSTOP)
        return json.loads(answer)

    def _signal(self, number: signal.Signals) -> None:
        # If the program has ended, the next line of input reports it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def end_with_parent() -> None:
    """Makes Linux kill this process when its parent ends, even while it is paused."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
