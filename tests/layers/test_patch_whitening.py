"""Whitening of patches against covariances that are taken patch by patch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.layers import PatchWhitening
from imagenet_fast.layers import patch_whitening as module
from imagenet_fast.layers.patch_whitening import patch_covariance, whitening_filters

AIRBENCH = {
    "patch_size": 2,
    "padding": "valid",
    "negatives": True,
    "use_bias": True,
    "epsilon": 5e-4,
}


def noise(shape=(40, 10, 12, 3), seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def smooth(shape=(40, 10, 12, 3), seed=0):
    """Returns images whose neighbouring pixels and colours are alike, with a mean."""
    count, height, width, channels = shape
    images = noise((count, height + 2, width + 2, channels), seed)
    for axis in (1, 2):
        images = np.cumsum(images, axis=axis) / 4
    images += 0.8 * images.mean(axis=-1, keepdims=True) + 0.3
    return images[:, 2:, 2:].astype("float32")


def patches(images, size):
    """Returns all patches inside of the images, one by one: float64 [patches, elements]."""
    return np.stack(
        [
            image[row : row + size, column : column + size].ravel()
            for image in images
            for row in range(image.shape[0] - size + 1)
            for column in range(image.shape[1] - size + 1)
        ]
    ).astype("float64")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_covariance_is_that_of_all_patches(size):
    found = patch_covariance(smooth(), size)
    one_by_one = patches(smooth(), size)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, one_by_one.T @ one_by_one / len(one_by_one), rtol=1e-10)
    # The images' mean is not subtracted.
    assert np.abs(found - np.cov(one_by_one.T)).max() > 0.05


def test_elements_are_in_the_order_of_tensorflows_patches():
    extracted = tf.image.extract_patches(
        tf.constant(smooth(), tf.float64), [1, 3, 3, 1], [1, 1, 1, 1], [1, 1, 1, 1], "VALID"
    )
    flat = tf.reshape(extracted, [-1, 27])
    expected = tf.matmul(flat, flat, transpose_a=True) / len(flat)
    np.testing.assert_allclose(patch_covariance(smooth(), 3), expected, rtol=1e-10)


def test_covariance_in_chunks(monkeypatch):
    expected = patch_covariance(smooth(), 3)
    for chunk in (1, 8 * 10 * 27 * 7):  # an image, and seven, into which 40 cannot be split
        monkeypatch.setattr(module, "_CHUNK", chunk)
        np.testing.assert_allclose(patch_covariance(smooth(), 3), expected, rtol=1e-10)


@pytest.mark.parametrize("dtype", [tf.float64, tf.float32, tf.float16, tf.bfloat16])
def test_covariance_of_tensors(dtype):
    images = tf.cast(tf.constant(smooth()), dtype)
    expected = patch_covariance(np.asarray(tf.cast(images, tf.float64)), 3)
    np.testing.assert_array_equal(patch_covariance(images, 3), expected)


@pytest.mark.parametrize("shape", [(40, 2, 12, 3), (40, 12, 2, 3), (0, 8, 8, 3), (8, 8, 3)])
def test_images_without_patches(shape):
    with pytest.raises(UserError, match="height and width of at least 3, the size of the patches"):
        patch_covariance(np.zeros(shape, "float32"), 3)


def test_images_that_are_not_normalized():
    with pytest.raises(UserError, match="images of dtype uint8 to whiten; normalize them first"):
        patch_covariance(np.zeros([4, 8, 8, 3], "uint8"), 3)
    with pytest.raises(UserError, match="contain NaN or infinite numbers"):
        patch_covariance(np.full([4, 8, 8, 3], np.nan, "float32"), 3)


@pytest.mark.parametrize(("images", "epsilon"), [(noise, 1e-2), (smooth, 1e-2), (smooth, 5e-4)])
def test_outputs_have_no_covariance(images, epsilon):
    layer = PatchWhitening(3, padding="valid", epsilon=epsilon)
    layer.adapt(images())
    outputs = layer(images()).numpy().reshape(-1, 27).astype("float64")
    one_by_one = patches(images(), 3)
    eigenvalues = np.linalg.eigvalsh(one_by_one.T @ one_by_one / len(one_by_one))[::-1]
    expected = np.diag(eigenvalues / (eigenvalues + epsilon))
    np.testing.assert_allclose(outputs.T @ outputs / len(outputs), expected, atol=1e-4)
    if images is noise:
        np.testing.assert_allclose(expected, np.eye(27), atol=2e-2)
    else:  # far from white without the layer
        assert eigenvalues[0] > 1000 * eigenvalues[-1]


def test_filters_of_a_known_covariance():
    angle = np.pi / 6
    basis = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    filters = whitening_filters(basis @ np.diag([3.0, 0.5]) @ basis.T, 0.1)
    # The second eigenvector, (-1/2, sqrt(3)/2), has its largest element positive as it is.
    np.testing.assert_allclose(filters, basis / np.sqrt([3.1, 0.6]), rtol=1e-12)
    # And turned by 90 degrees: (-sin, cos) and (-cos, -sin), whose signs change.
    turned = basis[:, ::-1] * [1, -1]
    filters = whitening_filters(turned @ np.diag([3.0, 0.5]) @ turned.T, 0.1)
    np.testing.assert_allclose(filters, basis[:, ::-1] / np.sqrt([3.1, 0.6]), rtol=1e-12)


def test_signs_do_not_depend_on_rounding():
    """(1, -1) / sqrt(2): either element is the larger one, after rounding."""
    for small in (0, 1e-15, -1e-15):
        filters = whitening_filters(np.array([[2.0 + small, -1.0], [-1.0, 2.0 - small]]), 1.0)
        expected = np.array([[1, 1], [-1, 1]]) / np.sqrt(2) / np.sqrt([4.0, 2.0])
        np.testing.assert_allclose(filters, expected, rtol=1e-12)


def test_published_counts():
    """Page: 27 filters with 729 weights; airbench: 12 filters and their negatives."""
    page, airbench = PatchWhitening(), PatchWhitening(**AIRBENCH)
    images = smooth((4, 32, 32, 3))
    assert page(images).shape == (4, 32, 32, 27)
    assert (page.count_params(), page.trainable_variables) == (729, [])
    assert airbench(images).shape == (4, 31, 31, 24)
    assert airbench.kernel.shape == (2, 2, 3, 24)
    assert [v is airbench.bias for v in airbench.trainable_variables] == [True]
    assert [v is airbench.kernel for v in airbench.non_trainable_variables] == [True]


def test_negatives():
    layer = PatchWhitening(**AIRBENCH)
    layer.adapt(smooth())
    positive, negative = np.split(layer(smooth()).numpy(), 2, axis=-1)
    # Not to the bit: a kernel may sum the two halves of the filters in different orders.
    np.testing.assert_allclose(negative, -positive, atol=2e-5)
    alone = PatchWhitening(2, padding="valid", epsilon=5e-4)
    alone.adapt(smooth())
    np.testing.assert_allclose(positive, alone(smooth()), atol=1e-6)


def test_each_filter_picks_an_element_at_first():
    layer = PatchWhitening(2, padding="valid")
    expected = patches(smooth(), 2).reshape(40, 9, 11, 12)
    np.testing.assert_allclose(layer(smooth()), expected, rtol=1e-6)


def test_zeros_are_around_the_images():
    same, valid = PatchWhitening(), PatchWhitening(padding="valid")
    for layer in (same, valid):
        layer.adapt(smooth())
    padded = np.pad(smooth(), [(0, 0), (1, 1), (1, 1), (0, 0)])
    np.testing.assert_allclose(same(smooth()), valid(padded), rtol=1e-5, atol=1e-5)


def test_the_bias_is_trained_and_the_filters_are_not():
    inputs = keras.Input((10, 12, 3))
    layer = PatchWhitening(**AIRBENCH)
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(layer(inputs)))
    layer.adapt(smooth())
    kernel = layer.kernel.numpy()
    np.testing.assert_array_equal(layer.bias, np.zeros(24))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(smooth(), np.ones([40, 24]), verbose=0)
    np.testing.assert_array_equal(layer.kernel, kernel)
    assert np.abs(layer.bias).min() > 0


def test_adapt_is_deterministic():
    kernels = []
    for _ in range(2):
        layer = PatchWhitening()
        layer.adapt(smooth())
        kernels.append(layer.kernel.numpy())
    np.testing.assert_array_equal(*kernels)


def test_images_all_of_one_colour():
    """Patches have but one direction then: the other eigenvalues are 0, or rounded below it."""
    images = np.broadcast_to(np.float32([0.5, -1, 2]), [8, 6, 6, 3])
    layer = PatchWhitening(padding="valid")
    layer.adapt(images)
    outputs = layer(images).numpy()
    eigenvalue = 9 * (0.5**2 + 1 + 2**2)
    expected = np.zeros(27)
    expected[0] = np.sqrt(eigenvalue / (eigenvalue + layer.epsilon))
    np.testing.assert_allclose(outputs, np.broadcast_to(expected, outputs.shape), atol=1e-4)

    layer.adapt(np.zeros([8, 6, 6, 3]))
    np.testing.assert_allclose(np.abs(layer.kernel.numpy()).sum(axis=(0, 1, 2)), 10, rtol=1e-6)


@pytest.mark.parametrize(
    ("policy", "rounding"),
    [("mixed_bfloat16", 2**-8), ("mixed_float16", 2**-11), ("float16", 2**-11)],
)
def test_half_precision(policy, rounding):
    exact, layer = PatchWhitening(**AIRBENCH), PatchWhitening(**AIRBENCH, dtype=policy)
    for each in (exact, layer):
        each.adapt(smooth())
    outputs, expected = layer(smooth()), exact(smooth()).numpy()
    assert outputs.dtype == layer.compute_dtype
    # Inputs, filters and outputs are rounded, by half of this unit each.
    products = tf.nn.conv2d(np.abs(smooth()), np.abs(exact.kernel), 1, "VALID").numpy()
    assert (np.abs(tf.cast(outputs, tf.float32) - expected) <= 1.5 * rounding * products).all()
    if policy.startswith("mixed"):
        np.testing.assert_array_equal(layer.kernel.numpy(), exact.kernel.numpy())


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_compiles_under_xla(policy):
    layer = PatchWhitening(**AIRBENCH, dtype=policy)
    layer.adapt(smooth())
    compiled = tf.function(layer, jit_compile=True)(smooth())
    expected = tf.cast(layer(smooth()), tf.float32)
    np.testing.assert_allclose(tf.cast(compiled, tf.float32), expected, rtol=2**-7, atol=1e-4)


def test_saving(tmp_path):
    inputs = keras.Input((10, 12, 3))
    layer = PatchWhitening(**AIRBENCH, name="whitening")
    model = keras.Model(inputs, layer(inputs))
    layer.adapt(smooth())
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.layers[1].get_config() == layer.get_config()
    np.testing.assert_array_equal(again(smooth()), model(smooth()))

    model.save_weights(tmp_path / "model.weights.h5")
    fresh = PatchWhitening(**AIRBENCH)
    other = keras.Model(inputs, fresh(inputs))
    assert np.abs(other(smooth()) - model(smooth())).max() > 0.1
    other.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(other(smooth()), model(smooth()))


def test_options_are_kept():
    layer = PatchWhitening(**AIRBENCH, name="whitening")
    again = keras.layers.deserialize(keras.layers.serialize(layer))
    assert again.get_config() == layer.get_config()
    assert {key: getattr(again, key) for key in AIRBENCH} == AIRBENCH


def test_the_initializer_of_the_bias_is_kept():
    initializer = keras.initializers.RandomUniform(-0.25, 0.25, seed=1)
    layer = PatchWhitening(use_bias=True, bias_initializer=initializer)
    again = keras.layers.deserialize(keras.layers.serialize(layer))
    for each in (layer, again):
        each.build([None, 8, 8, 3])
    np.testing.assert_array_equal(again.bias, layer.bias)
    assert 0.15 < np.abs(layer.bias).max() <= 0.25
    # Of an earlier version, which saved none.
    config = layer.get_config()
    del config["bias_initializer"]
    old = PatchWhitening.from_config(config)
    old.build([None, 8, 8, 3])
    assert not old.bias.numpy().any()


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_biases_of_filters_without_outputs_are_0_and_not_trained(policy):
    """On grey images, whose colours differ by rounding errors only: seven of twelve."""
    initializer = keras.initializers.RandomUniform(0.1, 0.2, seed=1)
    colours = noise((50, 8, 8, 3)).astype(np.float32)
    grey = np.repeat(colours[..., :1], 3, axis=-1)
    # As by each channel's mean and deviation.
    normalized = (grey - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]
    for images, constant in ((colours, 0), (normalized.astype(np.float32), 7)):
        layer = PatchWhitening(**AIRBENCH, bias_initializer=initializer, dtype=policy)
        layer.adapt(images)
        assert np.count_nonzero(layer.bias) == 2 * (12 - constant)
        assert not layer.bias.numpy().reshape(2, 12)[:, 12 - constant :].any()
        with tf.GradientTape() as tape:
            outputs = layer(images)
        gradient = tape.gradient(outputs, layer.bias).numpy()
        np.testing.assert_array_equal(gradient != 0, layer.bias.numpy() != 0)
        if policy == "float32":  # others round the images already
            deviations = np.std(outputs, axis=(0, 1, 2))
            assert (deviations < 1e-3).sum() == 2 * constant
        # A bias of a run begun before, when such biases were trained, is still added.
        layer.bias.assign_add(np.arange(24.0))
        added = tf.cast(layer(images) - outputs, "float32")[0, 0, 0]
        np.testing.assert_allclose(added, np.arange(24.0), atol=0.3)


def test_weights_are_named_after_the_layer():
    layer = PatchWhitening(use_bias=True, name="whitening")
    layer.adapt(smooth())
    assert [name_of(w) for w in layer.weights] == ["whitening/bias", "whitening/kernel"]


def test_images_of_other_channels():
    layer = PatchWhitening(name="whitening")
    layer.build([None, 8, 8, 3])
    with pytest.raises(UserError, match=r"whitening takes images of 3 channels, .* of 1"):
        layer.adapt(noise((4, 8, 8, 1)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patch_size": 0}, "patch_size is 0, but must be positive"),
        ({"padding": "reflect"}, "padding is 'reflect', but must be 'same' or 'valid'"),
        ({"epsilon": 0}, "epsilon is 0, but must be positive"),
        ({"epsilon": float("nan")}, "epsilon is nan, but must be positive"),
    ],
)
def test_invalid_options(options, words):
    with pytest.raises(UserError, match=words):
        PatchWhitening(**options)
