"""What workers tell each other before they train, and a check that they agree."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from imagenet_fast.distribute.pipelines import workers_of
from imagenet_fast.errors import UserError

# Texts come in multiples of so many bytes, so that few programs are made for them.
_BYTES = 256


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


def check_agreement(
    strategy: tf.distribute.Strategy,
    what: str,
    how: str,
    advice: str = "start all workers with the same options",
) -> None:
    """Checks that all workers do something alike, where else they would wait for ever.

    Args:
      strategy: of the workers, all of which must come here; under others nothing is to be checked.
      what: the name of it, to complete "workers disagree on ...".
      how: how this worker does it.
      advice: what to do if others do it otherwise.

    Raises:
      UserError: in all workers, naming the first replica that differs from replica 0.
    """
    if workers_of(strategy) is None:
        return
    texts = texts_of_all(strategy, how)
    for replica, text in enumerate(texts):
        if text != texts[0]:
            raise UserError(
                f"workers disagree on {what}: replica {replica} {text!r}, replica 0 {texts[0]!r}; "
                f"{advice}"
            )


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
