"""``fusion=auto``: the gradient buckets with the shortest timed training step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TypedDict

import numpy as np
import tensorflow as tf

from imagenet_fast.base.durations import milliseconds
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import write_file
from imagenet_fast.base.notices import say
from imagenet_fast.base.option import option_text
from imagenet_fast.base.outside import MAX_JSON, Count, parse_json, read_bounded
from imagenet_fast.base.paths import to_path
from imagenet_fast.distribute.all_reduce import AllReduce
from imagenet_fast.distribute.exchange import text_of_chief
from imagenet_fast.distribute.fusion import Fusion, creation_order, fusion_candidates
from imagenet_fast.distribute.tpu import compiles_all_reduces
from imagenet_fast.distribute.workers import is_chief
from imagenet_fast.training.step.classifier import Classifier

_FILE = "fusion.json"
_WARMUP, _REPEATS = 1, 5


class _Chosen(TypedDict):
    replicas: Count
    fusion_segments: tuple[Count, ...]


def choose_fusion(
    model: Classifier,
    make: Callable[[Fusion, str], AllReduce],
    fusion_bytes: int,
    shape: tuple[int, int, int, int],
) -> Fusion:
    """Times training steps with each candidate and returns the fastest, the same in all workers.

    A timed step is a forward and backward pass and the all-reduces, without the update; the model
    is unchanged afterwards. All workers must call it.

    Args:
      model: compiled, under a strategy of several replicas.
      make: returns the all-reduce with the given buckets and name.
      fusion_bytes: the configured bucket size, one of the candidates.
      shape: [images, height, width, channels] of a replica's part of a step.

    Raises:
      UserError: on TPUs, whose compiler orders the all-reduces.
    """
    strategy = model.distribute_strategy
    if compiles_all_reduces(strategy):
        raise UserError(
            "fusion=auto is not for TPUs, whose compiler orders the all-reduces: "
            "imagenet-fast plan --accelerator suggests fusion_segments"
        )
    variables = model.trainable_variables
    ordered = [variables[i] for i in creation_order(variables)]
    shapes, dtypes = zip(*((own.shape, tf.as_dtype(own.dtype)) for own in ordered))
    candidates = fusion_candidates(model.name, fusion_bytes, shapes, dtypes)
    steps = [
        _step(model, make(Fusion(0, segments), f"fusion_{number}"), shape)
        for number, segments in enumerate(candidates)
    ]
    with model.preserved_state():
        seconds = _median_seconds(steps)
    # Timings differ between workers: the chief decides.
    fastest = json.dumps(min(zip(seconds, candidates))[1])
    segments = tuple(json.loads(text_of_chief(strategy, fastest)))
    if is_chief(strategy):
        say(_report(dict(zip(candidates, seconds)), segments))
    return Fusion(0, segments)


def _step(
    model: Classifier, all_reduce: AllReduce, shape: tuple[int, int, int, int]
) -> Callable[[], None]:
    """Returns a function that runs a training step on random images, up to the update."""
    strategy = model.distribute_strategy

    def replica_step() -> tf.Tensor:
        pixels = tf.random.stateless_uniform(shape, (0, 0), 0, 256, tf.int32)
        images = tf.cast(pixels, model.inputs[0].dtype)
        gradients, sums = model.gradients((images, tf.zeros(shape[:1], tf.int32)))
        reduced = all_reduce(gradients, [sums], variables=model.trainable_variables)
        # One element of each, so that TensorFlow prunes no all-reduce.
        return tf.add_n([tf.reshape(tensor, [-1])[0] for tensor in reduced])

    run = tf.function(lambda: strategy.run(replica_step), autograph=False)

    def step() -> None:
        for value in strategy.experimental_local_results(run()):
            value.numpy()

    return step


def _median_seconds(steps: Sequence[Callable[[], None]]) -> list[float]:
    """Times functions in turns, so that a busy moment of the machine affects all of them."""
    times = np.empty([_WARMUP + _REPEATS, len(steps)])
    for turn in times:
        for number, step in enumerate(steps):
            start = time.perf_counter()
            step()
            turn[number] = time.perf_counter() - start
    return np.median(times[_WARMUP:], axis=0).tolist()


def _report(seconds: dict[tuple[int, ...], float], chosen: tuple[int, ...]) -> str:
    """Returns a line with the chosen segments and each candidate's time."""
    times = ", ".join(f"{len(own) + 1} in {milliseconds(seconds[own])}" for own in seconds)
    flag = f"--fusion_segments={option_text(chosen)}" if chosen else "--fusion_bytes=0"
    return f"fusion=auto chose {flag}; all-reduces, and time before the update: {times}"


def save_fusion(fusion: Fusion, replicas: int, model_dir: str) -> None:
    """Writes the segments chosen for a number of replicas, which a resumed run reads."""
    values = {"replicas": replicas, "fusion_segments": fusion.segments}
    write_file(to_path(model_dir, _FILE), json.dumps(values, indent=2) + "\n")


def load_fusion(strategy: tf.distribute.Strategy, model_dir: str) -> Fusion | None:
    """Returns what :func:`save_fusion` wrote; None: nothing, or for another number of replicas.

    Other segments would add gradients in another order and round differently, so a resumed run must
    not choose again. All workers must call it; the chief's file counts.
    """
    file = to_path(model_dir, _FILE)
    exists = file.exists()
    text = text_of_chief(strategy, read_bounded(file, MAX_JSON).decode() if exists else "")
    if not text:
        return None
    try:
        chosen = parse_json(text, _Chosen)
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): remove it") from None
    if chosen["replicas"] != strategy.num_replicas_in_sync:
        return None
    return Fusion(bytes=0, segments=chosen["fusion_segments"])
