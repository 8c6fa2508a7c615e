"""Mean answers over views of an image."""

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.training.views import mean_over_views

IMAGES = np.random.default_rng(0).normal(size=(3, 6, 5, 2)).astype("float32")
WEIGHTS = np.random.default_rng(1).normal(size=(6, 5, 2)).astype("float32")


def answer(images):
    """Tells any two views apart, and is not linear."""
    return tf.reduce_sum(tf.square(images * WEIGHTS), axis=[1, 2, 3])


def expected_views(images):
    """Page's two views and Jordan's six, with their weights."""
    framed = np.pad(images, [(0, 0), (1, 1), (1, 1), (0, 0)], "reflect")
    up_left, down_right = framed[:, :6, :5], framed[:, 2:, 2:]
    flipped = images[:, :, ::-1]
    return {
        "none": [(1, images)],
        "flip": [(0.5, images), (0.5, flipped)],
        "flip_and_shift": [
            (0.25, images),
            (0.25, flipped),
            (0.125, up_left),
            (0.125, up_left[:, :, ::-1]),
            (0.125, down_right),
            (0.125, down_right[:, :, ::-1]),
        ],
    }


@pytest.mark.parametrize("views", ["none", "flip", "flip_and_shift"])
def test_weighted_mean_over_the_views(views):
    expected = sum(share * answer(view) for share, view in expected_views(IMAGES)[views])
    found = mean_over_views(answer, tf.constant(IMAGES), views)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_functions_with_several_results():
    one, two = mean_over_views(lambda x: (answer(x), 2 * answer(x)), tf.constant(IMAGES), "flip")
    np.testing.assert_allclose(two, 2 * one, rtol=1e-6)


def test_views_of_pixels_are_pixels():
    pixels = tf.constant(np.arange(2 * 4 * 4 * 3).reshape(2, 4, 4, 3), tf.uint8)
    seen = []
    mean_over_views(lambda x: seen.append(x) or tf.zeros([2]), pixels, "flip_and_shift")
    assert len(seen) == 6 and {view.dtype for view in seen} == {tf.uint8}
