"""The functions of one stage: forward, backward, and both, for one micro-batch.

A stage is traced once, forward and backward. Its functions are cut out of that graph, each with its
own feeds and fetches, and serve all micro-batches: the forward pass with or without the activations
that the backward pass needs, and the backward pass from these activations or from the inputs.

TensorFlow's own tools do not suffice. ``tape.gradient`` and ``tf.recompute_grad`` place backward
operations on the device in whose scope they are called, and neither exposes the activations, which
a ``tf.while_loop`` has to store.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import tensorflow_variables
from imagenet_fast.layers.micro_batch import micro_batch
from imagenet_fast.pipeline_parallel.stage import Stage, WithMasks, masked, with_masks
from imagenet_fast.pipeline_parallel.statistics import Moments, observed
from imagenet_fast.pipeline_parallel.subgraph import subgraph

Tensors = list[tf.Tensor]

# From the outputs and the targets to the loss, a scalar.
Loss = Callable[[Any, Any], tf.Tensor]

# The name and type of an operation, and of those in functions that it calls, by its name.
_Operations = dict[str, list[tuple[str, str]]]

# Beginnings of operation types.
_PYTHON = re.compile("(Eager)?PyFunc")
_RANDOM = re.compile(
    "Rng|Random(?!GammaGrad|IndexShuffle)|Stateful(Random|Standard|Truncated|Uniform)|Multinomial"
    "|(Parameterized)?TruncatedNormal|SampleDistortedBoundingBox|[A-Z][A-Za-z]*CandidateSampler"
)
_CHANGE = re.compile("Assign|Resource(Apply|CountUpTo|Scatter|SparseApply|StridedSliceAssign)")


class Totals(NamedTuple):
    """What a stage accumulates over micro-batches.

    Attributes:
      moments: three tensors for each batch norm that updates its moving averages.
      penalty: regularization and ``add_loss``, float32.
      loss: without ``penalty``, float32; 0 if the loss is not computed in the stage.
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

    def with_forward(self, values: Sequence[tf.Tensor]) -> Totals:
        """Returns the totals with other values for the forward pass."""
        *moments, penalty, loss = values
        return self._replace(moments=moments, penalty=penalty, loss=loss)


class _Program(NamedTuple):
    """A function to be cut out of the stage's graph: arguments of :func:`subgraph`.

    Its results, ``fetches``, are in groups.
    """

    feeds: Tensors
    fetches: Sequence[Tensors]
    terms: Tensors
    effects: Sequence[tf.Operation]


