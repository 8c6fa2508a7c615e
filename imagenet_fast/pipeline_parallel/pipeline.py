"""A pipeline of stages, and the gradients of a batch that passes through it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError, require_choice
from imagenet_fast.layers import Dropout
from imagenet_fast.pipeline_parallel.looped import looped
from imagenet_fast.pipeline_parallel.micro_batches import MicroBatches
from imagenet_fast.pipeline_parallel.options import PIPELINE_SCHEDULES, REMATERIALIZE
from imagenet_fast.pipeline_parallel.partition import bounds
from imagenet_fast.pipeline_parallel.passes import Passes
from imagenet_fast.pipeline_parallel.placement import full_device_name
from imagenet_fast.pipeline_parallel.programs import Loss, Programs
from imagenet_fast.pipeline_parallel.stage import Stage
from imagenet_fast.pipeline_parallel.statistics import commit
from imagenet_fast.pipeline_parallel.unrolled import unrolled


class BatchResult(NamedTuple):
    """What a batch came to.

    Attributes:
      outputs: of the last block.
      gradients: of the loss, for each trainable variable, on its device; None: it has no part in
        the loss.
      loss: without regularization, float32.
      penalty: what regularization adds to the loss, float32.
    """

    outputs: Any
    gradients: list[tf.Tensor | None]
    loss: tf.Tensor
    penalty: tf.Tensor


class Pipeline:
    """Blocks that follow each other, cut into stages on devices of their own.

    Keras does not look into it: the weights are to be those of a model.

    Args:
      blocks: as of :class:`~imagenet_fast.pipeline_parallel.model.GPipe`.
      devices: names of the stages' devices, in order.
      balance: how many blocks each device gets; None: about as many each.
      num_micro_batches: parts of a batch, of sizes as equal as can be.
      rematerialize: as of ``GPipe``.
      schedule: as of ``GPipe``.

    Attributes:
      stages: in order.
      num_micro_batches: as given.

    Raises:
      UserError: if the blocks cannot be split like that, or an option has no such value.
    """

    def __init__(
        self,
        blocks: Sequence[keras.layers.Layer],
        devices: Sequence[str],
        *,
        balance: Sequence[int] | None = None,
        num_micro_batches: int = 1,
        rematerialize: str = "except_last",
        schedule: str = "unrolled",
    ) -> None:
        if num_micro_batches < 1:
            raise UserError(f"num_micro_batches is {num_micro_batches}, but must be positive")
        require_choice("rematerialize", rematerialize, REMATERIALIZE)
        require_choice("schedule", schedule, PIPELINE_SCHEDULES)
        for block in blocks:
            _check_block(block)
        self.stages = [
            Stage(blocks[begin:end], device)
            for (begin, end), device in zip(bounds(balance, len(blocks), len(devices)), devices)
        ]
        self.num_micro_batches = num_micro_batches
        self._rematerialize = rematerialize
        self._schedule = schedule

    @property
    def variables(self) -> list[tf.Variable]:
        """What is trained, stage by stage."""
        return [variable for stage in self.stages for variable in stage.variables]

    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the last block's outputs, computed without micro-batches.

        Raises:
          UserError: if a mask leads from a stage to the next, where it would be lost.
        """
        for before, stage in zip([None, *self.stages], self.stages):
            if before:
                _check_no_mask(inputs, before.blocks[-1])
            with tf.device(stage.device):
                inputs = stage(tf.nest.map_structure(tf.identity, inputs), training)
        return inputs

    # No Python here depends on tensors; that of the blocks may, and is converted.
    @tf.autograph.experimental.do_not_convert
    def compute(self, inputs: Any, targets: Any, loss: Loss, scale: Any = 1.0) -> BatchResult:
        """Takes a batch forward and backward; what moving averages there are, move.

        To be called in a ``tf.function``; the weights have been made.

        Args:
          inputs: tensors in any structure, whose first dimension is the batch's.
          targets: the same; what the loss needs besides the outputs.
          loss: from a micro-batch's outputs and targets to its part of the loss, a scalar; the loss
            is the sum of these.
          scale: of the loss, with which the regularization of layers is to be multiplied, too.

        Raises:
          UserError: if the batch is smaller than the number of micro-batches, or a block does what
            cannot be done in a pipeline.
        """
        batch = MicroBatches(inputs, targets, self.num_micro_batches)
        passes = Passes(self.stages, self._programs(batch, loss), batch, scale)
        if self._schedule == "while":
            outputs = looped(passes, self._rematerialize)
        else:
            outputs = unrolled(passes, self._schedule, self._rematerialize)
        gradients, penalties = [], []
        for stage, programs, (_, sums) in zip(self.stages, passes.programs, passes.state):
            commit(stage.norms, programs.moments(sums))
            gradients += programs.gradients(sums)
            penalties.append(sums.penalty)
        blocks = [block for stage in self.stages for block in stage.blocks]
        for layer in {own for block in blocks for own in (block, *block.submodules)}:
            if isinstance(layer, Dropout):
                layer.count()
        return BatchResult(outputs, gradients, passes.state[-1].sums.loss, tf.add_n(penalties))

    def _programs(self, batch: MicroBatches, loss: Loss) -> list[Programs]:
        """Returns the programs of all stages."""
        made: list[Programs] = []
        inputs, targets = batch.specs
        for place, stage in enumerate(self.stages):
            aims, own_loss = (targets, loss) if place == len(self.stages) - 1 else ((), None)
            with tf.device(stage.device):
                made.append(Programs(stage, inputs, aims, own_loss, first=place == 0))
            inputs = made[-1].outputs
        return made

    def check_placement(self) -> None:
        """Checks that all weights are on the devices of their stages.

        Raises:
          UserError: if one is not, or is shared by several stages.
        """
        owners: dict[Any, int] = {}
        canonical = functools.cache(full_device_name)
        for place, stage in enumerate(self.stages):
            for variable in (own for block in stage.blocks for own in block.variables):
                first = owners.setdefault(variable.ref(), place)
                if first != place:
                    raise UserError(
                        f"{variable.name} is shared by blocks of stages {first} and {place}: put "
                        "them into one stage, or give each a weight of its own"
                    )
                if canonical(variable.device) != canonical(stage.device):
                    raise UserError(
                        f"{variable.name} is on {variable.device}, but its stage is on "
                        f"{stage.device}: give the pipeline blocks that are not built yet"
                    )


def _check_no_mask(outputs: Any, block: keras.layers.Layer) -> None:
    if any(getattr(own, "_keras_mask", None) is not None for own in tf.nest.flatten(outputs)):
        raise UserError(
            f"the outputs of block {block.name!r} have a mask, which does not reach the next "
            "stage: put the layers up to the one that uses it into one block"
        )


def _check_block(block: Any) -> None:
    if not isinstance(block, keras.layers.Layer):
        raise UserError(
            f"{block!r} cannot be a block of a pipeline, which takes Keras layers and models; a "
            "function can be put into a keras.layers.Lambda"
        )
    needed = [
        name
        for name, own in inspect.signature(block.call).parameters.items()
        if own.default is own.empty
        and own.kind in (own.POSITIONAL_ONLY, own.POSITIONAL_OR_KEYWORD)
        and name != "training"
    ]
    if len(needed) != 1:
        raise UserError(
            f"block {block.name!r} takes {len(needed)} inputs ({', '.join(needed)}), but a block "
            "of a pipeline takes one: wrap it in a layer whose call(self, inputs) takes a tuple "
            "apart, and have the block before it return that tuple"
        )
