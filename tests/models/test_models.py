"""The table of models, and what all models have in common."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import models
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import layers_in
from imagenet_fast.models.options import MODEL_NAMES, ModelOptions
from imagenet_fast.optimizers import LARS

CELU = {"whitening": True, "activation": "celu"}
SMALL = {
    "resnet18": ("resnet18", (32, 32, 3), {"stem": "small"}),
    "resnet18, blur": ("resnet18", (32, 32, 3), {"blur_pool": "convolutions_and_pools"}),
    "resnet20": ("resnet20", (32, 32, 3), {}),
    "alexnet_bn": ("alexnet_bn", (64, 64, 3), {}),
    "resnet9": ("resnet9", (32, 32, 3), {"width": 4}),
    "resnet9, whitening": ("resnet9", (32, 32, 3), {"width": 4, **CELU}),
    "airbench94": ("airbench94", (32, 32, 3), {"width": 4}),
    "amoebanet_b": ("amoebanet_b", (32, 32, 3), {"normal_cells": 3, "cell_filters": 8}),
    "amoebanet_d": ("amoebanet_d", (32, 32, 3), {"normal_cells": 3, "cell_filters": 8}),
}
# Those with layers and initializers of this package.
OWN_LAYERS = ("resnet20", "resnet9, whitening", "airbench94")


def some_long(keys):
    """The arguments of all networks; all but some are left to the long run."""
    return [
        pytest.param(*network, marks=() if key in keys else pytest.mark.long, id=key)
        for key, network in SMALL.items()
    ]


@functools.cache
def _small(key):
    name, shape, options = SMALL[key]
    return models.build(name, 7, shape, **options)


def small(name, shape, options):
    """One of each for the tests that do not change it."""
    network = (name, shape, options)
    return _small(next(key for key, other in SMALL.items() if other == network))


@pytest.fixture(autouse=True)
def default_precision():
    yield
    keras.mixed_precision.set_global_policy("float32")


def test_names_need_no_tensorflow():
    code = (
        "import sys, imagenet_fast.models.options as names\n"
        "assert 'resnet50' in names.MODEL_NAMES\n"
        "sys.exit(any(m.split('.')[0] in ('tensorflow', 'keras', 'h5py') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_table_holds_the_names_in_their_order():
    assert tuple(models.MODELS) == MODEL_NAMES


def test_no_other_lazy_attribute():
    with pytest.raises(AttributeError, match="no attribute 'MODEL'"):
        _ = models.MODEL


def test_build_passes_everything_on():
    model = models.build(
        "resnet18", 7, (40, 48, 1), stem="small", batch_norm_momentum=0.8, name="mine"
    )
    assert model.name == "mine"
    assert model.input_shape == (None, 40, 48, 1)
    assert model.output_shape == (None, 7)
    assert model.get_layer("stem_conv").kernel_size == (3, 3)
    assert model.get_layer("stem_bn").momentum == 0.8
    assert not hasattr(model, "optimizer") or model.optimizer is None


def test_random_layers_are_of_this_package():
    """What Keras' own draw is neither in checkpoints nor the same on replicas and in stages."""
    used = set()
    for path in pathlib.Path(models.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                used.add(node.func.attr)
    layers = {name: getattr(keras.layers, name) for name in used if hasattr(keras.layers, name)}
    assert "Conv2D" in layers
    drawing = {name for name in vars(keras.layers) if re.search("Random|Dropout|Noise", name)}
    assert {"Dropout", "SpatialDropout2D", "GaussianNoise", "RandomFlip"} <= drawing
    assert not drawing & layers.keys()


def test_unknown_model():
    with pytest.raises(UserError, match=r"no model 'resnet5'.*did you mean.*'resnet50'"):
        models.build("resnet5", 10, (32, 32, 3))


def test_options_match_the_models_that_have_them():
    fields = {field.name: field for field in dataclasses.fields(ModelOptions)}
    beside = {}
    read_by_training = {"whitening_images", "proxy_model", "proxy_width"}
    for name in fields.keys() - read_by_training:
        conditions = fields[name].metadata["only_if"]
        while conditions and conditions[0].option != "model":  # celu_alpha's is on activation
            conditions = fields[conditions[0].option].metadata["only_if"]
        # All but users' own networks, and those of libraries.
        if conditions and conditions[0].values not in (
            MODEL_NAMES,
            ("keras:NAME", "keras_hub:PRESET"),
        ):
            beside[name] = conditions[0].values
    has = {
        name: tuple(model for model in MODEL_NAMES if name in models.option_names(model))
        for name in fields
    }
    assert beside == {name: those for name, those in has.items() if those not in ((), MODEL_NAMES)}
    assert len(beside) > 10


def test_option_of_other_models():
    with pytest.raises(UserError, match=r"'alexnet_bn' has no option 'zero_gamma'.*resnet152"):
        models.build("alexnet_bn", 10, (64, 64, 3), zero_gamma=True)
    with pytest.raises(UserError, match=r"'resnet20' has no option 'dropout'.*are alexnet_bn$"):
        models.build("resnet20", 10, (32, 32, 3), dropout=0.1)


def test_option_of_no_model():
    with pytest.raises(UserError, match=r"'zero_gama'; did you mean 'zero_gamma'"):
        models.build("resnet20", 10, (32, 32, 3), zero_gama=True)


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet20", "alexnet_bn", "resnet9", "airbench95", "amoebanet_d"]
)
@pytest.mark.parametrize("shape", [(64, 64), (64, 64, None), (64, 0, 3), (2, 64, 64, 3)])
def test_impossible_input_shape(name, shape):
    with pytest.raises(UserError, match="input_shape"):
        models.build(name, 10, shape)


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet20", "alexnet_bn", "resnet9", "airbench95", "amoebanet_d"]
)
def test_no_classes(name):
    with pytest.raises(UserError, match="num_classes=0"):
        models.build(name, 0, (64, 64, 3))


