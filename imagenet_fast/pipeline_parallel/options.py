"""The options of pipelines: stages on devices of their own, through which micro-batches pass."""

from __future__ import annotations

import dataclasses

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import ADDRESSES, ALL_POSITIVE, option
from imagenet_fast.distribute.options import ClusterOptions

REMATERIALIZE = ("always", "except_last", "never")
PIPELINE_SCHEDULES = ("unrolled", "while", "1f1b")


@dataclasses.dataclass(frozen=True)
class PipelineOptions(ClusterOptions):
    """How a network is cut into stages, and in which order these work."""

    pipeline_servers: tuple[str, ...] = option(
        (),
        "host:port of each `imagenet-fast stage-server`, whose devices take the stages that this "
        "process has no device for",
        group="hardware",
        check=ADDRESSES,
        free=True,
    )
    pipeline_balance: tuple[int, ...] = option(
        (),
        "blocks of each stage, as 3,6,7,8; none: stages of about as much work each, which "
        "`imagenet-fast plan --pipeline` shows",
        group="hardware",
        check=ALL_POSITIVE,
        free=True,
    )
    pipeline_schedule: str = option(
        "unrolled",
        "order of micro-batches in a pipeline; unrolled: all forward, then all backward; while: "
        "the same in loops, whose graph does not grow with their number; 1f1b: forward and "
        "backward in turn, which keeps fewer activations",
        group="hardware",
        choices=PIPELINE_SCHEDULES,
        free=True,
    )
    rematerialize: str = option(
        "except_last",
        "activations that a pipeline computes again in the backward pass instead of keeping them; "
        "always: all; except_last: all but those of the last micro-batch; never: none",
        group="hardware",
        choices=REMATERIALIZE,
        free=True,
    )

    def _check_together(self) -> None:
        super()._check_together()
        stages = len(self.pipeline_balance)
        if stages and self.pipeline_stages > 1 and stages != self.pipeline_stages:
            raise UserError(
                f"pipeline_balance is of {stages} stages, but pipeline_stages is "
                f"{self.pipeline_stages}"
            )
