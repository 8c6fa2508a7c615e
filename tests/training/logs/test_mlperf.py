"""The log for MLPerf, also of runs that stop and go on; and what MLPerf's own checker says."""

import itertools
import json
import pathlib
import types

import pytest

from imagenet_fast import Config
from imagenet_fast.training.logs import mlperf as mlperf_log
from imagenet_fast.training.logs.mlperf import MLPerfLog, read_lines

CONFIG = Config(batch_size=32, learning_rate_batch=32, warmup="0 epochs", duration="2 epochs")
STEPS_PER_EPOCH = 4


class Run:
    """Drives the log as training does: an evaluation at each fourth step, or as told."""

    def __init__(self, model_dir, step=0, last=8, config=CONFIG, evaluate_at=(4, 8), first_ms=0):
        self.step = step
        times = itertools.count(first_ms / 1000, 0.001)
        self.log = MLPerfLog(
            types.SimpleNamespace(
                config=config.replace(model_dir=str(model_dir)),
                steps_per_epoch=STEPS_PER_EPOCH,
                examples={"train": 130, "validation": 50}.get,
            ),
            step=step,
            batch_norm_examples=16,
            last_step=last,
            now=lambda: next(times),
        )
        self.log.before_images()
        self.evaluate_at = evaluate_at

    def train(self, until):
        while self.step < until:
            self.log.before_steps(self.step)
            self.step += 1
            self.log.after_steps(self.step)
            self.log.write({"kind": "train", "top1": 0.0})
            if self.step in self.evaluate_at:
                self.log.before_evaluation(self.step)
                self.log.write({"kind": "validation", "top1": self.step / 10})
        return self.log


def events(model_dir):
    """(key, epoch, or value or status) of the lines after the beginning."""
    lines = read_lines(str(model_dir))
    keys = [line["key"] for line in lines]
    return [
        (line["key"], line["metadata"].get("epoch_num", line["metadata"].get("status")))
        for line in lines[keys.index("run_start") :]
    ]


WHOLE = [
    ("run_start", None),
    ("epoch_start", 1),
    ("epoch_stop", 1),
    ("eval_start", 1),
    ("eval_accuracy", 1),
    ("eval_stop", 1),
    ("epoch_start", 2),
    ("epoch_stop", 2),
    ("eval_start", 2),
    ("eval_accuracy", 2),
    ("eval_stop", 2),
    ("run_stop", "success"),
]


def finished(run, success=True):
    run.log.finish(success)
    run.log.close()


def test_format_of_the_lines(tmp_path):
    run = Run(tmp_path, first_ms=1_700_000_000_000)
    run.train(8)
    finished(run)
    text = (tmp_path / "mlperf.log").read_text()
    assert text.endswith("}\n")
    for line in text.splitlines():
        assert line.startswith(":::MLLOG {")
        assert list(json.loads(line[len(":::MLLOG ") :])) == [
            "namespace",
            "time_ms",
            "event_type",
            "key",
            "value",
            "metadata",
        ]
    lines = read_lines(str(tmp_path))
    times = [line["time_ms"] for line in lines]
    assert times == sorted(times)
    assert times[0] == 1_700_000_000_000
    types_of = {line["key"]: line["event_type"] for line in lines}
    assert types_of["epoch_start"] == types_of["init_start"] == "INTERVAL_START"
    assert types_of["epoch_stop"] == types_of["run_stop"] == "INTERVAL_END"
    assert types_of["eval_accuracy"] == types_of["seed"] == "POINT_IN_TIME"


def test_a_whole_run(tmp_path):
    run = Run(tmp_path)
    run.train(8)
    finished(run)
    assert events(tmp_path) == WHOLE
    found = {line["key"]: line["value"] for line in read_lines(str(tmp_path))}
    assert found["eval_accuracy"] == 0.8
    expected = {
        "seed": 0,
        "train_samples": 130,
        "eval_samples": 50,
        "model_bn_span": 16,
        "global_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "opt_name": "sgd",
        "sgd_opt_base_learning_rate": 0.1,
        "sgd_opt_momentum": 0.9,
        "sgd_opt_weight_decay": 1e-4,
        "opt_learning_rate_warmup_epochs": 0,
        "opt_learning_rate_decay_boundary_steps": [120, 240, 320],
        "opt_learning_rate_decay_factor": 0.1,
    }
    assert {name: found[name] for name in expected} == expected


# As MLPerf's rules for ResNet-50 want it.
POLYNOMIAL = CONFIG.replace(
    schedule="polynomial",
    end_learning_rate=1e-4,
    warmup="1 epochs",
    warmup_start=0.0,
    duration="3 epochs",
    weight_decay=2e-4,
)
LARS = POLYNOMIAL.replace(optimizer="lars", learning_rate=9.0, rate_scaling="none")


