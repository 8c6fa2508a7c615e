"""Callbacks of ``train`` that log a run to Weights & Biases or MLflow.

Both packages' own Keras callbacks are for Keras 3, not for tf_keras.
"""

from __future__ import annotations

import importlib
from typing import Any

import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import option_text
from imagenet_fast.training.metrics_file import Row


class RowLogger(keras.callbacks.Callback):
    """A callback to which ``train`` also gives the rows of ``metrics.jsonl``, in the chief only."""

    def write(self, row: Row) -> None:
        """Logs a row; ``kind`` is ``train`` or ``validation``."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends logging; called at the end of the run."""


class WandbLogger(RowLogger):
    """Logs a run's options and metrics to Weights & Biases.

    Metrics are named ``train/loss``, ``validation/top1`` and so on; steps are weight updates.

    Args:
      **options: of ``wandb.init``, such as ``project``, or ``id`` and ``resume="allow"`` to log a
        resumed run where it ended.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._wandb = _module("wandb", "wandb")
        self._options = options
        self._run: Any = None

    def write(self, row: Row) -> None:
        """Logs a row; the first one starts the run of Weights & Biases."""
        if self._run is None:
            self._run = self._wandb.init(**{"config": _options_of(self.model), **self._options})
        self._run.log(_metrics(row), step=row["step"])

    def close(self) -> None:
        """Ends the run of Weights & Biases."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class MLflowLogger(RowLogger):
    """Logs a run's options and metrics to MLflow.

    Metrics are named ``train/loss``, ``validation/top1`` and so on; steps are weight updates.

    Args:
      **options: of ``mlflow.start_run``, such as ``run_name``, or ``run_id`` to log a resumed run
        where it ended. ``mlflow.set_tracking_uri`` and ``mlflow.set_experiment`` choose the place.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._mlflow = _module("mlflow", "mlflow-skinny")
        self._options = options
        self._started = False

    def write(self, row: Row) -> None:
        """Logs a row; the first one starts the run of MLflow."""
        if not self._started:
            self._mlflow.start_run(**self._options)
            options = _options_of(self.model)
            self._mlflow.log_params({name: option_text(value) for name, value in options.items()})
            self._started = True
        self._mlflow.log_metrics(_metrics(row), step=row["step"])

    def close(self) -> None:
        """Ends the run of MLflow."""
        if self._started:
            self._mlflow.end_run()
            self._started = False


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: `pip install {package}`") from None


def _options_of(model: Any) -> dict[str, Any]:
    """Returns the options of the run that differ from the defaults: numbers, or text."""
    config = model.config
    values = {name: getattr(config, name) for name in config.differences(type(config)())}
    return {
        name: value if isinstance(value, (int, float)) else option_text(value)
        for name, value in values.items()
    }


def _metrics(row: Row) -> dict[str, float]:
    """Returns a row's numbers except its step, named by its kind."""
    return {
        f"{row['kind']}/{name}": value
        for name, value in row.items()
        if name not in ("kind", "step") and isinstance(value, (int, float))
    }
