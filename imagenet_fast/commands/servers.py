"""Signal handling and port checks of the server commands."""

from __future__ import annotations

import os
import signal
import threading
from typing import NoReturn

from imagenet_fast.base.errors import UserError


def check_port(name: str, port: int, least: int = 1) -> None:
    """Checks a port number.

    Raises:
      UserError: if it is out of range.
    """
    if not least <= port < 2**16:
        raise UserError(f"{name} is {port}, but must be in [{least}, 65535]")


def handle_signals() -> threading.Event:
    """Returns an event that SIGTERM and SIGINT set from now on, instead of ending the process."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stop.set())
    return stop


def serve_until(stop: threading.Event) -> NoReturn:
    """Waits for the event, then ends the process."""
    while not stop.wait(1):
        pass  # Polls, because a signal in another thread does not wake this one.
    # Without cleanup, because TensorFlow's servers hold no state; some cannot be stopped, and
    # others may deadlock when they are stopped one after another.
    os._exit(0)
