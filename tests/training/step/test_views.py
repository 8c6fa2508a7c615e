"""Mean answers over views of an image."""

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.training.step.views import logits_over_views, mean_over_views

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
    six = [images, up_left, down_right]
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
        # Hiverge's speedrun: a plain mean.
        "flip_and_shift_equally": [(1 / 6, view[:, :, ::d]) for view in six for d in (1, -1)],
    }


@pytest.mark.parametrize("views", ["none", "flip", "flip_and_shift", "flip_and_shift_equally"])
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


# --- The least certain images


MATRIX = np.random.default_rng(2).normal(size=(6 * 5 * 2, 4)).astype("float32")
MANY = np.random.default_rng(3).normal(size=(20, 6, 5, 2)).astype("float32")


def logits_of(images):
    return tf.reshape(tf.square(images), [-1, MATRIX.shape[0]]) @ MATRIX


def expected_logits(fraction, real):
    """Hiverge's selective test-time augmentation, in NumPy."""
    logits = logits_of(MANY).numpy()
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    confidence = (exponentials / exponentials.sum(axis=1, keepdims=True)).max(axis=1)
    chosen = [i for i in np.argsort(confidence) if real[i]][: round(fraction * len(MANY))]
    views = expected_views(MANY[chosen])["flip_and_shift"]
    logits[chosen] = sum(weight * logits_of(view).numpy() for weight, view in views)
    return logits, set(chosen)


@pytest.mark.parametrize("size", [20, None])
def test_views_of_the_least_certain_images(size):
    real = np.arange(20) % 3 > 0  # the others are padding
    spec = tf.TensorSpec([size, 6, 5, 2], tf.float32)
    function = tf.function(
        lambda images: logits_over_views(
            logits_of, images, "flip_and_shift", 0.25, tf.constant(real, tf.float32)
        ),
        input_signature=[spec],
    )
    expected, chosen = expected_logits(0.25, real)
    np.testing.assert_allclose(function(MANY), expected, rtol=1e-4, atol=1e-5)
    own = logits_of(MANY).numpy()
    changed = np.abs(function(MANY) - own).max(axis=1) > 1e-3
    assert set(np.flatnonzero(changed)) == chosen and len(chosen) == 5
    assert not any(np.array_equal(logits, own) for logits in (expected, expected_logits(1, real)))


def test_at_least_one_image_and_all_of_them():
    one = logits_over_views(logits_of, tf.constant(MANY), "flip", 0.001)
    own, mean = logits_of(MANY), mean_over_views(logits_of, tf.constant(MANY), "flip")
    assert (np.abs(one - own).max(axis=1) > 0).sum() == 1
    np.testing.assert_array_equal(logits_over_views(logits_of, MANY, "flip"), mean)
    np.testing.assert_allclose(
        logits_over_views(logits_of, tf.constant(MANY), "flip", 0.999), mean, rtol=1e-4, atol=1e-5
    )