class Programs:
    """The functions of one stage.

    To be made and called in the graph of a training step, in the scope of the stage's device.

    Args:
      stage: with built blocks.
      inputs: specs of a micro-batch's inputs, in any structure or ``WithMasks``.
      targets: specs of a micro-batch's targets, in any structure; empty without a loss.
      loss: of a micro-batch, computed in this stage, as the last one does in ``1f1b``; or None.
      first: whether it is the first stage, whose inputs need no gradients.
      recomputes: whether a forward pass may be run a second time.

    Attributes:
      outputs: specs of the outputs, ``WithMasks``.
      activations: specs of the activations that a backward pass needs.
      variables_read: trainable variables that the blocks read.
      variables_in_loss: trainable variables that the loss reads and has gradients for.

    Raises:
      UserError: if a block does what cannot be repeated, or not be run on another device.
    """

    def __init__(
        self,
        stage: Stage,
        inputs: Any,
        targets: Any,
        loss: Loss | None,
        first: bool,
        recomputes: bool = True,
    ) -> None:
        self._traced = traced = _trace(stage, with_masks(inputs), targets, loss, first)
        _check(traced.operations, stage, recomputes)
        self._has_loss = loss is not None
        self._weights = read_variables(traced.function)
        self.outputs = tf.nest.map_structure(spec_of, traced.outputs)
        self.activations = [spec_of(value) for value in traced.activations]
        self.variables_read = traced.variables_read
        self.variables_in_loss = traced.variables_in_loss

        count = len(stage.variables)
        self._variable_gradients = traced.gradients[:count]
        self._input_gradients = traced.gradients[count:]
        fed, kept, upstream = traced.fed, traced.activations, traced.upstream
        outputs, back = tf.nest.flatten(traced.outputs), _existing(self._input_gradients)
        forward = [*tf.nest.flatten(list(traced.moments.values())), traced.penalty, traced.loss]
        backward = _existing(self._variable_gradients)
        before, after = traced.forward_effects, traced.backward_effects
        self._table = {
            "forward": _Program(fed, [outputs], forward, before),
            "forward, kept": _Program(fed, [outputs, kept], forward, before),
            "backward": _Program([*fed, *upstream], [back], backward, after),
            "backward, kept": _Program([*fed, *upstream, *kept], [back], backward, after),
            "both": _Program(fed, [outputs, back], [*forward, *backward], [*before, *after]),
        }
        self._cut = functools.cache(self._cut_out)

    def zeros(self) -> Totals:
        """Returns totals of no micro-batch."""
        (*moments, _, _), gradients = (
            [tf.zeros(term.shape, term.dtype) for term in self._table[name].terms]
            for name in ("forward", "backward")
        )
        return Totals(moments, tf.constant(0.0), tf.constant(0.0), gradients)

    def forward(
        self, number: Any, fraction: Any, inputs: Any, targets: Any, totals: Totals, keep: bool
    ) -> tuple[Any, Tensors | None, Totals]:
        """Runs the forward pass of a micro-batch.

        Args:
          number: index of the micro-batch, int32.
          fraction: of the batch in the micro-batch, by which regularization counts, float32.
          inputs: of the stage.
          targets: of the micro-batch; empty without a loss.
          totals: to add to.
          keep: whether to return activations.

        Returns:
          The outputs; the activations, or None; the new totals.
        """
        fed = [number, fraction, *tf.nest.flatten((inputs, targets))]
        (outputs, *kept), added = self._run(
            "forward, kept" if keep else "forward", fed, totals.forward
        )
        outputs = tf.nest.pack_sequence_as(self.outputs, outputs)
        return outputs, kept[0] if keep else None, totals.with_forward(added)

    def backward(
        self,
        number: Any,
        fraction: Any,
        inputs: Any,
        targets: Any,
        upstream: Tensors,
        activations: Tensors | None,
        totals: Totals,
    ) -> tuple[Any, Tensors, Totals]:
        """Runs the backward pass of a micro-batch.

        A stage with a loss needs no forward pass of its own: without activations, its outputs are
        computed here, and the totals of the forward pass are added here.

        Args:
          number: as in the forward pass.
          fraction: as in the forward pass.
          inputs: as in the forward pass.
          targets: as in the forward pass.
          upstream: gradients of the floating-point outputs; empty with a loss.
          activations: those that the forward pass returned; None: recompute them.
          totals: to add to.

        Returns:
          The outputs, if they are computed here, else None; the gradients of the floating-point
          inputs, none for the first stage; the new totals.
        """
        fed = [number, fraction, *tf.nest.flatten((inputs, targets)), *upstream]
        outputs = None
        if activations is not None:
            (back,), gradients = self._run("backward, kept", [*fed, *activations], totals.gradients)
        elif not self._has_loss:
            (back,), gradients = self._run("backward", fed, totals.gradients)
        else:
            (outputs, back), added = self._run("both", fed, [*totals.forward, *totals.gradients])
            outputs = tf.nest.pack_sequence_as(self.outputs, outputs)
            added, gradients = _split(added, len(totals.forward))
            totals = totals.with_forward(added)
        reached = iter(back)
        gradients_of_inputs = [
            tf.zeros_like(value) if gradient is None else next(reached)
            for value, gradient in zip(floats_of(inputs), self._input_gradients)
        ]
        return outputs, gradients_of_inputs, totals._replace(gradients=gradients)

    def moments(self, totals: Totals) -> dict[int, Moments]:
        """Returns the moments by the index of the batch norm in ``stage.norms``."""
        values = iter(totals.moments)
        return {
            place: Moments(next(values), next(values), next(values))
            for place in self._traced.moments
        }

    def gradients(
        self, totals: Totals, reached: Sequence[bool]
    ) -> tuple[list[tf.Tensor | None], list[bool]]:
        """Returns the gradients of the variables, and which inputs the loss depends on.

        A gradient that no loss reaches is None, as ``tape.gradient`` of the whole network returns
        it, and not 0: weight decay changes variables whose gradient is 0.

        Args:
          totals: of all micro-batches.
          reached: whether the loss depends on each of the floating-point outputs; empty with a
            loss.

        Returns:
          The gradients of all variables; for each of the floating-point inputs, whether the loss
          depends on it; none for the first stage.
        """
        values = iter(totals.gradients)
        gradients = [
            None if gradient is None else next(values) for gradient in self._variable_gradients
        ]
        # The loss and the penalty of this stage come after the outputs.
        seeds = [*reached, *([True] if self._has_loss else []), True]
        depends = [any(seeds[place] for place in sources) for sources in self._traced.sources]
        used = [gradient if own else None for gradient, own in zip(gradients, depends)]
        return used, depends[len(gradients) :]

    def _run(
        self, name: str, fed: Tensors, totals: Sequence[tf.Tensor]
    ) -> tuple[list[Tensors], Tensors]:
        """Returns a program's results, in groups, and the new totals."""
        counts = map(len, self._table[name].fetches)
        *groups, added = _split(self._cut(name)(*fed, *totals), *counts)
        return groups, added

    def _cut_out(self, name: str) -> Callable[..., Tensors]:
        program = self._table[name]
        return subgraph(
            self._traced.function,
            program.feeds,
            [tensor for group in program.fetches for tensor in group],
            program.terms,
            program.effects,
            self._weights,
        )


