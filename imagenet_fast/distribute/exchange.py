"""What worker processes tell each other beside their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from imagenet_fast.distribute.workers import worker_place, workers_of

# Texts come in multiples of so many bytes, so that few programs are made for them.
_BYTES = 256


def wait_for_all(strategy: tf.distribute.Strategy) -> None:
    """Returns when all workers have come here."""
    if workers_of(strategy) is None:
        return
    for count in strategy.experimental_local_results(_meeting(strategy)()):
        count.numpy()


def numbers_of_all(strategy: tf.distribute.Strategy, numbers: Sequence[float]) -> np.ndarray:
    """Returns each replica's numbers, float32 [replicas, numbers]; all workers must come here.

    Args:
      strategy: of the workers.
      numbers: this worker's, as many in all of them.
    """
    gathered = _gathering(strategy, len(numbers))(tf.constant([list(numbers)], tf.float32))
    rows = strategy.experimental_local_results(gathered)[0].numpy()
    # TensorFlow gathers what is worker 10's before what is worker 9's.
    return rows[np.argsort(rows[:, 0])][:, 1:]


def texts_of_all(strategy: tf.distribute.Strategy, text: str) -> list[str]:
    """Returns each replica's text; all workers must come here.

    Args:
      strategy: of the workers.
      text: this worker's.
    """
    codes = text.encode()
    longest = int(numbers_of_all(strategy, [len(codes)]).max())
    width = _BYTES * max(1, -(-longest // _BYTES))
    rows = numbers_of_all(strategy, list(codes.ljust(width)))
    return [bytes(row.astype(int).tolist()).decode().rstrip() for row in rows]


def text_of_chief(strategy: tf.distribute.Strategy, text: str) -> str:
    """Returns the chief's text in all workers, which must come here; one process has its own.

    Args:
      strategy: of the workers.
      text: this worker's.
    """
    return text if workers_of(strategy) is None else texts_of_all(strategy, text)[0]


def sum_over_workers(strategy: tf.distribute.Strategy, *values: np.ndarray) -> Sequence[np.ndarray]:
    """Returns the sums of each worker's float32 arrays, of the same shapes; all must come here."""
    if workers_of(strategy) is None:
        return values
    flat = np.concatenate([value.ravel() for value in values])
    # The first of a worker's replicas has all of it.
    parts = iter([flat])

    def part(_: tf.distribute.ValueContext) -> tf.Tensor:
        return tf.constant(next(parts, np.zeros_like(flat)))

    per_replica = strategy.experimental_distribute_values_from_function(part)
    total = tf.function(lambda: strategy.run(_sum_over_replicas, args=(per_replica,)))()
    sums = strategy.experimental_local_results(total)[0].numpy()
    ends = np.cumsum([value.size for value in values])
    return [split.reshape(value.shape) for split, value in zip(np.split(sums, ends[:-1]), values)]


def rows_of_all_workers(strategy: tf.distribute.Strategy, rows: np.ndarray) -> np.ndarray:
    """Returns the rows of each worker's integer array, one worker's behind the other's.

    Numbers up to 16.7 million, to which float32 is exact, which any device can sum.
    """
    workers, own = worker_place(strategy)
    counts = np.zeros([workers], np.float32)
    counts[own] = len(rows)
    counts = sum_over_workers(strategy, counts)[0].astype(np.int64)
    first = counts[:own].sum()
    everything = np.zeros([counts.sum(), *rows.shape[1:]], np.float32)
    everything[first : first + len(rows)] = rows
    return sum_over_workers(strategy, everything)[0].astype(np.int64)


@functools.cache
def _meeting(strategy: tf.distribute.Strategy) -> Callable[[], tf.Tensor]:
    """Returns what sums a number over all workers; traced once, however often they meet."""

    def own() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(1.0))

    return tf.function(lambda: strategy.run(own))


@functools.cache
def _gathering(strategy: tf.distribute.Strategy, width: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns what makes of each replica's row the rows of all, each behind its replica's number.

    A concrete function, which is not traced anew inside of a strategy's scope.
    """

    def own(row: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        replica = tf.fill([1, 1], tf.cast(context.replica_id_in_sync_group, tf.float32))
        # On the replica's device, which the argument does not know.
        row = tf.concat([replica, row], axis=1)
        return context.all_gather(row, axis=0)

    signature = [tf.TensorSpec([1, width], tf.float32)]
    function = tf.function(lambda row: strategy.run(own, args=(row,)), signature, autograph=False)
    return function.get_concrete_function()


def _sum_over_replicas(value: tf.Tensor) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, value)
