"""Bubbles and memory of published pipeline schedules, beside which a plan sets its own."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from imagenet_fast.pipeline_parallel.simulation import Interval, Order, Simulation


def ideal_bubble(devices: int, micro_batches: int, stages_per_device: int = 1) -> float:
    """Returns the bubble of equal stages without recomputation, a fraction of the devices' time.

    That of Huang et al. 2018; with several stages on each device, interleaved, that of Narayanan et
    al. 2021, if the number of micro-batches is a multiple of that of devices.
    """
    return (devices - 1) / (stages_per_device * micro_batches + devices - 1)


def simulate_zero_bubble(
    devices: int, micro_batches: int, weight_gradients: float = 1.0
) -> Simulation:
    """Simulates ZB-H1 (Qi et al. 2023) with equal stages, one on each device.

    The gradients of weights, which no other stage waits for, fill what would be idle time. Forward
    and backward passes alternate as in 1F1B; after each backward pass, device k computes weight
    gradients only if more than k micro-batches wait for theirs. So each device stores at most as
    many micro-batches as the first stage of 1F1B. The forward pass and the backward pass without
    ``weight_gradients`` take 1 s each. If these take no longer, and there are at least as many
    micro-batches as devices, the idle time of a device is the paper's: ``(devices - 1) (2 -
    weight_gradients)``.
    """
    seconds = {"forward": 1.0, "backward": 1.0, "weights": weight_gradients}
    rows = [
        collections.deque(_zero_bubble_row(devices - stage, stage, micro_batches))
        for stage in range(devices)
    ]
    ended: dict[tuple[int, int, str], float] = {}
    free = [0.0] * devices
    intervals: list[Interval] = []
    while any(rows):
        for stage, row in enumerate(rows):
            while row:
                number, kind = row[0]
                source = (stage + {"forward": -1, "backward": 1, "weights": 0}[kind], number, kind)
                waits = kind != "weights" and 0 <= source[0] < devices
                if waits and source not in ended:
                    break
                row.popleft()
                begin = max(free[stage], ended[source]) if waits else free[stage]
                free[stage] = ended[stage, number, kind] = begin + seconds[kind]
                intervals.append(Interval(stage, number, kind, begin, free[stage]))
    return Simulation(devices, intervals)


def _zero_bubble_row(ahead: int, delay: int, micro_batches: int) -> Iterator[tuple[int, str]]:
    """Yields the micro-batch and the kind of each task of one device, in order.

    At most ``ahead`` forward passes are before the first backward pass. While forward passes are
    left, ``delay`` micro-batches wait for their weight gradients.
    """
    ahead = min(ahead, micro_batches)
    yield from ((number, "forward") for number in range(ahead))
    for number in range(micro_batches):
        yield number, "backward"
        if number >= delay:
            yield number - delay, "weights"
        if ahead + number < micro_batches:
            yield ahead + number, "forward"
    yield from (
        (number, "weights") for number in range(max(0, micro_batches - delay), micro_batches)
    )


def stored_micro_batches(order: Order, devices: int) -> list[float]:
    """Returns the largest number of micro-batches whose activations each device stores at a time.

    Without recomputation; one of several stages on a device counts as a fraction.

    Stage k is on device k % ``devices``.
    """
    each = (1 + max(stage for stage, _, _ in order)) // devices
    now, most = [0] * devices, [0] * devices
    for stage, _, is_backward in order:
        device = stage % devices
        now[device] += -1 if is_backward else 1
        most[device] = max(most[device], now[device])
    return [count / each for count in most]
