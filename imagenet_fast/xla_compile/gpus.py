"""GPUs to compile for: their kinds, how many there are, and the memory that a step can have."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping

from imagenet_fast.base.errors import UserError

# Text of GpuTargetConfigProto, a file for each kind.
_TARGETS = pathlib.Path(__file__).parent / "gpu_targets"
_MOST_OF_A_HOST = 8
_MIB = 2**20
# What TensorFlow leaves free on a GPU for CUDA's and cuDNN's own use, by the first number of the
# compute capability (MinSystemMemory of tensorflow/core/common_runtime/gpu/gpu_device.cc).
_LEFT_FREE = {6: 500 * _MIB, 7: 1050 * _MIB, 8: 1536 * _MIB}
_LEFT_FREE_BY_NEWER = 1800 * _MIB
# The CUDA context: on an L4 of 22,518 MiB TensorFlow reports 20,795 MB, 187 less than it leaves.
_CONTEXT = 256 * _MIB
# Ours, for the workspaces of cuDNN's and cuBLAS' algorithms, which are chosen on the GPU.
_WORKSPACES = 1024 * _MIB


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
      name: as ``--topology`` takes it.
      title: as its driver names it.
      memory: bytes that it has.
      capability: CUDA's compute capability.
      target: all of it, as XLA's compiler takes it.
    """

    name: str
    title: str
    memory: int
    capability: tuple[int, int]
    target: str

    @property
    def margin(self) -> int:
        """Bytes kept for TensorFlow's reserve, CUDA's context and workspaces."""
        return _LEFT_FREE.get(self.capability[0], _LEFT_FREE_BY_NEWER) + _CONTEXT + _WORKSPACES


@functools.cache
def gpus() -> Mapping[str, Gpu]:
    """Returns the kinds that there are, by name, from the oldest to the newest."""
    found = [_read(path) for path in _TARGETS.glob("*.txtpb")]
    found.sort(key=lambda own: (own.capability, own.memory))
    return {own.name: own for own in found}


@dataclasses.dataclass(frozen=True)
class GpuTopology:
    """Hosts with GPUs.

    Attributes:
      gpu: the kind.
      hosts: how many.
      gpus: of each host.
    """

    gpu: Gpu
    hosts: int
    gpus: int

    platform = "GPU"

    @property
    def name(self) -> str:
        """As ``--topology`` has it, ``h100:4x8``."""
        return f"{self.gpu.name}:{self.hosts}x{self.gpus}"

    @property
    def kind(self) -> str:
        """Of the devices."""
        return self.gpu.title

    @property
    def coordinates(self) -> tuple[tuple[int, int], ...]:
        """The place of each replica, as (GPU of its host, host); rows are hosts."""
        return tuple((gpu, host) for host in range(self.hosts) for gpu in range(self.gpus))

    @property
    def chips(self) -> int:
        """How many GPUs there are."""
        return self.hosts * self.gpus

    @property
    def memory(self) -> int:
        """Bytes of each GPU."""
        return self.gpu.memory

    @property
    def usable(self) -> int:
        """Bytes of each GPU that a step can have."""
        return self.gpu.memory - self.gpu.margin

    def __str__(self) -> str:
        hosts = f"{self.hosts:,} hosts of {self.gpus}" if self.hosts > 1 else f"{self.gpus}"
        return f"{self.chips:,} replica{'s' * (self.chips != 1)}, {hosts} {self.kind}"


def gpu_topology(name: str) -> GpuTopology | None:
    """Returns the topology of this name; None if it is not a GPU's.

    Raises:
      UserError: if it is a GPU's, but there is none with so many hosts or GPUs.
    """
    kind, _, size = name.partition(":")
    if kind not in gpus():
        return None
    found = re.fullmatch(r"(\d+)x(\d+)", size)
    hosts, each = map(int, found.groups()) if found else (0, 0)
    if hosts < 1 or not 1 <= each <= _MOST_OF_A_HOST:
        raise UserError(
            f"there is no topology {name!r}: after {kind}: say how many hosts there are and how "
            f"many GPUs, 1 to {_MOST_OF_A_HOST}, each has, as {kind}:1x8 or {kind}:4x8"
        )
    return GpuTopology(gpus()[kind], hosts, each)


def no_topology(name: str, reason: str, tpus: str) -> UserError:
    """Returns the error for a topology that is neither a GPU's nor a TPU's.

    Args:
      name: of the topology.
      reason: what the compiler for TPUs says.
      tpus: examples of those of TPUs.
    """
    return UserError(
        f"there is no topology {name!r} ({reason}); choose hosts and their GPUs, as h100:1x8 or "
        f"h100:4x8, of {', '.join(gpus())}, or a TPU's, like {tpus}"
    )


def _read(path: pathlib.Path) -> Gpu:
    text = path.read_text()

    def value(pattern: str) -> str:
        return re.findall(pattern, text)[0]

    return Gpu(
        path.stem,
        value(r'device_description_str: "(.*)"'),
        int(value(r"device_memory_size: (\d+)")),
        (
            int(value(r"capability {\s*major: (\d+)")),
            int(value(r"capability {\s*major: \d+\s*minor: (\d+)")),
        ),
        text,
    )
