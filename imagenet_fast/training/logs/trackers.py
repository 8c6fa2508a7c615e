"""Callbacks of ``train`` that log a run to Weights & Biases or MLflow.

Both packages' own Keras callbacks run in ``train``, too, but in every worker, without the run's
options, and not by weight updates: that of Weights & Biases skips calls of several steps, that of
MLflow gives all validation metrics step 0.
"""

from __future__ import annotations

import importlib
from typing import Any

import keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import option_text
from imagenet_fast.training.logs.logger import Logger, Row


class RowLogger(keras.callbacks.Callback, Logger):
    """A callback to which ``train`` also gives the rows of ``metrics.jsonl``, in the chief only.

    Attributes:
      interrupted: whether training has begun and not ended, as in :meth:`close` after an error.
    """

    interrupted = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Notes that training begins."""
        self.interrupted = True

    def on_train_end(self, logs: Any = None) -> None:
        """Notes that training has ended without an error."""
        self.interrupted = False

    def write(self, row: Row) -> None:
        """Logs a row; ``kind`` is ``train`` or ``validation``."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends logging, also after an error."""


class WandbLogger(RowLogger):
    """Logs a run's options and metrics to Weights & Biases.

    Metrics are named ``train/loss``, ``validation/top1`` and so on; steps are weight updates.
    Without arguments, the active run of Weights & Biases gets all, if there is one, and stays
    active.

    Args:
      **options: of ``wandb.init``, such as ``project``, or ``id`` and ``resume="allow"`` to log a
        resumed run where it ended.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._wandb = _module("wandb", "wandb")
        self._options = options
        self._run: Any = None
        self._is_own = True

    def write(self, row: Row) -> None:
        """Logs a row; the first one starts the run of Weights & Biases."""
        if self._run is None:
            self._start()
        self._run.log(_metrics(row), step=row["step"])

    def _start(self) -> None:
        options, active = _options_of(self.model), self._wandb.run
        # Depending on its options and on the program, ``init`` may return the active run, too.
        use_active = active is not None and not self._options
        new = {"config": options, **self._options}
        self._run = active if use_active else self._wandb.init(**new)
        self._is_own = self._run is not active
        if not self._is_own:
            self._run.config.update(options, allow_val_change=True)

    def close(self) -> None:
        """Ends the run of Weights & Biases, as failed after an error."""
        if self._run is not None and self._is_own:
            self._run.finish(exit_code=int(self.interrupted))
        self._run = None


class MLflowLogger(RowLogger):
    """Logs a run's options and metrics to MLflow.

    Metrics are named ``train/loss``, ``validation/top1`` and so on; steps are weight updates.
    MLflow keeps the first value of a parameter: an option that has another value in a resumed run,
    such as a longer duration, becomes a tag. Without arguments, the active run of MLflow gets all,
    if there is one, and stays active.

    Args:
      **options: of ``mlflow.start_run``, such as ``run_name``, or ``run_id`` to log a resumed run
        where it ended. ``mlflow.set_tracking_uri`` and ``mlflow.set_experiment`` choose the place.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._mlflow = _module("mlflow", "mlflow-skinny")
        self._options = options
        self._started = False
        self._is_own = True

    def write(self, row: Row) -> None:
        """Logs a row; the first one starts the run of MLflow."""
        if not self._started:
            self._start()
            self._started = True
        self._mlflow.log_metrics(_metrics(row), step=row["step"])

    def _start(self) -> None:
        active = None if self._options else self._mlflow.active_run()
        self._is_own = active is None
        run = active or self._mlflow.start_run(**self._options)
        before = self._mlflow.get_run(run.info.run_id).data.params
        texts = {name: option_text(value) for name, value in _options_of(self.model).items()}
        self._mlflow.log_params({name: texts[name] for name in texts if name not in before})
        changed = {name: text for name, text in texts.items() if before.get(name, text) != text}
        if changed:
            self._mlflow.set_tags(changed)

    def close(self) -> None:
        """Ends the run of MLflow, as failed after an error."""
        if self._started and self._is_own:
            self._mlflow.end_run("FAILED" if self.interrupted else "FINISHED")
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