@pytest.mark.parametrize(
    ("policy", "name", "shape", "options"),
    [
        # Of AmoebaNets, test_amoebanet.py has the same of their cells.
        pytest.param(policy, *network.values, marks=network.marks, id=network.id)
        for policy, network in zip(
            itertools.cycle(["mixed_bfloat16", "mixed_float16"]),
            some_long(("alexnet_bn", *OWN_LAYERS)),
        )
    ],
)
def test_precision(policy, name, shape, options):
    keras.mixed_precision.set_global_policy(policy)
    model = models.build(name, 7, shape, **options)
    images = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")

    for training in (False, True):
        logits = model(images, training=training)
        assert logits.dtype == "float32"
        assert logits.shape == (2, 7)
        assert np.isfinite(logits).all()
    dtypes = [tf.as_dtype(variable.dtype) for variable in model.variables]
    floats = {dtype.name for dtype in dtypes if dtype.is_floating}
    assert floats == {"float32"}
    compute_dtypes = {
        layer.name: layer.compute_dtype for layer in model.layers if layer.name != "images"
    }
    assert compute_dtypes.pop("logits") == "float32"
    assert compute_dtypes.pop("scale", "float32") == "float32"
    assert set(compute_dtypes.values()) == {policy.replace("mixed_", "")}


@pytest.mark.parametrize(("name", "shape", "options"), some_long(("resnet18", *OWN_LAYERS)))
def test_plain_logits_and_the_papers_batch_norm(name, shape, options):
    model = small(name, shape, options)
    logits = model.get_layer("logits")
    assert logits.activation is keras.activations.linear
    assert logits.bias is None or not logits.bias.numpy().any()
    norms = [x for x in layers_in(model) if isinstance(x, keras.layers.BatchNormalization)]
    expected = (0.6, 1e-12) if name == "airbench94" else (0.9, 1e-5)
    assert {(norm.momentum, norm.epsilon) for norm in norms} == {expected}


@pytest.mark.parametrize(
    ("name", "shape", "options"), some_long(("resnet18", "alexnet_bn", *OWN_LAYERS))
)
def test_batch_norm_options_reach_every_layer(name, shape, options):
    model = models.build(
        name, 7, shape, batch_norm_momentum=0.75, batch_norm_epsilon=0.002, **options
    )
    norms = [x for x in layers_in(model) if isinstance(x, keras.layers.BatchNormalization)]
    assert norms
    assert {(norm.momentum, norm.epsilon) for norm in norms} == {(0.75, 0.002)}


