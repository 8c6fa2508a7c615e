"""The ramp of image sizes against the formula of ffcv-imagenet, at each epoch."""

from collections import Counter

import numpy as np
import pytest

from imagenet_fast import Config
from imagenet_fast.base.durations import Duration
from imagenet_fast.data.pixel_options import ramp_sizes
from imagenet_fast.data.steps import steps_by_size, training_image_size


def formula(time, first, last, multiple, begin, end):
    """As get_resolution of ffcv-imagenet's train_imagenet.py, there with multiples of 32."""
    if time <= begin:
        return first
    if time >= end:
        return last
    return round(np.interp(time, [begin, end], [first, last]) / multiple) * multiple


RAMPS = [
    # ffcv-imagenet's, for 16 to 88 epochs.
    *((160, 192, 32, *at) for at in [(11, 13), (17, 20), (23, 27), (29, 34), (41, 48), (65, 76)]),
    (128, 224, 32, 1, 9),
    (128, 192, 32, 0, 4),  # halfway between two sizes at whole epochs, once each way
    (88, 176, 4, 0, 14),  # composer's: several sizes in an epoch
    (112, 224, 4, 3, 90),
    (160, 192, 32, 2.75, 3.25),  # scaled with the run's duration
    (64, 192, 32, 2.9, 3.1),
    (96, 192, 32, 13.295, 15.545),
]


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_sizes_at_whole_times(ramp, unit):
    first, last, multiple, begin, end = ramp
    config = Config(
        image_size=last,
        size_ramp=(first, multiple),
        size_ramp_at=(Duration(begin, unit), Duration(end, unit)),
    )
    each = 7 if unit == "epochs" else 1
    times = range(int(end) + 3)
    assert [training_image_size(config, each * time, 7) for time in times] == [
        formula(time, *ramp) for time in times
    ]
    # Between these times, a size does not change.
    assert [training_image_size(config, each * time + each - 1, 7) for time in times] == [
        formula(time, *ramp) for time in times
    ]


def test_no_size_without_a_time():
    at = Duration(2.9, "epochs"), Duration(3.1, "epochs")
    assert ramp_sizes(64, 192, 32, *at) == (
        (64, Duration(3, "epochs")),
        (128, Duration(4, "epochs")),
    )
    assert ramp_sizes(64, 192, 64, Duration(0, "steps"), Duration(0, "steps")) == (
        (128, Duration(1, "steps")),
    )


@pytest.mark.parametrize("total", [3, 20, 50])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"train_sizes": (16, 24), "train_until": "1 epochs,2.5 epochs"},
        {"train_sizes": (16, 32), "train_until": "5 steps,10 steps"},
        {"size_ramp": (16, 8), "size_ramp_at": "5 steps,40 steps"},
    ],
    ids=str,
)
def test_the_steps_of_each_size_are_counted(options, total):
    config = Config(image_size=32, batch_size=8, **options)
    sizes = [training_image_size(config, step, 10) for step in range(total)]
    counted = steps_by_size(config, 10, total)
    assert {size: count for size, count in counted.items() if count} == Counter(sizes)
