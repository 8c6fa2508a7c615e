import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from imagenet_fast import Config
from imagenet_fast.data.augmentation import stateless_random
from imagenet_fast.data.augmentation.augment import (
    augment,
    change_light,
    color_jitter,
    draw_changes,
    lighting,
    shift,
    shift_chroma,
)

GREY = np.array([0.299, 0.587, 0.114])
# fb.resnet.torch, datasets/imagenet.lua.
EIGENVALUES = np.array([0.2175, 0.0188, 0.0045])
EIGENVECTORS = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
)


def noise(height=6, width=5):
    return np.random.RandomState(3).randint(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def drawn(identities):
    """Changes of images: drawn(count=4000, **config), each an array [count, ...]."""

    def draw(count=4000, **config):
        changes = draw_changes(identities(count), Config(**config))
        return {name: change.numpy() for name, change in changes.items()}

    return draw


@pytest.fixture(scope="module")
def augmented(identities):
    """One image, changed as often: augmented(image, count, **config), uint8 [count, ...]."""

    def change(image, count, **config):
        config = Config(**config)
        dataset = tf.data.Dataset.from_tensors(draw_changes(identities(count), config)).unbatch()
        dataset = dataset.map(lambda changes: augment(image, changes, config))
        return np.stack(list(dataset.as_numpy_iterator()))

    return change


def plain_jitter(image, brightness, contrast, saturation):
    image = saturation * image + (1 - saturation) * (image @ GREY)[..., None]
    image = contrast * image + (1 - contrast) * (image @ GREY).mean()
    return brightness * image


def plain_lighting(image, amounts):
    return image + 255 * (EIGENVECTORS * amounts * EIGENVALUES).sum(axis=1)


def assert_uncorrelated(columns):
    """Checks that the correlations of columns [count, columns] are within five standard errors."""
    correlation = np.corrcoef(columns.T) - np.eye(columns.shape[1])
    assert np.abs(correlation).max() < 5 / np.sqrt(len(columns))


# --- Flip -----------------------------------------------------------------------------------------


def test_half_of_the_images_are_flipped(augmented, drawn):
    image = noise()
    images = augmented(image, 400)
    same = (images == image).all(axis=(1, 2, 3))
    flipped = (images == image[:, ::-1]).all(axis=(1, 2, 3))
    assert (same ^ flipped).all()
    np.testing.assert_array_equal(flipped, drawn(400)["flip"])
    assert 0.46 < drawn()["flip"].mean() < 0.54


def test_no_augmentation_by_default():
    config = Config(flip=False)
    image = noise()
    assert draw_changes(tf.zeros([3, 3], tf.int64), config) == {}
    same = augment(tf.constant(image), {}, config)
    assert same.dtype == tf.uint8
    np.testing.assert_array_equal(same, image)


# --- Shift ----------------------------------------------------------------------------------------


def test_shift_crops_the_padded_image():
    image = noise(4, 7)
    framed = np.pad(image, [(2, 2), (2, 2), (0, 0)])
    for top in range(5):
        for left in range(5):
            window = shift(tf.constant(image), 2, tf.constant([top, left]))
            np.testing.assert_array_equal(window, framed[top : top + 4, left : left + 7])


def test_shifts_are_uniform(drawn):
    corners = drawn(train_crop="pad", crop_padding=2)["shift"]
    assert corners.dtype == np.int32 and corners.shape == (4000, 2)
    places, counts = np.unique(corners, axis=0, return_counts=True)
    np.testing.assert_array_equal(places, [(top, left) for top in range(5) for left in range(5)])
    assert counts.min() > 110 and counts.max() < 220  # 160 on average


def test_shift_fills_with_zeros(augmented, drawn):
    image = noise()
    options = {"train_crop": "pad", "crop_padding": 3, "flip": False}
    framed = np.pad(image, [(3, 3), (3, 3), (0, 0)])
    images = augmented(image, 50, **options)
    for shifted, (top, left) in zip(images, drawn(50, **options)["shift"]):
        np.testing.assert_array_equal(shifted, framed[top : top + 6, left : left + 5])


def test_no_shift_without_padding(drawn):
    assert not drawn(100, train_crop="pad", crop_padding=0)["shift"].any()


# --- Colour jitter --------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.1, 0.4])
def test_jitter_factors_are_uniform_around_one(drawn, strength):
    shares = drawn(color_jitter=strength)["jitter"]
    assert shares.shape == (4000, 3)
    for share in shares.T:
        assert 1 - strength <= share.min() < 1 - 0.99 * strength
        assert 1 + 0.99 * strength < share.max() <= 1 + strength
        assert abs(share.mean() - 1) < 0.03 * strength
        assert abs(share.std() - strength / np.sqrt(3)) < 0.02 * strength
    assert_uncorrelated(shares)


def test_jitter_factors_are_brightness_contrast_and_saturation():
    grey = np.full([1, 1, 3], 100, np.float32)
    np.testing.assert_allclose(color_jitter(grey, [0.7, 1.3, 1.2]), 0.7 * grey, rtol=1e-5)
    greys = np.array([[[50] * 3, [150] * 3]], np.float32)
    np.testing.assert_allclose(
        color_jitter(greys, [1.0, 0.8, 1.2]), [[[60] * 3, [140] * 3]], rtol=1e-5
    )
    colour = np.array([[[200, 100, 50]]], np.float32)
    own_grey = colour @ GREY.astype(np.float32)
    np.testing.assert_allclose(
        color_jitter(colour, [1.0, 1.0, 0.6]), 0.6 * colour + 0.4 * own_grey[..., None], rtol=1e-5
    )


def test_jitter_equals_numpy_in_any_order(drawn):
    image = noise().astype(np.float32)

    def brightness(pixels, share):
        return share * pixels

    def contrast(pixels, share):
        return share * pixels + (1 - share) * (pixels @ GREY).mean()

    def saturation(pixels, share):
        return share * pixels + (1 - share) * (pixels @ GREY)[..., None]

    # Without clipping in between, the order does not matter: the mean of greys is the grey of the
    # mean, and a pixel's grey is its own grey's grey.
    for b, c, s in drawn(50, color_jitter=0.4)["jitter"]:
        one = saturation(contrast(brightness(image, b), c), s)
        other = brightness(contrast(saturation(image, s), c), b)
        np.testing.assert_allclose(one, other, atol=1e-3)
        np.testing.assert_allclose(color_jitter(image, [b, c, s]), one, atol=1e-2)


def test_chroma_is_added_to_cb_and_cr(drawn, augmented):
    """tensorflow/tpu's distort_color_fast; Pillow's YCbCr has the same coefficients."""
    shifts = drawn(chroma=0.1)["chroma"]
    np.testing.assert_allclose((shifts.min(), shifts.max()), (-0.1, 0.1), atol=1e-3)
    assert abs(shifts.mean()) < 5 * 0.1 / np.sqrt(3 * shifts.size)
    assert_uncorrelated(shifts)
    image = np.full((1, 1, 3), 128, np.uint8) + np.arange(-20, 30, 20, dtype=np.int8)
    for cb, cr in shifts[:20]:
        shifted = shift_chroma(tf.cast(image, tf.float32), tf.constant([cb, cr])).numpy()
        before, after = (
            np.array(Image.fromarray(pixels.round().astype(np.uint8)).convert("YCbCr"), float)
            for pixels in (image, shifted)
        )
        # Both are rounded, in both color spaces.
        np.testing.assert_allclose((after - before)[0, 0], [0, 255 * cb, 255 * cr], atol=1.6)
    images = augmented(np.full((2, 2, 3), 250, np.uint8), 50, chroma=0.3, flip=False)
    assert images.max() == 255 and images.min() < 200


def test_light_equals_numpy_on_normalized_pixels(drawn):
    """Hiverge's batch_color_jitter: all normalized pixels plus a shift, times a factor."""
    config = Config(brightness=0.14, contrast=0.13, pixel_mean=(125, 123, 114))
    changes = drawn(brightness=0.14, contrast=0.13)["light"]
    shifts, factors = changes.T
    for values, centre, width in ((shifts, 0, 0.14), (factors, 1, 0.13)):
        np.testing.assert_allclose(
            (values.min(), values.max()), (centre - width, centre + width), atol=0.01 * width
        )
        assert abs(values.mean() - centre) < 5 * width / np.sqrt(3 * len(values))
    assert_uncorrelated(changes)
    images = np.stack([noise(), noise()[::-1]]).astype("float32")
    mean, std = np.array(config.pixel_mean), np.array(config.pixel_std)
    for shift_, factor in changes[:3]:
        normalized = ((images - mean) / std + shift_) * factor
        found = change_light(images, np.float32([[shift_, factor]] * 2), config)
        np.testing.assert_allclose((found - mean) / std, normalized, atol=1e-5)


def test_light_alone(drawn, augmented):
    assert (drawn(brightness=0.3)["light"][:, 1] == 1).all()
    assert (drawn(contrast=0.3)["light"][:, 0] == 0).all()
    images = augmented(np.full((4, 4, 3), 250, np.uint8), 100, brightness=0.5, flip=False)
    # In units of pixel_std, clipped to 255.
    assert images.max() == 255 and 218 <= images.min() <= 224


def test_jittered_images_are_clipped(augmented):
    white = np.full([4, 4, 3], 255, np.uint8)
    images = augmented(white, 200, color_jitter=0.5, flip=False)
    assert images.dtype == np.uint8 and images.shape[1:] == (4, 4, 3)
    assert 127 <= images.min() < 140
    assert 0.35 < (images == 255).all(axis=(1, 2, 3)).mean() < 0.65


# --- Lighting -------------------------------------------------------------------------------------


def test_lighting_is_normal(drawn):
    amounts = drawn(lighting=0.1)["lighting"]
    assert amounts.shape == (4000, 3) and amounts.dtype == np.float32
    assert np.abs(amounts.mean(axis=0)).max() < 0.1 * 5 / np.sqrt(4000)
    np.testing.assert_allclose(amounts.std(axis=0), 0.1, rtol=0.05)
    for deviations, within in ((0.5, 0.383), (1, 0.683), (2, 0.954)):
        assert abs(np.mean(np.abs(amounts) < 0.1 * deviations) - within) < 0.02
    assert_uncorrelated(amounts)


def test_lighting_is_finite_for_extreme_random_numbers(monkeypatch):
    config = Config(lighting=1.0)
    for number, amount in ((0.0, -5.42), (1 - 2.0**-24, 5.29)):
        numbers = tf.fill([2, 3], tf.constant(number, tf.float32))
        monkeypatch.setattr(stateless_random, "uniform", lambda *_, numbers=numbers: numbers)
        amounts = draw_changes(tf.zeros([2, 3], tf.int64), config)["lighting"]
        np.testing.assert_allclose(amounts, np.full([2, 3], amount), atol=0.01)


def test_lighting_adds_one_colour_along_the_principal_components():
    image = noise().astype(np.float32)
    for amounts in ([1.0, 0.0, 0.0], [0.0, -2.0, 0.0], [0.3, 0.1, -0.7]):
        lit = lighting(image, np.array(amounts, np.float32))
        np.testing.assert_allclose(lit, plain_lighting(image, amounts), rtol=1e-5)


def test_images_with_lighting_are_clipped(augmented):
    for value in (0, 255):
        image = np.full([2, 2, 3], value, np.uint8)
        images = augmented(image, 200, lighting=2.0, flip=False)
        # Each noise pushes all three colours the same way, or nearly; half of it is clipped.
        assert 0.35 < (images == value).mean() < 0.65


# --- All together ---------------------------------------------------------------------------------


def test_order_of_changes(augmented, drawn):
    image = noise()
    options = {"train_crop": "pad", "color_jitter": 0.4, "lighting": 0.1}
    images = augmented(image, 60, **options)
    changes = drawn(60, **options)
    framed = np.pad(image, [(4, 4), (4, 4), (0, 0)])
    for index, changed in enumerate(images):
        top, left = changes["shift"][index]
        expected = framed[top : top + 6, left : left + 5]
        expected = plain_jitter(expected, *changes["jitter"][index])
        expected = np.clip(plain_lighting(expected, changes["lighting"][index]), 0, 255)
        if changes["flip"][index]:
            expected = expected[:, ::-1]
        np.testing.assert_allclose(changed, expected, atol=0.51)
    assert len({image.tobytes() for image in images}) == 60


def test_changes_and_crops_are_independent(drawn, identities):
    changes = drawn(train_crop="pad", color_jitter=0.4, lighting=0.1)
    columns = [change.reshape(4000, -1).astype(float) for change in changes.values()]
    assert len(columns) == 4
    columns.append(stateless_random.uniform(identities(4000), "crop", 5).numpy())
    assert_uncorrelated(np.concatenate(columns, axis=1))


def test_changes_are_functions_of_the_identity_alone(drawn, identities):
    options = {"train_crop": "pad", "color_jitter": 0.4, "lighting": 0.1}
    whole = drawn(1000, **options)
    assert set(whole) == {"shift", "jitter", "lighting", "flip"}
    config = Config(**options)
    tf.random.set_seed(1)
    # To the last bit: also in batches too small for numbers to be computed side by side.
    dataset = tf.data.Dataset.from_tensor_slices(identities(1000))
    for batch_size in (1, 7):
        batches = dataset.batch(batch_size).map(lambda batch: draw_changes(batch, config))
        batches = list(batches.as_numpy_iterator())
        for name, change in whole.items():
            np.testing.assert_array_equal(np.concatenate([b[name] for b in batches]), change)
    for other in ({"seed": 4}, {"epoch": 6}):
        changes = draw_changes(identities(1000, **other), config)
        assert (changes["jitter"] != whole["jitter"]).numpy().all(axis=1).mean() > 0.99


@pytest.mark.parametrize("options", [{}, {"color_jitter": 0.4, "lighting": 0.1}])
def test_shape_is_kept(identities, options):
    config = Config(**options)
    changes = draw_changes(identities(1), config)
    dataset = tf.data.Dataset.from_tensors((noise(8, 6), changes)).map(
        lambda image, changes: augment(image, {name: c[0] for name, c in changes.items()}, config)
    )
    assert dataset.element_spec == tf.TensorSpec([8, 6, 3], tf.uint8)


# --- Random erasing


def erased_sides(count):
    """Heights and widths of boxes as torchvision draws them, of images of 64 pixels."""
    generator = np.random.default_rng(0)

    def one():
        for _ in range(10):
            area = 64 * 64 * generator.uniform(0.02, 0.33)
            ratio = np.exp(generator.uniform(np.log(0.3), np.log(3.3)))
            height, width = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if height < 64 and width < 64:
                return height, width
        return 0, 0

    return np.array([one() for _ in range(count)])


def test_erased_boxes_are_torchvisions(drawn):
    boxes = drawn(20_000, random_erasing=1.0, image_size=64)["erased"]
    top, left, height, width = boxes.T
    expected = erased_sides(20_000)
    for found, aim in ((height, expected[:, 0]), (width, expected[:, 1])):
        levels = [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99]
        np.testing.assert_allclose(np.quantile(found, levels), np.quantile(aim, levels), atol=1)
    assert height.min() > 0 and height.max() < 64
    assert top.min() == left.min() == 0
    assert (top + height).max() == (left + width).max() == 64
    # Anywhere where it fits.
    place = top[height < 64] / (64 - height[height < 64])
    np.testing.assert_allclose(place.mean(), 0.5, atol=0.01)
    np.testing.assert_allclose(place.var(), 1 / 12, atol=0.01)


def test_probability_of_erasing(drawn):
    boxes = drawn(20_000, random_erasing=0.1, image_size=64)["erased"]
    assert (boxes[:, 2] > 0).mean() == pytest.approx(0.1, abs=0.01)
    assert "erased" not in drawn(10)


def test_erased_pixels_are_the_mean_colour(drawn, augmented):
    options = {"random_erasing": 0.5, "image_size": 64, "pixel_mean": (9.6, 255, 0), "flip": False}
    options["train_crop"] = "none"
    image = np.random.default_rng(0).integers(1, 255, (64, 64, 3), dtype=np.uint8)
    boxes = drawn(50, **options)["erased"]
    for (top, left, height, width), found in zip(boxes, augmented(image, 50, **options)):
        expected = image.copy()
        expected[top : top + height, left : left + width] = (10, 255, 0)
        np.testing.assert_array_equal(found, expected)
