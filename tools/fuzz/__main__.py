r"""Fuzzes the readers of files that others may have made, guided by coverage.

    python tools/fuzz --seconds=3600 --output_dir=benchmarks/fuzzing
    python tools/fuzz --readers=manifest,idx --seconds=60 --output_dir=/tmp/fuzz

Each reader runs in a process of its own, on mutations of files that the package itself wrote. It
may read an input, or refuse it by a UserError or an OSError that names the file. Findings are any
other exception, a crash, an input that takes over 20 seconds of CPU time or two minutes, and memory
of more than 1 GB above what the first files took; their inputs are kept in the output directory.
Each reader adds a line to ``log.jsonl`` there. The status is 1 if there is a finding.

It needs atheris, which the extra `fuzz` installs, and Python 3.11 or later.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from typing import IO, Any

import target  # first: it imports the package as atheris needs it
import targets
from tqdm import tqdm

from imagenet_fast.base.environment import now, package_version
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import LineFile, whole_lines
from imagenet_fast.base.paths import to_path

_CPU_SECONDS_OF_AN_INPUT = 20
_SECONDS_OF_AN_INPUT = 120
_MEGABYTES_ABOVE = 1000
# As libFuzzer prints them at its end.
_FIRST = re.compile(r"^first_mb (\d+)$", re.MULTILINE)
_STATISTICS = re.compile(r"stat::(\w+):\s+(\d+)")


def main() -> int:
    """Fuzzes the readers in turn, and prints a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readers", default=",".join(targets.TARGETS), help="separated by commas")
    parser.add_argument("--seconds", type=int, default=60, help="of each reader")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations")
    parser.add_argument("--output_dir", required=True, help="for the log and findings")
    given = parser.parse_args()
    readers = given.readers.split(",")
    for reader in readers:
        if reader not in targets.TARGETS:
            parser.error(f"there is no reader {reader}, only {', '.join(targets.TARGETS)}")
    output = pathlib.Path(given.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    log_file = to_path(output, "log.jsonl")
    log = LineFile(log_file, whole_lines(log_file))
    failed = False
    for reader in tqdm(readers, unit=" readers", disable=len(readers) == 1):
        result = fuzz(reader, given.seconds, given.seed, output)
        log.add(json.dumps(result))
        log.flush()
        failed |= bool(result["findings"])
        tqdm.write(
            f"{reader:12} {result['inputs']:>10,} inputs in {result['seconds']} s, peak memory "
            f"{result['peak_mb']} MB, at first {result['first_mb']} MB, "
            f"{len(result['findings']) or 'no'} findings {' '.join(result['findings'])}"
        )
    return 1 if failed else 0


def fuzz(reader: str, seconds: int, seed: int, output: pathlib.Path) -> dict[str, Any]:
    """Fuzzes a reader in a process of its own.

    Args:
      reader: its name.
      seconds: time limit.
      seed: of the mutations.
      output: gets the inputs that are findings.

    Returns:
      The row of the log.
    """
    options = [
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-timeout={_SECONDS_OF_AN_INPUT}",
        # Otherwise it keeps inputs of ten seconds, which other programs can make of a fast one.
        f"-report_slow_units={_SECONDS_OF_AN_INPUT}",
        "-print_final_stats=1",
        "-max_len=65536",
        f"-artifact_prefix={output}/{reader}-",
    ]
    kept, start = set(output.glob(f"{reader}-*")), time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="imagenet_fast_") as folder,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        # To import and instrument the package takes seconds.
        process = os.fork()
        if not process:
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            target.fuzz(
                reader,
                pathlib.Path(folder),
                _MEGABYTES_ABOVE,
                _CPU_SECONDS_OF_AN_INPUT,
                options,
            )
        _, code, used = os.wait4(process, 0)
        status = os.waitstatus_to_exitcode(code)
        printed, errors = map(_content, (stdout, stderr))
    first = _FIRST.search(printed)
    if first is None:
        raise UserError(f"{reader} fails before any mutation: {errors[-2000:]}")
    statistics = {name: int(value) for name, value in _STATISTICS.findall(errors)}
    findings = sorted(path.name for path in set(output.glob(f"{reader}-*")) - kept)
    if status and not findings:
        findings = [f"ended by status {status}"]
    if findings:
        text = f"{printed[-20000:]}\n{errors[-20000:]}"
        (output / f"{reader}.txt").write_text(text, encoding="utf-8")
    return {
        "reader": reader,
        "inputs": statistics.get("number_of_executed_units", 0),
        "seconds": round(time.monotonic() - start),  # fewer than asked for with a finding
        "cpu_seconds": round(used.ru_utime + used.ru_stime),
        "seed": seed,
        "first_mb": int(first[1]),
        "peak_mb": statistics.get("peak_rss_mb", 0),
        "findings": findings,
        "finished": now(),
        "version": package_version(),
    }


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"fuzz: {error}")
