"""Each of several workers trains small models, and sums tensors, by one algorithm after another.

Arguments: the path of a JSON object with ``groups`` (sizes), ``dtypes`` (in which sums travel),
``trains`` (ways to sum, by what is trained; may be left out), ``mistakes`` (whether these are made,
too; may be left out) and ``out``; each worker W writes ``outW.npz``.
"""

import functools
import json
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast import Config, UserError, make_strategy
from imagenet_fast.distribute import all_reduce
from imagenet_fast.distribute.all_reduce import AllReduce
from imagenet_fast.distribute.all_reduce_optimizer import with_all_reduce
from imagenet_fast.distribute.exchange import wait_for_all
from imagenet_fast.distribute.fusion import Fusion
from imagenet_fast.layers import PixelNormalization
from imagenet_fast.optimizers import SGD
from imagenet_fast.training.step.classifier import Classifier

STEPS = 6
TIMEOUT = 120
SIZES = ((3, 5), (1000,), (), (7, 11, 13))
# So few bytes that there are several buckets, and segments of 1, 2 and the other tensors.
SMALL = Fusion(bytes=400)
SEGMENTS = Fusion(segments=(1, 3))


class NoSum(keras.optimizers.SGD):
    def aggregate_gradients(self, grads_and_vars):
        return list(grads_and_vars)


def worker_data(strategy, make):
    """A data set of batches that differ from worker to worker."""
    worker = strategy.cluster_resolver.task_id
    arrays = make(np.random.RandomState(worker))
    batches = tf.data.Dataset.from_tensor_slices(arrays).batch(4).repeat()
    return strategy.distribute_datasets_from_function(lambda _: batches)


def train_keras(strategy, optimizer, options):
    """Weights of a plain Keras model, one of whose gradients is sparse."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(20, 8),
                keras.layers.Flatten(),
                keras.layers.Dense(33, activation="tanh"),
                keras.layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if make_all_reduce := options.get("all_reduce"):
            options = {**options, "all_reduce": make_all_reduce()}
        model.compile(optimizer(**options), loss)
    data = worker_data(strategy, lambda r: (r.randint(20, size=(32, 6)), r.randint(3, size=32)))
    model.fit(data, steps_per_epoch=STEPS, epochs=1, verbose=0)
    return {"weights": flat(model.trainable_variables)}


def train_classifier(strategy, make_all_reduce):
    """Weights and losses of a Classifier, with clipping and decay."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        images = x = keras.Input((8, 8, 3), dtype="uint8")
        x = PixelNormalization((128.0,) * 3, (64.0,) * 3)(x)
        x = keras.layers.Conv2D(5, 3, activation="relu")(x)
        model = Classifier(images, keras.layers.Dense(4)(keras.layers.Flatten()(x)))
        model.all_reduce = make_all_reduce and make_all_reduce()
        model.compile(SGD(0.02, momentum=0.9, weight_decay=0.01, global_clipnorm=0.5))
    data = worker_data(
        strategy,
        lambda r: (r.randint(256, size=(32, 8, 8, 3)).astype(np.uint8), r.randint(4, size=32)),
    )
    history = model.fit(data, steps_per_epoch=1, epochs=STEPS, verbose=0).history
    return {"weights": flat(model.trainable_variables), "loss": history["loss"]}


def flat(variables):
    return np.concatenate([variable.numpy().reshape(-1) for variable in variables])


def train_all(strategy, trains):
    """Returns the weights by model, optimizer and way to sum.

    Args:
      strategy: of the workers.
      trains: ways to sum besides the strategy's own, by what is trained.
    """
    ways = {
        "flat": {"algorithm": "flat", "fusion": SMALL},
        "hierarchical 2": {"algorithm": "hierarchical", "group_size": 2},
        "torus 2": {"algorithm": "torus_2d", "group_size": 2},
        "torus in bfloat16": {"algorithm": "torus_2d", "group_size": 2, "dtype": "bfloat16"},
        "builtin in segments": {"algorithm": "builtin", "fusion": SEGMENTS},
        "hierarchical in segments": {"algorithm": "hierarchical", "fusion": SEGMENTS},
        "torus in buckets": {"algorithm": "torus_2d", "fusion": SMALL},
    }
    ways = {
        way: functools.partial(AllReduce, timeout_seconds=TIMEOUT, **options)
        for way, options in ways.items()
    }
    sgd = {"learning_rate": 0.05, "momentum": 0.9}
    adam = {"learning_rate": 1e-3, "clipnorm": 0.5, "weight_decay": 0.01, "epsilon": 1e-3}
    optimizers = {"keras": (keras.optimizers.SGD, sgd), "adam": (keras.optimizers.Adam, adam)}
    results = {}
    for kind, names in trains.items():
        for way in ("strategy", *names):
            if kind == "classifier":
                found = train_classifier(strategy, ways.get(way))
            else:
                optimizer, options = optimizers[kind]
                if way == "none":
                    optimizer = NoSum
                elif way != "strategy":
                    optimizer = with_all_reduce(optimizer)
                    options = {**options, "all_reduce": ways[way]}
                found = train_keras(strategy, optimizer, options)
            results.update({f"{kind}: {way}: {key}": value for key, value in found.items()})
    return results


