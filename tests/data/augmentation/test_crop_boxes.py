"""Crop boxes compared with a plain loop, formulas and TensorFlow's own op."""

import math

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import Config
from imagenet_fast.data.augmentation import stateless_random
from imagenet_fast.data.augmentation.crop_boxes import evaluation_crop_boxes, training_crop_boxes

_HEIGHT, _WIDTH = 200, 240


@pytest.fixture(scope="module")
def draw_boxes(identities):
    """Draws boxes of equally large images: draw_boxes(height, width, count=4000, **config)."""

    def draw(height, width, count=4000, **changes):
        sizes = np.full([count, 2], [height, width], np.int32)
        boxes = training_crop_boxes(sizes, identities(count), Config(**changes))
        assert boxes.shape == (count, 4) and boxes.dtype == tf.int32
        return boxes.numpy()

    return draw


@pytest.fixture(scope="module")
def boxes(draw_boxes):
    """Crop boxes of 4000 random_resized crops."""
    return draw_boxes(_HEIGHT, _WIDTH)


@pytest.fixture(scope="module")
def inception_boxes(draw_boxes):
    """Crop boxes of 4000 inception crops."""
    return draw_boxes(_HEIGHT, _WIDTH, train_crop="inception")


@pytest.mark.parametrize("crop", ["boxes", "inception_boxes"])
def test_random_crops_lie_uniformly_within_the_image(crop, request):
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


def test_areas_are_uniform_from_the_minimum_to_the_whole_image(boxes):
    area = boxes[:, 2] * boxes[:, 3] / (_HEIGHT * _WIDTH)
    assert 0.078 < area.min() < 0.083
    assert 0.95 < area.max() <= 1
    # Below 0.45, a box of any aspect ratio fits, so that no area is redrawn.
    fitting = area[area < 0.45]
    assert 0.46 < np.mean(fitting < (0.08 + 0.45) / 2) < 0.54


def test_aspect_ratios_are_log_uniform_between_three_quarters_and_four_thirds(boxes):
    fitting = boxes[boxes[:, 2] * boxes[:, 3] < 0.45 * _HEIGHT * _WIDTH]
    large = fitting[fitting[:, 2] * fitting[:, 3] > 75**2]  # where rounding matters little
    aspect = np.sort(np.log(large[:, 3] / large[:, 2]))
    bound = np.log(4 / 3)
    assert -1.05 * bound < aspect[0] < -0.95 * bound
    assert 0.95 * bound < aspect[-1] < 1.05 * bound
    # The Kolmogorov-Smirnov distance from the uniform distribution; 1.63 / sqrt(n) is its 1% level.
    expected = (aspect + bound) / (2 * bound)
    distance = np.abs(expected - (np.arange(len(aspect)) + 0.5) / len(aspect)).max()
    assert distance < 1.63 / np.sqrt(len(aspect))


def test_crops_of_imagenets_most_common_size(draw_boxes):
    """torchvision's aspect ratios lie in [3/4, 4/3], up to rounding; the median area is 0.421.

    An early version of fb.resnet.torch bounds the square root of the aspect ratio instead: 46% lie
    outside, and the median is 0.401.
    """
    height, width = draw_boxes(375, 500, 40_000).T[2:]
    ratio = width / height
    assert np.mean((ratio < 0.74) | (ratio > 1.35)) == 0
    assert abs(np.median(height * width) / (375 * 500) - 0.421) < 0.008


def random_resized_loop(height, width, numbers, min_area):
    """Reimplements torchvision's ``RandomResizedCrop.get_params`` for given random numbers."""
    area = height * width
    for fraction, shape, top, left in numbers.astype(float):
        target = area * (min_area + (1 - min_area) * fraction)
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


@pytest.mark.parametrize(("attempts", "min_area"), [(10, 0.08), (3, 0.08), (2, 0.6)])
def test_random_resized_boxes_equal_a_plain_loop(identities, attempts, min_area):
    random = np.random.RandomState(0)
    sizes = np.exp(random.uniform(0, np.log(700), [1000, 2])).astype(np.int32)
    config = Config(crop_attempts=attempts, crop_min_area=min_area)
    boxes = training_crop_boxes(sizes, identities(1000), config).numpy()
    numbers = stateless_random.uniform(identities(1000), "crop", 4 * attempts).numpy()
    numbers = numbers.reshape(1000, 4, attempts)
    expected = [random_resized_loop(*size, n.T, min_area) for size, n in zip(sizes, numbers)]
    np.testing.assert_array_equal(boxes, expected)