def test_hyperparameters_of_lars(tmp_path):
    finished(Run(tmp_path, config=LARS, last=12))
    found = {line["key"]: line["value"] for line in read_lines(str(tmp_path))}
    expected = {
        "opt_name": "lars",
        "lars_opt_base_learning_rate": 9.0,
        "lars_opt_end_learning_rate": 1e-4,
        "lars_opt_learning_rate_decay_poly_power": 2.0,
        "lars_opt_learning_rate_decay_steps": 9,
        "lars_epsilon": 0.0,
        "lars_opt_learning_rate_warmup_epochs": 1.0,
        "lars_opt_momentum": 0.9,
        "lars_opt_weight_decay": 2e-4,
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("saved", "killed"),
    [(saved, killed) for saved in (2, 4, 6, 8) for killed in (2, 4, 5, 7, 8) if saved <= killed],
)
def test_a_killed_run_that_resumes(tmp_path, saved, killed):
    Run(tmp_path).train(killed)
    with (tmp_path / "mlperf.log").open("a") as file:
        file.write(':::MLLOG {"namesp')  # The kill came while a line was written.
    again = Run(tmp_path, step=saved, first_ms=1000)
    again.train(8)
    finished(again)
    assert events(tmp_path) == WHOLE
    keys = [line["key"] for line in read_lines(str(tmp_path))]
    assert [keys.count(key) for key in ("init_start", "init_stop", "seed")] == [1, 1, 1]
    times = [line["time_ms"] for line in read_lines(str(tmp_path))]
    assert times == sorted(times)


def test_a_new_run_has_a_new_log(tmp_path):
    Run(tmp_path).train(3)
    Run(tmp_path, first_ms=5000).train(1)
    assert events(tmp_path) == WHOLE[:2]
    assert read_lines(str(tmp_path))[0]["time_ms"] == 5000


def test_a_finished_run_keeps_its_log(tmp_path):
    run = Run(tmp_path)
    run.train(8)
    finished(run)
    before = (tmp_path / "mlperf.log").read_bytes()
    finished(Run(tmp_path, step=8, first_ms=9000))
    assert (tmp_path / "mlperf.log").read_bytes() == before


def test_a_run_killed_before_its_last_line_gets_it(tmp_path):
    Run(tmp_path).train(8)
    finished(Run(tmp_path, step=8, first_ms=9000))
    assert events(tmp_path) == WHOLE


def test_a_stopped_run_that_resumes(tmp_path):
    run = Run(tmp_path, evaluate_at=(3, 8))
    run.train(3)
    finished(run, success=False)
    expected = [
        ("run_start", None),
        ("epoch_start", 1),
        ("eval_start", 0.75),
        ("eval_accuracy", 0.75),
        ("eval_stop", 0.75),
        ("epoch_stop", 1),
        ("run_stop", "aborted"),
    ]
    assert events(tmp_path) == expected
    again = Run(tmp_path, step=3, evaluate_at=(8,), first_ms=1000)
    again.train(8)
    finished(again)
    found = events(tmp_path)
    assert found[-1] == ("run_stop", "success")
    assert [event for event in found if event[0] == "run_stop"] == [("run_stop", "success")]


def test_an_older_run_gets_a_log_from_where_it_resumes(tmp_path):
    finished_run = Run(tmp_path, step=5)
    finished_run.train(8)
    finished(finished_run)
    assert events(tmp_path) == [("run_start", None), *WHOLE[6:]]


SUBMITTERS = {
    "cache_clear": True,
    "submission_benchmark": "resnet",
    "submission_org": "us",
    "submission_platform": "a laptop",
    "submission_status": "research",
}


def test_lines_that_users_add_stay(tmp_path):
    Run(tmp_path).train(5)
    with (tmp_path / "mlperf.log").open("a") as file:
        file.write(submission_lines())
    Run(tmp_path, step=4, first_ms=1000).train(5)
    keys = [line["key"] for line in read_lines(str(tmp_path))]
    assert set(SUBMITTERS) < set(keys)


def submission_lines(division="open"):
    event = {"namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME"}
    return "".join(
        mlperf_log._text({**event, "key": key, "value": value, "metadata": {}}) + "\n"
        for key, value in {**SUBMITTERS, "submission_division": division}.items()
    )


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    ("config", "division"), [(CONFIG, "open"), (POLYNOMIAL, "closed"), (LARS, "closed")]
)
def test_mlperfs_checker_accepts_the_log(tmp_path, config, division, complete):
    checker = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    run = Run(tmp_path, config=config)
    run.train(8)
    if complete:
        run.log.finish(success=True)
    run.log.close()
    path = tmp_path / "mlperf.log"
    path.write_text(submission_lines(division) + path.read_text())
    made = checker.make_checker("training", "4.0.0", quiet=False, werror=True)
    valid, *_ = checker.main(str(path), "training_4.0.0/common.yaml", made)
    assert valid == complete


def test_no_log_without_the_option(tmp_path):
    assert read_lines(str(tmp_path)) == []
    assert list(pathlib.Path(tmp_path).iterdir()) == []
