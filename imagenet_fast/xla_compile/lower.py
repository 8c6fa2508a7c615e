"""The training step of a model as a program of XLA's, the same for all replicas."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.training.classifier import Classifier
from imagenet_fast.xla_compile.module import Module, read_module

# As TensorFlow tells what XLA has no kernel for.
_WITHOUT_KERNEL = re.compile(r"No registered '(\w+)' OpKernel for \w+ devices.*?{{node (\S+?)}}")
_ANY_NODE = re.compile(r"{{node (\S+?)}}")


class LoweredStep(NamedTuple):
    """A training step, lowered.

    Attributes:
      serialized: the ``HloModuleProto``.
      module: what is in it.
      arguments: what each parameter of the module is: ``images``, ``labels`` or ``weights`` of a
        replica's batch, a variable of the model or its optimizer, or a constant.
    """

    serialized: bytes
    module: Module
    arguments: tuple[Any, ...]


def lower_step(model: Classifier, batch: int, image_size: int) -> LoweredStep:
    """Returns the step that ``model.train_step`` takes in each replica, as XLA gets it.

    Args:
      model: made in the scope of a ``VirtualTPUStrategy``, and compiled.
      batch: images of a replica.
      image_size: their height and width.

    Raises:
      UserError: if XLA has no kernel for an operation, or cannot make a program of it.
    """
    strategy = model.distribute_strategy
    # Else TensorFlow would make them while it traces, where XLA does not follow.
    model.make_slots()
    specs = (
        tf.TensorSpec([batch, image_size, image_size, 3], tf.uint8, name="images"),
        tf.TensorSpec([batch], tf.int32, name="labels"),
        tf.TensorSpec([batch], tf.float32, name="weights"),
    )

    @tf.function(jit_compile=True, autograph=False)
    def step(*batch: tf.Tensor) -> dict[str, tf.Tensor]:
        return strategy.run(model.train_step, args=(batch,))

    concrete = step.get_concrete_function(*specs)
    # Either list lacks some: Keras' of its present rate, TensorFlow's of what has no reads.
    known = [*concrete.variables, *variables_of(model)]
    variables = {id(variable.handle): variable for variable in known}
    captured = [
        variables[id(tensor)] if id(tensor) in variables else tensor.numpy()
        for tensor in concrete.captured_inputs
    ]
    try:
        with tf.device("CPU:0"):  # for which it is lowered, whatever other devices there are
            serialized = step.experimental_get_compiler_ir(*specs)(stage="hlo_serialized")
    except (tf.errors.OpError, ValueError) as error:  # by the version
        raise UserError(_refusal(str(error))) from error
    return LoweredStep(
        serialized, read_module(serialized), (*(spec.name for spec in specs), *captured)
    )


def variables_of(model: Classifier) -> list[tf.Variable]:
    """Returns what a step reads and changes, in the order in which any model of its kind has it."""
    copies = [own for own in (model.weight_average, model.lookahead) if own is not None]
    return [
        *model.variables,
        *model.optimizer.variables(),  # a method of some of Keras' optimizers
        *(variable for own in copies for variable in own.averages),
        model.metric_sums.variable,
    ]


def _refusal(message: str) -> str:
    """Returns which operations XLA does not take, and where they come from."""
    found = dict.fromkeys(f"{kind} (of {node})" for kind, node in _WITHOUT_KERNEL.findall(message))
    if found:
        return f"XLA cannot compile the training step: it has no kernel for {', '.join(found)}"
    node = _ANY_NODE.search(message)
    where = f" (in {node[1]})" if node else ""
    return f"XLA cannot compile the training step: {message.strip().splitlines()[0]}{where}"
