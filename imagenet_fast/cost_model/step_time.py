"""How long a step of data-parallel training takes, and what bounds it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from imagenet_fast.base.errors import UserError
from imagenet_fast.cost_model import all_reduce
from imagenet_fast.cost_model.accelerators import Accelerator, accelerator
from imagenet_fast.cost_model.all_reduce import Network
from imagenet_fast.cost_model.compute import ComputeTime, Efficiency, StepWork, compute_time
from imagenet_fast.cost_model.fusion import best_segments, transfers

# Seconds of a message from chip to chip: about 1 us through a link of a TPU (the scaling book
# reckons with half of that for v5e), some microseconds through NCCL.
_TORUS_LATENCY = 1e-6
_HOST_LATENCY = 5e-6
_GIGA = 1e9
# The strategies' own sums: XLA goes along the axes of a TPU's torus, NCCL around a ring.
_BUILTIN = {True: "torus_2d", False: "flat"}


@dataclasses.dataclass(frozen=True)
class ChipCluster:
    """ChipCluster that train together, each in replicas.

    Attributes:
      accelerator: the kind of chip.
      chips: how many.
      host_bandwidth: bytes a second that a host sends, and receives, through the network.
      latency: seconds that a message takes from host to host.

    Raises:
      UserError: if so many chips cannot be connected, or not by such a network.
    """

    accelerator: Accelerator
    chips: int
    host_bandwidth: float = 100e9 / 8
    latency: float = 10e-6

    @classmethod
    def of(cls, accelerator_name: str, chips: int, network_gbits: float) -> ChipCluster:
        """Returns a cluster of a kind of chip that is given by name, and a network in Gbit/s."""
        return cls(accelerator(accelerator_name), chips, network_gbits * 1e9 / 8)

    def __post_init__(self) -> None:
        most = self.accelerator.most_chips
        if self.chips < 1 or (most and self.chips > most):
            raise UserError(
                f"chips is {self.chips:,}, but must be at least 1"
                + (f" and, of {self.accelerator.title}, at most {most:,}" if most else "")
            )
        if self.host_bandwidth <= 0 or self.latency < 0:
            raise UserError(
                f"a network of {8e-9 * self.host_bandwidth:g} Gbit/s and {self.latency:g} s does "
                "not connect hosts: the first must be positive, the second not negative"
            )

    @property
    def replicas(self) -> int:
        """How many train."""
        return self.chips * self.accelerator.replicas

    @property
    def hosts(self) -> int:
        """How many machines the chips are in."""
        return math.ceil(self.chips / self.accelerator.host_chips)

    @functools.cached_property
    def rows(self) -> int:
        """How many chips are summed first, those of a host or along an axis of a torus."""
        if self.accelerator.torus:
            divisors = [own for own in range(1, self.chips + 1) if self.chips % own == 0]
            return min(divisors, key=lambda own: abs(math.log(own / math.sqrt(self.chips))))
        if self.hosts == 1:
            return self.chips
        return math.gcd(self.chips, self.accelerator.host_chips)

    def sum_seconds(self, algorithm: str, size: float, *, exchange: bool = False) -> float:
        """Returns the time of a sum over all chips; the cores of one meet in its memory.

        Args:
          algorithm: ``builtin``, which stands for what the chips' software does, or one of
            :func:`~imagenet_fast.cost_model.all_reduce.stages`.
          size: bytes of the tensor.
          exchange: see there; of no account for ``builtin`` and on a torus, where XLA and NCCL sum
            in 16 bits as they do in 32.

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
            group=self.rows,
            exchange=exchange and not builtin and not torus,
        )

    def sum_cost(self, algorithm: str, *, exchange: bool = False) -> Callable[[float], float]:
        """Returns what tells :meth:`sum_seconds` of any size, quickly.

        Args:
          algorithm: as there.
          exchange: as there.

        Raises:
          UserError: as there.
        """
        latency = self.sum_seconds(algorithm, 0, exchange=exchange)
        per_byte = (self.sum_seconds(algorithm, _GIGA, exchange=exchange) - latency) / _GIGA
        return lambda size: latency + per_byte * size

    def group_seconds(self, replicas: int, size: float) -> float:
        """Returns the time of sums over neighbouring replicas, in all groups of so many at once.

        Args:
          replicas: that have a sum together.
          size: bytes of the tensor.
        """
        chips = math.ceil(replicas / self.accelerator.replicas)
        if chips == 1:
            return 0.0
        # Where rows are no multiple of a group, some groups begin within a row, at the latest so
        # many chips after its first one, and reach into one row more. All wait for these.
        begin = self.rows - math.gcd(chips, self.rows)
        rows = math.ceil((begin + chips) / self.rows)
        return all_reduce.ring("ring", chips, rows).seconds(size, self._network("flat"))

    def _network(self, algorithm: str) -> Network:
        """Returns what an algorithm has of the links."""
        chip = self.accelerator
        if chip.torus:
            # Rings go both ways; parts of a tensor go along the axes in different orders.
            ways = 2 * (chip.torus if algorithm == "torus_2d" else 1)
            bandwidth = ways * chip.link
            return Network(_TORUS_LATENCY, _TORUS_LATENCY, bandwidth, bandwidth)
        network = self.host_bandwidth
        return Network(_HOST_LATENCY, self.latency, chip.link, network, bandwidth_of_group=network)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
      compute: of a replica on its own.
      sums: of the gradients, all together.
      exposed: of these, the part that the backward pass does not hide.
      batch_norm: of sums for statistics over groups of replicas.
      input: of a step's images on the hosts, while devices compute.
      segments: after which gradients a new sum begins.
    """

    compute: ComputeTime
    sums: float
    exposed: float
    batch_norm: float
    input: float
    segments: tuple[int, ...]

    @property
    def devices(self) -> float:
        """What devices take."""
        return self.compute.total + self.exposed + self.batch_norm

    @property
    def total(self) -> float:
        """What a step takes, in which images are made while devices compute."""
        return max(self.devices, self.input)

    @property
    def bound(self) -> str:
        """What takes most, ``input``, ``sums``, ``memory`` or ``matrices``."""
        if self.input > self.devices:
            return "input"
        if self.exposed + self.batch_norm > self.compute.total:
            return "sums"
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
    """Returns how long a step takes.

    Args:
      step: of each replica.
      cluster: of the replicas.
      efficiency: of their software.
      algorithm: by which gradients are summed; see :meth:`ChipCluster.sum_seconds`.
      gradient_bytes: in which each number travels.
      exchange: whether sums are exchanged and gathered; see there.
      segments: after which gradients a new sum begins; None: where it is best.
      batch_norm_group: replicas that take its statistics together.
      host_images: images a second that a host's processors make of files.

    Raises:
      UserError: if the chips cannot compute in the step's precision, or there is no such algorithm.
    """
    compute = compute_time(step, cluster.accelerator, efficiency)
    sizes = [gradient_bytes * own.elements for own in step.gradients]

    cost = cluster.sum_cost(algorithm, exchange=exchange)
    cuts = tuple(segments or ())
    if segments is None and cluster.chips > 1:
        cuts = best_segments(compute.known, sizes, cost)
    parts = transfers(compute.known, sizes, cost, cuts)
    # Sums and sums of squares forward; two sums again backward; and the number of images.
    statistics = sum(
        cluster.group_seconds(batch_norm_group, 4 * (2 * channels + 1))
        for channels in step.statistics
    )
    images = step.all_images * cluster.replicas / cluster.hosts
    return StepTime(
        compute=compute,
        sums=sum(own.end - own.begin for own in parts),
        exposed=max(0.0, parts[-1].end - max(compute.known)),
        batch_norm=2 * step.micro_batches * statistics,
        input=images / host_images,
        segments=cuts,
    )
