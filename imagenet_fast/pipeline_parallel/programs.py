"""What a stage computes of a micro-batch, forward and backward, as functions of tensors.

A stage is traced once, forward and backward, and its programs are cut out of that graph, whatever
the number of micro-batches: the forward pass, alone or with the activations that the backward pass
needs, and the backward pass, from these activations or from the stage's inputs.

TensorFlow's own ways do not serve: ``tape.gradient`` puts operations backward onto the device in
whose scope it is called, ``tf.recompute_grad``, too, and neither leaves its activations to a
``tf.while_loop``.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers.micro_batch import micro_batch
from imagenet_fast.pipeline_parallel.stage import Stage
from imagenet_fast.pipeline_parallel.statistics import Moments, observed
from imagenet_fast.pipeline_parallel.subgraph import subgraph

Tensors = list[tf.Tensor]

# From the last stage's outputs and the targets to a part of the loss, a scalar.
Loss = Callable[[Any, Any], tf.Tensor]
Program = Callable[..., Tensors]

# Beginnings of operations' kinds.
_PYTHON = re.compile("(Eager)?PyFunc")
_RANDOM = re.compile(
    "Rng|Random(?!GammaGrad|IndexShuffle)|Stateful(Random|Standard|Truncated|Uniform)|Multinomial"
    "|(Parameterized)?TruncatedNormal|SampleDistortedBoundingBox|[A-Z][A-Za-z]*CandidateSampler"
)
_CHANGE = re.compile("Assign|Resource(Apply|CountUpTo|Scatter|SparseApply|StridedSliceAssign)")


class Sums(NamedTuple):
    """What micro-batches add up to, for one stage.

    Attributes:
      moments: of the batch norms that move their averages, three each.
      penalty: what regularization adds to the loss.
      loss: without regularization; 0 but in the last stage.
      gradients: of the variables that have one.
    """

    moments: Tensors
    penalty: tf.Tensor
    loss: tf.Tensor
    gradients: Tensors

    @property
    def forward(self) -> Tensors:
        """Those of the forward pass."""
        return [*self.moments, self.penalty, self.loss]

    def with_forward(self, values: Sequence[tf.Tensor]) -> Sums:
        """Returns the same with others of the forward pass."""
        *moments, penalty, loss = values
        return self._replace(moments=moments, penalty=penalty, loss=loss)


class Programs:
    """The programs of one stage.

    To be made, and called, in the graph of a training step and in the scope of the stage's device.

    Args:
      stage: whose blocks have been built.
      inputs: what describes a micro-batch's inputs, in any structure.
      targets: of the last stage, what describes a micro-batch's targets; of others, nothing.
      loss: of the last stage; None: it is another one.
      first: whether there is no stage before it, which would need the gradients of its inputs.

    Attributes:
      outputs: what describes the outputs, in any structure.
      activations: what describes the activations that a backward pass needs.

    Raises:
      UserError: if a block does what cannot be done twice, or not on another device.
    """

    def __init__(
        self, stage: Stage, inputs: Any, targets: Any, loss: Loss | None, first: bool
    ) -> None:
        self._variables = stage.variables
        self._loss = loss
        self._traced = traced = _trace(stage, inputs, targets, loss, first)
        self._weights = _read(traced.function)
        self.outputs = tf.nest.map_structure(spec_of, traced.outputs)
        self.activations = [spec_of(own) for own in traced.activations]

    def zeros(self) -> Sums:
        """Returns sums of nothing."""
        moments = [tf.zeros(own.shape, own.dtype) for own in tf.nest.flatten(self._moments)]
        gradients = [
            tf.zeros(variable.shape, variable.dtype)
            for variable, own in zip(self._variables, self._traced.gradients)
            if own is not None
        ]
        return Sums(moments, tf.constant(0.0), tf.constant(0.0), gradients)

    def forward(
        self, number: Any, share: Any, inputs: Any, targets: Any, sums: Sums, keep: bool
    ) -> tuple[Any, Tensors | None, Sums]:
        """Computes a micro-batch forward.

        Args:
          number: of the micro-batch, int32.
          share: of the batch, by which regularization counts, float32.
          inputs: of the stage.
          targets: of the last stage; of others, nothing.
          sums: to which to add.
          keep: whether to return activations.

        Returns:
          The outputs; the activations, or None; the new sums.
        """
        program = self._forward_kept if keep else self._forward_alone
        fed = [number, share, *tf.nest.flatten((inputs, targets)), *sums.forward]
        outputs, activations, added = _split(
            program(*fed), len(self._flat_outputs), len(self.activations) * keep
        )
        outputs = tf.nest.pack_sequence_as(self.outputs, outputs)
        return outputs, activations if keep else None, sums.with_forward(added)

    def backward(
        self,
        number: Any,
        share: Any,
        inputs: Any,
        targets: Any,
        upstream: Tensors,
        activations: Tensors | None,
        sums: Sums,
    ) -> tuple[Any, Tensors, Sums]:
        """Computes a micro-batch backward.

        The last stage, whose turn backward comes next, does without a forward pass of its own:
        without activations, its outputs are computed here, and counted.

        Args:
          number: as in the forward pass.
          share: as in the forward pass.
          inputs: as in the forward pass.
          targets: as in the forward pass.
          upstream: the gradients of the outputs that are floats; of the last stage, none.
          activations: what the forward pass kept; None: to be computed again.
          sums: to which to add.

        Returns:
          The outputs, of the last stage without activations, else None; the gradients of the inputs
          that are floats, but none of the first stage; the new sums.
        """
        fed = [number, share, *tf.nest.flatten((inputs, targets)), *upstream]
        outputs = None
        if activations is None and self._loss is not None:
            made, back, added, gradients = _split(
                self._both(*fed, *sums.forward, *sums.gradients),
                len(self._flat_outputs),
                len(self._back),
                len(sums.forward),
            )
            outputs = tf.nest.pack_sequence_as(self.outputs, made)
            sums = sums.with_forward(added)
        else:
            if activations is None:
                flat = self._backward_alone(*fed, *sums.gradients)
            else:
                flat = self._backward_kept(*fed, *activations, *sums.gradients)
            back, gradients = _split(flat, len(self._back))
        reached = iter(back)
        return (
            outputs,
            [
                tf.zeros_like(own) if gradient is None else next(reached)
                for own, gradient in zip(floats_of(inputs), self._input_gradients)
            ],
            sums._replace(gradients=gradients),
        )

    def moments(self, sums: Sums) -> dict[int, Moments]:
        """Returns the moments, by the places of the batch norms among the stage's."""
        own = iter(sums.moments)
        return {place: Moments(next(own), next(own), next(own)) for place in self._traced.moments}

    def gradients(self, sums: Sums) -> list[tf.Tensor | None]:
        """Returns the gradients of all variables; None: the loss does not depend on it."""
        own = iter(sums.gradients)
        traced = self._traced.gradients[: len(self._variables)]
        return [None if gradient is None else next(own) for gradient in traced]

    @property
    def _flat_outputs(self) -> Tensors:
        return tf.nest.flatten(self._traced.outputs)

    @property
    def _moments(self) -> list[Moments]:
        return list(self._traced.moments.values())

    @property
    def _of_forward(self) -> Tensors:
        return [*tf.nest.flatten(self._moments), self._traced.penalty, self._traced.loss]

    @property
    def _of_backward(self) -> Tensors:
        traced = self._traced.gradients[: len(self._variables)]
        return [own for own in traced if own is not None]

    @property
    def _input_gradients(self) -> list[tf.Tensor | None]:
        return self._traced.gradients[len(self._variables) :]

    @property
    def _back(self) -> Tensors:
        return [own for own in self._input_gradients if own is not None]

    # Cut out when first needed: no schedule needs all.

    @functools.cached_property
    def _forward_alone(self) -> Program:
        own = self._traced
        return self._cut(own.fed, self._flat_outputs, self._of_forward, own.forward_effects)

    @functools.cached_property
    def _forward_kept(self) -> Program:
        own = self._traced
        fetches = [*self._flat_outputs, *own.activations]
        return self._cut(own.fed, fetches, self._of_forward, own.forward_effects)

    @functools.cached_property
    def _backward_alone(self) -> Program:
        own = self._traced
        feeds = [*own.fed, *own.upstream]
        return self._cut(feeds, self._back, self._of_backward, own.backward_effects)

    @functools.cached_property
    def _backward_kept(self) -> Program:
        own = self._traced
        feeds = [*own.fed, *own.upstream, *own.activations]
        return self._cut(feeds, self._back, self._of_backward, own.backward_effects)

    @functools.cached_property
    def _both(self) -> Program:
        own = self._traced
        fetches = [*self._flat_outputs, *self._back]
        terms = [*self._of_forward, *self._of_backward]
        effects = [*own.forward_effects, *own.backward_effects]
        return self._cut(own.fed, fetches, terms, effects)

    def _cut(
        self, feeds: Tensors, fetches: Tensors, terms: Tensors, effects: Sequence[tf.Operation]
    ) -> Program:
        return subgraph(self._traced.function, feeds, fetches, terms, effects, self._weights)


