"""Trains on a pod of two hosts that is preempted in the middle of an epoch and recreated."""

import json
import pathlib
import shutil
import subprocess
import time

import numpy as np
import pytest
from model_weights import weights_in

# In the default run, tests/training has the weights of resumed runs.
pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = pathlib.Path(__file__).parents[2]
STEPS, EPOCH = 36, 22
# The last checkpoint before the first step at which it may be preempted.
CHECKPOINT, PREEMPTED_FROM = 24, 27
OPTIONS = {
    "model": "resnet8",
    "image_size": "16",
    "train_crop": "pad",
    "batch_size": "64",
    "duration": f"{STEPS} steps",
    "decay_at": "30 steps",
    "log_every": "1 step",
    "checkpoint_every": "4 steps",
    "eval_every": f"{STEPS} steps",
    # Not needed here.
    "examine": "false",
    "tensorboard": "false",
}


def use(bench, digits, port, name):
    """Fills in the env file for a run on two hosts that mount the same file system."""
    flags = " ".join(f'"--{option}={value}"' for option, value in OPTIONS.items())
    bench.settings.update(
        NAME=name,
        RUN=name,
        DATA_DIR=digits,
        RUNS_DIR=str(bench.folder / "mounted"),
        STRATEGY="multi_worker",
        PORT=str(port),
        TRAIN_FLAGS=f"({flags})",
        POLL_SECONDS="0.2",
    )


def rows(bench, name):
    file = bench.folder / "mounted" / name / "metrics.jsonl"
    try:
        return [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError):
        return []


def test_a_run_preempted_in_mid_epoch_ends_with_the_same_weights(bench, digits, port):
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    package = bench.checkout / "imagenet_fast"
    shutil.copytree(ROOT / "imagenet_fast", package, ignore=ignored, dirs_exist_ok=True)
    use(bench, digits, port, "undisturbed")
    output = bench.run("--yes", "keep_running", timeout=300)
    assert "2 workers x 1 CPU" in output and "was preempted" not in output
    bench.run("--yes", "delete")

    use(bench, digits, port, "preempted")
    with (bench.folder / "log").open("w+") as log:
        process = bench.start("--yes", "keep_running", output=log)
        try:
            end = time.monotonic() + 300
            while not (logged := rows(bench, "preempted")) or logged[-1]["step"] < PREEMPTED_FROM:
                assert process.poll() is None and time.monotonic() < end, log.read()
                time.sleep(0.01)
            bench.cloud.preempt("preempted")
            before = rows(bench, "preempted")
            assert EPOCH < before[-1]["step"] < STEPS, "not in the middle of the second epoch"
            assert not bench.cloud.host("preempted", 0).exists()
            assert process.wait(timeout=300) == 0
        finally:
            process.kill()
            log.seek(0)
            output = log.read()
    assert "preempted was preempted: recreating it" in output
    creations = [call for call in bench.changes() if "create" in call]
    assert [call[4] for call in creations] == ["undisturbed", "preempted", "preempted"]

    # The fetched run is bit-identical to the undisturbed one.
    bench.run("fetch")
    found = weights_in(bench.checkout / "runs" / "preempted")
    expected = weights_in(bench.folder / "mounted" / "undisturbed")
    assert found.keys() == expected.keys()
    assert any("optimizer" in name for name in expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(value, found[name], err_msg=name)
    steps = [[row["step"] for row in rows(bench, name)] for name in ("undisturbed", "preempted")]
    assert steps[0] == steps[1] and steps[0][-1] == STEPS
    # It resumed instead of starting over: the times of its first steps are the old ones.
    kept = [row for row in before if row["step"] <= CHECKPOINT]
    assert kept == rows(bench, "preempted")[: len(kept)] and len(kept) >= CHECKPOINT

    bench.run("--yes", "delete")
    left = subprocess.run(["pgrep", "-f", str(bench.folder / "cloud" / "hosts")], check=False)
    assert left.returncode == 1
