"""An all-reduce over the replicas of a strategy: its result, and its bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from imagenet_fast.distribute.all_reduce import AllReduce
from imagenet_fast.distribute.consistency import check_same_options
from imagenet_fast.distribute.devices import run_devices
from imagenet_fast.distribute.exchange import wait_for_all
from imagenet_fast.distribute.fusion import Fusion
from imagenet_fast.distribute.options import ClusterOptions
from imagenet_fast.distribute.strategy import devices_of, make_strategy
from imagenet_fast.distribute.workers import workers_of
from imagenet_fast.doctor.finding import Finding, ok, wrong

_REPEATS = 5
# Float32 numbers to sum: about a sixth of ResNet-50's gradient, on GPUs all of it, because small
# tensors do not fill their links.
_ON_CPUS, _ON_GPUS = 4 * 2**20, 25 * 2**20
# Replicas sum small whole numbers, exact in all dtypes; so are the sums of a few thousand replicas
# in float32.
_VALUES = 7
_FACTORS = 4
# Error of sums in a 16-bit type, relative to the largest value.
_HALF_TOLERANCE = 2e-2
# Workers exit this long after their last collective, for whose end others may still wait.
_LINGER_SECONDS = 1.0


def check_devices(options: ClusterOptions) -> list[Finding]:
    """All-reduces over the devices of this machine."""
    if options.strategy == "multi_worker":
        options = options.replace(strategy="auto")
    return _check("all-reduce", options)


def check_cluster(options: ClusterOptions) -> list[Finding]:
    """All-reduces over all workers of a cluster, which must all call this.

    Raises:
      UserError: if they were started with different options, as with another ``model_dir``.
    """
    return _check("cluster", options)


def _check(name: str, options: ClusterOptions) -> list[Finding]:
    """All-reduces a known tensor over all replicas, as training does with gradients."""
    strategy = make_strategy(options)
    check_same_options(options, strategy)
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return [ok(name, "one device: nothing to sum")]
    all_reduce = AllReduce(
        strategy,
        algorithm=options.all_reduce,
        group_size=options.all_reduce_group,
        fusion=Fusion(options.fusion_bytes),
        dtype=options.all_reduce_dtype,
        name="doctor",
    )
    devices = run_devices(strategy, devices_of(strategy))
    size = _ON_CPUS if devices.kind == "CPU" else _ON_GPUS
    error, times = _measure(strategy, all_reduce, size)
    if workers_of(strategy) is not None:
        wait_for_all(strategy)
        time.sleep(_LINGER_SECONDS)
    seconds = statistics.median(times)
    # nccl-tests' bus bandwidth: of the bytes that each replica must send.
    bandwidth = 2 * (replicas - 1) / replicas * 4 * size / seconds / 1e9
    found = (
        f"{devices}; {all_reduce.algorithm}, {options.all_reduce_dtype}: {4 * size / 1e6:.0f} MB "
        f"in {1e3 * seconds:.1f} ms, {bandwidth:.2f} GB/s"
    )
    numbers = {
        "replicas": replicas,
        "devices": str(devices),
        "algorithm": all_reduce.algorithm,
        "bytes": 4 * size,
        "seconds": seconds,
        "gigabytes_per_second": bandwidth,
        "error": error,
    }
    if error > (0 if options.all_reduce_dtype == "float32" else _HALF_TOLERANCE):
        return [
            wrong(
                name,
                f"{found}; but the sum is wrong by {error:.1%}",
                "try another --all_reduce, and NCCL_DEBUG=INFO on GPUs, before training",
                **numbers,
            )
        ]
    return [ok(name, found, **numbers)]


def _measure(
    strategy: tf.distribute.Strategy, all_reduce: AllReduce, size: int
) -> tuple[float, list[float]]:
    """Returns the sum's largest error, relative to its largest number, and the times in seconds.

    Args:
      strategy: of the replicas.
      all_reduce: the all-reduce.
      size: float32 numbers to sum.
    """
    replicas = strategy.num_replicas_in_sync
    total = float(sum(1 + replica % _FACTORS for replica in range(replicas)))
    with strategy.scope():
        # Made on the replica's device, so that no sum copies it there.
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

    def reduced() -> tf.Tensor:
        (result,) = all_reduce([variable.read_value()])
        return result

    def error() -> tf.Tensor:
        return tf.reduce_max(tf.abs(reduced() - total * pattern()))

    def first_number() -> tf.Tensor:
        return reduced()[0]

    def run(function: Callable[[], Any]) -> Callable[[], list[Any]]:
        program = tf.function(lambda: strategy.run(function), autograph=False)
        return lambda: [value.numpy() for value in strategy.experimental_local_results(program())]

    tf.function(lambda: strategy.run(fill), autograph=False)()
    largest_error = float(max(run(error)()))
    reduce = run(first_number)
    times = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        reduce()
        times.append(time.perf_counter() - start)
    return largest_error / (total * (_VALUES - 1)), times[1:]
