"""Optimizers other than this package's own, by name."""

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

# This package's, which are made elsewhere.
OWN = {"sgd": SGD, "lars": LARS, "muon": Muon}
_ADDONS_NAME = re.compile(r"tfa:(\w+)(?:\((.+)\))?")
# What is in Keras' module besides.
_NO_OPTIMIZERS = ("optimizer", "lossscaleoptimizer")


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

    Each gets those of the options that it has, and must have the ``required`` ones.

    Args:
      name: of a class of ``keras.optimizers``, in any case; or ``tfa:NAME`` for one of TensorFlow
        Addons, in its case; ``tfa:WRAPPER(name)`` for one that wraps another, as
        ``tfa:Lookahead(tfa:LAMB)``.
      learning_rate: by the step.
      momentum: share of the momentum that a step keeps.
      weight_decay: in the form that the optimizer has it, which is mostly apart from the gradient.
      undecayed: variables that are not decayed.
      clip_norm: greatest norm of all gradients together.
      epsilon: what the optimizer adds to its denominators; None: its own.
      required: ``momentum``, ``weight_decay`` or both.

    Raises:
      UserError: if there is no such optimizer, Addons are not installed, it cannot be made, it
        decays variables that it is not to decay, or lacks an epsilon or a required option.
    """
    given: dict[str, Any] = {
        "learning_rate": learning_rate,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "weight_decay_rate": weight_decay,
        # On GPUs Keras would have XLA compile the update, which it cannot where the variables are
        # on several devices, as in a pipeline.
        "jit_compile": False,
    }
    if clip_norm:
        given["global_clipnorm"] = clip_norm
    if epsilon is not None:
        given["epsilon"] = epsilon
    if not name.startswith("tfa:"):
        if name.lower() in OWN:
            raise UserError(f"optimizer={name!r} does not exist; did you mean {name.lower()!r}?")
        optimizer = _call(name, _class_named(name, keras.optimizers), given, required)
        if weight_decay and undecayed:
            optimizer.exclude_from_weight_decay(var_list=list(undecayed))
        return optimizer
    match = _ADDONS_NAME.fullmatch(name)
    if not match:
        raise UserError(f"optimizer={name!r} is none: write tfa:NAME or tfa:WRAPPER(name)")
    make, wrapped = _addons_class(match[1]), match[2]
    given["exclude_from_weight_decay"] = [_pattern_of(variable) for variable in undecayed]
    needs_one = "optimizer" in inspect.signature(make).parameters
    if needs_one != bool(wrapped):
        raise UserError(
            f"tfa:{match[1]} wraps another optimizer: write tfa:{match[1]}(adam)"
            if needs_one
            else f"tfa:{match[1]} wraps no other optimizer: write tfa:{match[1]}"
        )
    if not wrapped:
        if weight_decay and undecayed:
            _check_exclusion(name, make)
        return _call(name, make, given, required)
    if wrapped.startswith("tfa:"):
        inner = make_optimizer(
            wrapped,
            learning_rate,
            momentum=momentum,
            weight_decay=weight_decay,
            undecayed=undecayed,
            clip_norm=clip_norm,
            epsilon=epsilon,
            required=required,
        )
    else:  # Addons wrap optimizers of the kind that Keras had then
        inner = _call(wrapped, _class_named(wrapped, keras.optimizers.legacy), given, required)
    return _call(name, make, {"optimizer": inner})


def _pattern_of(variable: tf.Variable) -> str:
    """Returns the pattern by which Addons know a variable, and other replicas' copies of it."""
    name, _, number = variable.name.rpartition(":")
    return rf"^{re.escape(name)}(/replica_\d+)?:{number}$"


def _check_exclusion(name: str, make: Callable[..., Any]) -> None:
    """Raises a UserError if an optimizer of Addons decays weights, but all of them alike."""
    parameters = inspect.signature(make).parameters
    # AdamW and SGDW hand this option on to a part of theirs that, under a strategy, takes none of
    # the variables for one to be decayed.
    if "weight_decay" in parameters and "exclude_from_weight_decay" not in parameters:
        raise UserError(
            f"optimizer={name} cannot leave variables out of its weight decay: say "
            "weight_decay_on=all, or choose adamw, which is Keras', or tfa:LAMB"
        )


def _call(
    name: str, make: Callable[..., Any], given: dict[str, Any], required: Sequence[str] = ()
) -> Any:
    """Calls ``make`` with those of the arguments that it has, among them all ``required``."""
    parameters = inspect.signature(make).parameters
    for option in required:
        if option not in parameters and f"{option}_rate" not in parameters:
            raise UserError(f"optimizer={name} has no {option}: leave it out")
    if "epsilon" in given and "epsilon" not in parameters:
        raise UserError(f"optimizer={name} has no epsilon: leave out optimizer_epsilon")
    own = {key: value for key, value in given.items() if key in parameters}
    # Not in the signatures of those that hand their other arguments on.
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and "global_clipnorm" in given:
        own["global_clipnorm"] = given["global_clipnorm"]
    try:
        return make(**own)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer={name} cannot be made: {error}") from error


def _class_named(name: str, module: ModuleType) -> Callable[..., keras.optimizers.Optimizer]:
    classes = {
        key.lower(): value
        for key, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, module.Optimizer)
        and key.lower() not in _NO_OPTIMIZERS
    }
    if name.lower() not in classes:
        known = [*OWN, *sorted(classes)]
        hint = choices_hint(name.lower(), [*known, "tfa:NAME"])
        raise UserError(f"optimizer={name!r} does not exist{hint}")
    return classes[name.lower()]


def _addons_class(name: str) -> Callable[..., Any]:
    try:
        import tensorflow_addons as tfa
    except ImportError as error:
        raise UserError(
            f"optimizer=tfa:{name} needs TensorFlow Addons, which work with TensorFlow 2.15 alone: "
            f"make an environment of Python 3.9 to 3.11, there {how_to_install('addons')}, and set "
            f"TF_USE_LEGACY_KERAS=1 ({error})"
        ) from None
    classes = {
        key: value
        for key, value in vars(tfa.optimizers).items()
        if inspect.isclass(value) and issubclass(value, keras.optimizers.legacy.Optimizer)
    }
    if name not in classes:
        hint = choices_hint(name, sorted(classes))
        raise UserError(f"TensorFlow Addons have no optimizer {name!r}{hint}")
    return classes[name]
