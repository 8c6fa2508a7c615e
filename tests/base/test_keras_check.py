"""Each way in which Keras can be the wrong one, in a process that stands for a command's."""

import pytest

# A command that begins as all do, with the versions of stand-ins.
COMMAND = """
import sys
from imagenet_fast import UserError
from imagenet_fast.distribute.quiet import import_tensorflow
try:
    import_tensorflow()
except UserError as error:
    sys.exit(f"told: {error}")
"""
TENSORFLOW = """
__version__ = "{}"
class sysconfig:
    get_build_info = staticmethod(dict)
class config:
    list_physical_devices = staticmethod(lambda kind: [])
"""
KERAS = """
import json, os
__version__ = "{}"
class backend:
    backend = staticmethod(lambda: os.environ["KERAS_BACKEND"])
    image_data_format = staticmethod(lambda: "channels_last")
"""


@pytest.fixture
def told(tmp_path, run_python):
    """Returns what the command says: told(tensorflow, keras, backend=None)."""

    def told(tensorflow, keras, backend=None):
        (tmp_path / "tensorflow.py").write_text(TENSORFLOW.format(tensorflow))
        (tmp_path / "keras.py").write_text(keras if "\n" in keras else KERAS.format(keras))
        environment = {"PYTHONPATH": str(tmp_path)}
        if backend is not None:
            environment["KERAS_BACKEND"] = backend
        finished = run_python(["-c", COMMAND], check=False, environment=environment)
        assert finished.stdout == ""
        return finished.stderr.strip()

    return told


@pytest.mark.parametrize(
    ("tensorflow", "keras", "advice"),
    [
        ("2.21.0", "3.15.1", None),
        ("2.22.0rc0", "3.16.0.dev2026102704", None),
        ("2.16.2", "3.10.0", None),
        ("2.15.1", "2.15.0", None),
        ("2.21.0", "3.9.2", "pip install 'keras>=3.10'"),
        ("2.16.1", "2.15.0", "pip install 'keras>=3.10'"),
        ("2.15.1", "3.10.0", "pip install 'keras==2.15.*'"),
    ],
)
def test_keras_must_be_for_this_tensorflow(told, tensorflow, keras, advice):
    expected = f"told: Keras {keras} is not for TensorFlow {tensorflow}; {advice}"
    assert told(tensorflow, keras) == (expected if advice else "")


def test_a_keras_that_cannot_be_imported(told):
    """As Keras 2 with TensorFlow 2.21, of which it takes a private name that is gone."""
    expected = (
        "told: Keras cannot be imported with TensorFlow 2.21.0: no private name; "
        "pip install 'keras>=3.10'"
    )
    assert told("2.21.0", "\nraise AttributeError('no private name')") == expected


@pytest.mark.parametrize("backend", ["jax", "torch", "numpy"])
def test_backends_that_cannot_train_here(told, backend):
    expected = (
        f"told: the backend of Keras is {backend}, but must be tensorflow; "
        "set KERAS_BACKEND=tensorflow before Keras is imported"
    )
    # Before TensorFlow is imported, which would take seconds.
    assert told("2.21.0\nraise SystemExit", "3.15.0", backend) == expected


def test_commands_choose_the_backend(told):
    """Though ``keras.json`` may name another one."""
    assert told("2.21.0", "3.15.0", "") == told("2.21.0", "3.15.0") == ""


def test_runs_of_python_programs_check_the_backend(monkeypatch):
    import keras

    from imagenet_fast import Config, UserError, build_model

    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(UserError, match=r"^the backend of Keras is jax"):
        build_model(Config(synthetic=True, num_classes=2))


def test_images_have_channels_last(monkeypatch):
    import keras

    from imagenet_fast import Config, UserError, build_model

    monkeypatch.setattr(keras.backend, "image_data_format", lambda: "channels_first")
    with pytest.raises(UserError, match=r"^image_data_format of Keras is channels_first, but"):
        build_model(Config(synthetic=True, num_classes=2))
