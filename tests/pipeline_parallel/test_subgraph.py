"""Functions that are cut out of others, against what the others compute."""

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.pipeline_parallel.subgraph import subgraph

VALUES = np.array([1.0, 2.0, 3.0], np.float32)


def traced(function, *specs):
    """The concrete function, and the tensors in its graph that it returns."""
    tensors = {}

    @tf.function(autograph=False)
    def whole(*values):
        tensors.update(function(*values))

    own = whole.get_concrete_function(*(specs or [tf.TensorSpec([3])]))
    return own, tensors


def kinds(program):
    """Of all its operations."""
    definition = program.graph.as_graph_def()
    return {node.op for node in definition.node}


def test_computes_the_fetches_and_nothing_before_the_feeds():
    own, at = traced(lambda x: {"middle": (y := tf.exp(x)), "after": tf.sin(y), "apart": tf.tan(x)})
    program = subgraph(own, [at["middle"]], [at["after"]])
    (found,) = program(VALUES)
    np.testing.assert_allclose(found, np.sin(VALUES), rtol=1e-6)
    assert "Sin" in kinds(program)
    assert not {"Exp", "Tan"} & kinds(program)


def test_a_chain_is_the_whole():
    own, at = traced(lambda x: {"x": x, "middle": (y := tf.exp(x)), "after": tf.sin(y)})
    before = subgraph(own, [at["x"]], [at["middle"]])
    after = subgraph(own, [at["middle"]], [at["after"]])
    (found,) = after(*before(VALUES))
    np.testing.assert_allclose(found, np.sin(np.exp(VALUES)), rtol=1e-5)


def test_adds_terms_to_sums():
    own, at = traced(lambda x: {"x": x, "half": tf.cast(x, tf.float16), "square": x * x})
    program = subgraph(own, [at["x"]], [at["x"]], terms=[at["square"], at["half"]])
    values, squares, halves = program(VALUES, VALUES, np.zeros(3, np.float16))
    np.testing.assert_array_equal(values, VALUES)
    np.testing.assert_array_equal(squares, VALUES**2 + VALUES)
    assert halves.dtype == tf.float16
    _, squares, _ = program(VALUES, squares, halves)
    np.testing.assert_array_equal(squares, 2 * VALUES**2 + VALUES)


def test_a_fetch_that_is_fed_and_one_that_is_asked_for_twice():
    own, at = traced(lambda x: {"x": x, "after": x + 1})
    program = subgraph(own, [at["x"]], [at["x"], at["after"], at["x"], at["after"]])
    for found, expected in zip(program(VALUES), (VALUES, VALUES + 1) * 2):
        np.testing.assert_array_equal(found, expected)


def test_a_feed_that_is_not_needed():
    own, at = traced(lambda x: {"x": x, "one": tf.exp(x), "other": tf.sin(x)})
    program = subgraph(own, [at["x"], at["one"]], [at["other"]])
    np.testing.assert_allclose(program(VALUES, VALUES)[0], np.sin(VALUES), rtol=1e-6)


def test_one_output_of_an_operation_is_fed_and_another_is_needed():
    """The kernel of batch norm, whose outputs go forward and whose statistics go backward."""

    def norm(x):
        made = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=[1.0, 1.0], offset=[0.0, 0.0], mean=[], variance=[], epsilon=1e-3
        )
        return {"x": x, "normal": made.y, "mean": made.batch_mean, "sum": made.y + made.batch_mean}

    own, at = traced(norm, tf.TensorSpec([4, 1, 1, 2]))
    program = subgraph(own, [at["x"], at["normal"]], [at["sum"], at["mean"]])
    values = np.arange(8, dtype=np.float32).reshape(4, 1, 1, 2)
    total, mean = program(values, np.full_like(values, 100.0))
    np.testing.assert_allclose(mean, [3.0, 4.0], rtol=1e-6)
    np.testing.assert_allclose(total, np.full_like(values, 100.0) + mean, rtol=1e-6)


def test_variables_stay_those_that_they_are():
    variable = tf.Variable(2.0)
    own, at = traced(lambda x: {"x": x, "product": x * variable})
    program = subgraph(own, [at["x"]], [at["product"]])
    np.testing.assert_array_equal(program(VALUES)[0], VALUES * 2)
    variable.assign(5.0)
    np.testing.assert_array_equal(program(VALUES)[0], VALUES * 5)


def test_tensors_from_outside_stay_those_that_they_are():
    @tf.function(autograph=False)
    def outer(values, factor):
        own, at = traced(lambda x: {"x": x, "product": x * factor, "factor": factor + 0})
        return subgraph(own, [at["x"]], [at["product"], at["factor"]])(values)

    for factor in (3.0, 4.0):
        product, same = outer(tf.constant(VALUES), tf.constant(factor))
        np.testing.assert_array_equal(product, VALUES * factor)
        assert same == factor


@pytest.mark.parametrize("fed", [True, False])
def test_control_dependencies(fed):
    """They hold on what is computed, and are fulfilled by what is fed."""

    def whole(x):
        middle = tf.exp(x)
        check = tf.debugging.Assert(tf.reduce_all(x > 0), ["not positive"])
        with tf.control_dependencies([x, middle] + [check] * (not fed)):
            return {"x": x, "middle": middle, "after": tf.ones([3])}

    own, at = traced(whole)
    program = subgraph(own, [at["x"], at["middle"]] if fed else [at["x"]], [at["after"]])
    np.testing.assert_array_equal(program(*[VALUES] * (1 + fed))[0], np.ones(3))
    if not fed:
        with pytest.raises(tf.errors.InvalidArgumentError, match="not positive"):
            program(-VALUES)


def test_functions_inside_come_along():
    @tf.function
    def inner(x):
        return x * 3 if tf.reduce_sum(x) > 0 else x

    own, at = traced(lambda x: {"middle": (y := x + 1), "after": inner(y)})
    program = subgraph(own, [at["middle"]], [at["after"]])
    np.testing.assert_array_equal(program(VALUES)[0], VALUES * 3)
    np.testing.assert_array_equal(program(-VALUES)[0], -VALUES)


def test_shapes_are_those_of_the_tensors():
    own, at = traced(lambda x: {"x": x, "after": x[:, :1]}, tf.TensorSpec([None, 4], tf.bfloat16))
    program = subgraph(own, [at["x"]], [at["after"]])
    assert [(spec.shape.as_list(), spec.dtype) for spec in program.outputs] == [
        ([None, 1], tf.bfloat16)
    ]
