"""Rates and delays by the kernel's queueing disciplines."""

from __future__ import annotations

from network_lab.namespaces import run

_PACKET = 1500
# A port that is idle may send this much at once, and frames are no longer: few enough events for
# the user-space switch, and short beside the latencies of interest.
_BURST_SECONDS = 1e-3
# What TCP hands over at most, and the least that it is asked to.
_LONGEST_SEGMENT, _SHORTEST_SEGMENT = 65536, 4096


def longest_segment(bandwidth: float | None) -> int:
    """Returns the bytes that TCP should hand over at once at most, at so many bits a second."""
    if bandwidth is None:
        return _LONGEST_SEGMENT
    burst = int(bandwidth / 8 * _BURST_SECONDS)
    return min(max(burst, _SHORTEST_SEGMENT), _LONGEST_SEGMENT)


def limit_rate(namespace: str, device: str, bandwidth: float, queue: int) -> None:
    """Limits the rate at which an interface sends.

    Args:
      namespace: where it is.
      device: its name.
      bandwidth: bits a second.
      queue: bytes that wait at most; more are lost.

    Raises:
      LabError: if the kernel refuses.
    """
    # Twice, since the headers that each packet of a segment will have count, too.
    burst = max(2 * longest_segment(bandwidth), int(bandwidth / 8 * _BURST_SECONDS))
    place = ["dev", device, "root", "handle", "1:"]
    limits = ["rate", f"{round(bandwidth)}bit", "burst", str(burst), "limit", str(queue)]
    run("tc", "-n", namespace, "qdisc", "add", *place, "tbf", *limits)


def delay(namespace: str, device: str, seconds: float, queue: int, limited: bool = False) -> None:
    """Delays what an interface sends.

    Args:
      namespace: where it is.
      device: its name.
      seconds: for how long.
      queue: bytes that wait at most, in packets of full length; more are lost.
      limited: whether :func:`limit_rate` was called before; frames are delayed first.

    Raises:
      LabError: if the kernel refuses.
    """
    if not seconds:
        return
    place = ["dev", device, *(["parent", "1:1"] if limited else ["root"])]
    delays = ["delay", f"{round(seconds * 1e6)}us", "limit", str(queue // _PACKET)]
    run("tc", "-n", namespace, "qdisc", "add", *place, "netem", *delays)
