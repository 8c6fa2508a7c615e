"""What a lab looks like: its workers, their groups, and how fast and far apart they are."""

from __future__ import annotations

import dataclasses
import re

from network_lab.errors import LabError

# Workers of a group share the third number of their addresses.
_NETWORK = "10.77"
_MOST = 250
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_latency(text: str) -> float:
    """Reads ``40ms``, ``500us``, ``0.1s`` or ``0``; returns seconds.

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
    """Reads ``200mbit``, ``1.5gbit`` or ``64kbit`` (powers of ten); returns bits a second.

    Raises:
      LabError: if ``text`` is anything else, or zero.
    """
    match = _BANDWIDTH.fullmatch(text.strip().lower())
    if not match:
        raise LabError(
            f"{text!r} is not a bandwidth: write a number and kbit, mbit or gbit (a second), as in "
            "200mbit"
        )
    bandwidth = float(match[1]) * _BITS[match[2]]
    if not bandwidth:
        raise LabError(f"a bandwidth of {text} lets nothing through: leave it out to have no limit")
    return bandwidth


@dataclasses.dataclass(frozen=True)
class Layout:
    """Workers in groups of equal size: 0, 1, 2 are the first of two groups of three.

    Attributes:
      workers: how many there are.
      groups: into how many groups they are divided.
      latency: seconds that a frame takes from a worker to one of another group.
      group_latency: seconds that it takes to one of the same group.
      bandwidth: bits a second that each worker can send, and as many that it can receive at the
        same time, counted in Ethernet frames without preamble and checksum; None: no limit.
      group_bandwidth: the same to and from its own group, on links besides, as within a machine of
        several GPUs; None: what is within a group shares ``bandwidth``.

    Raises:
      LabError: if there is no such lab.
    """

    workers: int
    groups: int = 1
    latency: float = 0.0
    group_latency: float = 0.0
    bandwidth: float | None = None
    group_bandwidth: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= _MOST:
            raise LabError(f"a lab has 1 to {_MOST} workers, not {self.workers}")
        if self.groups < 1 or self.workers % self.groups:
            raise LabError(
                f"{self.workers} workers cannot be divided into {self.groups} groups of equal size"
            )
        if self.latency and self.groups == 1:
            raise LabError(
                "latency is that between groups, and there is only one: ask for more groups, or "
                "for group_latency"
            )
        if self.groups > 1 and self.group_latency > self.latency:
            raise LabError(
                f"the latency within a group ({self.group_latency * 1e3:g} ms) cannot be greater "
                f"than that between groups ({self.latency * 1e3:g} ms)"
            )
        if self.group_bandwidth is not None and (self.bandwidth is None or self.groups == 1):
            raise LabError(
                "group_bandwidth is that of links within groups, besides those between groups: ask "
                "for more than one group, and for a bandwidth between them"
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
        """Returns the address with the length of the network's, which all workers share."""
        return f"{self.address(worker)}/16"

    def latency_between(self, one: int, other: int) -> float:
        """Returns the seconds that a frame takes from one worker to another."""
        return self.group_latency if self.group(one) == self.group(other) else self.latency

    def has_own_link(self, one: int, other: int) -> bool:
        """Returns whether what goes between two workers is no load for those of other groups."""
        return self.group_bandwidth is not None and self.group(one) == self.group(other)

    def bandwidth_between(self, one: int, other: int) -> float | None:
        """Returns the bits a second that one worker can send to another; None: no limit."""
        return self.group_bandwidth if self.has_own_link(one, other) else self.bandwidth
