"""Optimizers and learning-rate schedules of the published recipes, for any Keras model.

They are imported on first use, because ``options`` is read without TensorFlow; or, if Keras has
been imported, at once, for Keras to find them by name when it loads a model.
"""

from __future__ import annotations

import enum
import importlib
import sys
from typing import TYPE_CHECKING

from imagenet_fast.base.lazy import lazy_attributes

if TYPE_CHECKING:
    import keras

    from imagenet_fast.optimizers.lars import LARS
    from imagenet_fast.optimizers.lookahead import Lookahead
    from imagenet_fast.optimizers.muon import Muon, orthogonalize
    from imagenet_fast.optimizers.schedules import (
        ConstantWarmup,
        CosineDecay,
        GradualWarmup,
        PiecewiseLinear,
        PolynomialDecay,
        StepDecay,
    )
    from imagenet_fast.optimizers.sgd import SGD
    from imagenet_fast.optimizers.weight_average import WeightAverage

__all__ = [
    "LARS",
    "SGD",
    "ConstantWarmup",
    "CosineDecay",
    "GradualWarmup",
    "Lookahead",
    "Muon",
    "PiecewiseLinear",
    "PolynomialDecay",
    "Role",
    "StepDecay",
    "WeightAverage",
    "orthogonalize",
    "variable_roles",
]

_MODULES = {
    "lars": ["LARS"],
    "lookahead": ["Lookahead"],
    "muon": ["Muon", "orthogonalize"],
    "schedules": [
        "ConstantWarmup",
        "CosineDecay",
        "GradualWarmup",
        "PiecewiseLinear",
        "PolynomialDecay",
        "StepDecay",
    ],
    "sgd": ["SGD"],
    "weight_average": ["WeightAverage"],
}
__getattr__ = lazy_attributes(__name__, _MODULES)


class Role(enum.Enum):
    """The role of a trainable variable in its layer."""

    WEIGHT = "weight"
    BIAS = "bias"
    SCALE = "scale"  # gamma of a normalization layer
    SHIFT = "shift"  # beta of a normalization layer


_ATTRIBUTES = {"bias": Role.BIAS, "gamma": Role.SCALE, "beta": Role.SHIFT}


def variable_roles(model: keras.Model) -> list[Role]:
    """Returns the role of each of ``model.trainable_variables``, in their order.

    Keras layers, and those that follow its conventions, hold biases as ``bias`` and the parameters
    of a normalization as ``gamma`` and ``beta``; all other variables are weights.
    """
    from imagenet_fast.base.keras_2 import layers_in

    roles = {
        id(getattr(layer, attribute, None)): role
        for layer in layers_in(model)
        for attribute, role in _ATTRIBUTES.items()
    }
    return [roles.get(id(variable), Role.WEIGHT) for variable in model.trainable_variables]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if sys.modules.get("keras"):
    for _module in _MODULES:
        importlib.import_module(f"{__name__}.{_module}")
