"""Rate limits and delays with the kernel's queueing disciplines."""

from __future__ import annotations

from network_lab.namespaces import run

_PACKET = 1500
# The duration of an idle port's burst, and of the longest frames: few enough events for the
# user-space switch, and short compared with latencies of interest.
_BURST_SECONDS = 1e-3
# Limits of TCP's segments in bytes.
_LONGEST_SEGMENT, _SHORTEST_SEGMENT = 65536, 4096


def longest_segment(bandwidth: float | None) -> int:
    """Returns the maximal bytes of TCP segments at a bandwidth in bit/s."""
    if bandwidth is None:
        return _LONGEST_SEGMENT
    burst = int(bandwidth / 8 * _BURST_SECONDS)
    return min(max(burst, _SHORTEST_SEGMENT), _LONGEST_SEGMENT)


def limit_rate(namespace: str, device: str, bandwidth: float, queue: int) -> None:
    """Limits the rate at which an interface sends.

    Args:
      namespace: of the interface.
      device: its name.
      bandwidth: in bit/s.
      queue: capacity of the queue in bytes; more is dropped.

    Raises:
      LabError: if the command fails.
    """
    # Twice, because the headers of a segment's packets count, too.
    burst = max(2 * longest_segment(bandwidth), int(bandwidth / 8 * _BURST_SECONDS))
    place = ["dev", device, "root", "handle", "1:"]
    limits = ["rate", f"{round(bandwidth)}bit", "burst", str(burst), "limit", str(queue)]
    run("tc", "-n", namespace, "qdisc", "add", *place, "tbf", *limits)


def delay(namespace: str, device: str, seconds: float, queue: int, limited: bool = False) -> None:
    """Delays the frames that an interface sends.

    Args:
      namespace: of the interface.
      device: its name.
      seconds: the delay.
      queue: capacity of the queue in bytes of full packets; more is dropped.
      limited: whether :func:`limit_rate` was called before; frames are delayed first.

    Raises:
      LabError: if the command fails.
    """
    if not seconds:
        return
    place = ["dev", device, *(["parent", "1:1"] if limited else ["root"])]
    delays = ["delay", f"{round(seconds * 1e6)}us", "limit", str(queue // _PACKET)]
    run("tc", "-n", namespace, "qdisc", "add", *place, "netem", *delays)
