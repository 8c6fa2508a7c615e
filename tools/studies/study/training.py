"""Trains one setting with one seed."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import tf_keras as keras

from imagenet_fast.base import environment
from imagenet_fast.data.pipeline import make_dataset
from imagenet_fast.training.build import build_model
from imagenet_fast.training.callback import TensorsCallback
from imagenet_fast.training.classifier import Classifier
from imagenet_fast.training.schedule import total_steps
from study.settings import PLAIN, Setting

Result = dict[str, Any]
# Callbacks of a run, and a function that returns their additions to its result.
Prepared = tuple[list[keras.callbacks.Callback], Callable[[], Result]]


def _plain(model: Classifier) -> Prepared:
    """Adds nothing."""
    return [], dict


def run(
    setting: Setting,
    seed: int,
    data_dir: str,
    kinds: Mapping[str, Callable[[Classifier], Prepared]] | None = None,
) -> Result:
    """Trains and evaluates.

    Args:
      setting: to train.
      seed: of the weights and the order of the data.
      data_dir: of the shards.
      kinds: functions that prepare a model for training, by kinds of settings other than plain.

    Returns:
      ``error`` (validation error, a fraction; None if the run diverged), ``loss`` (validation),
      ``losses`` (training loss of each epoch), ``seconds``, ``versions``, and additions of its
      kind.

    Raises:
      UserError: if the data cannot be used.
    """
    # Frees models of earlier runs, which contain reference cycles.
    keras.backend.clear_session()
    gc.collect()
    begin = time.monotonic()
    config = setting.config.replace(seed=seed, data_dir=data_dir)
    model = build_model(config)
    losses = _Losses()
    callbacks, additions = {PLAIN: _plain, **(kinds or {})}[setting.kind](model)
    steps = total_steps(config, model.steps_per_epoch)
    model.fit(
        make_dataset(config, "train"),
        # The run has whole epochs, or is shorter than one.
        epochs=max(1, steps // model.steps_per_epoch),
        steps_per_epoch=min(steps, model.steps_per_epoch),
        callbacks=[losses, *callbacks],
        verbose=0,
    )
    result = {"error": None, "loss": None, "losses": losses.by_epoch}
    if not losses.diverged:
        metrics = model.evaluate(make_dataset(config, "validation"), verbose=0, return_dict=True)
        result.update(error=round(1 - float(metrics["top1"]), 6), loss=float(metrics["loss"]))
    seconds = round(time.monotonic() - begin, 1)
    return {**result, **additions(), "seconds": seconds, "versions": environment.versions()}


class _Losses(TensorsCallback):
    """Records the loss of each epoch, and stops the run if it is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.by_epoch: list[float] = []
        self.diverged = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Checks the loss."""
        if not math.isfinite(float(logs["loss"])):
            self.diverged = self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Records the loss."""
        loss = float(logs["loss"])
        self.by_epoch.append(round(loss, 5) if math.isfinite(loss) else None)
