"""Measures a lab's latencies and bandwidths, and compares them with those requested."""

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
_TIMEOUT_SECONDS = 10.0
# Round trips and seconds of TCP's slow start, before a transfer is timed.
_START_ROUND_TRIPS, _START_SECONDS = 12, 0.3
_TIMED_SECONDS = 1.0
_CHUNK = 2**20
_NAP = 1e-3
# tcpi_bytes_received in the kernel's struct tcp_info.
_BYTES_RECEIVED = struct.Struct("=128xQ")
# A frame of 1514 bytes has 66 bytes of headers: Ethernet, IP, and TCP with time stamps.
_PAYLOAD_FRACTION = 1448 / 1514


@dataclasses.dataclass
class Measurement:
    """One row of the table.

    Attributes:
      name: describes the workers.
      latency_asked: requested, one way, in seconds; None if not measured.
      latency: half of the median round trip, in seconds; None if not measured.
      rate_asked: TCP payload in bit/s that the requested bandwidth allows; None: no limit.
      rates: measured simultaneously, in bit/s.
    """

    name: str
    latency_asked: float | None
    latency: float | None
    rate_asked: float | None
    rates: list[float]


def measure(lab: Lab) -> list[Measurement]:
    """Measures two workers of a group, two of different groups, and all at once.

    Measurements without such workers are skipped.

    Raises:
      LabError: if workers cannot reach each other.
    """
    # So that a busy machine does not affect the measurement.
    priority.put_first()
    layout = lab.layout
    pairs = []
    if layout.group_size > 1:
        pairs.append(("within a group", 0, 1))
    if layout.groups > 1:
        pairs.append(("between groups", 0, layout.group_size))
    measurements = []
    for kind, one, other in pairs:
        round_trip = _round_trip(lab, one, other)
        rate, rates = _payload_rate(lab, one, other), _rates(lab, [(one, other)])
        asked = layout.latency_between(one, other)
        name = f"{kind}, {one} and {other}"
        measurements.append(Measurement(name, asked, round_trip / 2, rate, rates))
    if pairs:
        # To the next group, if there is one.
        step = layout.group_size % layout.workers or 1
        ring = [(one, (one + step) % layout.workers) for one in range(layout.workers)]
        rate = _payload_rate(lab, *ring[0])
        measurements.append(Measurement("all ports at once", None, None, rate, _rates(lab, ring)))
    return measurements


def _payload_rate(lab: Lab, one: int, other: int) -> float | None:
    """Returns the TCP payload that one worker can send to another, in bit/s."""
    bandwidth = lab.layout.bandwidth_between(one, other)
    return None if bandwidth is None else bandwidth * _PAYLOAD_FRACTION


def _socket(lab: Lab, worker: int, kind: socket.SocketKind) -> socket.socket:
    """Returns a socket in a worker's namespace."""
    with namespaces.entered(lab.names[worker]):
        made = socket.socket(socket.AF_INET, kind)
    made.settimeout(_TIMEOUT_SECONDS)
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
        # The first one includes ARP.
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
    """Returns the simultaneous rates from the first to the second of each pair, in bit/s."""
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
    """Keeps all senders' buffers full and all receivers' empty for ``seconds``."""
    chunk = bytearray(_CHUNK)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for sender, receiver in ends:
            with contextlib.suppress(BlockingIOError):
                sender.send(chunk)
            with contextlib.suppress(BlockingIOError):
                receiver.recv_into(chunk)
        # The kernel's network threads need a core, too.
        time.sleep(_NAP)


def _arrived(receiver: socket.socket) -> tuple[float, int]:
    """Returns the time in seconds, and the bits that have arrived, read or not."""
    # The kernel's counter is correct even if this process had to wait for a core.
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
        # Unsent data is dropped on close, so that it does not disturb the next transfer.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return sender, receiver


def table(measurements: list[Measurement]) -> str:
    """Returns the measurements as text."""
    rows = [("", "latency requested", "measured", "payload requested", "measured")]
    for one in measurements:
        requested = None if one.rate_asked is None else [one.rate_asked]
        latencies = (_milliseconds(one.latency_asked), _milliseconds(one.latency))
        rows.append((one.name, *latencies, _megabits(requested), _megabits(one.rates)))
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
