"""Roles of trainable variables, by the layer attribute that holds them, not by their names."""

from __future__ import annotations

import enum
from typing import Any

import tf_keras as keras


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
    roles = {}
    for layer in model.submodules:
        for attribute, role in _ATTRIBUTES.items():
            variable: Any = getattr(layer, attribute, None)
            if hasattr(variable, "ref"):
                roles[variable.ref()] = role
    return [roles.get(variable.ref(), Role.WEIGHT) for variable in model.trainable_variables]
