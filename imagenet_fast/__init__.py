"""Train image classifiers as fast as the published records did, in TensorFlow 2 and Keras.

``imagenet_fast.models``, ``.layers`` and ``.optimizers`` also work on their own. TensorFlow is
imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.lazy import lazy_attributes
from imagenet_fast.base.moved import explain_moved_modules
from imagenet_fast.config import Config

if TYPE_CHECKING:
    from imagenet_fast.data.dataset import make_dataset
    from imagenet_fast.distribute.strategy import make_strategy
    from imagenet_fast.serving.export import export
    from imagenet_fast.training.build.model import build_model
    from imagenet_fast.training.checkpoints.config_file import read_config
    from imagenet_fast.training.evaluate import evaluate
    from imagenet_fast.training.train import train

__version__ = "0.2.0"

__all__ = [
    "Config",
    "UserError",
    "build_model",
    "evaluate",
    "export",
    "make_dataset",
    "make_strategy",
    "read_config",
    "train",
]

_HOMES = {
    "data.dataset": ["make_dataset"],
    "distribute.strategy": ["make_strategy"],
    "serving.export": ["export"],
    "training.build.model": ["build_model"],
    "training.evaluate": ["evaluate"],
    "training.checkpoints.config_file": ["read_config"],
    "training.train": ["train"],
}
__getattr__ = lazy_attributes(__name__, _HOMES)
explain_moved_modules(__name__)