class _Traced(NamedTuple):
    """A stage's graph, forward and backward, and its tensors.

    Attributes:
      function: whose graph it is.
      fed: the number of the micro-batch, its share, the inputs and the targets.
      upstream: the gradients of the outputs.
      outputs: of the stage, in any structure.
      moments: by the places of the batch norms.
      penalty: what regularization adds to the loss.
      loss: 0 but in the last stage.
      gradients: of the variables and, but in the first stage, of the inputs that are floats.
      activations: what leads from the forward pass to the backward pass.
      forward_effects: operations of the forward pass that do something, as a check or a print, but
        compute nothing that another one needs.
      backward_effects: those of the backward pass.
    """

    function: tf.types.experimental.ConcreteFunction
    fed: Tensors
    upstream: Tensors
    outputs: Any
    moments: dict[int, Moments]
    penalty: tf.Tensor
    loss: tf.Tensor
    gradients: list[tf.Tensor | None]
    activations: Tensors
    forward_effects: list[tf.Operation]
    backward_effects: list[tf.Operation]


def _trace(stage: Stage, inputs: Any, targets: Any, loss: Loss | None, first: bool) -> _Traced:
    found: dict[str, Any] = {}

    def whole(number: tf.Tensor, share: tf.Tensor, *flat: tf.Tensor) -> None:
        graph = tf.compat.v1.get_default_graph()
        own, aims = tf.nest.pack_sequence_as((inputs, targets), flat)
        watched = [] if first else floats_of(own)
        with observed(stage.norms) as moments, tf.GradientTape() as tape:
            tape.watch(watched)
            with micro_batch(number):
                outputs = stage(own, training=True)
            losses = [] if loss is None else [loss(outputs, aims)]
            penalty = share * _sum(stage.losses)
        forward = len(graph.get_operations())
        upstream = [
            tf.compat.v1.placeholder(end.dtype, end.shape)
            for end in ([] if losses else floats_of(outputs))
        ]
        ends = losses or floats_of(outputs)
        gradients = tape.gradient(
            [*ends, penalty],
            [*stage.variables, *watched],
            output_gradients=[*(upstream or map(tf.ones_like, ends)), tf.constant(1.0)],
        )
        operations = graph.get_operations()
        found.update(
            forward=set(operations[:forward]),
            fed=[number, share, *flat],
            upstream=upstream,
            outputs=outputs,
            moments=moments,
            penalty=penalty,
            loss=_sum(losses),
            gradients=[None if own is None else tf.convert_to_tensor(own) for own in gradients],
            activations=_activations(operations[:forward], operations[forward:], flat),
        )

    specs = [spec_of(own) for own in tf.nest.flatten((inputs, targets))]
    function = tf.function(whole).get_concrete_function(
        tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.float32), *specs
    )
    _check(function.graph, stage)
    forward, effects = found.pop("forward"), function.graph.control_outputs
    return _Traced(
        function,
        **found,
        forward_effects=[own for own in effects if own in forward],
        backward_effects=[own for own in effects if own not in forward],
    )


