"""An all-reduce over the replicas of a strategy: its result, and its bandwidth."""

from __future__ import annotations

import statistics
import time

import tensorflow as tf

from imagenet_fast.config import Config
from imagenet_fast.distribute.all_reduce import AllReduce
from imagenet_fast.distribute.consistency import check_same_options
from imagenet_fast.distribute.devices import run_devices
from imagenet_fast.distribute.exchange import wait_for_all
from imagenet_fast.distribute.fusion import Fusion
from imagenet_fast.distribute.strategy import devices_of, make_strategy
from imagenet_fast.distribute.workers import workers_of
from imagenet_fast.doctor.finding import Finding, ok, wrong

_REPEATS = 5
# About a sixth of ResNet-50's gradient, and all of it for GPUs, whose links small tensors do not
# fill.
_ON_CPUS, _ON_GPUS = 4 * 2**20, 25 * 2**20
# Whole numbers that all types represent, and the sums of a few thousand replicas in float32.
_VALUES = 7
_FACTORS = 4
# Sums of several replicas in a 16-bit type, relative to the largest value.
_HALF_TOLERANCE = 2e-2
# Workers leave so long after their last collective, whose tail others may still wait for.
_LINGER_SECONDS = 1.0


def check_devices(config: Config) -> list[Finding]:
    """Sums over the devices of this machine."""
    if config.strategy == "multi_worker":
        config = config.replace(strategy="auto")
    return _check("all-reduce", config)


def check_cluster(config: Config) -> list[Finding]:
    """Sums over all workers of a cluster, which must all come here.

    Raises:
      UserError: if they were started with different options, as with another ``model_dir``.
    """
    return _check("cluster", config)


def _check(name: str, config: Config) -> list[Finding]:
    """Sums a known tensor over all replicas, as training sums gradients."""
    strategy = make_strategy(config)
    check_same_options(config, strategy)
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return [ok(name, "one device: nothing to sum")]
    all_reduce = AllReduce(
        strategy,
        algorithm=config.all_reduce,
        group_size=config.all_reduce_group,
        fusion=Fusion(config.fusion_bytes),
        dtype=config.all_reduce_dtype,
        name="doctor",
    )
    place = run_devices(strategy, devices_of(strategy))
    size = _ON_CPUS if place.kind == "CPU" else _ON_GPUS
    error, taken = _measure(strategy, all_reduce, size)
    if workers_of(strategy) is not None:
        wait_for_all(strategy)
        time.sleep(_LINGER_SECONDS)
    seconds = statistics.median(taken)
    # What nccl-tests calls bus bandwidth: the bytes that each replica must send.
    rate = 2 * (replicas - 1) / replicas * 4 * size / seconds / 1e9
    told = (
        f"{place}; {all_reduce.algorithm}, {config.all_reduce_dtype}: {4 * size / 1e6:.0f} MB in "
        f"{1e3 * seconds:.1f} ms, {rate:.2f} GB/s"
    )
    numbers = {
        "replicas": replicas,
        "devices": str(place),
        "algorithm": all_reduce.algorithm,
        "bytes": 4 * size,
        "seconds": seconds,
        "gigabytes_per_second": rate,
        "error": error,
    }
    if error > (0 if config.all_reduce_dtype == "float32" else _HALF_TOLERANCE):
        return [
            wrong(
                name,
                f"{told}; but the sum differs from the right one by {error:.1%}",
                "try another --all_reduce, and NCCL_DEBUG=INFO on GPUs, before training",
                **numbers,
            )
        ]
    return [ok(name, told, **numbers)]


def _measure(
    strategy: tf.distribute.Strategy, all_reduce: AllReduce, size: int
) -> tuple[float, list[float]]:
    """Returns the sum's greatest error, relative to its greatest number, and seconds of each sum.

    Args:
      strategy: of the replicas.
      all_reduce: what sums.
      size: float32 numbers to sum.
    """
    replicas = strategy.num_replicas_in_sync
    total = float(sum(1 + replica % _FACTORS for replica in range(replicas)))
    with strategy.scope():
        # Made on the replica's device, and not copied there for each sum.
        variable = tf.Variable(
            tf.zeros([size]),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def pattern() -> tf.Tensor:
        return tf.cast(tf.range(size) % _VALUES, tf.float32)

    def fill() -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        variable.assign(pattern() * tf.cast(1 + replica % _FACTORS, tf.float32))

    def summed() -> tf.Tensor:
        (found,) = all_reduce([variable.read_value()])
        return found

    def error() -> tf.Tensor:
        return tf.reduce_max(tf.abs(summed() - total * pattern()))

    def one() -> tf.Tensor:
        return summed()[0]

    tf.function(lambda: strategy.run(fill), autograph=False)()
    found = tf.function(lambda: strategy.run(error), autograph=False)()
    errors = [own.numpy() for own in strategy.experimental_local_results(found)]
    run = tf.function(lambda: strategy.run(one), autograph=False)
    taken = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        for own in strategy.experimental_local_results(run()):
            own.numpy()
        taken.append(time.perf_counter() - start)
    return float(max(errors)) / (total * (_VALUES - 1)), taken[1:]
