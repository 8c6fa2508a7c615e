"""Comparison of replicas that run a lowered step with one device that gets all their images."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import layers_in, tensorflow_variables
from imagenet_fast.config import Config
from imagenet_fast.data.options import DataOptions
from imagenet_fast.distribute.batch_norm_groups import batch_norm_group_size, ghost_batch_size
from imagenet_fast.lab.xla_compile.lower import LoweredStep, variables_of
from imagenet_fast.layers.dropout import Dropout
from imagenet_fast.optimizers.slots import variables_of as optimizer_variables
from imagenet_fast.training.build.model import build_model
from imagenet_fast.training.step.classifier import Classifier

# Each replica has a thread here, and waits for the others.
MAX_REPLICAS = 64
# The largest difference, relative to the change of the weights.
_TOLERANCES = {"float32": 1e-4, "mixed_bfloat16": 0.05, "mixed_float16": 0.05}
# Rounding error of float32, relative to the weights.
_ROUNDING = 1e-6
# The largest rounding error relative to the change of the weights: a smaller change says nothing.
_MAX_ROUNDING = 0.1


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between the replicas' variables of one kind and the reference's.

    Attributes:
      kind: ``weights``, ``optimizer`` or ``metrics``.
      most: largest difference of a number, over all replicas.
      share: norm of the difference, of the worst replica, divided by the norm of the reference's
        change.
      allowed: the largest ``share`` that rounding explains.
      spread: largest difference of a number between two replicas.
      moved: norm of the reference's change, divided by the norm of its initial values.
    """

    kind: str
    most: float
    share: float
    allowed: float
    spread: float
    moved: float = math.inf

    @property
    def wrong(self) -> str:
        """Why the comparison failed or is meaningless; empty if it succeeded."""
        if self.kind == "weights" and self.moved * _MAX_ROUNDING < _ROUNDING:
            return (
                f"the reference's weights changed by only {self.moved:.1g} of their norm, too "
                "little to compare; take more steps, or use a higher initial learning rate "
                "(--warmup, --warmup_start)"
            )
        return "" if self.share <= self.allowed else f"more than rounding, {self.allowed:.1g}"


def require_comparable(config: Config, model: Classifier, replicas: int) -> None:
    """Checks that one device can run the same steps.

    Raises:
      UserError: if it cannot.
    """
    if replicas > MAX_REPLICAS:
        raise UserError(
            f"run_on_cpu supports up to {MAX_REPLICAS} replicas, not {replicas:,}: use a smaller "
            "topology"
        )
    if any(isinstance(layer, Dropout) and layer.rate for layer in layers_in(model)):
        raise UserError(
            "run_on_cpu compares with one device, whose dropout masks differ: use --dropout=0"
        )
    if model.mixer is not None:
        raise UserError(
            "run_on_cpu compares with one device, which mixes other pairs of images: leave out "
            "mixup_alpha and cutmix_alpha"
        )


