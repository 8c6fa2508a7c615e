"""``.keras`` files that others made: those of Keras' layers, and those that would run code."""

import copy
import io
import json
import pathlib
import sys
import zipfile

import h5py
import keras
import numpy as np
import pytest

from imagenet_fast import models
from imagenet_fast.base.errors import UserError

EVIL = {"class_name": "function", "module": "evil", "config": "f", "registered_name": "f"}
EVIL_CLASS = {"module": "evil", "class_name": "Evil", "registered_name": None, "config": {}}
EVIL_SPEC = {**EVIL_CLASS, "class_name": "__typespec__", "spec_name": "Evil", "config": []}
SYSTEM = {"class_name": "function", "module": "os", "config": "system", "registered_name": "system"}


def layer(kind, module="keras.layers", /, **config):
    """The entry of a layer."""
    return {"module": module, "class_name": kind, "registered_name": None, "config": config}


def lambda_layer(function, module="keras.layers"):
    return layer(
        "Lambda",
        module,
        name="l",
        function=function,
        function_type="function",
        module="os",
        output_shape=None,
        output_shape_type="raw",
        output_shape_module=None,
        arguments={},
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The configurations of a sequence and of a network, and the weights of both."""
    folder = tmp_path_factory.mktemp("saved")
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, activation="relu", name="a")
    outputs = keras.layers.Dense(2, name="b")
    keras.Sequential([inputs, hidden, outputs]).save(folder / "sequence.keras")
    keras.Model(inputs, outputs(hidden(inputs))).save(folder / "network.keras")
    parts = {}
    for name in ("sequence", "network"):
        with zipfile.ZipFile(folder / f"{name}.keras") as archive:
            config = json.loads(archive.read("config.json"))
            parts[name] = config, archive.read("model.weights.h5")
    return parts


@pytest.fixture
def write(saved, tmp_path):
    """Writes a file; returns its path."""

    def write(config, weights=saved["sequence"][1], compression=zipfile.ZIP_STORED):
        path = tmp_path / "model.keras"
        with zipfile.ZipFile(path, "w", compression) as archive:
            text = config if isinstance(config, str) else json.dumps(config)
            archive.writestr("config.json", text)
            archive.writestr("model.weights.h5", weights)
        return path

    return write


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A module on the path that leaves a file when it is imported."""
    trace = tmp_path / "it_ran"
    text = (
        f"open({str(trace)!r}, 'w').close()\n"
        "def f(x): return x\n"
        "class Evil:\n    @classmethod\n    def from_config(cls, config): return cls()\n"
    )
    (tmp_path / "evil.py").write_text(text)
    (tmp_path / "ktf_eras").mkdir()
    (tmp_path / "ktf_eras" / "layers.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield trace
    for name in ("evil", "ktf_eras", "ktf_eras.layers"):
        sys.modules.pop(name, None)


def test_same_as_keras(saved, write):
    for config, weights in saved.values():
        path = write(config, weights)
        ours, theirs = models.load(path), keras.models.load_model(path, compile=False)
        assert ours.get_config() == theirs.get_config()
        for values, expected in zip(ours.get_weights(), theirs.get_weights()):
            np.testing.assert_array_equal(values, expected)


def test_shared_layers_and_models_in_models(tmp_path):
    inputs = keras.Input((8, 8, 3))
    part = keras.Sequential([keras.layers.Conv2D(3, 3, padding="same", activation="gelu")])
    shared = keras.layers.BatchNormalization(gamma_regularizer=keras.regularizers.L2(0.1))
    outputs = keras.layers.Add()([shared(part(inputs)), shared(part(part(inputs)))])
    model = keras.Model(inputs, keras.layers.Flatten()(outputs))
    model.compile("adam", "mse")
    part.compile("sgd", "mse")
    model.save(tmp_path / "model.keras")
    again = models.load(tmp_path / "model.keras")
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
    np.testing.assert_array_equal(again(images), model(images))
    assert not again._is_compiled


def test_a_registered_layer_of_the_users(tmp_path):
    @keras.saving.register_keras_serializable("test_keras_file")
    class Twice(keras.layers.Layer):
        def __init__(self, activation="of its own", **kwargs):
            super().__init__(**kwargs)

        def call(self, x):
            return 2 * x

    keras.Sequential([keras.Input((1,)), Twice()]).save(tmp_path / "model.keras")
    assert models.load(tmp_path / "model.keras")(np.ones([1, 1])) == 2


@pytest.mark.parametrize(
    "entry",
    [
        lambda_layer(SYSTEM),
        lambda_layer(SYSTEM, "tf_keras.layers"),
        lambda_layer(SYSTEM, "tf_keras.src.layers.core.lambda_layer"),
        lambda_layer("system"),
        lambda_layer({"class_name": "__lambda__", "config": {"value": ["", None, None]}}),
        {"class_name": "Lambda", "config": {"function": "system", "module": "os"}},
        layer("TFOpLambda", name="w", function="io.write_file"),
        layer("TFOpLambda", "tf_keras.src.layers.core.tf_op_layer", function="io.write_file"),
        layer("SlicingOpLambda", name="w", function="io.write_file"),
        layer("StringLookup", vocabulary="/etc/passwd"),
        layer("Dense", "ktf_eras.layers", units=3),
        layer("Dense", "evil", units=3),
        layer("Dense", units=3, activation=EVIL),
        layer("Dense", units=3, activation={**EVIL, "module": "builtins", "config": "exec"}),
        layer(
            "Dense",
            units=3,
            activation={**EVIL, "module": "builtins", "config": "relu", "registered_name": "exec"},
        ),
        layer("Dense", units=3, activation="deserialize"),
        layer("Dense", units=3, kernel_initializer=EVIL_CLASS),
        layer("Dense", units=3, kernel_regularizer="deserialize"),
        layer("Embedding", input_dim=EVIL, output_dim=2),
        layer("InputLayer", name="i", type_spec=EVIL_SPEC),
        layer("TimeDistributed", layer=EVIL_CLASS),
        {**layer("Dense", units=3), "build_config": {"input_shape": EVIL_SPEC}},
        {**layer("Dense", units=3), "registered_name": "Custom>SGD"},
        {**layer("Dense", units=3), "registered_name": ["Dense"]},
        {**EVIL_SPEC, "spec_name": "TensorSpec"},
        {"class_name": "__bytes__", "config": {"value": "a"}},
        {"class_name": "__numpy__", "config": {"value": "", "dtype": "S1000000000"}},
        {"class_name": ["Dense"], "config": {}},
        {"class_name": "function", "module": "builtins", "config": ["relu"]},
    ],
)
def test_nothing_is_imported_or_called_by_name(entry, saved, write, evil):
    config = copy.deepcopy(saved["sequence"][0])
    config["config"]["layers"].insert(1, entry)
    with pytest.raises(UserError, match=r"could run any code|which Keras does not have"):
        models.load(write(config))
    # In place of the model.
    with pytest.raises(UserError, match=r"could run any code|which Keras does not have"):
        models.load(write(entry))
    assert not evil.exists()


def test_what_is_compiled_is_ignored(saved, write, evil):
    config = copy.deepcopy(saved["sequence"][0])
    config["compile_config"] = {"optimizer": "sgd", "loss": EVIL}
    inner = layer("Sequential", "keras", name="inner", layers=[])
    config["config"]["layers"].insert(1, {**inner, "compile_config": config["compile_config"]})
    assert models.load(write(config)).layers[0].name == "inner"
    assert not evil.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": 10**6}, "its layers need 16,000,000 bytes of weights or more, but its weights"),
        ({"units": 2**30}, "its layers need 17,179,869,184 bytes"),
        ({"units": 2**40}, "units is 1,099,511,627,776"),
        ({"units": -1}, "TypeError"),
        ({"units": "many"}, "TypeError"),
        ({"units": 5}, "hape"),
        ({"name": "a\0b"}, "not a valid root scope name"),
    ],
)
def test_sizes_and_types(arguments, message, saved, write):
    config = copy.deepcopy(saved["sequence"][0])
    config["config"]["layers"][1]["config"].update(arguments)
    with pytest.raises(UserError, match=f"cannot read a model from .*: .*{message}"):
        models.load(write(config))


