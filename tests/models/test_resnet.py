"""ResNets against the published counts and a plain reference written with tf.nn."""

from __future__ import annotations

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.layers import BlurPool
from imagenet_fast.models.resnet import SubsampleAndPad, cifar_resnet, resnet
from imagenet_fast.models.shape_only import shape_only

# Trainable parameters and tensors. 18, 34, 101 and 152 are torchvision's counts too.
IMAGENET_COUNTS = {
    18: (11_689_512, 62),
    34: (21_797_672, 110),
    50: (25_557_032, 161),
    101: (44_549_160, 314),
    152: (60_192_808, 467),
}
# The paper says 0.27, 0.46 and 0.85 million.
CIFAR_COUNTS = {20: (269_722, 59), 32: (464_154, 95), 56: (853_018, 167)}


@functools.cache
def resnet50():
    """One for the tests that only look."""
    keras.utils.set_random_seed(0)
    return resnet(50)


@functools.cache
def resnet50_v1():
    """One for the tests that look at no values."""
    with shape_only():
        return resnet(50, stride_on_1x1=True)


def some_long(cases, default):
    """The cases of a test, of which all but some are left to the long run."""
    return [
        case if case in default else pytest.param(case, marks=pytest.mark.long) for case in cases
    ]


def size(variables):
    return sum(math.prod(v.shape) for v in variables)


