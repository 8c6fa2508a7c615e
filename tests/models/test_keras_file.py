"""``.keras`` files that others made: those of Keras' layers, and those that would run code."""

import copy
import gzip
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
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.models import keras_config

DATA = pathlib.Path(__file__).parent / "data"
EVIL = {"class_name": "function", "module": "evil", "config": "f", "registered_name": "f"}
EVIL_CLASS = {"module": "evil", "class_name": "Evil", "registered_name": None, "config": {}}
EVIL_SPEC = {**EVIL_CLASS, "class_name": "__typespec__", "spec_name": "Evil", "config": []}
SYSTEM = {"class_name": "function", "module": "os", "config": "system", "registered_name": "system"}


def layer(kind, module="keras.layers", /, **config):
    """The entry of a layer."""
    return {"module": module, "class_name": kind, "registered_name": None, "config": config}


@keras.saving.register_keras_serializable("test_keras_file")
class NoLayer:
    def get_config(self):
        return {}

    @classmethod
    def from_config(cls, config):
        raise AssertionError("it ran")


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
    assert not getattr(again, "compiled", False) and not getattr(again, "_is_compiled", False)


@pytest.mark.skipif(KERAS_2, reason="a file of a later version")
def test_a_file_of_tf_keras(tmp_path):
    """Written, with the outputs below, by the program in data/make_tf_keras.py."""
    path = tmp_path / "tf_keras.keras"
    path.write_bytes(gzip.decompress((DATA / "tf_keras.keras.gz").read_bytes()))
    images = np.random.default_rng(0).uniform(0, 255, (2, 8, 8, 3)).astype("float32")
    expected = [
        [0.0295985, 0.0387440, 0.0213248, -0.0435277, -0.0000791, -0.0108469, -0.0392371],
        [0.0265511, 0.0358547, 0.0176992, -0.0408302, -0.0039292, -0.0127997, -0.0395349],
    ]
    outputs = models.load(path)(images, training=False)
    # One layer computes in bfloat16, whose products processors round differently.
    np.testing.assert_allclose(outputs, expected, atol=3e-4)


@pytest.mark.skipif(KERAS_2, reason="Keras 3's operations")
def test_operations(tmp_path):
    images = keras.Input((6, 6, 3))
    x = keras.layers.Conv2D(4, 3, dtype="mixed_bfloat16", name="conv")(images / 127.5 - 1)
    x = keras.ops.relu(x) + keras.ops.mean(x, axis=(1, 2), keepdims=True)
    x = keras.ops.concatenate([x[:, 1:, ::2], x[:, 1:, 1::2]], axis=-1)
    model = keras.Model([images], keras.ops.reshape(x, (-1, 48)))
    model.save(tmp_path / "model.keras")
    again = models.load(tmp_path / "model.keras")
    pixels = np.random.default_rng(0).uniform(0, 255, (2, 6, 6, 3)).astype("float32")
    np.testing.assert_array_equal(again([pixels]), model([pixels]))
    assert again.get_layer("conv").dtype_policy.name == "mixed_bfloat16"


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
        {**layer("Dense", units=3), "registered_name": "test_keras_file>NoLayer"},
        {**layer("Dense", units=3), "registered_name": "SGD"},
        layer("RandAugment", num_ops=2**31),
        layer("SGD", "keras.optimizers"),
        layer("Scan", "keras.src.ops.core"),
        layer("Add", "os"),
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
    inside = layer("Activation", name="inside", activation="relu")
    inner = layer("Sequential", "keras", name="inner", layers=[inside])
    config["config"]["layers"].insert(1, {**inner, "compile_config": config["compile_config"]})
    assert models.load(write(config)).layers[0].name == "inner"
    assert not evil.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"units": 10**6},
            r"its layers need 16,000,0\d\d bytes of weights or more, but its file",
        ),
        ({"units": 2**30}, r"its layers need 17,179,869,\d+ bytes"),
        ({"units": 2**40}, "units is 1,099,511,627,776"),
        ({"units": -1}, "TypeError"),
        ({"units": "many"}, "TypeError"),
        ({"units": 5}, "hape"),
        ({"name": "a\0b"}, "NULL|not a valid root scope name"),
    ],
)
def test_sizes_and_types(arguments, message, saved, write):
    config = copy.deepcopy(saved["sequence"][0])
    config["config"]["layers"][1]["config"].update(arguments)
    with pytest.raises(UserError, match=f"cannot read a model from .*: .*{message}"):
        models.load(write(config))


