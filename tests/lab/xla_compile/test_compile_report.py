"""Reports of correct and wrong steps."""

import dataclasses
import json

import pytest

from imagenet_fast import Config
from imagenet_fast.lab.xla_compile.check import Check
from imagenet_fast.lab.xla_compile.compare import Difference
from imagenet_fast.lab.xla_compile.compiler import Program, TpuTopology
from imagenet_fast.lab.xla_compile.gpus import gpu_topology
from imagenet_fast.lab.xla_compile.recipe import Compilation, Trial
from imagenet_fast.lab.xla_compile.report import _size, as_json, table, write

PLACES = [(x, y, 0, core) for y in range(2) for x in range(2) for core in range(2)]

GIB = 2**30
MEMORY = {
    "arguments": GIB // 4,
    "outputs": GIB // 4,
    "shared": GIB // 4 - GIB // 64,
    "temporary": 4 * GIB,
    "code": GIB // 8,
}
GOOD = Compilation(
    Config(synthetic=True, num_classes=10, batch_size=1024, precision="mixed_bfloat16"),
    TpuTopology("v3:2x2", "TPU v3", tuple(PLACES)),
    {"jax": "0.1", "jaxlib": "0.2", "libtpu": "0.0.3"},
    25_557_032,
    (Check("shapes", "17 instructions"), Check("gradient all-reduces", "162 of f32 among all 8")),
    Program(12.3, MEMORY, 128 * 22.5e9, 36.1e9),
    steps=3,
    differences=(Difference("weights", 1e-8, 2e-6, 1e-4, 0.0),),
)
GPUS = dataclasses.replace(
    GOOD,
    topology=gpu_topology("h100:1x8"),
    packages={"jax": "0.1", "jaxlib": "0.2", "jax-cuda12-pjrt": "0.3"},
    program=Program(12.3, {**MEMORY, "code": 0}, 128 * 23.9e9, 0),
    compiled=(Check("convolutions", "158 of f16"),),
    steps=0,
    differences=(),
)
TOO_LARGE = dataclasses.replace(
    GPUS,
    program=Program(12.3, {**MEMORY, "code": 0, "temporary": 90 * GIB}, 1.0, 0),
    computed_twice=214,
    accumulations=(
        Trial(1, 90 * GIB, 214),
        Trial(2, 80 * GIB, 0),
        Trial(3, 60 * GIB, 0),
        Trial(4, 50 * GIB, 0),
    ),
)
REFUSED = dataclasses.replace(GOOD, program=None, refusal="out of memory: each needs 20GiB")


def test_table():
    assert table(GOOD).splitlines() == [
        "topology                v3:2x2: 8 replicas on 4 TPU v3, 16 GiB each",
        "network                 resnet50, 25,557,032 parameters, mixed_bfloat16, sgd",
        "batch                   1,024 images of 224 px, 128 a replica",
        "",
        "shapes                  ok  17 instructions",
        "gradient all-reduces    ok  162 of f32 among all 8",
        "",
        "compiled                ok  in 12 s",
        "memory                  4.39 GiB of 16 GiB of a replica: arguments 256 MiB, outputs "
        "besides these 16 MiB, temporary 4 GiB, code 128 MiB",
        "work                    22.5 GFLOPs an image, and 36.1 GB read and written in a step of a "
        "replica, as XLA counts",
        "",
        "3 steps of the replicas, and of one device with all images:",
        "weights                 ok  differ by at most 1e-08, 2e-06 of their change; between "
        "replicas by 0",
        "",
        "The training step compiles for TPU v3 (2x2) with libtpu 0.0.3.",
        "That says nothing about its speed, the TPU's runtime or its interconnect: there was no "
        "TPU, and none has run it.",
    ]
    assert not GOOD.failure


def test_work_of_accumulated_micro_batches():
    # XLA's count has one of the four, of 32 images.
    config = GOOD.config.replace(accumulation_steps=4)
    program = Program(12.3, MEMORY, 32 * 22.5e9, 9e9)
    found = dataclasses.replace(GOOD, config=config, program=program)
    expected = "22.5 GFLOPs an image, and 9 GB read and written in a micro-batch of a replica"
    assert expected in table(found)
    assert json.loads(as_json(found))["program"]["per_image"] == 22.5e9


@pytest.mark.parametrize(
    ("found", "line", "failure"),
    [
        (
            dataclasses.replace(GOOD, checks=(Check("sums", "none", "7 are missing"),)),
            "sums                    NO  none: 7 are missing",
            "the step is not what the recipe says: sums: 7 are missing",
        ),
        (
            REFUSED,
            "compiled                NO  not for v3:2x2: out of memory: each needs 20GiB",
            "it does not compile for v3:2x2: out of memory: each needs 20GiB",
        ),
        (
            dataclasses.replace(GOOD, differences=(Difference("weights", 0.1, 7.0, 1e-4, 0.01),)),
            "weights                 NO  differ by at most 0.1, 7 of their change; "
            "between replicas by 0.01: more than rounding, 0.0001",
            "on this machine's processor: weights are wrong",
        ),
    ],
    ids=["check", "refused", "differs"],
)
def test_failures(found, line, failure):
    text = table(found)
    assert line in text.splitlines()
    assert "compiles for" not in text
    assert found.failure == failure


