"""Optimizers and learning-rate schedules of the published recipes, for any tf_keras model.

They are imported on first use, because ``options`` is read without TensorFlow; or, if Keras has
been imported, at once, for Keras to find them by name when it loads a model.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from imagenet_fast.base.lazy import lazy_attributes

if TYPE_CHECKING:
    from imagenet_fast.optimizers.lars import LARS
    from imagenet_fast.optimizers.lookahead import Lookahead
    from imagenet_fast.optimizers.muon import Muon, orthogonalize
    from imagenet_fast.optimizers.roles import Role, variable_roles
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
    "roles": ["Role", "variable_roles"],
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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if sys.modules.get("tf_keras"):
    for _module in _MODULES:
        importlib.import_module(f"{__name__}.{_module}")
