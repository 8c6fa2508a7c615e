"""One update of a model's variables: this package's optimizers against other ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import tensorflow as tf
import tf_keras as keras

from imagenet_fast import models
from imagenet_fast.benchmarks.optimizer.model_garden import start_lars
from imagenet_fast.benchmarks.timing import Comparison, take_turns, timed
from imagenet_fast.optimizers import LARS, SGD, Role, variable_roles

_RATE, _MOMENTUM, _DECAY = 0.1, 0.9, 1e-4


def compare_optimizers(
    model: str, *, warmup: int, repeats: int, model_garden: str = ""
) -> Comparison:
    """Times one update of all trainable variables by each optimizer, in turns.

    The variables are float32, on one device, with 1000 classes at 224 px; each optimizer has its
    own. The gradients are given, and the update is a ``tf.function``. What is compared is the time
    alone: Keras' SGD decays nothing.

    Args:
      model: a name in ``imagenet_fast.models.MODEL_NAMES``.
      warmup: untimed updates by each at first.
      repeats: timed updates by each.
      model_garden: an environment with Model Garden, as ``tools/model_garden.sh`` makes it; empty:
        leave Model Garden's LARS out.

    Raises:
      UserError: if there is no such model, or Model Garden cannot be used.
    """
    network = models.build(model, 1000, (224, 224, 3))
    variables, roles = network.trainable_variables, variable_roles(network)
    shapes = [variable.shape.as_list() for variable in variables]
    weights = [role is Role.WEIGHT for role in roles]
    decayed = [role in (Role.WEIGHT, Role.BIAS) for role in roles]
    gradients = _normal(shapes, 0.01)
    optimizers = {
        "imagenet_fast LARS": LARS(
            _RATE, _MOMENTUM, weight_decay=_DECAY, weight_decay_mask=weights, trust_mask=weights
        ),
        "imagenet_fast SGD": SGD(_RATE, _MOMENTUM, weight_decay=_DECAY, weight_decay_mask=decayed),
        "Keras legacy SGD": keras.optimizers.legacy.SGD(_RATE, _MOMENTUM),
        "Keras SGD": keras.optimizers.SGD(_RATE, momentum=_MOMENTUM),
    }
    calls = {name: timed(_updater(own, variables, gradients)) for name, own in optimizers.items()}
    with contextlib.ExitStack() as stack:
        if model_garden:
            options = {
                "learning_rate": _RATE,
                "momentum": _MOMENTUM,
                "weight_decay_rate": _DECAY,
            }
            theirs = stack.enter_context(start_lars(model_garden, shapes, weights, options))
            calls["Model Garden LARS"] = theirs.update
            garden = (
                f"Model Garden {theirs.versions['tf-models-official']}: in a process of its own, "
                f"with TensorFlow {theirs.versions['tensorflow']}, that takes its own time."
            )
        else:
            garden = "Model Garden's LARS is left out: --model_garden was not given."
        times = take_turns(list(calls.values()), warmup=warmup, repeats=repeats)
    count = sum(map(math.prod, shapes))
    title = f"{model}, one update: {len(shapes)} variables, {count:,} parameters, float32"
    notes = (
        "LARS: trust and decay on weights alone. imagenet_fast SGD: decay on weights and biases. "
        "Keras: no decay. All: momentum.",
        garden,
    )
    return Comparison(title, notes, tuple(calls), times)


def _normal(shapes: Sequence[Sequence[int]], deviation: float) -> list[tf.Tensor]:
    return [
        tf.random.stateless_normal(shape, (0, index), stddev=deviation)
        for index, shape in enumerate(shapes)
    ]


def _updater(
    optimizer: keras.optimizers.Optimizer | keras.optimizers.legacy.Optimizer,
    start: Sequence[tf.Variable],
    gradients: Sequence[tf.Tensor],
) -> Callable[[], None]:
    """Returns what updates copies of the variables and returns when that is done."""
    variables = [tf.Variable(variable) for variable in start]

    @tf.function
    def apply() -> None:
        optimizer.apply_gradients(zip(gradients, variables))

    def update() -> None:
        apply()
        tf.test.experimental.sync_devices()

    return update
