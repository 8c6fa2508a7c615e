"""How fast, and in how much memory, a trained model answers in each format that it is exported to.

Each format is served by a process of its own, in which nothing but its runtime is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import imagenet_fast
from imagenet_fast.base.cores import cpu_cores
from imagenet_fast.base.errors import UserError, how_to_install
from imagenet_fast.base.worker_process import Worker, start_worker
from imagenet_fast.benchmarks.serving.worker import ENCODED, PIXELS, best_classes
from imagenet_fast.benchmarks.timing import Comparison, take_turns
from imagenet_fast.config import Config
from imagenet_fast.data.batches import evaluation_batches
from imagenet_fast.data.examples import ENCODED as ENCODED_FIELD
from imagenet_fast.data.examples import decode_example
from imagenet_fast.data.info import DatasetInfo, read_info
from imagenet_fast.data.pipeline import thread_count
from imagenet_fast.data.records import read_records
from imagenet_fast.data.resize_op import with_resize_kernel
from imagenet_fast.serving.convert import export_onnx, export_tflite
from imagenet_fast.serving.export import export
from imagenet_fast.training.build import build_for_evaluation
from imagenet_fast.training.checkpoint import restore_weights

# By the runtime's name in worker.py, that for people. The first is the one of interest.
WAYS = {
    "tensorflow_encoded": "SavedModel, encoded images",
    "tensorflow_pixels": "SavedModel, pixels",
    "onnx": "ONNX, pixels",
    "tflite": "TFLite, pixels",
}
_EVALUATED_AT_ONCE = 100


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far answers are those of evaluation.

    Attributes:
      images: that were answered.
      same: of these, those whose best classes are the same in the same order.
      difference: of the probabilities of any rank, the largest.
    """

    images: int
    same: int
    difference: float


@dataclasses.dataclass(frozen=True)
class Served:
    """What was measured at a batch size.

    Attributes:
      batch_size: images in a call.
      comparison: of the ways; a turn is several calls, one after the other.
      latencies: of each way, the seconds of each call in the turns that count.
      memory: of each way, the bytes of its process before the model was loaded.
      peak_memory: of each way, the most bytes that its process had.
      agreements: of each way, with evaluation.
      versions: of the runtimes' packages.
    """

    batch_size: int
    comparison: Comparison
    latencies: tuple[tuple[float, ...], ...]
    memory: tuple[int, ...]
    peak_memory: tuple[int, ...]
    agreements: tuple[Agreement, ...]
    versions: dict[str, str]


def compare_serving(
    config: Config,
    batch_sizes: Sequence[int],
    *,
    images: int,
    calls: int,
    threads: int,
    warmup: int,
    repeats: int,
) -> list[Served]:
    """Exports a run in each format, and has each answer validation images, in turns, on the CPU.

    Args:
      config: of a run that holds a checkpoint, whose data has validation images.
      batch_sizes: images in a call.
      images: the first ones of the validation shards, all of which each format answers once before
        the turns, to be compared with evaluation's answers.
      calls: of the model in a turn.
      threads: that a runtime computes with; 0: as many as there are cores.
      warmup: untimed turns of each at first.
      repeats: timed turns of each.

    Returns:
      What was measured at each batch size.

    Raises:
      UserError: if the run cannot be exported or evaluated, or a runtime is not installed.
    """
    config = config.replace(precision="float32", loss_scale=0.0, strategy="one_device")
    info = read_info(config)
    if config.synthetic or "validation" not in info.splits:
        raise UserError(f"{info.name} has no validation images to answer: give another --data_dir")
    with tempfile.TemporaryDirectory(prefix="imagenet_fast_") as directory:
        answers = _prepare(config, info, images, directory)
        job = {
            "images": directory,
            "count": len(answers[0]),
            "threads": threads or cpu_cores(),
        }
        paths = _export(config, directory)
        jobs = {name: {"runtime": name, "path": paths[name], **job} for name in WAYS}
        return [
            _serve(config, jobs, batch_size, calls, answers, warmup=warmup, repeats=repeats)
            for batch_size in batch_sizes
        ]


def _export(config: Config, directory: str) -> dict[str, str]:
    """Returns the files by the runtimes that they are for."""
    saved_model = export(config, pathlib.Path(directory, "saved_model"))
    return {
        "tensorflow_encoded": saved_model,
        "tensorflow_pixels": saved_model,
        "onnx": export_onnx(config, pathlib.Path(directory, "model.onnx")),
        "tflite": export_tflite(config, pathlib.Path(directory, "model.tflite")),
    }


