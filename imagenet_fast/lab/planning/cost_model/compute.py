"""A roofline model of a replica's compute time in a training step."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from imagenet_fast.lab.planning.cost_model.accelerators import Accelerator


class Operation(NamedTuple):
    """The arithmetic and the memory traffic of one operation of a step.

    Attributes:
      layer: that it belongs to; empty: none, such as for the loss.
      kind: ``"matrix"``: a convolution or a matrix product; ``"normalization"``: batch norm;
        ``"pool"``; ``"other"``: element-wise operations and copies.
      backward: whether it belongs to the backward pass.
      flops: two for each multiply-add.
      rows: of the matrix that a matrix operation multiplies by its weights: filter positions in all
        images, or images; 0 for other kinds.
      bytes: that it reads and writes if it runs alone.
      fused_bytes: that remain if a compiler fuses element-wise operations with matrix operations.
    """

    layer: str
    kind: str
    backward: bool
    flops: float
    rows: int
    bytes: float
    fused_bytes: float


class Gradient(NamedTuple):
    """The gradient of a trainable variable of a layer, and its number of elements."""

    layer: str
    elements: int


@dataclasses.dataclass(frozen=True)
class StepWork:
    """A replica's work in a step, without the all-reduces.

    Attributes:
      images: in each micro-batch; with a selection, before it.
      micro_batches: whose gradients are accumulated.
      operations: of a micro-batch, in order.
      gradients: in the order in which the variables were created.
      statistics: channels of each batch norm.
      kept_bytes: activations of a micro-batch that are kept for the backward pass.
      fused_kept_bytes: activations that remain if those that follow element-wise from another kept
        tensor are recomputed.
      unpadded_flops: of both passes of a micro-batch, without multiplications by zero padding, as
        XLA counts.
      precision: the precision policy.
      slots: float32 optimizer slots per trainable value.
      selection: operations that select the images to train on, from those of all micro-batches;
        empty: the step trains on all images.
      selection_every: steps in one of which the selection's backward pass runs.
      updates: the optimizer's operations, besides reading and writing weights and slots.
      update_precision: the precision policy of ``updates``.
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
    selection: tuple[Operation, ...] = ()
    selection_every: int = 1
    updates: tuple[Operation, ...] = ()
    update_precision: str = "float32"

    @property
    def all_images(self) -> int:
        """Images of all micro-batches."""
        return self.images * self.micro_batches

    @property
    def flops(self) -> float:
        """FLOPs of both passes of all micro-batches, and the mean of the selection's."""
        return self.micro_batches * sum(operation.flops for operation in self.operations) + sum(
            self.selections(operation) * operation.flops for operation in self.selection
        )

    def selections(self, operation: Operation) -> float:
        """Returns how often a step runs an operation of the selection, on average."""
        return 1 / self.selection_every if operation.backward else 1.0

    @property
    def parameters(self) -> int:
        """The number of trainable parameters."""
        return sum(gradient.elements for gradient in self.gradients)

    def memory(self, fuses: bool) -> float:
        """Returns the bytes of a replica's weights, gradients, slots and kept activations.

        The operations' workspace and what selects images are not included.

        A compiler that ``fuses`` joins element-wise operations with matrix operations.
        """
        kept = self.fused_kept_bytes if fuses else self.kept_bytes
        return 4 * self.parameters * (2 + self.slots) + kept


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The fraction of a chip's peak performance that software achieves.

    Attributes:
      matrix: the fraction of peak FLOP/s in convolutions and matrix products with many rows.
      half_rows: the number of rows at which half of ``matrix`` is achieved.
      memory: the fraction of memory bandwidth.
      fuses: whether the compiler fuses element-wise operations with matrix operations.
      launch_seconds: the shortest duration of an operation.
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
      forward: the forward passes of all micro-batches.
      backward: the backward passes of all micro-batches.
      update: the optimizer's update.
      selection: selecting the images to train on, on average.
      by_kind: of both passes and the selection, for each kind of operation.
      gradients_ready: when each gradient is ready, after the start of the last backward pass.
    """

    forward: float
    backward: float
    update: float
    selection: float
    by_kind: dict[str, float]
    gradients_ready: tuple[float, ...]

    @property
    def total(self) -> float:
        """Seconds of both passes, the update and the selection."""
        return self.forward + self.backward + self.update + self.selection


def compute_time(step: StepWork, accelerator: Accelerator, efficiency: Efficiency) -> ComputeTime:
    """Returns the compute time of a replica's step on one of an accelerator's cores.

    Operations run one after the other. Each takes the longer of its arithmetic and its memory
    traffic (Williams et al. 2009, "Roofline").

    Raises:
      UserError: if the accelerator does not support the step's precision.
    """

    def timed(operations: Iterable[Operation], precision: str) -> list[tuple[Operation, float]]:
        return [
            (operation, operation_seconds(operation, precision, accelerator, efficiency))
            for operation in operations
        ]

    pairs = timed(step.operations, step.precision)
    selection = [
        (operation, step.selections(operation) * seconds)
        for operation, seconds in timed(step.selection, step.precision)
    ]
    by_kind: dict[str, float] = collections.defaultdict(float)
    for operation, seconds in pairs:
        by_kind[operation.kind] += step.micro_batches * seconds
    for operation, seconds in selection:
        by_kind[operation.kind] += seconds
    forward = sum(seconds for operation, seconds in pairs if not operation.backward)
    backward = [(operation.layer, seconds) for operation, seconds in pairs if operation.backward]
    ends = list(itertools.accumulate(seconds for _, seconds in backward))
    end_of_layer = dict(zip((layer for layer, _ in backward), ends))
    # Weights and slots are read and written, gradients are read.
    moved = 4 * step.parameters * (2 + 1 + 2 * step.slots)
    # A chip without bfloat16 computes in float32 instead.
    precision = step.update_precision if step.update_precision in accelerator.flops else "float32"
    return ComputeTime(
        forward=step.micro_batches * forward,
        backward=step.micro_batches * ends[-1],
        update=moved / (accelerator.core_bandwidth * efficiency.memory)
        + sum(seconds for _, seconds in timed(step.updates, precision)),
        selection=sum(seconds for _, seconds in selection),
        by_kind=dict(by_kind),
        gradients_ready=tuple(
            end_of_layer.get(gradient.layer, ends[-1]) for gradient in step.gradients
        ),
    )


def operation_seconds(
    operation: Operation, precision: str, accelerator: Accelerator, efficiency: Efficiency
) -> float:
    """Returns the duration of an operation on a core, under a precision policy.

    Raises:
      UserError: if the accelerator does not support this precision.
    """
    moved = operation.fused_bytes if efficiency.fuses else operation.bytes
    seconds = moved / (efficiency.memory * accelerator.core_bandwidth)
    if operation.kind == "matrix":
        achieved = efficiency.matrix * operation.rows / (operation.rows + efficiency.half_rows)
        seconds = max(seconds, operation.flops / (achieved * accelerator.core_flops(precision)))
    # Fused operations are not launched separately.
    return max(seconds, efficiency.launch_seconds) if moved else 0.0
