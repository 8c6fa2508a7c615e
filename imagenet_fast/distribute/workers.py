"""The worker processes that train together, and which of them this one is."""

from __future__ import annotations

import tensorflow as tf

from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy


def workers_of(
    strategy: tf.distribute.Strategy,
) -> tf.distribute.MultiWorkerMirroredStrategy | None:
    """Returns the strategy under which worker processes meet; None: there is one process."""
    if isinstance(strategy, PipelineStrategy):
        return strategy.workers
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return strategy
    return None


def collective_hint(strategy: tf.distribute.Strategy) -> str:
    """Returns how several workers communicate: by ``"nccl"`` between GPUs, or ``"ring"``, gRPC.

    To be given to each collective: TensorFlow takes NCCL only for those that name it, or that a
    strategy with ``CommunicationImplementation.NCCL`` makes
    (``CollectiveParamResolverLocal::AssignCollectiveType``).
    """
    workers = workers_of(strategy)
    on_gpus = workers is not None and "GPU" in workers.extended.worker_devices[0]
    return "nccl" if on_gpus else "ring"


def worker_place(strategy: tf.distribute.Strategy) -> tuple[int, int]:
    """Returns how many worker processes there are, and the number of this one, from 0."""
    cluster = Cluster.from_environment() if workers_of(strategy) is not None else None
    if cluster is None:
        return 1, 0
    return len(cluster.workers), cluster.index


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process is the one that writes for all that train together.

    One that trains by itself is, whatever job it was started in.
    """
    _, own = worker_place(strategy)
    return own == 0
