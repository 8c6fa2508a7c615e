"""Whole runs of a small model: what they write, how they end, and how they go on."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from forking import load_launcher
from model_weights import weights_in
from small_config import SMALL
from small_network import small_network

from imagenet_fast import Config, UserError, evaluate, train
from imagenet_fast.data.info import read_info
from imagenet_fast.distribute import consistency
from imagenet_fast.training.checkpoints.model_dir import alone_in, claim_model_dir
from imagenet_fast.training.logs.metrics_file import read_rows
from imagenet_fast.training.logs.mlperf import read_lines
from imagenet_fast.training.logs.trackers import RowLogger
from imagenet_fast.training.report.saved_images import load_error_analysis, load_inputs
from imagenet_fast.training.run import make_run

ROOT = pathlib.Path(__file__).parents[2]
OPTIONS = {
    "model": "resnet8",
    "image_size": 16,
    "train_crop": "none",
    "flip": False,
    "eval_crop_fraction": 1.0,
    "batch_size": 32,
    "learning_rate_batch": 32,
    "warmup": "0 steps",
    "decay_at": "20 steps",
    "duration": "25 steps",
    "eval_every": "10 steps",
    "checkpoint_every": "4 steps",
    "log_every": "6 steps",
}
STEPS_PER_EPOCH = 1438 // 32


def files(directory):
    return {path.name for path in pathlib.Path(directory).iterdir()}


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.fixture(scope="module")
def config(digits, tmp_path_factory):
    directory = tmp_path_factory.mktemp("train") / "deep" / "run"
    return Config(data_dir=digits, model_dir=str(directory), strategy="one_device", **OPTIONS)


@pytest.fixture(scope="module")
def summary(config):
    """Of a run from beginning to end."""
    return train(config)


# --- What a run writes


def test_files(config, summary):
    assert files(config.model_dir) == {
        "checkpoints",
        "config.json",
        "examination.npz",
        "input_images.npz",
        "labels.txt",
        "preparation.json",
        "metrics.jsonl",
        "report.html",
        "segments.jsonl",
        "summary.json",
        "tensorboard",
    }
    stored = Config.from_json(pathlib.Path(config.model_dir, "config.json").read_text())
    assert stored == config.replace(replicas=(1, 1))
    # keep_checkpoints: those of steps 24 and 25.
    indices = pathlib.Path(config.model_dir, "checkpoints").glob("*.index")
    assert sorted(path.stem for path in indices) == ["ckpt-24", "ckpt-25"]


def test_rows(config, summary):
    rows = read_rows(config.model_dir)
    # At each sixth step, and with each checkpoint (every fourth) and evaluation (every tenth).
    assert [row["step"] for row in rows if row["kind"] == "train"] == [
        *(4, 6, 8, 10, 12, 16, 18, 20, 24, 25)
    ]
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [10, 20, 25]
    assert sum(row["examples"] for row in rows if row["kind"] == "train") == 25 * 32
    assert all(row["examples"] == 359 for row in rows if row["kind"] == "validation")
    assert all(row["epoch"] == pytest.approx(row["step"] / STEPS_PER_EPOCH) for row in rows)
    rates = {row["step"]: row["learning_rate"] for row in rows if row["kind"] == "train"}
    assert rates[20] == pytest.approx(0.1)
    assert rates[24] == pytest.approx(0.01)


def test_summary(config, summary):
    assert json.loads(pathlib.Path(config.model_dir, "summary.json").read_text()) == summary
    last = read_rows(config.model_dir)[-1]
    assert last["kind"] == "validation"
    assert {name: summary[name] for name in ("top1", "top5", "loss")} == {
        name: last[name] for name in ("top1", "top5", "loss")
    }
    assert 0 < summary["top1"] < summary["top5"] <= 1
    assert summary["images_evaluated"] == 359
    assert summary["images_skipped_in_evaluation"] == summary["images_skipped_in_training"] == 0
    assert (summary["steps"], summary["epochs"]) == (25, pytest.approx(25 / STEPS_PER_EPOCH))
    assert 0 < summary["train_seconds"] < summary["wall_seconds"]
    assert summary["train_seconds"] + summary["compile_seconds"] < summary["wall_seconds"]
    speed = 24 * 32 / summary["train_seconds"]
    assert summary["images_per_second"] == pytest.approx(speed)
    assert summary["images_per_second_per_device"] == pytest.approx(speed)
    assert (summary["replicas"], summary["devices"]) == (1, ["CPU"])
    assert summary["parameters"] == 75_290
    assert summary["target_top1"] is summary["train_seconds_to_target"] is None
    assert summary["versions"]["tensorflow"] == tf.__version__
    assert summary["hardware"]["cores"] > 0
    assert summary["command"]
    training = [row for row in read_rows(config.model_dir) if row["kind"] == "train"]
    assert summary["train_loss"] == training[-1]["loss"]


def test_report(config, summary):
    page = pathlib.Path(config.model_dir, "report.html").read_text()
    for title in ("Confusion matrix", "Worst mistakes", "Training images as the model sees them"):
        assert title in page
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert "<svg" in page
    assert "resnet8" in page


def test_tensorboard_has_the_rows(config, summary):
    found = {}
    for path in pathlib.Path(config.model_dir, "tensorboard").rglob("*tfevents*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.tag == "loss":
                    found[path.parent.name, event.step] = float(tf.make_ndarray(value.tensor))
    rows = read_rows(config.model_dir)
    assert found == {(row["kind"], row["step"]): pytest.approx(row["loss"]) for row in rows}


def pictures_in(model_dir):
    """The pictures and texts that TensorBoard has: (kind, step, name)."""
    found = []
    for path in pathlib.Path(model_dir, "tensorboard").rglob("*tfevents*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name in ("images", "text"):
                    found.append((path.parent.name, event.step, value.tag))
    return sorted(found)


PICTURES = [
    ("train", 0, "images/input_images"),
    ("validation", 25, "images/confusion_matrix"),
    ("validation", 25, "images/worst_mistakes"),
    ("validation", 25, "most_confused"),
]


def test_pictures(config, summary):
    assert pictures_in(config.model_dir) == PICTURES
    found = load_error_analysis(config.model_dir, 10)
    true, answers, images = found.confusion.T
    assert images.sum() == summary["images_evaluated"]
    assert images[true == answers].sum() == round(359 * summary["top1"])
    assert found.step == 25
    assert load_inputs(config.model_dir, 10).images.shape == (32, 16, 16, 3)


@pytest.mark.long
def test_monitoring_does_not_change_the_weights(config, summary, tmp_path):
    other = config.replace(
        model_dir=str(tmp_path / "run"),
        tensorboard=False,
        examine=False,
        profile_steps=(7, 11),
        mlperf_log=True,
    )
    assert train(other)["loss"] == summary["loss"]
    assert_same_weights(weights_in(other.model_dir), weights_in(config.model_dir))
    losses = [
        [(row["kind"], row["step"], row["loss"]) for row in read_rows(model_dir)]
        for model_dir in (other.model_dir, config.model_dir)
    ]
    assert losses[0] == losses[1]

    assert load_error_analysis(other.model_dir, 10) is load_inputs(other.model_dir, 10) is None
    profiles = list(pathlib.Path(other.model_dir).rglob("*.xplane.pb"))
    (path,) = profiles
    assert path.parts[-6:-2] == ("tensorboard", "train", "plugins", "profile")
    assert path.stat().st_size > 10_000
    assert not list(pathlib.Path(other.model_dir).rglob("*tfevents*"))
    log = read_lines(other.model_dir)
    values = {line["key"]: line["value"] for line in log}
    assert values["eval_accuracy"] == summary["top1"]
    assert (values["train_samples"], values["eval_samples"]) == (1438, 359)
    assert values["model_bn_span"] == 32
    assert [line["metadata"]["step_num"] for line in log if line["key"] == "eval_start"] == [
        *(10, 20, 25)
    ]
    assert log[-1]["metadata"]["status"] == "success"


def test_profile_steps_beyond_the_run(config):
    with pytest.raises(UserError, match="profile_steps goes to step 26, but the run has 25 steps"):
        train(config.replace(profile_steps=(3, 26), model_dir=config.model_dir + "_long"))
    assert not pathlib.Path(config.model_dir + "_long").exists()


# --- Going on


def test_a_run_killed_before_its_error_analysis_predicts_again(config, summary, tmp_path, capsys):
    """No other run does: test_a_finished_run_is_unchanged."""
    expected = load_error_analysis(config.model_dir, 10)
    run = tmp_path / "run"
    shutil.copytree(config.model_dir, run)
    (run / "examination.npz").unlink()
    (run / "report.html").unlink()
    train(config.replace(model_dir=str(run)))
    assert "analyzing errors: predicting 359 validation images (" in capsys.readouterr().err
    found = load_error_analysis(str(run), 10)
    for name, value in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), value)
    assert "Worst mistakes" in (run / "report.html").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("images", "told"),
    [
        (0, "batch 32 = 1 x 32; 1 steps of"),
        (8, "batch 32 = 1 x 32, batch norm of 8 images; 1 steps of"),
        (64, "batch 32 = 1 x 32, batch norm of 32 images (64 requested); 1 steps of"),
    ],
)
def test_run_summary_has_the_batch_norm_group(config, tmp_path, capsys, images, told):
    config = config.replace(model_dir=str(tmp_path), duration="1 step", examine=False)
    train(config.replace(batch_norm_batch_size=images, tensorboard=False))
    assert told in capsys.readouterr().err


def test_a_finished_run_is_unchanged(config, summary, capsys):
    weights, rows = weights_in(config.model_dir), read_rows(config.model_dir)
    kept = {path: path.stat().st_mtime_ns for path in pathlib.Path(config.model_dir).glob("*.npz")}
    again = train(config)
    assert_same_weights(weights_in(config.model_dir), weights)
    assert read_rows(config.model_dir) == rows
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(kept) == 2
    assert pictures_in(config.model_dir) == PICTURES
    assert again == summary
    told = capsys.readouterr().err
    assert told == (
        f"{config.model_dir} holds this run, finished at step 25 of 25: nothing is left to train\n"
    )


KILLED = """
import os, pathlib, signal, sys
import keras
from imagenet_fast import Config, train

