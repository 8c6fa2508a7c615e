"""The worker process of the serving benchmark, which runs an exported model in one runtime only.

It answers each line of its input with a line of JSON. The first line is the job, an object that
:func:`main` describes; the answer has ``versions`` of packages and ``memory``, the process' bytes
before it loads the model. Each further line is a number of images to predict in batches, from the
first one, cycling through them if necessary. The answer has ``seconds`` of each batch,
``cpu_seconds`` of all together, the top ``classes`` of each image, their ``probabilities``, and
``peak_memory``, the highest so far in bytes. Reading image files is not timed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from imagenet_fast.base.worker_process import end_with_parent
from imagenet_fast.lab.benchmarks.process_memory import memory
from imagenet_fast.serving.runtimes import onnx, tflite

_TOP = 5
ENCODED = "encoded"
PIXELS = "pixels.npy"

# Returns a batch's probabilities, [batch, classes]; or the top classes and their probabilities.
Predict = Callable[[Any], "np.ndarray | tuple[np.ndarray, np.ndarray]"]


def main() -> None:
    """Answers each line of the input.

    The job has ``runtime``, one of :data:`RUNTIMES`; ``path`` of the model; ``images``, a directory
    with ``pixels.npy`` and the folder ``encoded``; ``count`` of these images; ``batch_size``; and
    ``threads``.
    """
    # So that this process can be stopped with its children.
    os.setpgid(0, 0)
    end_with_parent()
    job = json.loads(sys.stdin.readline())
    module, package, read, load = RUNTIMES[job["runtime"]]
    importlib.import_module(module)
    versions = {package: importlib.metadata.version(package)}
    before = memory("VmRSS")
    predict = load(job["path"], job["threads"])
    _answer({"versions": versions, "memory": before})
    for line in sys.stdin:
        numbers = [number % job["count"] for number in range(json.loads(line))]
        result = _serve(predict, read, job["images"], numbers, job["batch_size"])
        _answer({**result, "peak_memory": memory("VmHWM")})


def read_encoded(directory: str, numbers: Sequence[int]) -> list[bytes]:
    """Returns some of the image files' contents."""
    return [pathlib.Path(directory, ENCODED, str(number)).read_bytes() for number in numbers]


def read_pixels(directory: str, numbers: Sequence[int]) -> np.ndarray:
    """Returns some of the preprocessed images, uint8 [count, size, size, 3]."""
    return np.load(pathlib.Path(directory, PIXELS), mmap_mode="r")[np.asarray(numbers)]


def tensorflow_encoded(path: str, threads: int) -> Predict:
    """Loads a SavedModel that takes encoded images."""
    tf, signatures = _saved_model(path, threads)
    classify = signatures["serving_default"]

    def predict(images: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        predictions = classify(images=tf.constant(images))
        return predictions["classes"].numpy(), predictions["probabilities"].numpy()

    return predict


def tensorflow_pixels(path: str, threads: int) -> Predict:
    """Loads a SavedModel that takes preprocessed images."""
    tf, signatures = _saved_model(path, threads)
    classify = signatures["pixels"]
    return lambda pixels: classify(pixels=tf.constant(pixels))["probabilities"].numpy()


# Each runtime's module, package, function that reads images and function that loads a model.
RUNTIMES = {
    "tensorflow_encoded": ("tensorflow", "tensorflow", read_encoded, tensorflow_encoded),
    "tensorflow_pixels": ("tensorflow", "tensorflow", read_pixels, tensorflow_pixels),
    "onnx": ("onnxruntime", "onnxruntime", read_pixels, onnx),
    "tflite": ("ai_edge_litert.interpreter", "ai-edge-litert", read_pixels, tflite),
}


def _saved_model(path: str, threads: int) -> tuple[Any, Any]:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    signatures = tf.saved_model.load(path).signatures
    return tf, signatures


def _serve(
    predict: Predict,
    read: Callable[[str, Sequence[int]], Any],
    directory: str,
    numbers: Sequence[int],
    batch_size: int,
) -> dict[str, Any]:
    seconds, cpu_seconds = [], 0.0
    classes, probabilities = [], []
    for begin in range(0, len(numbers), batch_size):
        batch = read(directory, numbers[begin : begin + batch_size])
        start, cpu_start = time.perf_counter(), time.process_time()
        predictions = predict(batch)
        seconds.append(time.perf_counter() - start)
        cpu_seconds += time.process_time() - cpu_start
        top = predictions if isinstance(predictions, tuple) else top_classes(predictions)
        classes += top[0].tolist()
        probabilities += top[1].tolist()
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "classes": classes,
        "probabilities": probabilities,
    }


def top_classes(probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the top classes of each image, best first, and their probabilities.

    Args:
      probabilities: float [images, classes].
    """
    top = np.argsort(-probabilities, axis=1, kind="stable")[:, :_TOP]
    return top, np.take_along_axis(probabilities, top, axis=1)


def _answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
