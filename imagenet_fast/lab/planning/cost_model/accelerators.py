"""Specifications and cloud prices of GPUs and TPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from imagenet_fast.base.errors import UserError, require_choice

_TERA, _GIGA, _GIB = 1e12, 1e9, 2**30


@dataclasses.dataclass(frozen=True)
class Price:
    """The on-demand price of a chip.

    Attributes:
      dollars: per chip and hour, in Google's region us-central1 unless the source says otherwise.
      covers: what the price includes.
      source: where the price was published, and when.
    """

    dollars: float
    covers: str
    source: str


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A kind of chip.

    Attributes:
      name: the value of ``--accelerator``.
      title: its name in texts.
      flops: peak FLOP/s of a chip for each precision policy, without sparsity.
      memory: bytes of a chip.
      bandwidth: of the chip's memory, in bytes/s.
      link: bytes/s that a chip sends while it receives at the same speed: through each link of the
        torus, or to all other chips of its host together.
      price: None if no public cloud offers it.
      sources: of everything but the price.
      replicas: cores of a chip. Each trains a replica, with an equal part of FLOP/s, memory and
        bandwidth.
      torus: axes along which each chip has links to two neighbours; 0: the chips of a host are
        connected with each other, and hosts by a network.
      host_chips: chips in a host.
      most_chips: the largest torus; 0: no limit.
    """

    name: str
    title: str
    flops: Mapping[str, float]
    memory: float
    bandwidth: float
    link: float
    price: Price | None
    sources: tuple[str, ...]
    replicas: int = 1
    torus: int = 0
    host_chips: int = 8
    most_chips: int = 0

    @property
    def core_memory(self) -> float:
        """Bytes of a replica."""
        return self.memory / self.replicas

    @property
    def core_bandwidth(self) -> float:
        """Memory bandwidth of a replica, in bytes/s."""
        return self.bandwidth / self.replicas

    def core_flops(self, precision: str) -> float:
        """Returns a replica's peak FLOP/s in matrix operations under a precision policy.

        Raises:
          UserError: if the chip does not support it.
        """
        if precision not in self.flops:
            raise UserError(
                f"{self.title} does not compute in {precision}; choose from {', '.join(self.flops)}"
            )
        return self.flops[precision] / self.replicas


def accelerator(name: str) -> Accelerator:
    """Returns the accelerator of this name.

    Raises:
      UserError: if there is none; the message lists all names.
    """
    require_choice("accelerator", name, ACCELERATORS)
    return ACCELERATORS[name]


# Generated from Google's price API; undated, but includes accelerators of 2024.
_CATALOG = "skypilot-org/skypilot-catalog gcp/vms.csv at 0129130 (undated, 2024 or later)"
_BOOK = "jax-ml.github.io/scaling-book/tpus (2025-02)"

_WITHOUT_HOST = "the GPU; its virtual machine costs extra"
_WITH_HOST = "the chip and its part of a host"


def _gpu_flops(float32: float, half: float, *, bfloat16: bool = False) -> dict[str, float]:
    """Returns a GPU's FLOP/s by precision policy, from TFLOP/s."""
    flops = {"float32": float32 * _TERA, "mixed_float16": half * _TERA}
    return {**flops, "mixed_bfloat16": half * _TERA} if bfloat16 else flops


def _tpu_flops(peak: float) -> dict[str, float]:
    """Returns the FLOP/s of a TPU, which multiplies float32 matrices in bfloat16, from TFLOP/s."""
    return {"mixed_bfloat16": peak * _TERA, "float32": peak * _TERA}


