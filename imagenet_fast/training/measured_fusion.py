"""Where to cut a model's gradients, by times measured on the cluster that is to train it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from imagenet_fast.base.durations import milliseconds
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import write_file
from imagenet_fast.base.paths import to_path
from imagenet_fast.cost_model.fusion import SumCost, few_segments, fitted_cost, transfers
from imagenet_fast.distribute.exchange import numbers_of_all, text_of_chief
from imagenet_fast.distribute.fusion import Fusion, creation_order
from imagenet_fast.distribute.tpu import compiles_all_reduces
from imagenet_fast.distribute.workers import workers_of
from imagenet_fast.training.classifier import Classifier

FILE = "fusion.json"
# What is summed: a part of as many bytes as gradients have, in so many sums at the same time.
_SUMS = ((1, 1), (1, 4), (1, 16), (1 / 16, 1), (1 / 16, 8), (1 / 256, 1))
# It is joined from so many tensors, as gradients are.
_PARTS = 16
_WARMUP, _REPEATS = 1, 5
# Of a forward and backward pass: fewer segments are taken if they take no longer than this.
_WASTE = 0.002

Make = Callable[..., Callable[..., list[tf.Tensor]]]


class FusionTimes(NamedTuple):
    """What was measured, the same in all workers.

    Attributes:
      known: seconds at which each gradient is known, from the first one on, in the order in which
        the model's variables were made, by the process that is last.
      sizes: bytes of the gradients.
      passes: seconds of a step's forward and backward passes.
      cost: of the sums.
    """

    known: tuple[float, ...]
    sizes: tuple[int, ...]
    passes: float
    cost: SumCost

    def best(self) -> tuple[int, ...]:
        """Returns the fewest cuts with which gradients are summed about as early as can be."""
        waste = _WASTE * self.passes
        return few_segments(self.known, self.sizes, self._seconds, waste, self.cost.aside)

    def waited(self, cuts: tuple[int, ...]) -> float:
        """Returns the seconds from the backward pass's end to that of the last sum."""
        sums = transfers(self.known, self.sizes, self._seconds, cuts, self.cost.aside)
        return sums[-1].end - max(self.known)

    def told(self, cuts: tuple[int, ...], others: tuple[int, ...]) -> str:
        """Returns what was found, for people.

        Args:
          cuts: that were found.
          others: those by ``fusion_bytes``.
        """
        after = f", after {', '.join(map(str, cuts))} of {len(self.sizes)}" if cuts else ""
        waits = [milliseconds(self.waited(own)) for own in (cuts, others)]
        sums = [f"{len(own) + 1} sum{'s' * bool(own)}" for own in (cuts, others)]
        start, sent, aside = self.cost.start, 1e6 * self.cost.per_byte, 1e6 * self.cost.aside
        return (
            f"gradients in {sums[0]}{after}: {waits[0]} to wait for after a backward pass; by "
            f"fusion_bytes, in {sums[1]}, {waits[1]}. A sum takes {milliseconds(start)} and "
            f"{milliseconds(sent)} a MB, and {milliseconds(aside)} while others are summed"
        )

    def _seconds(self, size: float) -> float:
        return self.cost.start + self.cost.per_byte * size


def measure(model: Classifier, make: Make, shape: tuple[int, int, int, int]) -> FusionTimes:
    """Measures a model's gradients and its replicas' sums; all workers must come here.

    Args:
      model: compiled, under a strategy of several replicas.
      make: makes the sum, from its ``fusion`` and ``name``.
      shape: of a replica's share of a step: images, height, width and channels.

    Raises:
      UserError: on TPUs, whose programs have no clock.
    """
    strategy = model.distribute_strategy
    if compiles_all_reduces(strategy):
        raise UserError(
            "fusion=auto measures when gradients are known, for which the programs of a TPU have "
            "no clock: imagenet-fast plan --accelerator tells fusion_segments"
        )
    known, passes = _gradient_seconds(model, shape)
    variables = model.trainable_variables
    sizes = tuple(
        variables[i].shape.num_elements() * variables[i].dtype.size
        for i in creation_order(variables)
    )
    of_sums = [(4 * _PARTS * max(1, int(part * sum(sizes) / 4 / _PARTS)), n) for part, n in _SUMS]
    seconds = [
        _sum_seconds(strategy, make, size, count, f"measured_fusion_{i}")
        for i, (size, count) in enumerate(of_sums)
    ]
    rows = np.array([[*known, passes, *seconds]])
    if workers_of(strategy) is not None:
        rows = numbers_of_all(strategy, rows[0])
    last = rows.max(axis=0).tolist()
    return FusionTimes(
        tuple(last[: len(known)]),
        sizes,
        last[len(known)],
        fitted_cost(
            [size for size, _ in of_sums],
            [count for _, count in of_sums],
            last[len(known) + 1 :],
        ),
    )


