"""``imagenet-fast doctor``."""

from __future__ import annotations

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import check_results
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.config import Config
from imagenet_fast.doctor.finding import WRONG
from imagenet_fast.doctor.run import examine

_OPTIONS = (
    *("data_dir", "model_dir", "strategy", "tpu", "gpus", "logical_cpus"),
    *("fusion_bytes", "all_reduce", "all_reduce_group", "all_reduce_dtype"),
)


def main(arguments: list[str]) -> int:
    """Checks this machine and its cluster; the status is 1 if there is a problem."""
    flags = CommandFlags("doctor", _OPTIONS)
    flags.define("timeout", 120.0, "time limit of a check, in seconds")
    flags.define(
        "output_dir",
        "",
        "directory for doctor.json and doctor.txt, a different one for each worker; empty: none",
    )
    flags.parse(arguments)
    if flags["timeout"] <= 0:
        raise UserError(f"timeout is {flags['timeout']:g}, but must be positive")
    config = Config.from_changes(flags.changes())

    from imagenet_fast.doctor.report import line, summary, write

    if flags["output_dir"]:
        check_results(flags["output_dir"])
    findings = []
    for finding in examine(config, flags["timeout"]):
        findings.append(finding)
        print(line(finding), flush=True)
    print(f"\n{summary(findings)}")
    if flags["output_dir"]:
        print(*write(findings, flags["output_dir"]), sep="\n")
    return 1 if any(finding.state == WRONG for finding in findings) else 0