_ALL = (
    Accelerator(
        "p100",
        "NVIDIA P100 (SXM2, 16 GB)",
        _gpu_flops(10.6, 21.2),
        memory=16 * _GIB,
        bandwidth=732 * _GIGA,
        link=80 * _GIGA,
        price=Price(1.46, _WITHOUT_HOST, _CATALOG),
        sources=("microway.com, P100 NVLink GPU; Dell HPC reference guide, table of GPUs",),
    ),
    Accelerator(
        "v100",
        "NVIDIA V100 (SXM2, 16 GB)",
        _gpu_flops(15.7, 125),
        memory=16 * _GIB,
        bandwidth=900 * _GIGA,
        link=150 * _GIGA,
        price=Price(2.48, _WITHOUT_HOST, _CATALOG),
        sources=("Dell HPC reference guide; NVIDIA's V100 whitepaper, as quoted in notes of it",),
    ),
    Accelerator(
        "p40",
        "NVIDIA P40",
        # float16 saves memory only: arithmetic is done in float32, because float16 is 64x slower.
        _gpu_flops(11.76, 11.76),
        memory=24 * _GIB,
        bandwidth=346 * _GIGA,
        link=16 * _GIGA,
        price=None,
        sources=("gpuark.com and omegaco.ae, P40; PCIe 3.0 x16",),
    ),
    Accelerator(
        "a100",
        "NVIDIA A100 (SXM4, 40 GB)",
        # float32 is computed as TF32 unless that is disabled.
        _gpu_flops(156, 312, bfloat16=True),
        memory=40 * _GIB,
        bandwidth=1555 * _GIGA,
        link=300 * _GIGA,
        price=Price(3.67, "the GPU and its virtual machine a2-highgpu-1g", _CATALOG),
        sources=("glennklockwood.com, A100, from NVIDIA's data sheet",),
    ),
    Accelerator(
        "a100-80gb",
        "NVIDIA A100 (SXM4, 80 GB)",
        _gpu_flops(156, 312, bfloat16=True),
        memory=80 * _GIB,
        bandwidth=2039 * _GIGA,
        link=300 * _GIGA,
        price=Price(5.03, "the GPU and its virtual machine a2-ultragpu-1g", _CATALOG),
        sources=("glennklockwood.com, A100, from NVIDIA's data sheet",),
    ),
    Accelerator(
        "h100",
        "NVIDIA H100 (SXM5, 80 GB)",
        _gpu_flops(494.7, 989.4, bfloat16=True),
        memory=80 * _GIB,
        bandwidth=3350 * _GIGA,
        link=450 * _GIGA,
        price=Price(10.98, "the GPU and an eighth of its virtual machine a3-highgpu-8g", _CATALOG),
        sources=("glennklockwood.com, H100; archive-lib.hpctech.co.jp, H100",),
    ),
    Accelerator(
        "tpu-v2",
        "TPU v2",
        _tpu_flops(45),
        memory=16 * _GIB,
        bandwidth=700 * _GIGA,
        link=62 * _GIGA,
        price=Price(1.125, _WITH_HOST, _CATALOG),
        sources=(
            "mlwires.com (45 TFLOP/s); cloud.google.com/tpu/docs/regions-zones (memory, slices)",
            "Hot Chips 2020 live blog (700 GB/s); Jouppi et al. 2020, 496 Gbit/s a link: unchecked",
        ),
        replicas=2,
        torus=2,
        host_chips=4,
        most_chips=256,
    ),
    Accelerator(
        "tpu-v3",
        "TPU v3",
        _tpu_flops(123),
        memory=32 * _GIB,
        bandwidth=900 * _GIGA,
        link=82 * _GIGA,
        price=Price(2.0, _WITH_HOST, _CATALOG),
        sources=(
            "cloud.google.com/tpu/docs/v3",
            "Hot Chips 2020 live blog: links of 650 GB/s together, both ways",
        ),
        replicas=2,
        torus=2,
        host_chips=4,
        most_chips=1024,
    ),
    Accelerator(
        "tpu-v4",
        "TPU v4",
        _tpu_flops(275),
        memory=32 * _GIB,
        bandwidth=1200 * _GIGA,
        link=45 * _GIGA,
        price=Price(3.22, _WITH_HOST, _CATALOG),
        sources=("cloud.google.com/tpu/docs/v4", _BOOK),
        torus=3,
        host_chips=4,
        most_chips=4096,
    ),
    Accelerator(
        "tpu-v5e",
        "TPU v5e",
        _tpu_flops(197),
        memory=16 * _GIB,
        bandwidth=819 * _GIGA,
        link=50 * _GIGA,
        price=Price(1.2, _WITH_HOST, _CATALOG),
        sources=("cloud.google.com/tpu/docs/v5e", _BOOK),
        torus=2,
        most_chips=256,
    ),
    Accelerator(
        "tpu-v5p",
        "TPU v5p",
        _tpu_flops(459),
        memory=95 * _GIB,
        bandwidth=2765 * _GIGA,
        link=100 * _GIGA,
        price=Price(4.2, _WITH_HOST, f"{_CATALOG}; us-east5"),
        sources=("cloud.google.com/tpu/docs/v5p", _BOOK),
        torus=3,
        host_chips=4,
        most_chips=8960,
    ),
    Accelerator(
        "tpu-v6e",
        "TPU v6e",
        _tpu_flops(918),
        memory=32 * _GIB,
        bandwidth=1640 * _GIGA,
        link=100 * _GIGA,
        price=Price(2.7, _WITH_HOST, "neowin.net on its release (December 2024); us-east"),
        sources=("cloud.google.com/tpu/docs/v6e", _BOOK),
        torus=2,
        most_chips=256,
    ),
)
ACCELERATORS: dict[str, Accelerator] = {chip.name: chip for chip in _ALL}
