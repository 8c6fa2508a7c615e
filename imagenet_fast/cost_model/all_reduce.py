"""What a sum over all replicas costs: steps, bytes on the wire, and seconds by alpha and beta.

The alpha-beta-gamma model: a message of n bytes takes ``alpha + beta * n``, a latency and the
inverse of a bandwidth, and adding and copying it ``gamma * n``. Here there are two of alpha and
beta, within a group of replicas and between groups, and processors work while the wire does.

Steps and bytes are of the algorithms as ``distribute/all_reduce.py`` has them, except for those of
Goyal et al. 2017 and Jia et al. 2018, which stand beside for comparison. Numbers that travel in 16
bits and are summed in 32, as by ``distribute/half_precision.py``, are exchanged and gathered where
others go around a ring; the published systems that summed in 16 bits had rings for these, too.
"""

from __future__ import annotations

import dataclasses
import math

from imagenet_fast.base.errors import UserError


@dataclasses.dataclass(frozen=True)
class Network:
    """What replicas are connected by.

    Attributes:
      latency_within: seconds that a message takes to another replica of the group.
      latency_between: the same to a replica of another group.
      bandwidth_within: bytes a second that each replica sends to its group and, at the same time,
        receives from it.
      bandwidth_between: the same to and from other groups.
      start: seconds that a stage takes besides: of the program, not of the wire.
      gamma: seconds that processors need to send, receive and add a byte; those of all replicas
        are one machine's. 0: more than enough processors.
      bandwidth_of_group: bytes a second that all replicas of a group together send to other groups,
        as through their host's network. Infinite: each has a link of its own.
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
    """A part of a sum that must end before the next begins.

    Attributes:
      name: of what it does.
      steps_within: messages one after the other, on the longest path, within a group.
      steps_between: the same between groups.
      share: bytes that the busiest replica sends, or receives, as a fraction of the tensor's.
      leaving: bytes that all replicas of a group together send to other groups, in the same way.
      traffic: bytes that all replicas together send, in the same way.
    """

    name: str
    steps_within: int
    steps_between: int
    share: float
    leaving: float
    traffic: float

    @property
    def steps(self) -> int:
        """Messages one after the other."""
        return self.steps_within + self.steps_between

    def seconds(self, size: float, network: Network) -> float:
        """Returns the time that it takes for a tensor of so many bytes."""
        if not self.steps:
            return 0.0
        # In a ring through several groups all wait for the slowest link.
        bandwidths = [network.bandwidth_within] * bool(self.steps_within)
        bandwidths += [network.bandwidth_between] * bool(self.steps_between)
        return (
            network.start
            + self.steps_within * network.latency_within
            + self.steps_between * network.latency_between
            + max(
                self.share * size / min(bandwidths),
                self.leaving * size / network.bandwidth_of_group,
                self.traffic * size * network.gamma,
            )
        )


def stages(
    algorithm: str, replicas: int, group: int = 1, *, exchange: bool = False
) -> tuple[Stage, ...]:
    """Returns the stages of a sum over replicas in groups of consecutive ones.

    Args:
      algorithm: ``"flat"``: a ring of reduce-scatter and all-gather; ``"hierarchical"``: the sum of
        a group to its first replica, a ring of these masters, and back; ``"torus_2d"``:
        reduce-scatter in the group, a ring across groups with each part, all-gather in the group;
        ``"halving_doubling"``: recursive halving and doubling (Goyal et al. 2017).
      replicas: how many there are.
      group: replicas in a group.
      exchange: in place of each ring all send each other their parts, which each sums on its own,
        and gather the sums, as ``distribute/half_precision.py`` does.

    Raises:
      UserError: if there is no such algorithm, or the groups do not fit.
    """
    if group < 1 or replicas % group:
        raise UserError(f"{replicas} replicas cannot be split into groups of {group}")
    groups = replicas // group
    if algorithm == "halving_doubling":
        steps = math.ceil(math.log2(replicas))
        within = min(steps, math.ceil(math.log2(group)))
        share, leaving = (2 * (own - 1) / own for own in (replicas, groups))
        return (
            Stage(
                "halving and doubling",
                2 * within,
                2 * (steps - within),
                share,
                leaving,
                replicas * share,
            ),
        )
    whole = _exchange_and_gather if exchange else _ring_alone
    if algorithm == "flat":
        return whole("", replicas, groups)
    part = (group - 1) / group
    scatter = Stage("reduce-scatter in the group", min(1, group - 1), 0, part, 0.0, replicas * part)
    gather = Stage("all-gather in the group", group - 1, 0, part, 0.0, replicas * part)
    if algorithm == "torus_2d":
        # One for each replica of a group, with its part.
        across = [
            dataclasses.replace(own, share=own.share / group)
            for own in whole(" across groups", groups, groups)
        ]
        return scatter, *across, gather
    if algorithm == "hierarchical":
        collect = Stage("parts to the master", min(1, group - 1), 0, part, 0.0, groups * part)
        give = Stage("parts from the master", min(1, group - 1), 0, part, 0.0, groups * part)
        return scatter, collect, *whole(" of the masters", groups, groups), give, gather
    raise UserError(
        f"there is no cost of all_reduce={algorithm!r}; there is of flat, hierarchical, torus_2d "
        "and halving_doubling"
    )


def ring(name: str, members: int, groups: int) -> Stage:
    """Returns a ring of all-reduce: each part goes around it twice, less two steps.

    Args:
      name: of the stage.
      members: replicas in the ring.
      groups: of neighbours in the ring, alike or not, between which it goes once around.
    """
    steps = 2 * (members - 1)
    between = min(steps, 2 * groups) if groups > 1 else 0
    share = steps / members
    return Stage(name, steps - between, between, share, share * (groups > 1), steps)


def _ring_alone(what: str, members: int, groups: int) -> tuple[Stage, ...]:
    return (ring(f"ring{what}", members, groups),)


def _exchange_and_gather(what: str, members: int, groups: int) -> tuple[Stage, ...]:
    """Returns the stages of members in groups of as many, who all send each other a part at once.

    Their sums go once around a ring.
    """
    apart = groups > 1
    once, around = min(1, members - 1), members - 1
    between = min(around, groups) * apart
    part = (members - 1) / members
    # A group's members all send to others' in an exchange, but only one of them does in a ring.
    leaving = (members - members // groups) / groups
    return (
        Stage(f"exchange{what}", once * (not apart), once * apart, part, leaving, around),
        Stage(f"all-gather{what}", around - between, between, part, part * apart, around),
    )


def wire_fraction(algorithm: str, replicas: int, group: int = 1) -> float:
    """Returns the bytes that the busiest replica sends, or receives, as a fraction of the tensor's.

    No algorithm has less than ``2 (replicas - 1) / replicas`` for the sum of all replicas' sends
    over their number. An exchange has as much as a ring.
    """
    return sum(stage.share for stage in stages(algorithm, replicas, group))


def seconds(
    algorithm: str,
    replicas: int,
    size: float,
    network: Network,
    group: int = 1,
    *,
    exchange: bool = False,
) -> float:
    """Returns the time of one sum.

    Args:
      algorithm: see :func:`stages`.
      replicas: how many there are.
      size: of the tensor, in bytes.
      network: between them.
      group: replicas in a group.
      exchange: see :func:`stages`.
    """
    found = stages(algorithm, replicas, group, exchange=exchange)
    return sum(stage.seconds(size, network) for stage in found)
