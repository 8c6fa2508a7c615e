"""The worker process of the input benchmark, which reads batches from one input pipeline.

It runs under the Python of an environment with the pipeline's packages; only the pipeline ``own``
needs this package. It answers each line of its input with a line of JSON. The first line is the
job, a JSON object: ``pipeline`` names one of :data:`PIPELINES`, the rest are its arguments; the
answer has the packages' versions. Each further line is a number of batches to read; the answer is
``[seconds, CPU seconds]``.

The arguments of pipelines are ``paths`` of TFRecord shards with the fields of the ImageNet
converters, or a ``directory`` with a folder of JPEGs for each class; the height and width of
images, images in a batch, the number of threads or worker processes, and the records among which
the next one is drawn (``shuffle_buffer``).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

# The area of ImageNet crops in both TensorFlow's and PyTorch's examples.
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl.h


def main() -> None:
    """Answers each line of the input."""
    # So that this process and its children can be stopped together.
    os.setpgid(0, 0)
    _end_with_parent()
    job = json.loads(sys.stdin.readline())
    make, packages = PIPELINES[job.pop("pipeline")]
    batches = make(**job)
    next(batches)
    _answer({package: importlib.metadata.version(package) for package in packages})
    for line in sys.stdin:
        start, cpu_start = time.perf_counter(), _cpu_seconds()
        for _ in range(int(line)):
            next(batches)
        _answer([time.perf_counter() - start, _cpu_seconds() - cpu_start])


def _end_with_parent() -> None:
    """``base.worker_process.end_with_parent``, for environments without this package."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def own(config: str) -> Iterator[Any]:
    """Returns this package's training batches for a ``Config`` as JSON."""
    from imagenet_fast.config import Config
    from imagenet_fast.data.dataset import distributed_dataset

    return iter(distributed_dataset(Config.from_json(config), "train"))


def plain(
    paths: list[str], image_size: int, batch_size: int, shuffle_buffer: int
) -> Iterator[tuple[Any, Any]]:
    """Returns batches of a pipeline as in TensorFlow's and Keras' guides.

    Returns:
      Infinite batches of float32 [batch, image_size, image_size, 3] in 0..255, and int64 [batch].
    """
    import tensorflow as tf

    features = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }

    def image_and_label(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        example = tf.io.parse_single_example(record, features)
        encoded = example["image/encoded"]
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(encoded),
            tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
            min_object_covered=0.1,
            aspect_ratio_range=_RATIO,
            area_range=_AREA,
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.concat([begin[:2], size[:2]], axis=0)
        image = tf.image.decode_and_crop_jpeg(encoded, window, channels=3)
        image = tf.image.resize(image, [image_size, image_size])
        return tf.image.random_flip_left_right(image), example["image/class/label"]

    files = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths))
    records = files.interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE)
    images = records.shuffle(shuffle_buffer).repeat().map(image_and_label, tf.data.AUTOTUNE)
    return iter(images.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE))


def model_garden(
    paths: list[str], image_size: int, batch_size: int, shuffle_buffer: int, classes: int
) -> Iterator[tuple[Any, Any]]:
    """Returns the batches of Model Garden's image classification.

    The reader, decoder and parser are combined as in the task's ``build_inputs``, with the default
    configuration.

    Returns:
      Infinite batches of normalized float32 [batch, image_size, image_size, 3], and int32 [batch].
    """
    # Importing the package would import all vision tasks and their many dependencies.
    spec = importlib.util.find_spec("official")
    assert spec and spec.submodule_search_locations
    root = pathlib.Path(spec.submodule_search_locations[0])
    vision = types.ModuleType("official.vision")
    vision.__path__ = [str(root / "vision")]
    sys.modules[vision.__name__] = vision
    from official.common import dataset_fn
    from official.vision.configs.image_classification import DataConfig
    from official.vision.dataloaders import classification_input, input_reader_factory

    params = DataConfig(
        input_path=paths,
        global_batch_size=batch_size,
        is_training=True,
        shuffle_buffer_size=shuffle_buffer,
    )
    parser = classification_input.Parser(
        output_size=[image_size, image_size],
        num_classes=classes,
        decode_jpeg_only=params.decode_jpeg_only,
        aug_rand_hflip=params.aug_rand_hflip,
        aug_crop=params.aug_crop,
        dtype=params.dtype,
        tf_resize_method=params.tf_resize_method,
    )
    reader = input_reader_factory.input_reader_generator(
        params,
        dataset_fn=dataset_fn.pick_dataset_fn(params.file_type),
        decoder_fn=classification_input.Decoder().decode,
        parser_fn=parser.parse_fn(params.is_training),
    )
    return iter(reader.read())


