"""``imagenet-fast history``."""

from __future__ import annotations

import json

from imagenet_fast.base.counted import counted
from imagenet_fast.base.terminal import aligned
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.training.checkpoints.config_file import stored_config
from imagenet_fast.training.logs.metrics_file import read_rows
from imagenet_fast.training.segments import lines_of, passed_segments, read_segments


def main(arguments: list[str]) -> int:
    """Prints the devices on which a run has trained, with steps and images/s."""
    flags = CommandFlags(
        "history", ["model_dir"], about="Shows on which devices a run has trained, and how fast."
    )
    flags.define("json", False, "print JSON instead of a table")
    flags.parse(arguments)
    config = stored_config(flags["model_dir"])
    rows = read_rows(config.model_dir)
    step = max((row["step"] for row in rows if row["kind"] == "train"), default=0)
    passed = passed_segments(read_segments(config.model_dir), rows, step)
    if flags["json"]:
        print(json.dumps(passed, indent=2))
        return 0
    if not passed:
        print(f"{config.model_dir} has no record of its devices: an earlier version trained it")
        return 0
    replicas = counted(config.replicas[0], "replica") if config.replicas else "replicas"
    print(f"{config.model_dir}: {replicas}, carried by")
    table = [("steps", "images/s", "since (UTC)", "devices"), *lines_of(passed)]
    print(*aligned(table, left=range(4)), sep="\n")
    return 0
