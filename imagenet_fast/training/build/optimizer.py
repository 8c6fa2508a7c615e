"""The optimizer that a configuration describes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast import models
from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import layers_in
from imagenet_fast.base.notices import warn_once
from imagenet_fast.layers import PatchWhitening
from imagenet_fast.models import network_of
from imagenet_fast.models.depth import blocks_of, name_of_block
from imagenet_fast.optimizers import LARS, SGD, Muon, Role, variable_roles
from imagenet_fast.optimizers.by_name import OPTIMIZERS, make_optimizer
from imagenet_fast.optimizers.loss_scale import with_loss_scale
from imagenet_fast.optimizers.options import UpdateOptions
from imagenet_fast.optimizers.schedules import EveryNthStep
from imagenet_fast.training.build.schedule import build_schedule
from imagenet_fast.training.schedule_steps import total_steps

# Google's TPU code warns below this, too.
_LEAST_LARS_BATCH = 2000

_DECAYED_ROLES = {
    "weights": (Role.WEIGHT,),
    "weights_and_biases": (Role.WEIGHT, Role.BIAS),
    "all": tuple(Role),
}


def build_optimizer(
    options: UpdateOptions, model: keras.Model, steps_per_epoch: int, *, every: int = 1
) -> keras.optimizers.Optimizer:
    """Returns the optimizer, with loss scaling for float16.

    The variables' roles decide which are decayed, and which LARS scales.

    Args:
      options: of the run.
      model: from pixels to logits, with the network as a layer.
      steps_per_epoch: weight updates in an epoch.
      every: steps of the run for each update of this model.

    Raises:
      UserError: if there is no such optimizer, or the schedule does not fit the run.
    """
    optimizer = _unscaled_optimizer(options, model, steps_per_epoch, every)
    if options.precision != "mixed_float16":
        return optimizer
    return with_loss_scale(optimizer, options.loss_scale)


def _unscaled_optimizer(
    options: UpdateOptions, model: keras.Model, steps_per_epoch: int, every: int
) -> keras.optimizers.Optimizer:
    if options.optimizer == "lars" and options.batch_size < _LEAST_LARS_BATCH:
        warnings.warn(
            f"lars is meant for batches of {_LEAST_LARS_BATCH} images and more, not for "
            f"{options.batch_size}",
            stacklevel=2,
        )
    schedule = build_schedule(options, steps_per_epoch)
    if every > 1:
        schedule = EveryNthStep(schedule, every)
    roles = variable_roles(model)
    decay_on = options.weight_decay_on
    if decay_on == "auto":
        decay_on = "weights" if options.optimizer == "lars" else "weights_and_biases"
    decayed = [role in _DECAYED_ROLES[decay_on] for role in roles]
    clip_norm = options.clip_norm or None
    layer_factors = layer_rate_factors(options, model)
    if options.optimizer not in OPTIMIZERS:
        return make_optimizer(
            options.optimizer,
            schedule,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            undecayed=[v for v, decay in zip(model.trainable_variables, decayed) if not decay],
            clip_norm=clip_norm,
            epsilon=options.optimizer_epsilon or None,
            required=_required(options),
            arguments=options.optimizer_arguments,
            rate_factors=layer_factors if options.layer_decay != 1 else (),
        )
    rate_factors = _rate_factors(options, model, roles)
    shared: dict[str, Any] = {
        "momentum": options.momentum,
        "nesterov": options.nesterov,
        "weight_decay": options.weight_decay,
        "weight_decay_mask": [decay / factor for decay, factor in zip(decayed, rate_factors)],
        "rate_factors": [own * factor for own, factor in zip(rate_factors, layer_factors)],
        "zero_rate_at": _zero_rate_at(options, model, steps_per_epoch, every),
        "global_clipnorm": clip_norm,
    }
    if options.optimizer == "lars":
        return LARS(
            schedule,
            eeta=options.lars_eeta,
            epsilon=options.optimizer_epsilon,
            rate_in_momentum=options.rate_in_momentum != "no",
            trust_mask=[role is Role.WEIGHT for role in roles],
            **shared,
        )
    shared["rate_in_momentum"] = options.rate_in_momentum == "yes"
    if options.decoupled_weight_decay:
        shared["decoupled_at_rate"] = options.scaled_learning_rate
    if options.optimizer == "sgd":
        return SGD(schedule, **shared)
    return Muon(
        schedule,
        filter_mask=filters_of(model),
        filter_momentum=options.muon_momentum,
        newton_schulz_steps=options.muon_steps,
        coefficients=options.muon_coefficients,
        norm_every=options.muon_norm_every,
        total_steps=math.ceil(total_steps(options, steps_per_epoch) / every),
        **shared,
    )


def layer_rate_factors(options: UpdateOptions, model: keras.Model) -> list[float]:
    """Returns the factor that ``layer_decay`` gives each trainable variable's learning rate."""
    variables = model.trainable_variables
    if options.layer_decay == 1:
        return [1.0] * len(variables)
    blocks = blocks_of(network_of(model))
    head = len(blocks) - 1
    depths = {
        id(variable): depth
        for depth, block in enumerate(blocks)
        for layer in block
        for variable in layer.weights
    }
    # A variable of no layer of the network would be of a loss.
    trained = [depths.get(id(own), head) for own in variables]
    first = min(trained, default=head)
    if first < head:
        warn_once(
            f"layer_decay: the learning rate of {name_of_block(blocks[first])} is "
            f"{options.layer_decay ** (head - first):.3g} times that of "
            f"{name_of_block(blocks[-1])}, {counted(head - first, 'block')} behind it"
        )
    return [options.layer_decay ** (head - depth) for depth in trained]


