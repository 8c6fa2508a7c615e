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
      replicas: cores of a chip. Each trains a replica, with an equal part of FLOP/s, memory and
        bandwidth.
      torus: axes along which each chip has links to two neighbours; 0: the chips of a host are
        connected with each other, and hosts by a network.
      link: bytes/s that a chip sends while it receives at the same speed: through each link of the
        torus, or to all other chips of its host together.
      host_chips: chips in a host.
      most_chips: the largest torus; 0: no limit.
      price: None if no public cloud offers it.
      sources: of everything but the price.
    """

    name: str
    title: str
    flops: Mapping[str, float]
    memory: float
    bandwidth: float
    replicas: int
    torus: int
    link: float
    host_chips: int
    most_chips: int
    price: Price | None
    sources: tuple[str, ...]

    @property
    def core_memory(self) -> float:
        """Bytes of a replica."""
        return self.memory / self.replicas

    @property
    def core_bandwidth(self) -> float:
        """Memory bandwidth of a replica, in bytes/s."""
        return self.bandwidth / self.replicas

    def core_flops(self, precision: str) -> float:
        """Returns a replica's peak FLOP/s in matrix operations.

        Args:
          precision: a precision policy.

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


def _gpu(
    name: str,
    title: str,
    *,
    float32: float,
    half: float,
    memory: float,
    bandwidth: float,
    link: float,
    dollars: float | None,
    bfloat16: bool = False,
    covers: str = "the GPU; its virtual machine costs extra",
    sources: tuple[str, ...],
) -> Accelerator:
    """An NVIDIA GPU in a host of eight; in TFLOP/s, GiB and GB/s."""
    flops = {"float32": float32 * _TERA, "mixed_float16": half * _TERA}
    if bfloat16:
        flops["mixed_bfloat16"] = half * _TERA
    return Accelerator(
        name=name,
        title=title,
        flops=flops,
        memory=memory * _GIB,
        bandwidth=bandwidth * _GIGA,
        replicas=1,
        torus=0,
        link=link * _GIGA,
        host_chips=8,
        most_chips=0,
        price=None if dollars is None else Price(dollars, covers, _CATALOG),
        sources=sources,
    )


def _tpu(
    name: str,
    title: str,
    *,
    peak: float,
    memory: float,
    bandwidth: float,
    replicas: int,
    torus: int,
    link: float,
    host_chips: int,
    most_chips: int,
    dollars: float,
    price_source: str = _CATALOG,
    sources: tuple[str, ...],
) -> Accelerator:
    """A TPU, which multiplies float32 matrices in bfloat16; in TFLOP/s, GiB and GB/s."""
    return Accelerator(
        name=name,
        title=title,
        flops={"mixed_bfloat16": peak * _TERA, "float32": peak * _TERA},
        memory=memory * _GIB,
        bandwidth=bandwidth * _GIGA,
        replicas=replicas,
        torus=torus,
        link=link * _GIGA,
        host_chips=host_chips,
        most_chips=most_chips,
        price=Price(dollars, "the chip and its part of a host", price_source),
        sources=sources,
    )


