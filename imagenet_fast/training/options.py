"""The options of a run: its directory, evaluations, checkpoints and what it writes."""

from __future__ import annotations

import dataclasses

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.option import BELOW_ONE, LASTS, POSITIVE, Check, option
from imagenet_fast.base.shared_options import SharedOptions


@dataclasses.dataclass(frozen=True)
class RunOptions(SharedOptions):
    """What a run does beside training, and what it writes."""

    xla: bool = option(
        False,
        "compile with XLA: the whole step of one device, the forward and backward pass of several",
        group="hardware",
    )
    eval_every: Duration = option(
        Duration(1, "epochs"),
        "time between evaluations, as '1 epoch' or '500 steps'",
        group="run",
        check=LASTS,
    )
    test_time_augmentation: str = option(
        "none",
        "what evaluation, and an exported model, take the mean logits over; none: the image; flip: "
        "and the image flipped; flip_and_shift: and both moved by a pixel, up to the left and down "
        "to the right",
        group="run",
        choices=("none", "flip", "flip_and_shift"),
    )
    checkpoint_every: Duration = option(
        Duration(1, "epochs"),
        "time between checkpoints",
        group="run",
        check=LASTS,
    )
    keep_checkpoints: int = option(
        2, "latest checkpoints kept", group="run", check=POSITIVE, free=True
    )
    on_damaged_checkpoint: str = option(
        "previous",
        "what to do if the newest checkpoint is damaged: previous sets it aside and resumes from "
        "the one before it; stop ends the run",
        group="run",
        choices=("previous", "stop"),
        free=True,
    )
    log_every: Duration = option(
        Duration(20, "steps"),
        "time between lines of metrics.jsonl",
        group="run",
        check=LASTS,
        free=True,
    )
    stop_at_accuracy: float = option(
        0.0,
        "end the run at this top-1 accuracy, a fraction; 0: do not",
        group="run",
        check=BELOW_ONE,
        free=True,
    )
    tensorboard: bool = option(
        True, "write scalars and pictures to model_dir/tensorboard", group="run", free=True
    )
    examine: bool = option(
        True,
        "show some training images as the model sees them and, after the run, by one more "
        "evaluation, the classes that it confuses and its worst mistakes, in TensorBoard and "
        "report.html",
        group="run",
        free=True,
    )
    profile_steps: tuple[int, ...] = option(
        (),
        "first and last step that TensorFlow's profiler records for TensorBoard, as 100,110",
        group="run",
        check=Check(
            lambda value: not value or (len(value) == 2 and 0 < value[0] <= value[1]),
            "be the first step, from 1, and the last one",
        ),
        free=True,
    )
    mlperf_log: bool = option(
        False, "write MLPerf's log lines to model_dir/mlperf.log", group="run", free=True
    )
