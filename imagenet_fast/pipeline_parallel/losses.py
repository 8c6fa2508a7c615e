"""The loss that ``compile`` was given, of a whole batch or of each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.pipeline_parallel.micro_batches import MicroBatches
from imagenet_fast.pipeline_parallel.programs import floats_of
from imagenet_fast.pipeline_parallel.stage import masked, with_masks

_HOW = "use schedule='gpipe', which computes the loss of the whole batch at once"
_SPLITS = "this schedule computes the loss of each micro-batch and"


# ``labels`` and sample ``weights`` of a batch, as far as it has them.
Targets = Mapping[str, Any]


class CompiledLoss:
    """Keras' loss of a model's outputs.

    Args:
      loss: an attribute, as ``compile`` takes it; None: the loss is 0.
      loss_weights: as ``compile`` takes them.
    """

    def __init__(self, loss: Any, loss_weights: Any) -> None:
        self.loss = loss
        # Keras computes losses only as a model's; this one has no others, such as regularization.
        self._model = keras.Model(name="losses")
        self._model.compile(None, loss, loss_weights, jit_compile=False)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The mean loss of each output, if there are several, once there was a batch."""
        return self._model.metrics[1:]  # without that of all

    def logged(self, outputs: Any, targets: Targets) -> tf.Tensor:
        """Returns the loss of a batch, a scalar, and adds it to the metrics; 0 without a loss."""
        if self.loss is None:
            return tf.constant(0.0)
        labels, weights = targets.get("labels"), targets.get("weights")
        return self._model.compute_loss(None, labels, outputs, weights)

    def whole(self, outputs: Any, targets: Targets) -> tf.Tensor:
        """Returns the loss of a batch, a scalar; 0 without one.

        Raises:
          UserError: if the losses do not match the outputs, or one is not reduced to a scalar.
        """
        losses = tf.nest.flatten(self.loss)
        given = [loss for loss in losses if loss is not None]
        count = len(tf.nest.flatten(outputs))
        # In a dict, outputs may be left out.
        if not isinstance(self.loss, Mapping) and len(losses) not in (1, count):
            raise UserError(f"compile was given {len(given)} losses, but the outputs are {count}")
        for loss in given:
            if getattr(loss, "reduction", "sum") in (None, "none"):
                raise UserError(
                    f"the loss {loss.name} has reduction='none', but a pipeline trains with one "
                    "number for a batch: leave reduction out for the mean, or give "
                    "reduction='sum', by which a Keras model takes the same steps as by 'none'"
                )
        with keras.StatelessScope():  # keeps the metrics
            return self.logged(outputs, targets)

    def part(self, outputs: Any, targets: Targets, examples: Any) -> tf.Tensor:
        """Returns a micro-batch's part of the loss of a batch of ``examples``, a scalar.

        Raises:
          UserError: if the loss of a batch is known not to be a sum over micro-batches.
        """
        loss = self.whole(outputs, targets)
        if not self._averages(outputs, "weights" in targets):
            return loss
        count = tf.shape(tf.nest.flatten(outputs)[0])[0]
        return loss * tf.cast(count / examples, loss.dtype)

    def _averages(self, outputs: Any, weighted: bool) -> bool:
        """Whether the loss is a mean over the examples; else it is a sum."""
        used = self._with_outputs(outputs)
        # That of functions and names is the mean.
        reductions = [getattr(loss, "reduction", "mean") for loss, _ in used]
        means = [reduction != "sum" for reduction in reductions]
        if len(set(means)) > 1:
            raise UserError(
                f"{_SPLITS} cannot train with losses of which some are means and others sums "
                f"over the batch: give them the same reduction, or {_HOW}"
            )
        for reduction, (loss, output) in zip(reductions, used):
            ignored, mean = getattr(loss, "ignore_class", None), ""
            if ignored is not None:
                mean = f"over the labels that are not of ignore_class={ignored}, whose number"
            elif getattr(output, "_keras_mask", None) is not None:
                mean = "over the unmasked ones of masked outputs, whose number"
            elif reduction == "mean_with_sample_weight" and weighted:
                mean = "by sample weights, whose sum"
            if mean and reduction != "sum":
                raise UserError(
                    f"{_SPLITS} cannot train with the loss {_named(loss)}, a mean {mean} differs "
                    f"between micro-batches: {_HOW}"
                )
        return any(means)

    def _with_outputs(self, outputs: Any) -> list[tuple[Any, Any]]:
        """Returns each loss with the output that it is of."""
        if isinstance(self.loss, Mapping) and isinstance(outputs, Mapping):
            pairs = [(loss, outputs[name]) for name, loss in self.loss.items()]
        else:
            losses, flat = tf.nest.flatten(self.loss), tf.nest.flatten(outputs)
            pairs = list(zip(losses * (len(flat) if len(losses) == 1 else 1), flat))
        return [(loss, output) for loss, output in pairs if loss is not None]


def check_splits(
    compiled: CompiledLoss, outputs: Any, targets: Targets, examples: Any, micro_batches: int
) -> tf.Operation:
    """Returns a check that micro-batches' losses have the gradients of the batch's loss.

    Those with respect to the outputs, by which all others are computed. Its failure is an
    ``InvalidArgumentError``. NaN passes, for callbacks to find.

    All arguments are of the whole batch.
    """
    batch = MicroBatches(with_masks(outputs), targets, micro_batches)
    floats = floats_of(outputs)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(floats)
        whole = compiled.whole(outputs, targets)
        parts = tf.constant(0.0, whole.dtype)
        for number in range(batch.count):
            part = compiled.part(masked(batch.inputs(number)), batch.targets(number), examples)
            # 0 for a micro-batch that repeats an example.
            parts += part * tf.cast(tf.sign(batch.fraction(number)), part.dtype)
    zero = tf.UnconnectedGradients.ZERO
    expected, summed = (
        tape.gradient(loss, floats, unconnected_gradients=zero) for loss in (whole, parts)
    )
    # Of each output: the loss of one may be much larger than that of another.
    difference = tf.stack([_largest(one - other) for one, other in zip(summed, expected)])
    scale = tf.stack([_largest(gradient) for gradient in expected])
    half = tf.constant([output.dtype.size < 4 for output in floats])
    # float16 has no numbers between 0 and 6e-8.
    tolerance = tf.where(half, 3e-2 * scale + 1e-6, 1e-4 * scale)
    return tf.debugging.Assert(
        tf.logical_not(tf.reduce_any(difference > tolerance)),
        [
            "the loss is not a mean or a sum over the examples: the gradients of the losses of "
            f"micro-batches are not those of the loss of the batch; {_HOW}. For each output, the "
            "largest difference and the largest gradient:",
            difference,
            scale,
        ],
    )


def _largest(value: tf.Tensor) -> tf.Tensor:
    """Returns the largest absolute value in a tensor, float32."""
    return tf.reduce_max(tf.cast(tf.abs(value), tf.float32))


def _named(loss: Any) -> str:
    """Returns the name of a loss, also of a function or a name."""
    return loss if isinstance(loss, str) else getattr(loss, "name", None) or loss.__name__
