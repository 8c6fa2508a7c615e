"""Optimizers of Keras and TensorFlow Addons by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError, choices_hint, how_to_install
from imagenet_fast.optimizers.lars import LARS
from imagenet_fast.optimizers.muon import Muon
from imagenet_fast.optimizers.schedules import Schedule
from imagenet_fast.optimizers.sgd import SGD

# This package's, which training.build_optimizer makes.
OPTIMIZERS = {"sgd": SGD, "lars": LARS, "muon": Muon}
_ADDONS_NAME = re.compile(r"tfa:(\w+)(?:\((.+)\))?")
# Classes of Keras' module that are no optimizers for a user to name.
_EXCLUDED = ("optimizer", "lossscaleoptimizer")


def make_optimizer(
    name: str,
    learning_rate: Schedule,
    *,
    momentum: float,
    weight_decay: float,
    undecayed: Sequence[tf.Variable],
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
        # On GPUs Keras would compile the update with XLA, which fails if the variables are on
        # several devices, as in a pipeline.
        "jit_compile": False,
    }
    if clip_norm:
        given["global_clipnorm"] = clip_norm
    if epsilon is not None:
        given["epsilon"] = epsilon
    if not name.startswith("tfa:"):
        if name.lower() in OPTIMIZERS:
            raise UserError(f"optimizer={name!r} does not exist; did you mean {name.lower()!r}?")
        optimizer = _call(name, _class_named(name, keras.optimizers), given, required)
        if weight_decay and undecayed:
            optimizer.exclude_from_weight_decay(var_list=list(undecayed))
        return optimizer
    match = _ADDONS_NAME.fullmatch(name)
    if not match:
        raise UserError(f"optimizer={name!r} is malformed: write tfa:NAME or tfa:WRAPPER(name)")
    make, inner_name = _addons_class(match[1]), match[2]
    given["exclude_from_weight_decay"] = [_pattern_of(variable) for variable in undecayed]
    wraps = "optimizer" in inspect.signature(make).parameters
    if wraps != bool(inner_name):
        raise UserError(
            f"tfa:{match[1]} wraps another optimizer: write tfa:{match[1]}(adam)"
            if wraps
            else f"tfa:{match[1]} wraps no other optimizer: write tfa:{match[1]}"
        )
    if not inner_name:
        if weight_decay and undecayed:
            _check_exclusion(name, make)
        return _call(name, make, given, required)
    if inner_name.startswith("tfa:"):
        inner = make_optimizer(
            inner_name,
            learning_rate,
            momentum=momentum,
            weight_decay=weight_decay,
            undecayed=undecayed,
            clip_norm=clip_norm,
            epsilon=epsilon,
            required=required,
        )
    else:  # Addons wrap Keras' legacy optimizers
        legacy = _class_named(inner_name, keras.optimizers.legacy)
        inner = _call(inner_name, legacy, given, required)
    return _call(name, make, {"optimizer": inner})


def _pattern_of(variable: tf.Variable) -> str:
    """Returns the regular expression for a variable and its replicas' copies, for Addons."""
    name, _, number = variable.name.rpartition(":")
    return rf"^{re.escape(name)}(/replica_\d+)?:{number}$"


def _check_exclusion(name: str, make: Callable[..., Any]) -> None:
    """Raises a UserError if an optimizer of Addons decays all weights or none."""
    parameters = inspect.signature(make).parameters
    # AdamW and SGDW pass this option on to a mixin that, under a strategy, decays no variable.
    if "weight_decay" in parameters and "exclude_from_weight_decay" not in parameters:
        raise UserError(
            f"optimizer={name} cannot exclude variables from weight decay: use "
            "weight_decay_on=all, Keras' adamw, or tfa:LAMB"
        )


def _call(
    name: str, make: Callable[..., Any], given: dict[str, Any], required: Sequence[str] = ()
) -> Any:
    """Calls ``make`` with the arguments that it accepts, which must include all ``required``."""
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


def _class_named(name: str, module: ModuleType) -> Callable[..., keras.optimizers.Optimizer]:
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


def _addons_class(name: str) -> Callable[..., Any]:
    try:
        import tensorflow_addons as tfa
    except ImportError as error:
        raise UserError(
            f"optimizer=tfa:{name} needs TensorFlow Addons, which work only with TensorFlow 2.15: "
            f"use an environment with Python 3.9 to 3.11, {how_to_install('addons')}, and "
            f"TF_USE_LEGACY_KERAS=1 ({error})"
        ) from None
    classes = {
        key: value
        for key, value in vars(tfa.optimizers).items()
        if inspect.isclass(value) and issubclass(value, keras.optimizers.legacy.Optimizer)
    }
    if name not in classes:
        hint = choices_hint(name, sorted(classes))
        raise UserError(f"TensorFlow Addons has no optimizer {name!r}{hint}")
    return classes[name]