def test_inception_areas_start_at_a_tenth_and_favour_small_ones(inception_boxes):
    area = inception_boxes[:, 2] * inception_boxes[:, 3] / (_HEIGHT * _WIDTH)
    assert 0.1 <= area.min() < 0.105
    assert 0.9 < area.max() <= 1
    # Below 0.45, every box fits. The square roots of areas are uniform, so that the fraction below
    # the middle is (sqrt(0.275) - sqrt(0.1)) / (sqrt(0.45) - sqrt(0.1)) = 0.59.
    fitting = area[area < 0.45]
    assert 0.56 < np.mean(fitting < (0.1 + 0.45) / 2) < 0.62


def test_inception_aspect_ratios_are_uniform_between_three_quarters_and_four_thirds(
    inception_boxes,
):
    height, width = inception_boxes.T[2:]
    assert 0.74 < (width / height).min() < 0.76
    assert 1.32 < (width / height).max() < 1.35
    # Up to two thirds of the shorter side, every aspect ratio fits.
    ratio = (width / height)[(height < 130) & (width < 130) & (height * width > 75**2)]
    assert 0.45 < np.mean(ratio < (3 / 4 + 4 / 3) / 2) < 0.55


def tensorflow_boxes(height, width, config, count=4000):
    """Draws boxes with TensorFlow's own op; it returns the whole image if no box fits."""

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
    cdfs = [np.searchsorted(np.sort(x), values, "right") / len(x) for x in (one, other)]
    return np.abs(cdfs[0] - cdfs[1]).max()


@pytest.mark.parametrize("attempts", [pytest.param(1, marks=pytest.mark.long), 10])
@pytest.mark.parametrize("min_area", [0.08, 0.5])
@pytest.mark.parametrize("size", [(375, 500), (200, 700), (700, 200), (28, 28), (8, 8)])
def test_inception_boxes_are_distributed_as_tensorflows(draw_boxes, size, min_area, attempts):
    # The fallback is one pixel, which no drawn box is.
    config = Config(
        train_crop="inception",
        crop_min_area=min_area,
        crop_attempts=attempts,
        eval_crop_fraction=1e-6,
    )
    ours = draw_boxes(
        *size,
        train_crop="inception",
        crop_min_area=min_area,
        crop_attempts=attempts,
        eval_crop_fraction=1e-6,
    )
    theirs = tensorflow_boxes(*size, config)
    failed = (ours[:, 2:] == 1).all(axis=1), (theirs[:, 2:] == size).all(axis=1)
    ours_failed, theirs_failed = (one.mean() for one in failed)
    # Five standard errors.
    tolerance = 5 * np.sqrt(2 * theirs_failed * (1 - theirs_failed) / 4000)
    assert abs(ours_failed - theirs_failed) <= tolerance
    if max(size) > 3 * min(size) and min_area == 0.5:  # none fits
        assert ours_failed == theirs_failed == 1
        return
    samples = ours[~failed[0]], theirs[~failed[1]]
    # Two samples of 4000 from the same distribution are farther apart in 1 of 5000 cases.
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
        # TensorFlow's op never draws the last position.
        positions = [room[0] + 1, room[1]]
        # Random fractions of a pixel make the relative positions continuous.
        within = np.random.RandomState(axis).uniform(size=4000)
        relative = [
            (sample[:, axis] + within[: len(sample)])[n > 0] / n[n > 0]
            for sample, n in zip(samples, positions)
        ]
        assert distance(*relative) < 1.1 * tolerance


@pytest.mark.parametrize("crop", ["random_resized", "inception"])
def test_crop_min_area(draw_boxes, crop):
    height, width = draw_boxes(_HEIGHT, _WIDTH, train_crop=crop, crop_min_area=0.5).T[2:]
    assert 0.495 < (height * width / (_HEIGHT * _WIDTH)).min() < 0.51


@pytest.mark.parametrize(
    ("shape", "centre"), [((10, 400), [0, 193, 10, 13]), ((400, 10), [193, 0, 13, 10])]
)
def test_largest_centre_box_is_the_fallback(draw_boxes, shape, centre):
    assert (draw_boxes(*shape, 500) == centre).all()


