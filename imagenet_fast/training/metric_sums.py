"""Loss and accuracy over many steps, summed on the device without a word between replicas."""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.distribute.one_call import assign_own, one_call

NAMES = ("loss", "top1", "top5", "examples", "skipped")


def batch_sums(
    logits: tf.Tensor, losses: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor
) -> tf.Tensor:
    """Returns the sums over a batch that :class:`MetricSums` adds up.

    Args:
      logits: float32 [batch, classes].
      losses: float32 [batch], without weights.
      labels: int32 [batch]; negative ones are padding.
      weights: float32 [batch]; 0 for images that do not count, else 1 or of one's own choice.

    Returns:
      float32 [5]: the weighted sums of losses, of right first answers and of right answers among
      the first five, the sum of weights, and the number of images that are real and have none.
    """
    right = tf.gather(logits, tf.maximum(labels, 0), batch_dims=1)
    # Ties count against the model, so that equal logits are no answer; NaN is never above.
    rank = tf.reduce_sum(tf.cast(logits >= right[:, tf.newaxis], tf.int32), axis=1)
    finite = tf.cast(rank > 0, tf.float32)
    real = tf.cast(labels >= 0, tf.float32)
    return tf.stack(
        [
            tf.reduce_sum(losses * weights),
            tf.reduce_sum(tf.cast(rank <= 1, tf.float32) * finite * weights),
            tf.reduce_sum(tf.cast(rank <= 5, tf.float32) * finite * weights),
            tf.reduce_sum(weights),
            tf.reduce_sum(real * tf.cast(weights == 0, tf.float32)),
        ]
    )


class MetricSums:
    """Running sums of what :func:`batch_sums` returns, summed over the replicas already.

    Each replica keeps its own copy of the same numbers, so that neither adding nor reading needs
    the others. Float32 counts images exactly up to 16.7 million. Not a ``tf.Module``, since Keras
    would take its variable for one of the model's weights. To be made in the strategy's scope.
    """

    def __init__(self) -> None:
        self.variable = tf.Variable(
            tf.zeros([len(NAMES)]),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            name="sums",
        )
        self._reset = one_call(tf.distribute.get_strategy(), self._reset_own)

    def reset(self) -> None:
        """Starts again from nothing; outside of replicas."""
        self._reset()

    def _reset_own(self) -> None:
        assign_own([self.variable], [tf.zeros([len(NAMES)])])

    def add(self, sums: tf.Tensor) -> None:
        """Adds one step's sums over all replicas: float32 [5]."""
        self.variable.assign_add(sums)

    def results(self) -> dict[str, tf.Tensor]:
        """Returns means over the images so far, and how many they are: float32 scalars."""
        sums = dict(zip(NAMES, tf.unstack(self.variable.read_value())))
        examples = sums["examples"]
        means = {name: tf.math.divide_no_nan(sums[name], examples) for name in NAMES[:3]}
        return {**means, "examples": examples, "skipped": sums["skipped"]}
