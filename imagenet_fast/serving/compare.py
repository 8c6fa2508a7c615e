"""Exported ONNX and TFLite files on validation images: accuracy, size and latency.

Each file is run by its own runtime, with the pixels that evaluation gives the network.
"""

from __future__ import annotations

import pathlib
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from imagenet_fast.base.cores import cpu_cores
from imagenet_fast.config import Config
from imagenet_fast.data.info import read_info
from imagenet_fast.serving import runtimes
from imagenet_fast.serving.quantize import info_with, prepared_images
from imagenet_fast.training.checkpoints.model_dir import classes_in_run
from imagenet_fast.training.report.multi_label import multi_label_metrics
from imagenet_fast.training.step.calibration import interval

# Names of files begin with that of their runtime.
_LOAD = {"onnx": runtimes.onnx, "tflite": runtimes.tflite}
_TIMED, _UNTIMED = 100, 10


def class_numbers(config: Config) -> np.ndarray:
    """Returns the run's number of each class of its validation images.

    Raises:
      UserError: if there are no such images, or the data has other classes than the run.
    """
    info = info_with(config, "validation")
    return np.array(classes_in_run(config, info.labels, may_be_mapped=False))


def compare_files(
    config: Config, files: Mapping[str, str], images: int = 0
) -> dict[str, dict[str, Any]]:
    """Runs exported files on validation images.

    Args:
      config: of the run; gives the data.
      files: local paths by name, ``onnx`` or ``tflite``, with any ``_suffix``.
      images: how many to predict, the first ones of all shards; 0: all.

    Returns:
      By the same names: ``path``; ``bytes``; ``images``; ``top1`` and ``top1_interval`` (95%,
      Wilson), or with several labels ``map``, ``f1_micro`` and ``f1_macro``; and ``ms``, the median
      time of 100 predictions of one image on one thread, taken in turn.

    Raises:
      UserError: if there are no such images, or the data has other classes than the run.
    """
    numbers = class_numbers(config)
    several = read_info(config).multi_label
    models = _load(files, cpu_cores())
    found: dict[str, list[np.ndarray]] = {name: [] for name in files}
    wanted, first = [], np.zeros(0)
    for pixels, labels in prepared_images(config, "validation", images):
        first = first if len(first) else pixels
        wanted.append(labels if several else numbers[labels])
        for name, predict in models.items():
            scores = predict(pixels)
            found[name].append(scores if several else scores.argmax(axis=1))
    del models  # whose threads would disturb
    seconds = _seconds(files, first)
    results, labels = {}, np.concatenate(wanted)
    for name, path in files.items():
        predicted = np.concatenate(found[name])
        top1 = float((predicted == labels).mean())
        metrics: Mapping[str, Any] = {"top1": top1, "top1_interval": interval(top1, len(labels))}
        results[name] = {
            "path": path,
            "bytes": pathlib.Path(path).stat().st_size,
            "images": len(labels),
            **(multi_label_metrics(predicted, labels) if several else metrics),
            "ms": 1e3 * statistics.median(seconds[name]),
        }
    return results


def _load(files: Mapping[str, str], threads: int) -> dict[str, runtimes.Predict]:
    return {name: _LOAD[name.partition("_")[0]](path, threads) for name, path in files.items()}


def _seconds(files: Mapping[str, str], images: np.ndarray) -> dict[str, list[float]]:
    """Returns the times that each file's model takes for single images, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in files}
    models = _load(files, 1)
    for number in range(_UNTIMED + _TIMED):
        image = images[number % len(images)][np.newaxis]
        for name, predict in models.items():
            start = time.perf_counter()
            predict(image)
            seconds[name].append(time.perf_counter() - start)
    return {name: values[_UNTIMED:] for name, values in seconds.items()}
