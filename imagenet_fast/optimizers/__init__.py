"""Optimizers and rate schedules of the published recipes, for any tf_keras model."""

from imagenet_fast.optimizers.roles import Role, variable_roles
from imagenet_fast.optimizers.schedules import GradualWarmup, StepDecay
from imagenet_fast.optimizers.sgd import SGD

__all__ = ["SGD", "GradualWarmup", "Role", "StepDecay", "variable_roles"]
