"""Ctrl-C and SIGTERM while a run trains: it saves a checkpoint before it ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from tqdm import tqdm

# Slurm, Kubernetes and clouds kill a process 30 seconds after SIGTERM.
_SECONDS = 25.0
# Seconds: whoever ends a whole job sends SIGTERM to all processes, and some pass it on.
_ONE_REQUEST = 1.0
_USUAL: dict[int, Callable[[int, FrameType | None], Any] | signal.Handlers] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
# Those of Interrupt.noted that this process is in.
_in_context: list[contextlib.ExitStack] = []


class Interrupt:
    """Notes Ctrl-C and SIGTERM, so that a run can save a checkpoint and end.

    Args:
      any_worker: returns in all workers, which call it together, whether one of them called it with
        True; by default, of a run of one process.
      seconds: after SIGTERM, within which the run must end.

    Attributes:
      signal: the one that came to this process; None: none.
      waits: whether a signal waits for the run to end; while a program is compiled, it does not.
    """

    def __init__(
        self, any_worker: Callable[[bool], bool] = bool, *, seconds: float = _SECONDS
    ) -> None:
        self.signal: signal.Signals | None = None
        self.waits = False
        self._any_worker, self._seconds = any_worker, seconds
        self._agreed = False

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """In the context, a first signal is noted, and a second one ends the process as usual.

        SIGTERM that comes again within a second counts as the same request.

        SIGTERM also ends it if the run does not in time, as when the data is on a server that does
        not answer. Signals that the caller handles itself, or ignores, stay the caller's, as do
        those of a run in another thread than Python's first. A process that is forked meanwhile
        notes none.
        """
        own = {
            number: usual for number, usual in _USUAL.items() if signal.getsignal(number) is usual
        }
        main = threading.current_thread() is threading.main_thread()
        if not (own and main):
            yield
            return

        def restore() -> None:
            for number, usual in own.items():
                if signal.getsignal(number) is note:  # not set since, as by a callback
                    signal.signal(number, usual)

        def note(number: int, frame: FrameType | None) -> None:
            if self.waits and self.signal is None:
                self.signal = signal.Signals(number)
                return
            if number == signal.SIGTERM == self.signal:
                return  # The watching thread ends the process, unless it is the same request.
            # The other signal keeps this handler: it may have come, too, and wait to be called.
            usual = own[number]
            if callable(usual):
                usual(number, frame)
            else:
                signal.signal(number, usual)
                signal.raise_signal(number)

        with contextlib.ExitStack() as undo:
            _in_context.append(undo)
            undo.callback(_in_context.remove, undo)
            # Python calls its handlers when a call of TensorFlow returns, but writes there at once.
            read, write = os.pipe()
            undo.callback(os.close, read)
            os.set_blocking(write, False)
            before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            watch = threading.Thread(
                target=self._watch, args=(read, frozenset(own), before), daemon=True
            )
            watch.start()
            undo.callback(watch.join)
            undo.callback(os.close, write)  # ends the thread
            undo.callback(signal.set_wakeup_fd, before)
            undo.callback(restore)
            for number in own:
                signal.signal(number, note)
            yield

    def came(self) -> bool:
        """Returns whether a signal came to any worker; all workers must call it together."""
        if not self._agreed:
            self._agreed = self._any_worker(self.signal is not None)
            if self._agreed and self.signal is None:
                tqdm.write(
                    "another worker got a signal: the run saves a checkpoint and ends",
                    file=sys.stderr,
                )
        return self._agreed

    def end(self) -> None:
        """Ends the process if a signal came, as that would have; asks as :meth:`came` does.

        Raises:
          KeyboardInterrupt: after Ctrl-C.
          SystemExit: after SIGTERM, and after any signal that another worker got.
        """
        if not self.came():
            return
        # No worker ends before all have saved: who started them would then end the others.
        self._any_worker(True)
        if self.signal is signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)

    def _watch(self, pipe: int, own: frozenset[int], before: int) -> None:
        """Says what a signal does, and ends the process if the run does not.

        Args:
          pipe: gets the number of each signal, and is closed at the end.
          own: the signals that are noted.
          before: what else is to get the numbers, as of asyncio; -1: nothing.
        """
        poll = select.poll()  # select.select takes no descriptors from 1,024
        poll.register(pipe, select.POLLIN)
        deadline: float | None = None
        asked = False
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not poll.poll(None if left is None else 1000 * left):
                break
            received = os.read(pipe, 1)
            if not received:
                return
            if before >= 0:
                with contextlib.suppress(OSError):  # full, or closed
                    os.write(before, received)
            number = received[0]
            if number not in own:
                continue
            now = time.monotonic()
            if number == signal.SIGTERM and deadline is not None:
                if now < deadline - self._seconds + _ONE_REQUEST:
                    continue
                break
            if asked:
                self.waits = False
            if number == signal.SIGTERM:
                if not self.waits:
                    break
                deadline = now + self._seconds
            if self.waits:
                asked = True
                # Ctrl-C may have ended who reads it.
                with contextlib.suppress(OSError, ValueError):
                    tqdm.write(
                        f"{signal.Signals(number).name}: the run saves a checkpoint, within a "
                        "second or after the evaluation that is due, and ends; a second signal "
                        "ends it at once",
                        file=sys.stderr,
                    )
        os._exit(128 + signal.SIGTERM)


def _leave_contexts() -> None:
    """In a forked process, leaves the contexts of the other one, which would get its signals."""
    for context in tuple(_in_context):
        context.close()


os.register_at_fork(after_in_child=_leave_contexts)
