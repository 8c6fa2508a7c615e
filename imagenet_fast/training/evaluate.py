"""Evaluation of a model, in a run and after it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.config import Config
from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.data.evaluated import evaluated_images, file_names
from imagenet_fast.data.info import DatasetInfo, read_info
from imagenet_fast.data.steps import evaluation_steps
from imagenet_fast.distribute.exchange import wait_for_all
from imagenet_fast.distribute.strategy import make_strategy
from imagenet_fast.models.custom import CustomModel
from imagenet_fast.training.build.model import build_for_evaluation
from imagenet_fast.training.checkpoints.checkpoint import restore_weights
from imagenet_fast.training.checkpoints.model_dir import (
    check_network,
    checkpoint_of,
    classes_in_run,
    read_labels,
    read_preparation,
)
from imagenet_fast.training.checkpoints.sizes import no_larger_than
from imagenet_fast.training.checkpoints.thresholds import thresholds_of
from imagenet_fast.training.failures import errors_explained
from imagenet_fast.training.logs.logger import Logger
from imagenet_fast.training.logs.recorder import check_evaluated
from imagenet_fast.training.program import Program
from imagenet_fast.training.report.class_metrics import class_metrics
from imagenet_fast.training.report.figures import most_confused
from imagenet_fast.training.report.multi_label import (
    DEFAULT_THRESHOLD,
    f1_scores,
    multi_label_classes,
    multi_label_metrics,
)
from imagenet_fast.training.report.predictions_file import (
    TOP,
    check_predictions_file,
    write_predictions,
)
from imagenet_fast.training.run import Run, with_model
from imagenet_fast.training.step.calibration import calibration_error, fitted_temperature, interval
from imagenet_fast.training.step.classifier import Classifier
from imagenet_fast.training.step.error_analysis import ErrorAnalysis, ImagePredictions, Predictions
from imagenet_fast.training.step.scores import Scores
from imagenet_fast.training.test_sets import (
    competing_classes,
    read_right_labels,
    right_labels_accuracy,
    right_labels_of,
)

# The default batch has at most this many images per device.
_IMAGES_PER_DEVICE = 256


class Evaluator:
    """Evaluates a model on all images of a split, as often as wanted, by one program.

    Of multi-label data there is no error analysis: scores are kept instead of predictions.

    Attributes:
      step: weight updates of the model in the last evaluation; -1: there was none.
      scores: of multi-label data, probabilities and labels of all images of the last evaluation,
        [images, classes] each.
    """

    def __init__(
        self,
        run: Run,
        model: Classifier,
        split: str = "validation",
        *,
        keeps_predictions: bool = False,
        top: int = 1,
        fits_temperature: bool = False,
    ) -> None:
        config, self._model, self.step = run.config, model, -1
        self._run, self._split = run, split
        self.scores = np.zeros([0, 0], np.float32), np.zeros([0, 0], bool)
        self._predictions: Predictions | Scores | None = None
        if run.info.multi_label:
            self._predictions = Scores(run, model.image_loss, split, model.output_shape[-1])
        elif keeps_predictions:
            self._predictions = Predictions(
                run, model.image_loss, split, top=top, fits_temperature=fits_temperature
            )
        batches = (
            None if config.data_on_device else distributed_dataset(config, split, evaluation=True)
        )
        test_step = functools.partial(model.test_step, predictions=self._predictions)
        self._program = Program(model, test_step, config, batches)
        self._steps = evaluation_steps(run.info, config, run.strategy, split)

    def evaluate(
        self, step: int = 0, loggers: Sequence[Logger] = (), *, temperature: float = 1.0
    ) -> Mapping[str, tf.Tensor | float]:
        """Evaluates the model; returns the metrics, over all images. All workers must call it.

        For the predictions that are kept, logits are divided by ``temperature``.
        """
        for logger in loggers:
            logger.before_evaluation(step)
        with self._model.evaluated_weights():
            self._model.reset_metrics()
            if isinstance(self._predictions, Scores):
                self._predictions.reset()
            elif self._predictions:
                self._predictions.reset(temperature)
            self._program.restart()
            done = 0
            while done < self._steps:
                for logger in loggers:
                    logger.before_evaluation_steps(done)
                done, _ = self._program.take(done, self._steps)
                for logger in loggers:
                    logger.after_evaluation_steps(done)
        for logger in loggers:
            logger.after_evaluation()
        self.step = step
        results: dict[str, tf.Tensor | float] = {**self._model.metric_sums.results()}
        if isinstance(self._predictions, Scores):
            self.scores = self._predictions.arrays()
            results = {
                "loss": results["loss"],
                **multi_label_metrics(*self.scores),
                **{name: results[name] for name in ("examples", "skipped")},
            }
        return results

    def results(self) -> tuple[ErrorAnalysis, ImagePredictions]:
        """Returns the error analysis and each image's predictions, in the order of the data.

        They are of the last evaluation. All workers must call it.
        Their ``rows`` are the indices of the images in the split, shard by shard.
        """
        assert isinstance(self._predictions, Predictions)
        analysis, predictions = self._predictions.results(self.step)
        run = self._run
        images = evaluated_images(run.info, run.config, run.strategy, self._split)
        rows = images[predictions.rows]
        order = np.argsort(rows)
        names = ("labels", "losses", "classes", "probabilities")
        ordered = {name: getattr(predictions, name)[order] for name in names}
        return analysis, predictions._replace(
            rows=rows[order], mistakes=images[predictions.mistakes], **ordered
        )


def evaluate(
    config: Config,
    split: str = "validation",
    *,
    model: CustomModel | None = None,
    per_class: bool = False,
    checkpoint: str = "last",
    predictions: str = "",
    fit_temperature: bool = False,
    class_map: str = "",
    right_labels: str = "",
) -> dict[str, Any]:
    """Evaluates a checkpoint in ``model_dir`` on each image of a split once.

    Classes are found by their names: other data than that of training may lack some of them.

    Args:
      config: gives the run and the data: that of training, or :func:`~imagenet_fast.read_config`'s.
      split: ``validation``, ``test``, or ``train``, whose images are not augmented here.
      model: the network that was given to ``train``, if it was no function of a module.
      per_class: whether to return the metrics of each class.
      checkpoint: ``last``, or ``best``: that of the evaluation with the best ``best_metric``, of
        a run with ``keep_best``.
      predictions: a new ``.csv`` or ``.parquet`` file for each image's name, label, five best
        classes with their probabilities, and loss; empty: none.
      fit_temperature: whether to find the temperature by which to divide logits for the smallest
        cross-entropy; this evaluates twice.
      class_map: a JSON or CSV file from the data's class names to the run's, or ``same``: only the
        data's classes compete; empty: all of the run's do.
      right_labels: a JSON file of lists of class numbers, for images of several right labels, or of
        none; empty: each has its own.

    Returns:
      ``top1`` and ``top5`` (fractions), ``top1_interval`` and ``top5_interval`` (their 95% Wilson
      intervals, low and high), ``loss``, ``ece`` (expected calibration error), ``examples``,
      ``skipped`` (unreadable images) and ``checkpoint``. With ``per_class`` also ``classes``, a
      dict for each class with its ``name``, ``images``, ``recall`` (its accuracy),
      ``recall_interval``, ``precision`` and ``f1``, None where undefined; and ``confused``, a dict
      for each of at most 15 pairs of classes with the most mistakes: ``label``, ``prediction``,
      ``images``, ``of`` (the label's images) and ``files``. With
      ``fit_temperature`` the ``temperature``, ``nll`` (the loss without label smoothing),
      ``nll_at_temperature`` and ``ece_at_temperature``. With ``class_map`` ``competing``, the
      number of classes. With ``right_labels`` ``any_label_top1``, ``any_label_top1_interval`` and
      ``any_label_examples``.

      Of images with several labels, in place of the accuracies, their intervals and ``ece``:
      ``map``, mean average precision; ``f1_micro`` and ``f1_macro`` where probabilities are at
      least 1/2; and, if training chose thresholds for this checkpoint, ``thresholds_f1_micro`` and
      ``thresholds_f1_macro`` with these. ``classes`` then also have ``average_precision`` and
      ``threshold``.

    Raises:
      UserError: if there is no usable checkpoint, an option of the network is not the run's, there
        is no such split, the data has further classes or no readable image, a shard becomes
        unreadable, another worker stops, a given file cannot be used, or no temperature is the
        best.
    """
    if class_map and right_labels:
        raise UserError(
            "class_map excludes right_labels, whose numbers are the model's: remove one"
        )
    predictions_file = check_predictions_file(predictions) if predictions else None
    with errors_explained("evaluates again", config.pipeline_servers):
        config = with_model(config, model)
        check_network(config)
        if fit_temperature and config.loss != "cross_entropy":
            raise UserError(
                f"a fitted temperature is of a softmax, but this run's loss is {config.loss}, "
                "which gives each class a probability on its own"
            )
        # Evaluation has neither training's batch-norm groups nor its logical replicas, which may
        # not fit the devices.
        config = config.replace(batch_norm_batch_size=0, replicas=())
        strategy = make_strategy(config)
        if not config.eval_batch_size:
            # Training's micro-batch, unless training had more devices.
            size = config.batch_size // config.accumulation_steps
            if config.tta_fraction == 1:  # otherwise the result depends on the batches
                size = min(size, _IMAGES_PER_DEVICE * strategy.num_replicas_in_sync)
            config = config.replace(eval_batch_size=size)
        info = read_info(config)
        if split not in info.splits:
            raise UserError(
                f"{info.name} has no {split} shards, only those of {', '.join(info.splits)}: give "
                "other data, or another split"
            )
        if info.multi_label and config.loss == "cross_entropy":
            raise UserError(
                f"images of {info.name} have several labels, but the run in {config.model_dir} has "
                "learned one class an image: give data with one label an image"
            )
        if info.multi_label:
            given = {"predictions": predictions, "fit_temperature": fit_temperature}
            given |= {"class_map": class_map, "right_labels": right_labels}
            _check_none_given(given, info)
        labels = read_labels(config.model_dir)
        competing = None
        if class_map:
            competing = competing_classes(class_map, info.labels, labels)
            class_numbers = competing.numbers
        else:
            class_numbers = classes_in_run(config, info.labels, may_be_mapped=not info.multi_label)
        right = None
        if right_labels:
            found = read_right_labels(right_labels, len(labels))
            right = right_labels_of(right_labels, found, file_names(info, split))
        _warn_of_other_preparation(config, info)
        # Without model_dir, nothing is added to training's list of unreadable images.
        unlisted = config.replace(model_dir="")
        if split != "validation":
            # Devices hold training and validation images only.
            unlisted = unlisted.replace(data_on_device=False)
        path = checkpoint_of(config.model_dir, checkpoint)
        run = Run(unlisted, info, strategy)
        with no_larger_than(path, strategy.num_replicas_in_sync):
            classifier = build_for_evaluation(run, model, labels=labels)
        if class_numbers != tuple(range(len(labels))):
            classifier.class_numbers = class_numbers
            if competing is None:
                _say_which_are_missing(config, info, labels)
        if competing is not None:
            classifier.competing = competing.classes
            labels = tuple(labels[number] for number in competing.classes)
        restore_weights(classifier, config.model_dir, checkpoint)
        evaluator = Evaluator(
            run,
            classifier,
            split,
            keeps_predictions=not info.multi_label,
            top=min(TOP if predictions else 1, len(labels)),
            fits_temperature=fit_temperature,
        )
        result: dict[str, Any] = {
            name: float(value) for name, value in evaluator.evaluate().items()
        }
        result |= {name: round(result[name]) for name in ("examples", "skipped")}
        check_evaluated(result, info.splits[split].examples)
        if not result["examples"]:
            raise UserError(
                f"none of the {result['skipped']} {split} images of {info.name} can be read: "
                "`imagenet-fast prepare --verify` checks the data, and max_pixels is "
                f"{config.max_pixels}"
            )
        if info.multi_label:
            result |= _with_thresholds(config, path, evaluator.scores, labels, per_class)
        else:
            for name in ("top1", "top5"):
                result[f"{name}_interval"] = interval(result[name], result["examples"])
            if competing is not None:
                result["competing"] = len(labels)
            analysis, images = evaluator.results()
            result["ece"] = calibration_error(analysis.calibration)
            if per_class:
                classes = class_metrics(analysis.confusion, labels)
                result["classes"] = [row._asdict() for row in classes]
                result["confused"] = [row._asdict() for row in most_confused(analysis, labels)]
            if right is not None:
                result |= _any_label(images, right)
            if predictions_file is not None and run.chief:
                write_predictions(predictions_file, images, file_names(info, split), labels)
            if fit_temperature:
                result |= _at_temperature(evaluator, images)
        if predictions_file is not None:
            # Otherwise the other workers would report one that exits first as lost.
            wait_for_all(strategy)
    return {**result, "checkpoint": path}


def _check_none_given(options: Mapping[str, Any], info: DatasetInfo) -> None:
    """Checks that there is none of the options that are for images of one label.

    Raises:
      UserError: if there is one.
    """
    given = [name for name, value in options.items() if value]
    if given:
        raise UserError(
            f"{' and '.join(given)}: images of {info.name} have several labels, and this is for "
            "images of one: leave it out"
            + ("; predict --output writes predictions" if "predictions" in given else "")
        )


def _any_label(images: ImagePredictions, right: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns the accuracy by several right labels of each image of a split."""
    top1, count = right_labels_accuracy(images.classes[:, 0], [right[row] for row in images.rows])
    return {
        "any_label_top1": top1,
        "any_label_top1_interval": interval(top1, count),
        "any_label_examples": count,
    }


def _at_temperature(evaluator: Evaluator, images: ImagePredictions) -> dict[str, float]:
    """Returns the fitted temperature, and what another evaluation finds with it."""
    temperature = fitted_temperature(images.temperature_sums)
    evaluator.evaluate(temperature=temperature)
    analysis, scaled = evaluator.results()
    return {
        "temperature": temperature,
        "nll": float(images.losses.mean(dtype=np.float64)),
        "nll_at_temperature": float(scaled.losses.mean(dtype=np.float64)),
        "ece_at_temperature": calibration_error(analysis.calibration),
    }


def _with_thresholds(
    config: Config,
    path: str,
    scores: tuple[np.ndarray, np.ndarray],
    labels: Sequence[str],
    per_class: bool,
) -> dict[str, Any]:
    """Returns the metrics with the thresholds that training chose, and those of each class."""
    result: dict[str, Any] = {}
    thresholds = np.full(len(labels), DEFAULT_THRESHOLD)
    chosen = thresholds_of(config.model_dir, path, labels)
    if chosen is not None:
        thresholds = np.array(chosen)
        names = ("thresholds_f1_micro", "thresholds_f1_macro")
        result |= dict(zip(names, f1_scores(*scores, thresholds)))
    if per_class:
        classes = multi_label_classes(*scores, labels, thresholds)
        result["classes"] = [row._asdict() for row in classes]
    return result


def _say_which_are_missing(config: Config, info: DatasetInfo, labels: Sequence[str]) -> None:
    """Warns of the run's classes that the data lacks: they can be predicted, but not be right."""
    missing = [label for label in labels if label not in info.labels]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        warn_once(
            f"{config.data_dir} lacks {len(missing)} of the {len(labels)} classes of the run in "
            f"{config.model_dir}: {', '.join(missing[:3])}{more}"
        )


def _warn_of_other_preparation(config: Config, info: DatasetInfo) -> None:
    """Warns if ``prepare`` did something else to these images than to those of training."""
    trained, here = read_preparation(config), info.preparation
    if trained is None or here is None or trained == here:
        return
    there, own = trained.job, here.job
    differences = "; ".join(
        f"{name} is {there.get(name)} there, {own.get(name)} here"
        for name in {**there, **own}
        if there.get(name) != own.get(name)
    )
    warn_once(
        f"the images of {config.data_dir} were prepared with other options than those of the run "
        f"in {config.model_dir} ({differences}): give `imagenet-fast prepare` the same for the "
        "same accuracy"
    )
