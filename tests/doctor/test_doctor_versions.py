"""The lines about versions: what is wrong is told, with what to do."""

import keras
import pytest
import tensorflow as tf

from imagenet_fast import Config
from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute import cuda
from imagenet_fast.doctor import versions

BUILD = cuda.Build("12.5.1", "9", ((6, 0), (9, 0)))
CUDART = cuda.Library("libcudart.so.12", "12.9")
NO_SUCH_FILE = "cannot open shared object file: No such file or directory"


def not_ok(findings):
    return [own for own in findings if own.state != "ok"]


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU: machine(driver, libraries)."""

    def machine(
        driver=None,
        libraries=(CUDART,),
        build=BUILD,
        tensorflow="2.21.0",
    ):
        monkeypatch.setattr(versions, "installed_gpus", lambda: ["NVIDIA H100 80GB HBM3"])
        monkeypatch.setattr(cuda, "built_for", lambda: build)
        monkeypatch.setattr(cuda, "find_driver", lambda: driver or cuda.Driver("550.54", "12.4"))
        monkeypatch.setattr(cuda, "find_libraries", lambda: list(libraries))
        monkeypatch.setattr(tf, "__version__", tensorflow)

    return machine


def test_packages_of_this_environment():
    assert not not_ok(versions.check_packages(Config()))


@pytest.mark.parametrize(
    ("keras", "ok"), [("2.21.0", True), ("2.21.1rc1", True), ("2.20.1", False), ("3.21.0", False)]
)
def test_tf_keras_must_be_of_the_same_minor_version(monkeypatch, keras, ok):
    monkeypatch.setattr(tf, "__version__", "2.21.0")
    monkeypatch.setattr(tf_keras, "__version__", keras)
    found = not_ok(versions.check_packages(Config()))
    assert [own.name for own in found] == ([] if ok else ["tf_keras"])
    assert all(own.state == "wrong" and "tf_keras==2.21.*" in own.advice for own in found)


def test_without_a_gpu_no_library_is_needed(monkeypatch):
    monkeypatch.setattr(versions, "installed_gpus", list)
    (found,) = versions.check_cuda(Config())
    assert (found.state, found.name) == ("ok", "CUDA")
    assert found.found.startswith("no NVIDIA GPU here; TensorFlow is built ")


def test_a_driver_that_does_not_answer(monkeypatch):
    """It is installed and not loaded: nvidia-smi's words, and what to do."""

    def installed_gpus():
        raise UserError("NVIDIA's driver does not respond: nvidia-smi failed (9); load it")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(versions, "installed_gpus", installed_gpus)
    _, driver = versions.check_cuda(Config())
    assert (driver.name, driver.state, driver.advice) == ("driver", "wrong", "load it")
    assert driver.found == "NVIDIA's driver does not respond: nvidia-smi failed (9)"
    (found,) = versions.check_cuda(Config(gpus="0"))
    assert (found.name, found.state) == ("CUDA", "ok")
    assert found.found.startswith("no GPU is requested; TensorFlow is built ")


@pytest.mark.parametrize(
    ("cudnn", "tensorflow", "ok"),
    [
        ("9.5.1", "2.21.0", False),
        ("9.23.2", "2.21.0", False),
        ("9.24.0", "2.21.0", True),
        ("10.0.0", "2.21.0", True),
        ("9.5.1", "2.20.0", True),
        ("8.9.4", "2.15.1", True),
    ],
)
def test_cudnn_must_be_new_enough(machine, cudnn, tensorflow, ok):
    library = cuda.Library("libcudnn.so.9", cudnn, "/usr/lib/libcudnn.so.9")
    machine(libraries=[library], tensorflow=tensorflow)
    found = not_ok(versions.check_cuda(Config()))
    assert [own.name for own in found] == ([] if ok else ["cuDNN"])
    assert all(f"{cudnn} of /usr/lib/libcudnn.so.9, below 9.24" in own.found for own in found)
    assert all("nvidia-cudnn-cu12>=9.24" in own.advice for own in found)


def test_each_library_that_does_not_load_is_named(machine):
    machine(
        libraries=[
            cuda.Library("libcudart.so.12", "12.9"),
            cuda.Library("libcudnn.so.9", error=f"libcudnn.so.9: {NO_SUCH_FILE}"),
            cuda.Library("libnccl.so.2", error=f"libnccl.so.2: {NO_SUCH_FILE}", required=False),
        ]
    )
    findings = versions.check_cuda(Config())
    cudnn, nccl = not_ok(findings)
    assert (cudnn.state, cudnn.name) == ("wrong", "libcudnn.so.9")
    assert "does not load: libcudnn.so.9: cannot open" in cudnn.found
    assert "TensorFlow sees no GPU" in cudnn.found
    assert "tools/install.sh .venv digits,gpu" in cudnn.advice
    assert (nccl.state, nccl.name) == ("wrong", "libnccl.so.2")
    assert "no NCCL" in nccl.found
    assert "cudart 12.9" in [own.found for own in findings if own.name == "CUDA libraries"]


def test_no_library_loads(machine):
    names = ("libcudart.so.12", "libcudnn.so.9")
    machine(libraries=[cuda.Library(name, error=f"{name}: {NO_SUCH_FILE}") for name in names])
    (found,) = not_ok(versions.check_cuda(Config()))
    assert (found.state, found.name) == ("wrong", "CUDA libraries")
    assert found.found.endswith(": libcudart.so.12, libcudnn.so.9")
    assert "tools/install.sh .venv digits,gpu" in found.advice


def test_a_driver_that_is_too_old(machine):
    machine(driver=cuda.Driver("470.82", "11.4"))
    (found,) = not_ok(versions.check_cuda(Config()))
    assert (found.name, found.advice) == ("driver", "update the driver")
    assert "the driver 470.82 supports CUDA 11.4" in found.found


def test_a_driver_that_does_not_start(machine):
    machine(driver=cuda.Driver("550.54", "12.4", error="cuInit failed with error 803, mismatch"))
    (found,) = not_ok(versions.check_cuda(Config()))
    assert "error 803, mismatch" in found.found
    assert "restart the machine" in found.advice


def test_a_build_without_cuda(machine):
    machine(build=cuda.Build())
    (found,) = versions.check_cuda(Config())
    assert (found.state, found.found) == ("wrong", "TensorFlow is built without CUDA")