def _read(function: tf.types.experimental.ConcreteFunction) -> dict[str, tf.Tensor]:
    """Reads the variables that a function reads; returns their values, by the tensors' names there.

    Once, for all micro-batches: a program that reads variables itself would be one of those that
    TensorFlow runs in turn, whatever their devices, in a loop.
    """
    inner = function.graph.inputs[len(function.graph.inputs) - len(function.captured_inputs) :]
    handles = dict(zip((own.name for own in inner), function.captured_inputs))

    @functools.cache
    def read(name: str, dtype: tf.DType) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=handles[name], dtype=dtype)

    return {
        own.outputs[0].name: read(own.inputs[0].name, own.get_attr("dtype"))
        for own in function.graph.get_operations()
        if own.type == "ReadVariableOp" and own.inputs[0].name in handles
    }


def _sum(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of scalars of any dtypes, float32."""
    return tf.add_n([tf.constant(0.0), *(tf.cast(own, tf.float32) for own in values)])


def _split(values: Sequence[tf.Tensor], *counts: int) -> list[Tensors]:
    """Splits into lists of so many, and one of the rest."""
    ends = [0, *itertools.accumulate(counts), len(values)]
    return [list(values[begin:end]) for begin, end in zip(ends, ends[1:])]


def floats_of(values: Any) -> list[Any]:
    """Returns the tensors in a structure that have gradients."""
    return [own for own in tf.nest.flatten(values) if own.dtype.is_floating]


def spec_of(value: Any) -> tf.TensorSpec:
    """Returns what describes a tensor."""
    return tf.TensorSpec(value.shape, value.dtype)


def _activations(
    forward: Sequence[tf.Operation], backward: Sequence[tf.Operation], fed: Sequence[tf.Tensor]
) -> Tensors:
    """Returns what leads from the forward pass to the backward pass.

    Not what depends on variables alone: a copy for each micro-batch would be a waste.
    """
    given = {own.ref() for own in fed}
    of_inputs = {own.op.name for own in fed}
    for operation in forward:
        if any(own.op.name in of_inputs for own in operation.inputs):
            of_inputs.add(operation.name)
    computed = {operation.name for operation in forward} & of_inputs
    found = {
        own.ref(): own
        for operation in backward
        for own in operation.inputs
        if own.op.name in computed and own.ref() not in given
    }
    return list(found.values())


def _check(graph: tf.Graph, stage: Stage) -> None:
    """Refuses operations that cannot be moved or repeated, which would be left out in silence."""
    definition = graph.as_graph_def()
    functions = {own.signature.name: own.node_def for own in definition.library.function}
    names = " -> ".join(block.name for block in stage.blocks)
    for name, kind in _operations(definition.node, functions):
        where = f"{name} ({kind}), in the stage {names}"
        if _PYTHON.match(kind):
            raise UserError(
                f"{where}, calls Python, which no other device can: use TensorFlow operations in "
                "place of tf.py_function or tf.numpy_function"
            )
        if _RANDOM.match(kind):
            raise UserError(
                f"{where}, draws random numbers that a second computation does not repeat: use "
                "imagenet_fast.layers.Dropout in place of Keras' own, or tf.random.stateless_*"
            )
        if _CHANGE.match(kind):
            raise UserError(
                f"{where}, changes a variable, as a pipeline lets batch norms alone do: compute "
                "what is needed from the inputs, or change it in a callback"
            )


def _operations(
    nodes: Iterable[Any], functions: Mapping[str, Iterable[Any]], within: str = ""
) -> Iterator[tuple[str, str]]:
    """Yields the name and the kind of each operation, and of those in the functions it calls."""
    for node in nodes:
        name = within + node.name
        yield name, node.op
        for attribute in node.attr.values():
            for own in (attribute.func, *attribute.list.func):
                if own.name in functions:
                    yield from _operations(functions[own.name], functions, f"{name}/")
