"""Builds and removes a lab: namespaces, links and the switch."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator

import launch_local

from network_lab import namespaces, netem, requirements, shaping, switch
from network_lab.layout import Layout

# Bytes, more than the windows of all connections, so that nothing is dropped.
_QUEUE = 64 * 2**20
_SMALLEST_BUFFER, _LARGEST_BUFFER = 2**18, 32 * 2**20
_LATE_SECONDS = 0.1


class Lab:
    """The workers' namespaces and the network between them.

    :meth:`remove` must be called after :meth:`build`, even if that fails.

    Args:
      layout: workers, groups, latencies and bandwidths.
      backend: what delays frames: ``auto``, ``netem`` or ``switch``.
    """

    def __init__(self, layout: Layout, backend: str = "auto") -> None:
        self.layout = layout
        self.backend = backend
        prefix = namespaces.own_prefix()
        self.names = [f"{prefix}{worker}" for worker in range(layout.workers)]
        self._hub = prefix + "hub"
        self._switch: launch_local.Process | None = None
        self._removing = False

    def build(self) -> None:
        """Builds the namespaces and the network.

        Raises:
          LabError: if the machine lacks a requirement.
        """
        self.backend = requirements.choose_backend(self.backend, self.layout)
        for name in self.names:
            namespaces.add(name)
        if self.backend == "netem":
            namespaces.add(self._hub)
            netem.connect(self.names, self._hub, self.layout, _QUEUE)
        else:
            self._switch = switch.start(self.names, self.layout, _QUEUE)
            threading.Thread(target=self._watch, args=(self._switch,), daemon=True).start()
        for worker in range(self.layout.workers):
            self._set_up(worker)

    def _set_up(self, worker: int) -> None:
        """Configures TCP and a worker's interface."""
        name = self.names[worker]
        with namespaces.entered(name):
            for setting, value in _tcp_settings(self.layout).items():
                pathlib.Path("/proc/sys/net/ipv4", setting).write_text(value)
        address = self.layout.interface(worker)
        segment = str(shaping.longest_segment(self.layout.bandwidth))
        namespaces.run("ip", "-n", name, "address", "add", address, "dev", "eth0")
        namespaces.run("ip", "-n", name, "link", "set", "eth0", "gso_max_size", segment, "up")

    def _watch(self, process: launch_local.Process) -> None:
        """Ends this process by SIGTERM if the switch ends, without which workers are isolated."""
        process.process.wait()
        if not self._removing:
            print("[network_lab] the user-space switch has ended", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

    def remove(self) -> None:
        """Kills all processes of the lab and removes it.

        Raises:
          LabError: if that fails.
        """
        with _ignored(namespaces.ENDING_SIGNALS):
            self._removing = True
            if self._switch is not None:
                self._switch.send(signal.SIGKILL)
                self._switch.process.wait()
            namespaces.remove_all(namespaces.own_prefix())


def _tcp_settings(layout: Layout) -> dict[str, str]:
    """Returns the kernel's settings with which TCP uses the network's whole bandwidth."""
    receive = _LARGEST_BUFFER
    if layout.bandwidth is not None:
        # Data in flight during a round trip, and what arrives until a process reads it. Much more
        # would only be queued and delay what follows. Half of the buffer is overhead.
        trip = 2 * max(layout.latency, layout.group_latency)
        window = int(layout.bandwidth / 8 * (trip + _LATE_SECONDS))
        receive = min(max(2 * window, _SMALLEST_BUFFER), _LARGEST_BUFFER)
    return {
        "tcp_rmem": f"4096 {_SMALLEST_BUFFER} {receive}",
        "tcp_wmem": f"4096 {_SMALLEST_BUFFER} {_LARGEST_BUFFER}",
        # No slow start after pauses, such as between training steps.
        "tcp_slow_start_after_idle": "0",
        # In all kernels. Without loss it fills the receiver's window; others react to delays.
        "tcp_congestion_control": "reno",
    }


@contextlib.contextmanager
def _ignored(signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
