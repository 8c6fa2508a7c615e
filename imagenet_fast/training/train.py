"""A training run, from its configuration to its summary."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import say
from imagenet_fast.config import Config
from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.distribute.consistency import check_same_options
from imagenet_fast.distribute.strategy import check_gpus_are_used
from imagenet_fast.models import network_of
from imagenet_fast.models.custom import CustomModel
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints, restore_weights
from imagenet_fast.training.checkpoints.model_dir import (
    alone_in,
    kept_step,
)
from imagenet_fast.training.compile_cache import CompileCache, cache_flags
from imagenet_fast.training.evaluate import Evaluation
from imagenet_fast.training.failures import errors_explained
from imagenet_fast.training.finish import finish
from imagenet_fast.training.first_line import device_count
from imagenet_fast.training.logs.clock import Clock
from imagenet_fast.training.logs.keras_callbacks import KerasCallbacks
from imagenet_fast.training.logs.loggers import make_loggers
from imagenet_fast.training.logs.recorder import Recorder
from imagenet_fast.training.logs.tensorboard import TensorBoard
from imagenet_fast.training.program import Program
from imagenet_fast.training.report.input_images import make_input_images
from imagenet_fast.training.report.saved_images import (
    load_inputs,
    remove_error_analysis,
    save_inputs,
)
from imagenet_fast.training.run import Run, make_run
from imagenet_fast.training.start import make_model, restore, say_what_begins


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
        the run, which can be resumed. Those of
        :mod:`imagenet_fast.training.logs.trackers` get all rows of ``metrics.jsonl``.

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
        run = make_run(config, model)
        check_same_options(run.config, run.strategy)
        training = _Training(run, model, compile_cache)
        try:
            with alone_in(config.model_dir) if run.chief else contextlib.nullcontext():
                summary = training.train(callbacks)
            if isinstance(model, keras.Model):
                training.copy_weights_to(model)
            return summary
        finally:
            training.close()


class _Training:
    """This process' part of a run.

    Args:
      run: the run.
      custom: the user's own network; None: the one that the configuration names.
      compile_cache: gets what is compiled.
    """

    def __init__(self, run: Run, custom: CustomModel | None, compile_cache: CompileCache) -> None:
        config = run.config
        self.run, self.config, self.clock = run, config, Clock()
        self.compile_cache = compile_cache
        self.model, self.schedule_change = make_model(run, custom)
        self.checkpoints = Checkpoints(self.model, config)
        self.board = TensorBoard(config.model_dir) if run.chief and config.tensorboard else None
        self.log_every, self.eval_every, self.save_every = (
            max(1, run.steps(every))
            for every in (config.log_every, config.eval_every, config.checkpoint_every)
        )
        self.eval_every = min(self.eval_every, run.total_steps)
        self.size_changes = [run.steps(until) for _, until in config.sizes_until]

    def train(self, callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, Any]:
        """Trains from the last checkpoint to the end and returns the summary."""
        run, config = self.run, self.config
        start = restore(run, self.checkpoints, self.clock)
        step, last_step, evaluations, _ = start
        trains = step < last_step
        if run.chief:
            say_what_begins(run, self.model, start, self.schedule_change)
        self.callbacks = KerasCallbacks(callbacks, self.model, self.eval_every, last_step)
        self.loggers = make_loggers(
            run,
            self.callbacks,
            self.board,
            step=step,
            last_step=last_step,
            devices=device_count(self.model),
            given=callbacks,
        )
        self.recorder = Recorder(
            self.model,
            self.clock,
            self.loggers,
            evaluations,
            step=step,
            steps_per_epoch=run.steps_per_epoch,
            batch_size=config.batch_size,
            max_bad_images=config.max_bad_images,
            evaluated_examples=run.examples("validation"),
            model_dir=config.model_dir,
        )
        try:
            for logger in self.loggers:
                logger.before_images()
            if trains:
                self._save_input_images(step)
                with run.strategy.scope():
                    self._take_steps(last_step)
            early = evaluations.reason_to_stop(config)
            if not early and self.callbacks.stop:
                early = "by a Keras callback"
            reached = config.reaches_target(evaluations.last.get("top1"))
            finished = self.recorder.step == run.total_steps
            for logger in self.loggers:
                logger.finish(reached if config.stop_at_accuracy else finished)
        finally:
            for logger in self.loggers:
                if logger is not self.board:  # which gets the error analysis at the end
                    logger.close()
        step = self.recorder.step
        stopped = early if step < run.total_steps else ""
        if run.chief and trains and stopped:
            say(f"the run ends at step {step} of {run.total_steps}, {stopped}")
        examines = config.examine and run.examples("validation") > 0
        return finish(
            run,
            self.model,
            self.clock,
            self._evaluation if examines else None,
            self.board,
            step=step,
            trained=trains,
            stopped=stopped,
        )

    def _take_steps(self, last_step: int) -> None:
        """The training loop: steps, and between them rows of the log, evaluations, checkpoints."""
        recorder, clock, program = self.recorder, self.clock, None
        step, epoch_ends, stops = recorder.step, True, False
        for logger in self.loggers:
            logger.before_training()
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
            epoch_ends = step % self.eval_every == 0 or step == last_step or self.callbacks.stop
            saves = step % self.save_every == 0 or step == self.run.total_steps
            if epoch_ends or saves or step % self.log_every == 0 or step in self.size_changes:
                recorder.read()
            if epoch_ends:
                clock.stop()
                self._evaluate(step)
                for logger in self.loggers:
                    logger.after_epoch()
                early = recorder.evaluations.reason_to_stop(self.config)
                stops = self.callbacks.stop or bool(early)
            if saves or stops:
                self._save(step)
        for logger in self.loggers:
            logger.after_training()

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
            every.append(self.run.steps_per_epoch)
        once = [last_step, *self.size_changes]
        if self.config.profile_steps:
            first, last = self.config.profile_steps
            once += [first - 1, last]
        return min(*(step + n - step % n for n in every), *(at for at in once if at > step))

    def _evaluate(self, step: int) -> None:
        """Evaluates the model on all validation images, if there are any, and keeps the best."""
        if self.run.examples("validation"):
            metrics = self._evaluation.take(step, self.loggers)
            self.recorder.evaluated(metrics)
            if self.config.keep_best and self.recorder.evaluations.best["step"] == step:
                with self.clock.paused():
                    self.checkpoints.save_best(step, self._state())

    @functools.cached_property
    def _evaluation(self) -> Evaluation:
        """Of the validation images, which there must be."""
        return Evaluation(self.run, self.model, keeps_predictions=self.config.examine)

    def _save(self, step: int) -> None:
        """Saves a checkpoint: after an evaluation of the same step, which it has then."""
        with self.clock.paused():
            for logger in self.loggers:
                logger.flush()
            self.checkpoints.save(step, self._state())

    def _state(self) -> dict[str, Any]:
        """Returns what a checkpoint has beside variables."""
        train = self.run.info.splits["train"]
        return {
            "step": self.recorder.step,
            "train_examples": train.examples,
            "train_checksum": train.checksum,
            "clock": self.clock.state(),
            **self.recorder.evaluations.state(),
        }

    def _save_input_images(self, step: int) -> None:
        """Saves some input images, unless an earlier process has."""
        run, directory = self.run, self.config.model_dir
        if not run.chief:
            return
        remove_error_analysis(directory)  # It is from an earlier step.
        if not self.config.examine or self.config.synthetic:
            return
        if load_inputs(directory, run.info.num_classes) is None:
            inputs = make_input_images(self.config, run.info, self.model.mixer, step)
            save_inputs(directory, inputs, run.info.labels, step, self.board)

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
