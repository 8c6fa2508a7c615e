"""The common parts of studies, and the large-batch study."""

import importlib
import json
import pathlib
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import Config, UserError
from imagenet_fast.optimizers import LARS, SGD, GradualWarmup, StepDecay

ROOT = pathlib.Path(__file__).parents[3]
STUDIES = ROOT / "tools" / "studies"
sys.path.insert(0, str(STUDIES))
experiments = importlib.import_module("large_batch.experiments")
half_precision = importlib.import_module("large_batch.half_precision")
log = importlib.import_module("study.log")
page = importlib.import_module("study.page")
report = importlib.import_module("large_batch.report")
runner = importlib.import_module("study.runner")
settings = importlib.import_module("study.settings")
shared_training = importlib.import_module("study.training")
tables = importlib.import_module("study.tables")
training = importlib.import_module("large_batch.training")

BASE = Config(model="resnet8", image_size=16, train_crop="none", batch_size=32)


def setting(method="a", kind=settings.PLAIN, **changes):
    return settings.Setting(method, BASE.replace(**changes), kind)


# --- Settings and the log


def test_fingerprint_is_of_the_training():
    one = setting()
    assert one.fingerprint == setting("another name", data_dir="x", model_dir="y").fingerprint
    others = [setting(momentum=0.8), setting(batch_size=64), setting(kind="half_precision_lars")]
    assert len({other.fingerprint for other in [one, *others]}) == 4


def test_log_continues_after_an_incomplete_line(tmp_path):
    path = tmp_path / "runs.jsonl"
    log.append(path, setting(), 0, {"error": 0.5})
    with path.open("a") as file:
        file.write('{"fingerprint": "abc", "se')
    assert list(log.read(path)) == [(setting().fingerprint, 0)]
    log.append(path, setting(), 1, {"error": 0.25})
    log.append(path, setting(), 0, {"error": 0.125})
    found = {seed: record["error"] for (_, seed), record in log.read(path).items()}
    assert found == {0: 0.125, 1: 0.25}
    assert log.read(tmp_path / "missing") == {}


def test_log_of_something_else(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"loss": 1}\n')
    with pytest.raises(UserError, match=r"runs.jsonl, line 1"):
        log.read(path)


def test_missing_runs(tmp_path):
    """The same training in two experiments is one run; runs in the log are not repeated."""
    first = settings.Experiment("one", (setting(), setting(momentum=0.8)))
    second = settings.Experiment("two", (setting("b"), setting(momentum=0.7)))
    path = tmp_path / "runs.jsonl"
    log.append(path, setting(), 1, {"error": 0.5})
    runs = runner.missing([first, second], 2, path)
    assert [(run.config.momentum, seed) for run, seed in runs] == [
        (0.9, 0),
        (0.8, 0),
        (0.7, 0),
        (0.8, 1),
        (0.7, 1),
    ]


def test_runs_share_processes(tmp_path, monkeypatch):
    parts = []

    def in_a_process(threads, module, runs, data_dir):
        parts.append((module, data_dir, [seed for _, seed in runs]))
        for run in runs:
            yield run, {"error": 0.25, "seconds": 1.0}

    monkeypatch.setattr(runner, "_in_a_process", in_a_process)
    path = tmp_path / "folder" / "runs.jsonl"
    runs = [(setting(), seed) for seed in range(5)]
    runner.train(runs, "m", "data", path, jobs=1, runs_in_a_process=2)
    assert parts == [("m", "data", seeds) for seeds in ([0, 1], [2, 3], [4])]
    assert [seed for _, seed in log.read(path)] == [0, 1, 2, 3, 4]


# --- Tables and pages


