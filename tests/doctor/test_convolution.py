"""The convolutions of the doctor: on this CPU they are right; faults that are planted are told."""

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import Config
from imagenet_fast.doctor import convolution
from imagenet_fast.doctor.convolution import check_convolutions
from imagenet_fast.doctor.finding import ok


def test_all_dtypes_are_right_on_this_cpu():
    findings = check_convolutions(Config())
    assert [own.name for own in findings] == ["CPU:0 float32", "CPU:0 bfloat16", "CPU:0 float16"]
    for own in findings:
        assert own.state == "ok", own
        assert set(own.numbers["seconds"]) == {"plain", "XLA"}
        assert all(seconds > 0 for seconds in own.numbers["seconds"].values())
    # Less than the tolerance by far, which hides no fault.
    assert max(findings[0].numbers["errors"].values()) < 1e-5
    # What is compared does round, as the types do.
    assert all(min(own.numbers["errors"].values()) > 1e-5 for own in findings[1:])


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "result"),
    [
        pytest.param("without XLA", 0, marks=pytest.mark.long),
        pytest.param("without XLA", 1, marks=pytest.mark.long),
        ("without XLA", 2),
        pytest.param("with XLA", 1, marks=pytest.mark.long),
    ],
)
def test_wrong_results_are_reported(monkeypatch, way, result):
    """Of the forward pass, and of the gradients of images and of the kernel."""
    make = convolution._step

    def broken(device, operands, dtype, xla):
        step = make(device, operands, dtype, xla)

        def run():
            results = step()
            if dtype == "bfloat16" and xla == (way == "with XLA"):
                results[result] = 1.1 * results[result]
            return results

        return run

    monkeypatch.setattr(convolution, "_step", broken)
    float32, bfloat16, float16 = check_convolutions(Config())
    assert (float32.state, bfloat16.state, float16.state) == ("ok", "wrong", "ok")
    assert bfloat16.found.startswith(f"{way}: differs by ")


def test_nan_results_are_reported(monkeypatch):
    monkeypatch.setattr(convolution, "_difference", lambda *_: float("nan"))
    assert [own.state for own in check_convolutions(Config())] == ["wrong"] * 3


@pytest.mark.long
def test_an_error_in_one_dtype_does_not_affect_the_others(monkeypatch):
    """As under TensorFlow 2.21 with cuDNN 9.5, of XLA alone."""
    make = convolution._step
    message = "Autotuner could not find any supported configs for HLO\nand so on"

    def failing(device, operands, dtype, xla):
        if xla and dtype == "float16":
            raise tf.errors.InternalError(None, None, message)
        return make(device, operands, dtype, xla)

    monkeypatch.setattr(convolution, "_step", failing)
    *_, float16 = findings = check_convolutions(Config())
    assert [own.state for own in findings] == ["ok", "ok", "wrong"]
    assert float16.found == f"with XLA: {message.splitlines()[0]}"
    assert "without --xla" in float16.advice


@pytest.mark.parametrize(
    ("dtype", "seconds", "capability", "state", "advice"),
    [
        ("float32", 0.9, (9, 0), "ok", ""),
        ("float32", 1.1, (9, 0), "slow", "nvidia-smi"),
        ("float16", 1.4, (9, 0), "ok", ""),
        ("float16", 1.6, (9, 0), "slow", "--precision=float32"),
        ("bfloat16", 1.6, (7, 0), "slow", "7.0 has no tensor cores for it: train with --precision"),
        ("bfloat16", 1.6, (7, 0), "slow", "--precision=mixed_float16"),
        ("bfloat16", 1.6, (6, 0), "slow", "--precision=mixed_float16"),
        ("bfloat16", 1.6, (6, 1), "slow", "--precision=float32"),
        ("float16", 1.6, (6, 0), "slow", "--precision=float32"),
    ],
)
def test_slow_gpu(monkeypatch, dtype, seconds, capability, state, advice):
    """Float32 beside the CPU, which takes 1 s; the others beside float32, which does."""
    monkeypatch.setattr(convolution, "_capability", lambda device: capability)
    finding = ok("GPU:0", "told", seconds={"plain": seconds, "XLA": 0.1})
    judged = convolution._check_speed("GPU:0", finding, dtype, 1.0)
    assert judged.state == state
    assert advice in judged.advice
    assert judged.numbers == finding.numbers


@pytest.mark.long
def test_each_gpu_is_compared_with_the_cpu(monkeypatch):
    """The CPU stands for two GPUs, with the times of a slow one."""
    cpu = tf.config.list_logical_devices("CPU")
    listed = {"CPU": cpu, "GPU": cpu * 2}
    monkeypatch.setattr(tf.config, "list_logical_devices", listed.__getitem__)
    monkeypatch.setattr(convolution, "ON_GPU", convolution.ON_CPU)
    monkeypatch.setattr(convolution, "_capability", lambda device: (7, 0))
    make, made = convolution._step, {}

    def make_once(device, operands, dtype, xla):  # Compiling takes seconds.
        if (dtype, xla) not in made:
            made[dtype, xla] = make(device, operands, dtype, xla)
        return made[dtype, xla]

    monkeypatch.setattr(convolution, "_step", make_once)
    times = iter([*[0.1] * 6, 1.0, *[0.5, 0.5, 0.8, 0.5, 0.5, 0.5], *[1.5, 1, 1, 1, 1, 1]])
    monkeypatch.setattr(convolution, "_seconds", lambda step, repeats=5: next(times))
    findings = check_convolutions(Config())
    assert [own.name.split()[1] for own in findings] == list(convolution.DTYPES) * 3
    # The first GPU's bfloat16 is slower than its float32, and the second GPU than the CPU.
    states = ["ok", "ok", "ok", "ok", "slow", "ok", "slow", "ok", "ok"]
    assert [own.state for own in findings] == states


@pytest.mark.long
def test_rounding_does_not_change_what_the_relu_passes():
    """Else gradients would differ by all of an element here and there."""
    images, kernel, bias, _ = convolution._operands(convolution.ON_GPU)
    part = images[:2]
    results = tf.nn.conv2d(part, kernel, 1, "SAME").numpy()
    assert np.abs(results).max() < np.abs(bias).min() - 1
    assert ((results + bias > 0) == (bias > 0)).all()