def network_of_keras_2(*hidden, name="network", last="a"):
    """The configuration of an input ``i``, given layers, and ``b`` on the outputs of ``last``."""
    entries = [layer("InputLayer", name="i", batch_input_shape=[None, 4])]
    entries += [*hidden, layer("Activation", name="b", activation="relu")]
    calls = [[], *(entry.pop("inbound_nodes") for entry in hidden), [[[last, 0, 0, {}]]]]
    places = {"input_layers": [["i", 0, 0]], "output_layers": [["b", 0, 0]]}
    named = [
        {**entry, "name": entry["config"]["name"], "inbound_nodes": nodes}
        for entry, nodes in zip(entries, calls)
    ]
    return layer("Functional", "keras.src.engine.functional", name=name, layers=named, **places)


def called(entry, *places):
    """An entry of a layer that is called on others' outputs, by their names and calls."""
    return {**entry, "inbound_nodes": [[[*place, 0, {}]] for place in places]}


def relu(name):
    return layer("Activation", name=name, activation="relu")


def test_layers_that_need_each_other(write):
    """Keras 2 would look for the first of them for ever."""
    with pytest.raises(UserError, match=r"its layers need each other's outputs|has loops"):
        models.load(write(network_of_keras_2(called(relu("a"), ("b", 0)))))


def test_layers_in_the_order_that_takes_longest(write, monkeypatch):
    """Keras would go through all layers once for each."""
    monkeypatch.setattr(keras_config, "_MOST_PASSES", 20)
    hidden = [called(relu(f"a{i}"), (f"a{i + 1}", 0)) for i in range(30)]
    hidden.append(called(relu("a30"), ("i", 0)))
    with pytest.raises(UserError, match="its layers need each other's outputs"):
        models.load(write(network_of_keras_2(*hidden, last="a0")))


def test_models_that_call_models(write):
    """Each calls the one in it ten times: a million layers in a few kilobytes."""
    config = network_of_keras_2(called(relu("a"), ("i", 0)))
    for depth in range(6):
        config["config"]["name"] = f"model{depth}"
        inner = called(config, *[("i", 0)] * 10)
        config = network_of_keras_2(inner, last=f"model{depth}")
    with pytest.raises(UserError, match="it has more than 50,000 layers"):
        models.load(write(config))


@pytest.mark.skipif(KERAS_2, reason="calls in Keras 3's format")
@pytest.mark.parametrize("arguments", [[[[[[[1.0]]]]]], [], ["__keras_tensor__"]])
def test_layers_that_would_compute_at_once(arguments, saved, write):
    config = copy.deepcopy(saved["network"][0])
    huge = layer("ZeroPadding2D", name="huge", padding=2**30)
    calls = [{"args": arguments, "kwargs": {}}]
    config["config"]["layers"].append({**huge, "name": "huge", "inbound_nodes": calls})
    with pytest.raises(UserError, match="huge is called without an output of a layer"):
        models.load(write(config))


def test_loops_of_python(saved, write):
    config = copy.deepcopy(saved["sequence"][0])
    steps = layer("InputLayer", name="steps", batch_input_shape=[None, 2**20, 4])
    recurrent = layer("SimpleRNN", name="a", units=3, unroll=True)
    config["config"]["layers"] = [steps, recurrent]
    checked = keras_config.checked_config(config)["config"]["layers"][1]
    assert (checked["class_name"], checked["config"]["unroll"]) == ("SimpleRNN", False)
    spectral = layer("SpectralNormalization", layer=relu("a"), power_iterations=2**30)
    config["config"]["layers"][1] = spectral
    with pytest.raises(UserError, match="power_iterations is 1,073,741,824"):
        models.load(write(config))


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
        with pytest.raises(UserError, match=rf"{what}.*if you trust it, keras\.saving\.load_m"):
            models.load(tmp_path / f"{name}.keras")