def test_table():
    experiment = settings.Experiment(
        "e",
        (
            setting("a", batch_size=32),
            setting("a", batch_size=64),
            setting("b", batch_size=64),
            setting("c", batch_size=64, momentum=0.5),
            setting("d", batch_size=32, momentum=0.25),
        ),
    )
    alone = log.key(setting(batch_size=32, momentum=0.25), 0)
    records = {alone: {"fingerprint": alone[0], "seed": 0, "error": 0.3}}
    for batch, seed, error in ((32, 0, 0.1), (32, 1, 0.12), (64, 0, None), (64, 1, 0.5)):
        key = log.key(setting(batch_size=batch), seed)
        records[key] = {"fingerprint": key[0], "seed": seed, "error": error}
    table = tables.error_table(
        experiment, records, lambda s: (s.batch, 640 // s.batch), ["batch", "updates"]
    )
    assert table.splitlines() == [
        "| batch | updates | a | b | c | d |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 32 | 20 | 11.00 ± 1.41 (2 runs) |  |  | 30.00 (1 run) |",
        "| 64 | 10 | 1 of 2 diverged | 1 of 2 diverged |  |  |",
    ]


def test_fill():
    text = "# Title\n<!-- a -->\nold\n<!-- end of a -->\nprose\n"
    filled = page.fill(text, {"a": r"\1 new"})
    assert filled == "# Title\n<!-- a -->\n\\1 new\n<!-- end of a -->\nprose\n"
    assert page.fill(filled, {"a": r"\1 new"}) == filled
    with pytest.raises(UserError, match="<!-- b -->"):
        page.fill(text, {"b": ""})


def test_page_matches_the_log():
    records = log.read(ROOT / "benchmarks" / "large_batch" / "runs.jsonl")
    text = (ROOT / "docs" / report.PAGE).read_text()
    assert report.filled_page(text, records) == text


# --- Training


def run(digits, method="a", kind=settings.PLAIN, **changes):
    fixed = {"rate_scaling": "none", "warmup": "0 epochs"}
    options = {"duration": "4 epochs", "learning_rate": 0.05, **fixed, **changes}
    return training.run(setting(method, kind, **options), 1, digits)


@pytest.mark.long
def test_run(digits):
    result = run(digits)
    assert 0 < result["error"] < 0.5
    assert len(result["losses"]) == 4
    assert result["losses"][-1] < result["losses"][0]
    assert json.loads(json.dumps(result)) == result


def test_fit_changes_image_sizes(monkeypatch):
    """One call of fit for each size; a run need not have whole epochs."""
    calls = []

    class Model:
        config = BASE.replace(
            duration="25 steps", train_sizes=(8, 12), train_until=("4 steps", "10 steps")
        )
        steps_per_epoch, stop_training = 10, False

        def make_train_function(self, force):
            calls.append("trace")

        def fit(self, dataset, *, initial_epoch, epochs, steps_per_epoch, **_):
            calls.append((dataset, (epochs - initial_epoch) * steps_per_epoch))

    monkeypatch.setattr(shared_training, "make_dataset", lambda config, split, step: step)
    shared_training.fit(Model(), [])
    assert calls == ["trace", (0, 4), "trace", (4, 6), "trace", (10, 10), "trace", (20, 5)]
    calls.clear()
    Model.config = BASE.replace(duration="20 steps")
    shared_training.fit(Model(), [])
    assert calls == [(0, 20)]


@pytest.mark.long
def test_run_that_diverges(digits):
    result = run(digits, learning_rate=1e30, duration="5 steps")
    assert result["error"] is result["loss"] is None


@pytest.mark.long
def test_features_are_seen_from_step_to_step(digits):
    options = {
        "model": "alexnet_bn",
        "image_size": 64,
        "zero_gamma": True,
        "duration": "4 steps",
        "batch_norm_after_pool5": False,
    }
    seen = run(digits, kind=experiments.POOL5, **options)["features"]
    assert [row["step"] for row in seen] == [0, 1, 2, 3, 4]
    # What leaves a ReLU.
    assert all(0 <= row["p1"] <= row["p50"] <= row["p99"] for row in seen)
    assert seen[0]["std"] != seen[-1]["std"]


def test_float16_loses_updates():
    """Those below half the distance of two float16 numbers, which is 2**-11 from 1 on."""
    start = np.ones((4, 2), "float32")
    gradient = np.zeros((4, 2), "float32")
    gradient[0] = 1.0
    gradient[1] = 1e-4

    def after(cls):
        variable = tf.Variable(start)
        optimizer = cls(1.0, momentum=0.0, weight_decay=0.0, eeta=0.05)
        optimizer.build([variable])
        optimizer.trust_mask = [True]
        optimizer.apply_gradients([(tf.constant(gradient), variable)])
        return variable.numpy(), optimizer

    single, _ = after(LARS)
    half, optimizer = after(half_precision.HalfPrecisionLARS)
    # |w| / |g| is 2: steps of 0.1 and 1e-5.
    np.testing.assert_allclose(single[:, 0], [0.9, 1 - 1e-5, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(half[:, 0], [0.9, 1, 1, 1], rtol=1e-3)
    assert half[1, 0] == 1 != single[1, 0]
    assert optimizer.lost_fraction() == 2 / 8


def test_norms_vanish_in_float16():
    """The square of a small gradient is 0, and the ratio falls back to 1."""
    variable = tf.Variable(np.ones(4, "float32"))
    gradient = tf.constant(np.full(4, 1e-4, "float32"))
    ratios = []
    for cls in (LARS, half_precision.HalfPrecisionLARS):
        optimizer = cls(1.0, weight_decay=0.0, trust_mask=[True])
        optimizer.build([variable])
        ratios += [float(optimizer.trust_ratios([gradient], [variable])[0])]
    assert ratios == [pytest.approx(10.0, rel=1e-5), 1.0]


# --- The command

# As python tools/studies.
RUN_FOLDER = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
PROGRAM = ("-c", RUN_FOLDER, STUDIES)


# The same for each of the lists of arguments, in JSON.
RUN_FOLDER_OFTEN = """
import json, runpy, sys
for arguments in json.loads(sys.argv.pop()):
    sys.argv = [sys.argv[1], *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        print(error.code)
    sys.argv = ["-c", sys.argv[0]]
    print(file=sys.stderr)
"""


def test_mistakes(tmp_path, run_python):
    mistakes = {
        "seeds, jobs and runs_in_a_process must be positive": ["--seeds=0"],
        "give --data_dir": [],
        "contains no run: train some first": ["--report"],
        "no experiment 'scale'; did you mean 'scaling'?": ["--data_dir=x", "--only=scale"],
    }
    given = [["large_batch", f"--log={tmp_path / 'x'}", *own] for own in mistakes.values()]
    finished = run_python(["-c", RUN_FOLDER_OFTEN, STUDIES, json.dumps(given)])
    assert finished.stdout.split() == ["2"] * len(mistakes)
    told = finished.stderr.strip().split("\n\n")
    assert len(told) == len(mistakes)
    for message, errors in zip(mistakes, told):
        assert message in errors


@pytest.mark.long
def test_another_log_leaves_the_page_of_the_docs_alone(tmp_path, run_python):
    kept = ROOT / "docs" / report.PAGE
    text = kept.read_text()
    lines = (ROOT / "benchmarks" / "large_batch" / "runs.jsonl").read_text().splitlines()
    other = tmp_path / "runs.jsonl"
    other.write_text("\n".join(lines[:-1]) + "\n")
    run_python([*PROGRAM, "large_batch", "--report", f"--log={other}"])
    assert kept.read_text() == text
    written = (tmp_path / report.PAGE).read_text()
    assert written == report.filled_page(text, log.read(other)) != text


def test_constant_warmup_of_the_large_batch_study():
    """The schedule of the run, with its first learning rate until the warmup ends."""
    schedule = GradualWarmup(StepDecay(0.8, [6], 0.5), start=0.1, steps=3)
    model = types.SimpleNamespace(optimizer=SGD(learning_rate=schedule, momentum=0.8))
    model.compile = lambda optimizer: setattr(model, "optimizer", optimizer)
    training._constant_warmup(model)
    options = model.optimizer.get_config()
    constant = keras.optimizers.schedules.deserialize(options["learning_rate"])
    rates = [float(constant(step)) for step in range(8)]
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.8, 0.8, 0.8, 0.4, 0.4])
    assert options["momentum"] == 0.8
