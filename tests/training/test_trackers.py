"""Logging to Weights & Biases and MLflow, with stand-ins for both packages."""

import sys
import types

import pytest

from imagenet_fast import Config, UserError
from imagenet_fast.training.trackers import MLflowLogger, WandbLogger

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


def log(logger):
    logger.set_model(MODEL)
    for row in ROWS:
        logger.write(row)
    logger.close()


def test_weights_and_biases(monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda metrics, step: calls.append((metrics, step)),
        finish=lambda: calls.append("finish"),
    )
    wandb = types.SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log(WandbLogger(project="digits"))
    assert calls == [{"config": OPTIONS, "project": "digits"}, *METRICS, "finish"]


def test_mlflow(monkeypatch):
    calls = []
    mlflow = types.SimpleNamespace(
        start_run=lambda **options: calls.append(options),
        log_params=calls.append,
        log_metrics=lambda metrics, step: calls.append((metrics, step)),
        end_run=lambda: calls.append("end"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    log(MLflowLogger(run_name="first"))
    assert calls == [{"run_name": "first"}, TEXTS, *METRICS, "end"]


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
