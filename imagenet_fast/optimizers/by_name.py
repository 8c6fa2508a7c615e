"""Optimizers of Keras and TensorFlow Addons by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import keras

from imagenet_fast.base.errors import UserError, choices_hint
from imagenet_fast.optimizers.lars import LARS
from imagenet_fast.optimizers.muon import Muon
from imagenet_fast.optimizers.schedules import Schedule
from imagenet_fast.optimizers.sgd import SGD

# This package's, which training.build_optimizer makes.
OPTIMIZERS = {"sgd": SGD, "lars": LARS, "muon": Muon}
# Classes of Keras' module that are no optimizers for a user to name.
_EXCLUDED = ("optimizer", "lossscaleoptimizer")


def make_optimizer(
    name: str,
    learning_rate: Schedule,
    *,
    momentum: float,
    weight_decay: float,
    undecayed: Sequence[Any],
    clip_norm: float | None,
    epsilon: float | None = None,
    required: Sequence[str] = (),
) -> keras.optimizers.Optimizer:
    """Makes an optimizer of Keras or of TensorFlow Addons.

    It gets the options that it supports, and must support the ``required`` ones.

    Args:
      name: of a class in ``keras.optimizers``, case-insensitive; or ``tfa:NAME`` for one of
        TensorFlow Addons, case-sensitive; ``tfa:WRAPPER(name)`` for one that wraps another, as
        ``tfa:Lookahead(tfa:LAMB)``.
      learning_rate: schedule.
      momentum: decay factor of the momentum buffer.
      weight_decay: in the optimizer's form, which for most is decoupled from the gradient.
      undecayed: variables without weight decay.
      clip_norm: maximum global norm of the gradients; None: no clipping.
      epsilon: added to the optimizer's denominators; None: the optimizer's default.
      required: ``momentum``, ``weight_decay`` or both.

    Raises:
      UserError: if there is no such optimizer, Addons are not installed, the optimizer cannot be
        made, it would decay ``undecayed``, or lacks an epsilon or a required option.
    """
    given: dict[str, Any] = {
        "learning_rate": learning_rate,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "weight_decay_rate": weight_decay,
        # On GPUs Keras 2 would compile the update with XLA, which fails if the variables are on
        # several devices.
        "jit_compile": False,
    }
    if clip_norm:
        given["global_clipnorm"] = clip_norm
    if epsilon is not None:
        given["epsilon"] = epsilon
    if not name.startswith("tfa:"):
        if name.lower() in OPTIMIZERS:
            raise UserError(f"optimizer={name!r} does not exist; did you mean {name.lower()!r}?")
        optimizer = call(name, class_named(name, keras.optimizers), given, required)
        if weight_decay and undecayed:
            optimizer.exclude_from_weight_decay(var_list=list(undecayed))
        return optimizer
    from imagenet_fast.optimizers.addons import make_addons_optimizer

    return make_addons_optimizer(name, given, undecayed, required)


def call(
    name: str, make: Callable[..., Any], given: dict[str, Any], required: Sequence[str] = ()
) -> Any:
    """Calls ``make`` with those arguments that it accepts, which must include all ``required``.

    Raises:
      UserError: if one is missing, or ``make`` refuses them.
    """
    parameters = inspect.signature(make).parameters
    for option in required:
        if option not in parameters and f"{option}_rate" not in parameters:
            raise UserError(f"optimizer={name} has no {option}: leave it out")
    if "epsilon" in given and "epsilon" not in parameters:
        raise UserError(f"optimizer={name} has no epsilon: leave out optimizer_epsilon")
    accepted = {key: value for key, value in given.items() if key in parameters}
    # Not in the signatures that pass it on in **kwargs.
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and "global_clipnorm" in given:
        accepted["global_clipnorm"] = given["global_clipnorm"]
    try:
        return make(**accepted)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer={name} cannot be made: {error}") from error


def class_named(name: str, module: ModuleType) -> Callable[..., keras.optimizers.Optimizer]:
    """Returns the optimizer of this name in a module of Keras, case-insensitive."""
    classes = {
        key.lower(): value
        for key, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, module.Optimizer)
        and key.lower() not in _EXCLUDED
    }
    if name.lower() not in classes:
        hint = choices_hint(
            name.lower(), [*OPTIMIZERS, *sorted({*classes} - {*OPTIMIZERS}), "tfa:NAME"]
        )
        raise UserError(f"optimizer={name!r} does not exist{hint}")
    return classes[name.lower()]
