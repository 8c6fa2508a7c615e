"""How long a replica computes on a training step: the roofline of each of its operations."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

from imagenet_fast.cost_model.accelerators import Accelerator


class Operation(NamedTuple):
    """What one operation of a step computes and moves.

    Attributes:
      layer: to which it belongs; empty: to none, as the loss.
      kind: ``"matrix"``: a convolution or a product; ``"normalization"``: batch norm; ``"pool"``;
        ``"other"``: all that works value by value, or only moves them.
      backward: whether it belongs to the backward pass.
      flops: that it computes, two for a multiplication and an addition.
      rows: of the matrix that a matrix operation multiplies its weights with: positions of a filter
        in all images, or images; 0 of others.
      bytes: of memory that it reads and writes on its own.
      fused_bytes: of these, what a compiler leaves that computes value by value on the way from one
        matrix operation to another.
    """

    layer: str
    kind: str
    backward: bool
    flops: float
    rows: int
    bytes: float
    fused_bytes: float


class Gradient(NamedTuple):
    """The gradient of a trained variable.

    Attributes:
      layer: to which the variable belongs.
      elements: how many it has.
    """

    layer: str
    elements: int


@dataclasses.dataclass(frozen=True)
class StepWork:
    """A step of a replica, without its sum over replicas.

    Attributes:
      images: in each of its micro-batches.
      micro_batches: whose gradients it adds up.
      operations: of a micro-batch, in their order.
      gradients: in the order in which the variables were made.
      statistics: channels of each batch norm.
      kept_bytes: of a micro-batch, what the backward pass needs of the forward pass.
      fused_kept_bytes: of these, what is left where values are computed once more that follow from
        one kept tensor, value by value.
      unpadded_flops: of both passes of a micro-batch, without multiplications by the zeros around
        images: as XLA counts.
      precision: the policy of mixed precision.
      slots: float32 values that the optimizer keeps of each trained one.
    """

    images: int
    micro_batches: int
    operations: tuple[Operation, ...]
    gradients: tuple[Gradient, ...]
    statistics: tuple[int, ...]
    kept_bytes: float
    fused_kept_bytes: float
    unpadded_flops: float
    precision: str
    slots: float

    @property
    def all_images(self) -> int:
        """Of all micro-batches."""
        return self.images * self.micro_batches

    @property
    def flops(self) -> float:
        """Of both passes of all micro-batches."""
        return self.micro_batches * sum(own.flops for own in self.operations)

    @property
    def parameters(self) -> int:
        """How many are trained."""
        return sum(own.elements for own in self.gradients)

    def memory(self, fuses: bool) -> float:
        """Returns the bytes of a replica's weights, gradients and slots, and of what passes keep.

        Not counted is what operations need while they run.

        Args:
          fuses: whether values are computed on the way from one matrix operation to another.
        """
        kept = self.fused_kept_bytes if fuses else self.kept_bytes
        return 4 * self.parameters * (2 + self.slots) + kept


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The shares of what a chip could do that software reaches.

    Attributes:
      matrix: of the peak, in convolutions and products of matrices of many rows.
      half_rows: the number of rows with which they reach half of ``matrix``.
      memory: of the memory's bandwidth.
      fuses: whether values are computed on the way from one matrix operation to another.
      launch_seconds: that an operation takes at least.
    """

    matrix: float
    half_rows: float
    memory: float
    fuses: bool
    launch_seconds: float


@dataclasses.dataclass(frozen=True)
class ComputeTime:
    """Seconds of a replica's step.

    Attributes:
      forward: of the forward pass, of all micro-batches.
      backward: the same backward.
      update: of the optimizer.
      by_kind: of both passes, by the kinds of operations.
      known: when each gradient is known, from when the last micro-batch's backward pass began.
    """

    forward: float
    backward: float
    update: float
    by_kind: dict[str, float]
    known: tuple[float, ...]

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.update


def compute_time(step: StepWork, accelerator: Accelerator, efficiency: Efficiency) -> ComputeTime:
    """Returns how long a replica computes on its step.

    Each operation takes the longer of its arithmetic and its traffic with the memory (Williams et
    al. 2009, "Roofline"), and operations follow each other.

    Args:
      step: what there is to compute.
      accelerator: of whose cores the replica has one.
      efficiency: of its software.

    Raises:
      UserError: if the accelerator cannot compute in the step's precision.
    """
    pairs = [
        (own, operation_seconds(own, step.precision, accelerator, efficiency))
        for own in step.operations
    ]
    by_kind: dict[str, float] = {}
    for own, seconds in pairs:
        by_kind[own.kind] = by_kind.get(own.kind, 0.0) + step.micro_batches * seconds
    backward = [(own.layer, seconds) for own, seconds in pairs if own.backward]
    ends = list(itertools.accumulate(seconds for _, seconds in backward))
    done = dict(zip((layer for layer, _ in backward), ends))
    # Each weight and each slot is read and written, and the gradient read.
    moved = 4 * step.parameters * (2 + 1 + 2 * step.slots)
    return ComputeTime(
        forward=step.micro_batches * sum(seconds for own, seconds in pairs if not own.backward),
        backward=step.micro_batches * ends[-1],
        update=moved / (accelerator.core_bandwidth * efficiency.memory),
        by_kind=by_kind,
        known=tuple(done.get(own.layer, ends[-1]) for own in step.gradients),
    )


def operation_seconds(
    own: Operation, precision: str, accelerator: Accelerator, efficiency: Efficiency
) -> float:
    """Returns how long an operation takes on a core.

    Args:
      own: the operation.
      precision: the policy of mixed precision.
      accelerator: whose core.
      efficiency: of the software.

    Raises:
      UserError: if the accelerator cannot compute in this precision.
    """
    moved = own.fused_bytes if efficiency.fuses else own.bytes
    seconds = moved / (efficiency.memory * accelerator.core_bandwidth)
    if own.kind == "matrix":
        reached = efficiency.matrix * own.rows / (own.rows + efficiency.half_rows)
        seconds = max(seconds, own.flops / (reached * accelerator.core_flops(precision)))
    # What is fused into another operation is not launched.
    return max(seconds, efficiency.launch_seconds) if moved else 0.0
