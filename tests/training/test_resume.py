"""A run that is killed and started again ends with the same bits."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from model_weights import weights_in

# A run of the quick tests is killed in test_train.py.
pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = pathlib.Path(__file__).parent.parent.parent
STEPS = 40
# Evaluations and checkpoints fall on different steps, the last stretch is a short one, and an epoch
# of 22 steps ends in the middle.
OPTIONS = {
    "model": "resnet8",
    "image_size": 16,
    "train_crop": "pad",
    "batch_size": 64,
    "duration": f"{STEPS} steps",
    "eval_every": "15 steps",
    "checkpoint_every": "4 steps",
    "keep_best": True,
    "log_every": "1 step",
    "warmup": "0 steps",
    "decay_at": "30 steps",
    # Nobody looks at them.
    "examine": False,
    "tensorboard": False,
}

# What keeps a state of its own, or has none where others have.
TRICKS = {
    **OPTIONS,
    "model": "resnet9",
    "width": 4,
    "whitening": True,
    "batch_norm_batch_size": 16,
    "data_on_device": True,
    "augment_in_groups": True,
    "ema_decay": 0.9,
    "ema_every": 5,
    "lookahead_every": 3,
}


def command(data_dir, model_dir, workers, options=OPTIONS):
    flags = [f"--{name}={value}" for name, value in options.items()]
    job = ["train", f"--data_dir={data_dir}", f"--model_dir={model_dir}", *flags]
    if not workers:
        return [sys.executable, "-m", "imagenet_fast", *job]
    launcher = str(ROOT / "tools" / "launch_local.py")
    return [sys.executable, launcher, "--workers", str(workers), "--", *job]


def start(arguments, log):
    return subprocess.Popen(
        arguments, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def last_step(model_dir):
    try:
        lines = (model_dir / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["step"]
    except (OSError, IndexError, ValueError):
        return 0


def run_to_the_end(arguments, log_path):
    with log_path.open("a") as log:
        process = start(arguments, log)
        assert process.wait(timeout=240) == 0, log_path.read_text()[-4000:]


def run_until_killed(arguments, log_path, model_dir, step):
    """Kills the whole job when its metrics have reached a step."""
    with log_path.open("a") as log:
        process = start(arguments, log)
        deadline = time.monotonic() + 240
        while last_step(model_dir) < step:
            assert process.poll() is None, log_path.read_text()[-4000:]
            assert time.monotonic() < deadline, log_path.read_text()[-4000:]
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    ("workers", "options", "kills"),
    [(0, OPTIONS, 3), (2, TRICKS, 2)],
)
def test_a_run_killed_repeatedly_ends_with_the_same_bits(digits, tmp_path, workers, options, kills):
    """Two workers that read images are killed in tests/gcp/test_gcp_training.py."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_to_the_end(command(digits, whole, workers, options), tmp_path / "whole.log")
    steps = sorted(random.sample(range(2, STEPS), kills))
    print("killed at steps", steps)
    arguments = command(digits, killed, workers, options)
    for step in steps:
        run_until_killed(arguments, tmp_path / "killed.log", killed, step)
    run_to_the_end(arguments, tmp_path / "killed.log")

    for folder in ("checkpoints", "best"):
        expected, found = (weights_in(run, folder) for run in (whole, killed))
        assert expected.keys() == found.keys()
        assert any(name.startswith("optimizer/") for name in expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(value, found[name], err_msg=name)

    # Nothing is told twice, and what is told is the same.
    rows = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (whole, killed)
    ]
    assert [(row["kind"], row["step"]) for row in rows[0]] == [
        (row["kind"], row["step"]) for row in rows[1]
    ]
    for one, other in zip(*rows):
        # Sums that are started anew are rounded elsewhere.
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["top1"] == pytest.approx(other["top1"], abs=1e-4)
    times = [row["train_seconds"] for row in rows[1]]
    assert times == sorted(times)