@pytest.mark.parametrize(
    ("shape", "centre"),
    [
        ((10, 400), [1, 196, 9, 9]),
        ((400, 10), [196, 1, 9, 9]),
        ((1, 1), [0, 0, 1, 1]),
        ((1, 50), [0, 25, 1, 1]),
    ],
)
def test_evaluations_square_is_the_fallback_of_inception_boxes(draw_boxes, shape, centre):
    assert (draw_boxes(*shape, 500, train_crop="inception") == centre).all()


@pytest.mark.parametrize("crop", ["random_resized", "inception"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 2), (3, 1), (5, 4)])
def test_boxes_of_tiny_images_are_not_empty(draw_boxes, crop, shape):
    top, left, height, width = draw_boxes(*shape, train_crop=crop).T
    assert (top >= 0).all() and (left >= 0).all() and (height >= 1).all() and (width >= 1).all()
    assert (top + height <= shape[0]).all() and (left + width <= shape[1]).all()


@pytest.mark.parametrize("crop", ["random_resized", "inception"])
def test_crop_attempts(draw_boxes, crop):
    # Half of the area of an image twice as wide as high: few boxes fit.
    def at_centre(attempts):
        changes = {"crop_min_area": 0.5, "eval_crop_fraction": 1.0, "crop_attempts": attempts}
        boxes = draw_boxes(60, 120, 1000, train_crop=crop, **changes)
        middle = {"random_resized": [0, 20, 60, 80], "inception": [0, 30, 60, 60]}[crop]
        return np.mean((boxes == middle).all(axis=1))

    assert at_centre(1) > 0.4
    assert at_centre(100) < at_centre(1) / 2


@pytest.mark.parametrize(
    "crop", ["random_resized", pytest.param("inception", marks=pytest.mark.long), "pad", "none"]
)
def test_box_depends_on_size_and_identity_only(identities, crop):
    random = np.random.RandomState(0)
    sizes = random.randint(1, 600, [1000, 2]).astype(np.int32)
    config = Config(train_crop=crop)
    boxes = training_crop_boxes(sizes, identities(1000), config).numpy()
    if crop in ("random_resized", "inception"):
        assert len(np.unique(boxes, axis=0)) > 950
        for changes in ({"seed": 4}, {"epoch": 6}):
            other = training_crop_boxes(sizes, identities(1000, **changes), config).numpy()
            assert (other != boxes).any(axis=1).mean() > 0.8
    else:
        np.testing.assert_array_equal(boxes, evaluation_crop_boxes(tf.constant(sizes), config))
    tf.random.set_seed(1)
    # In a graph, and for other batch sizes, too.
    dataset = tf.data.Dataset.from_tensor_slices((sizes, identities(1000)))
    for batch_size in (1, 7):
        batches = dataset.batch(batch_size).map(lambda *batch: training_crop_boxes(*batch, config))
        np.testing.assert_array_equal(np.concatenate(list(batches.as_numpy_iterator())), boxes)


@pytest.mark.parametrize("fraction", [0.875, 0.5, 0.301, 1.0])
@pytest.mark.parametrize("shape", [(375, 500), (500, 375), (1, 1), (7, 5), (480, 481), (2, 999)])
def test_proportional_crops_are_those_of_central_crop(shape, fraction):
    config = Config(eval_crop="proportional", eval_crop_fraction=fraction)
    ((top, left, height, width),) = evaluation_crop_boxes(tf.constant([shape]), config).numpy()
    rows, columns = np.meshgrid(*map(np.arange, shape), indexing="ij")
    places = tf.image.central_crop(np.stack([rows, columns], axis=-1), fraction).numpy()
    assert places.shape == (height, width, 2)
    assert tuple(places[0, 0]) == (top, left)


def test_boxes_of_a_batch_equal_those_of_each_image():
    sizes = [[8, 8], [61, 40], [3, 200]]
    boxes = evaluation_crop_boxes(tf.constant(sizes), Config()).numpy()
    assert boxes.dtype == np.int32
    for size, box in zip(sizes, boxes):
        np.testing.assert_array_equal(evaluation_crop_boxes(tf.constant([size]), Config())[0], box)
