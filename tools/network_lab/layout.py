"""The layout of a lab: workers, groups, latencies and bandwidths."""

from __future__ import annotations

import dataclasses
import re

from network_lab.errors import LabError

# The third number of an address is the group's.
_NETWORK = "10.77"
_MAX_WORKERS = 250
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_latency(text: str) -> float:
    """Parses ``40ms``, ``500us``, ``0.1s`` or ``0`` into seconds.

    Raises:
      LabError: if ``text`` is anything else.
    """
    match = _LATENCY.fullmatch(text.strip().lower())
    if match:
        return float(match[1]) * _SECONDS[match[2]]
    if text.strip() == "0":
        return 0.0
    raise LabError(f"{text!r} is not a latency: write a number and us, ms or s, as in 40ms")


def parse_bandwidth(text: str) -> float:
    """Parses ``200mbit``, ``1.5gbit`` or ``64kbit`` (powers of ten) into bit/s.

    Raises:
      LabError: if ``text`` is anything else, or zero.
    """
    match = _BANDWIDTH.fullmatch(text.strip().lower())
    if not match:
        raise LabError(
            f"{text!r} is not a bandwidth: write a number and kbit, mbit or gbit (per second), as "
            "in 200mbit"
        )
    bandwidth = float(match[1]) * _BITS[match[2]]
    if not bandwidth:
        raise LabError(f"the bandwidth is {text}, but must be positive: leave it out for no limit")
    return bandwidth


@dataclasses.dataclass(frozen=True)
class Layout:
    """Workers in groups of equal size: 0, 1, 2 are the first of two groups of three.

    Attributes:
      workers: their number.
      groups: their number.
      latency: seconds that a frame takes to a worker of another group.
      group_latency: seconds that a frame takes to a worker of the same group.
      bandwidth: bit/s that each worker can send while it receives at the same speed, in Ethernet
        frames without preamble and checksum; None: no limit.
      group_bandwidth: bit/s of an additional link to the worker's own group, as within a machine
        with several GPUs; None: traffic within a group shares ``bandwidth``.

    Raises:
      LabError: if the numbers contradict each other.
    """

    workers: int
    groups: int = 1
    latency: float = 0.0
    group_latency: float = 0.0
    bandwidth: float | None = None
    group_bandwidth: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= _MAX_WORKERS:
            raise LabError(f"a lab has 1 to {_MAX_WORKERS} workers, not {self.workers}")
        if self.groups < 1 or self.workers % self.groups:
            raise LabError(
                f"{self.workers} workers cannot be divided into {self.groups} groups of equal size"
            )
        if self.latency and self.groups == 1:
            raise LabError(
                "latency is between groups, and there is only one: use more groups, or "
                "group_latency"
            )
        if self.groups > 1 and self.group_latency > self.latency:
            raise LabError(
                f"the latency within a group ({self.group_latency * 1e3:g} ms) cannot be greater "
                f"than that between groups ({self.latency * 1e3:g} ms)"
            )
        if self.group_bandwidth is not None and (self.bandwidth is None or self.groups == 1):
            raise LabError(
                "group_bandwidth is for additional links within groups: use more than one group, "
                "and a bandwidth between them"
            )

    @property
    def group_size(self) -> int:
        """Workers in a group."""
        return self.workers // self.groups

    def group(self, worker: int) -> int:
        """Returns the number of a worker's group."""
        return worker // self.group_size

    def address(self, worker: int) -> str:
        """Returns a worker's IPv4 address."""
        return f"{_NETWORK}.{self.group(worker)}.{worker % self.group_size + 1}"

    def interface(self, worker: int) -> str:
        """Returns the address with the prefix length of the network that all workers share."""
        return f"{self.address(worker)}/16"

    def latency_between(self, one: int, other: int) -> float:
        """Returns the seconds that a frame takes from one worker to another."""
        return self.group_latency if self.group(one) == self.group(other) else self.latency

    def has_own_link(self, one: int, other: int) -> bool:
        """Returns whether two workers are connected by their group's additional links."""
        return self.group_bandwidth is not None and self.group(one) == self.group(other)

    def bandwidth_between(self, one: int, other: int) -> float | None:
        """Returns the bit/s that one worker can send to another; None: no limit."""
        return self.group_bandwidth if self.has_own_link(one, other) else self.bandwidth
