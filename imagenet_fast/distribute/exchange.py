"""Exchange of texts and flags, and barriers, across worker processes.

Texts go through TensorFlow's coordination service, a key-value store in the first worker (the
chief). All workers must make the same calls in the same order.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator

import tensorflow as tf
from tensorflow.python.eager import context

from imagenet_fast.distribute.workers import workers_of

# Numbers the exchanges of a process, because the service accepts each key once.
_EXCHANGES = itertools.count()
# How long to wait for a key before checking that the worker that will set it is alive.
_POLL_MILLISECONDS = 2_000
# A stopped process does not answer. TensorFlow gives up after three checks of 10 s.
_HEALTH_MILLISECONDS = 30_000
_ACKNOWLEDGE_MILLISECONDS = 10_000


def texts_of_all(
    strategy: tf.distribute.Strategy, text: str, seconds: float | None = None
) -> list[str]:
    """Returns each worker's text, in worker order; with one process, its text alone.

    The chief collects the texts, publishes the list and waits until all others have read it, so
    that it may exit next, and the service with it.

    Workers that run must answer within ``seconds``; None: there is no limit.

    Raises:
      tf.errors.UnavailableError: in all workers, naming one that stopped or did not answer in time.
    """
    tasks, index = _tasks(strategy)
    if len(tasks) < 2:
        return [text]
    service, prefix = context.context(), f"imagenet_fast/exchange/{next(_EXCHANGES)}"
    text_key, all_key, read_key = (f"{prefix}/{name}" for name in ("text/{}", "all", "read/{}"))
    start = time.monotonic()
    if index:
        with _naming(tasks[0]):
            service.set_config_key_value(text_key.format(index), text)
            # Twice the limit, so that the chief can name another worker first.
            result = json.loads(_wait_for(all_key, tasks[0], start, seconds and 2 * seconds))
        # The chief may exit, and the service with it, before it answers this call.
        with contextlib.suppress(tf.errors.UnavailableError):
            service.set_config_key_value(read_key.format(index), "")
    else:
        others = list(range(1, len(tasks)))
        result = {"texts": [text]}
        for other in others:
            try:
                with _naming(tasks[other]):
                    # One limit for all, or the chief could exceed that of the others.
                    value = _wait_for(text_key.format(other), tasks[other], start, seconds)
            except tf.errors.UnavailableError as error:
                result["error"] = error.message
                others.remove(other)
                break
            result["texts"].append(value)
        service.set_config_key_value(all_key, json.dumps(result))
        # The next collective reports workers that stop now.
        with contextlib.suppress(tf.errors.OpError):
            for other in others:
                service.get_config_key_value(read_key.format(other), _ACKNOWLEDGE_MILLISECONDS)
    if "error" in result:
        raise tf.errors.UnavailableError(None, None, result["error"])
    return result["texts"]


def text_of_chief(strategy: tf.distribute.Strategy, text: str) -> str:
    """Returns the chief's text in all workers; arguments and errors as in :func:`texts_of_all`."""
    return texts_of_all(strategy, text)[0]


def wait_for_all(strategy: tf.distribute.Strategy) -> None:
    """Returns when all workers have called it (a barrier); errors as in :func:`texts_of_all`."""
    texts_of_all(strategy, "")


def any_worker(strategy: tf.distribute.Strategy) -> Callable[[bool], bool]:
    """Returns a function that returns True in all workers if one of them calls it with True.

    That is one all-reduce: with texts, the chief would ask the service for each worker's.
    """
    if workers_of(strategy) is None:
        return bool

    @tf.function(autograph=False)
    def total(asked: tf.Tensor) -> tf.Tensor:
        def of_replica() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            # The copy is on the replica's device, which the all-reduce asks for.
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(asked))

        return strategy.experimental_local_results(strategy.run(of_replica))[0]

    return lambda asked: bool(total(tf.constant(float(asked))) > 0)


def _tasks(strategy: tf.distribute.Strategy) -> tuple[list[str], int]:
    """Returns TensorFlow's names of the workers, and the index of this worker."""
    workers = workers_of(strategy)
    resolver = workers.cluster_resolver if workers else None
    if resolver is None:
        return [], 0
    spec = resolver.cluster_spec()
    tasks = [
        (job, task)
        for job in ("chief", "worker")
        if job in spec.jobs
        for task in spec.task_indices(job)
    ]
    names = [f"/job:{job}/replica:0/task:{task}" for job, task in tasks]
    return names, tasks.index((resolver.task_type, resolver.task_id)) if tasks else 0


def _wait_for(key: str, task: str, start: float, seconds: float | None) -> str:
    """Returns the value of a key that ``task`` sets.

    Raises:
      tf.errors.OpError: if the task has stopped, for which TensorFlow alone would wait forever, or
        did not set the key within ``seconds`` after ``start``.
    """
    service = context.context()
    while True:
        try:
            return service.get_config_key_value(key, _POLL_MILLISECONDS)
        except tf.errors.DeadlineExceededError:
            service.check_collective_ops_peer_health(task, timeout_in_ms=_HEALTH_MILLISECONDS)
            if seconds is not None and time.monotonic() - start > seconds:
                raise tf.errors.UnavailableError(
                    None, None, f"no answer within {seconds:g} s"
                ) from None


@contextlib.contextmanager
def _naming(task: str) -> Iterator[None]:
    """Appends the task to the message of TensorFlow's errors.

    Workers pass on each other's errors, and the task named last is where they began.
    """
    try:
        yield
    except tf.errors.OpError as error:
        raise tf.errors.UnavailableError(None, None, f"{error.message} ({task})") from error
