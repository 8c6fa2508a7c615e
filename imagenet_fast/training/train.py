"""A training run, from its configuration to its summary."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import say
from imagenet_fast.config import Config, run_in
from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.distribute.consistency import check_same_options
from imagenet_fast.distribute.exchange import any_worker
from imagenet_fast.distribute.strategy import check_gpus_are_used
from imagenet_fast.models import network_of
from imagenet_fast.models.custom import CustomModel
from imagenet_fast.training.build.network import set_named_batch_norms
from imagenet_fast.training.build.selection import selected_images
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints, restore_weights
from imagenet_fast.training.checkpoints.config_file import as_begun
from imagenet_fast.training.checkpoints.model_dir import alone_in, kept_step
from imagenet_fast.training.checkpoints.thresholds import (
    Thresholds,
    read_thresholds,
    write_thresholds,
)
from imagenet_fast.training.compile_cache import CompileCache, cache_flags
from imagenet_fast.training.evaluate import Evaluator
from imagenet_fast.training.failures import errors_explained, memory_explained
from imagenet_fast.training.finish import finish
from imagenet_fast.training.interrupt import Interrupt
from imagenet_fast.training.logs.clock import Clock
from imagenet_fast.training.logs.recorder import Recorder
from imagenet_fast.training.logs.tensorboard import TensorBoard
from imagenet_fast.training.program import Program
from imagenet_fast.training.report.input_images import make_input_images
from imagenet_fast.training.report.multi_label import average_precisions, best_thresholds
from imagenet_fast.training.report.saved_images import (
    load_inputs,
    remove_error_analysis,
    save_inputs,
)
from imagenet_fast.training.run import Run, make_run
from imagenet_fast.training.segments import add_segment
from imagenet_fast.training.start import (
    Start,
    make_loggers,
    make_model,
    restore,
    say_what_begins,
    segment_of,
)
from imagenet_fast.training.step.classifier import Classifier


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
    with ``mlperf_log``; ``fusion.json`` with ``fusion=auto``; ``bad_images.jsonl`` if images were
    unreadable, and ``damaged_checkpoints.jsonl`` if checkpoints were set aside.

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
      KeyboardInterrupt: after Ctrl-C, with a checkpoint of the last step.
      SystemExit: after SIGTERM, or a signal to another worker, also with a checkpoint.
    """
    if not config.model_dir:
        raise UserError("no directory for the results: give --model_dir")
    config = as_begun(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            errors_explained("resumes from the last checkpoint", config.pipeline_servers)
        )
        stack.enter_context(cache_flags(config))
        compile_cache = CompileCache(config)
        check_gpus_are_used(config)
        run = make_run(config, model)
        images = run.config.batch_size // run.replicas
        selected = selected_images(run.config, images)
        stack.enter_context(memory_explained(run.config, images, selected))
        check_same_options(run.config, run.strategy)
        clock = Clock()
        # A run that resumes is locked before its configuration is written anew, a new one only once
        # its folder has been made, when all is well.
        resumes = run_in(config.model_dir) is not None
        if run.chief and resumes:
            stack.enter_context(alone_in(config.model_dir))
        classifier, changes = make_model(run, model)
        stack.callback(compile_cache.save)
        checkpoints = Checkpoints(classifier, run.config)
        stack.callback(checkpoints.close)
        if run.chief and not resumes:
            stack.enter_context(alone_in(config.model_dir))
        start = restore(run, classifier, checkpoints, clock)
        if run.chief:
            say_what_begins(run, classifier, start, changes)
            if start.step < start.last_step:
                add_segment(run.config.model_dir, segment_of(classifier, start.step))
        board = TensorBoard(config.model_dir) if run.chief and config.tensorboard else None
        if board:
            stack.callback(board.close)
        training = _Training(
            run, classifier, clock, start, checkpoints, compile_cache, board, callbacks
        )
        summary = training.train()
        if isinstance(model, keras.Model):
            _copy_weights(config, classifier, model)
        return summary


