"""A training run from its configuration to its summary."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base import environment
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import write_file
from imagenet_fast.base.paths import Path, to_path
from imagenet_fast.config import Config
from imagenet_fast.data import bad_images
from imagenet_fast.data.info import DatasetInfo, read_info
from imagenet_fast.data.order import share_of
from imagenet_fast.data.pipeline import evaluation_steps, make_dataset, steps_per_epoch
from imagenet_fast.distribute.consistency import check_consistent, check_same_options
from imagenet_fast.distribute.devices import RunDevices, run_devices
from imagenet_fast.distribute.exchange import text_of_chief, wait_for_all
from imagenet_fast.distribute.strategy import check_gpus_are_used, devices_of, make_strategy
from imagenet_fast.distribute.workers import is_chief, worker_place
from imagenet_fast.training.build import build_model
from imagenet_fast.training.checkpoint import Checkpoints
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.damaged_checkpoints import damaged_checkpoints
from imagenet_fast.training.failures import errors_explained
from imagenet_fast.training.fusion_trials import load_fusion, save_fusion
from imagenet_fast.training.metrics_file import JsonLines, Row, read_rows
from imagenet_fast.training.mlperf_log import MLPerfLog
from imagenet_fast.training.model_dir import (
    CHECKPOINTS,
    alone_in,
    check_model_dir,
    claim_model_dir,
    directory_of,
    latest_checkpoint,
)
from imagenet_fast.training.profiler import Profiler
from imagenet_fast.training.progress_bar import ProgressBar
from imagenet_fast.training.recorder import Recorder
from imagenet_fast.training.report.examination import examine
from imagenet_fast.training.report.exhibits import (
    forget_examination,
    keep_examination,
    keep_inputs,
    load_examination,
    load_inputs,
)
from imagenet_fast.training.report.input_images import make_input_images
from imagenet_fast.training.run_summary import batch_norm_images, run_summary
from imagenet_fast.training.saver import Saver
from imagenet_fast.training.schedule import total_steps
from imagenet_fast.training.segments import segments
from imagenet_fast.training.stall_watch import StallWatch
from imagenet_fast.training.tensorboard import TensorBoard, tensorboard_folder

SUMMARY_FILE = "summary.json"


def train(config: Config, *, callbacks: Sequence[keras.callbacks.Callback] = ()) -> dict[str, Any]:
    """Trains as ``config`` says and writes all of it to ``model_dir``.

    A run found there goes on from its last checkpoint, to the same weights as if it had never
    stopped. ``model_dir`` gets ``config.json``, ``metrics.jsonl``, ``summary.json``,
    ``report.html``, ``checkpoints/`` and ``tensorboard/``, ``input_images.npz`` and
    ``examination.npz`` unless ``examine`` is off, ``mlperf.log`` if that is asked for,
    ``bad_images.jsonl`` if there are images that cannot be read, ``damaged_checkpoints.jsonl`` if
    checkpoints were set aside, and ``fusion.json`` with ``fusion=auto``.

    Args:
      config: what to train, and how.
      callbacks: called before the run's own. An epoch of theirs is the time between two
        evaluations; one that sets ``model.stop_training`` ends the run, which can be continued.

    Returns:
      The summary, as in ``summary.json``; what evaluation found is in the chief's alone.

    Raises:
      UserError: if anything the user gave cannot be used, a shard cannot be read any more,
        training diverges, or another worker stops.
    """
    if not config.model_dir:
        raise UserError("no place for the results: give --model_dir")
    with errors_explained("goes on from the last checkpoint", config.pipeline_servers):
        check_gpus_are_used(config)
        info = read_info(config)
        strategy = make_strategy(config)
        check_same_options(config, strategy)
        run = _Run(config, info, strategy)
        try:
            with alone_in(config.model_dir) if run.chief else contextlib.nullcontext():
                return run.train(callbacks)
        finally:
            run.close()


class _Run:
    """One process' part in a run."""

    def __init__(self, config: Config, info: DatasetInfo, strategy: tf.distribute.Strategy) -> None:
        self.config, self.info, self.strategy = config, info, strategy
        self.chief = is_chief(strategy)
        self.steps_per_epoch = steps_per_epoch(info, config)
        self.total_steps = total_steps(config, self.steps_per_epoch)
        self.train_examples = info.splits["train"].examples
        if config.profile_steps and config.profile_steps[-1] > self.total_steps:
            raise UserError(
                f"profile_steps goes to step {config.profile_steps[-1]}, but the run has "
                f"{self.total_steps} steps"
            )
        if config.stop_at_accuracy and "validation" not in info.splits:
            warnings.warn(
                f"stop_at_accuracy={config.stop_at_accuracy:g} will not be reached: {info.name} "
                "has no validation images",
                stacklevel=2,
            )
        check_model_dir(config, info.labels)
        self.eval_every = max(1, min(self._steps(config.eval_every), self.total_steps))
        self.clock = Clock()
        searched = config.fusion == "auto" and strategy.num_replicas_in_sync > 1
        fusion = load_fusion(strategy, config.model_dir) if searched else None
        restored = latest_checkpoint(directory_of(config.model_dir) / CHECKPOINTS) is not None
        self.model = build_model(config, fusion=fusion, restored=restored)
        # Not earlier: options of which no model can be made have no claim.
        claim_model_dir(config, info.labels)
        if searched and fusion is None and self.chief:
            assert self.model.all_reduce is not None
            chosen = self.model.all_reduce.fusion
            save_fusion(chosen, strategy.num_replicas_in_sync, config.model_dir)
        self.checkpoints = Checkpoints(self.model, config)
        shown = self.chief and config.tensorboard
        self.board = TensorBoard(config.model_dir) if shown else None

    def _steps(self, duration: Any) -> int:
        return duration.steps(self.steps_per_epoch, self.config.batch_size)

    def train(self, callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, Any]:
        step, validation = self._restore()
        # A run that has been stopped at its target stays there.
        last_step = step if self._reached(validation) else self.total_steps
        if self.chief:
            told = self._nothing_left(step)
            if step < last_step:
                told = run_summary(
                    config=self.config,
                    info=self.info,
                    model=self.model,
                    devices=self._run_devices(),
                    first_step=step,
                    total_steps=self.total_steps,
                    steps_per_epoch=self.steps_per_epoch,
                )
            print(told, file=sys.stderr, flush=True)
        rows, bar = self._writers(step, last_step)
        writers = [own for own in (rows, bar, self.board) if own]
        recorder = Recorder(
            self.clock,
            writers,
            step=step,
            steps_per_epoch=self.steps_per_epoch,
            batch_size=self.config.batch_size,
            every=max(1, self._steps(self.config.log_every)),
            max_bad_images=self.config.max_bad_images,
            evaluated_examples=self._evaluated_examples(),
            model_dir=self.config.model_dir,
        )
        recorder.validation = validation
        stopper = _StopAtAccuracy(self._reached, recorder)
        profiler, mlperf_log = self._profiler(recorder), self._mlperf_log(recorder, last_step)
        observers = [observer for observer in (profiler, mlperf_log) if observer]
        logs = [log for log in (rows, self.board, mlperf_log) if log]
        saver = Saver(
            self.checkpoints,
            self.clock,
            recorder,
            logs,
            every=max(1, self._steps(self.config.checkpoint_every)),
            total_steps=self.total_steps,
            train_examples=self.train_examples,
        )
        if mlperf_log:
            mlperf_log.start()
        watch = StallWatch(self._own_shards())
        try:
            if step < last_step:
                self._before_training(step)
            for first_epoch, epochs, first_step, steps in segments(
                step, last_step, self.eval_every, [*map(self._steps, self.config.train_until)]
            ):
                if self.config.train_sizes:
                    # Else TensorFlow would make one program for images of any size.
                    self.model.make_train_function(force=True)
                    recorder.recompile()
                self.model.fit(
                    make_dataset(self.config, "train", first_step),
                    initial_epoch=first_epoch,
                    epochs=epochs,
                    steps_per_epoch=steps,
                    callbacks=[*callbacks, recorder, *observers, stopper, saver, watch],
                    verbose=0,
                    **self._validation(),
                )
                if self.model.stop_training:
                    break
            if mlperf_log:
                wanted = self.config.stop_at_accuracy
                reached = self._reached(recorder.validation)
                mlperf_log.finish(reached if wanted else recorder.step == self.total_steps)
        finally:
            watch.close()
            # The board shows what is examined at the end, too.
            for teller in (rows, bar, *observers):
                if teller:
                    teller.close()
        return self._finish(recorder.step, trained=step < last_step)

    def close(self) -> None:
        """Ends what the run holds open from its beginning to its end."""
        if self.board:
            self.board.close()
        self.checkpoints.close()

    def _restore(self) -> tuple[int, Row]:
        """Returns the step from which the run resumes, and its last evaluation."""
        state = self.checkpoints.restore()
        check_consistent(
            self.strategy,
            "where to begin",
            f"going on from step {state['step']}" if state else "beginning anew",
            f"--model_dir={self.config.model_dir} must be a directory that all workers share",
        )
        if state is None:
            return 0, {}
        # Of others the epochs are of other steps, and so are the rates.
        begun_with = state.get("train_examples", self.train_examples)
        if begun_with != self.train_examples:
            raise UserError(
                f"{self.config.data_dir} has {self.train_examples} training images, but the run "
                f"in {self.config.model_dir} began with {begun_with}; give those, or begin anew "
                f"from its weights: another --model_dir, --initial_weights={self.config.model_dir}"
            )
        self.clock.restore(state["clock"])
        return state["step"], state["validation"]

    def _writers(self, step: int, last_step: int) -> tuple[JsonLines | None, ProgressBar | None]:
        """Only the chief tells, and where nothing is left to do there is no progress."""
        if not self.chief:
            return None, None
        devices = self._device_count()
        rows = JsonLines(self.config.model_dir, step)
        return rows, ProgressBar(step, self.total_steps, devices) if step < last_step else None

    def _devices(self) -> list[str]:
        """Returns the names of the devices that compute, as far as this process knows them."""
        if self.model.pipeline is not None:
            return [stage.device for stage in self.model.pipeline.stages]
        return list(devices_of(self.strategy))

    def _run_devices(self) -> RunDevices:
        return run_devices(self.strategy, self._devices())

    def _device_count(self) -> int:
        stages = len(self.model.pipeline.stages) if self.model.pipeline is not None else 1
        return self.strategy.num_replicas_in_sync * stages

    def _profiler(self, recorder: Recorder) -> Profiler | None:
        if not self.chief or not self.config.profile_steps:
            return None
        folder = tensorboard_folder(self.config.model_dir, "train")
        first, last = self.config.profile_steps
        return Profiler(folder, first, last, recorder)

    def _mlperf_log(self, recorder: Recorder, last_step: int) -> MLPerfLog | None:
        config = self.config
        if not self.chief or not config.mlperf_log:
            return None
        return MLPerfLog(
            config,
            recorder,
            steps_per_epoch=self.steps_per_epoch,
            train_examples=self.train_examples,
            eval_examples=self._evaluated_examples(),
            batch_norm_examples=batch_norm_images(config, self.strategy),
            last_step=last_step,
        )

    def _evaluated_examples(self) -> int:
        split = self.info.splits.get("validation")
        return split.examples if split else 0

    def _validation(self) -> dict[str, Any]:
        if "validation" not in self.info.splits:
            return {}
        return {
            "validation_data": make_dataset(self.config, "validation"),
            "validation_steps": evaluation_steps(self.info, self.config, self.strategy),
        }

    def _own_shards(self) -> list[str]:
        """Returns the files that this process reads."""
        pipelines, own = worker_place(self.strategy)
        splits = [split for split in self.info.splits.values() if split.paths]  # not synthetic ones
        shares = (share_of(split, self.config, pipelines, own) for split in splits)
        return [path for share in shares for path in share.paths]

    def _nothing_left(self, step: int) -> str:
        target = self.config.stop_at_accuracy
        reached = (
            f", where it reached stop_at_accuracy={target:g}" if step < self.total_steps else ""
        )
        return (
            f"{self.config.model_dir} holds this run, finished at step {step} of "
            f"{self.total_steps}{reached}: nothing is left to train"
        )

    def _before_training(self, step: int) -> None:
        """Keeps some input images, unless an earlier process has."""
        config, directory = self.config, self.config.model_dir
        if not self.chief:
            return
        forget_examination(directory)  # It was of another step.
        if config.examine and not config.synthetic and load_inputs(directory) is None:
            inputs = make_input_images(config, self.info, self.model.mixer, step)
            keep_inputs(directory, inputs, self.info.labels, step, self.board)

    def _examine(self, step: int) -> None:
        """Keeps what the model gets wrong, unless an earlier process has."""
        config, directory = self.config, self.config.model_dir
        if not config.examine or "validation" not in self.info.splits:
            return
        missing = load_examination(directory) is None
        # A shared directory may look different from other machines: the chief decides.
        if text_of_chief(self.strategy, str(missing)) == str(True):
            examination = examine(self.model, config, self.info, step)
            if self.chief:
                keep_examination(directory, examination, self.info.labels, self.board)

    def _finish(self, step: int, trained: bool) -> dict[str, Any]:
        """Writes the summary and the report; a run that was at its end before keeps its summary."""
        directory = to_path(self.config.model_dir)
        summary = None if trained else _read_summary(directory / SUMMARY_FILE)
        if summary is None:
            summary = self._summary(step)
        if self.chief:
            write_file(directory / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
        self._examine(step)
        if self.chief:
            # With matplotlib, which other workers do not need.
            from imagenet_fast.training.report import page

            text = page.render(
                summary,
                read_rows(self.config.model_dir),
                self.config,
                self.info.labels,
                load_inputs(self.config.model_dir),
                load_examination(self.config.model_dir),
            )
            write_file(directory / page.FILE, text)
            unreadable = bad_images.describe(self.config.model_dir)
            if unreadable:
                print(unreadable, file=sys.stderr, flush=True)
        # A worker that left before the others would be reported as lost.
        wait_for_all(self.strategy)
        return summary

    def _summary(self, step: int) -> dict[str, Any]:
        rows = read_rows(self.config.model_dir) if self.chief else []
        unreadable = bad_images.read_bad_images(self.config.model_dir) if self.chief else []
        validation = [row for row in rows if row["kind"] == "validation"]
        last = validation[-1] if validation else {}
        reached = next((row for row in validation if self._reached(row)), {})
        training = [row for row in rows if row["kind"] == "train"]
        devices, runs_on = self._device_count(), self._run_devices()
        return {
            "top1": last.get("top1"),
            "top5": last.get("top5"),
            "loss": last.get("loss"),
            "train_loss": training[-1].get("loss") if training else None,
            "images_evaluated": last.get("examples"),
            "images_skipped_in_training": sum(row.get("skipped", 0) for row in training),
            "images_skipped_in_evaluation": last.get("skipped"),
            "bad_images": bad_images.count_kinds(unreadable),
            "damaged_checkpoints": damaged_checkpoints(self.config.model_dir) if self.chief else [],
            "epochs": step / self.steps_per_epoch,
            "steps": step,
            "train_seconds": self.clock.train_seconds,
            "compile_seconds": self.clock.compile_seconds,
            "wall_seconds": self.clock.wall_seconds,
            "images_per_second": self.clock.images_per_second,
            "images_per_second_per_device": self.clock.images_per_second / devices,
            "target_top1": self.config.stop_at_accuracy or None,
            "train_seconds_to_target": reached.get("train_seconds"),
            "wall_seconds_to_target": reached.get("wall_seconds"),
            "parameters": int(sum(v.shape.num_elements() for v in self.model.trainable_variables)),
            "replicas": self.strategy.num_replicas_in_sync,
            "runs_on": str(runs_on),
            "devices": runs_on.kind.split("+"),
            "collective": runs_on.collective,
            **environment.provenance(),
        }

    def _reached(self, validation: Row) -> bool:
        return 0 < self.config.stop_at_accuracy <= validation.get("top1", -1.0)


def _read_summary(path: Path) -> dict[str, Any] | None:
    """Returns what an earlier process has written; None: nothing that can be read."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


class _StopAtAccuracy(keras.callbacks.Callback):
    """Ends the run after an evaluation that reaches the target."""

    def __init__(self, reached: Callable[[Row], bool], recorder: Recorder) -> None:
        super().__init__()
        self._reached = reached
        self._recorder = recorder

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Looks at the last evaluation."""
        if self._reached(self._recorder.validation):
            self.model.stop_training = True
