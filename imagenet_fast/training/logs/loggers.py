"""The loggers of a run."""

from __future__ import annotations

from collections.abc import Sequence

import tf_keras as keras

from imagenet_fast.training.first_line import batch_norm_images, device_count
from imagenet_fast.training.logs.keras_callbacks import KerasCallbacks
from imagenet_fast.training.logs.logger import Logger
from imagenet_fast.training.logs.metrics_file import JsonLines
from imagenet_fast.training.logs.mlperf import MLPerfLog
from imagenet_fast.training.logs.profiler import Profiler
from imagenet_fast.training.logs.progress_bar import ProgressBar
from imagenet_fast.training.logs.tensorboard import TensorBoard, tensorboard_folder
from imagenet_fast.training.logs.trackers import RowLogger
from imagenet_fast.training.run import Run
from imagenet_fast.training.step.classifier import Classifier


def make_loggers(
    run: Run,
    model: Classifier,
    board: TensorBoard | None,
    callbacks: Sequence[keras.callbacks.Callback],
    *,
    step: int,
    last_step: int,
    eval_every: int,
) -> list[Logger]:
    """Returns what follows a run from a step on; most of it only in the chief.

    Args:
      run: the run.
      model: of it.
      board: TensorBoard's files; None: none.
      callbacks: of the user; some also take rows.
      step: weight updates before this process.
      last_step: those at which the run ends.
      eval_every: steps between evaluations.
    """
    config, trains = run.config, step < last_step
    loggers: list[Logger] = [KerasCallbacks(callbacks, model, eval_every, last_step)]
    if not run.chief:
        return loggers
    if trains:
        bar = ProgressBar(
            step,
            run.total_steps,
            batch_size=config.batch_size,
            devices=device_count(model),
            classes=run.info.num_classes,
        )
        loggers += [JsonLines(config.model_dir, step), bar]
        if board:
            loggers.append(board)
        if config.profile_steps:
            folder = tensorboard_folder(config.model_dir, "train")
            loggers.append(Profiler(folder, *config.profile_steps))
    loggers += [callback for callback in callbacks if isinstance(callback, RowLogger)]
    if config.mlperf_log:
        loggers.append(
            MLPerfLog(
                run,
                step=step,
                batch_norm_examples=batch_norm_images(run),
                last_step=last_step,
            )
        )
    return loggers
