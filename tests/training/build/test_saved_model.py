"""Weights and class names of exported models, some of which would do something when loaded."""

import shutil

import numpy as np
import pytest
import tensorflow as tf
from checkpoint_writer import entry, write_checkpoint
from small_config import SMALL
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.trackable.resource import CapturableResource

from imagenet_fast import UserError, build_model, export
from imagenet_fast.base.paths import to_path
from imagenet_fast.training.build.saved_model import read_saved_model

LIMIT = 2**24


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export(build_model(SMALL), tmp_path_factory.mktemp("exported") / "model")


@pytest.fixture
def changed(exported, tmp_path):
    """A copy to change."""
    return to_path(shutil.copytree(exported, tmp_path / "model"))


def change_graph(folder, change):
    path = folder / "saved_model.pb"
    model = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    change(model.meta_graphs[0])
    path.write_bytes(model.SerializeToString())


def labels_constant(graph):
    """The node of the graph with the class names."""
    return next(
        node
        for node in graph.graph_def.node
        if node.op == "Const" and node.attr["value"].tensor.dtype == 7
    )


def test_same_as_tensorflow_loads(exported):
    weights, labels = read_saved_model(to_path(exported), LIMIT)
    loaded = tf.saved_model.load(exported)
    expected = {
        name.partition("/")[2]: variable.numpy()
        for name, variable in loaded._weights.items()
        if variable.dtype.is_floating
    }
    assert {"stem_conv/kernel", "logits/bias"} < expected.keys()
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)
    assert labels == tuple(label.decode() for label in loaded.labels().numpy())


def test_exports_of_the_versions_on_tf_keras(tmp_path):
    """They have a list of variables whose names say of which layer they are."""

    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            names = ("stem_conv/kernel", "stem_bn/gamma", "dropout/state")
            values = ([0.0], [1.0], [7])
            self._weights = [tf.Variable(value, name=name) for name, value in zip(names, values)]
            self._labels = tf.constant(["cat", "dog"])

        @tf.function(input_signature=[])
        def labels(self):
            return self._labels

    tf.saved_model.save(Module(), str(tmp_path / "model"))
    weights, labels = read_saved_model(to_path(tmp_path, "model"), LIMIT)
    assert weights == {"stem_conv/kernel": [0.0], "stem_bn/gamma": [1.0]}
    assert labels == ("cat", "dog")


def test_models_of_tf_keras(tmp_path):
    """They have lists of all weights, an optimizer and metrics, but no class names."""

    def node(**children):
        made = tf.__internal__.tracking.AutoTrackable()
        for name, child in children.items():
            setattr(made, name, child)
        return made

    kernel, total = tf.Variable([2.0], name="logits/kernel"), tf.Variable(3.0, name="total")
    momentum = tf.Variable([4.0], name="SGD/m/logits/kernel")
    optimizer, metrics = node(_variables=[momentum]), node(metrics=[node(total=total)])
    model = node(optimizer=optimizer, keras_api=metrics, variables=[kernel])
    tf.saved_model.save(model, str(tmp_path / "model"))
    assert read_saved_model(to_path(tmp_path, "model"), LIMIT) == ({"logits/kernel": [2.0]}, ())


def test_nothing_in_it_runs(exported, tmp_path):
    """A program that writes a file when it is loaded, with an export's weights."""
    written = tmp_path / "written"

    class Resource(CapturableResource):
        @tf.function(input_signature=[])
        def _create_resource(self):
            return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[])

        @tf.function(input_signature=[])
        def _initialize(self):
            tf.io.write_file(str(written), "it ran")
            return 1

    module = tf.Module()
    module.resource = Resource()
    tf.saved_model.save(module, str(tmp_path / "program"))
    written.unlink(missing_ok=True)
    tf.saved_model.load(str(tmp_path / "program"))
    assert written.exists()
    written.unlink()
    folder = tmp_path / "program"
    shutil.rmtree(folder / "variables")
    shutil.copytree(to_path(exported) / "variables", folder / "variables")
    with pytest.raises(ValueError, match="has no class names"):
        read_saved_model(folder, LIMIT)
    with pytest.raises(UserError, match=r"that `export` or tf_keras wrote: saved_model\.pb"):
        build_model(SMALL.replace(initial_weights=str(folder)))
    assert not written.exists()


def test_index_that_would_end_the_process(changed, run_python):
    write_checkpoint(changed / "variables" / "variables", {b"a": entry([2**62] * 2, 0)})
    program = (
        "import sys; from imagenet_fast import Config, build_model\n"
        "options = {'model': 'resnet8', 'synthetic': True, 'num_classes': 10}\n"
        "build_model(Config(**options, initial_weights=sys.argv[1]))"
    )
    done = run_python(["-c", program, changed], check=False)
    assert done.returncode == 1
    assert "variables.index is damaged, or claims what is not there: a has" in done.stderr


def test_larger_than_the_network(exported):
    with pytest.raises(ValueError, match=r"weights have [\d,]+ bytes, but may have 1,000 here"):
        read_saved_model(to_path(exported), 1000)


def test_no_variables(changed):
    shutil.rmtree(changed / "variables")
    with pytest.raises(FileNotFoundError):
        read_saved_model(changed, LIMIT)
    with pytest.raises(UserError, match=r"`export` or tf_keras wrote: .*No such file"):
        build_model(SMALL.replace(initial_weights=str(changed)))


def test_weights_without_names(changed):
    prefix = str(changed / "variables" / "variables")
    tf.raw_ops.SaveV2(
        prefix=prefix, tensor_names=["a"], shape_and_slices=[""], tensors=[tf.zeros([3])]
    )
    with pytest.raises(ValueError, match="does not name its variables"):
        read_saved_model(changed, LIMIT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: graph.object_graph_def.Clear(), "has no class names"),
        (lambda graph: graph.graph_def.Clear(), "has no class names"),
        (
            lambda graph: setattr(graph.object_graph_def.nodes[0].children[7], "node_id", -(9**5)),
            "has no class names",
        ),
        (
            lambda graph: labels_constant(graph).attr["value"].tensor.string_val.append(b"more"),
            "no list of texts",
        ),
        (
            lambda graph: setattr(
                labels_constant(graph).attr["value"].tensor.tensor_shape.dim[0], "size", 2**40
            ),
            "no list of texts",
        ),
    ],
)
def test_no_class_names(changed, change, message):
    change_graph(changed, change)
    with pytest.raises(ValueError, match=message):
        read_saved_model(changed, LIMIT)


def test_class_name_that_is_no_text(changed):
    def change(graph):
        labels_constant(graph).attr["value"].tensor.string_val[0] = b"\xff"

    change_graph(changed, change)
    with pytest.raises(UserError, match="is not a SavedModel that `export` or tf_keras wrote"):
        build_model(SMALL.replace(initial_weights=str(changed)))


def test_half_a_graph(changed):
    content = (changed / "saved_model.pb").read_bytes()
    (changed / "saved_model.pb").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="damaged"):
        read_saved_model(changed, LIMIT)
