"""Train image classifiers as fast as the published records did, in TensorFlow 2 and Keras.

The notebook's names are here; ``imagenet_fast.models``, ``.layers`` and ``.optimizers`` can be used
alone. Nothing imports TensorFlow until it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config

if TYPE_CHECKING:
    from imagenet_fast.data.pipeline import make_dataset
    from imagenet_fast.distribute.strategy import make_strategy
    from imagenet_fast.serving.export import export
    from imagenet_fast.training.build import build_model
    from imagenet_fast.training.evaluate import evaluate
    from imagenet_fast.training.train import train

__version__ = "0.1.0"

__all__ = [
    "Config",
    "UserError",
    "build_model",
    "evaluate",
    "export",
    "make_dataset",
    "make_strategy",
    "train",
]

_HOME = {
    "build_model": "imagenet_fast.training.build",
    "evaluate": "imagenet_fast.training.evaluate",
    "export": "imagenet_fast.serving.export",
    "make_dataset": "imagenet_fast.data.pipeline",
    "make_strategy": "imagenet_fast.distribute.strategy",
    "train": "imagenet_fast.training.train",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
