"""``imagenet-fast stage-server``."""

from __future__ import annotations

from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.commands.servers import check_port, hear_signals, serve_until
from imagenet_fast.distribute.quiet import import_tensorflow


def main(arguments: list[str]) -> int:
    """Lends this machine's devices to pipelines until SIGTERM or SIGINT."""
    flags = CommandFlags("stage-server")
    flags.define("port", 5060, "on which training runs ask for it")
    flags.parse(arguments)
    check_port("port", flags["port"])

    asked_to_end = hear_signals()
    import_tensorflow()
    from imagenet_fast.pipeline_parallel.placement import start_stage_server

    start_stage_server(flags["port"])
    print(f"stage server: listening at port {flags['port']}", flush=True)
    serve_until(asked_to_end)
