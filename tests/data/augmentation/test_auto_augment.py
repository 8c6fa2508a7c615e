"""RandAugment and TrivialAugment: operations compared with Pillow's, and random choices."""

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance, ImageOps

from imagenet_fast import Config
from imagenet_fast.base.errors import UserError
from imagenet_fast.data.augmentation import auto_augment
from imagenet_fast.data.augmentation.augment import augment, draw_changes

NAMES = list(auto_augment.RAND_AUGMENT)
GREY = (128, 128, 128)


def smooth(height=40, width=56, least=20, most=230, seed=0):
    """Something like a photograph, not of all levels."""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    image = np.asarray(Image.fromarray(noise).resize((width, height), Image.BICUBIC))
    return (least + image / 255 * (most - least)).astype(np.uint8)


def noise(height=33, width=24, seed=1):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def flat(colour=(10, 200, 255)):
    return np.broadcast_to(np.array(colour, np.uint8), (12, 9, 3)).copy()


def two_levels():
    """One colour that is the same everywhere, one of two levels, one with a single bright pixel."""
    image = flat()
    image[::2, :, 1] = 90
    image[5, 5, 2] = 3
    return image


IMAGES = [smooth(), smooth(224, 224), noise(), flat(), two_levels()]
STRENGTHS = [-1.0, -0.9, -0.3, 0.0, 0.5, 0.9, 1.0]


def change(name, image, strength):
    return auto_augment.RAND_AUGMENT[name](tf.constant(image), tf.constant(strength)).numpy()


def affine(image, coefficients):
    return image.transform(image.size, Image.AFFINE, coefficients, Image.NEAREST, fillcolor=GREY)


PILLOW = {
    "identity": lambda image, strength: image,
    "autocontrast": lambda image, strength: ImageOps.autocontrast(image),
    "equalize": lambda image, strength: ImageOps.equalize(image),
    "rotate": lambda image, strength: image.rotate(30 * strength, Image.NEAREST, fillcolor=GREY),
    "solarize": lambda image, strength: ImageOps.solarize(image, 256 * (1 - abs(strength))),
    "color": lambda image, strength: ImageEnhance.Color(image).enhance(1 + 0.9 * strength),
    "posterize": lambda image, strength: ImageOps.posterize(image, 8 - round(4 * abs(strength))),
    "contrast": lambda image, strength: ImageEnhance.Contrast(image).enhance(1 + 0.9 * strength),
    "brightness": lambda image, strength: ImageEnhance.Brightness(image).enhance(
        1 + 0.9 * strength
    ),
    "sharpness": lambda image, strength: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * strength),
    "shear_x": lambda image, strength: affine(image, (1, 0.3 * strength, 0, 0, 1, 0)),
    "shear_y": lambda image, strength: affine(image, (1, 0, 0, 0.3 * strength, 1, 0)),
    "translate_x": lambda image, strength: affine(
        image, (1, 0, 150 / 331 * strength * image.width, 0, 1, 0)
    ),
    "translate_y": lambda image, strength: affine(
        image, (1, 0, 0, 0, 1, 150 / 331 * strength * image.height)
    ),
}


def pillow(name, image, strength):
    return np.asarray(PILLOW[name](Image.fromarray(image), strength))


# --- The operations -------------------------------------------------------------------------------


def test_the_papers_fourteen_operations():
    assert sorted(NAMES) == sorted(PILLOW) and len(NAMES) == 14


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("name", ["autocontrast", "equalize", "solarize", "posterize"])
def test_levels_equal_pillows(name, strength):
    for image in IMAGES:
        found = change(name, image, strength)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, pillow(name, image, strength))


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("name", ["color", "contrast", "brightness", "sharpness"])
def test_enhancements_equal_pillows(name, strength):
    for image in IMAGES:
        found = change(name, image, strength).astype(int)
        expected = pillow(name, image, strength).astype(int)
        # Where float32's rounding decides about a level.
        assert np.abs(found - expected).max() <= 1
        assert (found != expected).mean() < 0.02


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize(
    "name", ["rotate", "shear_x", "shear_y", "translate_x", "translate_y", "identity"]
)
def test_pixels_come_from_where_pillow_takes_them(name, strength):
    for image in IMAGES:
        found, expected = change(name, image, strength), pillow(name, image, strength)
        # Between two pixels, float32's rounding decides which one is nearer.
        assert (found != expected).any(axis=-1).mean() < 0.005


