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


def hear_signals() -> threading.Event:
    """Returns an event that SIGTERM and SIGINT set from now on, instead of ending the process."""
    asked_to_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked_to_end.set())
    return asked_to_end


def serve_until(asked_to_end: threading.Event) -> NoReturn:
    """Waits until a signal asks to end, then ends the process."""
    while not asked_to_end.wait(1):
        pass  # A signal that another thread gets does not wake this one.
    # TensorFlow's servers have nothing to lose. Some have no end of their own, others, ended one
    # after the other, sometimes wait for each other for ever.
    os._exit(0)
