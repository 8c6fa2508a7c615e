"""What a lab's network really does, beside what was asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import statistics
import struct
import time

from network_lab import namespaces, priority
from network_lab.errors import LabError
from network_lab.lab import Lab

_PORT = 2223
_ROUND_TRIPS = 20
_PATIENCE = 10.0  # Seconds until silence is an error.
# TCP begins slowly: it gets this many round trips and seconds before a transfer is timed.
_START_ROUND_TRIPS, _START_SECONDS = 12, 0.3
_TIMED_SECONDS = 1.0
_CHUNK = 2**20
_NAP = 1e-3
# The end of the first part of the kernel's struct tcp_info: tcpi_bytes_received.
_BYTES_RECEIVED = struct.Struct("=128xQ")
# Of a frame of 1514 bytes, TCP carries 1448: the headers are those of Ethernet, IP and TCP with
# time stamps.
_PAYLOAD_SHARE = 1448 / 1514


@dataclasses.dataclass
class Measurement:
    """One line of the table.

    Attributes:
      what: between whom.
      latency_asked: one way, in seconds; None where none was measured.
      latency: half of the median round trip, in seconds; None where none was measured.
      rate_asked: bits a second of TCP payload that the bandwidth asked for allows; None: no limit.
      rates: those measured at the same time.
    """

    what: str
    latency_asked: float | None
    latency: float | None
    rate_asked: float | None
    rates: list[float]


def measure(lab: Lab) -> list[Measurement]:
    """Measures between two workers of a group, two of different groups, and all at once.

    Each measurement is left out where there are no such workers.

    Raises:
      LabError: if workers cannot reach each other.
    """
    # What is measured is the network, and not how busy the machine is.
    priority.put_first()
    layout = lab.layout
    pairs = []
    if layout.group_size > 1:
        pairs.append(("within a group", 0, 1))
    if layout.groups > 1:
        pairs.append(("between groups", 0, layout.group_size))
    found = []
    for name, one, other in pairs:
        round_trip = _round_trip(lab, one, other)
        rate, rates = _payload_rate(lab, one, other), _rates(lab, [(one, other)])
        asked = layout.latency_between(one, other)
        what = f"{name}, {one} and {other}"
        found.append(Measurement(what, asked, round_trip / 2, rate, rates))
    if pairs:
        # To the next group, if there is one.
        step = layout.group_size % layout.workers or 1
        ring = [(one, (one + step) % layout.workers) for one in range(layout.workers)]
        rate = _payload_rate(lab, *ring[0])
        found.append(Measurement("all ports at once", None, None, rate, _rates(lab, ring)))
    return found


def _payload_rate(lab: Lab, one: int, other: int) -> float | None:
    """Returns the bits a second of TCP payload that one worker may send to another."""
    bandwidth = lab.layout.bandwidth_between(one, other)
    return None if bandwidth is None else bandwidth * _PAYLOAD_SHARE


def _socket(lab: Lab, worker: int, kind: socket.SocketKind) -> socket.socket:
    """Returns a socket in a worker's namespace."""
    with namespaces.entered(lab.names[worker]):
        made = socket.socket(socket.AF_INET, kind)
    made.settimeout(_PATIENCE)
    return made


def _round_trip(lab: Lab, one: int, other: int) -> float:
    """Returns the median time of a small datagram there and back, in seconds."""
    with contextlib.ExitStack() as sockets:
        near, far = (
            sockets.enter_context(_socket(lab, worker, socket.SOCK_DGRAM))
            for worker in (one, other)
        )
        far.bind((lab.layout.address(other), _PORT))
        near.connect((lab.layout.address(other), _PORT))
        times = []
        # The first asks for the other's hardware address before.
        for _ in range(_ROUND_TRIPS + 1):
            start = time.perf_counter()
            try:
                near.send(b"there")
                _, sender = far.recvfrom(64)
                far.sendto(b"back", sender)
                near.recv(64)
            except socket.timeout:
                raise LabError(f"workers {one} and {other} cannot reach each other") from None
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _rates(lab: Lab, pairs: list[tuple[int, int]]) -> list[float]:
    """Returns the bits a second from the first to the second of each pair, all at the same time."""
    with contextlib.ExitStack() as sockets:
        ends = [_connect(lab, *pair) for pair in pairs]
        for end in itertools.chain(*ends):
            sockets.enter_context(end)
        trip = 2 * max(lab.layout.latency, lab.layout.group_latency)
        _transfer(ends, _START_SECONDS + _START_ROUND_TRIPS * trip)
        before = [_arrived(receiver) for _, receiver in ends]
        _transfer(ends, _TIMED_SECONDS)
        after = [_arrived(receiver) for _, receiver in ends]
    return [
        (bits - old_bits) / (seconds - old_seconds)
        for (old_seconds, old_bits), (seconds, bits) in zip(before, after)
    ]


def _transfer(ends: list[tuple[socket.socket, socket.socket]], seconds: float) -> None:
    """Keeps all senders full, and all receivers empty, for so long."""
    chunk = bytearray(_CHUNK)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for sender, receiver in ends:
            with contextlib.suppress(BlockingIOError):
                sender.send(chunk)
            with contextlib.suppress(BlockingIOError):
                receiver.recv_into(chunk)
        # The kernel's own threads, which have part in what is measured, need a core, too.
        time.sleep(_NAP)


def _arrived(receiver: socket.socket) -> tuple[float, int]:
    """Returns the time in seconds, and the bits that have arrived, whether or not read."""
    # The kernel's own count, which is right even where this process had to wait for a core.
    report = receiver.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
    return time.monotonic(), _BYTES_RECEIVED.unpack(report)[0] * 8


def _connect(lab: Lab, source: int, target: int) -> tuple[socket.socket, socket.socket]:
    """Returns the two ends of a connection."""
    address = (lab.layout.address(target), _PORT)
    sender = _socket(lab, source, socket.SOCK_STREAM)
    with _socket(lab, target, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        try:
            sender.connect(address)
            receiver, _ = listener.accept()
        except OSError as error:
            sender.close()
            raise LabError(f"worker {source} cannot reach worker {target}: {error}") from None
    for end in (sender, receiver):
        end.setblocking(False)
        # What has not been sent when it is closed is dropped, and not in the next one's way.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return sender, receiver


def table(measurements: list[Measurement]) -> str:
    """Returns the measurements as text."""
    rows = [("", "latency asked", "measured", "payload asked", "measured")]
    for one in measurements:
        asked = None if one.rate_asked is None else [one.rate_asked]
        latencies = (_milliseconds(one.latency_asked), _milliseconds(one.latency))
        rows.append((one.what, *latencies, _megabits(asked), _megabits(one.rates)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _megabits(rates: list[float] | None) -> str:
    if rates is None:
        return "no limit"
    ends = dict.fromkeys(f"{rate / 1e6:.1f}" for rate in (min(rates), max(rates)))
    return f"{' to '.join(ends)} Mbit/s"
