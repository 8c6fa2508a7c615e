"""A network switch in user space, for kernels without netem.

Each port is a TAP device, the interface ``eth0`` of a worker's namespace. The switch reads a frame
when the worker sends it. The frame waits for earlier frames of its port, for the latency to its
target, and until the target's port has received earlier frames and the frame itself; then it is
written there. Frames of one worker to several targets alternate, as with fair queueing, so that a
short request does not wait for megabytes to another target.

TCP passes on segments of many packets, as to network cards with segmentation offload. They are not
split here: a Python program can handle thousands of segments per second, but not a hundred thousand
packets.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import gc
import heapq
import itertools
import json
import os
import pathlib
import select
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import launch_local

from network_lab import namespaces, priority
from network_lab.errors import LabError
from network_lab.layout import Layout

DEVICE = pathlib.Path("/dev/net/tun")
# From the kernel's linux/if_tun.h.
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 1, 2
# struct virtio_net_hdr before each frame: flags, segment type, header length, payload bytes per
# packet, offset of the TCP header, and the checksum's offset.
_HEADER = struct.Struct("=BBHHHH")
_LARGEST = _HEADER.size + 14 + 65536
# Frames read from a port before the next port.
_BATCH = 16


def start(names: list[str], layout: Layout, queue: int) -> launch_local.Process:
    """Starts a switch with an ``eth0`` in each worker's namespace, and waits until they exist.

    Args:
      names: the workers' namespaces.
      layout: the latencies and the bandwidth.
      queue: queue capacity per worker in bytes, shared by all; more is dropped.

    Raises:
      LabError: if it does not start.
    """
    plan = {"names": names, "layout": dataclasses.asdict(layout), "queue": queue}
    tools = str(pathlib.Path(__file__).resolve().parents[1])
    process = launch_local.Process(
        "switch",
        [sys.executable, "-m", "network_lab.switch", json.dumps(plan)],
        {**os.environ, "PYTHONPATH": tools},
    )
    if not process.process.stdout.readline():
        # The last line of a traceback.
        message = process.process.stderr.read().decode().strip().rpartition("\n")[2]
        raise LabError(f"the user-space switch did not start: {message}")
    return process


def wire_bytes(frame: bytes) -> int:
    """Returns the total bytes of the Ethernet frames that a segment would be split into.

    Args:
      frame: as read from a TAP device, with its header.
    """
    length = len(frame) - _HEADER.size
    _, kind, _, payload, transport, _ = _HEADER.unpack_from(frame)
    if not kind:
        return length
    # TCP gives its header's length in units of four bytes.
    headers = transport + (frame[_HEADER.size + transport + 12] >> 4) * 4
    packets = -(-(length - headers) // payload)
    return length + (packets - 1) * headers


class Switch:
    """Forwards frames between TAP devices with latencies and limited bandwidths.

    Args:
      taps: file descriptors, one for each worker.
      layout: the latencies and the bandwidth.
      queue: queue capacity per worker in bytes, shared by all; more is dropped.
    """

    def __init__(self, taps: list[int], layout: Layout, queue: int) -> None:
        self._taps = taps
        self._layout = layout
        ports = range(layout.workers)
        # Each worker has two links: its port, and the additional one to its own group, if any.
        links = range(2 * layout.workers)
        self._latency = [
            [round(layout.latency_between(one, other) * 1e9) for other in ports] for one in ports
        ]
        self._room = queue * layout.workers
        self._port_of: dict[bytes, int] = {}
        # The queues of each link by target, in the order in which the targets alternate.
        self._waiting: list[dict[int, collections.deque[bytes]]] = [{} for _ in links]
        self._sending = [False for _ in links]
        # When each link will have received all frames that have arrived.
        self._free = [0 for _ in links]
        # (time, sequence number, function, arguments); all times are in nanoseconds.
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def run(self) -> None:
        """Forwards frames endlessly."""
        sources = {tap: port for port, tap in enumerate(self._taps)}
        while True:
            wait = None
            if self._events:
                wait = max(0.0, (self._events[0][0] - time.monotonic_ns()) * 1e-9)
            for tap in select.select(self._taps, (), (), wait)[0]:
                self._read(sources[tap])
            now = time.monotonic_ns()
            while self._events and self._events[0][0] <= now:
                # Relative to the time it was due, so that delays of this process cost no bandwidth.
                when, _, act, arguments = heapq.heappop(self._events)
                act(when, *arguments)

    def _at(self, when: int, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), act, arguments))

    def _read(self, source: int) -> None:
        """Reads the frames that a worker has sent."""
        for _ in range(_BATCH):
            try:
                frame = os.read(self._taps[source], _LARGEST)
            except BlockingIOError:
                return
            now = time.monotonic_ns()
            address, own_address = frame[_HEADER.size :][:6], frame[_HEADER.size + 6 :][:6]
            self._port_of[own_address] = source
            target = self._port_of.get(address)
            # Frames to unknown addresses and broadcasts, such as ARP, go to all ports.
            for port in range(len(self._taps)) if target is None else (target,):
                if port != source and len(frame) <= self._room:
                    self._room -= len(frame)
                    self._accept(now, source, port, frame)

    def _accept(self, now: int, source: int, target: int, frame: bytes) -> None:
        """Queues a frame."""
        if self._layout.bandwidth is None:
            self._at(now + self._latency[source][target], self._write, target, frame)
            return
        link = self._link(source, target)
        self._waiting[link].setdefault(target, collections.deque()).append(frame)
        if not self._sending[link]:
            self._sending[link] = True
            self._at(now, self._send, source, link)

    def _link(self, one: int, other: int) -> int:
        """Returns the number of the link between one worker and another."""
        return one + self._layout.workers * self._layout.has_own_link(one, other)

    def _send(self, when: int, source: int, link: int) -> None:
        """Starts to send a link's next frame, if there is one."""
        waiting = self._waiting[link]
        if not waiting:
            self._sending[link] = False
            return
        target = next(iter(waiting))
        frames = waiting.pop(target)
        frame = frames.popleft()
        if frames:
            waiting[target] = frames  # now the last one
        seconds = wire_bytes(frame) * 8 / self._layout.bandwidth_between(source, target)
        duration = round(seconds * 1e9)
        arrival = when + self._latency[source][target]
        self._at(arrival, self._receive, target, self._link(target, source), duration, frame)
        self._at(when + duration, self._send, source, link)

    def _receive(self, when: int, target: int, link: int, duration: int, frame: bytes) -> None:
        """Starts to receive a frame as soon as the link is free."""
        self._free[link] = max(when, self._free[link]) + duration
        self._at(self._free[link], self._write, target, frame)

    def _write(self, when: int, target: int, frame: bytes) -> None:
        """Delivers a frame."""
        self._room += len(frame)
        # Fails if the interface is not up.
        with contextlib.suppress(OSError):
            os.write(self._taps[target], frame)


def _open_tap(name: str) -> int:
    """Creates ``eth0`` in a namespace; it exists while the returned descriptor is open."""
    with namespaces.entered(name):
        tap = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", flags))
        fcntl.ioctl(tap, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return tap


def _main(plan: str) -> None:
    given = json.loads(plan)
    layout = Layout(**given["layout"])
    # Frames must not wait for cores that the workers use.
    priority.put_first()
    taps = [_open_tap(name) for name in given["names"]]
    print("ready", flush=True)
    # There are no reference cycles, and garbage collections would be pauses.
    gc.disable()
    Switch(taps, layout, given["queue"]).run()


if __name__ == "__main__":
    _main(sys.argv[1])
