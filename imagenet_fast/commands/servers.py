"""Flags, signals and checks of the server commands."""

from __future__ import annotations

import os
import signal
import threading
from typing import NoReturn

from imagenet_fast.base.addresses import LOOPBACK, check_free, is_loopback, own_addresses
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.commands.flags import CommandFlags


def define_reach(flags: CommandFlags) -> None:
    """Defines the flags for who can reach a server."""
    flags.define(
        "host",
        LOOPBACK,
        "name or address of this machine at which other machines reach the server; the default "
        "lets none",
    )
    flags.define(
        "trusted_network",
        False,
        "also start where the system, unlike Linux, cannot keep connections to other addresses out",
    )


def check_reach(host: str, **ports: int) -> None:
    """Checks a server's host, and that its ports are free, before TensorFlow is imported.

    Raises:
      UserError: if the host is not this machine, or a port cannot be used.
    """
    for name, port in ports.items():
        least = 0 if name == "worker_port" else 1  # 0: any free one
        if not least <= port < 2**16:
            raise UserError(f"{name} is {port}, but must be in [{least}, 65535]")
    addresses = own_addresses(host)
    for name, port in ports.items():
        check_free(name, port)
    if all(map(is_loopback, addresses)) and not is_loopback(host):
        # As in many machines' /etc/hosts.
        warn_once(
            f"{host} is {' and '.join(addresses)} on this machine, which others cannot reach: for "
            "them, give --host an address"
        )


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
