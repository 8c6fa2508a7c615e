"""Windows, against loops, formulas and TensorFlow's own operation."""

import math

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import Config
from imagenet_fast.data import stateless_random
from imagenet_fast.data.windows import evaluation_windows, training_windows

_HEIGHT, _WIDTH = 200, 240


@pytest.fixture(scope="module")
def draw_windows(identities):
    """Windows of images of one size: draw_windows(height, width, count=4000, **config)."""

    def draw(height, width, count=4000, **changes):
        sizes = np.full([count, 2], [height, width], np.int32)
        windows = training_windows(sizes, identities(count), Config(**changes))
        assert windows.shape == (count, 4) and windows.dtype == tf.int32
        return windows.numpy()

    return draw


@pytest.fixture(scope="module")
def windows(draw_windows):
    """Windows of 4000 random_resized crops."""
    return draw_windows(_HEIGHT, _WIDTH)


@pytest.fixture(scope="module")
def inception_windows(draw_windows):
    """Windows of 4000 inception crops."""
    return draw_windows(_HEIGHT, _WIDTH, train_crop="inception")


@pytest.mark.parametrize("crop", ["windows", "inception_windows"])
def test_random_windows_lie_anywhere_within_the_image(crop, request):
    top, left, height, width = request.getfixturevalue(crop).T
    for corner, side, whole in ((top, height, _HEIGHT), (left, width, _WIDTH)):
        room = whole - side
        assert (side >= 1).all() and (corner >= 0).all() and (corner <= room).all()
        assert (corner[room > 0] == 0).any() and (corner[room > 0] == room[room > 0]).any()
        place = corner[room >= 40] / room[room >= 40]
        assert len(place) > 1500
        assert abs(place.mean() - 1 / 2) < 0.03
        assert abs(place.std() - np.sqrt(1 / 12)) < 0.015
    small = (height < 150) & (width < 150)
    assert abs(np.corrcoef(top[small], left[small])[0, 1]) < 0.1


def test_random_windows_have_areas_from_the_least_to_the_whole(windows):
    area = windows[:, 2] * windows[:, 3] / (_HEIGHT * _WIDTH)
    assert 0.078 < area.min() < 0.083
    assert 0.95 < area.max() <= 1
    # Below 0.45 each window fits, whatever its shape, and none is drawn more often than another.
    fitting = area[area < 0.45]
    assert 0.46 < np.mean(fitting < (0.08 + 0.45) / 2) < 0.54


def test_aspects_are_log_uniform_from_three_quarters_to_four_thirds(windows):
    fitting = windows[windows[:, 2] * windows[:, 3] < 0.45 * _HEIGHT * _WIDTH]
    large = fitting[fitting[:, 2] * fitting[:, 3] > 75**2]  # where rounding hardly tells
    aspect = np.sort(np.log(large[:, 3] / large[:, 2]))
    bound = np.log(4 / 3)
    assert -1.05 * bound < aspect[0] < -0.95 * bound
    assert 0.95 * bound < aspect[-1] < 1.05 * bound
    # Kolmogorov's distance from the uniform distribution, of which 1.63 / sqrt(n) is the 1% bound.
    expected = (aspect + bound) / (2 * bound)
    distance = np.abs(expected - (np.arange(len(aspect)) + 0.5) / len(aspect)).max()
    assert distance < 1.63 / np.sqrt(len(aspect))


def test_crops_of_imagenets_usual_size(draw_windows):
    """Of torchvision's, 0% are beyond [3/4, 4/3], but for rounding; the median area is 0.421.

    An early form of fb.resnet.torch has the root of the aspect in these bounds: 46%, and 0.401.
    """
    height, width = draw_windows(375, 500, 40_000).T[2:]
    ratio = width / height
    assert np.mean((ratio < 0.74) | (ratio > 1.35)) == 0
    assert abs(np.median(height * width) / (375 * 500) - 0.421) < 0.008