_ALL = (
    _gpu(
        "p100",
        "NVIDIA P100 (SXM2, 16 GB)",
        float32=10.6,
        half=21.2,
        memory=16,
        bandwidth=732,
        link=80,
        dollars=1.46,
        sources=("microway.com, P100 NVLink GPU; Dell HPC reference guide, table of GPUs",),
    ),
    _gpu(
        "v100",
        "NVIDIA V100 (SXM2, 16 GB)",
        float32=15.7,
        half=125,
        memory=16,
        bandwidth=900,
        link=150,
        dollars=2.48,
        sources=("Dell HPC reference guide; NVIDIA's V100 whitepaper, as quoted in notes of it",),
    ),
    _gpu(
        "p40",
        "NVIDIA P40",
        # float16 saves memory only: arithmetic is done in float32, because float16 is 64x slower.
        float32=11.76,
        half=11.76,
        memory=24,
        bandwidth=346,
        link=16,
        dollars=None,
        sources=("gpuark.com and omegaco.ae, P40; PCIe 3.0 x16",),
    ),
    _gpu(
        "a100",
        "NVIDIA A100 (SXM4, 40 GB)",
        # float32 is computed as TF32 unless that is disabled.
        float32=156,
        half=312,
        bfloat16=True,
        memory=40,
        bandwidth=1555,
        link=300,
        dollars=3.67,
        covers="the GPU and its virtual machine a2-highgpu-1g",
        sources=("glennklockwood.com, A100, from NVIDIA's data sheet",),
    ),
    _gpu(
        "a100-80gb",
        "NVIDIA A100 (SXM4, 80 GB)",
        float32=156,
        half=312,
        bfloat16=True,
        memory=80,
        bandwidth=2039,
        link=300,
        dollars=5.03,
        covers="the GPU and its virtual machine a2-ultragpu-1g",
        sources=("glennklockwood.com, A100, from NVIDIA's data sheet",),
    ),
    _gpu(
        "h100",
        "NVIDIA H100 (SXM5, 80 GB)",
        float32=494.7,
        half=989.4,
        bfloat16=True,
        memory=80,
        bandwidth=3350,
        link=450,
        dollars=10.98,
        covers="the GPU and an eighth of its virtual machine a3-highgpu-8g",
        sources=("glennklockwood.com, H100; archive-lib.hpctech.co.jp, H100",),
    ),
    _tpu(
        "tpu-v2",
        "TPU v2",
        peak=45,
        memory=16,
        bandwidth=700,
        replicas=2,
        torus=2,
        link=62,
        host_chips=4,
        most_chips=256,
        dollars=1.125,
        sources=(
            "mlwires.com (45 TFLOP/s); cloud.google.com/tpu/docs/regions-zones (memory, slices)",
            "Hot Chips 2020 live blog (700 GB/s); Jouppi et al. 2020, 496 Gbit/s a link: unchecked",
        ),
    ),
    _tpu(
        "tpu-v3",
        "TPU v3",
        peak=123,
        memory=32,
        bandwidth=900,
        replicas=2,
        torus=2,
        link=82,
        host_chips=4,
        most_chips=1024,
        dollars=2.0,
        sources=(
            "cloud.google.com/tpu/docs/v3",
            "Hot Chips 2020 live blog: links of 650 GB/s together, both ways",
        ),
    ),
    _tpu(
        "tpu-v4",
        "TPU v4",
        peak=275,
        memory=32,
        bandwidth=1200,
        replicas=1,
        torus=3,
        link=45,
        host_chips=4,
        most_chips=4096,
        dollars=3.22,
        sources=("cloud.google.com/tpu/docs/v4", _BOOK),
    ),
    _tpu(
        "tpu-v5e",
        "TPU v5e",
        peak=197,
        memory=16,
        bandwidth=819,
        replicas=1,
        torus=2,
        link=50,
        host_chips=8,
        most_chips=256,
        dollars=1.2,
        sources=("cloud.google.com/tpu/docs/v5e", _BOOK),
    ),
    _tpu(
        "tpu-v5p",
        "TPU v5p",
        peak=459,
        memory=95,
        bandwidth=2765,
        replicas=1,
        torus=3,
        link=100,
        host_chips=4,
        most_chips=8960,
        dollars=4.2,
        price_source=f"{_CATALOG}; us-east5",
        sources=("cloud.google.com/tpu/docs/v5p", _BOOK),
    ),
    _tpu(
        "tpu-v6e",
        "TPU v6e",
        peak=918,
        memory=32,
        bandwidth=1640,
        replicas=1,
        torus=2,
        link=100,
        host_chips=8,
        most_chips=256,
        dollars=2.7,
        price_source="neowin.net on its release (December 2024); us-east",
        sources=("cloud.google.com/tpu/docs/v6e", _BOOK),
    ),
)
ACCELERATORS: dict[str, Accelerator] = {own.name: own for own in _ALL}
