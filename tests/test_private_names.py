"""Private names of Keras and TensorFlow: docs/architecture.md has all of them, and they exist."""

import ast
import functools
import importlib
import inspect
import pathlib
import re

import keras
import pytest
import tensorflow as tf

from imagenet_fast.base.keras_2 import KERAS_2

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "imagenet_fast"
SECTION = (ROOT / "docs/architecture.md").read_text().split("\n## Private names\n")[1]
LISTED = re.findall(r"`([\w.]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", SECTION, re.MULTILINE)))
# What only Keras 2 has.
OF_KERAS_2 = {
    *("_build_learning_rate", "_index_dict", "_serialize_hyperparameter", "_var_key"),
    *("keras.src.backend", "keras.src.backend.get_default_graph_uid_map"),
}
# Methods that Python itself documents.
PYTHON = {"_asdict", "_exit", "_fields", "_replace"}
PRIVATE = re.compile(r"(keras\.src|tensorflow\.(python|compiler|core)|tf\.__internal__)\.")


def example(kind):
    """Returns an object of a public class, which has what its constructor gives it."""
    inputs = keras.Input([2])
    return {
        "keras.KerasTensor": lambda: inputs,
        "keras.Model": lambda: keras.Model(inputs, keras.layers.Dense(1)(inputs)),
        "keras.Sequential": lambda: keras.Sequential([inputs, keras.layers.Dense(1)]),
        "keras.layers.BatchNormalization": keras.layers.BatchNormalization,
        "keras.layers.Layer": keras.layers.Layer,
        "keras.optimizers.Optimizer": accumulating_optimizer,
        "tf.Variable": lambda: tf.Variable(0.0),
        "tf.distribute.StrategyExtended": lambda: (
            tf.distribute.MirroredStrategy(["CPU:0"]).extended
        ),
    }[kind]()


def accumulating_optimizer():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    optimizer.build([keras.Variable(0.0)])
    return optimizer


def find(name):
    """Returns the object of a dotted name, importing as much of it as is a module."""
    parts = (
        name.replace("tf.", "tensorflow.", 1).split(".") if name[:3] == "tf." else name.split(".")
    )
    found, place = importlib.import_module(parts[0]), parts[0]
    for part in parts[1:]:
        place += f".{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(place)
    return found


@functools.cache
def used():
    """Returns each private name in the package that it does not define, and its file."""
    return list(find_used())


def find_used():
    trees = {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }
    nodes = [(file, node) for file, tree in trees.items() for node in ast.walk(tree)]
    own = {node.name for _, node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for _, node in nodes if isinstance(node, ast.Name) and stored(node)}
    own |= {node.attr for _, node in nodes if isinstance(node, ast.Attribute) and stored(node)}
    for file, node in nodes:
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
            if re.match("_(?!_)", node.attr) and node.attr not in own:
                yield node.attr, file
        else:
            continue
        yield from ((name, file) for name in names if PRIVATE.match(name))


def stored(node):
    return isinstance(node.ctx, ast.Store)


@pytest.mark.parametrize("name", LISTED)
def test_a_name_exists(name):
    if KERAS_2 and name.startswith("keras."):
        pytest.skip("of Keras 3")
    kind, _, attribute = name.rpartition(".")
    if PRIVATE.match(name):
        if attribute.startswith("_"):  # of an object that only a cluster has
            assert re.search(rf"(self\.|def ){attribute}\b", inspect.getsource(find(kind)))
        else:
            find(name)
    else:
        assert hasattr(example(kind), attribute)


def test_what_is_listed_is_used():
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert [name for name in LISTED if name.rpartition(".")[2] not in code] == []


def test_all_names_are_listed():
    found = {name: file for name, file in used() if name not in PYTHON}
    assert len(found) > 20
    assert {found.pop(name, "base/keras_2.py") for name in OF_KERAS_2} == {"base/keras_2.py"}
    known = {*LISTED, *(name.rpartition(".")[2] for name in LISTED)}
    assert {name: file for name, file in found.items() if name not in known} == {}


ROWS = re.findall(r"^\| (`.*?) \| (.*) \|$", SECTION, re.MULTILINE)


@pytest.mark.parametrize(("names", "purpose"), ROWS, ids=[names[:40] for names, _ in ROWS])
def test_a_row_has_the_files(names, purpose):
    """A row that names files or folders names all that use its names, and no others."""
    places = tuple(re.findall(r"`([\w/]+(?:\.py|/))`", purpose))
    listed = set(re.findall(r"`([\w.]+)`", names))
    short = {name.rpartition(".")[2] for name in listed}
    files = {file for name, file in used() if name in listed | short}
    assert not places or [file for file in files if not file.startswith(places)] == []
    assert [place for place in places if not short & _words(PACKAGE / place)] == []


def _words(path):
    files = path.rglob("*.py") if path.is_dir() else [path]
    return {word for file in files for word in re.findall(r"\w+", file.read_text())}
