"""The steps that ran on a GPU: their programs, and the table of docs/compile.md."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from small_config import SMALL

ROOT = pathlib.Path(__file__).parents[3]
FOLDER = ROOT / "tools" / "gpu_steps"
PYTHON = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "cwd": ROOT}


def imported(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_log():
    report = imported("report")
    steps = json.loads(report.FILE.read_text())["steps"]
    assert list(steps) == list(imported("steps").STEPS)
    text = (ROOT / "docs" / report.PAGE).read_text()
    assert report.filled_page(text, steps) == text


def test_each_step_is_the_recipe_s_of_one_gpu():
    """Besides what makes one GPU's part of a batch of several, and images from the host."""
    from imagenet_fast.config import Config

    steps = imported("steps")
    given = {"batch_size", "image_size", "num_classes", "strategy", "synthetic", "xla"}
    given |= {"data_on_device", "alternating_flip", "augment_in_groups"}
    for name, config in steps.STEPS.items():
        if not name.startswith("resnet50"):
            recipe = Config.from_flagfile(name)
            assert set(config.differences(recipe)) <= given, name
            assert recipe.batch_size % config.batch_size == 0
            assert config.image_size == recipe.largest_image_size
    for name in steps.COMPARED:
        small = steps.small(steps.STEPS[name])
        assert small.batch_size == 32 and small.image_size <= 64 and not small.sizes_until


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("jax") is not None, reason="needs jax to be missing")
def test_errors_of_the_export_are_a_line(tmp_path):
    command = [sys.executable, FOLDER / "export.py", f"--output_dir={tmp_path / 'out'}"]
    for arguments, status, message in (
        (["alexnet"], 2, "there is no step 'alexnet'; there are resnet50_float16, "),
        ([], 1, "export.py: error: compiling for GPUs needs jax"),
    ):
        finished = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, check=False, **PYTHON
        )
        assert finished.returncode == status
        assert message in finished.stderr
        assert "Traceback" not in finished.stderr


@pytest.mark.compile
@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
def test_steps_run_on_this_machine_s_processor(tmp_path):
    """In place of the GPU: time, memory and the comparison, which finds no difference here."""
    sys.path.insert(0, str(FOLDER))
    try:
        export = imported("export")
    finally:
        sys.path.remove(str(FOLDER))
    config = SMALL.replace(strategy="tpu", batch_size=16)
    described = {
        name: export.lowered(config, tmp_path / f"{name}.hlo")
        for name in ("tiny", "tiny_small_float32")
    }
    (tmp_path / "steps.json").write_text(json.dumps({"steps": described}))
    command = [sys.executable, FOLDER / "run.py", f"--steps={tmp_path}", f"--output_dir={tmp_path}"]
    subprocess.run(command, check=True, **PYTHON)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["tiny"]["finite"]
    seconds = results["tiny"]["seconds"]
    assert 0 < seconds["min"] <= seconds["median"] <= seconds["max"]
    assert results["tiny"]["memory"]["temporary"] > 0
    found = results["tiny_small_float32"]
    assert not found["tf32"]
    assert found["difference"] < 1e-6 < found["perturbed"] < 0.1
    assert found["moved"] > 1e-3
