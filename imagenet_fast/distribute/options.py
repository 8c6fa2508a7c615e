"""The options of devices, and of the all-reduce over them."""

from __future__ import annotations

import dataclasses

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import NOT_NEGATIVE, POSITIVE, Check, option
from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.distribute.gpus import parse_gpus

ALL_REDUCE_ALGORITHMS = ("auto", "builtin", "flat", "hierarchical", "torus_2d")
ALL_REDUCE_DTYPES = ("float32", "float16", "bfloat16")


def _is_gpus(value: str) -> bool:
    try:
        parse_gpus(value)
    except ValueError:
        return False
    return True


_GPUS = Check(_is_gpus, "be a number of GPUs, or ids as 0,2 or 2, and each once")


@dataclasses.dataclass(frozen=True)
class ClusterOptions(SharedOptions):
    """The devices on which a run trains, and how gradients are all-reduced over them."""

    strategy: str = option(
        "auto",
        "devices to train on; one_device; mirrored: all GPUs of this machine; multi_worker: those "
        "of the processes that TF_CONFIG or Slurm names; tpu; auto: tpu if there is one, "
        "multi_worker if several are named, mirrored if there are several GPUs, else one_device",
        group="hardware",
        choices=("auto", "one_device", "mirrored", "multi_worker", "tpu"),
    )
    tpu: str = option("", "name or address of a TPU; local: this machine's", group="hardware")
    gpus: str = option(
        "",
        "GPUs of each machine to use; a number: so many; ids, as 0,2 or 2, (with a comma): those; "
        "0: none, train on the CPU; empty: all",
        group="hardware",
        check=_GPUS,
        free=True,
    )
    logical_cpus: int = option(
        0,
        "split the CPU into so many devices, to try replicas without accelerators",
        group="hardware",
        check=NOT_NEGATIVE,
    )
    pipeline_stages: int = option(
        1,
        "stages of a pipeline, each on a device of its own, into which the network is cut; the "
        "accumulation_steps micro-batches pass through them one after another (GPipe); 1: no "
        "pipeline",
        group="hardware",
        check=POSITIVE,
        free=True,
    )
    fusion: str = option(
        "fixed",
        "how gradients are joined for their all-reduces; fixed: fusion_bytes, or "
        "fusion_segments; auto: whichever trains fastest of fusion_bytes, 0, 4 MiB and published "
        "segments, by steps timed before training, at image_size; not for TPUs",
        group="hardware",
        choices=("fixed", "auto"),
    )
    fusion_bytes: int = option(
        25 * 2**20,
        "bytes of gradients that workers all-reduce at once; 0: all of them",
        group="hardware",
        check=NOT_NEGATIVE,
    )
    fusion_segments: tuple[int, ...] = option(
        (),
        "instead of fusion_bytes: after how many gradients, counted from the first layer's, to "
        "begin a new all-reduce; Jia et al. took 20 for AlexNet, 76 for ResNet-50",
        group="hardware",
        check=Check(
            lambda value: all(a < b for a, b in zip((0, *value), value)),
            "be positive and increasing",
        ),
    )
    all_reduce: str = option(
        "auto",
        "algorithm of the gradient all-reduce: builtin, as the strategy does; on workers also "
        "flat, one ring; hierarchical, a ring of the groups' first replicas; torus_2d, along rows "
        "and columns, on TPUs, too; auto: flat for workers without GPUs, else builtin",
        group="hardware",
        choices=ALL_REDUCE_ALGORITHMS,
    )
    all_reduce_group: int = option(
        0,
        "replicas in a group, or row, of all_reduce=hierarchical and torus_2d; 0: those of one "
        "host, or about the square root of all",
        group="hardware",
        check=NOT_NEGATIVE,
    )
    all_reduce_dtype: str = option(
        "float32",
        "weights are updated in float32; type in which gradients travel between replicas",
        group="hardware",
        choices=ALL_REDUCE_DTYPES,
    )
    deterministic: bool = option(
        False,
        "only operations that give the same bits each time, even where slower",
        group="hardware",
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self.tpu and self.strategy not in ("auto", "tpu"):
            raise UserError(f"tpu={self.tpu!r} contradicts strategy={self.strategy}")
        if self.gpus and parse_gpus(self.gpus) != 0:
            for name in ("logical_cpus", "tpu"):
                if getattr(self, name):
                    raise UserError(f"gpus={self.gpus} contradicts {name}={getattr(self, name)}")
            if self.strategy == "tpu":
                raise UserError(f"gpus={self.gpus} contradicts strategy=tpu")
        if self.fusion == "auto" and self.fusion_segments:
            raise UserError("fusion=auto chooses fusion_segments itself: leave one of them out")
        if self.fusion == "auto" and self.deterministic:
            raise UserError(
                "fusion=auto measures times, which are never the same: leave it or deterministic "
                "out"
            )
        if self.fusion == "auto" and self.pipeline_stages > 1:
            raise UserError(
                "fusion=auto is not for pipelines, each of whose stages sums gradients of its own"
            )
