"""The micro-batch and the logical replica that the layers of a network are computing.

Code that splits batches sets them. Layers that draw random numbers read them: a micro-batch may be
computed twice and must then give the same result, and a logical replica draws the same on whatever
device carries it.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_local = threading.local()


@contextlib.contextmanager
def micro_batch(index: tf.Tensor | int) -> Iterator[None]:
    """Layers called in the context compute this micro-batch, counted from 0."""
    before = current(), getattr(_local, "calls", None)
    _local.index, _local.calls = index, collections.Counter()
    try:
        yield
    finally:
        _local.index, _local.calls = before


@contextlib.contextmanager
def logical_replica(index: tf.Tensor | None) -> Iterator[None]:
    """Layers called in the context compute this logical replica; None: the strategy's."""
    before = getattr(_local, "replica", None)
    _local.replica = index
    try:
        yield
    finally:
        _local.replica = before


@contextlib.contextmanager
def carried(replicas: int, parts: int) -> Iterator[None]:
    """Micro-batches computed in the context are those of several logical replicas, in turn.

    Each has ``parts``; each of the strategy's replicas carries ``replicas`` of them.
    """
    _local.carried = replicas, parts
    try:
        yield
    finally:
        del _local.carried


def place(replica: tf.Tensor | int) -> tuple[tf.Tensor | int, tf.Tensor | int | None]:
    """Returns the logical replica for the strategy's, and its micro-batch as of :func:`current`."""
    logical, part = getattr(_local, "replica", None), current()
    if logical is not None:
        return logical, part
    each, parts = getattr(_local, "carried", (1, 1))
    if part is None or each == 1:
        return replica, part
    return replica * each + part // parts, part % parts


def count_call(layer: Any) -> int:
    """Returns the number of earlier random draws of a layer for this micro-batch."""
    _local.calls[id(layer)] += 1
    return _local.calls[id(layer)] - 1


def current() -> tf.Tensor | int | None:
    """Returns the number of the micro-batch that layers compute; None: whole batches."""
    return getattr(_local, "index", None)
