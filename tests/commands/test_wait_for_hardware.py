"""``train --wait_for_hardware``: workers that are lost, and taken back."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from model_weights import weights_in

from imagenet_fast import commands

ROOT = pathlib.Path(__file__).parents[2]
TRAIN = (
    "train",
    "--flagfile=digits",
    "--duration=200 steps",
    "--decay_at=150 steps",
    "--checkpoint_every=20 steps",
    "--eval_every=200 steps",
)


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", "100000"])
def test_no_number_of_minutes(capsys, value):
    given = ["train", "--flagfile=digits", "--model_dir=x", f"--wait_for_hardware={value}"]
    assert commands.run(given) == 2
    assert f"wait_for_hardware={value} must be a number of minutes" in capsys.readouterr().err


def training_processes(model_dir):
    """Returns the ids of the processes that supervisors have started, by /proc."""
    found = []
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "cmdline").read_text().split("\0")
            except OSError:  # It has ended.
                continue
            if words[-2:] == ["--wait_for_hardware=", ""] and f"--model_dir={model_dir}" in words:
                found.append(int(folder.name))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_training_process_changes_nothing(digits, run_python, tmp_path):
    arguments = [*TRAIN, f"--data_dir={digits}"]
    undisturbed = tmp_path / "undisturbed"
    run_python(["-m", "imagenet_fast", *arguments, f"--model_dir={undisturbed}"], workers=2)
    run = tmp_path / "run"
    launcher = [sys.executable, ROOT / "tools" / "launch_local.py", "--workers=2", "--"]
    job = subprocess.Popen(
        [*launcher, *arguments, f"--model_dir={run}", "--wait_for_hardware=5"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    with job:
        try:
            end = time.monotonic() + 200
            while not (run / "checkpoints" / "checkpoint").exists():
                assert time.monotonic() < end and job.poll() is None
                time.sleep(0.05)
            _, second = training_processes(run)
            os.kill(second, signal.SIGKILL)
            _, errors = job.communicate(timeout=200)
        finally:
            job.terminate()
    assert job.returncode == 0, errors
    assert errors.count("starting with 2 workers") == 2
    expected, got = weights_in(undisturbed), weights_in(run)
    assert expected.keys() == got.keys()
    assert all((expected[name] == got[name]).all() for name in expected)
