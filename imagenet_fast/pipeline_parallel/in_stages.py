"""Any functional Keras model as the blocks of a pipeline, its weights on the stages' devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import tensorflow_variables
from imagenet_fast.models.blocks import cut
from imagenet_fast.models.shape_only import shape_only
from imagenet_fast.pipeline_parallel.partition import bounds

# From blocks, whose weights have no values, to the number of blocks of each stage, or None.
Balancer = Callable[[Sequence[keras.Model]], Sequence[int] | None]


def build_in_stages(
    make: Callable[[], keras.Model],
    devices: Sequence[str],
    balance: Sequence[int] | Balancer | None = None,
) -> tuple[keras.Model, list[keras.Model], list[int]]:
    """Makes a model as ever, but each weight on the device of the stage that its layer belongs to.

    Args:
      make: returns a functional model of one input and one output; called twice, and must do the
        same each time. Outside of a strategy's scope.
      devices: of the stages, in order.
      balance: number of blocks of each stage, or a function of the blocks that returns it; None:
        about equally many.

    Returns:
      The model; its blocks, which share its layers; the balance.

    Raises:
      UserError: if the model cannot be cut like that, or is another one each time.
    """
    with shape_only() as variables:
        template = make()
        made = [variable.name for variable in variables]
        blocks = cut(template)
        balance = balance(blocks) if callable(balance) else balance
        parts = bounds(balance, len(blocks), len(devices))
        places = _places(blocks, parts, devices)
        found = [places.get(id(own), devices[0]) for own in variables[: len(made)]]
    rest = iter(zip(made, found))

    def creator(next_creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        name, device = next(rest, (None, devices[0]))
        with tf.device(device):
            variable = next_creator(**options)
        _check_same(name, variable.name)
        return variable

    del template, blocks
    with tf.variable_creator_scope(creator):
        model = make()
    _check_same(next(rest, (None,))[0], None)
    return model, cut(model), [end - begin for begin, end in parts]


def _check_same(first: str | None, second: str | None) -> None:
    """Checks that a weight is made the second time as it was the first time, if at all."""
    if first != second:
        raise UserError(
            f"the model's weights are others each time that it is made: {first or 'none'} and then "
            f"{second or 'none'}"
        )


def _places(
    blocks: Sequence[keras.Model], parts: Sequence[tuple[int, int]], devices: Sequence[str]
) -> dict[int, str]:
    """Returns the device of each weight by the identity of TensorFlow's variable."""
    return {
        id(variable): device
        for (begin, end), device in zip(parts, devices)
        for block in blocks[begin:end]
        for variable in tensorflow_variables(block.variables)
    }
