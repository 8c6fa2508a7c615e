"""Counts what Python asks TensorFlow to do, operation by operation, under several replicas.

    one_call_job.py REPLICAS... [--by_replica]

On a TPU slice each such operation on another host's core is a message to it. Prints a line of JSON
for each action, number of replicas and number of blocks: how many operations it takes, without
those of TensorFlow's iterators, which has one for each replica. Only the first number of
replicas has networks of three blocks, too.
"""

import collections
import contextlib
import json
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe

from imagenet_fast import Config
from imagenet_fast.optimizers.lookahead import Lookahead
from imagenet_fast.optimizers.shadow_weights import ShadowWeights
from imagenet_fast.optimizers.weight_average import WeightAverage
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints
from imagenet_fast.training.step.classifier import Classifier

# What OwnedMultiDeviceIterator asks for by replica (multi_device_iterator_ops.py).
ITERATOR = {
    "AnonymousIteratorV3",
    "AnonymousMultiDeviceIteratorV3",
    "GeneratorDataset",
    "MakeIterator",
    "MultiDeviceIteratorInit",
    "MultiDeviceIteratorToStringHandle",
    "PrefetchDataset",
}
CALLS = collections.Counter()


def count_calls():
    """All that is done outside of functions, and each call of a function, goes through these."""
    for name, place in (("FastPathExecute", 1), ("Execute", 2), ("ExecuteCancelable", 2)):
        real = getattr(pywrap_tfe, f"TFE_Py_{name}")

        def counted(*args, real=real, place=place):
            found = real(*args)
            CALLS[args[place] if isinstance(args[place], str) else args[place].decode()] += 1
            return found

        setattr(pywrap_tfe, f"TFE_Py_{name}", counted)


@contextlib.contextmanager
def in_use_by_replica(self):
    """The fault that is to be seen: replica by replica, variable by variable."""
    for begin in (True, False):
        for average, variable in zip(self.averages, self._variables):
            for one, other in zip(average.values, variable.values):
                value = one.read_value()
                one.assign(other.read_value())
                other.assign(value)
        if begin:
            yield


def copies(model):
    """All that a checkpoint holds, of each replica."""
    slow = [*model.weight_average.averages, *model.lookahead.averages]
    variables = [*model.weights, *model.optimizer.variables(), *slow]
    return [own.numpy() for variable in variables for own in variable.values]


def check_resume(model, checkpoints):
    """Each replica gets to the bit what it had."""
    checkpoints.save(2, {"step": 2})
    before = copies(model)
    model.set_weights([np.zeros_like(value) for value in model.get_weights()])
    assert not all(map(np.array_equal, copies(model), before))
    assert checkpoints.restore() == {"step": 2}
    assert all(map(np.array_equal, copies(model), before))


def build(strategy, blocks):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        images = x = keras.Input((6, 6, 3))
        for _ in range(blocks):
            x = keras.layers.BatchNormalization()(keras.layers.Conv2D(4, 3, padding="same")(x))
        logits = keras.layers.Dense(3, name="logits")(keras.layers.Flatten()(x))
        model = Classifier(images, logits)
        model.weight_average = WeightAverage(model.weights, 0.9)
        model.lookahead = Lookahead(model.weights, 0.9, 2, total_steps=8)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    return model


def actions(model, folder):
    images = np.random.default_rng(0).normal(size=(16, 6, 6, 3)).astype("float32")
    labels = np.arange(16) % 3
    checkpoints = Checkpoints(model, Config(model_dir=folder, synthetic=True, num_classes=3))
    model.fit(images, labels, batch_size=16, verbose=0)
    arrays = model.get_weights()
    options = {"batch_size": 16, "verbose": 0}
    yield "fit", lambda: model.fit(images, labels, **options)
    yield "evaluate", lambda: model.evaluate(images, labels, **options)
    yield "predict", lambda: model.predict(images, **options)
    yield "average statistics", model.average_batch_norm_statistics
    yield "restart shadow weights", model.restart_shadow_weights
    yield "set weights", lambda: model.set_weights(arrays)
    yield "reset metrics", model.reset_metrics
    yield "save a checkpoint", lambda: checkpoints.save(1, {"step": 1})
    yield "resume", checkpoints.restore
    check_resume(model, checkpoints)


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
    count_calls()
    if "--by_replica" in sys.argv:
        ShadowWeights.in_use = in_use_by_replica
    for turn, replicas in enumerate(map(int, filter(str.isdigit, sys.argv))):
        # Without collectives, whose groups of different sizes would meet in one process.
        strategy = tf.distribute.MirroredStrategy(
            [f"CPU:{i}" for i in range(replicas)], tf.distribute.ReductionToOneDevice()
        )
        for blocks in (1,) if turn else (1, 3):
            with tempfile.TemporaryDirectory() as folder:
                for action, act in actions(build(strategy, blocks), folder):
                    act()  # It traces.
                    CALLS.clear()
                    act()
                    calls = {name: n for name, n in CALLS.items() if name not in ITERATOR}
                    print(
                        json.dumps(
                            {
                                "action": action,
                                "replicas": replicas,
                                "blocks": blocks,
                                "operations": sum(calls.values()),
                                "assignments": calls.get("AssignVariableOp", 0),
                                "iterator": sum(CALLS.values()) - sum(calls.values()),
                            }
                        ),
                        flush=True,
                    )


main()
