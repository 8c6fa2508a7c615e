"""Optimizers and rate schedules of the published recipes, for any tf_keras model."""

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
