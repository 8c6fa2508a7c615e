"""Trains one setting with one seed."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras

from imagenet_fast.base import environment
from imagenet_fast.data.dataset import make_dataset
from imagenet_fast.training.build.model import build_model
from imagenet_fast.training.schedule_steps import total_steps
from imagenet_fast.training.step.classifier import Classifier
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
    fit(model, [losses, *callbacks])
    result = {"error": None, "loss": None, "losses": losses.by_epoch}
    if not losses.diverged:
        metrics = model.evaluate(make_dataset(config, "validation"), verbose=0, return_dict=True)
        result.update(error=round(1 - float(metrics["top1"]), 6), loss=float(metrics["loss"]))
    seconds = round(time.monotonic() - begin, 1)
    return {**result, **additions(), "seconds": seconds, "versions": environment.versions()}


def fit(model: Classifier, callbacks: list[keras.callbacks.Callback]) -> None:
    """Trains for the configured duration, in images of all its sizes.

    Args:
      model: with its configuration.
      callbacks: their epochs also end with an image size, and with the run.
    """
    config, epoch = model.config, model.steps_per_epoch
    changes = [until.steps(epoch, config.batch_size) for _, until in config.sizes_until]
    total = total_steps(config, epoch)
    step = 0
    while step < total and not (step and model.stop_training):
        end = min(at for at in (*changes, total) if at > step)
        if changes:
            # Otherwise TensorFlow would trace one program for images of any size.
            model.make_train_function(force=True)
        # Whole epochs, or what is left of one.
        whole = step % epoch == 0 and end - step >= epoch
        steps = epoch if whole else min(end - step, epoch - step % epoch)
        first, count = step // epoch, (end - step) // epoch if whole else 1
        model.fit(
            make_dataset(config, "train", step),
            initial_epoch=first,
            epochs=first + count,
            steps_per_epoch=steps,
            callbacks=callbacks,
            verbose=0,
        )
        step += count * steps


class _Losses(keras.callbacks.Callback):
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
