"""Sums over two workers of two devices each. Argument: the folder for each worker's findings."""

import json
import pathlib
import sys

import tensorflow as tf

from imagenet_fast.config import Config
from imagenet_fast.distribute.all_reduce import AllReduce
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.consistency import check_same_options
from imagenet_fast.distribute.exchange import texts_of_all, wait_for_all
from imagenet_fast.distribute.fusion import Fusion
from imagenet_fast.distribute.strategy import make_strategy
from imagenet_fast.pipeline_parallel.placement import stage_devices
from imagenet_fast.pipeline_parallel.stage_all_reduce import StageAllReduce


def main():
    config = Config(strategy="multi_worker", logical_cpus=3, pipeline_stages=2, batch_size=8)
    strategy = make_strategy(config)
    check_same_options(config, strategy)
    worker = Cluster.from_environment().index
    # Not the first CPU, on which the strategy's own sums meet: as if stages had GPUs.
    devices = stage_devices(3)[1:]
    found = {"devices": devices, "texts": texts_of_all(strategy, f"worker {worker}")}
    with strategy.scope():
        variables = []
        for place, device in enumerate(devices):
            with tf.device(device):
                variables += [tf.Variable(tf.fill([n], float(place))) for n in (2, 3)]
        sums = StageAllReduce(
            devices, lambda place: AllReduce(place=place, name=f"stage_{place}", fusion=Fusion(9))
        )
    found["places"] = [variable.device for variable in variables]

    @tf.function
    def step():
        def own():
            context = tf.distribute.get_replica_context()
            replica = context.replica_id_in_sync_group
            rank = tf.cast(replica, tf.float32)
            # In another order than the stages'.
            gradients = [tf.fill(v.shape, 10.0 * i + rank) for i, v in enumerate(variables)]
            back = list(reversed(range(4)))
            summed = sums(
                [gradients[i] for i in back],
                [tf.constant([1, 2])],
                variables=[variables[i] for i in back],
            )
            value = tf.constant([1.0, 2.0]) * (rank + 1)
            mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, value)
            gathered = context.all_gather(value[tf.newaxis], axis=0)
            return replica, context.num_replicas_in_sync, summed, mean, gathered

        return strategy.run(own)

    replica, replicas, summed, mean, gathered = step()
    found.update(
        replica=int(replica),
        replicas=int(replicas),
        sums=[own.numpy().tolist() for own in summed],
        mean=mean.numpy().tolist(),
        gathered=gathered.numpy().tolist(),
    )
    pathlib.Path(sys.argv[1], f"{worker}.json").write_text(json.dumps(found))
    wait_for_all(strategy)


if __name__ == "__main__":
    main()
