"""A Keras model whose blocks are computed on several devices, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.optimizers.slots import make_slots, unwrapped
from imagenet_fast.pipeline_parallel.pipeline import Pipeline


class GPipe(keras.Model):
    """A sequence of blocks, cut into stages on devices of their own (Huang et al. 2018).

    In training, a batch is split into micro-batches that follow each other through the stages, so
    that all devices work at the same time. The gradients are those of the whole batch, summed over
    the micro-batches, whatever the number of stages; batch norm normalizes each micro-batch by its
    own statistics, and its moving averages move once a batch. ``fit``, ``evaluate`` and ``predict``
    work as of any model; outside of training, the blocks follow each other without micro-batches.

    Checkpoints hold the blocks, not the stages: one that was trained with one balance can be loaded
    into another.

    Args:
      blocks: Keras layers or models, each of one argument, a tensor or a tuple of tensors, which
        the block before it returns. Not built yet, or built on the device of their stage.
      devices: names of the stages' devices, in order; None: the GPUs or, without any, the CPUs.
      balance: how many blocks each device gets; None: about as many each.
      num_micro_batches: parts of a batch, of sizes as equal as can be.
      rematerialize: whose activations are computed again in the backward pass, in place of being
        kept: ``always``, ``except_last`` (all but those of the last micro-batch) or ``never``.
      schedule: ``unrolled``: all micro-batches forward, then all backward, in a graph that grows
        with their number; ``while``: the same in loops, with a graph that does not; ``1f1b``: as
        ``unrolled``, but one forward and one backward in turn, which keeps fewer activations.
      name: of the model.

    Raises:
      UserError: if the blocks cannot be split like that, or an option has no such value.
    """

    def __init__(
        self,
        blocks: Sequence[keras.layers.Layer],
        devices: Sequence[str] | None = None,
        *,
        balance: Sequence[int] | None = None,
        num_micro_batches: int = 1,
        rematerialize: str = "except_last",
        schedule: str = "unrolled",
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        devices = list(devices or default_devices())
        self.blocks = list(blocks)
        self._pipeline = Pipeline(
            self.blocks,
            devices,
            balance=balance,
            num_micro_batches=num_micro_batches,
            rematerialize=rematerialize,
            schedule=schedule,
        )

    @property
    def pipeline(self) -> Pipeline:
        """The stages."""
        return self._pipeline

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the last block's outputs, computed without micro-batches."""
        return self._pipeline(inputs, training)

    def build_on(self, inputs: Any) -> None:
        """Makes the weights, each on the device of its stage, for inputs like these; once.

        Args:
          inputs: tensors, or what describes them, in any structure.

        Raises:
          UserError: if blocks of different stages share weights, or one has been built elsewhere.
        """
        if self.built:
            return
        specs = tf.nest.map_structure(
            lambda own: tf.TensorSpec([None, *own.shape[1:]], own.dtype), inputs
        )
        with tf.init_scope():
            tf.function(lambda own: self(own, training=False)).get_concrete_function(specs)
        self._pipeline.check_placement()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Keras' ``compile``.

        Raises:
          UserError: if XLA is to compile the step.
        """
        super().compile(*args, **kwargs)
        if self.jit_compile:
            raise UserError(
                "XLA cannot compile the step of a pipeline, whose stages are on devices of their "
                "own: leave jit_compile out of compile"
            )
        # On GPUs Keras would have XLA compile the update, which it cannot where the variables are
        # on several devices.
        unwrapped(self.optimizer).jit_compile = False

    def make_train_function(self, force: bool = False) -> Callable[..., Any]:
        """Keras' ``make_train_function``."""
        train = super().make_train_function(force)
        # Variables that are made in the first step have it traced a second time.
        if self.built:
            make_slots(self.optimizer, self._pipeline.variables)
            return train

        def built_first(batches: Any) -> Any:
            self.build_on(keras.utils.unpack_x_y_sample_weight(batches.element_spec)[0])
            make_slots(self.optimizer, self._pipeline.variables)
            return train(batches)

        return built_first

    def train_step(self, data: Any) -> Mapping[str, tf.Tensor]:
        """Takes one step on a batch, with the loss and the optimizer that ``compile`` was given."""
        inputs, labels, weights = keras.utils.unpack_x_y_sample_weight(data)
        examples = tf.shape(tf.nest.flatten(inputs)[0])[0]
        scaled = isinstance(self.optimizer, keras.mixed_precision.LossScaleOptimizer)
        targets = (labels,) if weights is None else (labels, weights)
        compiled = _loss(self.loss)

        def loss(outputs: Any, targets: Any) -> tf.Tensor:
            labels, *weights = (_as_column(target, outputs) for target in targets)
            own = compiled(labels, outputs, *weights)
            if compiled.reduction != keras.losses.Reduction.SUM:  # it is a mean
                own *= tf.cast(tf.shape(outputs)[0] / examples, own.dtype)
            return self.optimizer.get_scaled_loss(own) if scaled else own

        scale = self.optimizer.loss_scale if scaled else 1.0
        self.build_on(inputs)
        step = self._pipeline.compute(inputs, targets, loss, scale)
        gradients = step.gradients
        if scaled:
            gradients = self.optimizer.get_unscaled_gradients(gradients)
        self.optimizer.apply_gradients(zip(gradients, self._pipeline.variables))
        # For the progress bar.
        penalty = [step.penalty / tf.cast(scale, tf.float32)]
        self.compiled_loss(labels, step.outputs, weights, regularization_losses=penalty)
        return self.compute_metrics(inputs, labels, step.outputs, weights)


def default_devices() -> list[str]:
    """Returns the names of the GPUs or, without any, of the CPUs."""
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name for device in devices]


def _loss(loss: Any) -> keras.losses.Loss:
    """Returns what ``compile`` was given as Keras applies it.

    Raises:
      UserError: if it is not one loss, or not one number of a batch.
    """
    if loss is None or isinstance(loss, (list, tuple, Mapping)):
        raise UserError(
            "a pipeline trains with one loss: give compile(loss=...) a Keras loss, its name, or a "
            "function of labels and outputs"
        )
    loss = keras.losses.get(loss)
    if not isinstance(loss, keras.losses.Loss):
        return _FunctionLoss(loss)
    if loss.reduction == keras.losses.Reduction.NONE:
        raise UserError(
            f"the loss {loss.name} has reduction='none', but a pipeline trains with one number for "
            "a batch: leave reduction out for the mean, or give reduction='sum', by which a Keras "
            "model takes the same steps as by 'none'"
        )
    return loss


class _FunctionLoss(keras.losses.Loss):
    def __init__(self, function: Callable[..., tf.Tensor]) -> None:
        super().__init__()
        self._function = function

    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        return self._function(y_true, y_pred)


def _as_column(values: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns one value for each row of the outputs, as Keras gives them to a loss."""
    column = values.shape.rank == 1 and outputs.shape.rank == 2
    return values[:, tf.newaxis] if column else values
