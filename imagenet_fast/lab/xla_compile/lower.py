"""Lowering a model's training step to XLA's HLO, one program for all replicas."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import tensorflow_variables
from imagenet_fast.lab.xla_compile.module import Module, read_module
from imagenet_fast.optimizers.slots import variables_of as optimizer_variables
from imagenet_fast.training.step.classifier import Classifier

# TensorFlow's message if XLA has no kernel for an operation.
_WITHOUT_KERNEL = re.compile(r"No registered '(\w+)' OpKernel for \w+ devices.*?{{node (\S+?)}}")
_ANY_NODE = re.compile(r"{{node (\S+?)}}")


class LoweredStep(NamedTuple):
    """A lowered training step.

    Attributes:
      serialized: the ``HloModuleProto``.
      module: its contents.
      arguments: each parameter of the module: ``images``, ``labels`` or ``weights`` of a replica's
        batch, a variable of the model or its optimizer, or a constant.
    """

    serialized: bytes
    module: Module
    arguments: tuple[Any, ...]


def lower_step(model: Classifier, batch: int, image_size: int) -> LoweredStep:
    """Lowers ``model.train_step`` for one replica with a batch of ``batch`` images.

    The model must be compiled, in the scope of a ``VirtualTPUStrategy``.

    Raises:
      UserError: if XLA has no kernel for an operation, or cannot lower the step.
    """
    strategy = model.distribute_strategy
    # Otherwise they would be created during tracing, which XLA does not support.
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
    # Keras' list lacks the present learning rate, TensorFlow's lacks variables without reads.
    known = [*concrete.variables, *variables_of(model)]
    variables = {id(variable.handle): variable for variable in known}
    captured = [
        variables[id(tensor)] if id(tensor) in variables else tensor.numpy()
        for tensor in concrete.captured_inputs
    ]
    try:
        with tf.device("CPU:0"):  # so that other devices make no difference
            serialized = step.experimental_get_compiler_ir(*specs)(stage="hlo_serialized")
    except (tf.errors.OpError, ValueError) as error:  # depends on the version
        raise UserError(_refusal(str(error))) from error
    return LoweredStep(
        serialized, read_module(serialized), (*(spec.name for spec in specs), *captured)
    )


def variables_of(model: Classifier) -> list[tf.Variable]:
    """Returns the variables of a training step, in an order that depends only on the options."""
    shadows = [copy for copy in (model.weight_average, model.lookahead) if copy is not None]
    return [
        *tensorflow_variables(model.variables),
        *optimizer_variables(model.optimizer),
        *(variable for shadow in shadows for variable in shadow.averages),
        model.metric_sums.variable,
        *model.selection.variables,
    ]


def _refusal(message: str) -> str:
    """Returns the operations that XLA does not support, and their sources."""
    found = dict.fromkeys(f"{kind} (of {node})" for kind, node in _WITHOUT_KERNEL.findall(message))
    if found:
        return f"XLA cannot compile the training step: it has no kernel for {', '.join(found)}"
    node = _ANY_NODE.search(message)
    where = f" (in {node[1]})" if node else ""
    return f"XLA cannot compile the training step: {message.strip().splitlines()[0]}{where}"