def test_layers_that_need_each_other(saved, write):
    """Keras would look for the first of them for ever."""
    config, weights = copy.deepcopy(saved["network"])
    config["config"]["layers"][1]["inbound_nodes"][0][0][0] = "b"
    with pytest.raises(UserError, match="its layers need each other's outputs"):
        models.load(write(config, weights))


def test_models_that_call_models(saved, write):
    """Each calls the one in it ten times: a million layers in a few kilobytes."""
    config, weights = copy.deepcopy(saved["network"])
    for depth in range(6):
        inner, config = config, copy.deepcopy(saved["network"][0])
        inner["config"]["name"] = name = f"model{depth}"
        nodes = [[["a", 0, 0, {}]] for _ in range(10)]
        config["config"]["layers"][2] = {**inner, "name": name, "inbound_nodes": nodes}
        config["config"]["output_layers"] = [[name, 1, 0]]
    with pytest.raises(UserError, match="it has more than 50,000 layers"):
        models.load(write(config, weights))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "Expected `object`"),
        ("{}", "config.json describes no model"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 90 + "1" + "}" * 90, "nested too deeply"),
        (json.dumps(layer("Dense", units=3)), "a Dense, not a model"),
        (" " * 2**23 + "{}", "config.json in it has 8,388,610 bytes, but may have 8,388,608"),
    ],
)
def test_configuration_that_is_none(text, message, write):
    with pytest.raises(UserError, match=message):
        models.load(write(text))


