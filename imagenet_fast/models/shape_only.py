"""Shape-only models, without memory for their weights (like PyTorch's meta device)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tf_keras.src import backend

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

    device, scope = tf.device("CPU:0"), tf.variable_creator_scope(creator)
    with _repeated_random_numbers(), _repeated_names(), device, scope:
        yield made


def _empty(make: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
    """Makes a variable without a value or, if it is small, of zeros."""
    shape, dtype = options.get("shape"), options.get("dtype")
    if shape is not None and tf.TensorShape(shape).is_fully_defined():  # an initializer may be slow
        options["initial_value"] = lambda: tf.zeros(shape, dtype)
    variable = make(**options)
    if (variable.shape.num_elements() or 0) <= _SMALL:
        return variable
    # Unlike ``assign``, it accepts another shape.
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.zeros([0], variable.dtype))
    return variable


@contextlib.contextmanager
def _repeated_names() -> Iterator[None]:
    numbers = backend.get_default_graph_uid_map()
    before = dict(numbers)
    try:
        yield
    finally:
        numbers.clear()
        numbers.update(before)


@contextlib.contextmanager
def _repeated_random_numbers() -> Iterator[None]:
    before, numpy_before = random.getstate(), np.random.get_state()
    # Of ``keras.utils.set_random_seed``; Keras has no public name for it.
    generator = getattr(backend._SEED_GENERATOR, "generator", None)
    keras_before = generator.getstate() if generator else None
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)
        backend._SEED_GENERATOR.generator = generator
        if generator:
            generator.setstate(keras_before)
