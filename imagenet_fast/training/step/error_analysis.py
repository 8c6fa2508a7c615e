"""Error analysis of a trained model: confusion matrix and worst mistakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from imagenet_fast.data.steps import evaluation_batch_size, evaluation_steps
from imagenet_fast.distribute.one_call import assign_local, local_values, local_variable, one_call
from imagenet_fast.training.run import Run
from imagenet_fast.training.step.calibration import (
    no_temperature_sums,
    reliability,
    temperature_sums,
)
from imagenet_fast.training.step.losses import class_probabilities, image_losses
from imagenet_fast.training.step.rows import Rows, gathered

_MISTAKES = 24
# Pairs of classes that are confused most, and names of images of each.
PAIRS, FILES_OF_A_PAIR = 15, 3
# Of an image, in characters; longer ones are cut.
LONGEST_NAME = 1000
# Of a mistake: its row; the true and the predicted class; the probabilities of both; and the loss,
# -inf where there are fewer mistakes.
_FACTS = ("row", "label", "answer", "label_probability", "answer_probability", "loss")


@dataclasses.dataclass(frozen=True)
class ErrorAnalysis:
    """A model's predictions on all readable images of a split.

    Attributes:
      step: weight updates of the model.
      confusion: int64 [entries, 3], the nonzero entries of the confusion matrix: true class,
        predicted class and number of images, in the order of the classes.
      images: uint8 [mistakes, size, size, 3], the mispredicted images with the highest losses, in
        descending order.
      labels: int32 [mistakes], their true classes.
      answers: int32 [mistakes], the predicted classes.
      label_probabilities: float32 [mistakes], the model's probability of the true class.
      answer_probabilities: float32 [mistakes], that of the predicted class.
      losses: float32 [mistakes], without label smoothing.
      calibration: float64 [15, 3], the bins of ``calibration.reliability``.
      files: str [mistakes], their images' names in the shards; empty: unknown.
      confused_files: str [pairs, 3], the same of up to 3 images of each of the most confused pairs
        of classes, the highest losses first.
    """

    step: int
    confusion: np.ndarray
    images: np.ndarray
    labels: np.ndarray
    answers: np.ndarray
    label_probabilities: np.ndarray
    answer_probabilities: np.ndarray
    losses: np.ndarray
    # Those of earlier versions lack the following.
    calibration: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros([0, 3]))
    files: np.ndarray = dataclasses.field(default_factory=lambda: np.array([], str))
    confused_files: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros([0, 3], "U1"))


def with_file_names(
    analysis: ErrorAnalysis,
    predictions: ImagePredictions,
    names: Callable[[Sequence[int]], Sequence[str]],
) -> ErrorAnalysis:
    """Returns the error analysis with the names of images of mistakes."""
    pairs = confused_pairs(analysis.confusion)
    examples = np.full([len(pairs), FILES_OF_A_PAIR], -1)
    of_pair = np.stack([predictions.labels, predictions.classes[:, 0]], axis=1)
    for own, pair in zip(examples, pairs):
        places = np.flatnonzero((of_pair == pair[:2]).all(axis=1))
        worst = places[np.argsort(-predictions.losses[places], kind="stable")]
        own[: len(worst)] = predictions.rows[worst[:FILES_OF_A_PAIR]]
    wanted = np.unique([*predictions.mistakes, *examples[examples >= 0]]).tolist()
    cut = (name[:LONGEST_NAME] for name in names(wanted))
    found = {-1: "", **dict(zip(wanted, cut))}
    files = [found[row] for row in predictions.mistakes.tolist()]
    return dataclasses.replace(
        analysis,
        files=np.array(files, str),
        confused_files=np.array(
            [[found[row] for row in own] for own in examples.tolist()], str
        ).reshape(examples.shape),
    )


def confused_pairs(confusion: np.ndarray) -> np.ndarray:
    """Returns the entries of the at most 15 pairs of classes with the most mistakes, descending."""
    mistakes = confusion[confusion[:, 0] != confusion[:, 1]]
    return mistakes[np.argsort(-mistakes[:, 2], kind="stable")[:PAIRS]]


class ImagePredictions(NamedTuple):
    """A model's predictions for each readable image of a split.

    Attributes:
      rows: int64 [images], in ascending order: the row of the image among those of all replicas,
        each of which has one for each of its images and for padding.
      labels: int32 [images], the true classes.
      losses: float32 [images], without label smoothing.
      classes: int32 [images, top], the predicted classes, best first.
      probabilities: float32 [images, top], the model's probabilities of these.
      mistakes: int64 [mistakes], the rows of the error analysis' images.
      temperature_sums: float64 [temperatures, 2], for ``calibration.fitted_temperature``; without
        ``fits_temperature``, 0.
    """

    rows: np.ndarray
    labels: np.ndarray
    losses: np.ndarray
    classes: np.ndarray
    probabilities: np.ndarray
    mistakes: np.ndarray
    temperature_sums: np.ndarray


class Predictions:
    """A model's predictions in an evaluation, kept on the devices: best classes, worst mistakes.

    ``TrainingStep.test_step`` adds those of a replica's batch, so that the analysis needs no
    further pass over the images. Make it outside of replicas, in all workers.

    Of each image, it keeps the ``top`` predicted classes.
    """

    def __init__(
        self,
        run: Run,
        loss: str = "cross_entropy",
        split: str = "validation",
        *,
        top: int = 1,
        fits_temperature: bool = False,
    ) -> None:
        options, info, strategy = run.config, run.info, run.strategy
        self._strategy, self._loss = strategy, loss
        self._top, self._fits_temperature = top, fits_temperature
        batches = evaluation_steps(info, options, strategy, split)
        size = options.evaluation_image_size
        self._batch_size = evaluation_batch_size(options, strategy, info.splits[split].examples)

        def empty() -> list[tf.Tensor]:
            return [
                # Variables of several workers cannot be uint8.
                tf.zeros([_MISTAKES, size, size, 3]),
                tf.fill([_MISTAKES, len(_FACTS)], -np.inf),
                no_temperature_sums(batches if fits_temperature else 1),
            ]

        with strategy.scope():
            self._variables = [
                local_variable(value, name)
                for name, value in zip(("images", "facts", "slopes"), empty())
            ]
            self._temperature = tf.Variable(1.0, trainable=False, name="temperature")
        self._rows = Rows(strategy, batches * self._batch_size, 3 + 2 * top)

        def reset() -> None:
            self._rows.reset()
            assign_local(self._variables, empty())

        self._reset = one_call(strategy, reset)

    def reset(self, temperature: float = 1.0) -> None:
        """Forgets all predictions; those to come are of logits divided by a temperature.

        To be called outside of replicas.
        """
        self._reset()
        self._temperature.assign(temperature)

    def add(
        self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, logits: tf.Tensor
    ) -> None:
        """Adds those of a batch; to be called in a replica.

        Args:
          images: [batch, size, size, 3], 0 to 255.
          labels: int32 [batch]; negative ones mark padding.
          weights: float32 [batch]; 0 for images that do not count.
          logits: float32 [batch, classes].
        """
        logits = tf.cast(logits, tf.float32)
        scaled = logits / self._temperature
        rows = _rows(labels, weights, scaled, self._loss, self._top)
        first = self._rows.count()
        *worst_variables, slopes = self._variables
        if self._fits_temperature:
            tf.raw_ops.ResourceScatterUpdate(
                resource=slopes.handle,
                indices=[first // self._batch_size],
                updates=[temperature_sums(logits, labels, weights)],
            )
        mistakes = _worst_of_batch(images, rows, first, scaled, self._loss)
        self._rows.add(rows)
        worst = local_values(worst_variables)
        images, facts = (tf.concat(parts, 0) for parts in zip(worst, mistakes))
        _, places = tf.math.top_k(facts[:, -1], _MISTAKES)
        assign_local(worst_variables, [tf.gather(images, places), tf.gather(facts, places)])

    def results(self, step: int) -> tuple[ErrorAnalysis, ImagePredictions]:
        """Returns the error analysis, after ``step`` weight updates, and each image's predictions.

        They are the same in all workers, which must all call it.
        """

        # In one function: outside, each replica of a TPU slice would be fetched from its host.
        @tf.function(autograph=False)
        def of_all_replicas() -> list[tf.Tensor]:
            results = self._strategy.run(self._of_all_replicas)
            return [self._strategy.experimental_local_results(part)[0] for part in results]

        rows, images, facts, slopes = (part.numpy() for part in of_all_replicas())
        places = np.flatnonzero(rows[:, 1] > 0)
        rows = rows[places]
        whole = rows[:, [0, *range(3, 3 + self._top)]].astype(np.int32)
        labels, classes = whole[:, 0], whole[:, 1:]
        probabilities = rows[:, 3 + self._top :]
        pairs, counts = np.unique(whole[:, :2].astype(np.int64), axis=0, return_counts=True)
        facts = facts[facts[:, -1] > -np.inf]
        _, own, answers, label_probabilities, answer_probabilities, losses = facts.T
        analysis = ErrorAnalysis(
            step=step,
            confusion=np.column_stack([pairs, counts]),
            images=images[: len(facts)].astype(np.uint8),
            labels=own.astype(np.int32),
            answers=answers.astype(np.int32),
            label_probabilities=label_probabilities,
            answer_probabilities=answer_probabilities,
            losses=losses,
            calibration=reliability(probabilities[:, 0], classes[:, 0] == labels),
        )
        return analysis, ImagePredictions(
            places,
            labels,
            rows[:, 2],
            classes,
            probabilities,
            facts[:, 0].astype(np.int64),
            slopes.astype(np.float64).sum(axis=0),
        )

    def _of_all_replicas(self) -> tuple[tf.Tensor, ...]:
        """Returns the rows, worst mistakes and sums of all replicas; in a replica."""
        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group
        images, facts, slopes = local_values(self._variables)
        rows = self._rows.of_all_replicas()
        # Rows are counted over all replicas.
        before = tf.cast(replica * (rows.shape[0] // context.num_replicas_in_sync), tf.float32)
        facts = gathered(tf.concat([facts[:, :1] + before, facts[:, 1:]], axis=1))
        _, places = tf.math.top_k(facts[:, -1], _MISTAKES)
        own = tf.reshape(tf.equal(places // _MISTAKES, replica), [-1, 1, 1, 1])
        images = tf.where(own, tf.gather(images, places % _MISTAKES), 0.0)
        images = context.all_reduce(tf.distribute.ReduceOp.SUM, images)
        return rows, images, tf.gather(facts, places), gathered(slopes)


def _rows(
    labels: tf.Tensor, weights: tf.Tensor, logits: tf.Tensor, loss: str, top: int
) -> tf.Tensor:
    """Returns what is kept of each image of a batch, float32 [batch, 3 + 2 * top].

    Label, 1 if the image counts, loss, the best classes and their probabilities.
    """
    losses = image_losses(logits, labels, loss=loss)
    losses = tf.where(tf.math.is_nan(losses), np.inf, losses)
    probabilities = _without_nan(class_probabilities(logits, loss))
    # Of the logits: probabilities may be rounded to the same.
    _, classes = tf.math.top_k(logits, top)
    columns = [tf.cast(column, tf.float32) for column in (labels, weights > 0)]
    return tf.concat(
        [
            tf.stack([*columns, losses], axis=1),
            tf.cast(classes, tf.float32),
            tf.gather(probabilities, classes, batch_dims=1),
        ],
        axis=1,
    )


def _without_nan(values: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.math.is_nan(values), 0.0, values)


def _worst_of_batch(
    images: tf.Tensor, rows: tf.Tensor, first: tf.Tensor, logits: tf.Tensor, loss: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a batch's worst mistakes, in descending order of their loss.

    Args:
      images: [batch, size, size, 3].
      rows: of :func:`_rows`.
      first: number of earlier rows of the replica, int64.
      logits: float32 [batch, classes].
      loss: of an image, see ``image_losses``.

    Returns:
      The images, float32 [mistakes, size, size, 3], and ``_FACTS``, float32 [mistakes, facts].
    """
    labels, counts, losses, answers = tf.unstack(rows[:, :4], axis=1)
    labels = tf.maximum(labels, 0)  # for padding
    probabilities = _without_nan(class_probabilities(logits, loss))
    wrong = (counts > 0) & (answers != labels)
    count = tf.minimum(_MISTAKES, tf.shape(rows)[0])
    worst, indices = tf.math.top_k(tf.where(wrong, losses, -np.inf), count)
    facts = [
        tf.cast(first + tf.range(tf.shape(rows, tf.int64)[0]), tf.float32),
        labels,
        answers,
        tf.gather(probabilities, tf.cast(labels, tf.int32), batch_dims=1),
        tf.reduce_max(probabilities, axis=1),
    ]
    facts = tf.stack([*(tf.gather(fact, indices) for fact in facts), worst], axis=1)
    return tf.cast(tf.gather(images, indices), tf.float32), facts
