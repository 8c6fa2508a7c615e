"""Starts or resumes a run: its model, folder, last checkpoint, loggers and first lines."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from imagenet_fast.base.environment import now
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import say
from imagenet_fast.base.option import option_text
from imagenet_fast.config import Config
from imagenet_fast.data.sampling import class_shares
from imagenet_fast.distribute.consistency import check_consistent
from imagenet_fast.distribute.strategy import devices_of
from imagenet_fast.models.custom import CustomModel
from imagenet_fast.training.build.fusion_trials import load_fusion, save_fusion
from imagenet_fast.training.build.model import build
from imagenet_fast.training.build.schedule_change import change_of_schedule
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints, check_resumable
from imagenet_fast.training.checkpoints.config_file import other_options
from imagenet_fast.training.checkpoints.model_dir import check_model_dir, claim_model_dir, lost_best
from imagenet_fast.training.first_line import (
    batch_norm_images,
    device_count,
    first_line_of,
    model_devices,
)
from imagenet_fast.training.logs.clock import Clock
from imagenet_fast.training.logs.evaluations import Evaluations
from imagenet_fast.training.logs.keras_callbacks import KerasCallbacks
from imagenet_fast.training.logs.logger import Logger
from imagenet_fast.training.logs.metrics_file import JsonLines
from imagenet_fast.training.logs.mlperf import MLPerfLog
from imagenet_fast.training.logs.profiler import Profiler
from imagenet_fast.training.logs.progress_bar import ProgressBar
from imagenet_fast.training.logs.tensorboard import TensorBoard, tensorboard_folder
from imagenet_fast.training.logs.trackers import RowLogger
from imagenet_fast.training.run import Run
from imagenet_fast.training.segments import Segment, change_of_hardware, read_segments
from imagenet_fast.training.step.classifier import Classifier

# XLA took 55 s more to start and 70 ms less for a step of ResNet-50: see benchmarks/gpu/h200.
_STEPS_WORTH_XLA = 1000


class Start(NamedTuple):
    """Where a process begins.

    Attributes:
      step: weight updates before it.
      last_step: those at which the run ends; ``step``: nothing is left to train.
      evaluations: so far.
      data_has_changed: whether the training images have, since the checkpoint.
      sums: the recorder's, by name; empty: there has been an evaluation at this step.
    """

    step: int
    last_step: int
    evaluations: Evaluations
    data_has_changed: bool
    sums: dict[str, dict[str, float]]


def segment_of(model: Classifier, step: int) -> Segment:
    """Returns the segment that begins now."""
    return Segment(
        step=step,
        devices=model.distribute_strategy.num_replicas_in_sync,
        runs_on=str(model_devices(model)),
        began=now(),
    )


def make_model(run: Run, custom: CustomModel | None) -> tuple[Classifier, list[str]]:
    """Builds the model and claims the run's folder for it.

    Args:
      run: the run.
      custom: the user's own network; None: the one that the configuration names.

    Returns:
      The model, and what changes where the run resumes: its schedule, its devices.

    Raises:
      UserError: if an option, the data or the hardware cannot be used, or the folder holds another
        run.
    """
    config, info = run.config, run.info
    _check_against_data(run)
    earlier = check_model_dir(config, info.labels)
    changes = []
    if earlier:
        check_resumable(config.model_dir)
        changes.append(change_of_schedule(run, earlier))
    replicas = run.strategy.num_replicas_in_sync
    auto_fusion = config.fusion == "auto" and replicas > 1
    fusion = load_fusion(run.strategy, config.model_dir) if auto_fusion else None
    model = build(run, custom, fusion=fusion, restored=earlier is not None)
    if earlier:
        segments = read_segments(config.model_dir)
        last = segments[-1] if segments else None
        here = segment_of(model, step=0)
        if config.accumulation_steps != earlier.accumulation_steps:
            _check_other_micro_batches(config, earlier, model)
        draws = bool(model.draws())
        changes.append(change_of_hardware(config, earlier, last, here, draws))
    # After building: invalid options must not claim the folder.
    values = {"class_weights": model.class_weights, "sampling": class_shares(config, info)}
    claim_model_dir(
        config,
        info.labels,
        info.preparation,
        {name: own.tolist() for name, own in values.items() if own is not None},
        chief=run.chief,
    )
    if auto_fusion and fusion is None and run.chief:
        assert model.all_reduce is not None
        save_fusion(model.all_reduce.fusion, replicas, config.model_dir)
    return model, [change for change in changes if change]


def _check_other_micro_batches(config: Config, earlier: Config, model: Classifier) -> None:
    """Checks that a run may resume with micro-batches of another size.

    Raises:
      UserError: if it would be another training.
    """
    with model.distribute_strategy.scope():
        alone = model.treats_images_alone()
    if not alone:
        raise UserError(
            f"{other_options(['accumulation_steps'], earlier, config)}. Only a network without "
            "batch norm and random layers, trained without mixup, CutMix and select_by_loss, "
            "resumes with other micro-batches"
        )


def restore(run: Run, model: Classifier, checkpoints: Checkpoints, clock: Clock) -> Start:
    """Restores the last checkpoint, if there is one.

    Raises:
      UserError: if there is no checkpoint of training, workers see different ones, or the number of
        training images or the teacher is another.
    """
    config, train = run.config, run.info.splits["train"]
    state = checkpoints.restore()
    missing = {"step", "clock", "validation"} - (state or {}).keys()
    if state is not None and missing:
        raise UserError(
            f"the checkpoint in {config.model_dir} has no {', '.join(sorted(missing))}: "
            "it is not one of training; choose another --model_dir"
        )
    check_consistent(
        run.strategy,
        "where to start",
        f"resuming from step {state['step']}" if state else "starting a new run",
        f"--model_dir={config.model_dir} must be a directory that all workers share",
    )
    if state is None:
        return Start(
            0,
            run.total_steps,
            Evaluations(best_metric=config.best_metric),
            data_has_changed=False,
            sums={},
        )
    # Another number of images changes the steps in an epoch, and so the learning rates.
    examples = state.get("train_examples", train.examples)
    if examples != train.examples:
        raise UserError(
            f"{config.data_dir} has {train.examples} training images, but the run "
            f"in {config.model_dir} started with {examples}; use those, or start a new "
            "run from its weights: another --model_dir, "
            f"--initial_weights={config.model_dir}"
        )
    if not model.teacher and state.get("teacher_checksum") is not None:
        raise UserError(
            f"the run in {config.model_dir} learns from a teacher: give its model_dir as --teacher"
        )
    if model.teacher and state.get("teacher_checksum") != model.teacher.checksum:
        raise UserError(
            f"the teacher in {config.teacher} has other weights than those from which the run in "
            f"{config.model_dir} has learned: give those back, or start a new run from its "
            f"weights: another --model_dir, --initial_weights={config.model_dir}"
        )
    clock.restore(state["clock"])
    evaluations = Evaluations.from_state(state, config.best_metric)
    # A run that ended early stays finished.
    last_step = state["step"] if evaluations.reason_to_stop(config) else run.total_steps
    # Checkpoints of earlier versions have no checksum.
    changed = (state.get("train_checksum") or train.checksum) != train.checksum
    # Earlier versions kept none.
    names: list[str] = [name for name in ("sums", "row_sums") if name in state]
    sums = {name: state[name] for name in names}
    return Start(state["step"], last_step, evaluations, changed, sums)


def make_loggers(
    run: Run,
    model: Classifier,
    start: Start,
    board: TensorBoard | None,
    callbacks: Sequence[keras.callbacks.Callback],
    eval_every: int,
) -> list[Logger]:
    """Returns what follows a run from where it begins; most of it only in the chief.

    Args:
      run: the run.
      model: of it.
      start: where it begins.
      board: TensorBoard's files; None: none.
      callbacks: of the user; some also take rows.
      eval_every: steps between evaluations.
    """
    config, (step, last_step, *_) = run.config, start
    loggers: list[Logger] = []
    model.stop_training = False  # as a callback sets it
    if callbacks:
        loggers.append(KerasCallbacks(callbacks, model, eval_every, last_step))
    if not run.chief:
        return loggers
    if step < last_step:
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
                run, step=step, batch_norm_examples=batch_norm_images(run), last_step=last_step
            )
        )
    return loggers


def say_what_begins(run: Run, model: Classifier, start: Start, changes: Sequence[str]) -> None:
    """Prints a run's first line and, where it resumes, what is not as before."""
    config, trains = run.config, start.step < start.last_step
    if trains:
        for change in changes:
            say(f"{config.model_dir} resumes {change}")
    if start.data_has_changed and trains:
        say(
            f"{config.data_dir} has changed since the last checkpoint (the checksums in its "
            "manifest.json): unless only JPEG indexes were added, the remaining steps train on "
            "other images"
        )
    if trains:
        say(first_line_of(run, model, start.step))
        if gains_by_xla(run, start):
            say(
                "this run is without XLA: on one H200 --xla made steps of ResNet-50 2.5 times as "
                "fast, after a minute of compilation (docs/gpu.md)"
            )
    else:
        early = start.evaluations.reason_to_stop(config)
        reason = f", {early}" if start.step < run.total_steps else ""
        say(
            f"{config.model_dir} holds this run, finished at step {start.step} of "
            f"{run.total_steps}{reason}: nothing is left to train"
        )
    lost = lost_best(config.model_dir, start.evaluations.best, config.best_metric)
    if lost and config.keep_best:
        say(f"{lost}; only better ones will be kept")


def gains_by_xla(run: Run, start: Start) -> bool:
    """Returns whether a run without XLA would end sooner with it, as far as was measured.

    Args:
      run: the run.
      start: where it begins.
    """
    config, strategy = run.config, run.strategy
    steps = start.last_step - start.step
    if config.xla or config.deterministic or steps < _STEPS_WORTH_XLA:
        return False
    if config.pipeline_stages > 1 or strategy.num_replicas_in_sync > 1:
        return False
    (device,) = devices_of(strategy)
    return tf.DeviceSpec.from_string(device).device_type == "GPU"


def _check_against_data(run: Run) -> None:
    """Checks the options whose effect depends on the data.

    Raises:
      UserError: if one goes beyond the end of the run.
    """
    config = run.config
    if config.profile_steps and config.profile_steps[-1] > run.total_steps:
        raise UserError(
            f"profile_steps goes to step {config.profile_steps[-1]}, but the run has "
            f"{run.total_steps} steps"
        )
    for name in ("stop_at_accuracy", "early_stopping", "keep_best"):
        if "validation" not in run.info.splits and (value := getattr(config, name)):
            warnings.warn(
                f"{name}={option_text(value)} has no effect: {run.info.name} has no validation "
                "images",
                stacklevel=2,
            )
