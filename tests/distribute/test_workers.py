"""The number of workers, this worker's index and its communication hint."""

import types

import pytest
import tensorflow as tf
from tf_configs import tf_config_of

from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy
from imagenet_fast.distribute.strategy import cluster_resolver
from imagenet_fast.distribute.workers import collective_hint, is_chief, worker_place


def test_place_and_chief(monkeypatch):
    workers = object.__new__(tf.distribute.MultiWorkerMirroredStrategy)  # none are started
    alone = tf.distribute.get_strategy()
    for index, chief in enumerate([True, False]):
        resolver = cluster_resolver(Cluster(("a:1", "b:1"), index), gpus=0)
        workers._extended = types.SimpleNamespace(_cluster_resolver=resolver)
        # Some of the job's processes may not take part.
        monkeypatch.setenv("TF_CONFIG", tf_config_of(("a:1", "b:1", "c:1"), index))
        assert worker_place(workers) == (2, index)
        assert is_chief(workers) == chief
        # One that trains by itself is, whatever job it was started in.
        assert worker_place(alone) == (1, 0)
        assert is_chief(alone)
    # As TensorFlow has it: without a cluster there is one worker.
    monkeypatch.delenv("TF_CONFIG")
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    workers._extended = types.SimpleNamespace(_cluster_resolver=resolver)
    assert worker_place(workers) == (1, 0)


@pytest.mark.parametrize(("kind", "hint"), [("GPU", "nccl"), ("CPU", "ring")])
def test_gpus_communicate_by_nccl(kind, hint):
    workers = object.__new__(tf.distribute.MultiWorkerMirroredStrategy)
    devices = tuple(f"/job:worker/replica:0/task:0/device:{kind}:{n}" for n in range(2))
    workers._extended = types.SimpleNamespace(worker_devices=devices)
    assert collective_hint(workers) == hint
    pipeline = object.__new__(PipelineStrategy)
    pipeline.workers = workers
    assert collective_hint(pipeline) == hint
    assert collective_hint(tf.distribute.get_strategy()) == "ring"