class _Traced(NamedTuple):
    """A stage's graph, forward and backward, and its tensors.

    Attributes:
      function: that has the graph.
      fed: the index of the micro-batch, its fraction, the inputs and the targets.
      upstream: gradients of the outputs.
      outputs: of the stage, ``WithMasks``.
      moments: by the index of the batch norm.
      penalty: regularization and ``add_loss``.
      loss: 0 without one.
      gradients: of the variables and, but in the first stage, of the floating-point inputs.
      sources: for each gradient, what it depends on: the indices of ``upstream``, then of the
        loss, if there is one, then of the penalty; none without a gradient.
      activations: tensors of the forward pass that the backward pass needs.
      operations: name and type of each operation by its name, with those in functions it calls.
      forward_effects: operations of the forward pass with side effects, such as a check or a print.
      backward_effects: those of the backward pass.
    """

    function: tf.types.experimental.ConcreteFunction
    fed: Tensors
    upstream: Tensors
    outputs: WithMasks
    moments: dict[int, Moments]
    penalty: tf.Tensor
    loss: tf.Tensor
    gradients: list[tf.Tensor | None]
    sources: list[set[int]]
    activations: Tensors
    operations: _Operations
    variables_read: list[tf.Variable]
    variables_in_loss: list[tf.Variable]
    forward_effects: list[tf.Operation]
    backward_effects: list[tf.Operation]


