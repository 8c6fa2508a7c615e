"""The tables of docs/compile.md match the logs in benchmarks/compile."""

import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[3]
LOGS = ROOT / "benchmarks" / "compile"
GIB = 2**30
# By today's name of a check: the name that it had before, which older logs have.
OLDER = {"gradient all-reduces": "sums of gradients"}
RECIPES = (
    *("facebook_1h_8k", "tencent_4min_resnet50", "mlperf_4k_v3", "mlperf_4k_h100"),
    *("myrtle_cifar10", "airbench_cifar10", "speedrun_cifar10", "airbench96_cifar10"),
    *("mlperf_3k", "mosaic_mild", "ffcv_rn50_16", "ffcv_rn50_32", "ffcv_rn50_88"),
    *("ffcv_rn18_16", "ffcv_rn18_88"),
)


def read(name):
    return json.loads((LOGS / name / "compile.json").read_text())


def checks(values, name):
    """Returns the results of a check in the lowered and in the compiled step."""
    return [
        next((own["found"] for own in values[part] if own["name"] in (name, OLDER.get(name))), "")
        for part in ("checks", "compiled")
    ]


def devices(values):
    topology = values["topology"]
    kind = topology["kind"].replace("NVIDIA ", "")
    cores = f" ({topology['replicas']} cores)" * (topology["replicas"] > topology["chips"])
    return f"{topology['chips']:,} {kind}{cores}"


def resnet_row(values):
    """GPUs, precision, memory by batch, largest batch, convolutions, all-reduces."""
    tried = values["batches"] or [
        {
            "size": values["batch"],
            "peak": values["program"]["peak"],
            "computed_twice": values["computed_twice"],
        }
    ]
    usable = values["topology"]["usable"]
    memory = ", ".join(
        f"{own['size']:,}: {own['peak'] / GIB:.1f}{'*' * bool(own['computed_twice'])}"
        for own in tried
    )
    fitting = [own for own in tried if own["peak"] <= usable]
    largest = f"{fitting[-1]['size']:,}" if values["batches"] else ""
    convolutions = checks(values, "convolutions")[1]
    all_reduces = checks(values, "all-reduces")[1]
    precision = values["options"]["precision"]
    return (
        f"| {devices(values)} | {precision} | {memory} | {largest} | {convolutions} | "
        f"{all_reduces} |"
    )


def recipe_row(name, values):
    """Recipe, hardware, images each, memory, convolutions, gradients, seconds to compile."""
    program, topology = values["program"], values["topology"]
    limit = topology["usable"] or topology["memory"]
    lowered, compiled = checks(values, "convolutions")
    return (
        f"| `{name}` | {devices(values)} | {values['batch']:,} | "
        f"{program['peak'] / GIB:.2f} of {limit / GIB:.1f} GiB | {compiled or lowered} | "
        f"{checks(values, 'gradient all-reduces')[0]} | {program['seconds']:.0f} s |"
    )


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "compile.md").read_text()


def names(prefix):
    return sorted(path.parent.name for path in LOGS.glob(f"{prefix}*/compile.json"))


@pytest.mark.parametrize("name", names("resnet50_"))
def test_rows_of_resnet50(page, name):
    assert resnet_row(read(name)) in page


@pytest.mark.parametrize("name", RECIPES)
def test_rows_of_recipes(page, name):
    values = read(name)
    recipe = name.removesuffix("_h100").removesuffix("_v3")
    assert recipe_row(recipe, values) in page
    assert not values["failure"]


@pytest.mark.parametrize("name", ["too_large", "resnet50_v100_1x8_mixed_bfloat16"])
def test_what_fails(page, name):
    failure = read(name)["failure"]
    assert failure and failure in page


def test_what_was_printed(page):
    assert (LOGS / "resnet50_h100_4x8_mixed_float16" / "compile.txt").read_text() in page


def test_every_log_is_in_a_table():
    others = {*RECIPES, *names("resnet50_"), "too_large"}
    assert {path.parent.name for path in LOGS.glob("*/compile.json")} == others
    assert len(names("resnet50_")) >= 5
