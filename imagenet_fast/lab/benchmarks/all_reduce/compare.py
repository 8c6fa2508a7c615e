"""A benchmark of all-reduce algorithms: measured time, predicted time and bytes on the wire.

All workers of a cluster run it at the same time. The algorithms are interleaved, and an untimed
all-reduce precedes each timed one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from imagenet_fast import models
from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.all_reduce import AllReduce, default_group_size
from imagenet_fast.distribute.exchange import wait_for_all
from imagenet_fast.distribute.fusion import Fusion
from imagenet_fast.distribute.workers import is_chief
from imagenet_fast.lab.benchmarks.timing import Times, interleave, timed
from imagenet_fast.lab.planning.cost_model.all_reduce import Network, seconds, wire_fraction

_INPUT_SIZES = {"resnet50": 224, "alexnet_bn": 227}
_COUNTERS = pathlib.Path("/sys/class/net")


@dataclasses.dataclass(frozen=True)
class Case:
    """Float32 tensors to all-reduce, and their name in tables."""

    name: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return 4 * sum(math.prod(shape) for shape in self.shapes)


@dataclasses.dataclass(frozen=True)
class Method:
    """How to all-reduce.

    Attributes:
      algorithm: as AllReduce names it.
      fusion_bytes: of a pack of gradients; 0: one pack.
      dtype: of the gradients on the wire.
    """

    algorithm: str
    fusion_bytes: int
    dtype: str = "float32"

    def __str__(self) -> str:
        """For tables."""
        packed = "one pack" if not self.fusion_bytes else f"{self.fusion_bytes / 2**20:g} MiB packs"
        half = "" if self.dtype == "float32" else f", {self.dtype}"
        return f"{self.algorithm}, {packed}{half}"


@dataclasses.dataclass(frozen=True)
class Result:
    """The measurements of one method for one case.

    Attributes:
      case: the tensors.
      method: with the algorithm that was used, never ``auto``.
      times: of each all-reduce.
      sent_bytes: by each worker in one all-reduce, including half of a barrier's, by the counters
        of its network interfaces; None: there are no counters.
      predicted_seconds: by the cost model; None: the network was not described, or the model does
        not cover the algorithm.
    """

    case: Case
    method: Method
    times: Times
    sent_bytes: float | None
    predicted_seconds: float | None


def sized_case(size: int) -> Case:
    """Returns one tensor of ``size`` bytes, rounded down to a multiple of four."""
    name = f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"
    return Case(name, ((max(1, size // 4),),))


def gradients_case(model: str) -> Case:
    """Returns tensors with the shapes of a model's gradients, in the order of its variables.

    Raises:
      UserError: if there is no such model.
    """
    size = _INPUT_SIZES.get(model, 224)
    network = models.build(model, 1000, (size, size, 3))
    shapes = tuple(tuple(v.shape.as_list()) for v in network.trainable_variables)
    return Case(f"gradients of {model}", shapes)


def compare_all_reduce(
    strategy: tf.distribute.Strategy,
    cases: Sequence[Case],
    methods: Sequence[Method],
    *,
    group_size: int = 0,
    network: Network | None = None,
    warmup: int,
    repeats: int,
    timeout_seconds: float = 0,
) -> list[Result]:
    """Times interleaved all-reduces of each case by all methods.

    Algorithms that have groups have groups of ``group_size``; 0: the default. The cost model
    predicts times in a ``network``; None: it predicts nothing. An all-reduce fails after
    ``timeout_seconds``; 0: never.

    Raises:
      UserError: if there are no workers, or a method does not fit their number.
    """
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise UserError(
            "there is only one worker: start several, for example with "
            "tools/launch_local.py --workers=4 -- benchmark all_reduce"
        )
    results = []
    replicas = strategy.num_replicas_in_sync
    group = group_size or default_group_size(strategy)
    for number, case in enumerate(cases):
        tensors = [tf.random.stateless_normal(s, (0, i)) for i, s in enumerate(case.shapes)]
        all_reduces = [
            _all_reduce(strategy, method, group, f"case{number}_method{i}", timeout_seconds)
            for i, method in enumerate(methods)
        ]
        calls = [_blocking_call(strategy, all_reduce, tensors) for all_reduce in all_reduces]
        wait_for_all(strategy)
        measurements = interleave(
            [functools.partial(_measure, strategy, call) for call in calls],
            warmup=warmup,
            repeats=repeats,
            name=case.name,
            unit=" all-reduces",
            silent=not is_chief(strategy),
        )
        for requested, all_reduce, measured in zip(methods, all_reduces, measurements):
            method = dataclasses.replace(requested, algorithm=all_reduce.algorithm)
            wall, cpu, sent = zip(*measured)
            results.append(
                Result(
                    case,
                    method,
                    Times(wall, cpu),
                    None if None in sent else sum(sent) / repeats,
                    _predicted(method, case, replicas, group, network),
                )
            )
    return results


def _measure(
    strategy: tf.distribute.Strategy, call: Callable[[], None]
) -> tuple[float, float, float | None]:
    """All-reduces twice and times the second one.

    Returns:
      The seconds of an all-reduce, its CPU seconds, and the bytes that this worker sent in one.
    """
    before = _sent()
    # Workers leave the barrier at different times. After an untimed all-reduce they are as far
    # apart as consecutive all-reduces leave them, as in training.
    call()
    seconds, cpu_seconds = timed(call)()
    # Data leaves a worker when another one requests it, which may be after its own all-reduce has
    # ended: only after a barrier has it sent everything.
    wait_for_all(strategy)
    after = _sent()
    sent = None if before is None or after is None else (after - before) / 2
    return seconds, cpu_seconds, sent


def _all_reduce(
    strategy: tf.distribute.Strategy, method: Method, group: int, name: str, timeout_seconds: float
) -> AllReduce:
    has_groups = method.algorithm in ("hierarchical", "torus_2d")
    return AllReduce(
        strategy,
        algorithm=method.algorithm,
        group_size=group if has_groups else 0,
        fusion=Fusion(method.fusion_bytes),
        dtype=method.dtype,
        timeout_seconds=timeout_seconds,
        name=name,
    )


def _blocking_call(
    strategy: tf.distribute.Strategy, all_reduce: AllReduce, tensors: Sequence[tf.Tensor]
) -> Callable[[], None]:
    """Returns a function that all-reduces the tensors and waits for this worker's result."""

    def in_replica() -> tf.Tensor:
        sums = all_reduce(tensors)
        # One element of each: enough to wait for all, and none is pruned.
        return tf.add_n([tf.reshape(tensor, [-1])[0] for tensor in sums])

    run = tf.function(lambda: strategy.run(in_replica), autograph=False)

    def call() -> None:
        for value in strategy.experimental_local_results(run()):
            value.numpy()

    return call


def _sent() -> int | None:
    """Returns the bytes that this worker's network interfaces have sent; None: unknown.

    Workers on one machine share its interfaces, unless each has its own network namespace.
    """
    counters = list(_COUNTERS.glob("*/statistics/tx_bytes"))
    if not counters:
        return None
    return sum(int(counter.read_text()) for counter in counters)


def _predicted(
    method: Method, case: Case, replicas: int, group: int, network: Network | None
) -> float | None:
    if network is None or method.algorithm == "builtin":
        return None
    half = method.dtype != "float32"
    size = case.bytes / 2 if half else case.bytes
    return seconds(method.algorithm, replicas, size, network, group, exchange=half)


def expected_bytes(result: Result, replicas: int, group: int) -> float | None:
    """Returns the bytes that the busiest worker sends by the method's algorithm."""
    if result.method.algorithm == "builtin":
        return None
    size = result.case.bytes / (1 if result.method.dtype == "float32" else 2)
    return wire_fraction(result.method.algorithm, replicas, group) * size
