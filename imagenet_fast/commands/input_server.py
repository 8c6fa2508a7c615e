"""``imagenet-fast input-server``."""

from __future__ import annotations

import os
import signal
import socket
import threading

from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.commands.quiet import import_tensorflow
from imagenet_fast.errors import UserError


def main(arguments: list[str]) -> int:
    """Makes batches for other machines until SIGTERM or SIGINT."""
    flags = CommandFlags("input-server")
    flags.define("port", 5050, "on which training runs ask for it")
    flags.define(
        "host", "", "name or address by which they reach this machine; empty: its host name"
    )
    flags.define("worker_port", 0, "on which they fetch batches; 0: any free one")
    flags.parse(arguments)
    if not 0 < flags["port"] < 2**16:
        raise UserError(f"port is {flags['port']}, but must be in [1, 65535]")
    if not 0 <= flags["worker_port"] < 2**16:
        raise UserError(f"worker_port is {flags['worker_port']}, but must be in [0, 65535]")

    asked_to_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked_to_end.set())
    import_tensorflow()
    import tensorflow as tf

    from imagenet_fast.data.service import input_server

    tf.config.set_visible_devices([], "GPU")  # They are for whoever trains on this machine.
    host = flags["host"] or socket.gethostname()
    with input_server(flags["port"], host, flags["worker_port"]) as address:
        print(f"input server: listening at {address}", flush=True)
        while not asked_to_end.wait(1):
            pass  # A signal that another thread gets does not wake this one.
        # Ended one after the other, TensorFlow's two servers sometimes wait for each other for
        # ever. They have nothing to lose.
        os._exit(0)
