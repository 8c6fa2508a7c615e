"""Error analysis of a trained model: confusion matrix and worst mistakes."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from imagenet_fast.data.steps import evaluation_batch_size, evaluation_steps
from imagenet_fast.distribute.one_call import assign_local, local_values, one_call
from imagenet_fast.training.run import Run
from imagenet_fast.training.step.losses import class_probabilities, image_losses
from imagenet_fast.training.step.rows import Rows, gathered

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


class Predictions:
    """A model's predictions in an evaluation, kept on the devices: all classes, and worst mistakes.

    ``TrainingStep.test_step`` adds those of a replica's batch, so that the analysis needs no
    further pass over the images. Make it outside of replicas, in all workers.

    Args:
      run: the run, whose data has images of the split.
      loss: of an image, see ``image_losses``.
      split: ``validation`` or ``test``.
    """

    def __init__(
        self,
        run: Run,
        loss: str = "cross_entropy",
        split: str = "validation",
    ) -> None:
        options, info, strategy = run.config, run.info, run.strategy
        self._strategy = strategy
        self._loss = loss
        images = evaluation_steps(info, options, strategy, split) * evaluation_batch_size(
            options, strategy, info.splits[split].examples
        )
        size = options.evaluation_image_size

        def empty() -> list[tf.Tensor]:
            return [
                # Variables of several workers cannot be uint8.
                tf.zeros([_MISTAKES, size, size, 3]),
                tf.fill([_MISTAKES, 5], -np.inf),
            ]

        with strategy.scope():
            self._variables = [
                tf.Variable(
                    value,
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                    name=name,
                )
                for name, value in zip(("images", "facts"), empty())
            ]
        # Label, prediction, and 1 if the image counts.
        self._rows = Rows(strategy, images, 3)

        def reset() -> None:
            self._rows.reset()
            assign_local(self._variables, empty())

        self._reset = one_call(strategy, reset)

    def reset(self) -> None:
        """Forgets all predictions; outside of replicas."""
        self._reset()

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
        answers, *mistakes = _worst_of_batch(images, labels, weights, logits, self._loss)
        columns = (labels, answers, weights > 0)
        self._rows.add(tf.stack([tf.cast(column, tf.float32) for column in columns], axis=1))
        worst = local_values(self._variables)
        images, facts = (tf.concat(parts, 0) for parts in zip(worst, mistakes))
        _, places = tf.math.top_k(facts[:, -1], _MISTAKES)
        assign_local(self._variables, [tf.gather(images, places), tf.gather(facts, places)])

    def analysis(self, step: int) -> ErrorAnalysis:
        """Returns the error analysis, the same in all workers, which must all call it.

        Args:
          step: weight updates of the model.
        """

        # In one function: outside, each replica of a TPU slice would be fetched from its host.
        @tf.function(autograph=False)
        def of_all_replicas() -> list[tf.Tensor]:
            results = self._strategy.run(self._of_all_replicas)
            return [self._strategy.experimental_local_results(part)[0] for part in results]

        rows, images, facts = (part.numpy() for part in of_all_replicas())
        pairs = rows[rows[:, 2] > 0, :2].astype(np.int64)
        pairs, counts = np.unique(pairs, axis=0, return_counts=True)
        mistakes = np.count_nonzero(facts[:, -1] > -np.inf)
        labels, answers, label_probabilities, answer_probabilities, losses = facts[:mistakes].T
        return ErrorAnalysis(
            step=step,
            confusion=np.column_stack([pairs, counts]),
            images=images[:mistakes].astype(np.uint8),
            labels=labels.astype(np.int32),
            answers=answers.astype(np.int32),
            label_probabilities=label_probabilities,
            answer_probabilities=answer_probabilities,
            losses=losses,
        )

    def _of_all_replicas(self) -> tuple[tf.Tensor, ...]:
        """Returns the rows of all replicas, and their worst mistakes; in a replica."""
        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group
        images, facts = local_values(self._variables)
        rows, facts = self._rows.of_all_replicas(), gathered(facts)
        _, places = tf.math.top_k(facts[:, -1], _MISTAKES)
        own = tf.reshape(tf.equal(places // _MISTAKES, replica), [-1, 1, 1, 1])
        images = tf.where(own, tf.gather(images, places % _MISTAKES), 0.0)
        images = context.all_reduce(tf.distribute.ReduceOp.SUM, images)
        return rows, images, tf.gather(facts, places)


def _worst_of_batch(
    images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, logits: tf.Tensor, loss: str
) -> tuple[tf.Tensor, ...]:
    """Returns a batch's predictions and its worst mistakes.

    Returns:
      predictions, int32 [batch]; and of the worst mistakes, in descending order of their loss, the
      images, float32 [mistakes, size, size, 3], and facts, float32 [mistakes, 5]: label,
      prediction, the probabilities of both and the loss, -inf where there are fewer mistakes.
    """
    classes = tf.maximum(labels, 0)  # for padding
    losses = image_losses(logits, labels, loss=loss)
    losses = tf.where(tf.math.is_nan(losses), np.inf, losses)
    probabilities = class_probabilities(logits, loss)
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
    return answers, tf.cast(tf.gather(images, indices), tf.float32), facts