@pytest.mark.parametrize("name", NAMES)
def test_each_operation_but_identity_changes_the_image(name):
    image = noise()
    if name == "autocontrast":
        image = image // 2
    changed = [(change(name, image, strength) != image).mean() for strength in (-1.0, 1.0)]
    assert min(changed) > 0.4 if name != "identity" else max(changed) == 0


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"autocontrast", "equalize"}))
def test_magnitude_0_does_nothing(name):
    np.testing.assert_array_equal(change(name, noise(), 0.0), noise())


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"autocontrast", "equalize", "identity"}))
def test_effect_increases_with_the_magnitude(name):
    # A ramp of each colour, in which distance is difference; dark, that nothing is clipped.
    y, x = np.mgrid[:40, :56]
    image = np.stack([x + y, 2 * y + 10, x + 30], axis=-1).astype(np.uint8)
    image[::4, ::4] += 20  # something to sharpen
    image[::10, ::10], image[5::10, ::10] = 250, 200  # and to solarize
    for sign in (-1, 1):
        distances = [
            np.abs(change(name, image, sign * strength).astype(int) - image).mean()
            for strength in (0.1, 0.5, 1.0)
        ]
        assert distances[0] < distances[1] < distances[2]


def moved(image, slopes=(0, 0), pixels=(0, 0)):
    """Sheared as torchvision does, and moved by whole pixels; black comes in."""
    coefficients = (1, slopes[0], pixels[0], slopes[1], 1, pixels[1])
    return image.transform(image.size, Image.AFFINE, coefficients, Image.NEAREST, fillcolor=0)


# torchvision's TrivialAugmentWide at the n-th of its 31 magnitudes, of either sign.
WIDE = {
    "identity": lambda image, n, sign: image,
    "autocontrast": lambda image, n, sign: ImageOps.autocontrast(image),
    "equalize": lambda image, n, sign: ImageOps.equalize(image),
    "rotate": lambda image, n, sign: image.rotate(sign * 135 * n / 30, Image.NEAREST),
    "solarize": lambda image, n, sign: ImageOps.solarize(image, 255 - 255 * n / 30),
    "color": lambda image, n, sign: ImageEnhance.Color(image).enhance(1 + sign * 0.99 * n / 30),
    "posterize": lambda image, n, sign: ImageOps.posterize(image, 8 - round(n / 5)),
    "contrast": lambda image, n, sign: ImageEnhance.Contrast(image).enhance(
        1 + sign * 0.99 * n / 30
    ),
    "brightness": lambda image, n, sign: ImageEnhance.Brightness(image).enhance(
        1 + sign * 0.99 * n / 30
    ),
    "sharpness": lambda image, n, sign: ImageEnhance.Sharpness(image).enhance(
        1 + sign * 0.99 * n / 30
    ),
    "shear_x": lambda image, n, sign: moved(image, slopes=(sign * 0.99 * n / 30, 0)),
    "shear_y": lambda image, n, sign: moved(image, slopes=(0, sign * 0.99 * n / 30)),
    "translate_x": lambda image, n, sign: moved(image, pixels=(int(sign * 32 * n / 30), 0)),
    "translate_y": lambda image, n, sign: moved(image, pixels=(0, int(sign * 32 * n / 30))),
}


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(
    "n", [0, 8, 30, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 15, 29))]
)
@pytest.mark.parametrize("name", NAMES)
def test_trivial_augment_has_torchvisions_ranges(name, n, sign):
    for image in IMAGES:
        strength = tf.constant(np.float32(sign * n / 30))
        found = auto_augment.TRIVIAL_AUGMENT[name](tf.constant(image), strength).numpy()
        expected = np.asarray(WIDE[name](Image.fromarray(image), n, sign))
        differs = (found != expected).any(axis=-1)
        if name in ("color", "contrast", "brightness", "sharpness"):
            assert np.abs(found.astype(int) - expected).max() <= 1
            # A whole image of one colour may be where rounding decides.
            assert differs.mean() < 0.05 or len(np.unique(image)) <= 5
        else:
            # By 135 degrees many pixels are as near to one as to the other.
            assert differs.mean() < (0.03 if name == "rotate" else 0.005)


# --- What is drawn --------------------------------------------------------------------------------


def identities(count, seed=3, epoch=1):
    return tf.stack([tf.fill([count], seed), tf.fill([count], epoch), tf.range(count)], axis=1)


def draw(count, layers=2, magnitude=9.0, **place):
    found = auto_augment.draw_rand_augment(
        tf.cast(identities(count, **place), tf.int64), layers, magnitude
    )
    return [part.numpy() for part in found]


