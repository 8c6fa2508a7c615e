#!/usr/bin/env python3
r"""Starts the workers of a multi-worker run on this machine, and stops them together.

Two workers that share this machine's cores or GPUs:

    python tools/launch_local.py --workers 2 -- train --flagfile=digits \
        --data_dir=data/digits --model_dir=runs/digits

Arguments after ``--`` are passed to ``imagenet-fast`` in each worker. Each worker gets
its own ``TF_CONFIG`` and an equal part of the GPUs or, without GPUs, of the cores;
``CUDA_VISIBLE_DEVICES``, ``OMP_NUM_THREADS`` and ``TF_NUM_INTRAOP_THREADS`` are not changed if they
are set. Output lines begin with ``[worker K]``. If a worker fails, the others are stopped, and the
launcher exits with its status (128 + n after signal n). No worker outlives the launcher: not after
Ctrl-C, and on Linux not even after ``kill -9``.

``--restart_after S`` starts a worker that is killed again after S seconds, as a machine that comes
back. With ``train --wait_for_hardware=M``, the others train without it until then.

``--input_servers N`` starts N ``imagenet-fast input-server`` first, passes their addresses to the
workers as ``--input_servers=...``, and stops them when all workers have ended.

Needs only Python's standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import math
import os
import pathlib
import re
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import BinaryIO

HOST = "127.0.0.1"
# A progress bar redrawn with \r becomes a new line each time. A \r at the end may become \r\n.
_LINE = re.compile(rb"(.*?)(\r\n|\n|\r(?!\Z))", re.DOTALL)
_PR_SET_PDEATHSIG = 1
# As ``python -m imagenet_fast``, but files in the working directory replace no module.
_IMAGENET_FAST = (
    "import sys; sys.path.append(sys.path.pop(0)); import runpy; "
    "runpy.run_module('imagenet_fast', run_name='__main__', alter_sys=True)"
)


class LaunchError(Exception):
    """The workers cannot be started; the message says why and what to do."""


@dataclasses.dataclass
class Options:
    """What to start: ``workers`` times ``command``; see :func:`parse`."""

    workers: int
    restart_after: float | None
    input_servers: int
    port_base: int | None
    grace: float
    command: list[str]


def parse(arguments: list[str]) -> Options:
    """Parses the command line; errors end the process with status 2."""
    parser = argparse.ArgumentParser(
        usage="launch_local.py --workers N [options] -- train --flagfile=...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workers", type=int, required=True, help="processes to start")
    parser.add_argument(
        "--restart_after",
        type=float,
        help="seconds after which a worker that is killed starts again (default: the others end)",
    )
    parser.add_argument(
        "--input_servers",
        type=int,
        default=0,
        help="additional processes that read and decode the training images",
    )
    parser.add_argument(
        "--port_base",
        type=int,
        help="worker K listens on port_base + K, input servers on the next ports (default: free "
        "ports)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        help="seconds from SIGTERM to SIGKILL when workers are stopped (default: %(default)g)",
    )
    parser.add_argument(
        "--program", help='to start instead of imagenet_fast, e.g. "python script.py"'
    )
    split = arguments.index("--") if "--" in arguments else len(arguments)
    given, passed = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    if given.workers < 1:
        parser.error(f"--workers is {given.workers}, but must be at least 1")
    if given.restart_after is not None and given.restart_after < 0:
        parser.error(f"--restart_after is {given.restart_after:g}, but must not be negative")
    if given.input_servers < 0:
        parser.error(f"--input_servers is {given.input_servers}, but must not be negative")
    if given.grace < 0:
        parser.error(f"--grace is {given.grace:g}, but must not be negative")
    processes = given.workers + given.input_servers
    if given.port_base is not None and not 1 <= given.port_base <= 65536 - processes:
        parser.error(f"--port_base is {given.port_base}, but ports are 1 to 65535")
    if not passed and not given.program:
        parser.error("nothing to run: put imagenet_fast's arguments after --, as in -- train")
    imagenet_fast = [sys.executable, "-c", _IMAGENET_FAST]
    program = shlex.split(given.program) if given.program else imagenet_fast
    return Options(
        workers=given.workers,
        restart_after=given.restart_after,
        input_servers=given.input_servers,
        port_base=given.port_base,
        grace=given.grace,
        command=[*program, *passed],
    )


def choose_ports(count: int, base: int | None) -> list[int]:
    """Returns ``count`` ports that are free now.

    Raises:
      LaunchError: if one of the ports from ``base`` on is in use.
    """
    with contextlib.ExitStack() as sockets:
        ports = []
        # All stay bound until the last one is found, so that none is found twice.
        for index in range(count):
            listener = sockets.enter_context(socket.socket())
            port = 0 if base is None else base + index
            if base is not None:
                # Connections of a finished job that are in TIME_WAIT do not count.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, port))
            except OSError as error:
                raise LaunchError(
                    f"port {port} on {HOST} cannot be used ({error.strerror}): choose another "
                    "--port_base, or leave it out to use free ports"
                ) from None
            ports.append(listener.getsockname()[1])
    return ports


def count_gpus() -> int:
    """Returns the number of NVIDIA GPUs of this machine."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        directory = pathlib.Path("/proc/driver/nvidia/gpus")
        return len(list(directory.iterdir())) if directory.is_dir() else 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def worker_environments(ports: list[int], inherited: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the environment of each worker: the inherited one, ``TF_CONFIG`` and devices.

    Raises:
      LaunchError: if there are GPUs, but fewer than workers.
    """
    workers, common = len(ports), common_environment(inherited)
    gpus = 0 if "CUDA_VISIBLE_DEVICES" in inherited else count_gpus()
    if 0 < gpus < workers:
        raise LaunchError(
            f"{workers} workers cannot share {gpus} GPU{'s' * (gpus > 1)}: start fewer, or set "
            "CUDA_VISIBLE_DEVICES yourself (empty: use the CPU)"
        )
    if not gpus and inherited.get("CUDA_VISIBLE_DEVICES", "") in ("", "-1"):
        # Otherwise each worker starts a thread for every core, and they compete.
        for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
            common.setdefault(name, str(max(1, count_cores() // workers)))
    environments = []
    for index in range(workers):
        addresses = [f"{HOST}:{port}" for port in ports]
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {**common, "TF_CONFIG": json.dumps(task)}
        if gpus:
            # Equal numbers, since the slowest worker sets the pace; remaining GPUs stay idle.
            count = gpus // workers
            first = index * count
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + count)))
        environments.append(environment)
    return environments


def common_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of all processes: the inherited one, with proxies disabled."""
    common = dict(inherited)
    # gRPC would connect to the other processes through a proxy.
    for name in ("no_proxy", "NO_PROXY"):
        common[name] = ",".join(filter(None, [inherited.get(name), HOST, "localhost"]))
    common.setdefault("PYTHONUNBUFFERED", "1")
    return common


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Process:
    """A running worker or input server, the leader of its own process group.

    Args:
      name: for messages, such as ``worker 0``.
      command: to run.
      environment: its environment variables.

    Raises:
      LaunchError: if it cannot be started.
    """

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        self.name = name
        try:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Ctrl-C in the terminal then only reaches the launcher, which stops the group.
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]!r}: {error.strerror}") from None

    def has_ended(self) -> bool:
        """Returns whether it has ended; if so, kills the rest of its group."""
        if self.process.poll() is None:
            return False
        self.send(signal.SIGKILL)
        return True

    @property
    def status(self) -> int:
        """The exit status as in a shell: 128 + n after signal n."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def send(self, number: int) -> None:
        """Sends a signal to its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _die_with_parent() -> Callable[[], None] | None:
    """Returns a function for a child process that has it killed when its parent dies; for Linux."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    return prepare


class Output:
    """Forwards the processes' output line by line."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._pending: dict[int, bytes] = {}

    def add(self, source: Process) -> None:
        """Starts to forward a process' output."""
        prefix = f"[{source.name}] ".encode()
        pipes = (
            (source.process.stdout, sys.stdout.buffer),
            (source.process.stderr, sys.stderr.buffer),
        )
        for pipe, target in pipes:
            self._selector.register(pipe, selectors.EVENT_READ, (prefix, target))
            self._pending[pipe.fileno()] = b""

    def forward(self, timeout: float) -> bool:
        """Waits up to ``timeout`` seconds for output; returns whether there was any."""
        if not self._pending:
            time.sleep(timeout)
            return False
        ready = self._selector.select(timeout)
        for key, _ in ready:
            data = os.read(key.fd, 65536)
            text = self._pending[key.fd] + data
            if data:
                end = 0
                for match in _LINE.finditer(text):
                    end = match.end()
                    # Blanks that erase a progress bar are not forwarded.
                    if match[2] != b"\r" or match[1].strip():
                        _write(*key.data, match[1])
                self._pending[key.fd] = text[end:]
            else:
                if text.strip():
                    _write(*key.data, text.rstrip(b"\r"))
                self._selector.unregister(key.fileobj)
                del self._pending[key.fd]
        return bool(ready)