@pytest.mark.parametrize("name", ["resnet8", "resnet9"])
def test_same_seed_same_weights_and_no_two_layers_alike(name):
    def weights():
        keras.utils.set_random_seed(3)
        model = models.build(name, 7, (32, 32, 3))
        return [v.numpy() for v in model.trainable_variables]

    first = weights()
    for a, b in zip(first, weights()):
        np.testing.assert_array_equal(a, b)
    kernels = [w.ravel()[:100].tobytes() for w in first if w.ndim > 1]
    assert len(set(kernels)) == len(kernels)


@pytest.mark.parametrize(("name", "shape", "options"), some_long(OWN_LAYERS))
def test_model_from_its_config(name, shape, options):
    model = small(name, shape, options)
    again = keras.Model.from_config(model.get_config())
    assert again.name == model.name
    weights = [tuple(variable.shape) for variable in model.weights]
    assert [tuple(variable.shape) for variable in again.weights] == weights
    again.set_weights(model.get_weights())
    images = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    np.testing.assert_allclose(again(images), model(images), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "keys",
    [OWN_LAYERS, pytest.param(tuple(SMALL), marks=pytest.mark.long)],
    ids=["own_layers", "all"],
)
def test_load_in_a_new_process(keys, tmp_path, run_python):
    image = np.random.default_rng(0).normal(size=(64, 64, 3)).astype("float32")
    np.save(tmp_path / "image.npy", image)
    expected = []
    for key in keys:
        _, shape, _ = SMALL[key]
        model = _small(key)
        model.save(tmp_path / f"{key}.keras")
        expected.append(model(image[None, : shape[0], : shape[1]]).numpy())
    program = f"""
import numpy as np
from imagenet_fast import models
image = np.load("image.npy")
logits = []
for key in {list(keys)}:
    model = models.load(f"{{key}}.keras")
    height, width, _ = model.input_shape[1:]
    logits.append(model(image[None, :height, :width]).numpy())
np.save("logits.npy", logits)
"""
    program = f"import os; os.chdir({str(tmp_path)!r})" + program
    run_python(["-c", program])
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, rtol=1e-5, atol=1e-6)


def test_keras_loads_a_compiled_model_in_a_new_process(tmp_path, run_python):
    """With its optimizer, to go on with its training."""
    images, labels = np.ones((4, 8, 8, 3), "float32"), np.arange(4)
    model = models.build("resnet8", 4, (8, 8, 3))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(LARS(0.1, name="own"), loss)
    model.fit(images, labels, verbose=0)
    model.save(tmp_path / "model.keras")
    found = run_python(
        [
            "-c",
            "import sys, keras; import imagenet_fast.models, imagenet_fast.optimizers; "
            "model = keras.models.load_model(sys.argv[1]); "
            "print(model.optimizer.name, int(model.optimizer.iterations))",
            tmp_path / "model.keras",
        ]
    )
    assert found.stdout.split() == ["own", "1"]


def test_no_model_in_a_file(tmp_path):
    (tmp_path / "text.keras").write_text("not a model")
    for name in ("text.keras", "none.keras"):
        with pytest.raises(UserError, match=f"cannot read a model from .*{name}: "):
            models.load(tmp_path / name)


@pytest.mark.parametrize(("name", "shape", "options"), some_long(("resnet18", "resnet20")))
def test_strided_1x1_convolutions_have_16_input_channels(name, shape, options):
    """With fewer, oneDNN corrupts the heap: its issue 6035."""
    convolutions = [
        layer
        for layer in layers_in(small(name, shape, options))
        if isinstance(layer, keras.layers.Conv2D) and layer.kernel_size == (1, 1)
    ]
    strided = [layer for layer in convolutions if layer.strides != (1, 1)]
    assert convolutions or not name.startswith(("resnet1", "amoebanet"))
    assert all(layer.kernel.shape[2] >= 16 for layer in strided)
