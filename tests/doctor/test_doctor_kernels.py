"""What the driver's compiler costs, with a GPU patched in for which TensorFlow has PTX only."""

import os
import pathlib
import types

import pytest
import tensorflow as tf

from imagenet_fast import Config
from imagenet_fast.distribute import cuda
from imagenet_fast.doctor.kernels import check_kernels

# TensorFlow 2.21's.
CODE = ((6, 0), (7, 0), (8, 0), (8, 9))
BUILD = cuda.Build("12.5.1", "9", (*CODE, (9, 0)), CODE)


@pytest.fixture
def check(monkeypatch, tmp_path):
    """check(capability) returns the findings of a GPU, as which the CPU computes."""
    for name in ("CUDA_CACHE_DISABLE", "CUDA_CACHE_MAXSIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_CACHE_PATH", str(tmp_path / "new" / "cache"))
    (cpu,) = tf.config.list_logical_devices("CPU")
    gpu = types.SimpleNamespace(name="/physical_device:GPU:0", device_type="GPU")

    def check(*capability):
        details = {"compute_capability": capability}
        monkeypatch.setattr(cuda, "built_for", lambda: BUILD)
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpu])
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [cpu])
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: details)
        return check_kernels(Config())

    return check


@pytest.mark.parametrize("capability", [(6, 0), (7, 5), (8, 6), (8, 9)])
def test_machine_code_runs_on_higher_minor_capabilities(check, capability):
    assert check(*capability) == []


def test_ptx_is_compiled_at_first_use(check):
    (found,) = check(9, 0)
    assert (found.name, found.state) == ("GPU:0 kernels", "ok")
    assert "no machine code for compute capability 9.0" in found.found
    assert "CUDA_CACHE_MAXSIZE=4294967296 keeps all" in found.found
    assert found.numbers["kernels"] == 6
    assert found.numbers["first_seconds"] > 0 < found.numbers["second_seconds"]


def test_a_gpu_that_is_newer_than_tensorflow(check):
    """As TensorFlow warns in ``gpu_device.cc``: "... could take 30 minutes or longer"."""
    (found,) = check(12, 0)
    assert found.state == "slow"
    assert "half an hour" in found.found
    assert "CUDA_CACHE_MAXSIZE" in found.advice


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("CUDA_CACHE_DISABLE", "1", "CUDA_CACHE_DISABLE=1 makes each process compile them again"),
        ("CUDA_CACHE_MAXSIZE", "268435456", "CUDA_CACHE_MAXSIZE=268435456 is less than the defa"),
        ("CUDA_CACHE_PATH", "/proc/no/cache", "cannot keep them in /proc/no/cache: give CUDA_CAC"),
    ],
)
def test_a_cache_that_does_not_keep_them(check, monkeypatch, name, value, told):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "access", lambda path, mode: path != pathlib.Path("/proc"))
    (found,) = check(9, 0)
    assert found.state == "slow"
    assert told in found.found


def test_unknown_gpus_and_machines_without_any(check, monkeypatch):
    assert check() == []
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [])
    assert check_kernels(Config()) == []
