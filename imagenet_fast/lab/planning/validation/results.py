"""The kinds of published numbers, and of the runs that they are of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

IMAGENET = 1_281_167
CIFAR = 50_000

# A host's network in Gbit/s, where a source does not give it.
NETWORK_GBITS = 100.0
_SECONDS = {"hours": 3600, "minutes": 60, "seconds": 1}

Options = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """A data-parallel run.

    Attributes:
      network: options of ``Config`` for the model and its precision.
      accelerator: the kind of chip.
      chips: their number.
      batch: images of all replicas together in a step.
      all_reduce: algorithm of the gradient all-reduce.
      gradient_bytes: of each gradient value on the wire.
      segments: the gradients after which a new all-reduce begins; None: the best ones by the cost
        model.
      batch_norm_batch: images that share batch-norm statistics; 0: those of a replica.
      network_gbits: bandwidth of a host's network in Gbit/s.
    """

    network: Options
    accelerator: str
    chips: int
    batch: int
    all_reduce: str = "builtin"
    gradient_bytes: int = 4
    segments: tuple[int, ...] | None = None
    batch_norm_batch: int = 0
    network_gbits: float = NETWORK_GBITS


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """A pipeline with one stage on each chip.

    Attributes:
      network: see :class:`DataParallel`.
      accelerator: the kind of chip.
      batch: images in a step.
      micro_batches: into which the batch is split.
      stages: their number.
      balance: blocks in each stage; the last stage also gets all remaining ones. Empty: lingvo's
        balance.
      rematerialize: micro-batches whose activations are recomputed.
    """

    network: Options
    accelerator: str
    batch: int
    micro_batches: int
    stages: int
    balance: tuple[int, ...] = ()
    rematerialize: str = "except_last"

    @property
    def chips(self) -> int:
        """The number of chips."""
        return self.stages


@dataclasses.dataclass(frozen=True)
class PublishedResult:
    """A published number.

    Attributes:
      name: describes the run.
      source: who published it, and where.
      stack: the software, a key of ``STACKS``.
      run: the configuration.
      value: the number.
      unit: ``"images/s"``; ``"hours"``, ``"minutes"`` or ``"seconds"`` for ``epochs``; ``"times"``:
        the throughput relative to the run ``to``; ``"scaling"``: the same per chip.
      epochs: of the run.
      examples: in an epoch.
      to: the run that the number is relative to.
      fits: whether the stack's constants were fitted to it.
      why: why the model's prediction is wrong, where it is.
    """

    name: str
    source: str
    stack: str
    run: DataParallel | Pipelined
    value: float
    unit: str = "images/s"
    epochs: float = 0.0
    examples: int = IMAGENET
    to: DataParallel | Pipelined | None = None
    fits: bool = False
    why: str = ""

    @property
    def relative(self) -> bool:
        """Whether the number is relative to another run's."""
        return self.to is not None

    @property
    def images_per_second(self) -> float:
        """The published throughput; not for rows that are relative to others."""
        if self.unit == "images/s":
            return self.value
        return self.epochs * self.examples / (self.value * _SECONDS[self.unit])

    def in_unit(self, images_per_second: float, to: float = 1.0) -> float:
        """Converts a throughput into the row's unit.

        Args:
          images_per_second: of the run.
          to: images/s of the run that the number is relative to.
        """
        if self.unit == "images/s":
            return images_per_second
        if self.unit == "times":
            return images_per_second / to
        if self.unit == "scaling":
            assert self.to
            return images_per_second / to * self.to.chips / self.run.chips
        return self.epochs * self.examples / images_per_second / _SECONDS[self.unit]