def test_weights_that_are_elsewhere_or_lacking(saved, write):
    config, _ = saved["sequence"]
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        opened["x"] = h5py.ExternalLink("/etc/passwd", "x")
    with pytest.raises(UserError, match="that Keras does not write"):
        models.load(write(config, file.getvalue()))
    with pytest.raises(UserError, match="not an HDF5 file"):
        models.load(write(config, b""))
    file = io.BytesIO()
    h5py.File(file, "w").close()
    with pytest.raises(UserError, match="cannot read a model from"):
        models.load(write(config, file.getvalue()))


def test_archives(saved, write, tmp_path):
    config, _ = saved["sequence"]
    path = write(config, bytes(10**6), zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match=r"config\.json in it is compressed: .* `zip -0`"):
        models.load(path)
    content = write(config).read_bytes()
    size = content.rindex(b"PK\1\2") + 20  # of the weights, compressed and as they are
    path.write_bytes(content[:size] + b"\xf0\xff\xff\x7f" * 2 + content[size + 8 :])
    with pytest.raises(UserError, match=r"model\.weights\.h5 in it has 2,147,483,632 bytes"):
        models.load(path)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="is not a zip file"):
        models.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../outside", "")
    with pytest.raises(UserError, match=r"it has no config\.json"):
        models.load(path)
    assert not (tmp_path.parent / "outside").exists()


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_other_formats_are_named(tmp_path):
    model = keras.Sequential([keras.layers.Dense(1, input_shape=(2,))])
    model.save(tmp_path / "model.h5")
    pathlib.Path(tmp_path / "model.h5").rename(tmp_path / "file.keras")
    (tmp_path / "folder.keras").mkdir()
    for name, what in (("file", "is not a zip file"), ("folder", "is a folder")):
        with pytest.raises(UserError, match=rf"{what}.*if you trust it, tf_keras\.models\.load_m"):
            models.load(tmp_path / f"{name}.keras")
