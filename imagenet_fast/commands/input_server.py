"""``imagenet-fast input-server``."""

from __future__ import annotations

import socket

from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.commands.servers import check_port, hear_signals, serve_until
from imagenet_fast.distribute.quiet import import_tensorflow


def main(arguments: list[str]) -> int:
    """Makes batches for other machines until SIGTERM or SIGINT."""
    flags = CommandFlags("input-server")
    flags.define("port", 5050, "on which training runs ask for it")
    flags.define(
        "host", "", "name or address by which they reach this machine; empty: its host name"
    )
    flags.define("worker_port", 0, "on which they fetch batches; 0: any free one")
    flags.parse(arguments)
    check_port("port", flags["port"])
    check_port("worker_port", flags["worker_port"], least=0)

    asked_to_end = hear_signals()
    import_tensorflow()
    import tensorflow as tf

    from imagenet_fast.data.service import input_server

    tf.config.set_visible_devices([], "GPU")  # They are for whoever trains on this machine.
    host = flags["host"] or socket.gethostname()
    with input_server(flags["port"], host, flags["worker_port"]) as address:
        print(f"input server: listening at {address}", flush=True)
        serve_until(asked_to_end)
