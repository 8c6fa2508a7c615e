"""Checks of a machine's requirements for a lab."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
from collections.abc import Sequence

from network_lab import namespaces, switch
from network_lab.errors import LabError
from network_lab.layout import Layout

# Numbers of the bits from the kernel's linux/capability.h.
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
# Commands that need the kernel's features, tried in a temporary namespace.
_NETEM = (
    "ip -n {} link add type bridge",
    "ip -n {} link add type veth",
    "tc -n {} qdisc replace dev lo root netem delay 1ms",
    "tc -n {} qdisc replace dev lo root tbf rate 1gbit burst 100kb limit 100kb",
)


def check() -> None:
    """Checks what every lab needs, without creating anything.

    Raises:
      LabError: if a requirement is missing; the message lists all of them.
    """
    if sys.platform != "linux":
        raise LabError("a lab needs Linux network namespaces, and this is not Linux")
    missing = []
    if os.geteuid():
        missing.append("root: run it with sudo, or as root in a container")
    else:
        held = _capabilities()
        lacking = [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]
        if lacking:
            missing.append(f"{' and '.join(lacking)}: start the container with --privileged")
    missing += [
        f"the command {command}: install Debian's package iproute2, and have /usr/sbin in PATH"
        for command in ("ip", "tc")
        if not shutil.which(command)
    ]
    if missing:
        raise LabError("\n  ".join(["requirements of network_lab are missing:", *missing]))


def _capabilities() -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))


def choose_backend(wanted: str, layout: Layout) -> str:
    """Returns what delays frames: ``netem`` or ``switch``.

    Creates a temporary namespace to test the kernel.

    Args:
      wanted: one of the two; ``auto``: netem if the kernel has it and the layout allows it.
      layout: of the lab; only the switch supports ``group_bandwidth``.

    Raises:
      LabError: if the kernel lacks a requirement, or netem does not support the layout.
    """
    has_own_links = layout.group_bandwidth is not None
    if wanted == "netem" and has_own_links:
        raise LabError("only the switch supports group_bandwidth: leave out --backend=netem")
    name = namespaces.own_prefix() + "probe"
    try:
        namespaces.add(name)
        refusal = _refusal(name, _NETEM)
    finally:
        namespaces.remove_all(namespaces.own_prefix())
    if wanted == "netem" and refusal:
        raise LabError(
            "the kernel lacks netem: load it with `modprobe -a sch_netem sch_tbf bridge veth` "
            f"(Debian's linux-image-amd64 has it), or use the switch ({refusal})"
        )
    if wanted != "switch" and not has_own_links and not refusal:
        return "netem"
    try:
        os.close(os.open(switch.DEVICE, os.O_RDWR))
    except OSError as error:
        raise LabError(
            f"the user-space switch needs {switch.DEVICE} ({error.strerror}): load the kernel's "
            f"module with `modprobe tun`, or start the container with --device={switch.DEVICE}"
        ) from None
    return "switch"


def _refusal(name: str, commands: Sequence[str]) -> str:
    """Returns the error of the first command that fails in a namespace, or ``""``."""
    for command in commands:
        try:
            namespaces.run(*command.format(name).split())
        except LabError as error:
            return str(error)
    return ""
