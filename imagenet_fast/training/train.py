"""A training run, from its configuration to its summary."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import option_text
from imagenet_fast.config import Config
from imagenet_fast.data import bad_images
from imagenet_fast.data.info import DatasetInfo, read_info
from imagenet_fast.data.order import part_of
from imagenet_fast.data.pipeline import (
    distributed_dataset,
    evaluation_steps,
    steps_per_epoch,
)
from imagenet_fast.data.sampling import class_shares
from imagenet_fast.distribute.consistency import check_consistent, check_same_options
from imagenet_fast.distribute.devices import RunDevices, run_devices
from imagenet_fast.distribute.exchange import text_of_chief, wait_for_all
from imagenet_fast.distribute.strategy import check_gpus_are_used, devices_of, make_strategy
from imagenet_fast.distribute.workers import is_chief, worker_place
from imagenet_fast.models import network_of
from imagenet_fast.models.custom import CustomModel
from imagenet_fast.training.build import build_model, with_model
from imagenet_fast.training.checkpoint import Checkpoints, restore_weights
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.compile_cache import CompileCache, cache_flags
from imagenet_fast.training.evaluations import Evaluations
from imagenet_fast.training.failures import errors_explained
from imagenet_fast.training.fusion_trials import load_fusion, save_fusion
from imagenet_fast.training.keras_callbacks import KerasCallbacks
from imagenet_fast.training.logger import Logger
from imagenet_fast.training.metrics_file import JsonLines
from imagenet_fast.training.mlperf_log import MLPerfLog
from imagenet_fast.training.model_dir import (
    CHECKPOINTS,
    alone_in,
    check_model_dir,
    claim_model_dir,
    kept_step,
    latest_checkpoint,
    lost_best,
)
from imagenet_fast.training.profiler import Profiler
from imagenet_fast.training.program import Program
from imagenet_fast.training.progress_bar import ProgressBar
from imagenet_fast.training.recorder import Recorder
from imagenet_fast.training.report.error_analysis import analyze_errors
from imagenet_fast.training.report.input_images import make_input_images
from imagenet_fast.training.report.saved_images import (
    load_error_analysis,
    load_inputs,
    remove_error_analysis,
    save_error_analysis,
    save_inputs,
)
from imagenet_fast.training.run_config import directory_of
from imagenet_fast.training.run_summary import batch_norm_images, run_summary
from imagenet_fast.training.schedule import total_steps
from imagenet_fast.training.schedule_change import change_of_schedule
from imagenet_fast.training.stall_watch import StallWatch
from imagenet_fast.training.summary import make_summary, read_summary, write_summary
from imagenet_fast.training.tensorboard import TensorBoard, tensorboard_folder
from imagenet_fast.training.trackers import RowLogger


def train(
    config: Config,
    *,
    model: CustomModel | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> dict[str, Any]:
    """Trains as ``config`` describes and writes everything to ``model_dir``.

    A run there is resumed from its last checkpoint and ends with the same weights as an
    uninterrupted run. ``model_dir`` gets ``config.json``, ``labels.txt``, ``metrics.jsonl``,
    ``summary.json``, ``report.html``, ``checkpoints/`` and ``tensorboard/``; ``input_images.npz``
    and ``examination.npz`` unless ``examine`` is off; ``best/`` with ``keep_best``; ``mlperf.log``
    with ``mlperf_log``;
    ``fusion.json`` with ``fusion=auto``; ``bad_images.jsonl`` if images were unreadable, and
    ``damaged_checkpoints.jsonl`` if checkpoints were set aside.

    Args:
      config: of the run.
      model: your own network instead of ``config.model``, as in
        :func:`imagenet_fast.build_model`. A Keras model gets the trained weights at
        the end, averaged ones if the run averages them, and those of the best evaluation with
        ``keep_best``.
      callbacks: Keras callbacks. Their epochs last from one evaluation to the next, and their
        batches are calls of ``steps_per_call`` steps. One that sets ``model.stop_training`` ends
        the run, which can be resumed. Those of :mod:`imagenet_fast.training.trackers` get all rows
        of ``metrics.jsonl``.

    Returns:
      The summary, as in ``summary.json``; only the chief has evaluation results.

    Raises:
      UserError: if an option, the data or the hardware cannot be used, a shard becomes unreadable,
        training diverges, or another worker stops.
    """
    if not config.model_dir:
        raise UserError("no directory for the results: give --model_dir")
    explained = errors_explained("resumes from the last checkpoint", config.pipeline_servers)
    with explained, cache_flags(config):
        compile_cache = CompileCache(config)
        check_gpus_are_used(config)
        config, info = with_model(config, model), read_info(config)
        strategy = make_strategy(config)
        check_same_options(config, strategy)
        run = _Run(config, info, strategy, model, compile_cache)
        try:
            with alone_in(config.model_dir) if run.chief else contextlib.nullcontext():
                summary = run.train(callbacks)
            if isinstance(model, keras.Model):
                run.copy_weights_to(model)
            return summary
        finally:
            run.close()


class _Run:
    """This process' part of a run."""

    def __init__(
        self,
        config: Config,
        info: DatasetInfo,
        strategy: tf.distribute.Strategy,
        custom: CustomModel | None,
        compile_cache: CompileCache,
    ) -> None:
        self.config, self.info, self.strategy = config, info, strategy
        self.compile_cache = compile_cache
        self.chief = is_chief(strategy)
        self.steps_per_epoch = steps_per_epoch(info, config)
        self.total_steps = total_steps(config, self.steps_per_epoch)
        self.train_examples = info.splits["train"].examples
        self.train_checksum = info.splits["train"].checksum
        validation = info.splits.get("validation")
        self.validation_examples = validation.examples if validation else 0
        if config.profile_steps and config.profile_steps[-1] > self.total_steps:
            raise UserError(
                f"profile_steps goes to step {config.profile_steps[-1]}, but the run has "
                f"{self.total_steps} steps"
            )
        for name in ("stop_at_accuracy", "early_stopping", "keep_best"):
            if validation is None and (value := getattr(config, name)):
                warnings.warn(
                    f"{name}={option_text(value)} has no effect: {info.name} has no validation "
                    "images",
                    stacklevel=2,
                )
        check_model_dir(config, info.labels)
        self.schedule_change = change_of_schedule(config, self.steps_per_epoch)
        self.data_has_changed = False  # since the checkpoint that is restored
        self.log_every, self.eval_every, self.save_every = (
            max(1, self._steps(every))
            for every in (config.log_every, config.eval_every, config.checkpoint_every)
        )
        self.eval_every = min(self.eval_every, self.total_steps)
        self.size_changes = [self._steps(until) for _, until in config.sizes_until]
        self.clock = Clock()
        auto_fusion = config.fusion == "auto" and strategy.num_replicas_in_sync > 1
        fusion = load_fusion(strategy, config.model_dir) if auto_fusion else None
        restored = latest_checkpoint(directory_of(config.model_dir) / CHECKPOINTS) is not None
        self.model = build_model(config, model=custom, fusion=fusion, restored=restored)
        # After building: invalid options must not claim the directory.
        values = {
            "class_weights": self.model.class_weights,
            "sampling": class_shares(config, info),
        }
        claim_model_dir(
            config,
            info.labels,
            info.preparation,
            {name: own.tolist() for name, own in values.items() if own is not None},
        )
        if auto_fusion and fusion is None and self.chief:
            assert self.model.all_reduce is not None
            chosen = self.model.all_reduce.fusion
            save_fusion(chosen, strategy.num_replicas_in_sync, config.model_dir)
        self.checkpoints = Checkpoints(self.model, config)
        has_board = self.chief and config.tensorboard
        self.board = TensorBoard(config.model_dir) if has_board else None

    def _steps(self, duration: Duration) -> int:
        return duration.steps(self.steps_per_epoch, self.config.batch_size)

    def train(self, callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, Any]:
        step, evaluations = self._restore()
        # A run that ended early stays finished.
        early = evaluations.reason_to_stop(self.config)
        last_step = step if early else self.total_steps
        trains = step < last_step
        if self.chief:
            if self.schedule_change and trains:
                _log(f"{self.config.model_dir} resumes {self.schedule_change}")
            if self.data_has_changed and trains:
                _log(
                    f"{self.config.data_dir} has changed since the last checkpoint (the checksums "
                    "in its manifest.json): unless only JPEG indexes were added, the remaining "
                    "steps train on other images"
                )
            _log(self._summary_line(step) if trains else self._finished_line(step, early))
            lost = lost_best(self.config.model_dir, evaluations.best)
            if lost and self.config.keep_best:
                _log(f"{lost}; only better ones will be kept")
        self.callbacks = KerasCallbacks(callbacks, self.model, self.eval_every, last_step)
        self.loggers = self._loggers(step, last_step, callbacks)
        self.recorder = Recorder(
            self.model,
            self.clock,
            self.loggers,
            evaluations,
            step=step,
            steps_per_epoch=self.steps_per_epoch,
            batch_size=self.config.batch_size,
            max_bad_images=self.config.max_bad_images,
            evaluated_examples=self.validation_examples,
            model_dir=self.config.model_dir,
        )
        mlperf_log = next((log for log in self.loggers if isinstance(log, MLPerfLog)), None)
        if mlperf_log:
            mlperf_log.start()
        try:
            if trains:
                self._before_training(step)
                with self.strategy.scope():
                    self._take_steps(last_step)
            if mlperf_log:
                reached = self.config.reaches_target(evaluations.last.get("top1"))
                finished = self.recorder.step == self.total_steps
                mlperf_log.finish(reached if self.config.stop_at_accuracy else finished)
        finally:
            for logger in self.loggers:
                if logger is not self.board:  # which gets the error analysis at the end
                    logger.close()
        early = evaluations.reason_to_stop(self.config)
        stopped = early if self.recorder.step < self.total_steps else ""
        if self.chief and trains and stopped:
            _log(f"the run ends at step {self.recorder.step} of {self.total_steps}, {stopped}")
        return self._finish(self.recorder.step, trains, stopped)

    def _take_steps(self, last_step: int) -> None:
        """The training loop: steps, and between them rows of the log, evaluations, checkpoints."""
        recorder, clock, callbacks, program = self.recorder, self.clock, self.callbacks, None
        step, epoch_ends, stops = recorder.step, True, False
        callbacks.begin_training()
        while step < last_step and not stops:
            if program is None or step in self.size_changes:
                if program is not None:
                    clock.compiling()
                program = self._training_program(step)
            compiles = not program.is_compiled
            if not compiles:
                clock.start()
            for logger in self.loggers:
                logger.before_steps(step)
            if epoch_ends:  # here, because a callback may have evaluated the model
                recorder.restart()
            step, diverged = program.take(step, self._next_event(step, last_step))
            if compiles:
                self.compile_cache.save()
            for logger in self.loggers:
                logger.after_steps(step)
            recorder.count(step, diverged, compiled=compiles)
            epoch_ends = step % self.eval_every == 0 or step == last_step or callbacks.stop
            saves = step % self.save_every == 0 or step == self.total_steps
            if epoch_ends or saves or step % self.log_every == 0 or step in self.size_changes:
                recorder.read()
            if epoch_ends:
                clock.stop()
                self._evaluate(step)
                callbacks.end_epoch()
                stops = callbacks.stop or bool(recorder.evaluations.reason_to_stop(self.config))
            if saves or stops:
                self._save(step)
        callbacks.end_training()

    def _training_program(self, step: int) -> Program:
        """Returns the program of the steps after ``step``, on images of their size."""
        self.model.make_slots()  # otherwise made in the first step, and a second trace after it
        on_device = self.config.data_on_device
        batches = None if on_device else distributed_dataset(self.config, "train", step)
        step_of = self.model.train_step
        return Program(self.model, step_of, self.config, batches, xla=self.config.xla)

    def _next_event(self, step: int, last_step: int) -> int:
        """Returns the step after which there is something to do for the host next."""
        every = [self.log_every, self.eval_every, self.save_every]
        if self.config.mlperf_log:
            every.append(self.steps_per_epoch)
        once = [last_step, *self.size_changes]
        if self.config.profile_steps:
            first, last = self.config.profile_steps
            once += [first - 1, last]
        return min(*(step + n - step % n for n in every), *(at for at in once if at > step))

    def _evaluate(self, step: int) -> None:
        """Evaluates the model on all validation images, if there are any, and keeps the best."""
        recorder, model = self.recorder, self.model
        if self.validation_examples:
            for logger in self.loggers:
                logger.before_evaluation(step)
            steps = evaluation_steps(self.info, self.config, self.strategy)
            with model.evaluated_weights():
                model.reset_metrics()
                self._evaluation_program.restart()
                done = 0
                while done < steps:
                    for logger in self.loggers:
                        logger.before_evaluation_steps(done)
                    done, _ = self._evaluation_program.take(done, steps)
                    for logger in self.loggers:
                        logger.after_evaluation_steps(done)
            for logger in self.loggers:
                logger.after_evaluation()
            recorder.evaluated(model.metric_sums.results())
            if self.config.keep_best and recorder.evaluations.best["step"] == step:
                with self.clock.paused():
                    self.checkpoints.save_best(step, self._state())

    @functools.cached_property
    def _evaluation_program(self) -> Program:
        on_device = self.config.data_on_device
        batches = None if on_device else distributed_dataset(self.config, "validation")
        return Program(self.model, self.model.test_step, self.config, batches)

    def _save(self, step: int) -> None:
        """Saves a checkpoint: after an evaluation of the same step, which it has then."""
        with self.clock.paused():
            for logger in self.loggers:
                logger.flush()
            self.checkpoints.save(step, self._state())

    def _state(self) -> dict[str, Any]:
        """Returns what a checkpoint has beside variables."""
        return {
            "step": self.recorder.step,
            "train_examples": self.train_examples,
            "train_checksum": self.train_checksum,
            "clock": self.clock.state(),
            **self.recorder.evaluations.state(),
        }

    def copy_weights_to(self, model: keras.Model) -> None:
        """Gives the user's model the weights that evaluation uses, the best ones with keep_best."""
        if self.config.keep_best and kept_step(self.config.model_dir) is not None:
            restore_weights(self.model, self.config.model_dir, "best")
        with self.model.evaluated_weights():
            weights = network_of(self.model).get_weights()
        if not model.built:
            model.build((None, *self.model.input_shape[1:]))
        model.set_weights(weights)

    def close(self) -> None:
        """Closes TensorBoard's files, keeps compiled programs and removes temporary checkpoints."""
        self.compile_cache.save()
        if self.board:
            self.board.close()
        self.checkpoints.close()

    def _restore(self) -> tuple[int, Evaluations]:
        """Returns the step from which the run resumes, and its evaluations."""
        state = self.checkpoints.restore()
        missing = {"step", "clock", "validation"} - (state or {}).keys()
        if state is not None and missing:
            raise UserError(
                f"the checkpoint in {self.config.model_dir} has no {', '.join(sorted(missing))}: "
                "it is not one of training; choose another --model_dir"
            )
        check_consistent(
            self.strategy,
            "where to start",
            f"resuming from step {state['step']}" if state else "starting a new run",
            f"--model_dir={self.config.model_dir} must be a directory that all workers share",
        )
        if state is None:
            return 0, Evaluations()
        # Another number of images changes the steps in an epoch, and so the learning rates.
        examples = state.get("train_examples", self.train_examples)
        if examples != self.train_examples:
            raise UserError(
                f"{self.config.data_dir} has {self.train_examples} training images, but the run "
                f"in {self.config.model_dir} started with {examples}; use those, or start a new "
                "run from its weights: another --model_dir, "
                f"--initial_weights={self.config.model_dir}"
            )
        # Checkpoints of earlier versions have no checksum.
        checksum = state.get("train_checksum") or self.train_checksum
        self.data_has_changed = checksum != self.train_checksum
        self.clock.restore(state["clock"])
        return state["step"], Evaluations.from_state(state)

    def _run_devices(self) -> RunDevices:
        """Returns the devices that compute."""
        pipeline = self.model.pipeline
        names = devices_of(self.strategy) if pipeline is None else pipeline.devices
        return run_devices(self.strategy, names)

    def _device_count(self) -> int:
        pipeline = self.model.pipeline
        per_replica = 1 if pipeline is None else len(pipeline.devices)
        return self.strategy.num_replicas_in_sync * per_replica

    def _loggers(
        self, step: int, last_step: int, callbacks: Sequence[keras.callbacks.Callback]
    ) -> list[Logger]:
        """Returns what follows the run from a step on; most of it only in the chief."""
        config, trains = self.config, step < last_step
        loggers: list[Logger | None] = [self.callbacks]
        if trains:
            loggers.append(StallWatch(self._shard_paths()))
        if not self.chief:
            return [logger for logger in loggers if logger]
        if trains:
            bar = ProgressBar(
                step,
                self.total_steps,
                batch_size=config.batch_size,
                devices=self._device_count(),
                classes=self.info.num_classes,
            )
            loggers += [JsonLines(config.model_dir, step), bar, self.board]
            if config.profile_steps:
                folder = tensorboard_folder(config.model_dir, "train")
                loggers.append(Profiler(folder, *config.profile_steps))
        loggers += [callback for callback in callbacks if isinstance(callback, RowLogger)]
        loggers.append(self._mlperf_log(step, last_step))
        return [logger for logger in loggers if logger]

    def _mlperf_log(self, step: int, last_step: int) -> MLPerfLog | None:
        config = self.config
        if not config.mlperf_log:
            return None
        return MLPerfLog(
            config,
            step=step,
            steps_per_epoch=self.steps_per_epoch,
            train_examples=self.train_examples,
            eval_examples=self.validation_examples,
            batch_norm_examples=batch_norm_images(config, self.strategy),
            last_step=last_step,
        )

    def _shard_paths(self) -> list[str]:
        """Returns the files that this process reads."""
        pipelines, pipeline = worker_place(self.strategy)
        splits = [split for split in self.info.splits.values() if split.paths]  # none if synthetic
        parts = (part_of(split, self.config, pipelines, pipeline) for split in splits)
        return [path for part in parts for path in part.paths]

    def _summary_line(self, step: int) -> str:
        return run_summary(
            config=self.config,
            info=self.info,
            model=self.model,
            devices=self._run_devices(),
            first_step=step,
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
        )

    def _finished_line(self, step: int, early: str) -> str:
        reason = f", {early}" if step < self.total_steps else ""
        return (
            f"{self.config.model_dir} holds this run, finished at step {step} of "
            f"{self.total_steps}{reason}: nothing is left to train"
        )

    def _before_training(self, step: int) -> None:
        """Saves some input images, unless an earlier process has."""
        config, directory, classes = self.config, self.config.model_dir, self.info.num_classes
        if not self.chief:
            return
        remove_error_analysis(directory)  # It is from an earlier step.
        if config.examine and not config.synthetic and load_inputs(directory, classes) is None:
            inputs = make_input_images(config, self.info, self.model.mixer, step)
            save_inputs(directory, inputs, self.info.labels, step, self.board)

    def _analyze_errors(self, step: int) -> None:
        """Saves an error analysis, unless an earlier process has."""
        config, directory = self.config, self.config.model_dir
        if not config.examine or not self.validation_examples:
            return
        missing = load_error_analysis(directory, self.info.num_classes) is None
        # Other machines may not see the chief's latest files: the chief decides.
        if text_of_chief(self.strategy, str(missing)) == str(True):
            if self.chief:
                images = f"{self.validation_examples} validation images"
                _log(f"analyzing errors: predicting {images} once more (--noexamine skips it)")
            analysis = analyze_errors(self.model, config, self.info, step)
            if self.chief:
                save_error_analysis(directory, analysis, self.info.labels, self.board)

    def _finish(self, step: int, trained: bool, stopped: str) -> dict[str, Any]:
        """Writes summary and report; a run that was already finished keeps its summary."""
        directory = self.config.model_dir
        summary = None if trained else read_summary(directory)
        if summary is None:
            summary = make_summary(
                self.config,
                self.model,
                self.clock,
                self._run_devices(),
                step=step,
                steps_per_epoch=self.steps_per_epoch,
                devices=self._device_count(),
                chief=self.chief,
                stopped=stopped,
            )
            summary["data"] = self.info.name
        if self.chief:
            write_summary(directory, summary)
        self._analyze_errors(step)
        if self.chief:
            # Imported here, because it imports matplotlib.
            from imagenet_fast.training.report.page import write_report

            write_report(self.config, summary, self.info.labels)
            unreadable = bad_images.describe(directory)
            if unreadable:
                _log(unreadable)
        # Otherwise the other workers would report one that exits first as lost.
        wait_for_all(self.strategy)
        return summary


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
