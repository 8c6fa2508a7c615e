import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import Config
from imagenet_fast.data.augment import augment, color_jitter, lighting

GREY = np.array([0.299, 0.587, 0.114])
# fb.resnet.torch, datasets/imagenet.lua.
EIGENVALUES = np.array([0.2175, 0.0188, 0.0045])
EIGENVECTORS = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
)


def over_seeds(function, seeds):
    """Returns ``function(seed)`` for so many seeds, stacked."""
    dataset = tf.data.Dataset.range(seeds).map(
        lambda seed: function(tf.stack([tf.cast(seed, tf.int32), 9]))
    )
    return np.stack(list(dataset.as_numpy_iterator()))


def noise(height=6, width=5):
    return np.random.RandomState(3).randint(0, 256, (height, width, 3)).astype(np.uint8)


# --- Flip -----------------------------------------------------------------------------------------


def test_half_of_the_images_are_mirrored():
    image = noise()
    images = over_seeds(lambda seed: augment(image, seed, Config()), 400)
    same = (images == image).all(axis=(1, 2, 3))
    mirrored = (images == image[:, ::-1]).all(axis=(1, 2, 3))
    assert (same ^ mirrored).all()
    assert 0.4 < mirrored.mean() < 0.6


def test_nothing_asked_for_nothing_done():
    image = noise()
    images = over_seeds(lambda seed: augment(image, seed, Config(flip=False)), 20)
    assert (images == image).all() and images.dtype == np.uint8


# --- Colour jitter --------------------------------------------------------------------------------

STRENGTH = 0.4


@pytest.fixture(scope="module")
def shares():
    """The shares of 300 seeds: brightness, contrast and saturation, [300] each.

    Each comes from an image on which the others do nothing that is not known: on a grey area only
    brightness acts, between two greys contrast too, on a coloured area saturation and contrast.
    """

    def measure(pixels):
        pixels = np.array([pixels], np.float32)
        return over_seeds(lambda seed: color_jitter(pixels, STRENGTH, seed), 300)[:, 0]

    brightness = measure([[100, 100, 100]])[:, 0, 0] / 100
    two = measure([[50, 50, 50], [150, 150, 150]])[..., 0]
    contrast = (two[:, 1] - two[:, 0]) / 100 / brightness
    colour = measure([[200, 100, 50]])[:, 0]
    saturation = (colour[:, 0] - colour[:, 2]) / 150 / brightness / contrast
    return brightness, contrast, saturation


def test_shares_are_drawn_evenly_around_one(shares):
    for share in shares:
        assert share.min() >= 1 - STRENGTH - 1e-4 and share.max() <= 1 + STRENGTH + 1e-4
        assert share.min() < 0.65 and share.max() > 1.35
        assert abs(share.mean() - 1) < 0.05
        assert abs(share.std() - STRENGTH / np.sqrt(3)) < 0.02


def test_shares_are_independent(shares):
    correlation = np.corrcoef(shares)
    assert np.abs(correlation - np.eye(3)).max() < 0.15


def test_jitter_equals_numpy(shares):
    image = noise().astype(np.float32)
    images = over_seeds(lambda seed: color_jitter(image, STRENGTH, seed), 300)

    def brightness(pixels, share):
        return share * pixels

    def contrast(pixels, share):
        return share * pixels + (1 - share) * (pixels @ GREY).mean()

    def saturation(pixels, share):
        return share * pixels + (1 - share) * (pixels @ GREY)[..., None]

    # Without clipping in between, the order does not matter: the mean of greys is the grey of the
    # mean, and a pixel's grey is its own grey's grey.
    for image_of_seed, b, c, s in zip(images, *shares):
        one = saturation(contrast(brightness(image, b), c), s)
        other = brightness(contrast(saturation(image, s), c), b)
        np.testing.assert_allclose(one, other, atol=1e-3)
        np.testing.assert_allclose(image_of_seed, one, atol=0.05)


