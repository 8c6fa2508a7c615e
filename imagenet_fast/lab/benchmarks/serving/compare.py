"""A benchmark of a trained model in each export format: speed, latency, memory and accuracy.

A separate process serves each format, with only its runtime loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from imagenet_fast.base.cores import cpu_cores
from imagenet_fast.base.errors import UserError, how_to_install
from imagenet_fast.base.worker_process import Worker, module_command, start_worker
from imagenet_fast.config import Config
from imagenet_fast.data.batches import evaluation_batches
from imagenet_fast.data.dataset import thread_count
from imagenet_fast.data.examples import ENCODED as ENCODED_FIELD
from imagenet_fast.data.examples import decode_example
from imagenet_fast.data.info import DatasetInfo, read_info
from imagenet_fast.data.jpeg.image_ops import with_resize_kernel
from imagenet_fast.data.records import read_records
from imagenet_fast.lab.benchmarks.serving.worker import ENCODED, PIXELS, top_classes
from imagenet_fast.lab.benchmarks.timing import Comparison, time_interleaved
from imagenet_fast.serving.convert import export_onnx, export_tflite
from imagenet_fast.serving.export import export
from imagenet_fast.training.build.model import build_for_evaluation
from imagenet_fast.training.checkpoints.checkpoint import restore_weights
from imagenet_fast.training.run import make_run

# The title of each format, by the runtime's name in worker.py.
FORMATS = {
    "tensorflow_encoded": "SavedModel, encoded images",
    "tensorflow_pixels": "SavedModel, pixels",
    "onnx": "ONNX, pixels",
    "tflite": "TFLite, pixels",
}
_EVALUATION_BATCH = 100


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The agreement of predictions with evaluation's.

    Attributes:
      images: their number.
      same: images whose top classes are the same in the same order.
      difference: the largest between probabilities of the same rank.
    """

    images: int
    same: int
    difference: float


@dataclasses.dataclass(frozen=True)
class ServingResult:
    """The measurements at one batch size.

    Attributes:
      batch_size: images in a call.
      comparison: of the formats; a repeat is several calls, one after the other.
      latencies: seconds of each call in the timed repeats, for each format.
      memory: bytes of each format's process before it loaded the model.
      peak_memory: the highest memory of each format's process, in bytes.
      agreements: of each format's predictions with evaluation's.
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
) -> list[ServingResult]:
    """Exports a run in each format, and times their interleaved predictions on the CPU.

    Args:
      config: of a run with a checkpoint, whose data has validation images.
      batch_sizes: images in a call.
      images: the first ones of the validation shards. Before timing, each format predicts all of
        them once, and the predictions are compared with evaluation's.
      calls: of the model in a repeat.
      threads: of a runtime; 0: one per core.
      warmup: untimed repeats of each at the start.
      repeats: timed repeats of each.

    Returns:
      The results of each batch size.

    Raises:
      UserError: if the run cannot be exported or evaluated, or a runtime is not installed.
    """
    config = config.replace(precision="float32", loss_scale=0.0, strategy="one_device")
    info = read_info(config)
    if config.synthetic or "validation" not in info.splits:
        raise UserError(f"{info.name} has no validation images: give another --data_dir")
    with tempfile.TemporaryDirectory(prefix="imagenet_fast_") as directory:
        expected = _prepare(config, info, images, directory)
        job = {
            "images": directory,
            "count": len(expected[0]),
            "threads": threads or cpu_cores(),
        }
        paths = _export(config, directory)
        jobs = {name: {"runtime": name, "path": paths[name], **job} for name in FORMATS}
        return [
            _serve(config, jobs, batch_size, calls, expected, warmup=warmup, repeats=repeats)
            for batch_size in batch_sizes
        ]


def _export(config: Config, directory: str) -> dict[str, str]:
    """Returns each runtime's exported file."""
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
    """Writes the workers' images.

    Returns:
      Evaluation's predictions: the top classes and their probabilities, both [images, 5].
    """
    validation = itertools.chain.from_iterable(map(read_records, info.splits["validation"].paths))
    records = list(itertools.islice(validation, count))
    batches = evaluation_batches(
        tf.data.Dataset.from_tensor_slices(records).batch(_EVALUATION_BATCH),
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
    model = build_for_evaluation(make_run(config))
    restore_weights(model, config.model_dir)
    return top_classes(model.predict(pixels, batch_size=_EVALUATION_BATCH, verbose=0))


def _serve(
    config: Config,
    jobs: Mapping[str, Mapping[str, Any]],
    batch_size: int,
    calls: int,
    expected: tuple[np.ndarray, np.ndarray],
    *,
    warmup: int,
    repeats: int,
) -> ServingResult:
    with contextlib.ExitStack() as stack:
        servers = [
            _Server(stack.enter_context(_start(name, {**job, "batch_size": batch_size})))
            for name, job in jobs.items()
        ]
        agreements = [server.agreement(*expected) for server in servers]
        images = calls * batch_size
        predict = [functools.partial(server.predict, images) for server in servers]
        times = time_interleaved(predict, warmup=warmup, repeats=repeats)
    title = f"{config.model}, {config.image_size} px, batch {batch_size}"
    return ServingResult(
        batch_size,
        Comparison(title, (), tuple(FORMATS[name] for name in jobs), times, images),
        tuple(tuple(server.latencies[warmup * calls :]) for server in servers),
        tuple(server.memory for server in servers),
        tuple(server.peak_memory for server in servers),
        tuple(agreements),
        {name: version for server in servers for name, version in server.versions.items()},
    )


def _start(name: str, job: Mapping[str, Any]) -> contextlib.AbstractContextManager[Worker]:
    environment = {"CUDA_VISIBLE_DEVICES": ""}  # Not all runtimes support GPUs.
    return start_worker(
        module_command("imagenet_fast.lab.benchmarks.serving.worker"),
        job,
        name=FORMATS[name],
        advice=f"{how_to_install('serving')} installs all runtimes",
        environment=environment,
    )


class _Server:
    """A worker process that serves an exported model.

    Args:
      worker: runs ``worker.py``.

    Attributes:
      versions: of packages.
      memory: bytes before the model was loaded.
      peak_memory: the highest so far, in bytes.
      latencies: seconds of each call so far, but those of :meth:`agreement`.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.versions: dict[str, str] = worker.answer["versions"]
        self.memory: int = worker.answer["memory"]
        self.peak_memory = 0
        self.latencies: list[float] = []

    def agreement(self, classes: np.ndarray, probabilities: np.ndarray) -> Agreement:
        """Predicts each image once, and compares with its expected top classes."""
        answer = self._ask(len(classes))
        same = (np.array(answer["classes"]) == classes).all(axis=1)
        # Compared by rank: classes that change places have almost equal probabilities.
        differences = np.abs(np.array(answer["probabilities"]) - probabilities)
        return Agreement(len(classes), int(same.sum()), float(differences.max()))

    def predict(self, images: int) -> tuple[float, float]:
        """Predicts the first images; returns the wall-clock and CPU seconds of all calls."""
        answer = self._ask(images)
        self.latencies += answer["seconds"]
        return sum(answer["seconds"]), answer["cpu_seconds"]

    def _ask(self, images: int) -> dict[str, Any]:
        answer = self._worker.ask(str(images))
        self.peak_memory = answer["peak_memory"]
        return answer
