"""The options of pipeline parallelism: stages, their schedule and rematerialization."""

from __future__ import annotations

import dataclasses

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import ADDRESSES, ALL_POSITIVE, POSITIVE, OnlyIf
from imagenet_fast.distribute.options import ClusterOptions, hardware_option
from imagenet_fast.pipeline_parallel.schedules import SCHEDULES, canonical_schedule

REMATERIALIZE = ("always", "except_last", "never")
_PIPELINED = OnlyIf("pipeline_stages")


@dataclasses.dataclass(frozen=True)
class PipelineOptions(ClusterOptions):
    """The stages of a pipeline, their devices, and the order of their passes."""

    pipeline_servers: tuple[str, ...] = hardware_option(
        (),
        "host:port of each `imagenet-fast stage-server`, whose devices run the stages that this "
        "process has no device for",
        check=ADDRESSES,
        only_if=_PIPELINED,
        in_files_of_runs=False,
    )
    pipeline_balance: tuple[int, ...] = hardware_option(
        (),
        "number of blocks of each stage, as 3,6,7,8; none: stages of about equal work, which "
        "`imagenet-fast plan --pipeline` shows",
        check=ALL_POSITIVE,
        only_if=_PIPELINED,
    )
    pipeline_schedule: str = hardware_option(
        "gpipe",
        "order of micro-batches in a pipeline; gpipe: all forward passes, then all backward "
        "passes; 1f1b: forward and backward passes in turn, which stores fewer activations; "
        "interleaved_1f1b: likewise, with pipeline_stages_per_device, so that devices wait less",
        choices=SCHEDULES,
        only_if=_PIPELINED,
    )
    pipeline_stages_per_device: int = hardware_option(
        1,
        "stages on each device, of pipeline_stages in all; of stages on K devices, stage k is on "
        "device k % K; best with a multiple of K as accumulation_steps",
        check=POSITIVE,
        only_if=OnlyIf("pipeline_schedule", ("interleaved_1f1b",)),
    )
    rematerialize: str = hardware_option(
        "except_last",
        "activations that the backward pass recomputes instead of storing them; always: all but "
        "the inputs of some blocks of the network; except_last: with pipelines, all but those of "
        "the last micro-batch, else none; never: none",
        choices=REMATERIALIZE,
    )

    def __post_init__(self) -> None:
        # config.json and flagfiles of earlier versions have former names.
        if isinstance(self.pipeline_schedule, str):
            schedule = canonical_schedule(self.pipeline_schedule, "pipeline_schedule")
            object.__setattr__(self, "pipeline_schedule", schedule)
        super().__post_init__()

    def _check_together(self) -> None:
        super()._check_together()
        each = self.pipeline_stages_per_device
        interleaved = self.pipeline_schedule == "interleaved_1f1b" and self.pipeline_stages > 1
        if interleaved and (each == 1 or self.pipeline_stages % each):
            raise UserError(
                "pipeline_schedule=interleaved_1f1b has several stages on each device, but "
                f"pipeline_stages_per_device is {each} and pipeline_stages, of all devices, is "
                f"{self.pipeline_stages}: give a multiple, as 2 and 8 for 4 devices, or use 1f1b"
            )
        stages = len(self.pipeline_balance)
        if stages and stages != self.pipeline_stages:
            raise UserError(
                f"pipeline_balance has {stages} stages, but pipeline_stages is "
                f"{self.pipeline_stages}"
            )
