"""Optimizers of Keras and TensorFlow Addons by name."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import keras

from imagenet_fast.base.errors import UserError, choices_hint
from imagenet_fast.base.keras_2 import KERAS_2, ops
from imagenet_fast.optimizers.lars import LARS
from imagenet_fast.optimizers.muon import Muon
from imagenet_fast.optimizers.schedules import Schedule
from imagenet_fast.optimizers.sgd import SGD

# This package's, which training.build_optimizer makes.
OPTIMIZERS = {"sgd": SGD, "lars": LARS, "muon": Muon}
# Classes of Keras' module that are no optimizers for a user to name.
_EXCLUDED = ("optimizer", "lossscaleoptimizer", "multioptimizer")
# Arguments of optimizers by what gives them; empty: nothing, since the training step does it.
_BY_OPTIONS = {
    **{name: name for name in ("learning_rate", "momentum", "weight_decay", "nesterov")},
    **dict.fromkeys(("clipnorm", "clipvalue", "global_clipnorm"), "clip_norm"),
    **dict.fromkeys(("use_ema", "ema_momentum", "ema_overwrite_frequency"), "ema_decay"),
    "epsilon": "optimizer_epsilon",
    "loss_scale_factor": "loss_scale",
    "gradient_accumulation_steps": "accumulation_steps",
    **dict.fromkeys(("name", "kwargs", "jit_compile"), ""),
}
_WORDS = {"true": True, "1": True, "false": False, "0": False}


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
    arguments: Sequence[str] = (),
    rate_factors: Sequence[float] = (),
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
      arguments: further ones of an optimizer of Keras, as ``beta_1=0.9``.
      rate_factors: for each trainable variable, a factor of its learning rate, with which its
        weight decay shrinks, too; none: 1.

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
        make = class_named(name, keras.optimizers)
        given |= _parsed(name, make, arguments)
        if rate_factors:
            make = _with_rate_factors(name, make, rate_factors)
        optimizer = call(name, make, given, required)
        if weight_decay and undecayed:
            optimizer.exclude_from_weight_decay(var_list=list(undecayed))
        return optimizer
    for option, value in (("optimizer_arguments", arguments), ("layer_decay", rate_factors)):
        if value:
            raise UserError(f"{option} is not for optimizers of TensorFlow Addons: leave it out")
    from imagenet_fast.optimizers.addons import make_addons_optimizer

    return make_addons_optimizer(name, given, undecayed, required)


def _parsed(
    name: str, make: Callable[..., Any], arguments: Sequence[str]
) -> dict[str, float | bool]:
    """Returns the values of arguments, which the optimizer must have.

    Raises:
      UserError: if it has not, an option gives it, or a value is not of the kind of its default.
    """
    values: dict[str, float | bool] = {}
    signature = inspect.signature(make).parameters.items()
    parameters = {key: own.default for key, own in signature if key not in _BY_OPTIONS}
    for argument in arguments:
        key, _, text = argument.partition("=")
        if _BY_OPTIONS.get(key):
            raise UserError(f"optimizer_arguments: give {key} by --{_BY_OPTIONS[key]}")
        if key not in parameters:
            raise UserError(
                f"optimizer_arguments: {name} has no {key}; its arguments are "
                f"{', '.join(parameters) or 'those that have options'}"
            )
        if key in values:
            raise UserError(f"optimizer_arguments: {key} is there twice")
        values[key] = _value(key, text, isinstance(parameters[key], bool))
    return values


def _value(key: str, text: str, is_bool: bool) -> float | bool:
    word = text.strip().lower()
    if is_bool and word in _WORDS:
        return _WORDS[word]
    with contextlib.suppress(ValueError):
        if not is_bool and math.isfinite(float(text)):
            return float(text)
    kind = "true or false" if is_bool else "a finite number"
    raise UserError(f"optimizer_arguments: {key} is {text!r}, but must be {kind}")


def _with_rate_factors(
    name: str, kind: Any, factors: Sequence[float]
) -> Callable[..., keras.optimizers.Optimizer]:
    """Returns an optimizer's class whose updates and weight decay have a factor by variable.

    Raises:
      UserError: with Keras 2.
    """
    if KERAS_2:
        raise UserError(
            f"layer_decay is not for optimizer={name} with Keras 2: use sgd, lars or muon, or "
            "TensorFlow 2.16 or newer"
        )

    class WithRateFactors(kind):  # type: ignore[misc]
        """The optimizer, which decays a variable just before it updates it."""

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            rate = learning_rate * factors[self._get_variable_index(variable)]
            if self.weight_decay and self._use_weight_decay(variable):
                decay = ops.cast(self.weight_decay * rate, variable.dtype)
                self.assign_sub(variable, variable * decay)
            super().update_step(gradient, variable, rate)

        def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
            del variables

    for attribute in ("__module__", "__name__", "__qualname__"):
        setattr(WithRateFactors, attribute, getattr(kind, attribute))
    return WithRateFactors


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
