"""The compiler's side that needs no compiler."""

import importlib.metadata
import json
import re

import pytest

from imagenet_fast import Config, UserError
from imagenet_fast.xla_compile.compiler import Compiler, RefusedError, Topology, require_packages
from imagenet_fast.xla_compile.recipe import compile_recipe

CORES = tuple((x, y, 0, core) for y in range(2) for x in range(2) for core in range(2))


class Worker:
    """Answers as it is told to."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def ask(self, line):
        self.asked.append(json.loads(line))
        return self.answer


def test_topology(tmp_path):
    worker = Worker({"kind": "TPU v3", "coordinates": [list(place) for place in CORES]})
    topology = Compiler(worker, tmp_path).topology("v3:2x2")
    assert worker.asked == [{"do": "topology", "name": "v3:2x2"}]
    assert topology == Topology("v3:2x2", "TPU v3", CORES)
    assert (topology.chips, topology.memory) == (4, 16 * 2**30)
    assert str(topology) == "8 replicas on 4 TPU v3, 16 GiB each"


def test_topology_of_chips_whose_memory_is_not_known():
    assert str(Topology("v9:1x1", "TPU v9", ((0, 0, 0, 0),))) == "1 replica on 1 TPU v9"


def test_topology_that_does_not_exist(tmp_path):
    worker = Worker({"error": "INVALID_ARGUMENT: Invalid TPU external name: TPU v9"})
    with pytest.raises(UserError) as caught:
        Compiler(worker, tmp_path).topology("v9:2x2")
    assert str(caught.value) == (
        "libtpu has no topology 'v9:2x2': Invalid TPU external name: TPU v9; choose one like "
        "v2:2x2, v3:4x4, v4:2x2x1, v5e:4x4, v5p:2x2x1 or v6e:4x4"
    )


def test_program(tmp_path):
    memory = {"arguments": 30, "outputs": 20, "shared": 15, "temporary": 100, "code": 5}
    worker = Worker({"seconds": 1.5, "memory": memory, "flops": 8.0, "bytes": 4.0})
    program = Compiler(worker, tmp_path).compile(Topology("v3:2x2", "TPU v3", CORES), b"module")
    assert program.peak == 140
    (asked,) = worker.asked
    assert asked["name"] == "v3:2x2"
    assert (tmp_path / "module.hlo").read_bytes() == b"module"
    assert asked["module"] == str(tmp_path / "module.hlo")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 28.12G of 15.48G "
            "hbm. Exceeded hbm capacity by 12.64G.\n\nTotal hbm usage >= 28.64G:\n",
            "out of memory: each replica needs 28.12GiB of the 15.48GiB that programs can have",
        ),
        (
            "RESOURCE_EXHAUSTED: The memory required for HLO temporaries (17.44G) exceeds "
            "available HBM (15.48G). HLO module: a_inference_step_6594__.86.",
            "out of memory: each replica needs 17.44GiB of the 15.48GiB that programs can have",
        ),
        ("UNIMPLEMENTED: no such thing\n  at line 3", "no such thing"),
        (
            "INTERNAL: during context [pre-optimization]: RET_CHECK failure (xla/verifier.cc:483) "
            "count == 1 || n == count In cross_replica mode, groups should contain 8 replicas, "
            "but found 4: %XlaAllReduce.7 = f32[8]{0} all-reduce(%XLA_Args.1)",
            "In cross_replica mode, groups should contain 8 replicas, but found 4",
        ),
        ("", "no reason told"),
    ],
)
def test_refusals(tmp_path, error, told):
    compiler = Compiler(Worker({"error": error}), tmp_path)
    with pytest.raises(RefusedError) as caught:
        compiler.compile(Topology("v3:2x2", "TPU v3", CORES), b"module")
    assert str(caught.value) == told


@pytest.fixture
def without_libtpu(monkeypatch):
    def version(name):
        if name == "libtpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_without_the_packages(without_libtpu):
    with pytest.raises(UserError) as caught:
        require_packages()
    assert re.search(
        r"needs libtpu, which is not installed here: `pip install -e '.\[compile\]'` in a clone of "
        r"imagenet_fast installs it, .*\(tools/install.sh DIRECTORY compile\)",
        str(caught.value),
    )
    with pytest.raises(UserError, match="needs libtpu"):
        compile_recipe(Config(), "v3:2x2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_stages": 2}, "pipeline_stages: a pipeline is many programs"),
        (
            {"data_on_device": True, "train_crop": "pad"},
            "data_on_device: .* is compiled with --nodata_on_device --noalternating_flip",
        ),
    ],
)
def test_options_that_are_not_for_it(monkeypatch, options, message):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    with pytest.raises(UserError, match=message):
        compile_recipe(Config(**options), "v3:2x2")
