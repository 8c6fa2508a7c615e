"""The table of docs/planning.md: the planner's memory against that of GPU compilations."""

import json
import pathlib

import pytest

from imagenet_fast.config import Config
from imagenet_fast.lab.planning.run import Hardware, plan_run

ROOT = pathlib.Path(__file__).parents[3]
GIB = 2**30
DATA = {"synthetic": True, "num_classes": 1000}
RESNET50 = Config(**DATA, batch_size=8192, precision="mixed_float16")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "accelerator"),
    [
        ("facebook_1h_8k", "p100"),
        ("tencent_4min_resnet50", "p40"),
        ("mlperf_4k_h100", "h100"),
        ("resnet50_h100_4x8_mixed_float16", "h100"),
    ],
)
def test_memory(name, accelerator):
    log = ROOT / "benchmarks" / "compile" / name / "compile.json"
    values = json.loads(log.read_text())
    config, flagfile = (
        RESNET50,
        ROOT / "imagenet_fast" / "flags" / f"{name.removesuffix('_h100')}.flags",
    )
    if flagfile.exists():
        config = Config.from_flagfile(flagfile, **DATA)
    plan = plan_run(config, Hardware(accelerator, values["topology"]["chips"]))
    estimate, compiled = plan.estimated_memory, values["program"]["peak"]
    assert 0.7 < estimate / compiled < 1.2
    options = values["options"]
    row = (
        f"| {values['batch']} images, {options['precision']}, {accelerator} | "
        f"{estimate / GIB:.2f} | {compiled / GIB:.2f} | {estimate / compiled - 1:+.0%} |"
    )
    assert row in (ROOT / "docs" / "planning.md").read_text(), row
