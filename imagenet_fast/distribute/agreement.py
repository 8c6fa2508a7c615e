"""A check that all workers are about to do the same."""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.distribute.pipelines import workers_of
from imagenet_fast.errors import UserError

_BYTES = 256


def texts_of_all(strategy: tf.distribute.Strategy, text: str) -> list[str]:
    """Returns each replica's text; all workers must come here.

    Args:
      strategy: of the workers.
      text: this worker's, of which only the first 256 bytes count.
    """
    codes = tf.constant([list(text.encode()[:_BYTES].ljust(_BYTES))], tf.int32)
    rows = strategy.experimental_local_results(_gather(strategy, codes))[0].numpy()
    return [bytes(row.tolist()).decode(errors="replace").rstrip() for row in rows]


def check_agreement(strategy: tf.distribute.Strategy, what: str, how: str) -> None:
    """Checks that all workers do something alike, where else they would wait for ever.

    Args:
      strategy: of the workers, all of which must come here; under others nothing is to be checked.
      what: the name of it, to complete "replicas would not ... alike".
      how: how this worker does it; only the first 256 bytes count.

    Raises:
      UserError: in all workers, naming the first replica that differs from replica 0.
    """
    if workers_of(strategy) is None:
        return
    texts = texts_of_all(strategy, how)
    for replica, text in enumerate(texts):
        if text != texts[0]:
            raise UserError(
                f"replicas would not {what} alike: replica {replica} by {text!r}, but replica 0 "
                f"by {texts[0]!r}; start all workers with the same options"
            )


@tf.function(autograph=False)
def _gather(strategy: tf.distribute.Strategy, row: tf.Tensor) -> tf.Tensor:
    """Returns the rows of all replicas, from one of each."""

    def own(row: tf.Tensor) -> tf.Tensor:
        row = tf.identity(row)  # On the replica's device, which the argument does not know.
        return tf.distribute.get_replica_context().all_gather(row, axis=0)

    return strategy.run(own, args=(row,))
