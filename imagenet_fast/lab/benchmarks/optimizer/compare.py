"""A benchmark of one optimizer update of all of a model's variables."""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast import models
from imagenet_fast.base.keras_2 import new_variable
from imagenet_fast.base.paths import to_local_path
from imagenet_fast.base.worker_process import Worker, start_worker
from imagenet_fast.lab.benchmarks.timing import Comparison, time_interleaved, timed
from imagenet_fast.optimizers import LARS, SGD, Role, variable_roles

_WORKER = pathlib.Path(__file__).with_name("model_garden_worker.py")
_LEARNING_RATE, _MOMENTUM, _DECAY = 0.1, 0.9, 1e-4


def compare_optimizers(
    model: str, *, warmup: int, repeats: int, model_garden: str = ""
) -> Comparison:
    """Times interleaved updates of all trainable variables by each optimizer.

    The variables are float32, on one device, of a model for 1000 classes at 224 px; each optimizer
    has its own copy. The gradients are constants, and the update is a ``tf.function``. Only the
    time is comparable: Keras' SGD does not decay weights.

    Args:
      model: a name in ``imagenet_fast.models.MODEL_NAMES``.
      warmup: untimed updates by each at the start.
      repeats: timed updates by each.
      model_garden: an environment with Model Garden, made by ``tools/model_garden.sh``; empty:
        without Model Garden's LARS.

    Raises:
      UserError: if there is no such model, or Model Garden cannot be used.
    """
    network = models.build(model, 1000, (224, 224, 3))
    variables, roles = network.trainable_variables, variable_roles(network)
    shapes = [list(variable.shape) for variable in variables]
    weights = [role is Role.WEIGHT for role in roles]
    decayed = [role in (Role.WEIGHT, Role.BIAS) for role in roles]
    gradients = _normal(shapes, 0.01)
    optimizers = {
        "imagenet_fast LARS": LARS(
            _LEARNING_RATE,
            _MOMENTUM,
            weight_decay=_DECAY,
            weight_decay_mask=weights,
            trust_mask=weights,
        ),
        "imagenet_fast SGD": SGD(
            _LEARNING_RATE, _MOMENTUM, weight_decay=_DECAY, weight_decay_mask=decayed
        ),
        "Keras SGD": keras.optimizers.SGD(_LEARNING_RATE, momentum=_MOMENTUM),
    }
    calls = {
        name: timed(_updater(optimizer, variables, gradients))
        for name, optimizer in optimizers.items()
    }
    with contextlib.ExitStack() as stack:
        if model_garden:
            options = {
                "learning_rate": _LEARNING_RATE,
                "momentum": _MOMENTUM,
                "weight_decay_rate": _DECAY,
            }
            worker = stack.enter_context(start_lars(model_garden, shapes, weights, options))
            calls["Model Garden LARS"] = lambda: tuple(worker.ask("update"))
            garden = (
                f"Model Garden {worker.answer['tf-models-official']}: in a separate process with "
                f"TensorFlow {worker.answer['tensorflow']}, which measures its own time."
            )
        else:
            garden = "Without Model Garden's LARS: --model_garden was not given."
        times = time_interleaved(list(calls.values()), warmup=warmup, repeats=repeats)
    count = sum(map(math.prod, shapes))
    title = f"{model}, one update: {len(shapes)} variables, {count:,} parameters, float32"
    notes = (
        "LARS: trust ratio and weight decay on weights only. imagenet_fast SGD: weight decay on "
        "weights and biases. Keras: no weight decay. All: momentum.",
        garden,
    )
    return Comparison(title, notes, tuple(calls), times)


def start_lars(
    directory: str,
    shapes: Sequence[Sequence[int]],
    weights: Sequence[bool],
    options: dict[str, Any],
) -> contextlib.AbstractContextManager[Worker]:
    """Starts a process that updates variables with Model Garden's LARS.

    ``tf-models-official`` requires a certain TensorFlow version and 27 other packages, so it runs
    in a separate environment.

    Args:
      directory: a virtual environment with ``tf-models-official``, TensorFlow and Keras 2, made
        by ``tools/model_garden.sh``.
      shapes: of the variables.
      weights: whether each variable has weight decay and a trust ratio.
      options: other arguments of Model Garden's LARS.

    Returns:
      The process, which answers each line with the seconds and CPU seconds of an update.

    Raises:
      UserError: if a package is missing in the environment.
    """
    python = to_local_path(directory, "model_garden") / "bin" / "python"
    return start_worker(
        # -I: modules beside the worker's file must not shadow packages.
        [str(python), "-I", str(_WORKER)],
        {"shapes": list(shapes), "weights": list(weights), "options": options},
        name="Model Garden's LARS",
        advice="tools/model_garden.sh DIRECTORY creates a working environment",
    )


def _normal(shapes: Sequence[Sequence[int]], deviation: float) -> list[tf.Tensor]:
    return [
        tf.random.stateless_normal(shape, (0, index), stddev=deviation)
        for index, shape in enumerate(shapes)
    ]


def _updater(
    optimizer: keras.optimizers.Optimizer,
    start: Sequence[Any],
    gradients: Sequence[tf.Tensor],
) -> Callable[[], None]:
    """Returns a function that updates copies of the variables and waits until that is done."""
    variables = [new_variable(tf.convert_to_tensor(variable)) for variable in start]
    optimizer.build(variables)

    @tf.function
    def apply() -> None:
        optimizer.apply_gradients(zip(gradients, variables))

    def update() -> None:
        apply()
        tf.test.experimental.sync_devices()

    return update