def _required(options: UpdateOptions) -> list[str]:
    """Returns the options that the optimizer must support, because the user gave them."""
    default = UpdateOptions()
    return [
        name
        for name in ("momentum", "weight_decay")
        if getattr(options, name) not in (0, getattr(default, name))
    ]


def _rate_factors(options: UpdateOptions, model: keras.Model, roles: Sequence[Role]) -> list[float]:
    """Returns the learning rate of each trainable variable as a multiple of the schedule's."""
    head = None
    if options.muon_head_rate_factor != 1:
        head = models.head(network_of(model))
        if head is None:
            raise UserError("muon_head_rate_factor: the last layer of this network is not dense")

    biases = {"all": (Role.BIAS, Role.SHIFT), "batch_norm": (Role.SHIFT,)}

    def factor(variable: tf.Variable, role: Role) -> float:
        if role in biases[options.bias_rate_factor_on]:
            return options.bias_rate_factor
        return options.muon_head_rate_factor if head and variable is head.kernel else 1.0

    return [factor(variable, role) for variable, role in zip(model.trainable_variables, roles)]


def _zero_rate_at(
    options: UpdateOptions, model: keras.Model, steps_per_epoch: int, every: int
) -> list[int]:
    """Returns the update at which each variable's own learning rate is 0; 0: it has none."""
    steps = options.whitening_bias_until.steps(steps_per_epoch, options.batch_size)
    end = math.ceil(steps / every)
    biases = {id(layer.bias) for layer in layers_in(model) if isinstance(layer, PatchWhitening)}
    return [end if id(variable) in biases else 0 for variable in model.trainable_variables]


def filters_of(model: keras.Model) -> list[bool]:
    """Returns which trainable variables are filters of full (not depthwise) convolutions."""
    layers = layers_in(model)
    depthwise = {id(getattr(layer, "depthwise_kernel", None)) for layer in layers}
    depthwise |= {  # in Keras 3
        id(getattr(layer, "kernel", None))
        for layer in layers
        if isinstance(layer, keras.layers.DepthwiseConv2D)
    }
    return [
        len(variable.shape) == 4 and id(variable) not in depthwise
        for variable in model.trainable_variables
    ]
