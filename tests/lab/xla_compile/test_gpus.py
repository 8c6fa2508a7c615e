"""The GPUs to compile for, and invalid topologies."""

import re

import pytest

from imagenet_fast import UserError
from imagenet_fast.distribute.groups import consecutive, torus
from imagenet_fast.lab.xla_compile.gpus import gpu_topology, gpus, no_topology

GIB = 2**30


def test_kinds():
    assert list(gpus()) == ["p100", "p40", "v100", "a100", "a100-80gb", "l4", "h100", "b200"]


@pytest.mark.parametrize(
    ("name", "title", "memory", "capability"),
    [
        ("p100", "Tesla P100-SXM2-16GB", 15.9, (6, 0)),
        ("p40", "Tesla P40", 22.4, (6, 1)),
        ("v100", "Tesla V100-SXM2-16GB", 15.8, (7, 0)),
        ("a100", "NVIDIA A100-SXM4-40GB", 39.4, (8, 0)),
        ("l4", "NVIDIA L4", 22.0, (8, 9)),
        ("h100", "NVIDIA H100 80GB HBM3", 79.1, (9, 0)),
        ("b200", "NVIDIA B200", 178.4, (10, 0)),
    ],
)
def test_what_a_target_says(name, title, memory, capability):
    own = gpus()[name]
    assert own.title == title
    assert own.memory / GIB == pytest.approx(memory, abs=0.05)
    assert own.capability == capability
    # Without these XLA's cost model plans other programs, of several times the memory.
    for field in ("core_count", "memory_bandwidth", "l2_cache_size", "clock_rate_ghz"):
        assert re.search(rf"^ +{field}: [\d.]+$", own.target, re.MULTILINE)
    # Each file says where its numbers come from.
    assert "Numbers:" in own.target


@pytest.mark.parametrize(
    ("name", "mib"),
    # TensorFlow's MinSystemMemory (common_runtime/gpu/gpu_device.cc), and ours: 256 + 1024.
    [("p100", 500), ("v100", 1050), ("a100", 1536), ("l4", 1536), ("h100", 1800), ("b200", 1800)],
)
def test_memory_that_a_step_cannot_have(name, mib):
    topology = gpu_topology(f"{name}:1x8")
    assert topology.memory - topology.usable == (mib + 1280) * 2**20


def test_hosts():
    topology = gpu_topology("h100:4x8")
    assert (topology.name, topology.hosts, topology.gpus, topology.chips) == ("h100:4x8", 4, 8, 32)
    assert str(topology) == "32 replicas, 4 hosts of 8 NVIDIA H100 80GB HBM3"
    assert str(gpu_topology("v100:1x1")) == "1 replica, 1 Tesla V100-SXM2-16GB"


def test_rows_are_hosts():
    rows, _ = torus(gpu_topology("h100:2x4").coordinates)
    assert rows.members == consecutive(8, 4).members


@pytest.mark.parametrize("size", ["", "8", "0x8", "1x0", "1x9", "1x8x1", "-1x8", "ax8", "1x 8"])
def test_numbers_that_cannot_be(size):
    with pytest.raises(UserError, match=r"no topology 'h100:.*1 to 8, as in h100:1x8 or"):
        gpu_topology(f"h100:{size}")


@pytest.mark.parametrize("name", ["v3:2x2", "h200:1x8", "", "H100:1x8"])
def test_names_of_no_gpu(name):
    assert gpu_topology(name) is None


def test_topology_that_does_not_exist():
    assert str(no_topology("h1000:1x8", "Invalid name")) == (
        "there is no topology 'h1000:1x8' (Invalid name); choose hosts and GPUs per host, as in "
        "h100:1x8 or h100:4x8, of p100, p40, v100, a100, a100-80gb, l4, h100, b200, or a TPU's, "
        "like v2:2x2, v3:4x4, v4:2x2x1, v5e:4x4, v5p:2x2x1 or v6e:4x4"
    )