class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == 14:
            os.kill(os.getpid(), signal.SIGKILL)

train(Config.from_json(pathlib.Path(sys.argv[1]).read_text()), callbacks=[Kill()])
"""


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_weights(config, summary, tmp_path, capsys, run_python):
    killed = config.replace(
        model_dir=str(tmp_path / "run"),
        tensorboard=False,
        examine=False,
        mlperf_log=True,
        steps_per_call="1",
    )
    (tmp_path / "killed.json").write_text(killed.to_json())
    finished = run_python(["-c", KILLED, tmp_path / "killed.json"], check=False)
    assert finished.returncode == -signal.SIGKILL, finished.stderr
    assert 8 <= read_rows(killed.model_dir)[-1]["step"] < 14
    assert train(killed)["loss"] == pytest.approx(summary["loss"], rel=1e-4)
    assert "has changed" not in capsys.readouterr().err  # The images are those of before.
    assert_same_weights(weights_in(killed.model_dir), weights_in(config.model_dir))
    # Nothing is told twice, nor otherwise: sums of metrics go on from the checkpoint.
    times = {"images_per_second", "train_seconds", "wall_seconds"}
    told = [
        [{name: row[name] for name in row.keys() - times} for row in read_rows(run.model_dir)]
        for run in (killed, config)
    ]
    assert told[0] == told[1]
    log = read_lines(killed.model_dir)
    assert [line["value"] for line in log if line["key"] == "eval_accuracy"][-1] == summary["top1"]
    assert log[-1]["metadata"]["status"] == "success"


def test_other_options_need_another_model_dir(config, summary, monkeypatch):
    # Found before a model is built, for which images may have to be read.
    monkeypatch.setattr("imagenet_fast.training.start.build", lambda _: pytest.fail("late"))
    with pytest.raises(UserError, match=r"other options \(seed is 0 there, 1 here"):
        train(config.replace(seed=1))
    stored = Config.from_json(pathlib.Path(config.model_dir, "config.json").read_text())
    assert stored == config.replace(replicas=(1, 1))


@pytest.fixture(scope="module")
def stopped(config, tmp_path_factory):
    """A run that stops at a target which its first evaluation reaches, and its summary."""
    directory = tmp_path_factory.mktemp("stopped")
    changed = config.replace(
        model_dir=str(directory),
        stop_at_accuracy=0.05,
        tensorboard=False,
        examine=False,
        profile_steps=(3, 4),
        log_every="100 steps",
    )
    return changed, train(changed, model=small_network)


def test_a_run_stops_at_its_target(stopped):
    config, summary = stopped
    assert summary["steps"] == 10
    assert summary["top1"] >= summary["target_top1"] == 0.05
    row = read_rows(config.model_dir)[-1]
    assert (row["kind"], row["step"]) == ("validation", 10)
    assert summary["train_seconds_to_target"] == row["train_seconds"] > 0
    assert summary["wall_seconds_to_target"] == row["wall_seconds"] > row["train_seconds"]
    (profile,) = pathlib.Path(config.model_dir, "tensorboard").rglob("*.xplane.pb")
    assert profile.stat().st_size > 10_000
    assert not list(pathlib.Path(config.model_dir).rglob("*tfevents*"))


def test_a_run_that_reached_its_target_stays_finished(stopped, capsys):
    config, summary = stopped
    weights = weights_in(config.model_dir)
    again = train(config, model=small_network)
    told = "finished at step 10 of 25, where it reached stop_at_accuracy=0.05: nothing is left"
    assert told in capsys.readouterr().err
    assert again["steps"] == 10
    assert again["train_seconds_to_target"] == summary["train_seconds_to_target"]
    assert_same_weights(weights_in(config.model_dir), weights)


@pytest.mark.long
def test_early_stopping(config, tmp_path, capsys):
    config = config.replace(
        model_dir=str(tmp_path / "run"),
        eval_every="2 steps",
        early_stopping=2,
        keep_best=True,
        learning_rate=1e-6,
        tensorboard=False,
        examine=False,
    )
    summary = train(config, model=small_network)
    top1s = [row["top1"] for row in read_rows(config.model_dir) if row["kind"] == "validation"]
    best = int(np.argmax(top1s))
    assert len(top1s) == best + 3 < 12
    step, best_step = 2 * len(top1s), 2 * (best + 1)
    reason = f"by early_stopping=2: the best top-1, {top1s[best]:.2%}, is that of step {best_step}"
    assert summary["steps"] == step
    assert summary["stopped"] == reason
    assert summary["best_top1"] == top1s[best] >= summary["top1"] == top1s[-1]
    assert summary["best_step"] == best_step
    assert f"the run ends at step {step} of 25, {reason}\n" in capsys.readouterr().err
    page = pathlib.Path(config.model_dir, "report.html").read_text()
    assert "stopped early" in page
    again = train(config, model=small_network)
    assert f"finished at step {step} of 25, {reason}: nothing is" in capsys.readouterr().err
    assert again == summary
    result = evaluate(config, model=small_network, checkpoint="best")
    assert result["checkpoint"] == f"{config.model_dir}/best/ckpt-{best_step}"
    assert result["top1"] == pytest.approx(top1s[best])
    train(config.replace(duration="30 steps"), model=small_network)
    longer = capsys.readouterr().err
    assert f"finished at step {step} of 30, {reason}: nothing is" in longer
    assert "resumes" not in longer


class Watcher(RowLogger):
    """Records its calls, and ends the run after an evaluation."""

    def __init__(self, last):
        super().__init__()
        self.seen, self.rows, self.closed, self.last = [], [], False, last

    def write(self, row):
        self.rows.append(row)

    def close(self):
        self.closed = True

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append((epoch, logs["val_top1"]))
        self.model.stop_training = epoch == self.last


@pytest.mark.long
def test_callbacks_see_evaluations_and_may_end_the_run(config, tmp_path):
    config = config.replace(model_dir=str(tmp_path / "run"), examine=False, tensorboard=False)
    watcher = Watcher(last=1)
    found = train(config, callbacks=[watcher], model=small_network)
    assert found["steps"] == 20
    assert found["stopped"] == "by a Keras callback"
    assert watcher.closed
    assert watcher.rows == read_rows(config.model_dir)
    rows = [row for row in watcher.rows if row["kind"] == "validation"]
    expected = [(epoch, pytest.approx(row["top1"])) for epoch, row in enumerate(rows)]
    assert watcher.seen == expected and len(expected) == 2


# In the default run, a killed run goes on, above.
@pytest.mark.long
@pytest.mark.parametrize("examine", [False, True])
def test_a_run_that_a_callback_ended_goes_on(config, summary, tmp_path, capsys, examine):
    whole = config.model_dir
    config = config.replace(model_dir=str(tmp_path / "run"), examine=examine, tensorboard=examine)
    first, second = Watcher(last=0), Watcher(last=None)
    # Extended and evaluated at the same times, when it resumes.
    shorter = config.replace(duration="21 steps", checkpoint_every="9 steps")
    assert train(shorter, callbacks=[first])["steps"] == 10
    assert not examine or load_error_analysis(config.model_dir, 10).step == 10
    assert train(config, callbacks=[second])["steps"] == 25
    change = "resumes from step 10 with duration='25 steps' instead of '21 steps'; learning rate"
    assert change in capsys.readouterr().err
    if examine:
        assert load_error_analysis(config.model_dir, 10).step == 25
        # The input images are those of the first process.
        of_training = [place for place in pictures_in(config.model_dir) if place[0] == "train"]
        assert of_training == PICTURES[:1]
    rows = [row for row in read_rows(config.model_dir) if row["kind"] == "validation"]
    expected = [(epoch, pytest.approx(row["top1"])) for epoch, row in enumerate(rows)]
    assert [*first.rows, *second.rows] == read_rows(config.model_dir)
    assert first.closed and second.closed
    assert first.seen == expected[:1]
    assert second.seen == expected[1:]
    # Ended where a checkpoint was not due, and gone on with to the same weights.
    assert_same_weights(weights_in(config.model_dir), weights_in(whole))


def test_invalid_options_claim_no_directory(config, tmp_path):
    config = config.replace(model_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"alexnet_bn: images of .* 64 x 64"):
        train(config.replace(model="alexnet_bn"))
    assert not (tmp_path / "run").exists()


def test_the_last_checkpoint_has_the_last_evaluation(config, summary):
    """Step 24 is before the last evaluation, step 25 after it."""
    path = pathlib.Path(config.model_dir, "checkpoints", "ckpt-25")
    reader = tf.train.load_checkpoint(str(path))
    names = [name for name in reader.get_variable_to_shape_map() if name.startswith("state/")]
    (state,) = (json.loads(reader.get_tensor(name)) for name in names)
    assert state["step"] == 25
    assert state["validation"]["step"] == 25
    assert state["validation"]["top1"] == summary["top1"]
    assert state["clock"]["train_seconds"] == summary["train_seconds"]


# --- Data and durations


@pytest.fixture(scope="module")
def training_shards(digits, tmp_path_factory):
    """Shards that another program might have written: no manifest, no validation split."""
    directory = tmp_path_factory.mktemp("shards")
    for path in pathlib.Path(digits).glob("train-*"):
        shutil.copy(path, directory)
    return str(directory)


def test_workers_that_see_other_checkpoints_stop(config, summary, tmp_path, monkeypatch):
    """As where model_dir is a disk of each machine's own."""
    monkeypatch.setattr(consistency, "workers_of", lambda strategy: "workers")
    tell = {"starting a new run": "resuming from step 20"}
    monkeypatch.setattr(consistency, "texts_of_all", lambda _, own: [tell.get(own, own), own])
    message = (
        "workers disagree on where to start: worker 1 'starting a new run', worker 0 'resuming "
        f"from step 20'; --model_dir={tmp_path}/run must be a directory that all workers share"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        train(config.replace(model_dir=str(tmp_path / "run")))


@pytest.mark.long
def test_no_validation_split_and_rare_events(config, training_shards, tmp_path):
    """eval_every, checkpoint_every and log_every are longer than the run."""
    config = config.replace(
        data_dir=training_shards,
        num_classes=10,
        model_dir=str(tmp_path),
        duration="7 steps",
        eval_every="1 epoch",
        checkpoint_every="3 epochs",
        log_every="9 epochs",
        stop_at_accuracy=0.5,
        early_stopping=2,
        keep_best=True,
        tensorboard=False,
    )
    with (
        pytest.warns(UserWarning, match="early_stopping=2 has no effect: "),
        pytest.warns(UserWarning, match="stop_at_accuracy=0.5 has no effect: "),
        pytest.warns(UserWarning, match="keep_best=true has no effect: "),
    ):
        summary = train(config, model=small_network)
    assert summary["steps"] == 7
    assert load_error_analysis(str(tmp_path), 10) is None
    names = ("top1", "top5", "loss", "images_evaluated", "images_skipped_in_evaluation")
    assert [summary[name] for name in names] == [None] * 5
    (row,) = read_rows(str(tmp_path))
    assert (row["kind"], row["step"], row["examples"]) == ("train", 7, 7 * 32)
    assert summary["train_loss"] == row["loss"]
    assert files(tmp_path / "checkpoints") >= {"checkpoint", "ckpt-7.index"}
    assert "report.html" in files(tmp_path)
    assert pathlib.Path(tmp_path, "labels.txt").read_text().splitlines() == [*"0123456789"]


def test_a_run_does_not_resume_with_more_or_fewer_images(config, summary, tmp_path, monkeypatch):
    """Of which its epochs would be of other steps."""
    run = tmp_path / "run"
    shutil.copytree(config.model_dir, run)
    info = read_info(config)
    fewer = dataclasses.replace(info.splits["train"], examples=1400)
    other = dataclasses.replace(info, splits={**info.splits, "train": fewer})
    monkeypatch.setattr("imagenet_fast.training.run.read_info", lambda config: other)
    message = f"has 1400 training images, but the run in {run} started with 1438; use those"
    with pytest.raises(UserError, match=message):
        train(config.replace(model_dir=str(run)))
    assert_same_weights(weights_in(run), weights_in(config.model_dir))


def test_a_run_resumes_with_other_images_of_the_same_number(stopped, tmp_path, capsys):
    """It says so."""
    data, model_dir = tmp_path / "data", tmp_path / "run"
    shutil.copytree(stopped[0].model_dir, model_dir)
    shutil.copytree(stopped[0].data_dir, data)
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["splits"]["train"]["shards"][0]["sha256"] = "0" * 64
    (data / "manifest.json").write_text(json.dumps(manifest))
    run = stopped[0].replace(data_dir=str(data), model_dir=str(model_dir), stop_at_accuracy=0.99)
    run = run.replace(duration="11 steps", profile_steps=())
    assert train(run, model=small_network)["steps"] == 11
    assert f"{data} has changed since the last checkpoint" in capsys.readouterr().err
    # From here on, this is the run's data; and nothing is said where nothing is trained.
    train(run, model=small_network)
    assert "has changed" not in capsys.readouterr().err


def test_a_run_without_steps_is_refused(config):
    short = config.replace(duration="3 examples", model_dir=config.model_dir + "_short")
    with pytest.raises(UserError, match="duration 3 examples is less than one step of 32 images"):
        train(short)


def test_no_model_dir():
    with pytest.raises(UserError, match="no directory for the results: give --model_dir"):
        train(Config(synthetic=True, num_classes=10))


# --- Progressive resizing


class Sizes(keras.callbacks.Callback):
    """Notes the size of the images that the model is called with, whenever it is traced anew."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_begin(self, logs=None):
        gradients = self.model._micro_batch_gradients

        def noting(global_batch, logical, images, *others):
            self.seen.append(images.shape[1])
            return gradients(global_batch, logical, images, *others)

        self.model._forward_backward = noting


@pytest.fixture(
    params=[
        {"size_ramp": (8, 8), "size_ramp_at": "2 steps,4 steps"},
        pytest.param({"train_sizes": (8,), "train_until": "3 steps"}, marks=pytest.mark.long),
    ],
    ids=["size_ramp", "train_sizes"],
)
def growing(request, digits, tmp_path):
    """A run of five steps, the first three of them on images of 8 pixels."""
    options = {
        **OPTIONS,
        **request.param,
        "duration": "5 steps",
        "eval_every": "5 steps",
        "eval_image_size": 12,
        "examine": False,
        "tensorboard": False,
    }
    return Config(data_dir=digits, model_dir=str(tmp_path / "whole"), **options)


@pytest.mark.long
def test_progressive_resizing(growing):
    sizes = Sizes()
    train(growing, callbacks=[sizes], model=small_network)
    assert list(dict.fromkeys(sizes.seen)) == [8, 16]
    # The size changes between two evaluations, which adds none.
    rows = read_rows(growing.model_dir)
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [5]


@pytest.mark.long
def test_a_stopped_run_resumes_at_its_image_size(growing, tmp_path):
    train(growing)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 2:
                raise KeyboardInterrupt

    stopped = growing.replace(
        model_dir=str(tmp_path / "stopped"), checkpoint_every="1 steps", steps_per_call="1"
    )
    with pytest.raises(KeyboardInterrupt):
        train(stopped, callbacks=[Stop()])
    train(stopped)
    assert_same_weights(weights_in(stopped.model_dir), weights_in(growing.model_dir))


def test_progressive_resizing_needs_a_model_for_any_size(digits, tmp_path, capsys):
    config = Config(
        data_dir=digits,
        model_dir=str(tmp_path / "run"),
        model="alexnet_bn",
        image_size=64,
        train_sizes=(32,),
        train_until="90 epochs",
        batch_size=32,
    )
    with pytest.raises(UserError, match="have no fixed size, which its dense layers need"):
        train(config)
    expected = "the run ends before it trains on images of 64 pixels: train_until is 90 epochs, dur"
    assert expected in capsys.readouterr().err
    with pytest.raises(UserError):
        train(config.replace(train_until="89 epochs"))
    assert "the run ends before" not in capsys.readouterr().err


# --- Several workers


@pytest.fixture
def start_workers(digits, tmp_path):
    """Returns a function that starts two workers, which none but the test ends."""
    launcher = load_launcher()
    started = []

    def start(own=({}, {}, {}), count=2, **changes):
        environments = launcher.worker_environments(
            launcher.choose_ports(count, None), {**os.environ, "PYTHONPATH": str(ROOT)}
        )
        for index, environment in enumerate(environments):
            options = {**OPTIONS, "data_dir": digits, "model_dir": tmp_path / "run", **changes}
            flags = [f"--{name}={value}" for name, value in {**options, **own[index]}.items()]
            with (tmp_path / f"worker{index}.log").open("w") as log:
                command = [sys.executable, "-m", "imagenet_fast", "train", *flags]
                started.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)
                )
        return started[-count:]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def error_of(tmp_path, index):
    """The last line that a worker wrote; no traceback."""
    text = (tmp_path / f"worker{index}.log").read_text()
    assert "Traceback" not in text, text
    lines = [line for line in text.splitlines() if "error:" in line]
    assert len(lines) == 1, text
    return lines[0]


@pytest.mark.slow
@pytest.mark.long
def test_workers_with_other_options_all_stop(start_workers, tmp_path):
    workers = start_workers(own=({}, {"seed": 1, "weight_decay": 0.5}))
    assert [worker.wait(timeout=120) for worker in workers] == [2, 2]
    for index in range(2):
        assert error_of(tmp_path, index) == (
            "imagenet-fast train: error: workers were started with different options: "
            "seed is 0 at the chief, 1 at worker 1; "
            "weight_decay is 0.0001 at the chief, 0.5 at worker 1"
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_worker_ends_the_others_and_the_same_command_resumes(start_workers, tmp_path):
    options = {"log_every": "1 step", "eval_every": "200 steps", "checkpoint_every": "5 steps"}
    # Enough steps for the end of a worker to come before that of the run.
    job = {**options, "batch_size": 48, "duration": "60 steps", "tensorboard": False}
    job.update(synthetic=True, num_classes=10, data_dir="")
    workers = start_workers(count=3, **job)
    deadline = time.monotonic() + 120
    while len(read_rows(str(tmp_path / "run"))) < 8:
        assert [worker.poll() for worker in workers] == [None, None, None]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    workers[1].send_signal(signal.SIGKILL)
    assert [workers[index].wait(timeout=60) for index in (0, 2)] == [2, 2]
    for index in (0, 2):
        error = error_of(tmp_path, index)
        assert re.search(r"error: worker 1 \(127\.0\.0\.1:\d+\) has stopped or is", error)
        assert "start all workers again: the same command resumes from the last checkpoint" in error
    again = start_workers(count=3, **job)
    assert [worker.wait(timeout=120) for worker in again] == [0, 0, 0]
    assert read_rows(str(tmp_path / "run"))[-1]["step"] == 60
    assert ", from step " in (tmp_path / "worker0.log").read_text()


def test_a_second_job_leaves_the_configuration_of_the_first(tmp_path):
    """Options that may change at a resume are those of the run only once it resumes."""
    config = SMALL.replace(model_dir=str(tmp_path / "run"), duration="1 steps", warmup="0 steps")
    run = make_run(config)
    claim_model_dir(run.config, run.info.labels)
    file = tmp_path / "run" / "config.json"
    before = file.read_text()
    with alone_in(config.model_dir), pytest.raises(UserError, match="another process is training"):
        train(config.replace(precision="mixed_bfloat16"))
    assert file.read_text() == before