def plain_random_resized(height, width, numbers, least):
    """torchvision's ``RandomResizedCrop.get_params``, written anew, with numbers that are given."""
    area = height * width
    for fraction, shape, top, left in numbers.astype(float):
        target = area * (least + (1 - least) * fraction)
        aspect = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * shape)
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return math.floor(top * (height - h + 1)), math.floor(left * (width - w + 1)), h, w
    w, h = width, height
    if width / height < 3 / 4:
        h = round(width / (3 / 4))
    elif width / height > 4 / 3:
        w = round(height * (4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize(("attempts", "least"), [(10, 0.08), (3, 0.08), (2, 0.6)])
def test_random_resized_windows_are_those_of_a_loop(identities, attempts, least):
    random = np.random.RandomState(0)
    sizes = np.exp(random.uniform(0, np.log(700), [1000, 2])).astype(np.int32)
    config = Config(crop_attempts=attempts, crop_min_area=least)
    windows = training_windows(sizes, identities(1000), config).numpy()
    numbers = stateless_random.uniform(identities(1000), "crop", 4 * attempts).numpy()
    numbers = numbers.reshape(1000, 4, attempts)
    expected = [plain_random_resized(*size, n.T, least) for size, n in zip(sizes, numbers)]
    np.testing.assert_array_equal(windows, expected)


def test_inception_windows_have_areas_from_a_tenth_and_small_ones_more_often(inception_windows):
    area = inception_windows[:, 2] * inception_windows[:, 3] / (_HEIGHT * _WIDTH)
    assert 0.1 <= area.min() < 0.105
    assert 0.9 < area.max() <= 1
    # Below 0.45 each window fits. Not areas are uniform, but their roots: below the middle lie
    # (sqrt(0.275) - sqrt(0.1)) / (sqrt(0.45) - sqrt(0.1)) = 0.59.
    fitting = area[area < 0.45]
    assert 0.56 < np.mean(fitting < (0.1 + 0.45) / 2) < 0.62


def test_aspects_of_inception_windows_are_uniform_from_three_quarters_to_four_thirds(
    inception_windows,
):
    height, width = inception_windows.T[2:]
    assert 0.74 < (width / height).min() < 0.76
    assert 1.32 < (width / height).max() < 1.35
    # Below two thirds of the shorter side each ratio fits.
    ratio = (width / height)[(height < 130) & (width < 130) & (height * width > 75**2)]
    assert 0.45 < np.mean(ratio < (3 / 4 + 4 / 3) / 2) < 0.55


def tensorflow_windows(height, width, config, count=4000):
    """Windows that TensorFlow's own operation draws; the whole image where it finds none."""

    def draw(seed):
        corner, shape, _ = tf.image.stateless_sample_distorted_bounding_box(
            [height, width, 3],
            [[[0.0, 0.0, 1.0, 1.0]]],
            seed=tf.stack([seed, 7]),
            min_object_covered=0.1,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(config.crop_min_area, 1.0),
            max_attempts=config.crop_attempts,
        )
        return tf.concat([corner[:2], shape[:2]], 0)

    dataset = tf.data.Dataset.range(count).map(draw).batch(count)
    return dataset.get_single_element().numpy()


def distance(one, other):
    """Returns the largest difference between two samples' distribution functions."""
    values = np.union1d(one, other)
    shares = [np.searchsorted(np.sort(x), values, "right") / len(x) for x in (one, other)]
    return np.abs(shares[0] - shares[1]).max()


@pytest.mark.parametrize("attempts", [1, 10])
@pytest.mark.parametrize("least", [0.08, 0.5])
@pytest.mark.parametrize("size", [(375, 500), (200, 700), (700, 200), (28, 28), (8, 8)])
def test_inception_windows_are_distributed_as_tensorflows(draw_windows, size, least, attempts):
    # The centre, of one pixel, is no window that is drawn.
    config = Config(
        train_crop="inception",
        crop_min_area=least,
        crop_attempts=attempts,
        eval_crop_fraction=1e-6,
    )
    ours = draw_windows(
        *size,
        train_crop="inception",
        crop_min_area=least,
        crop_attempts=attempts,
        eval_crop_fraction=1e-6,
    )
    theirs = tensorflow_windows(*size, config)
    failed = (ours[:, 2:] == 1).all(axis=1), (theirs[:, 2:] == size).all(axis=1)
    rates = [rate.mean() for rate in failed]
    # Five standard errors.
    assert abs(rates[0] - rates[1]) <= 5 * np.sqrt(2 * rates[1] * (1 - rates[1]) / 4000)
    if max(size) > 3 * min(size) and least == 0.5:  # none fits
        assert rates == [1, 1]
        return
    samples = ours[~failed[0]], theirs[~failed[1]]
    # Two samples of 4000 of the same distribution are as far apart in one of 5000 cases.
    tolerance = 2.15 * np.sqrt(2 / 4000)
    for measure in (
        lambda top, left, height, width: height,
        lambda top, left, height, width: width,
        lambda top, left, height, width: height * width,
        lambda top, left, height, width: width / height,
    ):
        assert distance(*(measure(*sample.T) for sample in samples)) < tolerance
    for axis in (0, 1):
        room = [size[axis] - sample[:, 2 + axis] for sample in samples]
        # TensorFlow's operation leaves out the last place.
        places = [room[0] + 1, room[1]]
        # Within a pixel, places are as uniform as one makes them.
        within = np.random.RandomState(axis).uniform(size=4000)
        relative = [
            (sample[:, axis] + within[: len(sample)])[n > 0] / n[n > 0]
            for sample, n in zip(samples, places)
        ]
        assert distance(*relative) < 1.1 * tolerance


@pytest.mark.parametrize("crop", ["random_resized", "inception"])
def test_least_area_is_an_option(draw_windows, crop):
    height, width = draw_windows(_HEIGHT, _WIDTH, train_crop=crop, crop_min_area=0.5).T[2:]
    assert 0.495 < (height * width / (_HEIGHT * _WIDTH)).min() < 0.51


@pytest.mark.parametrize(
    ("shape", "centre"), [((10, 400), [0, 193, 10, 13]), ((400, 10), [193, 0, 13, 10])]
)
def test_middle_is_taken_where_no_window_fits(draw_windows, shape, centre):
    assert (draw_windows(*shape, 500) == centre).all()


@pytest.mark.parametrize(
    ("shape", "centre"),
    [
        ((10, 400), [1, 196, 9, 9]),
        ((400, 10), [196, 1, 9, 9]),
        ((1, 1), [0, 0, 1, 1]),
        ((1, 50), [0, 25, 1, 1]),
    ],
)
def test_centre_as_in_evaluation_is_taken_where_no_inception_window_fits(
    draw_windows, shape, centre
):
    assert (draw_windows(*shape, 500, train_crop="inception") == centre).all()


@pytest.mark.parametrize("crop", ["random_resized", "inception"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 2), (3, 1), (5, 4)])
def test_windows_of_tiny_images_have_pixels(draw_windows, crop, shape):
    top, left, height, width = draw_windows(*shape, train_crop=crop).T
    assert (top >= 0).all() and (left >= 0).all() and (height >= 1).all() and (width >= 1).all()
    assert (top + height <= shape[0]).all() and (left + width <= shape[1]).all()


@pytest.mark.parametrize("crop", ["random_resized", "inception"])
def test_attempts_are_an_option(draw_windows, crop):
    # Few windows of half of an image twice as wide as high fit.
    def at_centre(attempts):
        changes = {"crop_min_area": 0.5, "eval_crop_fraction": 1.0, "crop_attempts": attempts}
        windows = draw_windows(60, 120, 1000, train_crop=crop, **changes)
        middle = {"random_resized": [0, 20, 60, 80], "inception": [0, 30, 60, 60]}[crop]
        return np.mean((windows == middle).all(axis=1))

    assert at_centre(1) > 0.4
    assert at_centre(100) < at_centre(1) / 2


@pytest.mark.parametrize("crop", ["random_resized", "inception", "pad", "none"])
def test_window_is_a_function_of_size_and_identity_alone(identities, crop):
    random = np.random.RandomState(0)
    sizes = random.randint(1, 600, [1000, 2]).astype(np.int32)
    config = Config(train_crop=crop)
    windows = training_windows(sizes, identities(1000), config).numpy()
    if crop in ("random_resized", "inception"):
        assert len(np.unique(windows, axis=0)) > 950
        for changes in ({"seed": 4}, {"epoch": 6}):
            other = training_windows(sizes, identities(1000, **changes), config).numpy()
            assert (other != windows).any(axis=1).mean() > 0.8
    else:
        np.testing.assert_array_equal(windows, evaluation_windows(tf.constant(sizes), config))
    tf.random.set_seed(1)
    # Also whatever the batch, in a graph.
    dataset = tf.data.Dataset.from_tensor_slices((sizes, identities(1000)))
    for batch_size in (1, 7):
        batches = dataset.batch(batch_size).map(lambda *batch: training_windows(*batch, config))
        np.testing.assert_array_equal(np.concatenate(list(batches.as_numpy_iterator())), windows)


def test_windows_of_several_images_are_those_of_each():
    sizes = [[8, 8], [61, 40], [3, 200]]
    windows = evaluation_windows(tf.constant(sizes), Config()).numpy()
    assert windows.dtype == np.int32
    for size, window in zip(sizes, windows):
        np.testing.assert_array_equal(evaluation_windows(tf.constant([size]), Config())[0], window)
