"""A lab from the first namespace to the last trace of it."""

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

# More than the windows of all connections: loss would blur what the rates and latencies do.
_QUEUE = 64 * 2**20
_SMALLEST_BUFFER, _LARGEST_BUFFER = 2**18, 32 * 2**20
_LATE_SECONDS = 0.1


class Lab:
    """The workers' namespaces and the network between them.

    Nothing exists before :meth:`build`, and nothing after :meth:`remove`, which must be called
    however the former ends.

    Args:
      layout: what it looks like.
      backend: ``auto``, ``netem`` or ``switch``: what delays frames.
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
        """Makes everything.

        Raises:
          LabError: if the machine lacks something for that.
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
        """Gives a worker's interface its address."""
        name = self.names[worker]
        with namespaces.entered(name):
            for setting, value in _tcp_settings(self.layout).items():
                pathlib.Path("/proc/sys/net/ipv4", setting).write_text(value)
        address = self.layout.interface(worker)
        segment = str(shaping.longest_segment(self.layout.bandwidth))
        namespaces.run("ip", "-n", name, "address", "add", address, "dev", "eth0")
        namespaces.run("ip", "-n", name, "link", "set", "eth0", "gso_max_size", segment, "up")

    def _watch(self, process: launch_local.Process) -> None:
        """Ends this process as SIGTERM does if the switch ends: no worker hears another then."""
        process.process.wait()
        if not self._removing:
            print("[network_lab] the user-space switch has ended", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

    def remove(self) -> None:
        """Ends everything that still runs in it, and removes it.

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
    """Returns the kernel's settings for hosts that are to use such a network well."""
    receive = _LARGEST_BUFFER
    if layout.bandwidth is not None:
        # What is under way in a round trip, and what comes until a process is there to read it.
        # Much more would only wait somewhere, and let what follows wait. Half of it is overhead.
        trip = 2 * max(layout.latency, layout.group_latency)
        window = int(layout.bandwidth / 8 * (trip + _LATE_SECONDS))
        receive = min(max(2 * window, _SMALLEST_BUFFER), _LARGEST_BUFFER)
    return {
        "tcp_rmem": f"4096 {_SMALLEST_BUFFER} {receive}",
        "tcp_wmem": f"4096 {_SMALLEST_BUFFER} {_LARGEST_BUFFER}",
        # No slow start again after each pause, as between the steps of a training.
        "tcp_slow_start_after_idle": "0",
        # All kernels have it. Where nothing is lost it fills the receiver's window, while others go
        # by the delays that they see.
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
