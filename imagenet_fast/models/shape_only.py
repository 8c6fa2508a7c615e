"""Networks that are made to be looked at, not to be computed with."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tf_keras.src import backend

# Elements of variables that keep a value: some layers compute with theirs while they are built, as
# Keras' Normalization does.
_SMALL = 4096


@contextlib.contextmanager
def shape_only() -> Iterator[list[tf.Variable]]:
    """Makes variables that take no memory, and leaves no trace in random numbers and names.

    Of the variables made inside, name, shape and dtype are all that can be used; small ones are 0,
    whatever their initializers. What the random generators of Python, NumPy and Keras draw
    afterwards does not depend on what was made, nor do the numbers in the names that Keras gives to
    layers. To be used outside of a strategy's scope.

    Yields:
        The variables, in the order in which they are made.
    """
    made: list[tf.Variable] = []

    def creator(make: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        made.append(_empty(make, **options))
        return made[-1]

    device, scope = tf.device("CPU:0"), tf.variable_creator_scope(creator)
    with _repeated_random_numbers(), _repeated_names(), device, scope:
        yield made


def _empty(make: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
    """Makes a variable of no value or, if it is small, of zeros."""
    shape, dtype = options.get("shape"), options.get("dtype")
    if shape is not None:  # an initializer may be slow
        options["initial_value"] = lambda: tf.zeros(shape, dtype)
    variable = make(**options)
    if (variable.shape.num_elements() or 0) <= _SMALL:
        return variable
    # Unlike ``assign``, it does not mind another shape.
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
    own_before = generator.getstate() if generator else None
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)
        backend._SEED_GENERATOR.generator = generator
        if generator:
            generator.setstate(own_before)
