"""Trains one setting with one seed; returns what the tables and pictures are made of."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tf_keras as keras
from study.settings import PLAIN, Setting

from imagenet_fast import environment
from imagenet_fast.data.pipeline import make_dataset
from imagenet_fast.training.build import build_model
from imagenet_fast.training.classifier import Classifier
from imagenet_fast.training.schedule import total_steps
from large_batch.experiments import HALF_PRECISION_LARS, POOL5
from large_batch.half_precision import HalfPrecisionLARS

_PROBED_IMAGES = 500
_PROBES = 30

Result = dict[str, Any]


def run(setting: Setting, seed: int, data_dir: str) -> Result:
    """Trains and evaluates.

    Args:
      setting: what.
      seed: of the weights and the order of the data.
      data_dir: of the shards.

    Returns:
      ``error`` (the share of the validation images that is wrong; None: the loss was not finite
      any more), ``loss`` (of the validation images), ``losses`` (of the training images, epoch by
      epoch), ``seconds``, ``versions``, and what its kind adds: see the functions below.

    Raises:
      UserError: if the data cannot be used.
    """
    # Models of earlier runs, whose parts refer to each other in circles.
    keras.backend.clear_session()
    gc.collect()
    begin = time.monotonic()
    config = setting.config.replace(seed=seed, data_dir=data_dir)
    model = build_model(config)
    losses = _Losses()
    callback, told = _KINDS[setting.kind](model)
    steps = total_steps(config, model.steps_per_epoch)
    model.fit(
        make_dataset(config, "train"),
        # Of less than an epoch, or of whole ones.
        epochs=max(1, steps // model.steps_per_epoch),
        steps_per_epoch=min(steps, model.steps_per_epoch),
        callbacks=[losses, *callback],
        verbose=0,
    )
    result = {"error": None, "loss": None, "losses": losses.by_epoch}
    if not losses.diverged:
        found = model.evaluate(make_dataset(config, "validation"), verbose=0, return_dict=True)
        result.update(error=round(1 - float(found["top1"]), 6), loss=float(found["loss"]))
    seconds = round(time.monotonic() - begin, 1)
    return {**result, **told(), "seconds": seconds, "versions": environment.versions()}


class _Losses(keras.callbacks.Callback):
    """Notes the loss of each epoch, and ends the run when it is not finite."""

    _supports_tf_logs = True

    def __init__(self) -> None:
        super().__init__()
        self.by_epoch: list[float] = []
        self.diverged = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Looks at the loss."""
        if not math.isfinite(float(logs["loss"])):
            self.diverged = self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Notes it."""
        loss = float(logs["loss"])
        self.by_epoch.append(round(loss, 5) if math.isfinite(loss) else None)


Prepared = tuple[list[keras.callbacks.Callback], Callable[[], Result]]


def _plain(model: Classifier) -> Prepared:
    """Adds nothing."""
    return [], dict


def _half_precision_lars(model: Classifier) -> Prepared:
    """Has LARS compute in float16; ``lost`` is the share of the updates that changed nothing."""
    optimizer = HalfPrecisionLARS.like(model.optimizer)
    model.compile(optimizer=optimizer)
    return [], lambda: {"lost": optimizer.lost_share()}


def _pool5(model: Classifier) -> Prepared:
    """Adds ``features``: how those that enter fc6 are spread, from step to step."""
    probe = _FeatureProbe()
    return [probe], lambda: {"features": probe.rows}


class _FeatureProbe(keras.callbacks.Callback):
    """Looks at the features that AlexNet's first dense layer gets, for the same images each time.

    Batch norm uses the statistics of these images, as in training.

    Attributes:
      rows: ``step``, ``mean``, ``std``, and the 1st, 50th and 99th percentile.
    """

    _supports_tf_logs = True

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Result] = []
        self._step = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Takes the images, and looks at the features of the fresh network."""
        config = self.model.config
        images, *_ = next(iter(make_dataset(config, "validation")))
        self._images = images[:_PROBED_IMAGES]
        network = next(layer for layer in self.model.layers if isinstance(layer, keras.Model))
        features = keras.Model(network.input, network.get_layer("flatten").output)
        self._normalize = self.model.get_layer("normalize")
        self._features = features
        self._every = max(1, self.params["steps"] * self.params["epochs"] // _PROBES)
        self._look()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Looks, when it is time."""
        self._step += 1
        if self._step % self._every == 0:
            self._look()

    def _look(self) -> None:
        statistics = self._features.non_trainable_variables
        values = [variable.read_value() for variable in statistics]
        features = self._features(self._normalize(self._images), training=True).numpy()
        # Looking must not count as a step of the moving averages.
        for variable, value in zip(statistics, values):
            variable.assign(value)
        low, middle, high = np.percentile(features, (1, 50, 99))
        row = {"mean": features.mean(), "std": features.std()}
        row.update({"p1": low, "p50": middle, "p99": high})
        self.rows.append({"step": self._step, **{k: float(f"{v:.5g}") for k, v in row.items()}})


_KINDS: dict[str, Callable[[Classifier], Prepared]] = {
    PLAIN: _plain,
    HALF_PRECISION_LARS: _half_precision_lars,
    POOL5: _pool5,
}