class _Training:
    """This process' part of a run.

    Args:
      run: the run.
      model: what it trains.
      clock: measures it.
      start: where this process begins.
      checkpoints: of the model.
      compile_cache: gets what is compiled.
      board: TensorBoard's files; None: there are none.
      callbacks: of the user.
    """

    def __init__(
        self,
        run: Run,
        model: Classifier,
        clock: Clock,
        start: Start,
        checkpoints: Checkpoints,
        compile_cache: CompileCache,
        board: TensorBoard | None,
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> None:
        config = run.config
        self.run, self.config, self.model, self.clock = run, config, model, clock
        self.checkpoints, self.compile_cache, self.board = checkpoints, compile_cache, board
        self.last_step = start.last_step
        self.log_every, self.eval_every, self.save_every = (
            max(1, run.steps(every))
            for every in (config.log_every, config.eval_every, config.checkpoint_every)
        )
        self.eval_every = min(self.eval_every, run.total_steps)
        self.size_changes = [run.steps(until) for _, until in config.sizes_until]
        self.loggers = make_loggers(run, model, start, board, callbacks, self.eval_every)
        self.recorder = Recorder(
            run,
            model,
            clock,
            self.loggers,
            start.evaluations,
            step=start.step,
            **start.sums,
        )
        self._resumes_between_evaluations = bool(start.sums)
        self.interrupt = Interrupt(any_worker(run.strategy))

    def train(self) -> dict[str, Any]:
        """Trains to the end and returns the summary."""
        run, config, first_step = self.run, self.config, self.recorder.step
        trains = first_step < self.last_step
        try:
            for logger in self.loggers:
                logger.before_images()
            if trains:
                self._save_input_images(first_step)
                with run.strategy.scope(), self.interrupt.noted():
                    self._take_steps()
                self.interrupt.end()  # after a signal since its last look
            step = self.recorder.step
            reached = config.reaches_target(self.recorder.evaluations.last)
            success = reached if config.stop_at_accuracy else step == run.total_steps
            for logger in self.loggers:
                logger.finish(success)
        finally:
            for logger in self.loggers:
                if logger is not self.board:  # which gets the error analysis at the end
                    logger.close()
        stopped = self._reason_to_stop() if step < run.total_steps else ""
        if run.chief and trains and stopped:
            say(f"the run ends at step {step} of {run.total_steps}, {stopped}")
        # Images with several labels have no error analysis.
        examines = config.examine and run.examples("validation") > 0 and not run.info.multi_label
        return finish(
            run,
            self.model,
            self.clock,
            self._evaluator if examines else None,
            self.board,
            step=step,
            trained=trains,
            stopped=stopped,
        )

    def _take_steps(self) -> None:
        """The training loop: steps, and between them rows of the log, evaluations, checkpoints."""
        recorder, clock, program = self.recorder, self.clock, None
        step, last_step, stops = recorder.step, self.last_step, False
        epoch_ends = not self._resumes_between_evaluations
        for logger in self.loggers:
            logger.before_training()
        while step < last_step and not stops:
            if program is None or step in self.size_changes:
                self.interrupt.waits = False
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
            step, diverged = program.take(step, self._next_event(step))
            if compiles:
                self.compile_cache.save()
                self.interrupt.waits = True
            for logger in self.loggers:
                logger.after_steps(step)
            recorder.count(step, diverged, compiled=compiles)
            epoch_ends = (
                step % self.eval_every == 0 or step == last_step or self.model.stop_training
            )
            saves = step % self.save_every == 0 or step == self.run.total_steps
            if epoch_ends or saves or step % self.log_every == 0 or step in self.size_changes:
                recorder.read()
            if epoch_ends:
                clock.stop()
                self._evaluate(step)
                for logger in self.loggers:
                    logger.after_epoch()
                stops = bool(self._reason_to_stop())
            # As late as can be: what follows may be a program that compiles, or an evaluation.
            stops = stops or self.interrupt.came()
            if saves or stops:
                self._save(step, {} if epoch_ends else recorder.sums())
                stops = stops or self.interrupt.came()
        self.interrupt.end()
        for logger in self.loggers:
            logger.after_training()

    def _training_program(self, step: int) -> Program:
        """Returns the program of the steps after ``step``, on images of their size."""
        self.model.make_slots()  # otherwise made in the first step, and a second trace after it
        on_device = self.config.data_on_device
        batches = None if on_device else distributed_dataset(self.config, "train", step)
        step_of = self.model.train_step
        return Program(self.model, step_of, self.config, batches, xla=self.config.xla)

    def _next_event(self, step: int) -> int:
        """Returns the step after which there is something to do for the host next."""
        every = [self.log_every, self.eval_every, self.save_every]
        if self.config.mlperf_log:
            every.append(self.run.steps_per_epoch)
        once = [self.last_step, *self.size_changes]
        if self.config.profile_steps:
            first, last = self.config.profile_steps
            once += [first - 1, last]
        return min(*(step + n - step % n for n in every), *(at for at in once if at > step))

    def _reason_to_stop(self) -> str:
        """Returns why the run ends before its last step, as a clause; empty: it does not."""
        early = self.recorder.evaluations.reason_to_stop(self.config)
        return early or ("by a Keras callback" if self.model.stop_training else "")

    def _evaluate(self, step: int) -> None:
        """Evaluates the model on all validation images, if there are any, and keeps the best."""
        if self.run.examples("validation"):
            metrics = self._evaluator.evaluate(step, self.loggers)
            self.recorder.evaluated(metrics)
            is_best = self.recorder.evaluations.best["step"] == step
            if self.run.info.multi_label:
                self._save_thresholds(step, is_best)
            if self.config.keep_best and is_best:
                with self.clock.paused():
                    self.checkpoints.save_best(step, self._state())

    def _save_thresholds(self, step: int, is_best: bool) -> None:
        """Saves the thresholds of the last evaluation, in the chief."""
        directory, labels = self.config.model_dir, self.run.info.labels
        if not self.run.chief:
            return
        scores = self._evaluator.scores
        precisions = (None if p != p else p for p in average_precisions(*scores).tolist())
        chosen = dict(zip(labels, best_thresholds(*scores).tolist()))
        thresholds = Thresholds(step, chosen, dict(zip(labels, precisions)))
        kept = {**read_thresholds(directory), "last": thresholds}
        if self.config.keep_best and is_best:
            kept["best"] = thresholds
        write_thresholds(directory, kept)

    @functools.cached_property
    def _evaluator(self) -> Evaluator:
        """The evaluation of the validation images; only for data that has some."""
        return Evaluator(self.run, self.model, keeps_predictions=self.config.examine)

    def _save(self, step: int, sums: Mapping[str, Any]) -> None:
        """Saves a checkpoint; to be called after an evaluation of this step, which it has then.

        Args:
          step: weight updates so far.
          sums: of the recorder, unless there has been an evaluation at this step.
        """
        with self.clock.paused():
            for logger in self.loggers:
                logger.flush()
            self.checkpoints.save(step, {**self._state(), **sums})

    def _state(self) -> dict[str, Any]:
        """Returns what a checkpoint has beside variables."""
        train = self.run.info.splits["train"]
        return {
            "step": self.recorder.step,
            "train_examples": train.examples,
            "train_checksum": train.checksum,
            **({"teacher_checksum": self.model.teacher.checksum} if self.model.teacher else {}),
            "clock": self.clock.state(),
            **self.recorder.evaluations.state(),
        }

    def _save_input_images(self, step: int) -> None:
        """Saves some input images, unless an earlier process has."""
        run, directory = self.run, self.config.model_dir
        if not run.chief:
            return
        remove_error_analysis(directory)  # It is from an earlier step.
        if not self.config.examine or self.config.synthetic or run.info.multi_label:
            return
        if load_inputs(directory, run.info.num_classes) is None:
            inputs = make_input_images(run, self.model.mixer, step)
            save_inputs(directory, inputs, run.info.labels, step, self.board)


def _copy_weights(config: Config, trained: Classifier, model: keras.Model) -> None:
    """Gives the user's model the weights that evaluation uses, the best ones with keep_best."""
    if config.keep_best and kept_step(config.model_dir) is not None:
        restore_weights(trained, config.model_dir, "best")
    with trained.evaluated_weights():
        weights = network_of(trained).get_weights()
    if not model.built:
        model.build((None, *trained.input_shape[1:]))
    model.set_weights(weights)
    set_named_batch_norms(config, model)  # with which the weights were trained