@dataclasses.dataclass(frozen=True)
class Batches:
    """Random images for several steps.

    Attributes:
      images: uint8 [steps, replicas, batch, height, width, 3].
      labels: int32 [steps, replicas, batch].
    """

    images: np.ndarray
    labels: np.ndarray

    @classmethod
    def random(cls, options: DataOptions, replicas: int, steps: int, classes: int) -> Batches:
        """Returns batches that are a function of ``options.seed``."""
        random = np.random.default_rng(options.seed)
        shape = (steps, replicas, options.batch_size // replicas)
        size = (options.image_size, options.image_size, 3)
        return cls(
            random.integers(0, 256, (*shape, *size), np.uint8),
            random.integers(0, classes, shape, np.int32),
        )


@dataclasses.dataclass(frozen=True)
class Reference:
    """The variables of one device after the same steps with the images of all replicas.

    Attributes:
      values: of the variables, by references to those of the replicas' model.
      kinds: ``weights``, ``optimizer`` or ``metrics``, by the same references.
    """

    values: Mapping[object, np.ndarray]
    kinds: Mapping[object, str]


def write_inputs(
    path: pathlib.Path, step: LoweredStep, batches: Batches, reference: Reference
) -> None:
    """Writes the replicas' inputs and the expected results for the worker.

    Args:
      path: of a NumPy archive. ``batch_N`` has the values of parameter N in each step and replica,
        ``value_N`` its initial value, and ``expected_N`` its expected final value.
      step: that the replicas run.
      batches: of the steps.
      reference: the expected results.
    """
    given = {
        "images": batches.images,
        "labels": batches.labels,
        "weights": np.ones(batches.labels.shape, np.float32),
    }
    arrays: dict[str, Any] = {}
    for number, argument in enumerate(step.arguments):
        if isinstance(argument, str):
            arrays[f"batch_{number}"] = given[argument]
        elif isinstance(argument, tf.Variable):
            arrays[f"value_{number}"] = argument.numpy()
            if argument.ref() in reference.values:
                arrays[f"expected_{number}"] = reference.values[argument.ref()]
        else:
            arrays[f"value_{number}"] = argument
    np.savez(path, **arrays)


def take_reference_steps(config: Config, model: Classifier, batches: Batches) -> Reference:
    """Runs the steps on one device, with TensorFlow's operations.

    The replicas' model gives the initial weights.
    """
    steps, replicas, images = batches.labels.shape
    micro = images // config.accumulation_steps
    group = batch_norm_group_size(config.batch_norm_batch_size, micro, replicas)
    parts = micro // (ghost_batch_size(config.batch_norm_batch_size, micro) or micro)
    device = tf.distribute.OneDeviceStrategy("/CPU:0")
    alone = build_model(
        config.replace(
            strategy="one_device",
            # Statistics over the same images, as groups of one device's images.
            batch_norm_batch_size=group * micro // parts,
            all_reduce="auto",
            all_reduce_group=0,
            all_reduce_dtype="float32",
            fusion_segments=(),
        ),
        device,
    )
    alone.make_slots()
    ours, theirs = variables_of(alone), variables_of(model)
    for variable, other in zip(ours, theirs):
        variable.assign(other.numpy())

    @tf.function(autograph=False)
    def step(*batch: tf.Tensor) -> Mapping[str, tf.Tensor]:
        return device.run(alone.train_step, args=(batch,))

    order = reference_order(replicas, images, config.accumulation_steps, group, parts)
    for number in range(steps):
        pixels = batches.images[number].reshape(-1, *batches.images.shape[3:])[order]
        step(
            tf.constant(pixels),
            tf.constant(batches.labels[number].reshape(-1)[order]),
            tf.ones([len(order)]),
        )
    weights = tensorflow_variables(model.trainable_variables)
    kinds = {variable.ref(): "weights" for variable in weights}
    slots = optimizer_variables(model.optimizer)
    kinds.update({slot.ref(): "optimizer" for slot in slots if slot.dtype.is_floating})
    kinds[model.metric_sums.variable.ref()] = "metrics"
    values = {
        other.ref(): variable.numpy()
        for variable, other in zip(ours, theirs)
        if other.ref() in kinds
    }
    return Reference(values, kinds)


def reference_order(
    replicas: int, images: int, accumulation_steps: int, group: int, parts: int
) -> np.ndarray:
    """Returns the order in which one device gets the images of all replicas.

    Each of its micro-batches has the images of the replicas' micro-batches. Ghost batch norm puts
    image n of them into group n modulo the number of groups.

    Args:
      replicas: their number.
      images: of a replica.
      accumulation_steps: micro-batches of a step.
      group: replicas that share batch-norm statistics.
      parts: batch-norm groups in a replica's micro-batch; 1 if replicas share statistics.

    Returns:
      The indices of the images, which are numbered replica by replica.
    """
    micro = images // accumulation_steps
    places = np.arange(replicas * images).reshape(replicas, accumulation_steps, micro)
    return np.concatenate(
        [
            part.reshape(replicas // group, group * micro // parts, parts)
            .transpose(1, 0, 2)
            .reshape(-1)
            for part in places.transpose(1, 0, 2)
        ]
    )


def differences(
    config: Config,
    step: LoweredStep,
    reference: Reference,
    found: Mapping[str, Mapping[str, float]],
) -> list[Difference]:
    """Returns the differences between the replicas and the reference.

    Args:
      config: options of the run.
      step: that the replicas ran.
      reference: the expected results.
      found: the worker's answer: by parameter number, ``most``, ``spread`` and the squared norms
        ``difference``, ``way`` (of the reference's change) and ``start``.
    """
    by_kind: dict[str, list[Mapping[str, float]]] = {}
    for number, result in found.items():
        kind = reference.kinds[step.arguments[int(number)].ref()]
        by_kind.setdefault(kind, []).append(result)
    tolerance = _TOLERANCES[config.precision]
    if config.all_reduce_dtype != "float32":
        tolerance = max(tolerance, _TOLERANCES[f"mixed_{config.all_reduce_dtype}"])
    if config.optimizer == "muon":  # which multiplies matrices in bfloat16
        tolerance = max(tolerance, _TOLERANCES["mixed_bfloat16"])
    distances = []
    for kind, results in by_kind.items():
        length = {
            name: math.sqrt(sum(result[name] for result in results))
            for name in ("difference", "way", "start")
        }
        way = length["way"] or math.inf
        distances.append(
            Difference(
                kind,
                max(result["most"] for result in results),
                length["difference"] / way,
                tolerance + _ROUNDING * length["start"] / way,
                max(result["spread"] for result in results),
                length["way"] / length["start"] if length["start"] else math.inf,
            )
        )
    return distances
