"""Whether replicas that run a lowered step end with the weights of one device with all images."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.distribute.batch_norm_groups import batch_norm_group_size, ghost_batch_size
from imagenet_fast.layers.dropout import Dropout
from imagenet_fast.training.build import build_model
from imagenet_fast.training.classifier import Classifier
from imagenet_fast.xla_compile.lower import LoweredStep, variables_of

# Each has a thread of its own here, and waits for the others.
MOST_REPLICAS = 64
# The most that may come between the two, as a fraction of the way that the weights went.
_TOLERANCES = {"float32": 1e-4, "mixed_bfloat16": 0.05, "mixed_float16": 0.05}
# Rounding of float32, as a fraction of the weights: what they moved may be little beside it.
_ROUNDING = 1e-6
# The most of the weights' way that this may be: of less way there is nothing to compare.
_MOST_ROUNDING = 0.1


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far the replicas' variables of one kind are from the reference's.

    Attributes:
      kind: ``weights``, ``optimizer`` or ``metrics``.
      most: greatest difference of a number, over all replicas.
      share: length of the difference, of the replica farthest off, by the length of the way that
        the reference went.
      allowed: the greatest such share that rounding explains.
      spread: greatest difference of a number between two replicas.
      moved: length of the reference's way, by the length of what it began with.
    """

    kind: str
    most: float
    share: float
    allowed: float
    spread: float
    moved: float = math.inf

    @property
    def wrong(self) -> str:
        """What is more than rounding explains, or why nothing can be told; else nothing."""
        if self.kind == "weights" and self.moved * _MOST_ROUNDING < _ROUNDING:
            return (
                f"the reference moved by only {self.moved:.1g} of its length, so that nothing is "
                "compared; take more steps, or a higher learning rate from the first step on "
                "(--warmup, --warmup_start)"
            )
        return "" if self.share <= self.allowed else f"more than rounding, {self.allowed:.1g}"


