"""What a trainable variable is for: by the layer attribute that holds it, never by its name."""

from __future__ import annotations

import enum
from typing import Any

import tf_keras as keras


class Role(enum.Enum):
    """The part that a trainable variable plays in its layer."""

    WEIGHT = "weight"
    BIAS = "bias"
    SCALE = "scale"  # gamma of a normalization layer
    SHIFT = "shift"  # beta of a normalization layer


_ATTRIBUTES = {"bias": Role.BIAS, "gamma": Role.SCALE, "beta": Role.SHIFT}


def variable_roles(model: keras.Model) -> list[Role]:
    """Returns the role of each of ``model.trainable_variables``, in their order.

    Keras' layers, and those that follow its conventions, hold their biases as ``bias`` and the
    parameters of a normalization as ``gamma`` and ``beta``; all else is a weight.
    """
    roles = {}
    for layer in model.submodules:
        for attribute, role in _ATTRIBUTES.items():
            variable: Any = getattr(layer, attribute, None)
            if hasattr(variable, "ref"):
                roles[variable.ref()] = role
    return [roles.get(variable.ref(), Role.WEIGHT) for variable in model.trainable_variables]
