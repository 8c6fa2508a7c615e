"""Options of devices, worker processes and the gradient all-reduce."""

from __future__ import annotations

import dataclasses
import functools

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import NOT_NEGATIVE, POSITIVE, Check, OnlyIf, option
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


hardware_option = functools.partial(option, group="hardware", may_change_on_resume=True)
# A single replica has nothing to reduce.
_SEVERAL = OnlyIf("strategy", ("one_device",), unless=True)
_GPUS = Check(_is_gpus, "be a number of GPUs, or distinct ids as 0,2 (one: 2,)")


@dataclasses.dataclass(frozen=True)
class ClusterOptions(SharedOptions):
    """Options of the devices of a run, and of the gradient all-reduce over them."""

    strategy: str = hardware_option(
        "auto",
        "devices to train on; one_device; mirrored: all GPUs of this machine; multi_worker: all "
        "devices of the processes in TF_CONFIG or of Slurm; tpu; auto: tpu if there is one, "
        "multi_worker for several processes, mirrored for several GPUs, else one_device",
        choices=("auto", "one_device", "mirrored", "multi_worker", "tpu"),
    )
    tpu: str = hardware_option(
        "",
        "name or address of a TPU; local: this machine's",
        in_files_of_runs=False,
    )
    gpus: str = hardware_option(
        "",
        "GPUs of each machine to use: their number, or ids as 0,2 or 2, (with a comma); 0: train "
        "on the CPU; empty: all",
        check=_GPUS,
    )
    logical_cpus: int = hardware_option(
        0,
        "number of logical devices into which the CPU is split, to try replicas without "
        "accelerators; 0: do not split",
        check=NOT_NEGATIVE,
    )
    pipeline_stages: int = hardware_option(
        1,
        "stages into which pipeline parallelism (GPipe) divides the network, each on its own "
        "device unless pipeline_stages_per_device says otherwise; accumulation_steps is the number "
        "of micro-batches; 1: no pipeline",
        check=POSITIVE,
    )
    fusion: str = hardware_option(
        "fixed",
        "gradient fusion for all-reduces; fixed: fusion_bytes or fusion_segments; auto: the "
        "fastest of fusion_bytes, 0, 4 MiB and published segments, by timing steps at image_size "
        "before training; not for TPUs",
        choices=("fixed", "auto"),
    )
    fusion_bytes: int = hardware_option(
        25 * 2**20,
        "bytes of gradients that are all-reduced at once; 0: all gradients",
        check=NOT_NEGATIVE,
        only_if=(OnlyIf("fusion_segments", unless=True), _SEVERAL),
    )
    fusion_segments: tuple[int, ...] = hardware_option(
        (),
        "instead of fusion_bytes: numbers of gradients, from the first layer's, after which a new "
        "all-reduce begins; Jia et al.: 20 for AlexNet, 76 for ResNet-50",
        check=Check(
            lambda value: all(a < b for a, b in zip((0, *value), value)),
            "be positive and increasing",
        ),
        only_if=_SEVERAL,
    )
    all_reduce: str = hardware_option(
        "auto",
        "algorithm of the gradient all-reduce: builtin: the strategy's; flat: one ring, for "
        "workers; hierarchical: a ring of the groups' first replicas, for workers; torus_2d: along "
        "rows and columns, for workers and TPUs; auto: flat for workers without GPUs, else builtin",
        choices=ALL_REDUCE_ALGORITHMS,
    )
    all_reduce_group: int = hardware_option(
        0,
        "replicas in a group (hierarchical) or row (torus_2d) of all_reduce; 0: those of one host, "
        "or about the square root of all",
        check=NOT_NEGATIVE,
        only_if=OnlyIf("all_reduce", ("hierarchical", "torus_2d")),
    )
    all_reduce_dtype: str = hardware_option(
        "float32",
        "dtype in which replicas exchange gradients; weight updates are in float32",
        choices=ALL_REDUCE_DTYPES,
        only_if=_SEVERAL,
    )
    deterministic: bool = hardware_option(
        False,
        "use only deterministic operations, even if slower",
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
                "fusion=auto depends on measured times, which are not deterministic: leave one of "
                "them out"
            )
        if self.fusion == "auto" and self.pipeline_stages > 1:
            raise UserError(
                "fusion=auto is not for pipelines, whose stages all-reduce gradients separately"
            )
