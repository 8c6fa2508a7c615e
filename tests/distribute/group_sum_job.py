"""Sums over groups of four replicas, and their gradients, against NumPy.

Arguments: ``strategy`` and ``logical_cpus``. Fails if any replica finds another value.
"""

import sys

import numpy as np
import tensorflow as tf

from imagenet_fast import Config, make_strategy
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.exchange import wait_for_all
from imagenet_fast.distribute.group_sum import group_sum
from imagenet_fast.distribute.groups import columns, consecutive

REPLICAS = 4
VALUES = np.random.default_rng(0).normal(size=(REPLICAS, 2, 3))
WEIGHTS = np.arange(1.0, 1 + REPLICAS)


def own_results(groups, dtype):
    """Returns the sum s, the gradient of weight * s^3, and a derivative of that."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    own = tf.constant(VALUES, dtype)[replica]
    weight = tf.constant(WEIGHTS, dtype)[replica]
    with tf.GradientTape() as outer:
        outer.watch(own)
        with tf.GradientTape() as inner:
            inner.watch(own)
            total = group_sum(own, groups, "test")
            loss = tf.reduce_sum(weight * total**3)
        first = inner.gradient(loss, own)
    return total, first, outer.gradient(first, own)


def expected_results(groups, replica):
    members = list(groups.of(replica))
    total, weight = VALUES[members].sum(axis=0), WEIGHTS[members].sum()
    # Each member differentiates the same gradient.
    return total, 3 * weight * total**2, 6 * weight * total * groups.size


def main():
    kind, logical_cpus = sys.argv[1:]
    strategy = make_strategy(Config(strategy=kind, logical_cpus=int(logical_cpus), batch_size=4))
    cluster = Cluster.from_environment()
    local = [cluster.index] if cluster else range(REPLICAS)
    for groups in (*(consecutive(4, n) for n in (1, 2, 4)), columns(consecutive(4, 2))):
        for dtype in ("float32", "float64"):
            # Made anew: one trace does not know of the other.
            step = tf.function(lambda: strategy.run(own_results, args=(groups, dtype)))  # noqa: B023
            for found in (step(), step()):
                for i, replica in enumerate(local):
                    own = [strategy.experimental_local_results(value)[i] for value in found]
                    for value, expected in zip(own, expected_results(groups, replica)):
                        np.testing.assert_allclose(value, expected, rtol=1e-5)
    wait_for_all(strategy)


if __name__ == "__main__":
    main()
