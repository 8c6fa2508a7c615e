"""Keras' batch norm on TensorFlow's fused kernels, with an average of its own in each replica."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import KERAS_2, per_replica_variable

_AVERAGES = ("moving_mean", "moving_variance")


@keras.saving.register_keras_serializable("imagenet_fast")
class BatchNormalization(keras.layers.BatchNormalization):
    """Keras' batch norm, faster on the TensorFlow backend.

    It has the configuration, weights and results of ``keras.layers.BatchNormalization``, which
    computes moments and output by separate operations. Here one fused kernel does, forward and
    backward, for batches of images with the channels last, in float32, float16 and bfloat16, with
    float32 weights; for other inputs and weights, masks, ``renorm`` and ``synchronized``, Keras'
    way. The arithmetic is float32.

    Under a strategy of several replicas, each keeps moving averages of its own, which costs no
    communication; read from outside of the replicas, they are the mean over the replicas. (Keras'
    layer asks for ``synchronized``.)

    Input: [batch, ..., channels]. Output: the same shape, in the compute dtype.

    Args:
      axis: axis of the channels.
      unbiased_variance: whether the moving variance is of unbiased variances, with Bessel's
        correction, as in the papers' code in TensorFlow 1, PyTorch and Caffe2; Keras 3 has biased
        ones. Not with masks, ``renorm`` or ``synchronized``. In Keras 2, it has no effect.
      **kwargs: further options of Keras' layer.

    Raises:
      UserError: if the moving variance cannot be of unbiased variances.
    """

    def __init__(self, axis: int = -1, *, unbiased_variance: bool = False, **kwargs: Any) -> None:
        super().__init__(axis=axis, **kwargs)
        self.unbiased_variance = unbiased_variance
        for option in ("renorm", "synchronized"):
            if unbiased_variance and kwargs.get(option):
                raise UserError(f"unbiased_variance does not work with {option}: leave one out")

    def add_weight(self, *args: Any, name: str = "", **kwargs: Any) -> Any:
        """Keras' ``add_weight``; moving averages are for each replica."""
        if KERAS_2 or name not in _AVERAGES:
            return super().add_weight(*args, name=name, **kwargs)
        return per_replica_variable(
            self,
            name,
            kwargs["shape"],
            kwargs["initializer"],
            dtype=self.variable_dtype,
            aggregation="mean",
        )

    def call(
        self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Normalizes by the batch's statistics in training, else by the moving averages."""
        updates = training and self.trainable
        if KERAS_2 or not self._fuses(inputs, mask):
            if KERAS_2 or not (self.unbiased_variance and updates):
                return super().call(inputs, training=training, mask=mask)
            if mask is not None:
                raise UserError("unbiased_variance does not work with masks: leave one out")
            kept = self.momentum * self.moving_variance
            outputs = super().call(inputs, training=training)
            self._correct(inputs, self.moving_variance - kept)
            return outputs
        gamma, beta = self._gamma_and_beta(inputs.shape[-1])
        if not updates:
            return _fused(inputs, gamma, beta, self.epsilon, self._averages())[0]
        # The kernel can update averages, too; XLA's cannot.
        if self.unbiased_variance and not tf.__internal__.get_enclosing_xla_context():
            averages, factor = self._averages(), 1 - self.momentum
            outputs, *updated = _fused(inputs, gamma, beta, self.epsilon, averages, factor)
            for average, before, after in zip(
                (self.moving_mean, self.moving_variance), averages, updated
            ):
                average.assign(_if_any(inputs, after, before))
            return outputs
        outputs, mean, variance = _fused(inputs, gamma, beta, self.epsilon)
        if not self.unbiased_variance:
            entries = tf.cast(tf.size(inputs) // inputs.shape[-1], tf.float32)
            variance *= (entries - 1) / entries
        self._average(inputs, mean, variance)
        return outputs

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {**super().get_config(), "unbiased_variance": self.unbiased_variance}

    def _fuses(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> bool:
        """Whether the fused kernel can compute this call."""
        return (
            keras.backend.backend() == "tensorflow"
            and mask is None
            and not getattr(self, "renorm", False)  # Keras 3.12 lacks it
            and not self.synchronized
            and len(inputs.shape) == 4
            and self.axis in (-1, 3)
            and inputs.dtype in ("float32", "float16", "bfloat16")
            and self.variable_dtype == "float32"
        )

    def _correct(self, inputs: Any, update: Any) -> None:
        """Makes Keras' update of the moving variance, by a biased one, that by an unbiased one."""
        entries = keras.ops.size(inputs) // inputs.shape[self.axis]
        others = keras.ops.maximum(entries - 1, 1)
        self.moving_variance.assign_add(update / keras.ops.cast(others, update.dtype))

    def _gamma_and_beta(self, channels: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns both in the dtype of the arithmetic: float32, or float64 if they are."""
        dtype = "float64" if self.variable_dtype == "float64" else "float32"
        return (
            tf.cast(self.gamma, dtype) if self.scale else tf.ones([channels], dtype),
            tf.cast(self.beta, dtype) if self.center else tf.zeros([channels], dtype),
        )

    def _averages(self) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.convert_to_tensor(self.moving_mean), tf.convert_to_tensor(self.moving_variance)

    def _average(self, inputs: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor) -> None:
        """Updates the moving averages by the statistics of a batch."""
        for average, value in zip((self.moving_mean, self.moving_variance), (mean, variance)):
            # Keras' sum of products would round otherwise where both are equal.
            before = tf.convert_to_tensor(average)
            change = (1 - self.momentum) * (tf.cast(value, before.dtype) - before)
            average.assign_add(_if_any(inputs, change, tf.zeros_like(change)))


def _if_any(inputs: tf.Tensor, value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Returns ``value``, or ``other`` for a replica without images, as of a partial last batch."""
    return value if inputs.shape[0] else tf.where(tf.size(inputs) > 0, value, other)


def _fused(
    inputs: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    epsilon: float,
    averages: tuple[tf.Tensor, tf.Tensor] | None = None,
    factor: float = 0.0,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the outputs of the kernel, and the mean and unbiased variance that it has used.

    Args:
      inputs: [batch, height, width, channels].
      gamma: float32 [channels].
      beta: float32 [channels].
      epsilon: added to the variance.
      averages: moving ones of mean and variance, to normalize by; None: the batch's own.
      factor: of the batch's statistics in the averages: if positive, they normalize, and the
        averages that are returned include them.
    """
    mean, variance = averages or ([], [])
    outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=inputs,
        scale=gamma,
        offset=beta,
        mean=mean,
        variance=variance,
        epsilon=epsilon,
        exponential_avg_factor=factor or 1.0,
        is_training=averages is None or factor > 0,
    )
    return outputs, mean, variance
