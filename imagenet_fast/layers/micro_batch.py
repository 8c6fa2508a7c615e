"""Which part of a batch the layers of a network are working on, where they see it in parts.

What splits a batch says so here. Layers that draw random numbers need it, since a part may be
computed twice and must then come out the same.
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
    """Inside, layers work on this part of a batch.

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
    """Returns how often a layer has drawn random numbers for this part of the batch before."""
    _local.calls[id(layer)] += 1
    return _local.calls[id(layer)] - 1


def current() -> tf.Tensor | int | None:
    """Returns the number of the part that layers are working on; None: they see batches whole."""
    return getattr(_local, "index", None)
