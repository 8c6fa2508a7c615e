"""Workers: forks of this process, which has imported TensorFlow, or processes of their own."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

from network_lab import namespaces

_PR_SET_PDEATHSIG = 1


def import_all() -> None:
    """Imports what all workers need, and starts no thread, which a fork would lack."""
    # TensorFlow imports pandas where it is installed, and that pyarrow, which starts a thread.
    sys.modules.update(dict.fromkeys(("pandas", "pyarrow")))
    import tensorflow  # noqa: F401

    import imagenet_fast.__main__
    import imagenet_fast.commands.train
    import imagenet_fast.training.train  # noqa: F401

    for module in ("pandas", "pyarrow"):
        del sys.modules[module]
    threads = len(list(pathlib.Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: what they hold would be held for ever in a fork"
    gc.freeze()


class Worker:
    """A process.

    Args:
      main: what it does; returns its status.
      log: file that gets its output.

    Attributes:
      status: its exit status, negative for a signal; None: it runs.
      was_signalled: whether a fault has ended it.
    """

    def __init__(self, main: Callable[[], int], log: pathlib.Path) -> None:
        self.status: int | None = None
        self.was_signalled = False
        parent = os.getpid()
        self._id = os.fork()
        if self._id:
            return
        status = 70
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # It died before the line above.
                os._exit(status)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            with log.open("ab", buffering=0) as output, pathlib.Path(os.devnull).open() as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            faulthandler.enable()
            status = main()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def has_ended(self) -> bool:
        """Returns whether it has ended."""
        if self.status is None:
            ended, status = os.waitpid(self._id, os.WNOHANG)
            if ended:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to it and to what it has started."""
        for send in (os.killpg, os.kill):  # It may have had no time to make itself a group.
            with contextlib.suppress(ProcessLookupError):
                if self.status is None:
                    send(self._id, number)


def train(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    namespace: str = "",
    fresh: bool = False,
) -> Callable[[], int]:
    """Returns the main function of a worker that trains.

    Args:
      arguments: of ``imagenet-fast``.
      environment: variables.
      namespace: of the network; empty: that of this process.
      fresh: start Python anew, where variables must be set before.
    """

    def main() -> int:
        os.environ.update(environment)
        with contextlib.ExitStack() as stack:
            if namespace:
                stack.enter_context(namespaces.entered(namespace))
            if fresh:
                program = [sys.executable, "-m", "imagenet_fast", *arguments]
                os.execve(sys.executable, program, os.environ)
            from imagenet_fast.__main__ import main as run

            sys.argv[:] = ["imagenet-fast", *arguments]
            try:
                run()
            except SystemExit as end:
                atexit._run_exitfuncs()  # as at the end of a process of its own
                return end.code if isinstance(end.code, int) else 1
        return 1

    return main
