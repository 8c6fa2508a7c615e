"""A cost model of a data-parallel training step: its duration and its bottleneck."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from imagenet_fast.base.errors import UserError
from imagenet_fast.lab.planning.cost_model import all_reduce
from imagenet_fast.lab.planning.cost_model.accelerators import Accelerator, accelerator
from imagenet_fast.lab.planning.cost_model.all_reduce import Network
from imagenet_fast.lab.planning.cost_model.compute import (
    ComputeTime,
    Efficiency,
    StepWork,
    compute_time,
)
from imagenet_fast.lab.planning.cost_model.fusion import best_segments, transfers

# Seconds of a message between chips: about 1 us over a TPU link (the scaling book assumes half of
# that for v5e), several microseconds with NCCL.
TORUS_LATENCY = 1e-6
HOST_LATENCY = 5e-6
NETWORK_LATENCY = 10e-6
_GIGA = 1e9
# More than any cluster has.
_MOST_GPUS = 1_000_000
_MOST_GBITS = 100_000
# The builtin all-reduce by whether there is a torus: XLA uses its axes, NCCL a ring.
_BUILTIN = {True: "torus_2d", False: "flat"}


@dataclasses.dataclass(frozen=True)
class ChipCluster:
    """Chips that train together.

    Attributes:
      accelerator: the kind of chip.
      chips: their number.
      host_bandwidth: bytes/s that a host sends over the network while it receives at this speed.
      latency: seconds of a message between hosts.

    Raises:
      UserError: if there is no slice of this number of TPUs, or a number is out of range.
    """

    accelerator: Accelerator
    chips: int
    host_bandwidth: float = 100e9 / 8
    latency: float = NETWORK_LATENCY

    @classmethod
    def of(cls, accelerator_name: str, chips: int, network_gbits: float) -> ChipCluster:
        """Returns a cluster from an accelerator's name and the hosts' network in Gbit/s."""
        return cls(accelerator(accelerator_name), chips, network_gbits * 1e9 / 8)

    def __post_init__(self) -> None:
        most = self.accelerator.most_chips or _MOST_GPUS
        if not 1 <= self.chips <= most:
            raise UserError(
                f"chips is {self.chips:,}, but must be at least 1 and, of "
                f"{self.accelerator.title}, at most {most:,}"
            )
        if not _is_slice(self.accelerator, self.chips):
            counts = "a power of two" if self.accelerator.torus == 2 else "1, 2 or a multiple of 4"
            raise UserError(
                f"chips is {self.chips:,}, but the number of chips of a slice of "
                f"{self.accelerator.title} is {counts}"
            )
        gbits = 8e-9 * self.host_bandwidth
        if not 0 < gbits <= _MOST_GBITS or not 0 <= self.latency < math.inf:
            raise UserError(
                f"the network has {gbits:g} Gbit/s and a latency of {self.latency:g} s: the first "
                f"must be positive and at most {_MOST_GBITS:,}, the second not negative"
            )

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.chips * self.accelerator.replicas

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return math.ceil(self.chips / self.accelerator.host_chips)

    @functools.cached_property
    def group_size(self) -> int:
        """Number of chips in an all-reduce group, a host or an axis of the torus."""
        if self.accelerator.torus:
            divisors = [size for size in range(1, self.chips + 1) if self.chips % size == 0]
            return min(divisors, key=lambda size: abs(math.log(size / math.sqrt(self.chips))))
        if self.hosts == 1:
            return self.chips
        return math.gcd(self.chips, self.accelerator.host_chips)

    def all_reduce_seconds(self, algorithm: str, size: float, *, exchange: bool = False) -> float:
        """Returns the duration of an all-reduce over all chips.

        The cores of one chip share its memory and need no time.

        Args:
          algorithm: ``builtin``, as in the chips' software, or one of
            :func:`~imagenet_fast.lab.planning.cost_model.all_reduce.stages`.
          size: bytes of the tensor.
          exchange: see there; ignored for ``builtin`` and on a torus, where XLA and NCCL sum 16-bit
            numbers in the same way as 32-bit ones.

        Raises:
          UserError: if there is no such algorithm.
        """
        if self.chips == 1:
            return 0.0
        builtin, torus = algorithm in ("auto", "builtin"), bool(self.accelerator.torus)
        if builtin:
            algorithm = _BUILTIN[torus]
        return all_reduce.seconds(
            algorithm,
            self.chips,
            size,
            self._network(algorithm),
            group=self.group_size,
            exchange=exchange and not builtin and not torus,
        )

    def all_reduce_cost(
        self, algorithm: str, *, exchange: bool = False
    ) -> Callable[[float], float]:
        """Returns :meth:`all_reduce_seconds` as a fast function of the size.

        Args:
          algorithm: see there.
          exchange: see there.

        Raises:
          UserError: see there.
        """
        latency = self.all_reduce_seconds(algorithm, 0, exchange=exchange)
        giga = self.all_reduce_seconds(algorithm, _GIGA, exchange=exchange)
        per_byte = (giga - latency) / _GIGA
        return lambda size: latency + per_byte * size

    def group_all_reduce_seconds(self, replicas: int, size: float) -> float:
        """Returns the duration of all-reduces of bytes in all groups of neighbours at once."""
        chips = math.ceil(replicas / self.accelerator.replicas)
        if chips == 1:
            return 0.0
        # A row is a host or an axis of the torus. If its length is not a multiple of the group's,
        # some groups begin within a row, at most ``begin`` chips after its first one, and extend
        # into one more row. All wait for these.
        row = self.group_size
        begin = row - math.gcd(chips, row)
        rows = math.ceil((begin + chips) / row)
        return all_reduce.ring("ring", chips, rows).seconds(size, self._network("flat"))

    def _network(self, algorithm: str) -> Network:
        """Returns the links that an algorithm uses."""
        chip = self.accelerator
        if chip.torus:
            # Rings use both directions; the 2D algorithm uses all axes at the same time.
            ways = 2 * (chip.torus if algorithm == "torus_2d" else 1)
            bandwidth = ways * chip.link
            return Network(TORUS_LATENCY, TORUS_LATENCY, bandwidth, bandwidth)
        network = self.host_bandwidth
        return Network(HOST_LATENCY, self.latency, chip.link, network, bandwidth_of_group=network)


def _is_slice(chip: Accelerator, chips: int) -> bool:
    """Whether TPUs are rented in slices of this number; any number of GPUs will do."""
    if chip.torus == 2:
        return chips & (chips - 1) == 0
    return not chip.torus or chips in (1, 2) or chips % 4 == 0


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
      compute: of a replica alone.
      all_reduce: of the gradients.
      exposed: the part of ``all_reduce`` that does not overlap with the backward pass.
      batch_norm: all-reduces of batch-norm statistics.
      input: preparing a step's images on the hosts, while devices compute.
      segments: the gradients after which a new all-reduce begins.
    """

    compute: ComputeTime
    all_reduce: float
    exposed: float
    batch_norm: float
    input: float
    segments: tuple[int, ...]

    @property
    def devices(self) -> float:
        """Seconds of the devices."""
        return self.compute.total + self.exposed + self.batch_norm

    @property
    def total(self) -> float:
        """Seconds of a step, in which input and devices overlap."""
        return max(self.devices, self.input)

    @property
    def bound(self) -> str:
        """What limits the step, ``input``, ``all-reduce``, ``memory`` or ``matrices``."""
        if self.input > self.devices:
            return "input"
        if self.exposed + self.batch_norm > self.compute.total:
            return "all-reduce"
        matrix = self.compute.by_kind.get("matrix", 0.0)
        return "matrices" if 2 * matrix > self.compute.total else "memory"