def test_jitter_leaves_the_mean_image(shares):
    image = noise().astype(np.float32)
    images = over_seeds(lambda seed: color_jitter(image, STRENGTH, seed), 1000)
    np.testing.assert_allclose(images.mean(axis=0), image, atol=8)
    assert (images.std(axis=0) > 5).all()


def test_strength_is_an_option():
    pixels = np.full([1, 1, 3], 100, np.float32)
    weak = over_seeds(lambda seed: color_jitter(pixels, 0.1, seed), 200)
    assert 89.9 < weak.min() < 92 and 108 < weak.max() < 110.1


def test_jittered_images_are_clipped():
    white = np.full([4, 4, 3], 255, np.uint8)
    config = Config(color_jitter=0.5, flip=False)
    images = over_seeds(lambda seed: augment(white, seed, config), 200)
    assert images.dtype == np.uint8 and images.shape[1:] == (4, 4, 3)
    assert 127 <= images.min() < 140
    assert 0.35 < (images == 255).all(axis=(1, 2, 3)).mean() < 0.65


# --- Lighting -------------------------------------------------------------------------------------


def test_lighting_adds_one_colour_along_the_principal_components():
    image = noise().astype(np.float32)
    images = over_seeds(lambda seed: lighting(image, 0.1, seed), 1000)
    added = images - image
    np.testing.assert_allclose(added, np.broadcast_to(added[:, :1, :1], added.shape), atol=1e-3)
    amounts = np.linalg.solve(EIGENVECTORS, added[:, 0, 0].T / 255).T / EIGENVALUES
    assert np.abs(amounts.mean(axis=0)).max() < 0.02
    np.testing.assert_allclose(amounts.std(axis=0), 0.1, rtol=0.1)
    assert np.abs(np.corrcoef(amounts.T) - np.eye(3)).max() < 0.15


def test_lighting_equals_numpy():
    seed = [4, 2]
    amounts = tf.random.stateless_normal([3], seed, stddev=0.5).numpy()
    image = noise().astype(np.float32)
    expected = image + 255 * (EIGENVECTORS * amounts * EIGENVALUES).sum(axis=1)
    np.testing.assert_allclose(lighting(image, 0.5, seed), expected, rtol=1e-5)


def test_lit_images_are_clipped():
    config = Config(lighting=2.0, flip=False)
    for value in (0, 255):
        image = np.full([2, 2, 3], value, np.uint8)
        images = over_seeds(lambda seed, image=image: augment(image, seed, config), 100).astype(int)
        # Each noise pushes all three colours the same way, or nearly; half of it is clipped.
        assert 0.25 < (images == value).mean() < 0.75


# --- All together ---------------------------------------------------------------------------------


def test_augmentation_is_a_function_of_the_seed():
    image = noise()
    config = Config(color_jitter=0.4, lighting=0.1)
    images = over_seeds(lambda seed: augment(image, seed, config), 50)
    tf.random.set_seed(1)
    again = over_seeds(lambda seed: augment(image, seed, config), 50)
    np.testing.assert_array_equal(images, again)
    assert len({image.tobytes() for image in images}) == 50


def test_changes_are_independent_of_each_other():
    # One colour in the left half, so that a flip can be told from brightness.
    image = np.zeros([2, 2, 3], np.uint8)
    image[:, 0] = 100
    config = Config(color_jitter=0.4)
    images = over_seeds(lambda seed: augment(image, seed, config), 400).astype(float)
    mirrored = images[:, 0, 1, 0] > images[:, 0, 0, 0]
    brightness = images[:, 0].sum(axis=(1, 2))
    assert abs(np.corrcoef(mirrored, brightness)[0, 1]) < 0.15


@pytest.mark.parametrize("options", [{}, {"color_jitter": 0.4, "lighting": 0.1}])
def test_shape_is_kept(options):
    dataset = tf.data.Dataset.from_tensors(noise(8, 6))
    dataset = dataset.map(lambda image: augment(image, [1, 2], Config(**options)))
    assert dataset.element_spec == tf.TensorSpec([8, 6, 3], tf.uint8)
