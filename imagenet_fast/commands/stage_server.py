"""``imagenet-fast stage-server``."""

from __future__ import annotations

import os
import signal
import threading

from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.commands.quiet import import_tensorflow
from imagenet_fast.errors import UserError


def main(arguments: list[str]) -> int:
    """Lends this machine's devices to pipelines until SIGTERM or SIGINT."""
    flags = CommandFlags("stage-server")
    flags.define("port", 5060, "on which training runs ask for it")
    flags.parse(arguments)
    if not 0 < flags["port"] < 2**16:
        raise UserError(f"port is {flags['port']}, but must be in [1, 65535]")

    asked_to_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked_to_end.set())
    import_tensorflow()
    from imagenet_fast.pipeline_parallel.placement import start_stage_server

    start_stage_server(flags["port"])
    print(f"stage server: listening at port {flags['port']}", flush=True)
    while not asked_to_end.wait(1):
        pass  # A signal that another thread gets does not wake this one.
    os._exit(0)  # TensorFlow's servers have no end of their own, and nothing to lose.
