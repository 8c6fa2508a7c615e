"""The lines about devices, with GPUs patched in that the driver shows, or TensorFlow."""

import types

import pytest
import tensorflow as tf

from imagenet_fast import Config
from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute import cuda
from imagenet_fast.doctor import devices

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def gpus(monkeypatch):
    """Patches in GPUs: gpus(seen by TensorFlow, shown by the driver)."""

    def gpus(seen, shown):
        listed = [
            types.SimpleNamespace(name=f"/physical_device:GPU:{place}", device_type="GPU")
            for place in range(seen)
        ]
        details = {"device_name": H100}
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: listed)
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda own: details)
        monkeypatch.setattr(devices, "installed_gpus", lambda: [H100] * shown)

    return gpus


def found(name):
    return [own for own in devices.check_devices(Config()) if own.name == name]


def test_this_machine_has_a_cpu():
    (cpu,) = found("CPU")
    assert cpu.state == "ok"
    assert cpu.found.endswith(" cores")


@pytest.mark.parametrize(
    ("seen", "shown", "told"),
    [
        (0, 0, "no GPU"),
        (8, 8, f"TensorFlow sees 8 {H100}; the driver shows 8 {H100}"),
        (2, 8, f"TensorFlow sees 2 {H100}; the driver shows 8 {H100} (CUDA_VISIBLE_DEVICES)"),
    ],
)
def test_all_gpus_are_seen(gpus, monkeypatch, seen, shown, told):
    gpus(seen, shown)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (own,) = found("GPUs")
    assert (own.state, own.found) == ("ok", told)


def test_fewer_gpus_than_the_driver_shows(gpus, monkeypatch):
    gpus(7, 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (own,) = found("GPUs")
    assert (own.state, own.found) == (
        "slow",
        f"TensorFlow sees 7 {H100}; the driver shows 8 {H100}",
    )
    assert "`nvidia-smi`" in own.advice


def test_gpus_that_tensorflow_does_not_see(gpus, monkeypatch):
    gpus(0, 8)
    problem = cuda.Problem("TensorFlow cannot load libcudnn.so.9", "install it")
    monkeypatch.setattr(cuda, "find_problem", lambda: problem)
    (own,) = found("GPUs")
    assert (own.state, own.advice) == ("wrong", "install it")
    assert own.found == (
        f"TensorFlow sees no GPU; the driver shows 8 {H100}: TensorFlow cannot load libcudnn.so.9"
    )


@pytest.mark.parametrize(
    ("seen", "wanted", "state", "told"),
    [
        (0, "", "wrong", "TensorFlow sees no GPU, and the driver does not respond"),
        (0, "0", "ok", "no GPU"),
        (1, "", "ok", f"1 {H100}"),
    ],
)
def test_a_driver_that_does_not_answer(gpus, monkeypatch, seen, wanted, state, told):
    def installed_gpus():
        raise UserError("NVIDIA's driver does not respond")

    gpus(seen, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "installed_gpus", installed_gpus)
    findings = devices.check_devices(Config(gpus=wanted))
    (own,) = [own for own in findings if own.name == "GPUs"]
    assert (own.state, own.found) == (state, told)