def test_files(tmp_path):
    for found in (GOOD, REFUSED):
        paths = write(found, tmp_path / "new")
        assert paths == [f"{tmp_path}/new/compile.json", f"{tmp_path}/new/compile.txt"]
        values = json.loads((tmp_path / "new" / "compile.json").read_text())
        assert values["topology"]["replicas"] == 8
        assert values["checks"][0] == {"name": "shapes", "found": "17 instructions", "wrong": ""}
        assert values["options"]["precision"] == "mixed_bfloat16"
        assert values["packages"]["libtpu"] == "0.0.3"
        assert {"command", "versions", "hardware", "finished"} <= set(values)
        assert values["failure"] == found.failure
        assert (tmp_path / "new" / "compile.txt").read_text() == table(found) + "\n"
    assert values["program"] is None
    assert values["proves"] == ""


def test_table_of_gpus():
    lines = table(GPUS).splitlines()
    assert lines[0] == "topology                h100:1x8: 8 replicas, 8 NVIDIA H100 80GB HBM3"
    assert lines[7:11] == [
        "compiled                ok  in 12 s",
        "convolutions            ok  158 of f16",
        "memory                  ok  4.27 GiB of 79.1 GiB, of which 3.01 GiB are kept for "
        "TensorFlow, CUDA and workspaces: arguments 256 MiB, outputs besides these 16 MiB, "
        "temporary 4 GiB",
        "work                    23.9 GFLOPs an image, as XLA counts",
    ]
    assert lines[-2:] == [
        "The training step compiles for NVIDIA H100 80GB HBM3 (1x8) with jax-cuda12-pjrt 0.3.",
        "That says nothing about its speed, the algorithms that cuDNN and cuBLAS choose and their "
        "workspaces, TF32, NCCL, or TensorFlow without XLA: there was no GPU, and none has run it.",
    ]
    assert not GPUS.failure


def test_what_does_not_fit():
    text = table(TOO_LARGE)
    assert "compiles for" not in text
    assert "214 operations are computed twice: does not fit" in text
    assert text.splitlines()[-5:] == [
        "accumulation_steps      memory     operations computed twice",
        "1                       90 GiB     214  does not fit",
        "2                       80 GiB     0    does not fit",
        "3                       60 GiB     0",
        "4                       50 GiB     0",
    ]
    assert TOO_LARGE.failure == (
        "it does not fit: 128 images a GPU need 90.27 GiB, and a step can have 76.10 GiB of the "
        "79.11 of NVIDIA H100 80GB HBM3; the smallest --accumulation_steps that fits is 3"
    )


def test_no_accumulation_steps_fit():
    tries = (Trial(1, 90 * GIB, 0), Trial(128, None, 0, "1 image has no statistics"))
    found = dataclasses.replace(TOO_LARGE, accumulations=tries)
    assert found.failure.endswith("no --accumulation_steps makes it fit: use a smaller batch_size")
    assert table(found).splitlines()[-1] == (
        "128                     invalid: 1 image has no statistics"
    )


@pytest.mark.parametrize(
    ("larger", "ends"),
    [((), True), ((Trial(256, 90 * GIB, 7),), False), ((Trial(256, None, 0, "no data"),), False)],
)
def test_a_search_that_ends_before_the_memory(larger, ends):
    found = dataclasses.replace(GPUS, batches=(Trial(128, 4 * GIB, 0), *larger))
    expected = "Larger ones may fit, too: the search ends here."
    assert (expected in table(found).splitlines()) == ends
    assert not found.failure


def test_the_largest_of_several_image_sizes():
    sizes = {"train_sizes": (128,), "train_until": ("3 epochs",)}
    found = dataclasses.replace(GOOD, config=GOOD.config.replace(**sizes))
    expected = (
        "batch                   1,024 images of 224 px, the largest of the run, 128 a replica"
    )
    assert expected in table(found).splitlines()


@pytest.mark.parametrize(
    ("gpu", "precision", "slow"),
    [
        ("p40", "mixed_float16", True),
        ("p40", "float32", False),
        ("p100", "mixed_float16", False),
        ("v100", "mixed_float16", False),
        ("b200", "mixed_float16", False),
    ],
)
def test_float16_that_is_slower_than_float32(gpu, precision, slow):
    config = GPUS.config.replace(precision=precision)
    found = dataclasses.replace(GPUS, config=config, topology=gpu_topology(f"{gpu}:1x8"))
    expected = "float16                 Tesla P40 computes in it at 1/64 of float32's speed, so"
    assert (expected in table(found)) == slow
    assert not found.failure


def test_memory_up_to_the_last_byte():
    usable = GPUS.topology.usable
    for peak, fits in ((usable, True), (usable + 1, False)):
        memory = {**dict.fromkeys(MEMORY, 0), "temporary": peak}
        found = dataclasses.replace(GPUS, program=Program(1.0, memory, 1.0, 0))
        assert found.fits == fits
        assert bool(found.failure) != fits


def test_what_the_compiled_step_is_not():
    found = dataclasses.replace(GPUS, compiled=(Check("convolutions", "1 of f32", "in float32"),))
    assert found.failure == "in float32"
    assert "convolutions            NO  1 of f32: in float32" in table(found).splitlines()


def test_file_of_gpus(tmp_path):
    found = dataclasses.replace(GPUS, batches=(Trial(128, 4 * GIB, 0), Trial(256, 90 * GIB, 7)))
    write(found, tmp_path)
    values = json.loads((tmp_path / "compile.json").read_text())
    assert values["topology"]["usable"] == GPUS.topology.usable
    assert values["batches"][1] == {
        "size": 256,
        "peak": 90 * GIB,
        "computed_twice": 7,
        "refusal": "",
    }
    assert values["compiled"] == [{"name": "convolutions", "found": "158 of f16", "wrong": ""}]
    assert values["fits"] is True


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, "0 bytes"), (999, "999 bytes"), (1020, "0.996 KiB"), (1020 * 2**20, "0.996 GiB")],
)
def test_bytes_without_exponents(size, expected):
    assert _size(size) == expected
