"""The line that a run begins with; tests of ``train`` have the whole of it."""

import dataclasses

import pytest

from imagenet_fast.config import Config
from imagenet_fast.data.info import DatasetInfo, SplitInfo
from imagenet_fast.training.first_line import image_memory
from imagenet_fast.training.run import Run


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shuffle_buffer": 400}, "; up to 40 MB in the shuffle buffer"),
        ({"shuffle_buffer": 16384}, "; up to 100 MB in the shuffle buffer"),
        ({"cache": "encoded"}, ""),
        (
            {"data_on_device": True, "train_crop": "pad", "image_size": 32},
            "; 5 MB of images on each device",
        ),
        (
            {"data_on_device": True, "train_crop": "pad", "image_size": 32, "eval_image_size": 64},
            "; 9 MB of images on each device",
        ),
    ],
)
def test_summary_has_the_memory_of_images(options, told):
    split = SplitInfo(("train-00000-of-00001",), (1000,), bytes=100_000_000, examples=1000)
    validation = dataclasses.replace(split, examples=500)
    info = DatasetInfo("data", ("a",), 0, {"train": split, "validation": validation})
    assert image_memory(Run(Config(**options), info, None)) == told
