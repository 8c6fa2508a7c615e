"""Logging to Weights & Biases and MLflow, with stand-ins for both packages."""

import sys
import types

import pytest

from imagenet_fast import Config, UserError
from imagenet_fast.training.logs.trackers import MLflowLogger, WandbLogger

ROWS = [
    {"kind": "train", "step": 10, "epoch": 0.5, "loss": 2.0},
    {"kind": "validation", "step": 20, "epoch": 1.0, "loss": 1.5, "top1": 0.25},
]
METRICS = [
    ({"train/epoch": 0.5, "train/loss": 2.0}, 10),
    ({"validation/epoch": 1.0, "validation/loss": 1.5, "validation/top1": 0.25}, 20),
]
MODEL = types.SimpleNamespace(config=Config(seed=3, flip=False, duration="2 epochs"))
# Numbers, so that Weights & Biases can sort and plot by them; MLflow stores text.
OPTIONS = {"flip": False, "seed": 3, "duration": "2 epochs"}
TEXTS = {"flip": "false", "seed": "3", "duration": "2 epochs"}


class Wandb(types.SimpleNamespace):
    """The part of the package that the logger uses."""

    def __init__(self):
        super().__init__(calls=[], run=None)

    def init(self, **options):
        self.calls.append(options)
        return types.SimpleNamespace(
            log=lambda metrics, step: self.calls.append((metrics, step)),
            config=types.SimpleNamespace(update=lambda options, **_: self.calls.append(options)),
            finish=lambda exit_code: self.calls.append(f"finish {exit_code}"),
        )


class MLflow(types.SimpleNamespace):
    """The same of MLflow: a run's parameters cannot change."""

    def __init__(self):
        super().__init__(calls=[], params={}, active=None)

    def start_run(self, **options):
        assert self.active is None
        self.calls.append(options)
        self.active = types.SimpleNamespace(info=types.SimpleNamespace(run_id="1"))
        return self.active

    def active_run(self):
        return self.active

    def get_run(self, run_id):
        return types.SimpleNamespace(data=types.SimpleNamespace(params=dict(self.params)))

    def log_params(self, params):
        assert not set(self.params) & set(params)
        self.params.update(params)

    def set_tags(self, tags):
        self.calls.append(tags)

    def log_metrics(self, metrics, step):
        self.calls.append((metrics, step))

    def end_run(self, status):
        self.calls.append(status)
        self.active = None


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    return sys.modules["wandb"]


@pytest.fixture
def mlflow(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", MLflow())
    return sys.modules["mlflow"]


def log(logger):
    logger.set_model(MODEL)
    for row in ROWS:
        logger.write(row)
    logger.close()


def test_weights_and_biases(wandb):
    log(WandbLogger(project="digits"))
    assert wandb.calls == [{"config": OPTIONS, "project": "digits"}, *METRICS, "finish 0"]


def test_mlflow(mlflow):
    log(MLflowLogger(run_name="first"))
    assert mlflow.calls == [{"run_name": "first"}, *METRICS, "FINISHED"]
    assert mlflow.params == TEXTS


def test_a_longer_run_in_the_same_run_of_mlflow(mlflow):
    mlflow.params = {**TEXTS, "duration": "1 epoch"}
    log(MLflowLogger(run_id="1"))
    assert mlflow.calls == [{"run_id": "1"}, {"duration": "2 epochs"}, *METRICS, "FINISHED"]


def test_active_runs_get_all_and_stay_active(wandb, mlflow):
    wandb.run, mlflow.active = wandb.init(), mlflow.start_run()
    for logger, expected in ((WandbLogger(), [{}, OPTIONS]), (MLflowLogger(), [{}])):
        log(logger)
        assert (wandb if expected[1:] else mlflow).calls == [*expected, *METRICS]
    assert mlflow.active and mlflow.params == TEXTS


def test_runs_that_fail(wandb, mlflow):
    for logger in (WandbLogger(), MLflowLogger()):
        logger.on_train_begin()  # and no end
        log(logger)
    assert (wandb.calls[-1], mlflow.calls[-1]) == ("finish 1", "FAILED")


def test_nothing_is_started_where_no_row_is_written(monkeypatch):
    """Only the chief writes rows."""
    for name, logger in (("wandb", WandbLogger), ("mlflow", MLflowLogger)):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace())
        logger().close()


@pytest.mark.parametrize(
    ("name", "logger", "package"),
    [("wandb", WandbLogger, "wandb"), ("mlflow", MLflowLogger, "mlflow-skinny")],
)
def test_missing_packages(monkeypatch, name, logger, package):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=f"pip install {package}"):
        logger()
