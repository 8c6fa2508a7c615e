"""The alpha-beta-gamma cost model of all-reduce algorithms: steps, bytes on the wire, seconds.

A message of n bytes takes ``alpha + beta * n``, a latency and an inverse bandwidth, and adding and
copying it takes ``gamma * n``. Alpha and beta differ within a group of replicas and between groups;
processors work while data is on the wire.

Steps and bytes are those of ``distribute/all_reduce.py``; the algorithms of Goyal et al. 2017 and
Jia et al. 2018 are included for comparison. Numbers that are sent in 16 bits but summed in 32, as
by ``distribute/collectives.py``, use an exchange and an all-gather in place of a ring; the
published systems that summed in 16 bits used rings for these, too.
"""

from __future__ import annotations

import dataclasses
import math

from imagenet_fast.base.errors import UserError


@dataclasses.dataclass(frozen=True)
class Network:
    """The connections between replicas.

    Attributes:
      latency_within: seconds of a message to another replica of the group.
      latency_between: seconds of a message to a replica of another group.
      bandwidth_within: bytes/s that each replica sends to its group while it receives at the same
        speed.
      bandwidth_between: bytes/s that each replica sends to other groups, likewise.
      start: the program's overhead in each stage, in seconds.
      gamma: seconds that processors need to send, receive and add a byte, if all replicas share
        one machine; 0: processors are never the bottleneck.
      bandwidth_of_group: bytes/s that all replicas of a group together send to other groups, such
        as through their host's network; infinite: each replica has its own link.
    """

    latency_within: float
    latency_between: float
    bandwidth_within: float
    bandwidth_between: float
    start: float = 0.0
    gamma: float = 0.0
    bandwidth_of_group: float = math.inf


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of an all-reduce that ends before the next one begins.

    Bytes are given as fractions of the tensor's.

    Attributes:
      name: describes it.
      steps_within: consecutive messages on the longest path within a group.
      steps_between: consecutive messages on the longest path between groups.
      fraction: bytes that the busiest replica sends or receives.
      leaving: bytes that all replicas of a group together send to other groups.
      traffic: bytes that all replicas together send.
    """

    name: str
    steps_within: int
    steps_between: int
    fraction: float
    leaving: float
    traffic: float

    @property
    def steps(self) -> int:
        """Consecutive messages."""
        return self.steps_within + self.steps_between

    def seconds(self, size: float, network: Network) -> float:
        """Returns the duration for a tensor of ``size`` bytes."""
        if not self.steps:
            return 0.0
        # In a ring through several groups, all wait for the slowest link.
        bandwidths = [network.bandwidth_within] * bool(self.steps_within)
        bandwidths += [network.bandwidth_between] * bool(self.steps_between)
        return (
            network.start
            + self.steps_within * network.latency_within
            + self.steps_between * network.latency_between
            + max(
                self.fraction * size / min(bandwidths),
                self.leaving * size / network.bandwidth_of_group,
                self.traffic * size * network.gamma,
            )
        )


def stages(
    algorithm: str, replicas: int, group: int = 1, *, exchange: bool = False
) -> tuple[Stage, ...]:
    """Returns the stages of an all-reduce over groups of consecutive replicas.

    Args:
      algorithm: ``"flat"``: a ring of reduce-scatter and all-gather; ``"hierarchical"``: a reduce
        to each group's first replica, a ring of these masters, and a broadcast; ``"torus_2d"``:
        reduce-scatter in the group, a ring across groups for each part, all-gather in the group;
        ``"halving_doubling"``: recursive halving and doubling (Goyal et al. 2017).
      replicas: their number.
      group: replicas in a group.
      exchange: replaces each ring: the members exchange their parts, each sums its own part, and
        they gather the sums, as in ``distribute/collectives.py``.

    Raises:
      UserError: if there is no such algorithm, or the groups do not divide the replicas.
    """
    if group < 1 or replicas % group:
        raise UserError(f"{replicas} replicas cannot be split into groups of {group}")
    groups = replicas // group
    if algorithm == "halving_doubling":
        steps = math.ceil(math.log2(replicas))
        within = min(steps, math.ceil(math.log2(group)))
        fraction, leaving = (2 * (count - 1) / count for count in (replicas, groups))
        return (
            Stage(
                "halving and doubling",
                2 * within,
                2 * (steps - within),
                fraction,
                leaving,
                replicas * fraction,
            ),
        )
    whole = _exchange_and_gather if exchange else _ring_alone
    if algorithm == "flat":
        return whole("", replicas, groups)
    part = (group - 1) / group
    scatter = Stage("reduce-scatter in the group", min(1, group - 1), 0, part, 0.0, replicas * part)
    gather = Stage("all-gather in the group", group - 1, 0, part, 0.0, replicas * part)
    if algorithm == "torus_2d":
        # One ring for each replica of a group, with its part.
        across = [
            dataclasses.replace(stage, fraction=stage.fraction / group)
            for stage in whole(" across groups", groups, groups)
        ]
        return scatter, *across, gather
    if algorithm == "hierarchical":
        collect = Stage("parts to the master", min(1, group - 1), 0, part, 0.0, groups * part)
        give = Stage("parts from the master", min(1, group - 1), 0, part, 0.0, groups * part)
        return scatter, collect, *whole(" of the masters", groups, groups), give, gather
    raise UserError(
        f"the cost model has no all_reduce={algorithm!r}; choose from flat, hierarchical, torus_2d "
        "and halving_doubling"
    )


def ring(name: str, members: int, groups: int) -> Stage:
    """Returns a ring all-reduce: each part goes around the ring twice, less two steps.

    Args:
      name: of the stage.
      members: replicas in the ring.
      groups: of neighbours in the ring, of equal sizes or not; the ring leaves each group once.
    """
    steps = 2 * (members - 1)
    between = min(steps, 2 * groups) if groups > 1 else 0
    fraction = steps / members
    return Stage(name, steps - between, between, fraction, fraction * (groups > 1), steps)


def _ring_alone(what: str, members: int, groups: int) -> tuple[Stage, ...]:
    return (ring(f"ring{what}", members, groups),)


def _exchange_and_gather(what: str, members: int, groups: int) -> tuple[Stage, ...]:
    """Returns an exchange of parts between all members, and an all-gather of the sums in a ring.

    The members form groups of equal sizes.
    """
    apart = groups > 1
    once, around = min(1, members - 1), members - 1
    between = min(around, groups) * apart
    part = (members - 1) / members
    # In an exchange all members of a group send to other groups, in a ring only one does.
    leaving = (members - members // groups) / groups
    return (
        Stage(f"exchange{what}", once * (not apart), once * apart, part, leaving, around),
        Stage(f"all-gather{what}", around - between, between, part, part * apart, around),
    )


def wire_fraction(algorithm: str, replicas: int, group: int = 1) -> float:
    """Returns the bytes that the busiest replica sends or receives, divided by the tensor's.

    Averaged over replicas, no algorithm sends less than ``2 (replicas - 1) / replicas``. An
    exchange sends the same as a ring.
    """
    return sum(stage.fraction for stage in stages(algorithm, replicas, group))


def seconds(
    algorithm: str,
    replicas: int,
    size: float,
    network: Network,
    group: int = 1,
    *,
    exchange: bool = False,
) -> float:
    """Returns the duration of one all-reduce of ``size`` bytes; otherwise see :func:`stages`."""
    all_stages = stages(algorithm, replicas, group, exchange=exchange)
    return sum(stage.seconds(size, network) for stage in all_stages)
