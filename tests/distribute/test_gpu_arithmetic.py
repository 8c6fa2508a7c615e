"""What is known of GPUs' types, beside the data sheets of single GPUs."""

import pytest

from imagenet_fast.distribute.gpu_arithmetic import (
    float16_speed,
    has_tensor_cores,
    precision_instead_of,
)


@pytest.mark.parametrize(
    ("capability", "float16", "float32"),
    [
        ((6, 0), 21.2, 10.6),  # Tesla P100 SXM2, TFLOPS
        ((6, 1), 0.1837, 11.76),  # Tesla P40
    ],
)
def test_pascal(capability, float16, float32):
    assert float16_speed(capability) == pytest.approx(float16 / float32, rel=0.01)
    assert not has_tensor_cores("float16", capability)


@pytest.mark.parametrize(
    ("capability", "float16", "bfloat16"),
    [
        ((7, 0), True, False),  # V100
        ((7, 5), True, False),  # T4
        ((8, 0), True, True),  # A100
        ((8, 9), True, True),  # L4
        ((9, 0), True, True),  # H100
        ((10, 0), True, True),  # B200
        ((), False, False),
    ],
)
def test_tensor_cores(capability, float16, bfloat16):
    assert has_tensor_cores("float16", capability) == float16
    assert has_tensor_cores("bfloat16", capability) == bfloat16


@pytest.mark.parametrize(
    ("dtype", "capability", "policy"),
    [
        ("bfloat16", (7, 0), "mixed_float16"),
        ("bfloat16", (6, 0), "mixed_float16"),
        ("bfloat16", (6, 1), "float32"),
        ("bfloat16", (5, 2), "float32"),
        ("float16", (6, 0), "float32"),
        ("float16", (6, 1), "float32"),
    ],
)
def test_what_to_choose(dtype, capability, policy):
    assert precision_instead_of(dtype, capability) == policy
