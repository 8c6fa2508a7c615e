"""The compiler's client, with a fake worker."""

import importlib.metadata
import json
import re

import pytest

from imagenet_fast import Config, UserError
from imagenet_fast.lab.xla_compile import compiler
from imagenet_fast.lab.xla_compile.compiler import (
    Compiler,
    RefusedError,
    TpuTopology,
    find_cuda,
    platform_of,
    require_packages,
)
from imagenet_fast.lab.xla_compile.gpus import gpu_topology, gpus
from imagenet_fast.lab.xla_compile.recipe import compile_recipe

CORES = tuple((x, y, 0, core) for y in range(2) for x in range(2) for core in range(2))


class Worker:
    """A fake worker with given answers."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def ask(self, line):
        self.asked.append(json.loads(line))
        return self.answer


def test_topology(tmp_path):
    worker = Worker({"kind": "TPU v3", "coordinates": [list(place) for place in CORES]})
    topology = Compiler(worker, tmp_path).topology("v3:2x2")
    assert worker.asked == [{"do": "topology", "name": "v3:2x2"}]
    assert topology == TpuTopology("v3:2x2", "TPU v3", CORES)
    assert (topology.chips, topology.memory) == (4, 16 * 2**30)
    assert str(topology) == "8 replicas on 4 TPU v3, 16 GiB each"


def test_topology_of_chips_whose_memory_is_not_known():
    assert str(TpuTopology("v9:1x1", "TPU v9", ((0, 0, 0, 0),))) == "1 replica on 1 TPU v9"


@pytest.mark.parametrize("name", ["v9:2x2", "k80:1x8"])
def test_topology_that_does_not_exist(tmp_path, name):
    worker = Worker({"error": f"INVALID_ARGUMENT: Invalid TPU external name: {name}"})
    with pytest.raises(UserError) as caught:
        Compiler(worker, tmp_path).topology(name)
    assert str(caught.value) == (
        f"there is no topology {name!r} (Invalid TPU external name: {name}); choose hosts and "
        f"GPUs per host, as in h100:1x8 or h100:4x8, of {', '.join(gpus())}, or a TPU's, like "
        "v2:2x2, v3:4x4, v4:2x2x1, v5e:4x4, v5p:2x2x1 or v6e:4x4"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("v3:1000x1000", "a TPU v3 has at most 1,024 chips"),
        ("v3:32x33", "a TPU v3 has at most 1,024 chips"),
        ("v4:16x16x17", "a TPU v4 has at most 4,096 chips"),
        ("v3:0x2", "an axis has 0 chips"),
        ("h200:1x8", "no kind 'h200'"),
        ("", "no kind ''"),
    ],
)
def test_topologies_refused_before_a_compiler_starts(name, reason):
    with pytest.raises(UserError, match=re.escape(f"no topology {name!r} ({reason}); choose")):
        platform_of(name)


@pytest.mark.parametrize(
    ("name", "platform"),
    [("v3:32x32", "TPU"), ("v5p:16x20x28", "TPU"), ("v9:2x2", "TPU"), ("h100:4x8", "GPU")],
)
def test_platforms(name, platform):
    assert platform_of(name) == platform


def test_program(tmp_path):
    memory = {"arguments": 30, "outputs": 20, "shared": 15, "temporary": 100, "code": 5}
    worker = Worker({"seconds": 1.5, "memory": memory, "flops": 8.0, "bytes": 4.0})
    program = Compiler(worker, tmp_path).compile(TpuTopology("v3:2x2", "TPU v3", CORES), b"module")
    assert program.peak == 140
    (asked,) = worker.asked
    assert asked["name"] == "v3:2x2"
    assert (tmp_path / "module.hlo").read_bytes() == b"module"
    assert asked["module"] == str(tmp_path / "module.hlo")


def test_program_for_gpus(tmp_path, monkeypatch):
    memory = {"arguments": 30, "outputs": 20, "shared": 15, "temporary": 100, "code": 0}
    worker = Worker({"seconds": 1.5, "memory": memory, "flops": 8.0, "bytes": 0})
    monkeypatch.setattr(compiler, "find_cuda", lambda: tmp_path / "cuda")
    (tmp_path / "optimized.hlo").write_bytes(b"")  # an empty message of protocol buffers
    program = Compiler(worker, tmp_path).compile(gpu_topology("h100:2x4"), b"module")
    assert program.peak == 135
    assert program.optimized.instructions == ()
    (asked,) = worker.asked
    assert asked == {
        "do": "compile_for_gpus",
        "target": gpus()["h100"].target,
        "hosts": 2,
        "gpus": 4,
        "cuda": str(tmp_path / "cuda"),
        "module": str(tmp_path / "module.hlo"),
        "optimized": str(tmp_path / "optimized.hlo"),
    }


@pytest.mark.parametrize(
    ("error", "expected"),
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
        ("", "no reason given"),
    ],
)
def test_refusals(tmp_path, error, expected):
    compiler = Compiler(Worker({"error": error}), tmp_path)
    with pytest.raises(RefusedError) as caught:
        compiler.compile(TpuTopology("v3:2x2", "TPU v3", CORES), b"module")
    assert str(caught.value) == expected


@pytest.fixture
def without(monkeypatch):
    """without(name) pretends that all packages but one are installed."""

    def hide(hidden):
        def version(name):
            if name == hidden:
                raise importlib.metadata.PackageNotFoundError(name)
            return "1.0"

        monkeypatch.setattr(importlib.metadata, "version", version)

    return hide


@pytest.mark.parametrize(
    ("platform", "topology", "name"),
    [
        ("TPU", "v3:2x2", "libtpu"),
        ("GPU", "h100:1x8", "jax-cuda12-pjrt"),
        ("GPU", "h100:1x8", "nvidia-cuda-nvcc-cu12"),
    ],
)
def test_without_the_packages(without, platform, topology, name):
    without(name)
    with pytest.raises(UserError) as caught:
        require_packages(platform)
    assert re.search(
        rf"compiling for {platform}s needs {name}, which is not installed: `pip install -e "
        r"'.\[compile\]'` in a clone of imagenet_fast installs it, .*"
        r"\(tools/install.sh DIRECTORY compile\)",
        str(caught.value),
    )
    with pytest.raises(UserError, match=f"needs {name}"):
        compile_recipe(Config(), topology)


def test_gpus_need_no_libtpu(without, monkeypatch):
    without("libtpu")
    monkeypatch.setattr(compiler, "find_cuda", lambda: None)
    assert "libtpu" not in require_packages("GPU")


@pytest.mark.parametrize("missing", ["bin/ptxas", "nvvm/libdevice/libdevice.10.bc"])
def test_another_cuda_is_not_used_in_silence(tmp_path, monkeypatch, missing):
    # XLA looks for what it misses in /usr/local/cuda and in PATH.
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "12.9.86")
    installed = type("Distribution", (), {"locate_file": lambda self, name: tmp_path / name})()
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    folder = tmp_path / "nvidia" / "cuda_nvcc"
    for name in ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert find_cuda() == folder
    (folder / missing).unlink()
    with pytest.raises(UserError) as caught:
        require_packages("GPU")
    assert f"installed without {folder / missing}" in str(caught.value)
    assert "pip install --force-reinstall nvidia-cuda-nvcc-cu12==12.9.86" in str(caught.value)


def test_batches_are_not_looked_for_on_tpus():
    with pytest.raises(UserError, match="find_batch is for GPUs"):
        compile_recipe(Config(), "v3:2x2", find_batch=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pipeline_stages": 2},
            "pipeline_stages: the stages of a pipeline are different programs",
        ),
        (
            {"data_on_device": True, "train_crop": "pad"},
            "data_on_device: .* of the step with --nodata_on_device --noalternating_flip",
        ),
    ],
)
def test_options_that_are_not_for_it(monkeypatch, options, message):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    with pytest.raises(UserError, match=message):
        compile_recipe(Config(**options), "v3:2x2")