def step_time(
    step: StepWork,
    cluster: ChipCluster,
    efficiency: Efficiency,
    *,
    algorithm: str = "builtin",
    gradient_bytes: int = 4,
    exchange: bool = False,
    segments: Sequence[int] | None = None,
    batch_norm_group: int = 1,
    host_images: float = math.inf,
) -> StepTime:
    """Returns the duration of a step.

    Args:
      step: of each replica.
      cluster: the chips.
      efficiency: of the software.
      algorithm: of the gradient all-reduce; see :meth:`ChipCluster.all_reduce_seconds`.
      gradient_bytes: of each number on the wire.
      exchange: see there.
      segments: the gradients after which a new all-reduce begins; None: the best ones.
      batch_norm_group: replicas that share batch-norm statistics.
      host_images: images/s that a host's processors prepare.

    Raises:
      UserError: if the chips do not support the step's precision, or there is no such algorithm.
    """
    compute = compute_time(step, cluster.accelerator, efficiency)
    ready = compute.gradients_ready
    sizes = [gradient_bytes * gradient.elements for gradient in step.gradients]

    cost = cluster.all_reduce_cost(algorithm, exchange=exchange)
    cuts = tuple(segments or ())
    if segments is None and cluster.chips > 1:
        cuts = best_segments(ready, sizes, cost)
    parts = transfers(ready, sizes, cost, cuts)
    # Two sums per channel in each pass, and the number of images.
    statistics = sum(
        cluster.group_all_reduce_seconds(batch_norm_group, 4 * (2 * channels + 1))
        for channels in step.statistics
    )
    images = step.all_images * cluster.replicas / cluster.hosts
    return StepTime(
        compute=compute,
        all_reduce=sum(part.end - part.begin for part in parts),
        exposed=max(0.0, parts[-1].end - max(ready)),
        batch_norm=2 * step.micro_batches * statistics,
        input=images / host_images,
        segments=cuts,
    )
