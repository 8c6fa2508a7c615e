"""Batch norm over the images of groups of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.group_sum import group_sum
from imagenet_fast.distribute.groups import Groups, consecutive

# Options of Keras' layer that change its statistics, or those of this layer.
_CONFLICTING = ("synchronized", "fused", "renorm", "virtual_batch_size")


@keras.saving.register_keras_serializable("imagenet_fast")
class GroupedBatchNormalization(keras.layers.BatchNormalization):
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

    def __init__(
        self, axis: int | Sequence[int] = -1, *, group_size: int | None = None, **kwargs: Any
    ) -> None:
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
            # Keras' fused kernel computes the statistics of one replica.
            self.fused = False
        super().build(input_shape)

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {**super().get_config(), "group_size": self.group_size}

    def _groups(self) -> Groups:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        # A model trained in groups can be used on one device.
        size = 1 if replicas == 1 else self.group_size or replicas
        return consecutive(replicas, size)

    def _calculate_mean_and_var(
        self,
        inputs: tf.Tensor,
        reduction_axes: Sequence[int],
        keep_dims: bool,
        mask: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Overrides the training statistics of Keras' layer, in float32 or float64."""
        groups = self._groups()
        # Keras makes models in cross-replica context, where there is nothing to reduce.
        if groups.size == 1 or tf.distribute.in_cross_replica_context():
            return super()._calculate_mean_and_var(inputs, reduction_axes, keep_dims, mask)
        # Equal in all replicas of a group, which update it by the same statistics.
        shift = tf.stop_gradient(tf.cast(self.moving_mean, inputs.dtype))
        inputs -= tf.reshape(shift, self._channels_of(inputs))
        if mask is None:
            entries = tf.cast(tf.size(inputs), inputs.dtype)
        else:
            weights = tf.expand_dims(tf.cast(mask, inputs.dtype), axis=-1)
            inputs *= weights
            entries = tf.reduce_sum(tf.broadcast_to(weights, tf.shape(inputs)))
        sums = tf.reduce_sum(inputs, reduction_axes, keep_dims)
        squares = tf.reduce_sum(tf.square(inputs), reduction_axes, keep_dims)
        channels = sums.shape.num_elements()
        local = tf.concat(
            [tf.reshape(sums, [-1]), tf.reshape(squares, [-1]), [entries / channels]], axis=0
        )
        group = group_sum(local, groups, self.name)
        mean, square, _ = tf.split(tf.math.divide_no_nan(group, group[-1]), [channels, channels, 1])
        # Rounding may make the difference negative.
        variance = tf.maximum(square - tf.square(mean), 0)
        mean = tf.reshape(mean, sums.shape) + tf.reshape(shift, sums.shape)
        return mean, tf.reshape(variance, sums.shape)

    def _channels_of(self, inputs: tf.Tensor) -> list[int]:
        """Returns the shape with which one value per channel broadcasts to ``inputs``."""
        return [size if axis in self.axis else 1 for axis, size in enumerate(inputs.shape)]
