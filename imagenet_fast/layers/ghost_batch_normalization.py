"""Ghost batch norm: batch norm over small groups of a batch's images."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers.batch_normalization import BatchNormalization

# Options of Keras' layer that change its statistics.
_CONFLICTING = ("synchronized", "fused", "renorm", "virtual_batch_size", "adjustment")


@keras.saving.register_keras_serializable("imagenet_fast")
class GhostBatchNormalization(BatchNormalization):
    """Keras' batch norm, with separate statistics for groups of a batch's images.

    Ghost batch norm (Hoffer et al. 2017, "Train longer, generalize better") as in Page 2019, "How
    to Train Your ResNet 8". In training, a batch of N images has N / ``ghost_batch_size`` groups;
    image n belongs to group n modulo their number. Each group is normalized with its mean and
    biased variance, in float32, or float64 if the layer computes in it. A batch of up to
    ``ghost_batch_size`` images is one group. Under a strategy, N is the batch of one replica.

    The moving averages are updated with the groups' average mean and average variance, the latter
    with Bessel's correction as in PyTorch and Keras' fused kernel. Page has moving averages for
    each group, and averages them for evaluation: since updates are linear, the result is the same,
    but here the weights do not depend on the batch size. (With an EMA of the weights, Page's
    evaluation takes the averages of the first group only.) Evaluation is that of Keras' layer.

    Input: [batch, ..., channels], of rank 2 or more. Output: the same shape, in the compute dtype.
    Calling the layer in training raises a ``UserError`` if the groups do not divide the batch, or
    an ``InvalidArgumentError`` if the batch size is unknown when a ``tf.function`` is traced.

    Args:
      axis: axis of the channels; must be the last one.
      ghost_batch_size: images in a group.
      **kwargs: options of Keras' layer (``momentum``, ``epsilon``, ``scale``, ...), except those
        that change its statistics.

    Raises:
      UserError: if an option cannot be used; for ``axis``, when the layer is built.
    """

    def __init__(self, axis: int = -1, *, ghost_batch_size: int, **kwargs: Any) -> None:
        if ghost_batch_size < 1:
            raise UserError(f"ghost_batch_size is {ghost_batch_size}, but must be positive")
        for option in _CONFLICTING:
            if kwargs.get(option):
                raise UserError(f"GhostBatchNormalization has no {option}: see ghost_batch_size")
        super().__init__(axis=axis, **kwargs)
        self.ghost_batch_size = ghost_batch_size

    def build(self, input_shape: Any) -> None:
        """Makes the weights: those of Keras' layer."""
        super().build(input_shape)
        axes = [self.axis] if isinstance(self.axis, int) else list(self.axis)
        if axes not in ([-1], [len(input_shape) - 1]):
            raise UserError(
                f"GhostBatchNormalization got axis {axes} of inputs of shape "
                f"{tuple(input_shape)}, but the channels must come last: axis=-1"
            )

    def call(
        self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Normalizes by the groups' statistics if ``training``, else by the moving averages."""
        if mask is not None:
            raise UserError("GhostBatchNormalization does not support masks")
        inputs = tf.cast(inputs, self.compute_dtype)
        if training and self.trainable:
            return self._normalize_groups(inputs)
        return super().call(inputs, training=False)

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {**super().get_config(), "ghost_batch_size": self.ghost_batch_size}

    def _normalize_groups(self, inputs: tf.Tensor) -> tf.Tensor:
        shape = tf.shape(inputs)
        images, channels = shape[0], inputs.shape[-1]
        groups = self._number_of_groups(inputs)
        grouped = tf.reshape(
            inputs, [images // groups, groups, tf.reduce_prod(shape[1:-1]), channels]
        )
        gamma, beta = self._gamma_and_beta(channels)
        # XLA fuses arithmetic, which is then faster; the kernel does not support float64.
        if tf.__internal__.get_enclosing_xla_context() or inputs.dtype == tf.float64:
            shift = tf.convert_to_tensor(self.moving_mean)
            results = _by_arithmetic(grouped, gamma, beta, self.epsilon, shift)
        else:
            results = _by_kernel(grouped, gamma, beta, self.epsilon)
        outputs, means, variances = results
        self._average(inputs, tf.reduce_mean(means, axis=0), tf.reduce_mean(variances, axis=0))
        return tf.reshape(outputs, shape)

    def _number_of_groups(self, inputs: tf.Tensor) -> int | tf.Tensor:
        size = self.ghost_batch_size
        message = (
            f"{self.name}: groups of {size} images do not divide the batch; drop the remainder of "
            "the data after full batches, or choose a ghost_batch_size that divides the batch; "
            "images in the batch (of each replica):"
        )
        images = inputs.shape[0]
        if images is not None:
            if images > size and images % size:
                raise UserError(f"{message} {images}")
            return max(images // size, 1)
        images = tf.shape(inputs)[0]
        fits = tf.logical_or(images <= size, images % size == 0)
        with tf.control_dependencies([tf.debugging.Assert(fits, [message, images])]):
            return tf.maximum(images // size, 1)


def _by_kernel(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalizes the groups of ``x`` with TensorFlow's fused kernel, groups as further channels.

    Args:
      x: [images per group, groups, positions, channels].
      gamma: [channels].
      beta: [channels].
      epsilon: added to the variance.

    Returns:
      The outputs, of x's shape; the means and the unbiased variances, [groups, channels].
    """
    images, groups, positions, channels = tf.unstack(tf.shape(x))
    outputs, means, variances, *_ = tf.raw_ops.FusedBatchNormV3(
        x=tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [images, positions, 1, groups * channels]),
        scale=tf.tile(gamma, [groups]),
        offset=tf.tile(beta, [groups]),
        mean=[],
        variance=[],
        epsilon=epsilon,
        is_training=True,
    )
    outputs = tf.transpose(tf.reshape(outputs, [images, positions, groups, channels]), [0, 2, 1, 3])
    statistics_shape = [groups, channels]
    return outputs, tf.reshape(means, statistics_shape), tf.reshape(variances, statistics_shape)


def _by_arithmetic(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float, shift: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Equivalent of ``_by_kernel`` by arithmetic in gamma's dtype.

    ``shift``, [channels], is an approximate mean, subtracted first: where the mean is large,
    rounding would dominate the variance E[x^2] - E[x]^2.
    """
    dtype = x.dtype
    shift = tf.stop_gradient(tf.cast(shift, gamma.dtype))
    x = tf.cast(x, gamma.dtype) - shift
    mean = _mean_of_groups(x)
    # Rounding may make the difference negative.
    variance = tf.maximum(_mean_of_groups(tf.square(x)) - tf.square(mean), 0)
    scale = gamma * tf.math.rsqrt(variance + epsilon)
    outputs = tf.cast(x * scale + (beta - mean * scale), dtype)
    entries = tf.cast(tf.shape(x)[0] * tf.shape(x)[2], x.dtype)
    unbiased = variance * entries / tf.maximum(entries - 1, 1)
    return outputs, tf.squeeze(mean, [0, 2]) + shift, tf.squeeze(unbiased, [0, 2])


def _mean_of_groups(x: tf.Tensor) -> tf.Tensor:
    """Returns [1, groups, 1, channels]; reducing one axis at a time is faster than both at once."""
    return tf.reduce_mean(tf.reduce_mean(x, axis=0, keepdims=True), axis=2, keepdims=True)
