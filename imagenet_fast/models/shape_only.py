"""Shape-only models, without memory for their weights (like PyTorch's meta device)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from imagenet_fast.base.keras_2 import name_numbers

# Variables of up to this number of elements have a value, because some layers compute with theirs
# while they are built, such as Keras' Normalization.
_SMALL = 4096


@contextlib.contextmanager
def shape_only() -> Iterator[list[tf.Variable]]:
    """Makes variables in the context take no memory, and restores random generators and names.

    Only name, shape and dtype of these variables can be used; small ones are 0, whatever their
    initializers. The context has no effect on later random numbers of Python, NumPy and Keras, nor
    on the numbers in names of Keras layers. Use it outside of a strategy's scope.

    Yields:
        The variables, in order of creation.
    """
    made: list[tf.Variable] = []

    def creator(make: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        made.append(_empty(make, **options))
        return made[-1]

    numbers = name_numbers()
    names, state, numpy_state = dict(numbers), random.getstate(), np.random.get_state()
    try:
        with tf.device("CPU:0"), tf.variable_creator_scope(creator):
            yield made
    finally:
        numbers.clear()
        numbers.update(names)
        random.setstate(state)
        np.random.set_state(numpy_state)


def _empty(make: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
    """Makes a variable without a value or, if it is small, of zeros."""
    if callable(options.get("initial_value")):
        spec = spec_of(**options)
        options["initial_value"] = lambda: tf.zeros(spec.shape, spec.dtype)
    variable = make(**options)
    if (variable.shape.num_elements() or 0) <= _SMALL:
        return variable
    # Unlike ``assign``, it accepts another shape.
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.zeros([0], variable.dtype))
    return variable


def spec_of(initial_value: Any, dtype: Any = None, **_: Any) -> tf.TensorSpec:
    """Returns the shape and dtype of the variable for these options, without making its value."""
    if not callable(initial_value):
        initial_value = tf.convert_to_tensor(initial_value, dtype)
        return tf.TensorSpec.from_tensor(initial_value)

    def value() -> tf.Tensor:
        return tf.convert_to_tensor(initial_value())

    # Not computed: it may be slow or large.
    try:
        with tf.Graph().as_default():
            made = value()
    # What only functions have: the value of a variable's copy in another replica, or worker.
    except (RuntimeError, ValueError):
        (made,) = tf.function(value, autograph=False).get_concrete_function().outputs
    return tf.TensorSpec(made.shape, dtype or made.dtype)
