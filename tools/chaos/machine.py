"""What faults happen to: a small disk, the network between workers, and the clock.

The mounts and network namespaces are in a mount namespace of this tool, and end with it.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from network_lab import namespaces

_ENTERED = "IMAGENET_FAST_CHAOS_MOUNTS"
_DISK_MEGABYTES = 8
_NAMES = pathlib.Path("/run/netns")
# The kernel's clock, by which TensorFlow's waits with a deadline end, stays as it is: ahead of it,
# processes would wait for it, and with a clock that is really set they would not.
_CLOCK_SECONDS_BEHIND = 2 * 365 * 86400
_FAKETIME = "/usr/lib/*/faketime/libfaketimeMT.so.1"


def enter_own_mounts() -> bool:
    """Starts this program again in a mount namespace; returns whether it is in one, as root."""
    if os.geteuid() or sys.platform != "linux":
        return False
    if _ENTERED not in os.environ:
        program = [sys.executable, sys.argv[0], *sys.argv[1:]]
        environment = {**os.environ, _ENTERED: "1"}
        os.execvpe("unshare", ["unshare", "--mount", *program], environment)
    _NAMES.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "tmpfs", str(_NAMES))
    return True


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Disk:
    """A disk of 8 MB, in memory.

    Args:
      folder: where it is mounted.
      mounted: whether there is one; otherwise the folder alone.
    """

    def __init__(self, folder: pathlib.Path, mounted: bool) -> None:
        self.folder = folder
        self._filling = folder / "filling"
        self._mounted = mounted
        folder.mkdir()
        if mounted:
            _run("mount", "-t", "tmpfs", "-o", f"size={_DISK_MEGABYTES}m", "tmpfs", str(folder))

    def fill(self) -> None:
        """Leaves no byte on the disk."""
        with self._filling.open("wb", buffering=0) as file:
            for size in (2**16, 2**12, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    def free(self) -> None:
        """Ends :meth:`fill`."""
        self._filling.unlink(missing_ok=True)

    def forbid_writing(self) -> None:
        """Makes the disk read-only for files that are not open yet."""
        for last in (False, False, False, True):
            _run("mount", "--bind", str(self.folder), str(self.folder))
            try:
                _run("mount", "-o", "remount,bind,ro", str(self.folder))
                return
            except subprocess.CalledProcessError:
                # A process opened a file to write between the two.
                self.allow_writing()
                if last:
                    raise

    def allow_writing(self) -> None:
        """Ends :meth:`forbid_writing`."""
        _run("umount", "--lazy", str(self.folder))

    def remove(self) -> None:
        """Removes it and what is on it."""
        if self._mounted:
            _run("umount", "--lazy", str(self.folder))


class Network:
    """Namespaces of workers, and a router between them.

    Args:
      workers: their number.
    """

    def __init__(self, workers: int) -> None:
        prefix = namespaces.own_prefix()
        self.names = [f"{prefix}{worker}" for worker in range(workers)]
        self.hosts = [f"10.77.{worker}.2" for worker in range(workers)]
        self._router = f"{prefix}router"
        namespaces.add(self._router)
        for worker, (name, host) in enumerate(zip(self.names, self.hosts)):
            namespaces.add(name)
            end, gateway = f"port{worker}", f"10.77.{worker}.1"
            link = ["type", "veth", "peer", "name", "eth0", "netns", name]
            namespaces.run("ip", "-n", self._router, "link", "add", end, *link)
            for place, device, address in (
                (self._router, end, gateway),
                (name, "eth0", host),
            ):
                namespaces.run("ip", "-n", place, "address", "add", f"{address}/24", "dev", device)
                namespaces.run("ip", "-n", place, "link", "set", device, "up")
            namespaces.run("ip", "-n", name, "route", "add", "default", "via", gateway)
        self.join()

    def part(self) -> None:
        """Drops all packets between workers, without a word."""
        self._forward("0")

    def join(self) -> None:
        """Ends :meth:`part`."""
        self._forward("1")

    def _forward(self, value: str) -> None:
        with namespaces.entered(self._router):
            pathlib.Path("/proc/sys/net/ipv4/ip_forward").write_text(value)

    def close(self) -> None:
        """Removes the namespaces."""
        namespaces.remove_all(namespaces.own_prefix())


class Clock:
    """The time of day of processes that are started with :attr:`environment`.

    Args:
      folder: for the file that sets it.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._file = folder / "clock"
        self.set(0)
        self.environment = {
            "LD_PRELOAD": self.library(),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    @staticmethod
    def library() -> str:
        """Returns the path of libfaketime; empty: it is not installed."""
        return next(iter(glob.glob(_FAKETIME)), "")  # noqa: PTH207

    def set(self, seconds: int) -> None:
        """Makes the clock wrong by some seconds."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds - _CLOCK_SECONDS_BEHIND:+d}s\n")
        new.replace(self._file)


def missing(is_root: bool, workers: Sequence[int]) -> dict[str, str]:
    """Returns why faults of some kinds cannot be played here, by what they need."""
    reasons = {}
    if not is_root:
        reasons["disk"] = reasons["network"] = "it needs root, on Linux"
    elif max(workers) < 2:
        reasons["network"] = "it needs several workers"
    if not Clock.library():
        reasons["clock"] = "it needs Debian's package libfaketime"
    return reasons