def _write(prefix: bytes, target: BinaryIO, line: bytes) -> None:
    target.write(prefix + line + b"\n")
    target.flush()


class Job:
    """All workers and input servers.

    Args:
      grace: seconds from SIGTERM to SIGKILL when they are stopped.
      restart_after: seconds after which a worker that a signal has ended starts again; None: never,
        the job ends.
    """

    def __init__(self, grace: float, restart_after: float | None = None) -> None:
        self._grace, self._restart_after = grace, restart_after
        self._output = Output()
        self._workers: list[Process] = []
        self._servers: list[Process] = []
        self._signals: list[int] = []
        self._status: int | None = None
        self._kill_at = math.inf
        self._command: list[str] = []
        self._environments: dict[str, dict[str, str]] = {}
        self._again: dict[str, float] = {}  # when to start workers again

    def end_on(self, *signals: signal.Signals) -> None:
        """Stops the job when this process gets one of ``signals``; at the second one, at once."""
        for number in signals:
            # nohup ignores SIGHUP, which must stay ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self._signals.append(number))

    def start_servers(self, ports: list[int], environment: dict[str, str]) -> bool:
        """Starts an input server on each port and waits until all listen.

        Returns:
          Whether they do; if not, one has failed, or the job is being stopped.

        Raises:
          LaunchError: if one cannot be started.
        """
        # Only Linux keeps other machines from them. Elsewhere they say so, as the workers do.
        trusted = [] if sys.platform == "linux" else ["--trusted_network"]
        for index, port in enumerate(ports):
            flags = [f"--host={HOST}", f"--port={port}", *trusted]
            command = [sys.executable, "-c", _IMAGENET_FAST, "input-server", *flags]
            self._start(self._servers, f"input server {index}", command, environment)
        waiting = list(ports)
        while waiting and self._status is None:
            self._poll()
            waiting = [port for port in waiting if not _is_listening(port)]
        return self._status is None

    def start_workers(self, command: list[str], environments: list[dict[str, str]]) -> None:
        """Starts a worker in each environment.

        Raises:
          LaunchError: if one cannot be started.
        """
        self._command = command
        self._environments = {f"worker {n}": each for n, each in enumerate(environments)}
        for name, environment in self._environments.items():
            self._start(self._workers, name, command, environment)

    def _start(
        self, group: list[Process], name: str, command: list[str], environment: dict[str, str]
    ) -> None:
        process = Process(name, command, environment)
        group.append(process)
        self._output.add(process)

    def wait(self) -> int:
        """Waits until all have ended; returns 0, or the status of the first failure."""
        while self._workers or (self._again and self._status is None):
            self._poll()
        if self._status is None:
            self._status = 0  # whatever the servers' status
            self._terminate()
        while self._servers:
            self._poll()
        while self._output.forward(timeout=0):
            pass
        return self._status

    def _poll(self) -> None:
        """Forwards output for a moment, and handles ended processes and signals."""
        self._output.forward(timeout=0.1)
        for group in (self._workers, self._servers):
            for process in [process for process in group if process.has_ended()]:
                group.remove(process)
                # `train --wait_for_hardware` ends its training first after SIGTERM.
                code = process.process.returncode
                killed = group is self._workers and (code < 0 or code == 128 + signal.SIGTERM)
                if killed and self._restart_after is not None and self._status is None:
                    _log(f"{process.name} was killed; it starts again in {self._restart_after:g} s")
                    self._again[process.name] = time.monotonic() + self._restart_after
                elif process.status or group is self._servers:
                    self._end(f"{process.name} failed", process.status or 1)
                else:  # The training is complete.
                    self._restart_after = None
                    self._again.clear()
        for name in [name for name, due in self._again.items() if time.monotonic() >= due]:
            del self._again[name]
            if self._status is None:
                _log(f"{name} starts again")
                self._start(self._workers, name, self._command, self._environments[name])
        while self._signals:
            if self._status is not None:
                self._kill_at = 0
            number = self._signals.pop(0)
            self._end(f"got {signal.Signals(number).name}", 128 + number)
        if time.monotonic() >= self._kill_at:
            self.kill()

    def _end(self, reason: str, status: int) -> None:
        """Stops the job, unless that has begun."""
        if self._status is not None:
            return
        self._status = status
        running = " and ".join(
            name
            for name, group in (("workers", self._workers), ("input servers", self._servers))
            if group
        )
        _log(
            f"{reason} (status {status})" + (f"; stopping the remaining {running}" * bool(running))
        )
        self._terminate()

    def _terminate(self) -> None:
        self._kill_at = time.monotonic() + self._grace
        for process in (*self._workers, *self._servers):
            process.send(signal.SIGTERM)

    def kill(self) -> None:
        """Kills everything that still runs."""
        for process in (*self._workers, *self._servers):
            process.send(signal.SIGKILL)


def _is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((HOST, port)) == 0


def _log(message: str) -> None:
    print(f"[launcher] {message}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Runs the job of a command line; returns the exit status."""
    options = parse(arguments)
    job = Job(options.grace, options.restart_after)
    job.end_on(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        ports = choose_ports(options.workers + options.input_servers, options.port_base)
        workers, servers = ports[: options.workers], ports[options.workers :]
        environments = worker_environments(workers, os.environ)
        if job.start_servers(servers, common_environment(os.environ)):
            addresses = ",".join(f"{HOST}:{port}" for port in servers)
            flags = [f"--input_servers={addresses}"] if servers else []
            job.start_workers([*options.command, *flags], environments)
        return job.wait()
    except LaunchError as error:
        _log(str(error))
        return 2
    except BrokenPipeError:
        # Python must not write buffered output to the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    finally:
        job.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
