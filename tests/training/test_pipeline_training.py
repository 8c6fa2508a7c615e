"""Training through a pipeline: the same losses as without one, whatever its stages."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from model_weights import weights_in
from server_processes import ROOT, running_stage_server

from imagenet_fast import commands

pytestmark = pytest.mark.slow

OPTIONS = (
    *("--model=resnet8", "--image_size=16", "--batch_size=66", "--accumulation_steps=3"),
    *("--duration=12 steps", "--log_every=1 step", "--checkpoint_every=4 steps", "--ema_decay=0.8"),
    *("--warmup=0 steps", "--mixup_alpha=0.2", "--loss=binary_cross_entropy"),
    *("--notensorboard", "--noexamine"),
)
STAGES = {
    "none": ["--strategy=one_device"],
    "two": ["--pipeline_stages=2", "--logical_cpus=4"],
    "four": ["--pipeline_stages=4", "--logical_cpus=4", "--pipeline_balance=1,2,3,5"],
}


def command(data_dir, model_dir, stages):
    job = ["train", f"--data_dir={data_dir}", f"--model_dir={model_dir}", *OPTIONS, *stages]
    return [sys.executable, "-m", "imagenet_fast", *job]


def losses(model_dir):
    rows = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "train"]


def train(run_python, data_dir, model_dir, *flags):
    run_python(command(data_dir, model_dir, flags)[1:], workers=2, fresh=True)
    return losses(model_dir)


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory, run_python_session):
    """The folder of each run, which is made when it is first asked for."""
    folder = tmp_path_factory.mktemp("pipelines")

    def get(name):
        if not (folder / name).exists():
            run_python_session(command(digits, folder / name, STAGES[name])[1:])
        return folder / name

    return get


SHORT = """
import json, sys
from small_network import small_network
from imagenet_fast import Config, build_model, make_dataset

options = {"image_size": 16, "train_crop": "none", "batch_size": 33, "accumulation_steps": 3}
options |= {"warmup": "0 steps", "ema_decay": 0.8, "mixup_alpha": 0.2, "logical_cpus": 2}
with open(sys.argv[2], "w") as file:
    json.dump({"3": 4.5, "7": 0}, file)
options["class_weights"] = sys.argv[2]
for changes in ({"strategy": "one_device"}, {"pipeline_stages": 2}):
    config = Config(data_dir=sys.argv[1], **options, **changes)
    model = build_model(config, model=small_network)
    data = make_dataset(config, "train")
    history = model.fit(data, epochs=3, steps_per_epoch=1, verbose=0).history
    with model.averaged_weights():
        weights = [float((own.numpy() ** 2).sum()) for own in model.trainable_variables]
    print(json.dumps([history["loss"], weights]))
"""


def test_a_few_steps_are_those_without_a_pipeline(digits, run_python, tmp_path):
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = ["-c", SHORT, digits, str(tmp_path / "weights.json")]
    lines = run_python(command, environment=path).stdout.splitlines()
    one, other = map(json.loads, lines)
    assert len(one[0]) == 3 and len(one[1]) == 5
    for own, expected in zip(other, one):
        np.testing.assert_allclose(own, expected, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["two", "four"])
def test_losses_are_those_without_a_pipeline(run, name):
    own, other = losses(run(name)), losses(run("none"))
    assert len(own) == 12
    np.testing.assert_allclose(own, other, rtol=1e-5)


@pytest.mark.long
def test_two_workers_of_two_stages_are_two_workers(digits, tmp_path, run_python):
    workers, stages = "--strategy=multi_worker", ("--logical_cpus=2", "--pipeline_stages=2")
    other = train(run_python, digits, tmp_path / "plain", workers)
    own = train(run_python, digits, tmp_path / "stages", workers, *stages)
    np.testing.assert_allclose(own, other, rtol=1e-5)


@pytest.mark.long
def test_a_killed_run_resumes_with_another_balance(run, digits, tmp_path):
    stages = ["--logical_cpus=4", "--pipeline_stages=3", "--pipeline_schedule=1f1b"]
    first = subprocess.Popen(
        command(digits, tmp_path, stages),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    with first:
        try:
            while first.poll() is None and not any(tmp_path.glob("checkpoints/ckpt-8.index")):
                time.sleep(0.05)
        finally:
            os.killpg(first.pid, signal.SIGKILL)
    stages = ["--logical_cpus=4", "--pipeline_stages=2", "--rematerialize=never"]
    subprocess.run(command(digits, tmp_path, stages), cwd=ROOT, check=True)
    np.testing.assert_allclose(losses(tmp_path), losses(run("two")), rtol=1e-5)
    for own, other in zip(weights_in(tmp_path).values(), weights_in(run("two")).values()):
        np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_on_stage_servers(run, digits, tmp_path, run_python):
    with running_stage_server() as (_, address):
        stages = ["--pipeline_stages=2", f"--pipeline_servers={address}"]
        run_python(command(digits, tmp_path, stages)[1:], fresh=True)
    np.testing.assert_allclose(losses(tmp_path), losses(run("two")), rtol=1e-5)


@pytest.mark.long
def test_killed_stage_server(digits, tmp_path):
    with running_stage_server() as (server, address):
        stages = [f"--pipeline_servers={address}", "--pipeline_stages=2", "--duration=9999 steps"]
        train = subprocess.Popen(
            command(digits, tmp_path, stages), cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        with train:
            while train.poll() is None and not any(tmp_path.glob("checkpoints/ckpt-8.index")):
                time.sleep(0.05)
            server.kill()
            told = train.communicate(timeout=60)[1]
    assert train.returncode == 2
    assert f"error: stage server {address} has stopped" in told


@pytest.mark.long
def test_evaluated_and_exported_without_a_pipeline(run, capsys, tmp_path):
    of_four = f"--model_dir={run('four')}"
    assert commands.run(["evaluate", of_four]) == 0
    row = (run("four") / "metrics.jsonl").read_text().splitlines()[-1]
    assert f"top-1       {json.loads(row)['top1']:.2%}" in capsys.readouterr().out
    assert commands.run(["export", of_four, f"--saved_model={tmp_path}/x"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pipeline_stages=2", "--xla"], "pipeline_stages does not work with xla"),
        (["--pipeline_stages=2", "--strategy=mirrored"], "does not work with strategy=mirrored"),
        (["--pipeline_stages=99"], "the pipeline needs 99 devices, but there are"),
    ],
)
def test_bad_options(digits, tmp_path, capsys, flags, message):
    own = ["train", f"--data_dir={digits}", f"--model_dir={tmp_path}", *OPTIONS, *flags]
    assert commands.run(own) == 2
    assert message in capsys.readouterr().err