def pytorch(
    directory: str, image_size: int, batch_size: int, threads: int
) -> Iterator[tuple[Any, Any]]:
    """Returns batches of PyTorch's DataLoader, set up as in its ImageNet example.

    Returns:
      Infinite batches of normalized float32 [batch, 3, image_size, image_size], and int64 [batch].
    """
    import torch
    from torchvision import datasets, transforms

    steps = [
        transforms.RandomResizedCrop(image_size, scale=_AREA, ratio=_RATIO),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
    loader = torch.utils.data.DataLoader(
        datasets.ImageFolder(directory, transforms.Compose(steps)),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=threads,
        persistent_workers=True,
        worker_init_fn=lambda _: _end_with_parent(),
    )
    while True:
        yield from loader


def dali(directory: str, image_size: int, batch_size: int, threads: int) -> Iterator[Any]:
    """Returns batches of NVIDIA DALI on the CPU.

    Returns:
      Infinite batches: lists of uint8 [batch, image_size, image_size, 3] and int32 [batch, 1].
    """
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import pipeline_def

    @pipeline_def(batch_size=batch_size, num_threads=threads, device_id=None)
    def images_and_labels() -> tuple[Any, Any]:
        files, labels = fn.readers.file(file_root=directory, random_shuffle=True)
        images = fn.decoders.image_random_crop(
            files, output_type=types.RGB, random_area=_AREA, random_aspect_ratio=_RATIO
        )
        images = fn.resize(images, size=[image_size] * 2, antialias=False)
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    pipeline = images_and_labels()
    pipeline.build()
    while True:
        yield [part.as_tensor() for part in pipeline.run()]


def ffcv(
    directory: str, image_size: int, batch_size: int, threads: int, write_mode: str
) -> Iterator[tuple[Any, Any]]:
    """Returns batches of FFCV, from a file that it writes first.

    ``write_mode`` is ``jpg``, JPEGs that FFCV encodes, of quality 90, or ``raw``, pixels.

    Returns:
      Infinite batches of uint8 [batch, image_size, image_size, 3], and int64 [batch, 1].
    """
    from ffcv import fields, loader, transforms, writer
    from ffcv.fields import decoders
    from PIL import Image

    class Images:
        """The images and the numbers of their folders."""

        files = sorted(pathlib.Path(directory).glob("*/*.jpg"))

        def __len__(self) -> int:
            return len(self.files)

        def __getitem__(self, number: int) -> tuple[Image.Image, int]:
            path = self.files[number]
            return Image.open(path).convert("RGB"), int(path.parent.name)

    path = str(pathlib.Path(directory, f"{write_mode}.beton"))
    images = fields.RGBImageField(write_mode=write_mode, jpeg_quality=90)
    to_file = writer.DatasetWriter(path, {"image": images, "label": fields.IntField()})
    to_file.from_indexed_dataset(Images())
    size = (image_size, image_size)
    decoder = decoders.RandomResizedCropRGBImageDecoder(size, scale=_AREA, ratio=_RATIO)
    batches = loader.Loader(
        path,
        batch_size=batch_size,
        num_workers=threads,
        order=loader.OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={
            "image": [decoder, transforms.RandomHorizontalFlip()],
            "label": [decoders.IntDecoder()],
        },
    )
    while True:
        yield from batches


# The function of each pipeline, and the packages whose versions are reported.
PIPELINES: dict[str, tuple[Callable[..., Iterator[Any]], tuple[str, ...]]] = {
    "own": (own, ("tensorflow",)),
    "plain": (plain, ("tensorflow",)),
    "model_garden": (model_garden, ("tf-models-official", "tensorflow")),
    "pytorch": (pytorch, ("torch", "torchvision", "pillow")),
    "dali": (dali, ("nvidia-dali-cuda120",)),
    "ffcv": (functools.partial(ffcv, write_mode="jpg"), ("ffcv", "torch")),
    "ffcv_raw": (functools.partial(ffcv, write_mode="raw"), ("ffcv", "torch")),
}


def _cpu_seconds() -> float:
    """Returns the CPU time of this process and its children."""
    seconds = time.process_time()
    for child in multiprocessing.active_children():
        # utime and stime, fields 14 and 15; the name, field 2, may contain spaces.
        fields = pathlib.Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
