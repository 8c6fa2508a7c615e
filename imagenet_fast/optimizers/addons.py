"""Optimizers of TensorFlow Addons by name, for Keras 2."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from imagenet_fast.base.errors import UserError, choices_hint, how_to_install
from imagenet_fast.optimizers.by_name import call, class_named

_NAME = re.compile(r"tfa:(\w+)(?:\((.+)\))?")


def make_addons_optimizer(
    name: str, given: Mapping[str, Any], undecayed: Sequence[Any], required: Sequence[str]
) -> keras.optimizers.Optimizer:
    """Makes an optimizer of TensorFlow Addons.

    Args:
      name: ``tfa:NAME`` or ``tfa:WRAPPER(name)``, as of ``make_optimizer``.
      given: the arguments that it gets if it takes them.
      undecayed: variables without weight decay.
      required: arguments that it must take.

    Raises:
      UserError: as of ``make_optimizer``.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise UserError(f"optimizer={name!r} is malformed: write tfa:NAME or tfa:WRAPPER(name)")
    make, inner_name = _class(match[1]), match[2]
    excluded = [_pattern_of(variable) for variable in undecayed]
    given = {**given, "exclude_from_weight_decay": excluded}
    wraps = "optimizer" in inspect.signature(make).parameters
    if wraps != bool(inner_name):
        raise UserError(
            f"tfa:{match[1]} wraps another optimizer: write tfa:{match[1]}(adam)"
            if wraps
            else f"tfa:{match[1]} wraps no other optimizer: write tfa:{match[1]}"
        )
    if not inner_name:
        if given["weight_decay"] and undecayed:
            _check_exclusion(name, make)
        return call(name, make, given, required)
    if inner_name.startswith("tfa:"):
        inner = make_addons_optimizer(inner_name, given, undecayed, required)
    else:  # Addons wrap Keras' legacy optimizers
        inner = call(inner_name, class_named(inner_name, keras.optimizers.legacy), given, required)
    return call(name, make, {"optimizer": inner})


def _pattern_of(variable: Any) -> str:
    """Returns the regular expression for a variable and its replicas' copies."""
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


def _class(name: str) -> Callable[..., Any]:
    try:
        import tensorflow_addons as tfa
    except ImportError as error:
        raise UserError(
            f"optimizer=tfa:{name} needs TensorFlow Addons, which work only with TensorFlow 2.15: "
            f"use an environment with Python 3.9 to 3.11, {how_to_install('addons')} ({error})"
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
