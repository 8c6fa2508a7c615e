"""Published training times, and the cost model's constants, which are fitted to some of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from imagenet_fast.lab.planning.cost_model.compute import Efficiency
from imagenet_fast.lab.planning.cost_model.step_time import (
    HOST_LATENCY,
    NETWORK_LATENCY,
    TORUS_LATENCY,
)
from imagenet_fast.lab.planning.validation.cifar import AIRBENCH_ROWS, PAGE_ROWS
from imagenet_fast.lab.planning.validation.results import (
    DataParallel,
    Options,
    Pipelined,
    PublishedResult,
)

# Assumed, not fitted: the achieved fraction of memory bandwidth, and the seconds to launch an
# operation.
_MEMORY = 0.8
_LAUNCH = 5e-6


def _eager(matrix: float, half_rows: float = 0.0) -> Efficiency:
    """Software that runs each operation separately."""
    return Efficiency(matrix, half_rows, _MEMORY, fuses=False, launch_seconds=_LAUNCH)


def _fused(matrix: float, half_rows: float = 0.0) -> Efficiency:
    """Software that fuses operations."""
    return Efficiency(matrix, half_rows, _MEMORY, fuses=True, launch_seconds=0.0)


# The constants of each software stack: ``matrix`` is fitted to the stack's first row with ``fits``,
# ``half_rows`` to its second, if there is one.
STACKS: Mapping[str, Efficiency] = MappingProxyType(
    {
        "Caffe2, P100": _eager(0.3837),
        "TensorFlow 2017, P100": _eager(0.8287, 2011),
        "Tencent, P40": _eager(0.3826),
        "PyTorch, P40": _eager(0.6075),
        "PyTorch, P40, AmoebaNet": _eager(0.3620),
        "PyTorch, A100": _eager(0.3317),
        "PyTorch, A100, compiled": _fused(0.4648),
        "PyTorch, V100, ResNet-9": _eager(0.4515),
        "MXNet, V100, float16": _fused(0.3535),
        "MXNet, V100, float32": _fused(0.6817),
        "MXNet, A100": _fused(0.2022),
        "TensorFlow, TPU": _fused(0.8292, 4723),
    }
)

_RESNET50: Options = {"model": "resnet50"}
_RESNET101: Options = {"model": "resnet101"}
_HALF = {"precision": "mixed_float16"}
_BRAIN = {**_RESNET50, "precision": "mixed_bfloat16"}
_AMOEBANET: Options = {"model": "amoebanet_d", "normal_cells": 18, "cell_filters": 256}

_GOYAL = "Goyal et al. 2017"
_BENCHMARKS = "tensorflow.org/performance/benchmarks, May 2017, DGX-1, synthetic data"
_JIA = "Jia et al. 2018"
_TORCHGPIPE = "torchgpipe, benchmarks/amoebanetd-speed"
_TORCHGPIPE_RESNET = "torchgpipe, benchmarks/resnet101-speed"
_GPIPE = "Huang et al. 2018, table 2"
_FFCV = "ffcv-imagenet"
_NVIDIA = "NVIDIA DeepLearningExamples, MXNet RN50v1.5, 20.12"


def _mlperf(round_: str, system: str) -> str:
    counted = "training alone" if round_ == "v0.5" else "evaluation included"
    return f"MLPerf Training {round_}, log of one run on {system}, {counted}"


def _p100(network: Options, chips: int, each: int, **options: Any) -> DataParallel:
    return DataParallel(network, "p100", chips, chips * each, **options)


def _tpu(kind: str, chips: int, batch: int, **options: Any) -> DataParallel:
    return DataParallel(_BRAIN, kind, chips, batch, **options)


_ON_ETHERNET: Options = {"all_reduce": "hierarchical", "network_gbits": 50.0}
_ON_ROCE: Options = {"all_reduce": "hierarchical", "gradient_bytes": 2}

_GOYAL_ROWS = (
    *(
        PublishedResult(
            f"{name}, {chips} P100{'' if epochs == 90 else ', an epoch'}",
            _GOYAL,
            "Caffe2, P100",
            _p100(network, chips, 32, **options),
            value,
            unit,
            epochs,
            fits=chips == 8,
        )
        for name, network, chips, options, value, unit, epochs in (
            ("ResNet-50", _RESNET50, 8, {}, 29, "hours", 90),
            ("ResNet-50", _RESNET50, 256, _ON_ETHERNET, 60, "minutes", 90),
            ("ResNet-50", _RESNET50, 352, _ON_ETHERNET, 30, "seconds", 1),
            ("ResNet-101", _RESNET101, 256, _ON_ETHERNET, 92.5, "minutes", 90),
        )
    ),
    PublishedResult(
        "ResNet-50, 256 P100 to 8",
        f"{_GOYAL}: about 90%",
        "Caffe2, P100",
        _p100(_RESNET50, 256, 32, **_ON_ETHERNET),
        0.9,
        "scaling",
        to=_p100(_RESNET50, 8, 32),
    ),
)

_BENCHMARK_ROWS = tuple(
    PublishedResult(
        f"{title}, {chips} P100, {each} images each",
        _BENCHMARKS,
        "TensorFlow 2017, P100",
        _p100({"model": model}, chips, each),
        value,
        fits=fits,
    )
    for title, model, chips, each, value, fits in (
        ("ResNet-50", "resnet50", 1, 64, 219, True),
        ("ResNet-50", "resnet50", 1, 32, 195, True),
        ("ResNet-152", "resnet152", 1, 64, 91.8, False),
        ("ResNet-152", "resnet152", 1, 32, 82.7, False),
        ("ResNet-50", "resnet50", 8, 64, 1734, False),
        ("ResNet-152", "resnet152", 8, 64, 716, False),
    )
)


def _p40(network: Options, chips: int, each: int, segments: tuple[int, ...]) -> DataParallel:
    return DataParallel(
        {**network, **_HALF}, "p40", chips, chips * each, segments=segments, **_ON_ROCE
    )


_ALEXNET: Options = {"model": "alexnet_bn", "batch_norm_after_pool5": True, "image_size": 227}
_JIA_ROWS = (
    PublishedResult(
        "ResNet-50, 2048 P40",
        _JIA,
        "Tencent, P40",
        _p40(_RESNET50, 2048, 32, (76,)),
        6.6,
        "minutes",
        90,
        fits=True,
    ),
    PublishedResult(
        "AlexNet-BN, 1024 P40",
        f"{_JIA}; the number of GPUs from memory",
        "Tencent, P40",
        _p40(_ALEXNET, 1024, 64, (20,)),
        4,
        "minutes",
        95,
    ),
    *(
        PublishedResult(
            f"ResNet-50, {chips} P40 to 1",
            f"{_JIA}, the authors' article{about}",
            "Tencent, P40",
            _p40(_RESNET50, chips, each, (76,)),
            value,
            "scaling",
            to=_p40(_RESNET50, 1, each, (76,)),
        )
        for chips, each, value, about in ((1024, 64, 0.99, ": about 99%"), (2048, 32, 0.97, ""))
    ),
)


def _amoebanet(stages: int, micro_batches: int, batch: int, balance: tuple[int, ...]) -> Pipelined:
    return Pipelined(
        _AMOEBANET,
        "p40",
        batch,
        micro_batches,
        stages,
        balance,
        "always" if micro_batches == 1 else "except_last",
    )


# By stages: images, micro-batches and blocks of each stage, as in torchgpipe's main.py. A residual
# block is two blocks here and 11 modules there; its first cut in four, within a block, is moved to
# the end of the block's sum, and its third from within a block to the block's beginning.
_RESNET101_STAGES: Mapping[int, tuple[int, int, tuple[int, ...]]] = {
    1: (220, 2, (74,)),
    2: (25000, 1667, (29, 45)),
    4: (5632, 256, (13, 17, 22, 22)),
    8: (5400, 150, (10, 4, 6, 8, 8, 12, 12, 14)),
}


def _resnet101(stages: int, **changes: Any) -> Pipelined:
    batch, micro_batches, balance = _RESNET101_STAGES[stages]
    run = Pipelined(_RESNET101, "p40", batch, micro_batches, stages, balance)
    return dataclasses.replace(run, **changes)


_TORCHGPIPE_ROWS = (
    PublishedResult(
        "ResNet-101, 1 P40",
        _TORCHGPIPE_RESNET,
        "PyTorch, P40",
        DataParallel(_RESNET101, "p40", 1, 118),
        95.862,
        fits=True,
    ),
    PublishedResult(
        "ResNet-101, 2 P40, data-parallel",
        "torchgpipe, benchmarks/resnet101-accuracy",
        "PyTorch, P40",
        DataParallel(_RESNET101, "p40", 2, 256),
        180.344,
    ),
    PublishedResult(
        "ResNet-101, 8 P40, data-parallel",
        "torchgpipe, benchmarks/resnet101-accuracy",
        "PyTorch, P40",
        DataParallel(_RESNET101, "p40", 8, 1024),
        606.916,
        why="one process copies the weights to all GPUs in each step, and reads ImageNet's files",
    ),
    *(
        PublishedResult(
            f"ResNet-101, {stages} stage{'s' * (stages > 1)} on P40",
            _TORCHGPIPE_RESNET,
            "PyTorch, P40",
            _resnet101(stages),
            value,
        )
        for stages, value in ((1, 81.796), (2, 135.539), (4, 265.958), (8, 411.662))
    ),
    *(
        PublishedResult(
            f"AmoebaNet-D, {len(balance)} stages on P40, {micro_batches} micro-batches",
            _TORCHGPIPE,
            "PyTorch, P40, AmoebaNet",
            _amoebanet(len(balance), micro_batches, batch, balance),
            value,
            fits=(len(balance), micro_batches) == (2, 1),
        )
        for micro_batches, batch, balance, value in (
            (1, 96, (7, 17), 26.733),
            (4, 256, (9, 15), 41.133),
            (32, 1280, (9, 15), 47.386),
            (1, 160, (3, 4, 5, 12), 26.827),
            (4, 360, (3, 6, 7, 8), 44.543),
            (32, 1152, (3, 6, 7, 8), 72.412),
            (1, 196, (2, 2, 2, 2, 2, 3, 4, 7), 24.918),
            (4, 480, (2, 2, 2, 3, 3, 4, 4, 4), 70.065),
            (32, 1280, (2, 2, 2, 3, 3, 4, 4, 4), 132.413),
        )
    ),
)


# By stages and micro-batches. The paper does not give batch sizes; these are torchgpipe's.
_BATCHES = {
    **{(2, 1): 96, (2, 4): 256, (2, 32): 1280},
    **{(4, 1): 160, (4, 4): 360, (4, 32): 1152},
    **{(8, 1): 196, (8, 4): 480, (8, 32): 1280},
}


def _on_tpus(stages: int, micro_batches: int) -> Pipelined:
    network = {**_AMOEBANET, "precision": "mixed_bfloat16"}
    batch = _BATCHES[stages, micro_batches]
    return Pipelined(network, "tpu-v2", batch, micro_batches, stages, rematerialize="always")


_LINGVO = {
    "network": {**_RESNET101, "precision": "mixed_bfloat16"},
    "accelerator": "tpu-v2",
    "balance": (),
    "rematerialize": "always",
}
_REPRODUCED = {(4, 4): "1.68", (8, 1): "0.93", (8, 4): "2.63"}
_GPIPE_ROWS = tuple(
    PublishedResult(
        f"AmoebaNet-D, {stages} stages on TPU v2, {micro_batches} micro-batches",
        f"{_GPIPE}, to 2 stages and 1 micro-batch",
        "TensorFlow, TPU",
        _on_tpus(stages, micro_batches),
        value,
        "times",
        to=_on_tpus(2, 1),
        why=(
            f"the paper does not give the batch; we use torchgpipe's, which got {reproduced}"
            if (reproduced := _REPRODUCED.get((stages, micro_batches)))
            else ""
        ),
    )
    for stages, values in ((2, (1, 1.07, 1.21)), (4, (1.13, 1.26, 1.84)), (8, (1.38, 1.72, 3.48)))
    for micro_batches, value in zip((1, 4, 32), values)
    if (stages, micro_batches) != (2, 1)
)

# Lingvo's cut, as for the rows above; the figure does not give batches: torchgpipe's.
_FIGURE_ROWS = tuple(
    PublishedResult(
        f"ResNet-101, {stages} stage{'s' * (stages > 1)} on TPU v2, lingvo's cut",
        "Huang et al. 2018, version 4, figure 3b, as torchgpipe reads it, to 1 chip without GPipe",
        "TensorFlow, TPU",
        _resnet101(stages, **_LINGVO),
        value,
        "times",
        to=_resnet101(1, **_LINGVO | {"batch": 118, "micro_batches": 1, "rematerialize": "never"}),
        why=(
            "the figure does not give the batch; torchgpipe's has micro-batches of 15 images, "
            "which leave a TPU's matrix units idle"
            if stages == 2
            else ""
        ),
    )
    for stages, value in ((1, 0.8), (2, 1.418), (4, 2.182), (8, 2.891))
)

_MLPERF_ROWS = tuple(
    PublishedResult(
        f"ResNet-50, {chips} {title}",
        _mlperf(round_, system),
        "TensorFlow, TPU",
        _tpu(kind, chips, batch, all_reduce="torus_2d"),
        value,
        fits=fits,
    )
    for round_, system, title, kind, chips, batch, value, fits in (
        ("v0.6", "v3-32", "TPU v3", "tpu-v3", 16, 4096, 31230, True),
        ("v0.6", "v3-1024", "TPU v3", "tpu-v3", 512, 32768, 740600, True),
        ("v0.5", "v2-8", "TPU v2", "tpu-v2", 4, 1024, 4473, False),
        ("v0.5", "v3-8", "TPU v3", "tpu-v3", 4, 1024, 7462, False),
        ("v0.5", "v2-512", "TPU v2", "tpu-v2", 256, 16384, 174000, False),
        ("v0.6", "v3-128", "TPU v3", "tpu-v3", 64, 16384, 125100, False),
        ("v0.6", "v3-256", "TPU v3", "tpu-v3", 128, 32768, 240800, False),
        ("v0.6", "v3-2048", "TPU v3", "tpu-v3", 1024, 32768, 1298000, False),
        ("v0.7", "v4-16", "TPU v4", "tpu-v4", 8, 2048, 27830, False),
        ("v1.0", "v4-128", "TPU v4", "tpu-v4", 64, 8192, 220900, False),
    )
)

_TPU_ROWS = (
    PublishedResult(
        "ResNet-50, 1024 TPU v3, batch 32,768",
        "Ying et al. 2018, abstract: more than that",
        "TensorFlow, TPU",
        _tpu("tpu-v3", 1024, 32768, all_reduce="torus_2d", batch_norm_batch=128),
        1_050_000,
    ),
    PublishedResult(
        "ResNet-50, 4 TPU v2, early in 2018",
        "tensorflow/tpu, models/official/resnet, README: evaluation included",
        "TensorFlow, TPU",
        _tpu("tpu-v2", 4, 1024),
        17,
        "hours",
        90,
        why="software of early 2018; MLPerf's run on the same chips, in the same year, came to 7.2",
    ),
)

_NVIDIA_ROWS = tuple(
    PublishedResult(
        f"ResNet-50, {chips} {title}",
        _NVIDIA,
        f"MXNet, {stack}",
        DataParallel({**_RESNET50, **precision}, kind, chips, chips * each),
        value,
        fits=fits,
    )
    for title, stack, kind, chips, each, precision, value, fits in (
        ("V100, float16", "V100, float16", "v100", 1, 192, _HALF, 1376, True),
        ("V100, float16", "V100, float16", "v100", 8, 192, _HALF, 10723, False),
        ("V100, float32", "V100, float32", "v100", 1, 96, {}, 384, True),
        ("V100, float32", "V100, float32", "v100", 8, 96, {}, 3005, False),
        ("A100, float16", "A100", "a100-80gb", 1, 256, _HALF, 2180, True),
        ("A100, float16", "A100", "a100-80gb", 8, 256, _HALF, 16925, False),
        ("A100, TF32", "A100", "a100-80gb", 1, 256, {}, 1022, False),
        ("A100, TF32", "A100", "a100-80gb", 8, 256, {}, 8001, False),
    )
)

_MLPERF_GPU_ROWS = tuple(
    PublishedResult(
        f"ResNet-50, 8 {chip.upper()}, MLPerf {round_}",
        f"MLPerf Training {round_}, logs of {submitter}, evaluation included",
        "MXNet, A100",
        DataParallel({**_RESNET50, **_HALF}, chip, 8, batch),
        value,
        "minutes",
        epochs,
        why=why,
    )
    for round_, submitter, chip, batch, epochs, value, why in (
        (
            *("v0.7", "NVIDIA", "a100", 3264, 41, 39.78),
            "the constant is of NVIDIA's public example, with 16,925 images/s; this has 22,000",
        ),
        ("v4.0", "Dell", "h100", 3200, 35, 13.16, ""),
    )
)

_RAMPS = {16: (11, 13), 32: (23, 27), 88: (65, 76)}


def _ffcv(model: str, chips: int, batch: int, epochs: int) -> DataParallel:
    """A run on images of 160 pixels and, after a ramp, 192."""
    ramp = {
        "image_size": 192,
        "size_ramp": (160, 32),
        "size_ramp_at": tuple(f"{at} epochs" for at in _RAMPS[epochs]),
        "duration": f"{epochs} epochs",
    }
    network = {"model": model, "blur_pool": "convolutions", **_HALF, **ramp}
    return DataParallel(network, "a100", chips, batch)


_FFCV_ROWS = (
    *(
        PublishedResult(
            f"ResNet-50, BlurPool, 8 A100, an epoch on {size} px",
            f"{_FFCV}, log of a run of 88 epochs (assets/agg.csv), training alone",
            "PyTorch, A100",
            DataParallel(
                {**_RESNET50, "blur_pool": "convolutions", "image_size": size, **_HALF},
                "a100",
                8,
                4096,
            ),
            value,
            "seconds",
            1,
            fits=fits,
        )
        for size, value, fits in ((160, 45.5, True), (192, 61.7, False))
    ),
    *(
        PublishedResult(
            f"{title}, BlurPool, {chips} A100, {epochs} epochs",
            f"{_FFCV}, README: evaluation included",
            "PyTorch, A100",
            _ffcv(model, chips, batch, epochs),
            value,
            "minutes",
            epochs,
        )
        for title, model, chips, batch, epochs, value in (
            ("ResNet-50", "resnet50", 8, 4096, 16, 14.9),
            ("ResNet-50", "resnet50", 8, 4096, 32, 28.7),
            ("ResNet-50", "resnet50", 8, 4096, 88, 77.2),
            ("ResNet-18", "resnet18", 1, 1024, 16, 35.0),
            ("ResNet-18", "resnet18", 1, 1024, 88, 187.3),
        )
    ),
)

# Its sizes are multiples of 4; these have nearly the same mean.
_MOSAIC: Options = {
    **_RESNET50,
    **_HALF,
    "blur_pool": "convolutions_and_pools",
    "image_size": 176,
    "size_ramp": (88, 22),
    "size_ramp_at": ("8000 steps", "16000 steps"),
    "duration": "32 epochs",
}
_MOSAIC_ROWS = (
    PublishedResult(
        "ResNet-50, MosaicML's mild recipe, 8 A100",
        "composer, tutorials/train_resnet50_on_aws.md: about 27 minutes",
        "PyTorch, A100",
        DataParallel(_MOSAIC, "a100", 8, 2048),
        27,
        "minutes",
        32,
        why=(
            "its README says that the loader is the bottleneck; in its logs of MLPerf 2.0, "
            "training on 88 pixels has 32,100 images/s"
        ),
    ),
)

ROWS: tuple[PublishedResult, ...] = (
    *_GOYAL_ROWS,
    *_BENCHMARK_ROWS,
    *_JIA_ROWS,
    *_TORCHGPIPE_ROWS,
    *_GPIPE_ROWS,
    *_FIGURE_ROWS,
    *_MLPERF_ROWS,
    *_TPU_ROWS,
    *_NVIDIA_ROWS,
    *_MLPERF_GPU_ROWS,
    *_FFCV_ROWS,
    *_MOSAIC_ROWS,
    *PAGE_ROWS,
    *AIRBENCH_ROWS,
)

# The most similar software stack by accelerator, and by precision where there are two.
_NEAREST = {
    "p100": "TensorFlow 2017, P100",
    "v100": "MXNet, V100, float16",
    "v100 float32": "MXNet, V100, float32",
    "p40": "PyTorch, P40",
    "a100": "MXNet, A100",
    "a100-80gb": "MXNet, A100",
    "h100": "MXNet, A100",
}


def stack_for(accelerator: str, precision: str) -> str:
    """Returns the stack, a key of ``STACKS``, that plans assume for a chip and precision."""
    with_precision = f"{accelerator} {precision}"
    return _NEAREST.get(with_precision) or _NEAREST.get(accelerator, "TensorFlow, TPU")


def linear_scaling(row: PublishedResult, rows: Sequence[PublishedResult] = ROWS) -> float | None:
    """Returns what linear scaling predicts for a row, in its unit, without any cost model.

    The throughput of the smallest published run of the same network on the same system (software,
    kind of chip and precision), times the ratio of chips. A number that is relative to another run
    is predicted to be the ratio of chips, and a scaling to be 1.

    Returns:
      None if no smaller run of the network on the system was published, or ``row`` is the smallest.
    """
    if row.unit == "scaling":
        return 1.0
    if row.unit == "times":
        assert row.to
        return row.run.chips / row.to.chips
    alike = [other for other in rows if not other.relative and _system(other) == _system(row)]
    smallest = min(alike, key=lambda other: other.run.chips)
    if smallest is row:
        return None
    return row.in_unit(smallest.images_per_second * row.run.chips / smallest.run.chips)


def _system(row: PublishedResult) -> tuple[object, ...]:
    """Returns what rows must have in common to be compared without a cost model."""
    network = row.run.network
    images = network.get("image_size", 224), network.get("size_ramp", ())
    precision = network.get("precision", "float32")
    return row.stack, row.run.accelerator, network["model"], precision, images


def rows_of_chip(name: str) -> list[PublishedResult]:
    """Returns the published numbers of a kind of chip, by its value of ``--accelerator``."""
    return [row for row in ROWS if row.run.accelerator == name]


def fitted_constants(stack: Efficiency) -> str:
    """Returns a stack's fitted constants as text."""
    rows = f", half of that with {stack.half_rows:,.0f} rows" if stack.half_rows else ""
    fused = "; fused" if stack.fuses else ""
    return f"{stack.matrix:.1%} of peak in matrix operations{rows}{fused}"


def assumed_constants(links: str) -> list[str]:
    """Returns the constants of all stacks, which were not fitted, as lines of text.

    ``links`` describes the bandwidths of links and networks.
    """
    return [
        f"{_MEMORY:.0%} of memory bandwidth, {1e6 * _LAUNCH:g} us to launch an operation that is "
        "not fused",
        links,
        f"{1e6 * TORUS_LATENCY:g} us for a message between TPUs, {1e6 * HOST_LATENCY:g} between "
        f"GPUs of a host, {1e6 * NETWORK_LATENCY:g} between hosts",
    ]
