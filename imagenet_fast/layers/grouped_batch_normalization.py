"""Batch norm over the images of groups of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.distribute.group_sum import group_sum
from imagenet_fast.distribute.groups import Groups, consecutive
from imagenet_fast.layers.batch_normalization import BatchNormalization

# Options of Keras' layer that change its statistics, or those of this layer.
_CONFLICTING = ("synchronized", "fused", "renorm", "virtual_batch_size", "unbiased_variance")


@keras.saving.register_keras_serializable("imagenet_fast")
class GroupedBatchNormalization(BatchNormalization):
    """Keras' batch norm, with statistics over the images of neighbouring replicas.

    In training, the replicas of a group use the mean and biased variance of all their images, in
    float32, to normalize and to update their moving averages. This takes one all-reduce in the
    group forward, of [sums, sums of squares, count], and one backward (Ying et al. 2018, "Image
    Classification at Supercomputer Scale"). The variance is E[d^2] - E[d]^2 as in Google's code for
    MLPerf 0.6, but with d the difference from the moving mean: of the inputs, it would lose 1% to
    rounding where the mean is 100 standard deviations, and be lost at 1000.

    Works in any Keras model, under ``MirroredStrategy``, ``MultiWorkerMirroredStrategy`` and
    ``TPUStrategy``; all workers must make the same layers in the same order, or name them. On one
    replica, or with ``group_size=1``, it is Keras' layer with its fused kernel. Each group has its
    own moving averages; Keras saves those of the first.

    Args:
      axis: axis of the channels, as in Keras' layer.
      group_size: replicas in a group, a divisor of their number; None: all replicas.
      **kwargs: options of Keras' layer (``momentum``, ``epsilon``, ``gamma_initializer``, ...),
        except those that change its statistics.

    Raises:
      UserError: if an option cannot be used; when the layer is built in a strategy's scope, if its
        replicas cannot be split into such groups.
    """

    def __init__(self, axis: int = -1, *, group_size: int | None = None, **kwargs: Any) -> None:
        if group_size is not None and group_size < 1:
            raise UserError(f"group_size is {group_size}, but must be positive, or None for all")
        for option in _CONFLICTING:
            if kwargs.get(option):
                raise UserError(f"GroupedBatchNormalization has no {option}: see group_size")
        super().__init__(axis=axis, **kwargs)
        self.group_size = group_size

    def build(self, input_shape: Any) -> None:
        """Makes the weights; must be called in the strategy's scope."""
        if self._groups().size > 1:
            self.fused = False  # in Keras 2
        super().build(input_shape)

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {**super().get_config(), "group_size": self.group_size}

    def _groups(self) -> Groups:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        # A model trained in groups can be used on one device.
        size = 1 if replicas == 1 else self.group_size or replicas
        return consecutive(replicas, size)

    def _fuses(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> bool:
        # The kernel computes the statistics of one replica.
        return self._groups().size == 1 and super()._fuses(inputs, mask)

    if KERAS_2:

        def _calculate_mean_and_var(
            self, inputs: tf.Tensor, axes: Sequence[int], keep_dims: bool, mask: Any = None
        ) -> tuple[tf.Tensor, tf.Tensor]:
            if self._is_alone():
                return super()._calculate_mean_and_var(inputs, axes, keep_dims, mask)
            mean, variance = self._group_moments(inputs, axes, mask)
            if not keep_dims:
                return mean, variance
            shape = [1 if axis in axes else -1 for axis in range(len(inputs.shape))]
            return tf.reshape(mean, shape), tf.reshape(variance, shape)

    else:

        def _moments(self, inputs: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
            """Overrides the training statistics of Keras' layer, in float32 or float64."""
            if self._is_alone():
                return super()._moments(inputs, mask)
            rank = len(inputs.shape)
            axes = [axis for axis in range(rank) if axis != self.axis % rank]
            return self._group_moments(inputs, axes, mask)

    def _is_alone(self) -> bool:
        """Whether there is nothing to reduce, as in cross-replica context, that of new models."""
        return self._groups().size == 1 or tf.distribute.in_cross_replica_context()

    def _group_moments(
        self, inputs: tf.Tensor, axes: Sequence[int], mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the mean and biased variance of the group's inputs, [channels].

        ``axes`` are all but that of the channels.
        """
        shape = [1 if axis in axes else -1 for axis in range(len(inputs.shape))]
        # Equal in all replicas of a group, which update it by the same statistics.
        shift = tf.stop_gradient(tf.cast(self.moving_mean, inputs.dtype))
        inputs -= tf.reshape(shift, shape)
        if mask is None:
            entries = tf.cast(tf.size(inputs), inputs.dtype)
        else:
            weights = tf.expand_dims(tf.cast(mask, inputs.dtype), axis=-1)
            inputs *= weights
            entries = tf.reduce_sum(tf.broadcast_to(weights, tf.shape(inputs)))
        sums = tf.reduce_sum(inputs, axes)
        squares = tf.reduce_sum(tf.square(inputs), axes)
        channels = sums.shape.num_elements()
        local = tf.concat([sums, squares, [entries / channels]], axis=0)
        group = group_sum(local, self._groups(), self.name)
        mean, square, _ = tf.split(tf.math.divide_no_nan(group, group[-1]), [channels, channels, 1])
        # Rounding may make the difference negative.
        variance = tf.maximum(square - tf.square(mean), 0)
        return mean + shift, variance
