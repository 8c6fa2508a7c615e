"""Trains the runs of the large-batch study."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from study import training
from study.settings import Setting
from study.training import Prepared, Result

from imagenet_fast.data.dataset import make_dataset
from imagenet_fast.models import network_of
from imagenet_fast.optimizers import ConstantWarmup
from imagenet_fast.training.step.classifier import Classifier
from large_batch.experiments import CONSTANT_WARMUP, HALF_PRECISION_LARS, POOL5
from large_batch.half_precision import HalfPrecisionLARS

_PROBED_IMAGES = 500
_PROBES = 30


def run(setting: Setting, seed: int, data_dir: str) -> Result:
    """Trains and evaluates; see ``study.training.run``."""
    return training.run(setting, seed, data_dir, _KINDS)


def _constant_warmup(model: Classifier) -> Prepared:
    """Keeps the learning rate at its first value until the warmup ends: Goyal et al. 2017."""
    options = model.optimizer.get_config()
    gradual = keras.optimizers.schedules.deserialize(options["learning_rate"])
    constant = ConstantWarmup(gradual.schedule, gradual.start, gradual.steps)
    optimizer = type(model.optimizer).from_config({**options, "learning_rate": constant})
    model.compile(optimizer=optimizer)
    return [], dict


def _half_precision_lars(model: Classifier) -> Prepared:
    """Uses LARS in float16; adds ``lost``, the fraction of updates lost in rounding."""
    optimizer = HalfPrecisionLARS.like(model.optimizer)
    model.compile(optimizer=optimizer)
    return [], lambda: {"lost": optimizer.lost_fraction()}


def _pool5(model: Classifier) -> Prepared:
    """Adds ``features``, the distribution of fc6's input features over steps."""
    probe = _FeatureProbe()
    return [probe], lambda: {"features": probe.rows}


class _FeatureProbe(keras.callbacks.Callback):
    """Records the input features of AlexNet's first dense layer, for the same images each time.

    Batch norm uses the statistics of these images, as in training.

    Attributes:
      rows: ``step``, ``mean``, ``std``, and the 1st, 50th and 99th percentile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Result] = []
        self._step = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Loads the images, and records the features of the initial network."""
        config = self.model.config
        images, *_ = next(iter(make_dataset(config, "validation")))
        self._images = images[:_PROBED_IMAGES]
        network = network_of(self.model)
        features = keras.Model(network.input, network.get_layer("flatten").output)
        self._normalize = self.model.get_layer("normalize")
        self._features = features
        self._every = max(1, self.params["steps"] * self.params["epochs"] // _PROBES)
        self._record()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Records the features at intervals."""
        self._step += 1
        if self._step % self._every == 0:
            self._record()

    def _record(self) -> None:
        statistics = self._features.non_trainable_variables
        values = [variable.numpy() for variable in statistics]
        features = self._features(self._normalize(self._images), training=True).numpy()
        # The probe must not update the moving averages.
        for variable, value in zip(statistics, values):
            variable.assign(value)
        low, middle, high = np.percentile(features, (1, 50, 99))
        row = {"mean": features.mean(), "std": features.std()}
        row.update({"p1": low, "p50": middle, "p99": high})
        self.rows.append({"step": self._step, **{k: float(f"{v:.5g}") for k, v in row.items()}})


_KINDS = {
    CONSTANT_WARMUP: _constant_warmup,
    HALF_PRECISION_LARS: _half_precision_lars,
    POOL5: _pool5,
}
