"""Functions that are cut out of a traced one."""

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
    """Returns what computes some tensors of a function's graph from some others.

    Args:
      function: whose variables, and other captured tensors, stay those that they are.
      feeds: in its graph; what comes before them is not computed.
      fetches: in its graph.
      terms: in its graph; to be added to sums of their shapes and dtypes.
      effects: operations of its graph to be run besides, for what they do.
      values: of tensors of its graph, by their names, which are not computed either; tensors of the
        graph in which the result is called, or of one around it.

    Returns:
      A concrete function of the values of the feeds and of the sums so far, which returns the
      values of the fetches and the new sums.
    """
    graph = function.graph
    captured = graph.inputs[len(graph.inputs) - len(function.captured_inputs) :]
    values = values or {}
    known = {*(own.name for own in (*feeds, *captured)), *values}
    wanted = [own.name for own in (*fetches, *terms)]
    # Reading a variable is an effect for TensorFlow, but the value may be given and unused.
    acts = [own.name for own in effects if f"{own.name}:0" not in known]
    ends = [*(name for name in wanted if name not in known), *acts]
    definition, used = _needed(graph.as_graph_def(), ends, known)

    def program(*fed: tf.Tensor) -> Tensors:
        own_graph = tf.compat.v1.get_default_graph()
        # TensorFlow deletes the functions that loops call, which are the function's, with it.
        own_graph.cut_from = function
        given = {**dict(zip((own.name for own in captured), function.captured_inputs)), **values}
        given = {name: own_graph.capture(given[name]) for name in given if name in used}
        given.update(zip((own.name for own in feeds), fed))
        found = tf.graph_util.import_graph_def(
            definition,
            input_map={name: given[name] for name in used},
            return_elements=[name for name in wanted if name not in known],
            name="stage",
        )
        rest = iter(found)
        results = [tf.identity(given[name]) if name in known else next(rest) for name in wanted]
        sums = fed[len(feeds) :]
        added = [total + own for total, own in zip(sums, results[len(fetches) :])]
        return [*results[: len(fetches)], *added]

    specs = [tf.TensorSpec(own.shape, own.dtype) for own in (*feeds, *terms)]
    # Many calls of it are to be no longer to prepare than one.
    own = tf.function(program, autograph=False, experimental_attributes={"_noinline": True})
    return own.get_concrete_function(*specs)


def operations_behind(
    tensors: Iterable[tf.Tensor], known: Iterable[tf.Operation] = ()
) -> list[tf.Operation]:
    """Returns the operations that tensors need, each once.

    Args:
      tensors: of a graph.
      known: operations that are not returned, nor those that only they need.
    """
    seen = set(known)
    needed: list[tf.Operation] = []
    waiting = [own.op for own in tensors]
    while waiting:
        operation = waiting.pop()
        if operation not in seen:
            seen.add(operation)
            needed.append(operation)
            waiting.extend(own.op for own in operation.inputs)
    return needed


def _needed(
    definition: tf.compat.v1.GraphDef, ends: Sequence[str], known: set[str]
) -> tuple[tf.compat.v1.GraphDef, set[str]]:
    """Returns some tensors' and operations' nodes and those they need; what known they use."""
    nodes = {node.name: node for node in definition.node}
    done = {own.partition(":")[0] for own in known}
    found: set[str] = set()
    used: set[str] = set()
    waiting = list(ends)
    while waiting:
        own = waiting.pop()
        name, _, place = own.lstrip("^").partition(":")
        tensor = f"{name}:{place or 0}"
        if own.startswith("^") and name in done:
            continue
        if tensor in known:
            used.add(tensor)
        elif name not in found:
            found.add(name)
            waiting.extend(nodes[name].input)
    kept = tf.compat.v1.GraphDef(library=definition.library, versions=definition.versions)
    # In the graph's own order.
    kept.node.extend(node for node in definition.node if node.name in found)
    for node in kept.node:
        node.input[:] = [own for own in node.input if own[0] != "^" or own[1:] in found]
        # What it is to be colocated with may be left out; all is on one device.
        node.attr.pop("_class", None)
    return kept, used