def test_operations_and_signs_have_even_odds_and_are_independent():
    count = 14 * 2000
    operations, strengths = draw(count)
    assert operations.shape == strengths.shape == (count, 2)
    np.testing.assert_allclose(np.abs(strengths), 0.9, rtol=1e-6)
    np.testing.assert_allclose(strengths.mean(axis=0), 0, atol=0.03)
    for layer in range(2):
        counts = np.bincount(operations[:, layer], minlength=14)
        assert len(counts) == 14
        np.testing.assert_allclose(counts, 2000, atol=250)
    numbers = np.concatenate([operations, strengths], axis=1)
    assert np.abs(np.corrcoef(numbers.T) - np.eye(4)).max() < 0.03


def test_trivial_augment_draws_one_operation_of_any_of_31_strengths():
    count = 14 * 61 * 40
    found = auto_augment.draw_trivial_augment(tf.cast(identities(count), tf.int64))
    operations, strengths = (part.numpy() for part in found)
    assert operations.shape == strengths.shape == (count, 1)
    np.testing.assert_allclose(np.bincount(operations[:, 0]), count / 14, rtol=0.1)
    steps = strengths[:, 0] * 30
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)
    # Of zero either sign.
    expected = np.where(np.arange(-30, 31) == 0, 2, 1) * count / 62
    found = np.bincount(np.round(steps).astype(int) + 30)
    np.testing.assert_allclose(found, expected, rtol=0.25)
    assert abs(np.corrcoef(operations[:, 0], strengths[:, 0])[0, 1]) < 0.02


def test_random_choices_depend_on_seed_epoch_and_place():
    first = draw(50)
    np.testing.assert_array_equal(first, draw(50))
    assert not np.array_equal(first, draw(50, epoch=2))
    assert not np.array_equal(first, draw(50, seed=4))


def augmented(images, config):
    """What tf.data makes of them."""
    changes = draw_changes(tf.cast(identities(len(images)), tf.int64), config)
    dataset = tf.data.Dataset.from_tensor_slices((images, changes))
    dataset = dataset.map(lambda image, changes: augment(image, changes, config))
    assert dataset.element_spec == tf.TensorSpec(images.shape[1:], tf.uint8)
    return np.stack(list(dataset.as_numpy_iterator()))


@pytest.mark.long
def test_layers_follow_the_flip_and_each_other():
    images = np.stack([smooth(seed=seed) for seed in range(60)])
    config = Config(rand_augment=(2, 8))
    operations, strengths = draw(60, magnitude=8.0)
    found = augmented(images, config)
    flipped = augmented(images, config.replace(rand_augment=()))
    for image, kinds, amounts, one in zip(flipped, operations, strengths, found):
        for kind, amount in zip(kinds, amounts):
            image = change(NAMES[kind], image, amount)
        np.testing.assert_array_equal(one, image)


def test_trivial_augment_follows_the_flip():
    images = np.stack([smooth(seed=seed) for seed in range(60)])
    config = Config(trivial_augment=True)
    found = augmented(images, config)
    flipped = augmented(images, config.replace(trivial_augment=False))
    drawn = auto_augment.draw_trivial_augment(tf.cast(identities(60), tf.int64))
    for image, (kind,), (strength,), one in zip(flipped, *(own.numpy() for own in drawn), found):
        change = auto_augment.TRIVIAL_AUGMENT[NAMES[kind]]
        np.testing.assert_array_equal(one, change(tf.constant(image), tf.constant(strength)))


@pytest.mark.long
def test_rand_augment_combines_with_the_other_changes():
    images = np.stack([noise(seed=seed) for seed in range(60)])
    config = Config(rand_augment=(1, 10), color_jitter=0.4, train_crop="pad")
    alone = augmented(images, config.replace(rand_augment=()))
    both = augmented(images, config)
    same = (alone == both).all(axis=(1, 2, 3))
    # The other draws are as before: where RandAugment draws the identity, nothing differs.
    identity = draw(60, layers=1)[0][:, 0] == NAMES.index("identity")
    assert identity.any() and same[identity].all()
    assert same.mean() < 0.3


# --- Options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["2", "0,9", "-1,9", "1.5,9", "2,-0.5", "2,11", "2,9,1"])
def test_options_out_of_range(value):
    message = f"rand_augment is {value}, but must be a positive number of operations and a magni"
    with pytest.raises(UserError, match=message):
        Config(rand_augment=value)