def _trace(
    stage: Stage, inputs: WithMasks, targets: Any, loss: Loss | None, first: bool
) -> _Traced:
    traced: dict[str, Any] = {}

    def whole(number: tf.Tensor, fraction: tf.Tensor, *flat: tf.Tensor) -> None:
        graph = tf.compat.v1.get_default_graph()
        batch, own_targets = tf.nest.pack_sequence_as((inputs, targets), flat)
        watched = [] if first else floats_of(batch)
        # 0 for a micro-batch that only repeats an example.
        counts = tf.sign(fraction)
        with observed(stage.norms) as moments, tf.GradientTape() as tape:
            tape.watch(watched)
            with micro_batch(number):
                outputs = with_masks(stage(masked(batch), training=True))
            variables_read = list(tape.watched_variables())
            losses, variables_in_loss = [], []
            if loss is not None:
                with tf.GradientTape() as tape_of_loss:
                    value = loss(masked(outputs), own_targets)
                variables_in_loss = variables_behind(value, tape_of_loss)
                losses.append(tf.cast(value, tf.float32) * counts)
            penalty = fraction * sum_of(stage.losses)
        variables = tensorflow_variables(stage.variables)
        forward = graph.get_operations()
        ends = losses or floats_of(outputs)
        upstream = [tf.compat.v1.placeholder(end.dtype, end.shape) for end in ends if not losses]
        seeds = [*(upstream or map(tf.ones_like, ends)), tf.constant(1.0)]
        gradients = tape.gradient([*ends, penalty], [*variables, *watched], output_gradients=seeds)
        gradients = [
            None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients
        ]
        for variable, gradient in zip(variables, gradients):
            if gradient is not None:  # whose shape a recurrent layer does not know
                gradient.set_shape(variable.shape)
        backward = graph.get_operations()[len(forward) :]
        traced.update(
            forward=forward,
            backward=backward,
            fed=[number, fraction, *flat],
            upstream=upstream,
            outputs=outputs,
            moments={
                place: Moments(*(value * counts for value in norm))
                for place, norm in moments.items()
            },
            penalty=penalty,
            loss=sum_of(losses),
            gradients=gradients,
            sources=_sources(gradients, seeds, backward),
            variables_read=variables_read,
            variables_in_loss=variables_in_loss,
        )

    specs = [spec_of(value) for value in tf.nest.flatten((inputs, targets))]
    function = tf.function(whole).get_concrete_function(
        tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.float32), *specs
    )
    forward, backward = traced.pop("forward"), traced.pop("backward")
    operations = _operations_of(function.graph)
    first_pass, effects = set(forward), function.graph.control_outputs
    return _Traced(
        function,
        **traced,
        activations=_activations(forward, backward, traced["fed"][2:], operations),
        operations=operations,
        forward_effects=[effect for effect in effects if effect in first_pass],
        backward_effects=[effect for effect in effects if effect not in first_pass],
    )


def read_variables(function: tf.types.experimental.ConcreteFunction) -> dict[str, tf.Tensor]:
    """Reads the variables that a function reads; returns their values by tensor name.

    They are read once for all micro-batches: TensorFlow would run functions that read variables
    themselves one after another in a loop, even on different devices.
    """
    inner = function.graph.inputs[len(function.graph.inputs) - len(function.captured_inputs) :]
    handles = dict(zip((tensor.name for tensor in inner), function.captured_inputs))

    @functools.cache
    def read(name: str, dtype: tf.DType) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=handles[name], dtype=dtype)

    return {
        operation.outputs[0].name: read(operation.inputs[0].name, operation.get_attr("dtype"))
        for operation in function.graph.get_operations()
        if operation.type == "ReadVariableOp" and operation.inputs[0].name in handles
    }


