"""Sums over all workers, by each algorithm: their time, bytes on the wire, and what the model says.

To be run by all workers of a cluster at once. Algorithms take turns, sum by sum, so that a change
of the machine's or the network's speed hits all alike. Before each sum that is timed there is one
that is not.
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
from imagenet_fast.benchmarks.timing import Times, in_turns, timed
from imagenet_fast.cost_model.all_reduce import Network, seconds, wire_share
from imagenet_fast.distribute.all_reduce import AllReduce, default_group_size
from imagenet_fast.distribute.exchange import wait_for_all
from imagenet_fast.distribute.fusion import Fusion
from imagenet_fast.distribute.workers import is_chief

_INPUT_SIZES = {"resnet50": 224, "alexnet_bn": 227}
_COUNTERS = pathlib.Path("/sys/class/net")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is summed.

    Attributes:
      name: for tables.
      shapes: of the float32 tensors.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return 4 * sum(math.prod(shape) for shape in self.shapes)


@dataclasses.dataclass(frozen=True)
class Way:
    """How it is summed.

    Attributes:
      algorithm: as AllReduce names it.
      fusion_bytes: of a bucket; 0: one bucket.
      dtype: in which gradients travel.
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
    """One way of summing one case.

    Attributes:
      case: what.
      way: how; its algorithm is the one that was used, not ``auto``.
      times: of each sum.
      sent_bytes: that each worker sent in a sum, by the counters of its network interfaces, with
        half of what a meeting of the workers sends; None: there are none.
      predicted_seconds: by the cost model; None: the network was not described, or the model does
        not have the algorithm.
    """

    case: Case
    way: Way
    times: Times
    sent_bytes: float | None
    predicted_seconds: float | None


def sized_case(size: int) -> Case:
    """Returns one tensor of ``size`` bytes, in whole numbers of four."""
    name = f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"
    return Case(name, ((max(1, size // 4),),))


def gradients_case(model: str) -> Case:
    """Returns tensors like the gradients of a model, in the order of its variables.

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
    ways: Sequence[Way],
    *,
    group_size: int = 0,
    network: Network | None = None,
    warmup: int,
    repeats: int,
    timeout_seconds: float = 0,
) -> list[Result]:
    """Times all ways of each case, in turns.

    Args:
      strategy: of several workers.
      cases: what to sum.
      ways: how.
      group_size: replicas in a group of the algorithms that have groups; 0: chosen.
      network: for the cost model; None: predict nothing.
      warmup: untimed turns at first.
      repeats: timed sums by each.
      timeout_seconds: after which a sum gives up; 0: never.

    Raises:
      UserError: if there are no workers, or a way does not fit them.
    """
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise UserError(
            "there is nothing to sum over: start several workers, for example with "
            "tools/launch_local.py --workers=4 -- benchmark all_reduce"
        )
    results = []
    replicas = strategy.num_replicas_in_sync
    group = group_size or default_group_size(strategy)
    for number, case in enumerate(cases):
        tensors = [tf.random.stateless_normal(s, (0, i)) for i, s in enumerate(case.shapes)]
        sums = [
            _all_reduce(strategy, way, group, f"case{number}_way{i}", timeout_seconds)
            for i, way in enumerate(ways)
        ]
        calls = [_summing(strategy, own, tensors) for own in sums]
        wait_for_all(strategy)
        taken = in_turns(
            [functools.partial(_measure, strategy, call) for call in calls],
            warmup=warmup,
            repeats=repeats,
            name=case.name,
            unit=" sums",
            silent=not is_chief(strategy),
        )
        for asked, own, measured in zip(ways, sums, taken):
            way = dataclasses.replace(asked, algorithm=own.algorithm)
            wall, cpu, sent = zip(*measured)
            results.append(
                Result(
                    case,
                    way,
                    Times(wall, cpu),
                    None if None in sent else sum(sent) / repeats,
                    _predicted(way, case, replicas, group, network),
                )
            )
    return results


def _measure(
    strategy: tf.distribute.Strategy, call: Callable[[], None]
) -> tuple[float, float, float | None]:
    """Sums twice, the second time on the clock.

    Returns:
      The seconds of a sum, its CPU seconds, and the bytes that this worker sends in one.
    """
    before = _sent()
    # Workers come out of the meeting at different times; after one sum they are as far apart as
    # sums of this kind leave them, as in training.
    call()
    seconds, cpu_seconds = timed(call)()
    # What a worker sends leaves it when another asks for it, which may be after its own sum: only
    # when all have met has it sent both sums.
    wait_for_all(strategy)
    after = _sent()
    sent = None if before is None or after is None else (after - before) / 2
    return seconds, cpu_seconds, sent


def _all_reduce(
    strategy: tf.distribute.Strategy, way: Way, group: int, name: str, timeout_seconds: float
) -> AllReduce:
    """Returns what sums in a way."""
    staged = way.algorithm in ("hierarchical", "torus_2d")
    return AllReduce(
        strategy,
        algorithm=way.algorithm,
        group_size=group if staged else 0,
        fusion=Fusion(way.fusion_bytes),
        dtype=way.dtype,
        timeout_seconds=timeout_seconds,
        name=name,
    )


def _summing(
    strategy: tf.distribute.Strategy, all_reduce: AllReduce, tensors: Sequence[tf.Tensor]
) -> Callable[[], None]:
    """Returns what sums the tensors once and returns when this worker has the sums."""

    def own() -> tf.Tensor:
        sums = all_reduce(tensors)
        # Of each sum, so that none is left out; a number of each is enough to wait for.
        return tf.add_n([tf.reshape(tensor, [-1])[0] for tensor in sums])

    run = tf.function(lambda: strategy.run(own), autograph=False)

    def call() -> None:
        for value in strategy.experimental_local_results(run()):
            value.numpy()

    return call


def _sent() -> int | None:
    """Returns the bytes that all network interfaces of this worker have sent; None: unknown.

    Workers of one machine share its interfaces, unless each has a network namespace of its own.
    """
    counters = list(_COUNTERS.glob("*/statistics/tx_bytes"))
    if not counters:
        return None
    return sum(int(counter.read_text()) for counter in counters)


def _predicted(
    way: Way, case: Case, replicas: int, group: int, network: Network | None
) -> float | None:
    if network is None or way.algorithm == "builtin":
        return None
    half = way.dtype != "float32"
    size = case.bytes / 2 if half else case.bytes
    return seconds(way.algorithm, replicas, size, network, group, exchange=half)


def expected_bytes(result: Result, replicas: int, group: int) -> float | None:
    """Returns the bytes that the busiest worker must send by the result's algorithm."""
    if result.way.algorithm == "builtin":
        return None
    size = result.case.bytes / (1 if result.way.dtype == "float32" else 2)
    return wire_share(result.way.algorithm, replicas, group) * size
