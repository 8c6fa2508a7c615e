"""Error analysis of a trained model: confusion matrix and worst mistakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.options import InputOptions
from imagenet_fast.data.steps import evaluation_steps
from imagenet_fast.distribute.exchange import rows_of_all_workers, sum_over_workers
from imagenet_fast.distribute.workers import worker_place
from imagenet_fast.training.logs.recorder import check_evaluated
from imagenet_fast.training.step.classifier import Classifier
from imagenet_fast.training.step.losses import class_probabilities, image_losses

_MISTAKES = 24


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
    """

    step: int
    confusion: np.ndarray
    images: np.ndarray
    labels: np.ndarray
    answers: np.ndarray
    label_probabilities: np.ndarray
    answer_probabilities: np.ndarray
    losses: np.ndarray


def analyze_errors(
    model: Classifier,
    options: InputOptions,
    info: DatasetInfo,
    step: int,
    split: str = "validation",
) -> ErrorAnalysis:
    """Predicts each image of a split once more, on all replicas; all workers must call it.

    It repeats the evaluation with the same batches, devices and averaged weights, and so has the
    same predictions. Each worker counts its images on the host; the counts are summed once, at the
    end.

    Args:
      model: the trained model.
      options: give the data and how it is read.
      info: of the data, which has images of the split.
      step: weight updates of the model.
      split: ``validation`` or ``test``.

    Returns:
      The analysis, the same in all workers.

    Raises:
      RuntimeError: if images are missing or were counted twice.
    """
    strategy = model.distribute_strategy
    predicted = []  # (label, prediction) of each image
    skipped = np.zeros([], np.float32)
    worst = _WorstMistakes(options.evaluation_image_size)
    with model.evaluated_weights():
        for labels, answers, weights, *mistakes in _results(model, options, info, split):
            counted = weights > 0
            predicted.append(np.stack([labels[counted], answers[counted]], axis=1))
            skipped += np.sum(~counted & (labels >= 0))
            worst.add(*mistakes)
    pairs = rows_of_all_workers(strategy, np.concatenate(predicted))
    (skipped,) = sum_over_workers(strategy, skipped)
    check_evaluated(
        {"examples": len(pairs), "skipped": float(skipped)}, info.splits[split].examples
    )
    pairs, counts = np.unique(pairs, axis=0, return_counts=True)
    images, facts = worst.of_all_workers(strategy)
    labels, answers, label_probabilities, answer_probabilities, losses = facts.T
    return ErrorAnalysis(
        step=step,
        confusion=np.column_stack([pairs, counts]),
        images=images,
        labels=labels.astype(np.int32),
        answers=answers.astype(np.int32),
        label_probabilities=label_probabilities,
        answer_probabilities=answer_probabilities,
        losses=losses,
    )


def _results(
    model: Classifier, options: InputOptions, info: DatasetInfo, split: str
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields the results of :func:`_predict` for each step, of all of this worker's replicas."""
    strategy = model.distribute_strategy

    def replica_step(data: Any) -> tuple[tf.Tensor, ...]:
        return _predict(model, *model.batch(data, split))

    @tf.function(autograph=False)
    def take_step(batches: Iterator) -> tuple[tf.Tensor, ...]:
        results = strategy.run(replica_step, args=(next(batches),))
        # In the function: outside, each replica of a TPU slice would be fetched from its host.
        with tf.device("CPU:0"):
            return tuple(
                tf.concat(strategy.experimental_local_results(part), 0) for part in results
            )

    batches = iter(distributed_dataset(options, split))
    for _ in range(evaluation_steps(info, options, strategy, split)):
        yield tuple(part.numpy() for part in take_step(batches))


def _predict(
    model: Classifier, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor
) -> tuple[tf.Tensor, ...]:
    """Predicts a replica's batch.

    Returns:
      labels, predictions and weights, [batch]; and of its worst mistakes the images, uint8
      [mistakes, size, size, 3], and facts, float32 [mistakes, 5]: label, prediction, the
      probabilities of both and the loss, -inf where there are fewer mistakes.
    """
    logits = tf.cast(model.logits(images, weights), tf.float32)
    classes = tf.maximum(labels, 0)  # for padding
    losses = image_losses(logits, labels, loss=model.image_loss)
    losses = tf.where(tf.math.is_nan(losses), np.inf, losses)
    probabilities = class_probabilities(logits, model.image_loss)
    of_label = tf.gather(probabilities, classes, batch_dims=1)
    answers = tf.argmax(logits, axis=1, output_type=tf.int32)
    wrong = (weights > 0) & (answers != classes)
    count = tf.minimum(_MISTAKES, tf.shape(losses)[0])
    worst, indices = tf.math.top_k(tf.where(wrong, losses, -np.inf), count)
    facts = [
        tf.cast(classes, tf.float32),
        tf.cast(answers, tf.float32),
        tf.where(tf.math.is_nan(of_label), 0.0, of_label),
        tf.reduce_max(probabilities, axis=1),
    ]
    facts = tf.stack([*(tf.gather(fact, indices) for fact in facts), worst], axis=1)
    return labels, answers, weights, tf.gather(images, indices), facts


class _WorstMistakes:
    """The worst mistakes so far.

    Args:
      size: height and width of the images.
    """

    def __init__(self, size: int) -> None:
        self._images = np.zeros([0, size, size, 3], np.uint8)
        self._facts = np.zeros([0, 5], np.float32)

    def add(self, images: np.ndarray, facts: np.ndarray) -> None:
        """Adds those of a batch, as :func:`_predict` returns them."""
        images = np.concatenate([self._images, images])
        facts = np.concatenate([self._facts, facts])
        order = _worst_first(facts[:, -1])
        self._images, self._facts = images[order], facts[order]

    def of_all_workers(self, strategy: tf.distribute.Strategy) -> tuple[np.ndarray, np.ndarray]:
        """Returns the images and facts of the worst mistakes of all workers, in all workers.

        Workers exchange losses first, then only the images that are shown.
        """
        workers, this = worker_place(strategy)
        losses = np.zeros([workers, _MISTAKES], np.float32)
        losses[this] = -np.inf
        losses[this, : len(self._facts)] = self._facts[:, -1]
        (losses,) = sum_over_workers(strategy, losses)
        chosen = _worst_first(losses.ravel())
        images = np.zeros([len(chosen), *self._images.shape[1:]], np.float32)
        facts = np.zeros([len(chosen), 5], np.float32)
        for rank, (worker, index) in enumerate(zip(*np.unravel_index(chosen, losses.shape))):
            if worker == this:
                images[rank], facts[rank] = self._images[index], self._facts[index]
        images, facts = sum_over_workers(strategy, images, facts)
        return images.astype(np.uint8), facts


def _worst_first(losses: np.ndarray) -> np.ndarray:
    """Returns the indices of the highest losses, except -inf, which means no mistake."""
    order = np.argsort(-losses, kind="stable")[:_MISTAKES]
    return order[losses[order] > -np.inf]
