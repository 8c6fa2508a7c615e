"""Which of the worker processes this one is."""

import tensorflow as tf

from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.workers import is_chief, worker_place


def test_place_and_chief(monkeypatch):
    workers = object.__new__(tf.distribute.MultiWorkerMirroredStrategy)  # none are started
    alone = tf.distribute.get_strategy()
    for index, chief in enumerate([True, False]):
        monkeypatch.setenv("TF_CONFIG", Cluster(("a:1", "b:1"), index).to_tf_config())
        assert worker_place(workers) == (2, index)
        assert is_chief(workers) == chief
        # One that trains by itself is, whatever job it was started in.
        assert worker_place(alone) == (1, 0)
        assert is_chief(alone)
