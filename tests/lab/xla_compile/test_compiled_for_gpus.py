"""Steps compiled by XLA for GPUs that are not present: ``tools/test.sh compile``."""

import importlib.util
import json
import os
import re
import stat

import pytest

from imagenet_fast.commands import run
from imagenet_fast.lab.xla_compile.check_all_reduces import check_all_reduces
from imagenet_fast.lab.xla_compile.check_compiled import check_compiled
from imagenet_fast.lab.xla_compile.compiler import find_cuda, start_compiler
from imagenet_fast.lab.xla_compile.gpus import gpu_topology

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        importlib.util.find_spec("jax") is None,
        reason="needs jax, its CUDA plugin and ptxas: tools/install.sh DIRECTORY compile",
    ),
]
SMALL = ["--model=resnet8", "--num_classes=10", "--image_size=16", "--batch_size=64"]


@pytest.fixture(scope="module")
def compiler():
    with start_compiler("GPU") as started:
        yield started


def compiled(compiler, found, topology="h100:2x4"):
    """Returns the checks of a lowered step for eight GPUs, by name."""
    topology = gpu_topology(topology)
    program = compiler.compile(topology, found.step.serialized)
    checks = check_compiled(
        program.optimized, found.step.module, found.config, topology.gpu, topology.chips
    )
    return {own.name: own for own in checks}


def test_command(capsys, tmp_path):
    flags = ["--topology=h100:1x8", "--precision=mixed_float16", f"--output_dir={tmp_path}"]
    flags += ["--batch_norm_batch_size=16", "--optimizer=lars"]
    assert run(["compile", *SMALL, *flags]) == 0
    text = capsys.readouterr().out
    for line in (
        r"topology +h100:1x8: 8 replicas, 8 NVIDIA H100 80GB HBM3",
        r"batch-norm all-reduces +ok .*among \(0,1 2,3 4,5 6,7\)",
        r"gradient all-reduces +ok .*\(75,295 numbers\) among all 8",
        r"convolutions +ok  21 of f16",
        r"all-reduces +ok .*among \(0,1 2,3 4,5 6,7\) and all 8",
        r"memory +ok .* MiB of 79.1 GiB, of which 3.01 GiB are kept for .*",
    ):
        assert re.search(f"^{line}$", text, re.MULTILINE), line
    assert "compiles for NVIDIA H100 80GB HBM3 (1x8) with jax-cuda12-pjrt 0.10.2." in text
    assert "NCCL, or TensorFlow without XLA: there was no GPU, and none has run it." in text
    values = json.loads((tmp_path / "compile.json").read_text())
    assert 1e6 < values["program"]["per_image"] < 1e9
    assert 1e6 < values["program"]["peak"] < 1e9
    memory = values["program"]["memory"]
    assert memory["shared"] > 0.9 * memory["outputs"] > 0


@pytest.mark.parametrize(
    "kind",
    [
        "p100",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("p40", "v100", "l4")),
        "b200",
    ],
)
def test_float16(compiler, lowered, kind):
    found = compiled(compiler, lowered("GPU", precision="mixed_float16"), f"{kind}:1x8")
    assert not any(own.wrong for own in found.values())
    assert re.fullmatch(r"\d+ of f16", found["convolutions"].found)


def test_bfloat16_begins_with_ampere(compiler, lowered):
    found = lowered("GPU", precision="mixed_bfloat16")
    assert not any(own.wrong for own in compiled(compiler, found, "a100:1x8").values())
    for kind, name in (("p100", "Tesla P100"), ("v100", "Tesla V100")):
        expected = compiled(compiler, found, f"{kind}:1x8")["convolutions"].wrong
        message = rf"XLA computes \d+ of the convolutions in float32 under mixed_bfloat16: {name}"
        assert re.match(message, expected) and "use --precision=mixed_float16" in expected


def test_rows_of_a_torus_become_one_all_reduce(compiler, lowered):
    found = lowered("GPU", all_reduce="torus_2d", all_reduce_group=4)
    (_, gradients) = check_all_reduces(found.step.module, found.config, found.model)
    assert "along (0,1,2,3 4,5,6,7) and (0,4 1,5 2,6 3,7)" in gradients.found
    assert not gradients.wrong
    own = compiled(compiler, found)["all-reduces"]
    assert own.found == "1 of 75,304 numbers of f32, 0.3 MiB, among all 8"
    assert not own.wrong


LARGE = ["--model=resnet8", "--num_classes=10", "--image_size=224"]


def test_a_batch_that_does_not_fit_names_the_accumulation_steps(capsys, tmp_path):
    flags = [*LARGE, "--topology=v100:1x1", "--batch_size=1440", f"--output_dir={tmp_path}"]
    assert run(["compile", *flags]) == 2
    expected = re.search(
        r"error: it does not fit: 1,440 images a GPU need [\d.]+ GiB, and a step can have 13.50 "
        r"GiB of the 15.77 of Tesla V100-SXM2-16GB; the smallest --accumulation_steps that fits "
        r"is (\d)",
        capsys.readouterr().err,
    )
    values = json.loads((tmp_path / "compile.json").read_text())
    tried = {own["size"]: own["peak"] for own in values["accumulations"]}
    usable, steps = values["topology"]["usable"], int(expected[1])
    divisors = [own for own in range(1, steps + 1) if 1440 % own == 0]
    assert tried[steps] <= usable < tried[divisors[-2]]


@pytest.mark.long
def test_find_batch(capsys, tmp_path):
    flags = [*LARGE, "--topology=p100:1x1", "--batch_size=640", "--find_batch"]
    flags.append(f"--output_dir={tmp_path}")
    assert run(["compile", *flags]) == 0
    assert re.search(r"^images a GPU +memory +operations", capsys.readouterr().out, re.MULTILINE)
    values = json.loads((tmp_path / "compile.json").read_text())
    tried = {own["size"]: own["peak"] for own in values["batches"]}
    usable, batch = values["topology"]["usable"], values["batch"]
    assert tried[batch] <= usable
    assert min(own for own in tried if own > batch and tried[own] > usable) <= batch * 17 / 16


def test_the_cuda_of_the_environment_is_used(monkeypatch, tmp_path, lowered):
    # Where XLA would look: a ptxas that comes first in PATH, and CUDA_ROOT, which jax obeys.
    for name in ("ptxas", "nvlink"):
        other = tmp_path / "bin" / name
        other.parent.mkdir(exist_ok=True)
        other.write_text(f"#!/bin/sh\ntouch {tmp_path}/used\nexit 1\n")
        other.chmod(other.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_ROOT", str(tmp_path))
    assert find_cuda() != tmp_path
    with start_compiler("GPU") as compiler:
        found = compiled(compiler, lowered("GPU", precision="mixed_float16"), "h100:1x8")
    assert not any(own.wrong for own in found.values())
    assert not (tmp_path / "used").exists()


def test_reference_that_does_not_move(capsys):
    flags = ["--topology=h100:1x2", "--batch_size=8", "--run_on_cpu=1", "--learning_rate=1e-12"]
    assert run(["compile", *SMALL[:3], *flags]) == 2
    assert "on this machine's processor: weights are wrong" in capsys.readouterr().err
