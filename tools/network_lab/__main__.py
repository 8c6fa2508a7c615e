r"""Emulates a network with latency and limited bandwidth between workers on one Linux machine.

    sudo python tools/network_lab --workers=8 --groups=2 --latency=40ms --bandwidth=200mbit -- \
        python -m imagenet_fast train --flagfile=digits --model_dir=runs/digits

Each worker has its own network namespace with one interface, separate from the machine's. COMMAND
runs in each, with a TF_CONFIG of the workers' addresses there. Output lines begin with
``[worker K]``. If a worker fails, the others are stopped, and the lab exits with its status (128 +
n after signal n). A lab removes everything when it ends; after ``kill -9``, use ``--clean``.

--latency is one way; a round trip takes twice that. Each worker's port carries --bandwidth in each
direction at the same time, to workers of all groups together; with --group_bandwidth, groups have
additional links, like machines with several GPUs. Frames above the bandwidth are queued, and
practically none are dropped. TCP gets 95.6% of the bandwidth, headers the rest. TCP is configured
for long distances: Reno, windows for the latency and bandwidth, and no slow start after a pause.
--check shows whether this machine is fast enough.

Needs root, the commands ``ip`` and ``tc`` (Debian's iproute2), and a kernel with netem or, for a
user-space switch instead, /dev/net/tun.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import shutil
import signal
import sys
from typing import NoReturn

# The folder of launch_local.py and of this package.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import launch_local

from network_lab import check, job, namespaces, requirements
from network_lab.errors import LabError
from network_lab.lab import Lab
from network_lab.layout import Layout, parse_bandwidth, parse_latency
from network_lab.namespaces import ENDING_SIGNALS

_USAGE = """python tools/network_lab --workers=N [options] -- COMMAND...
       python tools/network_lab --workers=N [options] --check
       python tools/network_lab --clean"""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line like any other user error."""

    def error(self, message: str) -> NoReturn:
        raise LabError(message)


@dataclasses.dataclass
class Options:
    """The parsed command line; without a layout, clean up."""

    layout: Layout | None
    backend: str
    grace: float
    check: bool
    command: list[str]


def parse(arguments: list[str]) -> Options:
    """Parses the command line.

    Raises:
      LabError: if an argument is invalid.
      SystemExit: after printing the help, if requested.
    """
    parser = _Parser(
        usage=_USAGE,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workers", type=int, help="worker processes, each in its own namespace")
    parser.add_argument(
        "--groups",
        type=int,
        default=1,
        help="groups of equal size that the workers form (default: %(default)s)",
    )
    parser.add_argument(
        "--latency",
        default="0",
        help="one-way latency between workers of different groups: 40ms, 500us, 0.1s (default: 0)",
    )
    parser.add_argument(
        "--group_latency",
        default="0",
        help="one-way latency within a group; at most --latency (default: 0)",
    )
    parser.add_argument(
        "--bandwidth",
        help="bandwidth of each worker's port in each direction, in Ethernet frames: 200mbit, "
        "1gbit, 64kbit (default: no limit)",
    )
    parser.add_argument(
        "--group_bandwidth",
        help="bandwidth of each worker's additional link to its own group (default: no such link; "
        "the group shares --bandwidth)",
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "netem", "switch"),
        default="auto",
        help="what delays frames: the kernel's netem, or a user-space switch (default: netem if "
        "the kernel has it)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        help="seconds from SIGTERM to SIGKILL when workers are stopped (default: %(default)g)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="run nothing; print measured beside requested latencies and bandwidths",
    )
    parser.add_argument("--clean", action="store_true", help="remove remains of killed labs")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    given, command = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    if given.clean:
        if len(arguments) > 1:
            raise LabError("--clean allows no other flags")
        return Options(None, given.backend, given.grace, given.check, command)
    if given.workers is None:
        raise LabError("--workers is missing: give their number, as in --workers=8")
    if given.grace < 0:
        raise LabError(f"--grace is {given.grace:g}, but must not be negative")
    if given.check == bool(command):
        raise LabError("give either a command after -- or --check")
    if command and not shutil.which(command[0]):
        raise LabError(f"there is no command {command[0]!r}")
    layout = Layout(
        workers=given.workers,
        groups=given.groups,
        latency=parse_latency(given.latency),
        group_latency=parse_latency(given.group_latency),
        bandwidth=_bandwidth(given.bandwidth),
        group_bandwidth=_bandwidth(given.group_bandwidth),
    )
    return Options(layout, given.backend, given.grace, given.check, command)


def _bandwidth(given: str | None) -> float | None:
    return None if given is None else parse_bandwidth(given)


def clean() -> None:
    """Removes the remains of killed labs, and prints them."""
    for name in namespaces.left_behind():
        namespaces.remove(name)
        print(f"removed {name}")


def run(options: Options) -> int:
    """Builds the lab, runs the command or the check, and removes it; returns the exit status."""
    lab = Lab(options.layout, options.backend)
    try:
        lab.build()
        if options.command:
            return job.run(lab, options.command, options.grace)
        print(f"delays by: {lab.backend}", flush=True)
        print(check.table(check.measure(lab)))
        return 0
    finally:
        lab.remove()


def _end(number: int, frame: object) -> NoReturn:
    """Ends this process with its cleanup, and ignores further signals."""
    for other in ENDING_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main(arguments: list[str]) -> int:
    """Runs a command line; returns the exit status."""
    for number in ENDING_SIGNALS:
        # nohup ignores SIGHUP, which must stay ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        options = parse(arguments)
        requirements.check()
        if options.layout is None:
            clean()
            return 0
        return run(options)
    except (LabError, launch_local.LaunchError) as error:
        print(f"[network_lab] {error}", file=sys.stderr, flush=True)
        return 2
    except BrokenPipeError:
        # Python must not write buffered output to the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
