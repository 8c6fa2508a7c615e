"""Trains the trials of a search, one after the other."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from tqdm import tqdm

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import option_text
from imagenet_fast.config import Config
from imagenet_fast.data.info import read_info
from imagenet_fast.data.steps import steps_per_epoch
from imagenet_fast.training.train import train
from tuning import results
from tuning.plan import Plan
from tuning.study import (
    COMPLETE,
    DIVERGED,
    FAILED,
    PRUNED,
    Outcome,
    Study,
    Trial,
    best_of,
)


def search(plan: Plan) -> list[Outcome]:
    """Trains the remaining trials of a plan, each in ``trial_NNN``, and writes the results.

    Returns:
      The outcomes of all trials.

    Raises:
      UserError: if the directory cannot be written or contains another search, or a trial fails
        for another reason than divergence.
    """
    evaluations = count_evaluations(plan.config)
    if evaluations == 1:
        print("note: eval_every is the whole run: bad trials cannot be pruned", file=sys.stderr)
    with _locked(plan.directory):
        study = Study(plan, evaluations)
        with _Progress(plan, study.outcomes()) as progress:
            for trial in study.trials():
                progress.begin(trial)
                outcome = _repeated(study, trial) or _run(plan, study, trial, progress)
                progress.end(outcome, study.outcomes())
                results.write(study.outcomes(), plan)
        results.write(study.outcomes(), plan)
        return study.outcomes()


def count_evaluations(config: Config) -> int:
    """Returns the number of evaluations in a run.

    Raises:
      UserError: if the data cannot be used, or has no validation images.
    """
    info = read_info(config)
    if "validation" not in info.splits:
        raise UserError("the search needs validation images, but the data has none")
    epoch = steps_per_epoch(info, config)
    every = max(1, config.eval_every.steps(epoch, config.batch_size))
    return max(1, math.ceil(config.duration.steps(epoch, config.batch_size) / every))


def _repeated(study: Study, trial: Trial) -> Outcome | None:
    """Gives a trial the outcome of an earlier one with its values; returns it, or None.

    A run with the same values and seed has the same error. Pruned trials are trained again, because
    whether to prune depends on the other trials.
    """
    for earlier in study.outcomes():
        if earlier.values == trial.values and earlier.state in (COMPLETE, DIVERGED):
            assert earlier.error is not None
            return study.finish(trial, earlier.state, 0.0, earlier.error)
    return None


def _run(plan: Plan, study: Study, trial: Trial, progress: _Progress) -> Outcome:
    """Trains or resumes one trial; returns its outcome.

    Raises:
      UserError: if it fails.
    """
    _forget_models()
    begin = time.monotonic()
    watcher = None
    try:
        config = plan.config.replace(
            **trial.values, model_dir=str(plan.directory / results.trial_name(trial.number))
        )
        watcher = _Watcher(study, trial, count_evaluations(config), progress)
        # Its output, which is also in metrics.jsonl, would disturb the progress bar.
        with pathlib.Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
            summary = train(config, callbacks=[watcher])
    except Exception as error:
        seconds = time.monotonic() - begin
        if isinstance(error, UserError) and watcher and watcher.diverged:
            return study.finish(trial, DIVERGED, seconds)
        # Otherwise a resumed search would begin with this trial, which would fail again.
        study.finish(trial, FAILED, seconds)
        if isinstance(error, UserError):
            raise UserError(f"trial {trial.number} ({_text(trial.values)}): {error}") from error
        raise
    state = PRUNED if watcher.hopeless else COMPLETE
    return study.finish(trial, state, summary["wall_seconds"], 1 - summary["top1"])


def _forget_models() -> None:
    """Frees the models of earlier trials, which contain reference cycles."""
    keras.backend.clear_session()
    gc.collect()


class _Watcher(keras.callbacks.Callback):
    """Reports each evaluation of a trial, and stops the run if the trial is to be pruned.

    Args:
      study: gets the reports.
      trial: that is trained.
      evaluations: in a whole run; the last one never prunes.
      progress: displays evaluations.

    Attributes:
      hopeless: whether the run was pruned.
    """

    def __init__(self, study: Study, trial: Trial, evaluations: int, progress: _Progress) -> None:
        super().__init__()
        self.hopeless = False
        self._study = study
        self._trial = trial
        self._evaluations = evaluations
        self._progress = progress
        self._loss: tf.Tensor | None = None

    @property
    def diverged(self) -> bool:
        """Whether the last loss was not finite."""
        return self._loss is not None and not math.isfinite(float(self._loss))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keeps the loss without waiting for it."""
        self._loss = logs["loss"]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reports an evaluation; an epoch of ``fit`` is the interval between two of them.

        Without an evaluation it is the part of one before a change of the image size.
        """
        if "val_top1" not in logs:
            return
        evaluation, error = epoch + 1, 1 - float(logs["val_top1"])
        self._progress.evaluated(evaluation, self._evaluations, error)
        hopeless = self._study.report(self._trial, evaluation, error)
        if hopeless and evaluation < self._evaluations:
            self.hopeless = self.model.stop_training = True


class _Progress:
    """A bar over the trials with the best error and ETA, and a line for each trial."""

    def __init__(self, plan: Plan, outcomes: list[Outcome]) -> None:
        done = sum(outcome.state != FAILED for outcome in outcomes)
        self._file = sys.stderr
        self._best = _best_text(outcomes)
        self._trial = ""
        self._bar = tqdm(
            total=max(done, plan.trials + plan.fine_trials),
            initial=done,
            unit="trial",
            file=self._file,
            dynamic_ncols=True,
            # Less often into a file or a pipe, which gets a line each time.
            mininterval=0.1 if os.isatty(2) else 10,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} trials, ETA {remaining}{postfix}",
        )

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin(self, trial: Trial) -> None:
        """Shows that a trial begins."""
        self._trial = f"trial {trial.number}"
        self._show(self._trial)

    def evaluated(self, evaluation: int, evaluations: int, error: float) -> None:
        """Shows an evaluation of the trial."""
        self._show(f"{self._trial}: {error:.2%} error at evaluation {evaluation} of {evaluations}")

    def end(self, outcome: Outcome, outcomes: list[Outcome]) -> None:
        """Prints the trial's outcome."""
        self._best = _best_text(outcomes)
        self._bar.write(
            f"trial {outcome.number} ({outcome.round}): {outcome.state}, {outcome.error:.2%} "
            f"error, {outcome.seconds:.0f} s: {_text(outcome.values)}",
            file=self._file,
        )
        self._show("")
        self._bar.update()

    def _show(self, text: str) -> None:
        self._bar.set_postfix_str("; ".join(filter(None, [text, self._best])), refresh=False)
        self._bar.update(0)


def _best_text(outcomes: list[Outcome]) -> str:
    best = best_of(outcomes)
    return f"best {best.error:.2%} (trial {best.number})" if best else ""


def _text(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={option_text(value)}" for name, value in values.items())


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    """Creates the directory and locks it against other searches."""
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((directory / "lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another search is running in {directory}") from None
        except OSError as error:
            raise UserError(
                f"cannot write to study_dir {directory}: {error.strerror}; choose another "
                "--study_dir"
            ) from None
        yield