def sum_once(strategy, sums, flip=False):
    """Returns what each of ``sums`` makes of normal numbers; workers may take them in turn."""
    worker = strategy.cluster_resolver.task_id
    random = np.random.RandomState(worker)
    values = [np.asarray(random.standard_normal(size), np.float32) for size in SIZES]

    def own():
        tensors = [tf.constant(value) for value in values]
        turn = reversed(sums) if flip and worker % 2 else sums
        found = {name: sums[name](tensors, [tf.constant(0.1 + worker)]) for name in turn}
        return {name: found[name] for name in sums}

    run = tf.function(lambda: strategy.run(own), autograph=False)
    run()
    return {
        f"{name}: {i}": tensor.numpy()
        for name, made in run().items()
        for i, tensor in enumerate(made)
    }


def sum_all(strategy, groups, dtypes):
    """Returns sums by each algorithm and type, and of several in flight at the same time."""
    make = functools.partial(AllReduce, strategy, timeout_seconds=TIMEOUT)
    sums = {}
    for dtype in dtypes:
        sums[f"builtin {dtype}"] = make(algorithm="builtin", dtype=dtype)
        sums[f"flat {dtype}"] = make(algorithm="flat", dtype=dtype, name=f"flat {dtype}")
        for size in groups:
            for algorithm in ("hierarchical", "torus_2d"):
                name = f"{algorithm} {size} {dtype}"
                sums[name] = make(algorithm=algorithm, group_size=size, dtype=dtype, name=name)
    results = sum_once(strategy, sums)
    mixed = {
        f"mixed {algorithm} {i}": make(algorithm=algorithm, fusion=SMALL, name=f"{algorithm} {i}")
        for algorithm in ("flat", "hierarchical", "torus_2d")
        for i in range(3)
    }
    return {**results, **sum_once(strategy, mixed, flip=True)}


def gradients_awaited(strategy):
    """Returns, for each of a step's sums, the positions of the gradients it waits for, as JSON."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(3))])
    all_reduce = AllReduce(strategy, algorithm="flat", fusion=Fusion(segments=(2, 4)))

    def own():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones([2, 4])))
        gradients = tape.gradient(loss, model.trainable_variables)
        named = [tf.identity(own, name=f"awaited_{i}") for i, own in enumerate(gradients)]
        return all_reduce(named, variables=model.trainable_variables)

    graph = tf.function(lambda: strategy.run(own)).get_concrete_function().graph
    awaited = []
    for operation in graph.get_operations():
        if operation.type == "CollectiveReduceV2":
            before, found = [operation], {operation}
            while before:
                last = before.pop()
                new = {*(tensor.op for tensor in last.inputs), *last.control_inputs} - found
                found |= new
                before += new
            names = [op.name.rpartition("awaited_") for op in found]
            awaited.append(sorted(int(number) for _, mark, number in names if mark))
    return json.dumps(awaited)


def mistakes(strategy):
    """Returns the message of each mistake."""
    worker = strategy.cluster_resolver.task_id
    elsewhere = AllReduce(tf.distribute.OneDeviceStrategy("CPU:0"))
    segments = AllReduce(strategy, fusion=Fusion(segments=(len(SIZES),)))
    wrong = {
        "group": lambda: AllReduce(strategy, algorithm="torus_2d", group_size=3),
        "elsewhere": lambda: sum_once(strategy, {"elsewhere": elsewhere}),
        "segments": lambda: sum_once(strategy, {"segments": segments}),
        "algorithms": lambda: AllReduce(strategy, algorithm=("flat", "torus_2d")[worker == 1]),
        "groups": lambda: AllReduce(strategy, algorithm="torus_2d", group_size=(2, 1)[worker == 1]),
    }
    messages = {}
    for name, make in wrong.items():
        try:
            make()
        except UserError as error:
            messages[f"mistake: {name}"] = str(error)
    return messages


def main():
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    # Of all that is summed here, so that it goes through the stages in several pieces.
    all_reduce._PIECE_BYTES = 3000
    workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
    strategy = make_strategy(Config(strategy="multi_worker", batch_size=workers))
    results = {
        **sum_all(strategy, job["groups"], job["dtypes"]),
        "rows": AllReduce(strategy, algorithm="torus_2d", group_size=4).rows.members,
    }
    results.update(train_all(strategy, job.get("trains", {})))
    if job.get("mistakes"):
        results.update(
            **mistakes(strategy),
            auto=AllReduce(strategy).algorithm,
            awaited=gradients_awaited(strategy),
        )
    np.savez(f"{job['out']}{strategy.cluster_resolver.task_id}.npz", **results)
    wait_for_all(strategy)


if __name__ == "__main__":
    main()
