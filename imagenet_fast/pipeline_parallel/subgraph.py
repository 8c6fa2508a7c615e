"""Functions made of parts of a traced function's graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf

Tensors = list[tf.Tensor]


def subgraph(
    function: tf.types.experimental.ConcreteFunction,
    feeds: Sequence[tf.Tensor],
    fetches: Sequence[tf.Tensor],
    terms: Sequence[tf.Tensor] = (),
    effects: Sequence[tf.Operation] = (),
    values: Mapping[str, tf.Tensor] | None = None,
) -> Callable[..., Tensors]:
    """Returns a function from some tensors of a function's graph to others.

    Args:
      function: traced; its variables and other captured tensors are used as they are.
      feeds: tensors of its graph whose values are given, so what they depend on is not computed.
      fetches: tensors of its graph.
      terms: tensors of its graph to add to totals of their shapes and dtypes.
      effects: operations of its graph to run for their side effects.
      values: values of further tensors of its graph, by name, instead of computing them; tensors
        of the graph in which the result is called, or of an outer one.

    Returns:
      A concrete function from the values of the feeds and the totals so far to the values of the
      fetches and the new totals.
    """
    graph = function.graph
    captured = graph.inputs[len(graph.inputs) - len(function.captured_inputs) :]
    values = values or {}
    known = {*(tensor.name for tensor in (*feeds, *captured)), *values}
    wanted = [tensor.name for tensor in (*fetches, *terms)]
    # For TensorFlow, reading a variable is a side effect, even if its value is given or unused.
    acts = [effect.name for effect in effects if f"{effect.name}:0" not in known]
    ends = [*(name for name in wanted if name not in known), *acts]
    definition, used = _needed(graph.as_graph_def(), ends, known)

    def program(*fed: tf.Tensor) -> Tensors:
        own_graph = tf.compat.v1.get_default_graph()
        # TensorFlow deletes functions that loops in it call together with the function itself.
        own_graph.cut_from = function
        given = {
            **dict(zip((tensor.name for tensor in captured), function.captured_inputs)),
            **values,
        }
        given = {name: own_graph.capture(given[name]) for name in given if name in used}
        given.update(zip((tensor.name for tensor in feeds), fed))
        found = tf.graph_util.import_graph_def(
            definition,
            input_map={name: given[name] for name in used},
            return_elements=[name for name in wanted if name not in known],
            name="stage",
        )
        rest = iter(found)
        results = [tf.identity(given[name]) if name in known else next(rest) for name in wanted]
        sums = fed[len(feeds) :]
        added = [total + term for total, term in zip(sums, results[len(fetches) :])]
        return [*results[: len(fetches)], *added]

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in (*feeds, *terms)]
    # Not inlined, so that many calls take no longer to optimize than one.
    traced = tf.function(program, autograph=False, experimental_attributes={"_noinline": True})
    return traced.get_concrete_function(*specs)


def operations_behind(
    tensors: Iterable[tf.Tensor], known: Iterable[tf.Operation] = ()
) -> list[tf.Operation]:
    """Returns the operations that tensors of a graph depend on, each once.

    Without ``known`` ones, and those that only they depend on.
    """
    seen = set(known)
    needed: list[tf.Operation] = []
    waiting = [tensor.op for tensor in tensors]
    while waiting:
        operation = waiting.pop()
        if operation not in seen:
            seen.add(operation)
            needed.append(operation)
            waiting.extend(tensor.op for tensor in operation.inputs)
    return needed


def _needed(
    definition: tf.compat.v1.GraphDef, ends: Sequence[str], known: set[str]
) -> tuple[tf.compat.v1.GraphDef, set[str]]:
    """Returns the nodes that tensors and operations need, and the known tensors that these use."""
    nodes = {node.name: node for node in definition.node}
    done = {name.partition(":")[0] for name in known}
    found: set[str] = set()
    used: set[str] = set()
    waiting = list(ends)
    while waiting:
        needed = waiting.pop()
        name, _, place = needed.lstrip("^").partition(":")
        tensor = f"{name}:{place or 0}"
        if needed.startswith("^") and name in done:
            continue
        if tensor in known:
            used.add(tensor)
        elif name not in found:
            found.add(name)
            waiting.extend(nodes[name].input)
    kept = tf.compat.v1.GraphDef(library=definition.library, versions=definition.versions)
    # In the order of the graph.
    kept.node.extend(node for node in definition.node if node.name in found)
    for node in kept.node:
        node.input[:] = [name for name in node.input if name[0] != "^" or name[1:] in found]
        # Nodes to colocate with may be missing here; all nodes are on one device.
        node.attr.pop("_class", None)
    return kept, used
