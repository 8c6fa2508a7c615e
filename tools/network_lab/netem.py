"""The network between the workers, built with the kernel's netem.

An additional namespace, the hub, has a bridge for each group, and a backbone bridge that connects
them. A frame is delayed between its group's bridge and the backbone, and again on its way to a
worker, whose port also limits the receive rate.
"""

from __future__ import annotations

from network_lab import shaping
from network_lab.layout import Layout
from network_lab.namespaces import run


def connect(names: list[str], hub: str, layout: Layout, queue: int) -> None:
    """Creates an ``eth0`` in each worker's namespace and the network between them.

    Args:
      names: the workers' namespaces.
      hub: the namespace of the bridges.
      layout: the latencies and the bandwidth.
      queue: capacity of each port's queue in bytes; more is dropped.

    Raises:
      LabError: if the kernel refuses any of it.
    """
    # The rest of the latency is added at the receiver's port.
    between = max(0.0, layout.latency - layout.group_latency)
    _add_bridge(hub, "backbone")
    for group in range(layout.groups):
        bridge, ends = f"group{group}", (f"out{group}", f"in{group}")
        _add_bridge(hub, bridge)
        run("ip", "-n", hub, "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, master in zip(ends, (bridge, "backbone")):
            run("ip", "-n", hub, "link", "set", end, "master", master, "up")
        shaping.delay(hub, ends[0], between, queue)
    for worker, name in enumerate(names):
        port, master = f"port{worker}", f"group{layout.group(worker)}"
        link = ["type", "veth", "peer", "name", "eth0", "netns", name]
        run("ip", "-n", hub, "link", "add", port, *link)
        run("ip", "-n", hub, "link", "set", port, "master", master, "up")
        if layout.bandwidth is not None:
            for namespace, device in ((name, "eth0"), (hub, port)):
                shaping.limit_rate(namespace, device, layout.bandwidth, queue)
        shaping.delay(hub, port, layout.group_latency, queue, limited=layout.bandwidth is not None)


def _add_bridge(hub: str, bridge: str) -> None:
    run("ip", "-n", hub, "link", "add", bridge, "type", "bridge")
    run("ip", "-n", hub, "link", "set", bridge, "up")