def layers_of(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


def randomise(model, seed=0):
    """Gives every variable, batch norm statistics included, values that matter."""
    rng = np.random.default_rng(seed)
    for layer in model.layers:
        values = []
        for variable in layer.weights:
            role = name_of(variable).split("/")[-1]
            if role == "kernel":
                fan_in = math.prod(variable.shape[:-1])
                values.append(rng.normal(0, fan_in**-0.5, variable.shape))
            elif role in ("gamma", "moving_variance"):
                values.append(rng.uniform(0.5, 1.5, variable.shape))
            else:
                values.append(rng.normal(0, 0.2, variable.shape))
        layer.set_weights(values)


@pytest.mark.parametrize("depth", some_long(IMAGENET_COUNTS, (18, 50)))
def test_counts(depth):
    with shape_only():
        model = resnet(depth)
    assert (size(model.trainable_variables), len(model.trainable_variables)) == (
        IMAGENET_COUNTS[depth]
    )
    assert model.name == f"resnet{depth}"
    assert model.get_layer("stage4_block1_relu").output.shape[1:3] == (7, 7)


@pytest.mark.parametrize("depth", some_long(CIFAR_COUNTS, (20,)))
def test_cifar_counts(depth):
    model = cifar_resnet(depth)
    assert (size(model.trainable_variables), len(model.trainable_variables)) == CIFAR_COUNTS[depth]
    convs = layers_of(model, keras.layers.Conv2D)
    assert len(convs) + 1 == depth
    assert model.get_layer("stage3_block1_relu").output.shape == (None, 8, 8, 64)


def test_resnet50_tensors_by_kind():
    model = resnet50()
    convs = layers_of(model, keras.layers.Conv2D)
    norms = layers_of(model, keras.layers.BatchNormalization)
    assert len(convs) == len(norms) == 53
    assert not any(conv.use_bias for conv in convs)
    assert size(conv.kernel for conv in convs) == 23_454_912
    assert size(norm.gamma for norm in norms) == 26_560
    assert size(model.get_layer("logits").trainable_variables) == 2_049_000


@pytest.mark.long
@pytest.mark.parametrize(
    ("depth", "options"), [(18, {"stem": "small"}), pytest.param(50, {}, marks=pytest.mark.long)]
)
def test_width_is_a_factor_of_all_channels(depth, options):
    with shape_only():
        published, narrow = (resnet(depth, width=width, **options) for width in (0, 8))
    filters = [
        [conv.filters for conv in layers_of(m, keras.layers.Conv2D)] for m in (published, narrow)
    ]
    assert filters[0] == [8 * number for number in filters[1]]
    assert filters[1][0] == 8


def test_he_init_by_fan_out():
    model = resnet50()
    for name, fan_out in (
        ("stem_conv", 7 * 7 * 64),
        ("stage3_block2_conv2", 3 * 3 * 256),
        ("stage4_block1_projection_conv", 2048),
    ):
        kernel = model.get_layer(name).kernel.numpy()
        std = math.sqrt(2 / fan_out)
        assert abs(kernel.std() / std - 1) < 0.03
        # Keras' truncated normal would stop at 2.27 of these.
        assert np.abs(kernel).max() > 2.6 * std
    assert abs(model.get_layer("logits").kernel.numpy().std() / 0.01 - 1) < 0.01


def basic(**options):
    return resnet(18, 5, (32, 32, 3), **options)


def bottleneck(**options):
    return resnet(50, 5, (32, 32, 3), **options)


def cifar(**options):
    return cifar_resnet(20, **options)


@pytest.mark.parametrize(
    ("make", "last", "zero_gamma"),
    [
        (basic, "_bn2", False),
        pytest.param(bottleneck, "_bn3", True, marks=pytest.mark.long),
        (cifar, "_bn2", True),
        pytest.param(basic, "_bn2", True, marks=pytest.mark.long),
        pytest.param(bottleneck, "_bn3", False, marks=pytest.mark.long),
        pytest.param(cifar, "_bn2", False, marks=pytest.mark.long),
    ],
)
def test_gamma_is_zero_in_the_last_norm_of_a_block_only(make, last, zero_gamma):
    for norm in layers_of(make(zero_gamma=zero_gamma), keras.layers.BatchNormalization):
        is_last = norm.name.endswith(last) and norm.name.startswith("stage")
        assert (norm.gamma.numpy() == (0 if zero_gamma and is_last else 1)).all(), norm.name


@pytest.mark.parametrize(
    ("conv_init", "fan", "scale", "truncated"),
    [
        ("he_fan_in", "in", 2, False),
        ("he_normal", "in", 2, True),
        ("lecun_normal", "in", 1, True),
    ],
)
def test_initial_convolutions(conv_init, fan, scale, truncated):
    model = cifar_resnet(14, conv_init=conv_init)
    kernels = [layer.kernel.numpy() for layer in layers_of(model, keras.layers.Conv2D)]
    assert len({kernel.flat[0] for kernel in kernels}) == len(kernels) == 13
    for kernel in kernels:
        height, width, *channels = kernel.shape
        deviation = (scale / (height * width * channels[("in", "out").index(fan)])) ** 0.5
        assert kernel.std() == pytest.approx(deviation, rel=0.1)
    # Of a normal distribution truncated at twice its deviation, that is .8796 of the untruncated.
    largest = [np.abs(kernel).max() / kernel.std() for kernel in kernels if kernel.size > 2000]
    assert (max(largest) < 2 / 0.8796 * 1.05) == truncated == (min(largest) < 3)


def test_same_padding_is_that_of_keras():
    """In MLPerf's TF2 reference, all but the stem's convolution."""
    symmetric, same = (
        resnet(18, 10, (None, None, 3), width=8, padding=padding)
        for padding in ("symmetric", "same")
    )
    same.set_weights(symmetric.get_weights())
    names = {layer.name for layer in symmetric.layers} - {layer.name for layer in same.layers}
    strided = [f"stage{stage}_block1_conv1_pad" for stage in (2, 3, 4)]
    assert names == {"stem_pool_pad", *strided}
    for name in ("stem_pool", *(name.removesuffix("_pad") for name in strided)):
        assert same.get_layer(name).padding == "same"
    # Images of an odd size, at each stride, are padded equally on all sides.
    odd, even = (tf.random.stateless_normal([2, size, size, 3], (0, size)) for size in (65, 64))
    np.testing.assert_allclose(same(odd), symmetric(odd), rtol=1e-5, atol=1e-6)
    assert np.abs(same(even) - symmetric(even)).max() > 1e-3


@pytest.mark.parametrize("zero_gamma", [False, True])
def test_uniform_gamma(zero_gamma):
    """Of 688 channels, other ones in each layer."""
    model = cifar_resnet(20, gamma_init="uniform", zero_gamma=zero_gamma)
    norms = layers_of(model, keras.layers.BatchNormalization)
    last = [norm for norm in norms if norm.name.endswith("_bn2")]
    assert all((norm.gamma.numpy() == 0).all() == zero_gamma for norm in last)
    gammas = [norm.gamma.numpy() for norm in norms if not zero_gamma or norm not in last]
    assert len({gamma[0] for gamma in gammas}) == len(gammas) == 19 - 9 * zero_gamma
    values = np.concatenate(gammas)
    assert 0 <= values.min() < 0.02 < 0.98 < values.max() < 1
    assert values.mean() == pytest.approx(0.5, abs=0.06)
    assert all((norm.beta.numpy() == 0).all() for norm in norms)


@pytest.mark.parametrize(
    ("make", "zero_gamma"),
    [
        (basic, True),
        (cifar, False),
        pytest.param(basic, False, marks=pytest.mark.long),
        pytest.param(cifar, True, marks=pytest.mark.long),
    ],
)
def test_zero_gamma_makes_blocks_the_identity(make, zero_gamma):
    model = make(zero_gamma=zero_gamma)
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype("float32")
    blocks = keras.Model(
        model.inputs, [model.get_layer(f"stage2_block{b}_relu").output for b in (1, 2)]
    )
    first, second = blocks(images, training=True)
    assert np.abs(first).max() > 0
    assert np.array_equal(first, second) == zero_gamma


@pytest.mark.parametrize("stride_on_1x1", [pytest.param(True, marks=pytest.mark.long), False])
def test_where_the_stride_is(stride_on_1x1):
    model = resnet50_v1() if stride_on_1x1 else resnet50()
    strided = {c.name for c in layers_of(model, keras.layers.Conv2D) if c.strides == (2, 2)}
    conv = "conv1" if stride_on_1x1 else "conv2"
    assert strided == {"stem_conv"} | {
        f"stage{stage}_block1_{name}" for stage in (2, 3, 4) for name in (conv, "projection_conv")
    }


def test_padding_layers_only_before_strided_windows():
    def pads(model):
        return [layer.name for layer in layers_of(model, keras.layers.ZeroPadding2D)]

    assert pads(resnet50_v1()) == ["stem_conv_pad", "stem_pool_pad"]
    assert len(pads(resnet50())) == 5
    assert pads(cifar_resnet(20)) == ["stage2_block1_conv1_pad", "stage3_block1_conv1_pad"]


@pytest.mark.long
def test_small_stem_keeps_the_size():
    model = resnet(18, 10, (32, 32, 3), stem="small")
    assert model.get_layer("stem_relu").output.shape == (None, 32, 32, 64)
    assert model.get_layer("stage1_block1_relu").output.shape == (None, 32, 32, 64)
    assert model.get_layer("stage4_block2_relu").output.shape == (None, 4, 4, 512)
    assert not layers_of(model, keras.layers.MaxPooling2D)


def blurred(x):
    """Each channel convolved with [1, 2, 1] / 4 along columns and rows, with zeros around."""
    for axis in (1, 2):
        padded = tf.pad(x, [[int(other == axis)] * 2 for other in range(4)])
        places = tf.range(x.shape[axis])
        before, middle, after = (tf.gather(padded, places + i, axis=axis) for i in range(3))
        x = (before + 2 * middle + after) / 4
    return x


@pytest.mark.parametrize(
    ("depth", "options", "blurs"),
    [
        pytest.param(
            50,
            {"blur_pool": "convolutions"},
            {"projection_conv": 2, "conv2": 1},
            marks=pytest.mark.long,
        ),
        (18, {"blur_pool": "convolutions_and_pools"}, {"projection_conv": 2, "conv1": 1}),
        pytest.param(
            50,
            {"blur_pool": "convolutions", "stride_on_1x1": True},
            {"projection_conv": 2, "conv1": 2},
            marks=pytest.mark.long,
        ),
    ],
)
def test_where_the_blurs_are(depth, options, blurs):
    expected = {
        f"stage{stage}_block1_{conv}_blur": strides
        for stage in (2, 3, 4)
        for conv, strides in blurs.items()
    }
    if options["blur_pool"] == "convolutions_and_pools":
        expected["stem_pool_blur"] = 2
    with shape_only():
        model = resnet(depth, **options)
    assert {layer.name: layer.strides for layer in layers_of(model, BlurPool)} == expected
    assert size(model.trainable_variables) == IMAGENET_COUNTS[depth][0]
    assert model.get_layer("stage4_block1_relu").output.shape[1:3] == (7, 7)


def reference(model, images, convs_per_block, stride_on_1x1, blur_pool="none"):
    """Inference of a ResNet with tf.nn alone; variables come from ``model`` by layer name."""

    def variables(name):
        return {
            name_of(variable).split("/")[-1]: variable for variable in model.get_layer(name).weights
        }

    def conv_norm(x, conv, norm, stride):
        kernel = variables(conv)["kernel"]
        if stride > 1 and kernel.shape[2] >= 16 and blur_pool != "none":
            x = blurred(x)
        pad = kernel.shape[0] // 2
        x = tf.pad(x, [[0, 0], [pad, pad], [pad, pad], [0, 0]])
        x = tf.nn.conv2d(x, kernel, stride, "VALID")
        v = variables(norm)
        scale = v["gamma"] / tf.sqrt(v["moving_variance"] + 1e-5)
        return (x - v["moving_mean"]) * scale + v["beta"]

    names = {layer.name for layer in model.layers}
    imagenet_stem = "stem_pool" in names
    x = tf.nn.relu(conv_norm(images, "stem_conv", "stem_bn", 2 if imagenet_stem else 1))
    if imagenet_stem:
        padded = tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], constant_values=-np.inf)
        if blur_pool == "convolutions_and_pools":
            x = blurred(tf.nn.max_pool2d(padded, 3, 1, "VALID"))[:, ::2, ::2]
        else:
            x = tf.nn.max_pool2d(padded, 3, 2, "VALID")
    stage = block = 1
    while f"stage{stage}_block1_add" in names:
        name = f"stage{stage}_block{block}"
        stride = 2 if stage > 1 and block == 1 else 1
        y = x
        for i in range(1, convs_per_block + 1):
            strided = 2 if convs_per_block == 3 and not stride_on_1x1 else 1
            y = conv_norm(y, f"{name}_conv{i}", f"{name}_bn{i}", stride if i == strided else 1)
            if i < convs_per_block:
                y = tf.nn.relu(y)
        if f"{name}_projection_conv" in names:
            x = conv_norm(x, f"{name}_projection_conv", f"{name}_projection_bn", stride)
        elif stride == 2:
            x = tf.concat([x[:, ::2, ::2], tf.zeros_like(x[:, ::2, ::2])], axis=-1)
        x = tf.nn.relu(x + y)
        block += 1
        if f"stage{stage}_block{block}_add" not in names:
            stage, block = stage + 1, 1
    v = variables("logits")
    return tf.reduce_mean(x, [1, 2]) @ v["kernel"] + v["bias"]


