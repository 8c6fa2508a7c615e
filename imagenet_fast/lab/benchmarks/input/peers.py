"""This package's and other input pipelines, each in its own process, on the same files.

The others but plain tf.data need packages that this one does not depend on.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import imagenet_fast
from imagenet_fast.base.paths import to_local_path, to_path
from imagenet_fast.base.worker_process import Worker, module_command, start_worker
from imagenet_fast.config import Config
from imagenet_fast.data.dataset import thread_count
from imagenet_fast.data.examples import ENCODED, LABEL, decode_example
from imagenet_fast.data.info import DatasetInfo, read_info
from imagenet_fast.data.records import read_records

# The title of each pipeline, by its name in worker.py.
PEERS = {
    "own": "imagenet_fast",
    "plain": "plain tf.data",
    "model_garden": "Model Garden",
    "pytorch": "PyTorch DataLoader",
    "dali": "DALI on the CPU",
    "ffcv": "FFCV, JPEGs",
    "ffcv_raw": "FFCV, raw pixels",
}
_OF_RECORDS = ("plain", "model_garden")
_OF_FILES = ("pytorch", "dali", "ffcv", "ffcv_raw")
_WORKER = pathlib.Path(__file__).with_name("worker.py")


@contextlib.contextmanager
def start_peers(
    config: Config, environments: Mapping[str, str], count: int
) -> Iterator[dict[str, Worker]]:
    """Starts a process for each pipeline, which answers a number of batches with their times.

    Args:
      config: of the data, the images, the batches and, where it can be set, the threads.
      environments: the virtual environment of each pipeline, by the pipeline's name; empty: the
        present one.
      count: images for pipelines that read image files: the first ones of the training shards.

    Yields:
      The processes, by the pipelines' names.

    Raises:
      UserError: if a package is missing in an environment.
    """
    info = read_info(config)
    with contextlib.ExitStack() as stack:
        directory = ""
        if any(name in _OF_FILES for name in environments):
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="imagenet_fast_"))
            _write_files(info, count, pathlib.Path(directory))
        workers = {}
        for name, environment in environments.items():
            job = {"pipeline": name, **_arguments(name, config, info, directory)}
            workers[name] = stack.enter_context(_start(name, environment, job))
        yield workers


def _arguments(name: str, config: Config, info: DatasetInfo, directory: str) -> dict[str, Any]:
    if name == "own":
        return {"config": config.replace(strategy="one_device").to_json()}
    arguments: dict[str, Any] = {"batch_size": config.batch_size, "image_size": config.image_size}
    if name in _OF_FILES:
        arguments.update(directory=directory, threads=thread_count(config))
    if name in _OF_RECORDS:
        paths = [str(to_path(path).resolve()) for path in info.splits["train"].paths]
        arguments.update(paths=paths, shuffle_buffer=config.shuffle_buffer)
    if name == "model_garden":
        arguments["classes"] = info.num_classes
    return arguments


def _start(
    name: str, environment: str, job: dict[str, Any]
) -> contextlib.AbstractContextManager[Worker]:
    python, advice = sys.executable, ""
    if environment:
        python = str(to_local_path(environment, name) / "bin" / "python")
        made = name.removesuffix("_raw")
        advice = f"`tools/input_peers.sh DIRECTORY {made}` creates a working environment"
    if name == "own":
        command = module_command("imagenet_fast.lab.benchmarks.input.worker", python)
    else:
        # -I: modules beside the worker's file must not shadow packages.
        command = [python, "-I", str(_WORKER)]
    variables = {
        "PYTHONPATH": str(pathlib.Path(imagenet_fast.__file__).parents[1]),
        # TensorFlow would allocate a GPU's memory, which input pipelines do not use.
        "CUDA_VISIBLE_DEVICES": "",
    }
    return start_worker(command, job, name=PEERS[name], advice=advice, environment=variables)


def _write_files(info: DatasetInfo, count: int, directory: pathlib.Path) -> None:
    """Writes the first training images as files, in one folder per class."""
    records = itertools.chain.from_iterable(map(read_records, info.splits["train"].paths))
    for number, record in enumerate(itertools.islice(records, count)):
        example = decode_example(record)
        folder = directory / f"{example[LABEL][0] + info.label_offset:05d}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:07d}.jpg").write_bytes(example[ENCODED][0])
