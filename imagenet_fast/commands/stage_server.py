"""``imagenet-fast stage-server``."""

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
    """Provides this machine's devices to pipelines until SIGTERM or SIGINT."""
    flags = CommandFlags("stage-server")
    flags.define("port", 5060, "port to which training runs connect")
    define_reach(flags)
    flags.parse(arguments)
    check_reach(flags["host"], port=flags["port"])

    stop = handle_signals()
    import_tensorflow()
    from imagenet_fast.pipeline_parallel.placement import start_stage_server

    address = start_stage_server(
        flags["port"], flags["host"], trusted_network=flags["trusted_network"]
    )
    print(f"stage server: listening at {address}", flush=True)
    serve_until(stop)
