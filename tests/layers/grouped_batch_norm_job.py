"""What GroupedBatchNormalization computes on the strategy that the arguments name.

Arguments: ``strategy``, ``logical_cpus``, and a folder, in which each process writes the results
of its replicas: ``REPLICA.npz``.
"""

import itertools
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast import Config, make_strategy
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.one_call import local_values
from imagenet_fast.layers import GroupedBatchNormalization

GROUP_SIZES = (1, 2, 4)
DTYPES = ("float32", "bfloat16", "float16")
# Of workers all group sizes with all dtypes, of devices these.
ALL = tuple(itertools.product(GROUP_SIZES, DTYPES))
FEW = (*((size, "float32") for size in GROUP_SIZES), (2, "bfloat16"), (4, "float16"))
# Images of a replica in each step: another number makes TensorFlow trace the layer again.
BATCHES = (6, 4)
CHANNELS = 5
MOMENTUM = 0.8
EPSILON = 1e-3


def problem(replicas, batch, dtype="float32"):
    """Returns images and the gradients of their outputs, [replicas, batch, 3, 2, CHANNELS]."""
    generator = np.random.default_rng(batch)
    shape = (replicas, batch, 3, 2, CHANNELS)
    # Each replica's and each channel's images differ, so that wrong groups show.
    offset = generator.normal(size=(replicas, 1, 1, 1, CHANNELS))
    scale = generator.uniform(0.5, 2, size=(replicas, 1, 1, 1, CHANNELS))
    images = offset + scale * generator.normal(size=shape)
    return [
        tf.cast(tf.constant(values, tf.float32), dtype)
        for values in (images, generator.normal(size=shape))
    ]


def parameters():
    """Returns gamma and beta."""
    return np.linspace(0.5, 1.5, CHANNELS), np.linspace(-1, 1, CHANNELS)


def norm(group_size, dtype="float32", **options):
    gamma, beta = parameters()
    return GroupedBatchNormalization(
        group_size=group_size,
        momentum=MOMENTUM,
        epsilon=EPSILON,
        gamma_initializer=keras.initializers.Constant(gamma),
        beta_initializer=keras.initializers.Constant(beta),
        dtype="float32" if dtype == "float32" else f"mixed_{dtype}",
        **options,
    )


def own_part(values):
    context = tf.distribute.get_replica_context()
    return values[context.replica_id_in_sync_group]


def gradients_of(function, images, upstream, variables):
    """Returns the outputs, and the gradients of images and variables."""
    with tf.GradientTape() as tape:
        tape.watch(images)
        outputs = function(images)
        loss = tf.reduce_sum(tf.cast(outputs * upstream, tf.float32))
    return outputs, tape.gradient(loss, [images, *variables])


def one_layer(strategy, group_size, dtype):
    """Returns each local replica's results of two steps, by name."""
    with strategy.scope():
        layer = norm(group_size, dtype)
        layer.build([None, 3, 2, CHANNELS])

    def own_step(images, upstream):
        outputs, (d_images, d_gamma, d_beta) = gradients_of(
            lambda x: layer(x, training=True),
            own_part(images),
            own_part(upstream),
            [layer.gamma, layer.beta],
        )
        return {
            "outputs": tf.cast(outputs, tf.float32),
            "d_images": tf.cast(d_images, tf.float32),
            "d_gamma": d_gamma,
            "d_beta": d_beta,
            # Not converted to tensors: that would read all replicas' values.
            "moving_mean": local_values([layer.moving_mean])[0],
            "moving_variance": local_values([layer.moving_variance])[0],
        }

    @tf.function
    def step(images, upstream):
        return strategy.run(own_step, args=(images, upstream))

    results = {}
    for number, batch in enumerate(BATCHES):
        found = step(*problem(strategy.num_replicas_in_sync, batch, dtype))
        for name, values in found.items():
            results[f"step{number}_{name}"] = strategy.experimental_local_results(values)
    return results


def shared(first, second, images):
    """One layer used twice, and another one of the same name."""
    return second(tf.tanh(first(images, training=True)), training=True) + first(
        tf.square(images), training=True
    )


def same_name(strategy, group_size):
    """Returns each local replica's results of ``shared``."""
    with strategy.scope():
        layers = [norm(group_size, name="norm") for _ in range(2)]
        for layer in layers:
            layer.build([None, 3, 2, CHANNELS])

    def own_step(images, upstream):
        outputs, (d_images,) = gradients_of(
            lambda x: shared(*layers, x), own_part(images), own_part(upstream), []
        )
        return {"outputs": outputs, "d_images": d_images}

    @tf.function
    def step(images, upstream):
        return strategy.run(own_step, args=(images, upstream))

    found = step(*problem(strategy.num_replicas_in_sync, BATCHES[0]))
    return {name: strategy.experimental_local_results(values) for name, values in found.items()}


def far_from_zero(strategy, group_size):
    """Returns each local replica's moving variance after images whose mean is 1,000 deviations."""
    with strategy.scope():
        layer = norm(group_size, moving_mean_initializer=keras.initializers.Constant(1000.5))
        layer.build([None, 3, 2, CHANNELS])

    def own_step(images):
        layer(own_part(images), training=True)
        return {"moving_variance": local_values([layer.moving_variance])[0]}

    @tf.function
    def step(images):
        return strategy.run(own_step, args=(images,))

    found = step(1000 + problem(strategy.num_replicas_in_sync, BATCHES[0])[0])
    return {name: strategy.experimental_local_results(values) for name, values in found.items()}


def main():
    kind, logical_cpus, folder = sys.argv[1:]
    replicas = int(logical_cpus) or len(Cluster.from_environment().workers)
    strategy = make_strategy(
        Config(strategy=kind, logical_cpus=int(logical_cpus), batch_size=replicas)
    )
    results = {}
    for group_size, dtype in ALL if kind == "multi_worker" else FEW:
        found = one_layer(strategy, group_size, dtype)
        results.update({f"{group_size}_{dtype}_{k}": v for k, v in found.items()})
    found = same_name(strategy, 2)
    results.update({f"shared_{k}": v for k, v in found.items()})
    found = far_from_zero(strategy, 2)
    results.update({f"far_{k}": v for k, v in found.items()})
    cluster = Cluster.from_environment()
    first = cluster.index if cluster else 0
    for i in range(replicas if cluster is None else 1):
        own = {name: values[i].numpy() for name, values in results.items()}
        np.savez(pathlib.Path(folder) / f"{first + i}.npz", **own)


if __name__ == "__main__":
    main()