def _gradient_seconds(
    model: Classifier, shape: tuple[int, int, int, int]
) -> tuple[list[float], float]:
    """Returns when each gradient is known in this process, and the seconds of a step's passes."""
    strategy = model.distribute_strategy
    order = creation_order(model.trainable_variables)

    def own() -> tf.Tensor:
        pixels = tf.random.stateless_uniform(shape, (0, 0), 0, 256, tf.int32)
        images = tf.cast(pixels, model.inputs[0].dtype)
        gradients, _ = model.gradients((images, tf.zeros(shape[:1], tf.int32)))
        # TensorFlow tells the times one after another, in the order in which they are asked for.
        stamps = [_time_known(gradients[i]) for i in reversed(order)]
        return tf.stack(stamps[::-1])

    run = tf.function(lambda: strategy.run(own), autograph=False)
    found, passes = [], []
    with model.state_kept():
        for _ in range(_WARMUP + _REPEATS):
            begin = time.perf_counter()
            # Of the first replica: TensorFlow has the others read their clocks after it.
            stamps = strategy.experimental_local_results(run())[0].numpy()
            passes.append(time.perf_counter() - begin)
            found.append(stamps - stamps.min())
    known = np.median(found[_WARMUP:], axis=0)
    return known.tolist(), statistics.median(passes[_WARMUP:])


def _time_known(gradient: tf.Tensor) -> tf.Tensor:
    """Returns the time at which a device has computed a gradient, float64 seconds."""
    is_negative = tf.reshape(gradient, [-1])[0] < 0
    with tf.device("CPU:0"):
        # A branch waits for the value on which it depends; that a clock be read after a tensor is
        # computed, TensorFlow forgets.
        return tf.cond(is_negative, tf.timestamp, tf.timestamp)


def _sum_seconds(
    strategy: tf.distribute.Strategy, make: Make, size: int, count: int, name: str
) -> float:
    """Returns the seconds that so many bytes take in so many sums."""
    each = _PARTS // count
    all_reduce = make(fusion=Fusion(bytes=0, segments=tuple(range(each, _PARTS, each))), name=name)

    def own() -> tf.Tensor:
        sums = all_reduce([tf.ones([size // 4 // _PARTS]) for _ in range(_PARTS)])
        # Of each, so that none is left out.
        return tf.add_n([total[0] for total in sums])

    run = tf.function(lambda: strategy.run(own), autograph=False)
    taken = []
    for _ in range(_WARMUP + _REPEATS):
        begin = time.perf_counter()
        for value in strategy.experimental_local_results(run()):
            value.numpy()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[_WARMUP:])


def same_for_all(strategy: tf.distribute.Strategy, cuts: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the first worker's cuts, which rounding might make others than this one's.

    Args:
      strategy: of the workers, all of which must come here.
      cuts: this worker's.
    """
    return tuple(json.loads(text_of_chief(strategy, json.dumps(cuts))))


def keep(fusion: Fusion, replicas: int, directory: str) -> None:
    """Writes what was found, for the run to go on with.

    Args:
      fusion: that was found.
      replicas: for which.
      directory: of the run.
    """
    found = {"replicas": replicas, "fusion_segments": fusion.segments}
    write_file(to_path(directory, FILE), json.dumps(found, indent=2) + "\n")


def kept(strategy: tf.distribute.Strategy, directory: str) -> Fusion | None:
    """Returns what was found when the run began; None: nothing, or for other replicas.

    Other segments are added up in another order, and a run would not go on to the same weights.
    All workers must come here, of which the chief's file counts.

    Args:
      strategy: of the run.
      directory: of the run.
    """
    file = to_path(directory, FILE)
    text = text_of_chief(strategy, file.read_text(encoding="utf-8") if file.exists() else "")
    found: dict[str, Any] = json.loads(text) if text else {}
    if found.get("replicas") != strategy.num_replicas_in_sync:
        return None
    return Fusion(bytes=0, segments=tuple(found["fusion_segments"]))
