import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.layers import PixelNormalization

MEAN, STD = Config().pixel_mean, Config().pixel_std
# Every value of a pixel, in every colour.
PIXELS = np.repeat(np.arange(256, dtype="uint8").reshape(2, 16, 8, 1), 3, axis=-1)
EXACT = (PIXELS.astype("float64") - MEAN) / STD


def layer(policy="float32", **options):
    return PixelNormalization(MEAN, STD, dtype=policy, **options)


@pytest.mark.parametrize(
    ("policy", "dtype", "half_unit"),
    [
        ("float32", tf.float32, 2.0**-22),  # some roundings of 2**-24 each
        ("mixed_bfloat16", tf.bfloat16, 2.0**-8 * 1.001),
        ("mixed_float16", tf.float16, 2.0**-11 * 1.001),
        ("float16", tf.float16, 2.0**-11 * 1.001),
    ],
)
@pytest.mark.parametrize("input_dtype", ["uint8", "int32", "float32"])
def test_every_pixel_is_rounded_once(policy, dtype, half_unit, input_dtype):
    """The mean itself would be 123.5 in bfloat16, and dark pixels far off."""
    got = layer(policy)(tf.constant(PIXELS.astype(input_dtype)))
    assert got.dtype == dtype
    assert got.shape == PIXELS.shape
    np.testing.assert_allclose(tf.cast(got, tf.float64), EXACT, rtol=half_unit, atol=1e-6)


def test_channel_order():
    got = PixelNormalization([0, 100, 200], [1, 10, 100])(np.full((1, 1, 1, 3), 50, "uint8"))
    np.testing.assert_allclose(got, [[[[50, -5, -1.5]]]], rtol=1e-6)


def test_grey_images():
    got = PixelNormalization([100], [50])(np.full((2, 3, 4, 1), 200, "uint8"))
    np.testing.assert_array_equal(got, np.full((2, 3, 4, 1), 2.0, "float32"))


def test_no_weights():
    normalize = layer()
    normalize(PIXELS)
    assert normalize.weights == []


def test_global_policy():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        assert PixelNormalization(MEAN, STD)(PIXELS).dtype == tf.bfloat16
    finally:
        keras.mixed_precision.set_global_policy("float32")


def test_inside_a_functional_model():
    pixels = keras.Input((16, 8, 3), dtype="uint8")
    outputs = layer("mixed_float16", name="normalize")(pixels)
    assert (outputs.shape, outputs.dtype) == ((None, 16, 8, 3), tf.float16)
    model = keras.Model(pixels, outputs)
    expected = layer("mixed_float16")(PIXELS).numpy()
    np.testing.assert_allclose(model.predict(PIXELS, verbose=0), expected, rtol=2e-3)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_serialization(policy):
    first = layer(policy, name="normalize")
    for again in (
        PixelNormalization.from_config(first.get_config()),
        keras.layers.deserialize(keras.layers.serialize(first)),
    ):
        assert (again.mean, again.std, again.name) == (MEAN, STD, "normalize")
        assert again.compute_dtype == first.compute_dtype
        np.testing.assert_array_equal(
            tf.cast(again(PIXELS), tf.float32), tf.cast(first(PIXELS), tf.float32)
        )


def test_saving(tmp_path):
    pixels = keras.Input((16, 8, 3), dtype="uint8")
    model = keras.Model(pixels, layer()(pixels))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(PIXELS), model(PIXELS))


@pytest.mark.parametrize(("mean", "std"), [((0, 0, 0), (1, 0, 1)), ((0, 0, 0), (1,))])
def test_invalid_options(mean, std):
    with pytest.raises(UserError, match="must have an entry for each channel"):
        PixelNormalization(mean, std)


def test_other_channels():
    with pytest.raises(UserError, match="inputs have 1 channels, but mean and std 3"):
        layer()(PIXELS[..., :1])