def _prepare(
    config: Config, info: DatasetInfo, count: int, directory: str
) -> tuple[np.ndarray, np.ndarray]:
    """Writes images for the workers.

    Returns:
      Evaluation's answers: the best classes and their probabilities, both [images, 5].
    """
    everything = itertools.chain.from_iterable(map(read_records, info.splits["validation"].paths))
    records = list(itertools.islice(everything, count))
    batches = evaluation_batches(
        tf.data.Dataset.from_tensor_slices(records).batch(_EVALUATED_AT_ONCE),
        info,
        with_resize_kernel(config),
        thread_count(config),
    )
    pixels, _, weights = (np.concatenate(parts) for parts in zip(*batches.as_numpy_iterator()))
    readable = weights > 0
    if not readable.any():
        raise UserError(f"none of the first {len(records)} validation images can be read")
    pixels = pixels[readable]
    folder = pathlib.Path(directory, ENCODED)
    folder.mkdir()
    for number, record in enumerate(itertools.compress(records, readable)):
        folder.joinpath(str(number)).write_bytes(decode_example(record)[ENCODED_FIELD][0])
    np.save(pathlib.Path(directory, PIXELS), pixels)
    model = build_for_evaluation(config)
    restore_weights(model, config.model_dir)
    return best_classes(model.predict(pixels, batch_size=_EVALUATED_AT_ONCE, verbose=0))


def _serve(
    config: Config,
    jobs: Mapping[str, Mapping[str, Any]],
    batch_size: int,
    calls: int,
    answers: tuple[np.ndarray, np.ndarray],
    *,
    warmup: int,
    repeats: int,
) -> Served:
    with contextlib.ExitStack() as stack:
        servers = [
            _Server(stack.enter_context(_start(name, {**job, "batch_size": batch_size})))
            for name, job in jobs.items()
        ]
        agreements = [server.agreement(*answers) for server in servers]
        images = calls * batch_size
        turns = [functools.partial(server.turn, images) for server in servers]
        times = take_turns(turns, warmup=warmup, repeats=repeats)
    title = f"{config.model}, {config.image_size} px, batch {batch_size}"
    return Served(
        batch_size,
        Comparison(title, (), tuple(WAYS[name] for name in jobs), times, images),
        tuple(tuple(server.latencies[warmup * calls :]) for server in servers),
        tuple(server.memory for server in servers),
        tuple(server.peak_memory for server in servers),
        tuple(agreements),
        {name: version for server in servers for name, version in server.versions.items()},
    )


def _start(name: str, job: Mapping[str, Any]) -> contextlib.AbstractContextManager[Worker]:
    environment = {
        "PYTHONPATH": str(pathlib.Path(imagenet_fast.__file__).parents[1]),
        # Not all of the runtimes could use a GPU.
        "CUDA_VISIBLE_DEVICES": "",
    }
    return start_worker(
        [sys.executable, "-m", "imagenet_fast.benchmarks.serving.worker"],
        job,
        name=WAYS[name],
        advice=f"{how_to_install('serving')} brings all runtimes",
        environment=environment,
    )


class _Server:
    """A worker that serves an exported model.

    Args:
      worker: in which ``worker.py`` runs.

    Attributes:
      versions: of packages.
      memory: bytes before the model was loaded.
      peak_memory: bytes at most, so far.
      latencies: seconds of each call in the turns so far.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.versions: dict[str, str] = worker.answer["versions"]
        self.memory: int = worker.answer["memory"]
        self.peak_memory = 0
        self.latencies: list[float] = []

    def agreement(self, classes: np.ndarray, probabilities: np.ndarray) -> Agreement:
        """Has each image answered once, and compares with the best classes of each."""
        answer = self._ask(len(classes))
        same = (np.array(answer["classes"]) == classes).all(axis=1)
        # Of equal ranks: where two change places, their probabilities are almost equal.
        differences = np.abs(np.array(answer["probabilities"]) - probabilities)
        return Agreement(len(classes), int(same.sum()), float(differences.max()))

    def turn(self, images: int) -> tuple[float, float]:
        """Has images answered, and returns the seconds and the CPU seconds of all calls."""
        answer = self._ask(images)
        self.latencies += answer["seconds"]
        return sum(answer["seconds"]), answer["cpu_seconds"]

    def _ask(self, images: int) -> dict[str, Any]:
        answer = self._worker.ask(str(images))
        self.peak_memory = answer["peak_memory"]
        return answer
