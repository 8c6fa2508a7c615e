"""Trains the runs of the JPEG-decoding study."""

from __future__ import annotations

import pathlib

import numpy as np
from study import training
from study.settings import Setting
from study.training import Prepared, Result

from imagenet_fast.config import Config
from imagenet_fast.data.dataset import make_dataset
from imagenet_fast.lab.benchmarks.decode import VARIANTS
from imagenet_fast.training.step.classifier import Classifier
from jpeg_decoding.jpegs import DRAWINGS

_DEFAULTS = {
    option: getattr(Config(), option) for changes in VARIANTS.values() for option in changes
}


def run(setting: Setting, seed: int, data_dir: str) -> Result:
    """Trains and evaluates on the setting's data set; see ``study.training.run``."""
    directory = str(pathlib.Path(data_dir, setting.kind))
    return training.run(setting, seed, directory, dict.fromkeys(DRAWINGS, _compared))


def _compared(model: Classifier) -> Prepared:
    """Adds ``images``, the data set's name, and ``difference``, from the default's pixels."""
    config = model.config
    images = pathlib.Path(config.data_dir).name
    return [], lambda: {"images": images, "difference": difference(config)}


def difference(config: Config) -> float:
    """Returns the difference of validation images from those decoded with default options.

    Args:
      config: with the data and the decoding options.

    Returns:
      The mean absolute difference of the network's inputs, in levels of 0 to 255.
    """
    ways = (config, config.replace(**_DEFAULTS))
    batches = zip(*(make_dataset(way, "validation") for way in ways))
    differences = []
    for (images, labels, _), (exact, *_) in batches:
        is_image = labels >= 0
        found = images[is_image].numpy().astype(int) - exact[is_image].numpy()
        differences.append(np.abs(found).ravel())
    return round(float(np.concatenate(differences).mean()), 4)
