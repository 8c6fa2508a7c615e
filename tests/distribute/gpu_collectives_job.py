"""Training steps of replicas that act as workers' GPUs do: their collectives and results.

The replicas are logical CPUs of one process under ``MultiWorkerMirroredStrategy``. On a CPU, the
hint for NCCL gives a ring, in the same order.

Arguments: the path of a JSON object with ``out``, to which the collectives and weights are written
as JSON, and ``steps``: by name, the options of ``AllReduce``; null: what Keras does.
"""

import json
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceStrategy
from tf_configs import tf_config_of

from imagenet_fast.distribute import all_reduce, connect, group_sum, workers
from imagenet_fast.distribute.fusion import Fusion
from imagenet_fast.distribute.groups import group_key
from imagenet_fast.layers import GroupedBatchNormalization, PixelNormalization
from imagenet_fast.optimizers import SGD
from imagenet_fast.training.step.classifier import Classifier

REPLICAS = 4


def strategy_on_gpus():
    """Returns the strategy, which makes its own collectives as for GPUs."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    )
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.NCCL
    )
    names = [f"/device:CPU:{number}" for number in range(REPLICAS)]
    for module in (all_reduce, connect, group_sum, workers):
        module.collective_hint = lambda strategy: "nccl"
    strategy = CollectiveAllReduceStrategy._from_local_devices(names, options)
    # Not earlier: TensorFlow would start a server for it.
    os.environ["TF_CONFIG"] = tf_config_of(("localhost:1",), 0)
    return strategy


def train(strategy, options):
    """Returns the collectives of a step and of averaging statistics, and the weights after two."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        images = x = keras.Input((8, 8, 3), dtype="uint8")
        x = PixelNormalization((128.0,) * 3, (64.0,) * 3)(x)
        x = keras.layers.Conv2D(8, 3, strides=2)(x)
        x = keras.layers.ReLU()(GroupedBatchNormalization(group_size=2)(x))
        model = Classifier(images, keras.layers.Dense(4)(keras.layers.Flatten()(x)))
        if options is not None:
            model.all_reduce = all_reduce.AllReduce(
                fusion=Fusion(bytes=600), timeout_seconds=120, **options
            )
        model.compile(SGD(0.02, momentum=0.9))
    random = np.random.RandomState(0)
    arrays = random.randint(256, size=(16, 8, 8, 3)).astype(np.uint8), random.randint(4, size=16)
    # Batches whose size is not known: the replicas sum it in the step, too.
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(8).repeat()
    model.fit(data, steps_per_epoch=2, epochs=1, verbose=0)
    model.average_batch_norm_statistics()
    weights = np.concatenate([value.ravel() for value in model.get_weights()])
    iterator = iter(strategy.experimental_distribute_dataset(data))
    step = tf.function(
        lambda data: strategy.run(model.train_step, args=(next(data),)), autograph=False
    )
    graphs = [step.get_concrete_function(iterator).graph]
    average = tf.function(
        lambda: strategy.run(model._average_statistics_in_replica), autograph=False
    )
    graphs.append(average.get_concrete_function().graph)
    return [collectives(strategy, graph) for graph in graphs], weights.tolist()


def collectives(strategy, graph):
    """Returns what each collective of a program is, in the order in which they were made."""
    own = {
        launcher._get_ordering_token()._id: f"strategy {number}"
        for number, launcher in enumerate(strategy.extended._cross_device_ops._launchers)
    }
    outside = {
        inside.name: own.get(tensor._id, f"{tensor._id}") for tensor, inside in graph.captures
    }
    # None hides in a function that is called, a branch or a loop.
    called = graph.as_graph_def().library.function
    assert not any("Collective" in node.op for own in called for node in own.node_def)
    found = []
    for node in graph.get_operations():
        if not node.type.startswith("Collective"):
            continue
        tokens = [tensor for tensor in node.inputs if tensor.dtype == tf.resource]
        size, key = (int(tf.get_static_value(tensor)) for tensor in list(node.inputs)[1:3])
        found.append(
            {
                "name": node.name,
                "kind": node.type,
                "hint": node.get_attr("communication_hint").decode(),
                "dtype": node.get_attr("T").name,
                "size": size,
                "group": key,
                "tokens": [outside[tensor.name] for tensor in tokens],
                "after": [before.name for before in node.control_inputs],
            }
        )
    return found


def main():
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    strategy = strategy_on_gpus()
    connected, meet = [], connect._all_reduce_once

    def noted(strategy, group, place, *options):
        meet(strategy, group, place, *options)
        connected.append([list(group), place, group_key(group, place)])

    connect._all_reduce_once = noted
    results = {}
    for name, options in job["steps"].items():
        connected.clear()
        (step, average), weights = train(strategy, options)
        results[name] = {"step": step, "average": average, "weights": weights}
        results[name]["connected"] = list(connected)
    pathlib.Path(job["out"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
