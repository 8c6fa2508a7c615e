"""Ends a run: its summary, its error analysis and its report."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import say
from imagenet_fast.data import bad_images
from imagenet_fast.data.evaluated import file_names_of
from imagenet_fast.distribute.exchange import text_of_chief, wait_for_all
from imagenet_fast.training.evaluate import Evaluator
from imagenet_fast.training.logs.clock import Clock
from imagenet_fast.training.logs.tensorboard import TensorBoard
from imagenet_fast.training.report.saved_images import load_error_analysis, save_error_analysis
from imagenet_fast.training.run import Run
from imagenet_fast.training.step.classifier import Classifier
from imagenet_fast.training.step.error_analysis import with_file_names
from imagenet_fast.training.summary import make_summary, read_summary, write_summary


def finish(
    run: Run,
    model: Classifier,
    clock: Clock,
    evaluator: Evaluator | None,
    board: TensorBoard | None,
    *,
    step: int,
    trained: bool,
    stopped: str,
) -> dict[str, Any]:
    """Writes summary, error analysis and report; all workers must call it.

    Args:
      run: the run.
      model: the trained model.
      clock: of the run.
      evaluator: keeps predictions, for the error analysis; None: there is none.
      board: TensorBoard's files; None: there are none.
      step: weight updates done.
      trained: whether this process has trained; a run that was finished keeps its summary.
      stopped: why the run ended before its last step; empty: it did not.

    Returns:
      The summary.
    """
    directory = run.config.model_dir
    summary = None if trained else read_summary(directory)
    if summary is None:
        summary = make_summary(run, model, clock, step=step, stopped=stopped)
    if run.chief:
        write_summary(directory, summary)
    if evaluator:
        _analyze_errors(run, evaluator, step, board)
    if run.chief:
        # Imported here, because it imports matplotlib.
        from imagenet_fast.training.report.page import write_report

        write_report(run.config, summary, run.info.labels)
        unreadable = bad_images.describe(directory)
        if unreadable:
            say(unreadable)
    # Otherwise the other workers would report one that exits first as lost.
    wait_for_all(run.strategy)
    return summary


def _analyze_errors(run: Run, evaluator: Evaluator, step: int, board: TensorBoard | None) -> None:
    """Saves the last evaluation's error analysis, unless an earlier process has."""
    directory = run.config.model_dir
    missing = load_error_analysis(directory, run.info.num_classes) is None
    # Other machines may not see the chief's latest files: the chief decides.
    if text_of_chief(run.strategy, str(missing)) == str(True):
        if evaluator.step != step:  # an earlier process evaluated, and ended before this
            if run.chief:
                images = f"{run.examples('validation')} validation images"
                say(f"analyzing errors: predicting {images} (--noexamine skips it)")
            evaluator.evaluate(step)
        analysis, predictions = evaluator.results()
        if run.chief:
            with contextlib.suppress(OSError, tf.errors.OpError, UserError):  # data that is gone
                names = functools.partial(file_names_of, run.info, "validation")
                analysis = with_file_names(analysis, predictions, names)
            save_error_analysis(directory, analysis, run.info.labels, board)
