"""Probabilities and labels of all images of an evaluation of multi-label data."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from imagenet_fast.base.notices import warn_once
from imagenet_fast.data.steps import evaluation_batch_size, evaluation_steps
from imagenet_fast.distribute.one_call import one_call
from imagenet_fast.training.run import Run
from imagenet_fast.training.step.losses import class_probabilities
from imagenet_fast.training.step.rows import Rows

# Bytes on a device above which there is a warning.
_LARGE = 2**30


class Scores:
    """A model's probabilities in an evaluation, which exact average precision needs all of.

    ``TrainingStep.test_step`` adds those of a replica's batch; devices keep them, 8 bytes for each
    image and class of the replica, and at the end for each of all replicas. Make it outside of
    replicas, in all workers.
    """

    def __init__(self, run: Run, loss: str, split: str, classes: int) -> None:
        options, info, self._strategy = run.config, run.info, run.strategy
        self._loss, self._classes = loss, classes
        batch = evaluation_batch_size(options, run.strategy, info.splits[split].examples)
        images = evaluation_steps(info, options, run.strategy, split) * batch
        size = 8 * images * classes * (1 + run.strategy.num_replicas_in_sync)
        if size > _LARGE:
            warn_once(
                f"mean average precision takes {size / 2**30:.1f} GiB of each device, for the "
                f"probabilities of all {split} images: evaluate fewer images if that is too much"
            )
        self._rows = Rows(run.strategy, images, 2 * classes, fill=-1.0)
        self._reset = one_call(run.strategy, self._rows.reset)

        # In one function, as in error_analysis.py; traced once.
        @tf.function(autograph=False)
        def of_all_replicas() -> tf.Tensor:
            rows = self._strategy.run(self._rows.of_all_replicas)
            return self._strategy.experimental_local_results(rows)[0]

        self._of_all_replicas = of_all_replicas

    def reset(self) -> None:
        """Forgets all scores; outside of replicas."""
        self._reset()

    def add(
        self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, logits: tf.Tensor
    ) -> None:
        """Adds those of a batch; to be called in a replica.

        Args:
          images: not used.
          labels: int32 [batch, classes]; negative ones mark padding.
          weights: float32 [batch]; 0 for images that do not count.
          logits: float32 [batch, classes].
        """
        del images
        counted = tf.where(weights[:, tf.newaxis] > 0, tf.cast(labels, tf.float32), -1.0)
        self._rows.add(tf.concat([class_probabilities(logits, self._loss), counted], axis=1))

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns probabilities, float32 [images, classes], and labels, bool of the same shape.

        They are of the readable images, the same in all workers, which must all call it.
        """
        rows = self._of_all_replicas().numpy()
        rows = rows[rows[:, -1] >= 0]
        return rows[:, : self._classes], rows[:, self._classes :] > 0
