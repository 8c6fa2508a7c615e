"""Which part of a batch the layers of a network are working on, where they see it in parts.

What splits a batch says so here. Layers that draw random numbers need it, since a part may be
computed twice and must then come out the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

_local = threading.local()


@contextlib.contextmanager
def micro_batch(index: tf.Tensor | int) -> Iterator[None]:
    """Inside, layers work on this part of a batch.

    Args:
      index: its number, from 0.
    """
    before = current()
    _local.index = index
    try:
        yield
    finally:
        _local.index = before


def current() -> tf.Tensor | int | None:
    """Returns the number of the part that layers are working on; None: they see batches whole."""
    return getattr(_local, "index", None)
