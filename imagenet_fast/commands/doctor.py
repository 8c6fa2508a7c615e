"""``imagenet-fast doctor``."""

from __future__ import annotations

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import check_results
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.config import Config
from imagenet_fast.doctor.finding import WRONG
from imagenet_fast.doctor.run import examine

_OPTIONS = (
    "data_dir",
    "model_dir",
    "strategy",
    "tpu",
    "gpus",
    "logical_cpus",
    "fusion_bytes",
    "all_reduce",
    "all_reduce_group",
    "all_reduce_dtype",
)


def main(arguments: list[str]) -> int:
    """Checks this machine, and the cluster that it is part of; returns 1 if something is wrong."""
    flags = CommandFlags("doctor", _OPTIONS)
    flags.define("timeout", 120.0, "seconds that a check may take, or wait for other workers")
    flags.define(
        "output_dir",
        "",
        "where to write doctor.json and doctor.txt; each worker needs its own; empty: nowhere",
    )
    flags.parse(arguments)
    if flags["timeout"] <= 0:
        raise UserError(f"timeout is {flags['timeout']:g}, but must be positive")
    config = Config().replace(**flags.changes())

    from imagenet_fast.doctor.report import line, summary, write

    if flags["output_dir"]:
        check_results(flags["output_dir"])
    findings = []
    for finding in examine(config, flags["timeout"]):
        findings.append(finding)
        print(line(finding), flush=True)
    print(f"\n{summary(findings)}")
    if flags["output_dir"]:
        for path in write(findings, flags["output_dir"]):
            print(path)
    return 1 if any(own.state == WRONG for own in findings) else 0