def require_comparable(config: Config, model: Classifier, replicas: int) -> None:
    """Checks that one device can take the same steps.

    Raises:
      UserError: if it cannot.
    """
    if replicas > MOST_REPLICAS:
        raise UserError(
            f"run_on_cpu is for up to {MOST_REPLICAS} replicas, not for {replicas:,}: use a "
            "smaller topology"
        )
    if any(isinstance(layer, Dropout) and layer.rate for layer in model.submodules):
        raise UserError(
            "run_on_cpu compares with one device, whose dropout draws other noise: use --dropout=0"
        )
    if model.mixer is not None:
        raise UserError(
            "run_on_cpu compares with one device, which mixes each image with another one: leave "
            "out mixup_alpha and cutmix_alpha"
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
    def random(cls, config: Config, replicas: int, steps: int, classes: int) -> Batches:
        """Returns batches that are a function of ``config.seed``."""
        random = np.random.default_rng(config.seed)
        shape = (steps, replicas, config.batch_size // replicas)
        size = (config.image_size, config.image_size, 3)
        return cls(
            random.integers(0, 256, (*shape, *size), np.uint8),
            random.integers(0, classes, shape, np.int32),
        )


@dataclasses.dataclass(frozen=True)
class Reference:
    """One device after the same steps, with the images of all replicas in each.

    Attributes:
      values: of its variables, by those of the replicas' model that they belong to.
      kinds: what each of these is: ``weights``, ``optimizer`` or ``metrics``.
    """

    values: Mapping[object, np.ndarray]
    kinds: Mapping[object, str]


def write_inputs(
    path: pathlib.Path, step: LoweredStep, batches: Batches, reference: Reference
) -> None:
    """Writes what the replicas start with, and what they are compared with, for the worker.

    Args:
      path: of a NumPy archive. ``batch_N`` is what parameter N is in each step and replica,
        ``value_N`` what it is at first, and ``expected_N`` what it should be at last.
      step: that they take.
      batches: that they take it on.
      reference: with which they are compared.
    """
    given = {
        "images": batches.images,
        "labels": batches.labels,
        "weights": np.ones(batches.labels.shape, np.float32),
    }
    arrays: dict[str, Any] = {}
    for number, own in enumerate(step.arguments):
        if isinstance(own, str):
            arrays[f"batch_{number}"] = given[own]
        elif isinstance(own, tf.Variable):
            arrays[f"value_{number}"] = own.numpy()
            if own.ref() in reference.values:
                arrays[f"expected_{number}"] = reference.values[own.ref()]
        else:
            arrays[f"value_{number}"] = own
    np.savez(path, **arrays)


def take_reference_steps(config: Config, model: Classifier, batches: Batches) -> Reference:
    """Takes the steps on one device, by TensorFlow's own operations.

    Args:
      config: of the replicas.
      model: theirs, with whose weights it begins.
      batches: of the steps.
    """
    steps, replicas, images = batches.labels.shape
    micro = images // config.accumulation_steps
    group = batch_norm_group_size(config.batch_norm_batch_size, micro, replicas)
    parts = micro // (ghost_batch_size(config.batch_norm_batch_size, micro) or micro)
    device = tf.distribute.OneDeviceStrategy("/CPU:0")
    alone = build_model(
        config.replace(
            strategy="one_device",
            # Statistics over the same images, in parts of one device's.
            batch_norm_batch_size=group * micro // parts,
            all_reduce="auto",
            all_reduce_group=0,
            all_reduce_dtype="float32",
            fusion_segments=(),
        ),
        device,
    )
    alone.make_slots()
    own, theirs = variables_of(alone), variables_of(model)
    for variable, other in zip(own, theirs):
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
    kinds = {variable.ref(): "weights" for variable in model.trainable_variables}
    slots = model.optimizer.variables()
    kinds.update({slot.ref(): "optimizer" for slot in slots if slot.dtype.is_floating})
    kinds[model.metric_sums.variable.ref()] = "metrics"
    values = {
        other.ref(): variable.numpy()
        for variable, other in zip(own, theirs)
        if other.ref() in kinds
    }
    return Reference(values, kinds)


def reference_order(
    replicas: int, images: int, accumulation_steps: int, group: int, parts: int
) -> np.ndarray:
    """Returns in which order one device gets the images of all replicas.

    Each of its micro-batches has those that the replicas have in theirs. Of these, ghost batch norm
    takes image n for group n modulo their number.

    Args:
      replicas: in all.
      images: of a replica.
      accumulation_steps: micro-batches of a step.
      group: replicas whose batch norm takes statistics together.
      parts: into which batch norm splits a micro-batch of a replica; 1 where it takes several.

    Returns:
      The places of the images among all, replica by replica.
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
    """Returns how far the replicas are from the reference.

    Args:
      config: of the run.
      step: that was taken.
      reference: with which the worker compared.
      found: its answer: by the number of each parameter ``most``, ``spread`` and the squared
        lengths ``difference``, ``way`` and ``start``.
    """
    by_kind: dict[str, list[Mapping[str, float]]] = {}
    for number, own in found.items():
        kind = reference.kinds[step.arguments[int(number)].ref()]
        by_kind.setdefault(kind, []).append(own)
    tolerance = _TOLERANCES[config.precision]
    if config.all_reduce_dtype != "float32":
        tolerance = max(tolerance, _TOLERANCES[f"mixed_{config.all_reduce_dtype}"])
    if config.optimizer == "muon":  # which multiplies matrices in bfloat16
        tolerance = max(tolerance, _TOLERANCES["mixed_bfloat16"])
    result = []
    for kind, several in by_kind.items():
        length = {
            name: math.sqrt(sum(own[name] for own in several))
            for name in ("difference", "way", "start")
        }
        way = length["way"] or math.inf
        result.append(
            Difference(
                kind,
                max(own["most"] for own in several),
                length["difference"] / way,
                tolerance + _ROUNDING * length["start"] / way,
                max(own["spread"] for own in several),
                length["way"] / length["start"] if length["start"] else math.inf,
            )
        )
    return result
