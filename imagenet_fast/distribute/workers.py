"""The number of worker processes, this worker's index, and their collectives."""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.distribute.cluster import place_of
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy


def workers_of(
    strategy: tf.distribute.Strategy,
) -> tf.distribute.MultiWorkerMirroredStrategy | None:
    """Returns the strategy that connects the worker processes; None: one process."""
    if isinstance(strategy, PipelineStrategy):
        return strategy.workers
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return strategy
    return None


def collective_hint(strategy: tf.distribute.Strategy) -> str:
    """Returns the communication hint for collectives: ``"nccl"`` on GPUs, else ``"ring"`` (gRPC).

    Every collective needs it: TensorFlow uses NCCL only for those with this hint, and those of a
    strategy with ``CommunicationImplementation.NCCL``
    (``CollectiveParamResolverLocal::AssignCollectiveType``).
    """
    workers = workers_of(strategy)
    on_gpus = workers is not None and "GPU" in workers.extended.worker_devices[0]
    return "nccl" if on_gpus else "ring"


def worker_place(strategy: tf.distribute.Strategy) -> tuple[int, int]:
    """Returns the number of worker processes, and the index of this one."""
    workers = workers_of(strategy)
    return place_of(workers.cluster_resolver if workers is not None else None)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process is the first worker, which writes files and logs for all.

    A process that trains alone is, even if it was started as part of a job.
    """
    _, worker = worker_place(strategy)
    return worker == 0