def sum_of(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of scalars of any dtypes, float32."""
    return tf.add_n([tf.constant(0.0), *(tf.cast(value, tf.float32) for value in values)])


def _existing(values: Sequence[tf.Tensor | None]) -> Tensors:
    return [value for value in values if value is not None]


def _split(values: Sequence[tf.Tensor], *counts: int) -> list[Tensors]:
    """Returns lists of these lengths, and one of the rest."""
    ends = [0, *itertools.accumulate(counts), len(values)]
    return [list(values[begin:end]) for begin, end in zip(ends, ends[1:])]


def floats_of(values: Any) -> list[Any]:
    """Returns the floating-point and complex tensors in a structure: those with gradients."""
    return [
        value
        for value in tf.nest.flatten(values)
        if value.dtype.is_floating or value.dtype.is_complex
    ]


def variables_behind(loss: tf.Tensor, tape: tf.GradientTape) -> list[tf.Variable]:
    """Returns the trainable variables that a loss on a tape has a gradient for."""
    watched = tape.watched_variables()
    gradients = tape.gradient(loss, watched) if watched else ()
    return [value for value, gradient in zip(watched, gradients) if gradient is not None]


def spec_of(value: Any) -> tf.TensorSpec:
    """Returns the ``tf.TensorSpec`` of a tensor."""
    return tf.TensorSpec(value.shape, value.dtype)


def _sources(
    gradients: Sequence[tf.Tensor | None], seeds: Tensors, backward: Sequence[tf.Operation]
) -> list[set[int]]:
    """Returns the indices of the seeds that each gradient depends on; none without a gradient.

    All of them for a gradient that depends on none, such as a constant.
    """
    behind = {seed.op.name: {place} for place, seed in enumerate(seeds)}
    for operation in backward:  # in the order of the graph
        for value in operation.inputs:
            behind.setdefault(operation.name, set()).update(behind.get(value.op.name, ()))
    everything = set(range(len(seeds)))
    return [
        set() if gradient is None else behind.get(gradient.op.name) or everything
        for gradient in gradients
    ]


def _activations(
    forward: Sequence[tf.Operation],
    backward: Sequence[tf.Operation],
    fed: Sequence[tf.Tensor],
    operations: _Operations,
) -> Tensors:
    """Returns the tensors of the forward pass that the backward pass needs.

    Without those that depend on variables alone: one copy for each micro-batch would be a waste.
    Random numbers are kept, since drawing them again gives others.
    """
    given = {value.ref() for value in fed}
    of_inputs = {value.op.name for value in fed}
    for operation in forward:
        draws = any(_RANDOM.match(kind) for _, kind in operations[operation.name])
        if draws or any(value.op.name in of_inputs for value in operation.inputs):
            of_inputs.add(operation.name)
    computed = {operation.name for operation in forward} & of_inputs
    needed = {
        value.ref(): value
        for operation in backward
        for value in operation.inputs
        if value.op.name in computed and value.ref() not in given
    }
    return list(needed.values())


def _check(operations: _Operations, stage: Stage, recomputes: bool) -> None:
    """Refuses operations that cannot be moved or repeated, which would be dropped silently."""
    names = " -> ".join(block.name for block in stage.blocks)
    for name, kind in itertools.chain.from_iterable(operations.values()):
        where = f"{name} ({kind}), in the stage {names}"
        if _PYTHON.match(kind):
            raise UserError(
                f"{where}, calls Python, which runs in this process only: use TensorFlow "
                "operations in place of tf.py_function or tf.numpy_function"
            )
        if _RANDOM.match(kind) and recomputes:
            raise UserError(
                f"{where}, draws random numbers that recomputation would not repeat: use "
                "keras.random with a SeedGenerator of the layer, tf.random.stateless_*, or "
                "rematerialize='never', which recomputes nothing"
            )
        if _CHANGE.match(kind):
            raise UserError(
                f"{where}, changes a variable, which a pipeline allows for batch norm only: "
                "compute the value from the inputs, or change the variable in a callback; "
                "keras.random needs a SeedGenerator of the layer"
            )


def _operations_of(graph: tf.Graph) -> _Operations:
    definition = graph.as_graph_def()
    functions = {
        function.signature.name: function.node_def for function in definition.library.function
    }
    return {node.name: list(_operations([node], functions)) for node in definition.node}


def _operations(
    nodes: Iterable[Any], functions: Mapping[str, Iterable[Any]], within: str = ""
) -> Iterator[tuple[str, str]]:
    """Yields the name and type of each operation, also of those in called functions."""
    for node in nodes:
        name = within + node.name
        yield name, node.op
        for attribute in node.attr.values():
            for called in (attribute.func, *attribute.list.func):
                if called.name in functions:
                    yield from _operations(functions[called.name], functions, f"{name}/")
