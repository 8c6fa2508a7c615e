"""``imagenet-fast input-server``."""

from __future__ import annotations

from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.commands.servers import (
    check_reach,
    define_reach,
    handle_signals,
    serve_until,
)
from imagenet_fast.distribute.quiet import import_tensorflow


def main(arguments: list[str]) -> int:
    """Reads and decodes batches for training runs until SIGTERM or SIGINT."""
    flags = CommandFlags("input-server")
    flags.define("port", 5050, "port to which training runs connect")
    define_reach(flags)
    flags.define("worker_port", 0, "port that serves batches; 0: any free one")
    flags.parse(arguments)
    check_reach(flags["host"], port=flags["port"], worker_port=flags["worker_port"])

    stop = handle_signals()
    import_tensorflow()
    import tensorflow as tf

    from imagenet_fast.data.service import input_server

    tf.config.set_visible_devices([], "GPU")  # Leave them to runs on this machine.
    with input_server(
        flags["port"], flags["host"], flags["worker_port"], trusted_network=flags["trusted_network"]
    ) as address:
        print(f"input server: listening at {address}", flush=True)
        serve_until(stop)
