"""The micro-batch that the layers of a network are computing.

Code that splits batches sets it. Layers that draw random numbers read it, because a micro-batch may
be computed twice and must then give the same result.
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
    """Layers called in the context compute this micro-batch.

    Args:
      index: its number, from 0.
    """
    before = current(), getattr(_local, "calls", None)
    _local.index, _local.calls = index, collections.Counter()
    try:
        yield
    finally:
        _local.index, _local.calls = before


def count_call(layer: Any) -> int:
    """Returns the number of earlier random draws of a layer for this micro-batch."""
    _local.calls[id(layer)] += 1
    return _local.calls[id(layer)] - 1


def current() -> tf.Tensor | int | None:
    """Returns the number of the micro-batch that layers compute; None: whole batches."""
    return getattr(_local, "index", None)
