"""The GPUs to compile for, and the memory that is available to a training step on them."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping

from imagenet_fast.base.errors import UserError

# A GpuTargetConfigProto as text for each kind.
_TARGETS = pathlib.Path(__file__).parent / "gpu_targets"
_MAX_PER_HOST = 8
_TPUS = "v2:2x2, v3:4x4, v4:2x2x1, v5e:4x4, v5p:2x2x1 or v6e:4x4"
_MIB = 2**20
# Bytes that TensorFlow leaves free for CUDA and cuDNN, by the major compute capability
# (MinSystemMemory of tensorflow/core/common_runtime/gpu/gpu_device.cc).
_LEFT_FREE = {6: 500 * _MIB, 7: 1050 * _MIB, 8: 1536 * _MIB}
_LEFT_FREE_BY_NEWER = 1800 * _MIB
# The CUDA context: on an L4 with 22,518 MiB TensorFlow reports 20,795 MB, 187 less than expected.
_CONTEXT = 256 * _MIB
# Our assumption for cuDNN's and cuBLAS' workspaces, whose algorithms are chosen on the GPU.
_WORKSPACES = 1024 * _MIB


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
      name: in ``--topology``.
      title: the driver's name.
      memory: in bytes.
      capability: CUDA's compute capability.
      target: all properties as text of a ``GpuTargetConfigProto``.
    """

    name: str
    title: str
    memory: int
    capability: tuple[int, int]
    target: str

    @property
    def margin(self) -> int:
        """Bytes for TensorFlow's reserve, the CUDA context and workspaces."""
        return _LEFT_FREE.get(self.capability[0], _LEFT_FREE_BY_NEWER) + _CONTEXT + _WORKSPACES


@functools.cache
def gpus() -> Mapping[str, Gpu]:
    """Returns all kinds by name, from the oldest to the newest."""
    found = [_read(path) for path in _TARGETS.glob("*.txtpb")]
    found.sort(key=lambda gpu: (gpu.capability, gpu.memory))
    return {gpu.name: gpu for gpu in found}


@dataclasses.dataclass(frozen=True)
class GpuTopology:
    """Hosts with ``gpus`` GPUs of one kind each."""

    gpu: Gpu
    hosts: int
    gpus: int

    platform = "GPU"

    @property
    def name(self) -> str:
        """The value of ``--topology``, such as ``h100:4x8``."""
        return f"{self.gpu.name}:{self.hosts}x{self.gpus}"

    @property
    def kind(self) -> str:
        """The devices' name."""
        return self.gpu.title

    @property
    def coordinates(self) -> tuple[tuple[int, int], ...]:
        """Coordinates of each replica, as (GPU in its host, host)."""
        return tuple((gpu, host) for host in range(self.hosts) for gpu in range(self.gpus))

    @property
    def chips(self) -> int:
        """The number of GPUs."""
        return self.hosts * self.gpus

    @property
    def memory(self) -> int:
        """Bytes of each GPU."""
        return self.gpu.memory

    @property
    def usable(self) -> int:
        """Bytes of each GPU that are available to a step."""
        return self.gpu.memory - self.gpu.margin

    def __str__(self) -> str:
        hosts = f"{self.hosts:,} hosts of {self.gpus}" if self.hosts > 1 else f"{self.gpus}"
        return f"{self.chips:,} replica{'s' * (self.chips != 1)}, {hosts} {self.kind}"


def gpu_topology(name: str) -> GpuTopology | None:
    """Returns the topology of this name; None if it is not a GPU's.

    Raises:
      UserError: if the number of hosts or GPUs is missing or out of range.
    """
    kind, _, size = name.partition(":")
    if kind not in gpus():
        return None
    found = re.fullmatch(r"(\d+)x(\d+)", size)
    hosts, each = map(int, found.groups()) if found else (0, 0)
    if hosts < 1 or not 1 <= each <= _MAX_PER_HOST:
        raise UserError(
            f"there is no topology {name!r}: give the number of hosts and of GPUs per host, 1 to "
            f"{_MAX_PER_HOST}, as in {kind}:1x8 or {kind}:4x8"
        )
    return GpuTopology(gpus()[kind], hosts, each)


def no_topology(name: str, reason: str) -> UserError:
    """Returns the error for a topology that is neither a GPU's nor, by its compiler, a TPU's."""
    return UserError(
        f"there is no topology {name!r} ({reason}); choose hosts and GPUs per host, as in h100:1x8 "
        f"or h100:4x8, of {', '.join(gpus())}, or a TPU's, like {_TPUS}"
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
