"""What is shown of what TensorFlow says at its start: a module of its name stands for it."""

import signal

import pytest

SAYS = "import os, resource\nos.write(2, b'last words\\n')\n"
FINDS_NOTHING = """
__version__ = "2.21.0"
class sysconfig:
    get_build_info = staticmethod(dict)
class config:
    list_physical_devices = staticmethod(lambda kind: [])
"""
LOOKS = """
__version__ = "2.21.0"
class errors:
    class OpError(Exception):
        message = "not found"
class sysconfig:
    get_build_info = staticmethod(lambda: {"is_cuda_build": True, "cuda_version": "12.5"})
def load_op_library(name):
    print("loads", name)
    raise errors.OpError
class config:
    list_physical_devices = staticmethod(lambda kind: print("lists") or [])
"""
KERAS = """
__version__ = "3.15.0"
class backend:
    backend = staticmethod(lambda: "tensorflow")
    image_data_format = staticmethod(lambda: "channels_last")
"""
NO_CORE = "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"


@pytest.fixture
def start(tmp_path, run_python):
    """Imports a module instead of TensorFlow, and returns the process."""

    def start(module):
        (tmp_path / "tensorflow.py").write_text(module)
        (tmp_path / "keras.py").write_text(KERAS)
        code = "from imagenet_fast.distribute.quiet import import_tensorflow as f; f(); print('on')"
        # The package is found in the working directory.
        return run_python(["-c", code], check=False, environment={"PYTHONPATH": str(tmp_path)})

    return start


def test_nothing_is_shown_of_a_good_start(start):
    finished = start(SAYS + FINDS_NOTHING)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "on\n", "")


def test_cuda_libraries_are_loaded_before_tensorflow_looks_for_gpus(start):
    """It looks once (``CachedDsoLoader``, ``dso_loader.cc``)."""
    finished = start(LOOKS)
    assert finished.stdout == "loads libcuda.so.1\nlists\non\n"


def test_all_is_shown_if_it_cannot_be_imported(start):
    finished = start(SAYS + "raise ImportError('no such library')")
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.startswith("last words\n")
    assert finished.stderr.endswith("ImportError: no such library\n")


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGILL])
def test_a_crash_is_told(start, number):
    finished = start(f"{SAYS}{NO_CORE}os.kill(os.getpid(), {number})")
    assert (finished.returncode, finished.stdout) == (-number, "")
    assert finished.stderr.startswith("Fatal Python error: ")
    assert "tensorflow.py" in finished.stderr
