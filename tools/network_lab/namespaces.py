"""Network namespaces whose names identify the lab that created them.

Named namespaces outlive a lab that was killed. Their names contain the lab's process ID and start
time, so that remains of killed labs can be told from namespaces in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import re
import signal
import subprocess
import time
from collections.abc import Iterator

from network_lab.errors import LabError

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PREFIX = "network-lab"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-\w+")
_FOLDER = pathlib.Path("/var/run/netns")  # as used by `ip`
_OWN = pathlib.Path("/proc/thread-self/ns/net")
_CLONE_NEWNET = 0x40000000
_TIMEOUT_SECONDS = 5.0  # for killed processes to disappear


def run(*command: str) -> str:
    """Runs a short command and returns its output.

    Raises:
      LabError: if it fails.
    """
    # Signals that end the lab are delayed: it must not clean up during the command.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if result.returncode:
        raise LabError(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
    return result.stdout


def own_prefix() -> str:
    """Returns the prefix of the names of this process' namespaces."""
    return f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-"


def existing(prefix: str = "") -> list[str]:
    """Returns the names of all labs' namespaces that begin with ``prefix``."""
    if not _FOLDER.is_dir():
        return []
    names = sorted(path.name for path in _FOLDER.iterdir())
    return [name for name in names if _NAME.fullmatch(name) and name.startswith(prefix)]


def left_behind() -> list[str]:
    """Returns the names of namespaces whose lab no longer runs."""
    left = []
    for name in existing():
        process, started = (int(number) for number in _NAME.fullmatch(name).groups())
        if _start_time(process) != started:
            left.append(name)
    return left


def _start_time(process: int) -> int | None:
    """Returns a process' start time in the kernel's ticks; None if it does not run."""
    try:
        text = pathlib.Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, a file name in parentheses, may contain blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    # Zombies are still listed.
    return None if fields[0] in "ZX" else int(fields[19])


def add(name: str) -> None:
    """Creates a namespace with only a loopback interface.

    Raises:
      LabError: if that fails.
    """
    run("ip", "netns", "add", name)
    run("ip", "-n", name, "link", "set", "lo", "up")


def remove(name: str) -> None:
    """Kills all processes in a namespace, and removes it with its interfaces.

    Raises:
      LabError: if that fails.
    """
    give_up = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < give_up:
        processes = [int(process) for process in run("ip", "netns", "pids", name).split()]
        if not processes:
            break
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    run("ip", "netns", "del", name)


def remove_all(prefix: str) -> None:
    """Removes the namespaces whose names begin with ``prefix``.

    Raises:
      LabError: if that fails.
    """
    for name in existing(prefix):
        remove(name)


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Moves this thread into a namespace, so that new sockets and interfaces belong to it.

    Raises:
      OSError: if it cannot be entered.
    """
    with _OWN.open() as before, (_FOLDER / name).open() as inside:
        _enter(inside.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(descriptor: int) -> None:
    # os.setns needs Python 3.12.
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
