"""The data of accelerators."""

import math

import pytest

from imagenet_fast import UserError
from imagenet_fast.lab.planning.cost_model.accelerators import ACCELERATORS, accelerator


@pytest.mark.parametrize("name", ACCELERATORS)
def test_numbers_are_in_their_units(name):
    """A slip between bits and bytes, or giga and tera, is at least eightfold."""
    own = ACCELERATORS[name]
    assert own.name == name
    assert 10e12 <= own.flops["float32"] <= 1000e12
    assert 8 * 2**30 <= own.memory <= 100 * 2**30
    assert 300e9 <= own.bandwidth <= 4000e9
    assert 10e9 <= own.link <= 500e9
    assert own.price is None or 1 <= own.price.dollars <= 12
    assert own.sources
    assert own.core_memory * own.replicas == own.memory


def test_published_pods():
    """TPU v3: 126 PFLOP/s, 32 TiB and, both ways together, 650 GB/s of links a chip."""
    chip = accelerator("tpu-v3")
    assert chip.most_chips * chip.flops["mixed_bfloat16"] == pytest.approx(126e15, rel=0.01)
    assert chip.most_chips * chip.memory == 32 * 2**40
    assert 2 * 2 * chip.torus * chip.link == pytest.approx(650e9, rel=0.02)
    assert 2 * accelerator("tpu-v5e").link * 4 == pytest.approx(400e9)
    assert 2 * accelerator("tpu-v5p").link * 6 == pytest.approx(1200e9)


def test_newer_ones_compute_more():
    peaks = [
        ACCELERATORS[f"tpu-{own}"].flops["float32"] for own in ("v2", "v3", "v4", "v5p", "v6e")
    ]
    assert peaks == sorted(peaks)
    assert math.isclose(accelerator("v100").flops["mixed_float16"], 125e12)


def test_refusals():
    with pytest.raises(UserError, match="'tpu-v33' does not exist; did you mean 'tpu-v3'"):
        accelerator("tpu-v33")
    with pytest.raises(UserError, match="does not compute in mixed_bfloat16; choose from float32"):
        accelerator("p100").core_flops("mixed_bfloat16")
