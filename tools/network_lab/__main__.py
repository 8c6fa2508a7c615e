r"""Runs workers of one Linux machine as if they were far apart.

    sudo python tools/network_lab --workers=8 --groups=2 --latency=40ms --bandwidth=200mbit -- \
        python -m imagenet_fast train --flagfile=flags/digits.flags --model_dir=runs/digits

Each worker has a network namespace of its own with one interface, and the machine's own interfaces
have no part in it. COMMAND runs in each, with a TF_CONFIG that names the workers' addresses there.
Output lines begin with ``[worker K]``. When a worker fails, the others are ended, and its exit
status (128 + n after signal n) is that of the lab. Nothing of a lab is left when it ends, whatever
ends it; after ``kill -9``, ``--clean`` removes what was left.

A frame arrives its latency after it has left, one way; a round trip takes twice that. Each worker's
port passes --bandwidth in each direction, at the same time and whichever group the other worker is
in; with --group_bandwidth, groups have links of their own besides, as machines with several GPUs
do. What comes faster waits, and practically nothing is lost. TCP gets 95.6% of it, the rest is
headers. TCP's own settings in a lab are those for long distances: Reno, windows for the latency and
the bandwidth, and no slow start after a pause. --check tells whether this machine is fast enough.

Needs root, the commands ``ip`` and ``tc`` (Debian's iproute2), and a kernel that has netem, or
/dev/net/tun for a switch in user space that takes its place.
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

# This folder and launch_local.py are to be found there.
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
    """Treats a wrong command line as any other error of the user's."""

    def error(self, message: str) -> NoReturn:
        raise LabError(message)


@dataclasses.dataclass
class Options:
    """What to do; see :func:`parse`. Without a layout: clean."""

    layout: Layout | None
    backend: str
    grace: float
    check: bool
    command: list[str]


def parse(arguments: list[str]) -> Options:
    """Reads the command line.

    Raises:
      LabError: if anything in it cannot be used.
      SystemExit: after printing the help, if that was asked for.
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
        help="groups of equal size into which they are divided (default: %(default)s)",
    )
    parser.add_argument(
        "--latency",
        default="0",
        help="time that each frame takes, one way, from a worker to one of another group: 40ms, "
        "500us, 0.1s (default: none)",
    )
    parser.add_argument(
        "--group_latency",
        default="0",
        help="the same to a worker of the same group; at most --latency (default: none)",
    )
    parser.add_argument(
        "--bandwidth",
        help="what each worker can send a second, and receive at the same time, in Ethernet "
        "frames, to whatever group: 200mbit, 1gbit, 64kbit (default: no limit)",
    )
    parser.add_argument(
        "--group_bandwidth",
        help="what each worker can send to its own group, and receive from it, besides: on links "
        "of their own (default: they share --bandwidth)",
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "netem", "switch"),
        default="auto",
        help="what delays frames: the kernel's netem, or a switch in user space (default: netem "
        "where the kernel has it)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        help="seconds between asking workers to end (SIGTERM) and SIGKILL (default: %(default)g)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="run nothing; measure latencies and rates, and print them beside those asked for",
    )
    parser.add_argument(
        "--clean", action="store_true", help="remove what labs left that were killed"
    )
    split = arguments.index("--") if "--" in arguments else len(arguments)
    given, command = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    if given.clean:
        if len(arguments) > 1:
            raise LabError("--clean goes with nothing else")
        return Options(None, given.backend, given.grace, given.check, command)
    if given.workers is None:
        raise LabError("--workers is missing: say how many, as in --workers=8")
    if given.grace < 0:
        raise LabError(f"--grace is {given.grace:g}, but must not be negative")
    if given.check == bool(command):
        raise LabError("either give a command after --, or ask for --check")
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
    """Removes what labs left that were killed, and says what."""
    for name in namespaces.left_behind():
        namespaces.remove(name)
        print(f"removed {name}")


def run(options: Options) -> int:
    """Builds the lab, does in it what was asked for, and removes it; returns the exit status."""
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
    """Has this process clean up and end, undisturbed by further signals."""
    for other in ENDING_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main(arguments: list[str]) -> int:
    """Does what the command line asks for; returns the exit status."""
    for number in ENDING_SIGNALS:
        # nohup has SIGHUP ignored, and that is to stay.
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
        # Nobody reads the output any more, not even what Python would still write at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