@pytest.mark.parametrize(
    ("make", "convs_per_block", "options"),
    [
        pytest.param(functools.partial(resnet, 18), 2, {}, marks=pytest.mark.long),
        pytest.param(functools.partial(resnet, 18), 2, {"stem": "small"}, marks=pytest.mark.long),
        (functools.partial(resnet, 18), 2, {"blur_pool": "convolutions_and_pools"}),
        (functools.partial(resnet, 50), 3, {}),
        pytest.param(
            functools.partial(resnet, 50), 3, {"stride_on_1x1": True}, marks=pytest.mark.long
        ),
        pytest.param(
            functools.partial(resnet, 50),
            3,
            {"stride_on_1x1": True, "blur_pool": "convolutions"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            functools.partial(resnet, 50), 3, {"blur_pool": "convolutions"}, marks=pytest.mark.long
        ),
        pytest.param(functools.partial(cifar_resnet, 20), 2, {}, marks=pytest.mark.long),
    ],
    ids=["18", "18-small", "18-blur", "50-v1.5", "50-v1", "50-v1-blur", "50-v1.5-blur", "cifar-20"],
)
def test_equals_the_reference(make, convs_per_block, options):
    model = make(5, (None, None, 3), **options)  # open, as both sizes show
    randomise(model)
    # An odd size too, where the last window of a stride may hang over the edge.
    for shape in ((64, 32, 3), (45, 51, 3)):
        images = np.random.default_rng(1).normal(size=(2, *shape)).astype("float32")
        stride_on_1x1 = options.get("stride_on_1x1", False)
        blur_pool = options.get("blur_pool", "none")
        expected = reference(model, images, convs_per_block, stride_on_1x1, blur_pool).numpy()
        assert expected.std() > 0
        np.testing.assert_allclose(
            model(images, training=False), expected, rtol=0, atol=2e-5 * np.abs(expected).max()
        )


@pytest.mark.parametrize("shape", [(2, 4, 6, 3), (2, 5, 7, 3)])
def test_option_a_shortcut(shape):
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    y = SubsampleAndPad(2, 8)(x).numpy()
    assert y.shape == (2, -(-shape[1] // 2), -(-shape[2] // 2), 8)
    np.testing.assert_array_equal(y[..., :3], x[:, ::2, ::2])
    assert not y[..., 3:].any()


@pytest.mark.parametrize("file", ["model.keras", "model.h5"])
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_saving_the_option_a_shortcut(file, tmp_path):
    images = keras.Input((5, 7, 3))
    model = keras.Model(images, SubsampleAndPad(2, 8, name="shortcut")(images))
    model.save(tmp_path / file)
    again = keras.models.load_model(tmp_path / file, compile=False)
    layer = again.get_layer("shortcut")
    assert (layer.strides, layer.filters) == (2, 8)
    x = np.random.default_rng(0).normal(size=(2, 5, 7, 3)).astype("float32")
    np.testing.assert_array_equal(again(x), model(x))


def test_training_updates_the_moving_averages_by_the_momentum():
    model = cifar_resnet(20, batch_norm_momentum=0.75)
    images = np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype("float32")
    norm = model.get_layer("stem_bn")
    mean = tf.reduce_mean(keras.Model(model.inputs, norm.input)(images), [0, 1, 2])
    model(images, training=True)
    np.testing.assert_allclose(norm.moving_mean, 0.25 * mean, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resnet(20), r"no depth 20; the depths are \(18, 34, 50, 101, 152\)"),
        (lambda: cifar_resnet(50), r"no depth 50; the depths are \(8, 14, 20, 32, 56\)"),
        (lambda: resnet(50, stem="cifar"), "no stem 'cifar'.*small"),
        (lambda: resnet(50, blur_pool="pools"), "no blur_pool 'pools'.*convolutions_and_pools"),
        (lambda: cifar_resnet(20, gamma_init="normal"), "no gamma_init 'normal'.*uniform"),
        (lambda: cifar_resnet(20, conv_init="he"), "no conv_init 'he'.*he_normal"),
        (lambda: resnet(50, padding="valid"), "no padding 'valid'.*same"),
        (lambda: resnet(18, width=-8), "resnet18: width=-8 is negative"),
        (lambda: resnet(34, stride_on_1x1=True), r"depth 34 .*\(50, 101, 152\)"),
    ],
)
def test_invalid_arguments(make, message):
    with pytest.raises(UserError, match=message):
        make()
