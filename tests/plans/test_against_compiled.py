"""The planner's memory beside that of compilations for GPUs, as docs/planning.md has it."""

import json
import pathlib

import pytest

from imagenet_fast.config import Config
from imagenet_fast.plans.run_plan import Hardware, plan_run

ROOT = pathlib.Path(__file__).parent.parent.parent
GIB = 2**30
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_memory_of_resnet50(precision):
    log = ROOT / "benchmarks" / "compile" / f"resnet50_h100_4x8_{precision}" / "compile.json"
    values = json.loads(log.read_text())
    config = Config(
        synthetic=True,
        num_classes=1000,
        precision=precision,
        batch_size=values["options"]["batch_size"],
    )
    plan = plan_run(config, Hardware("h100", values["topology"]["chips"]))
    compiled = values["program"]["peak"]
    # It counts what is kept for the backward pass, and no operation's own memory: too little.
    assert 0.7 * compiled < plan.estimated_memory < compiled
    row = (
        f"| {precision} | {plan.estimated_memory / GIB:.2f} | {compiled / GIB:.2f} | "
        f"{plan.estimated_memory / compiled - 1:+.0%} |"
    )
    assert row in (ROOT / "docs" / "planning.md").read_text(), row
