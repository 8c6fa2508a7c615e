"""Groups of replicas: who sums, or normalizes, with whom.

Replicas are numbered as TensorFlow numbers them, ``replica_id_in_sync_group``: worker by worker,
and within a worker device by device.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

from imagenet_fast.base.errors import UserError


@dataclasses.dataclass(frozen=True)
class Groups:
    """All replicas, split into groups of the same size.

    Attributes:
      members: the replicas of each group, in the group's order.
    """

    members: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Replicas in each group."""
        return len(self.members[0])

    def of(self, replica: int) -> tuple[int, ...]:
        """Returns the members of the group that ``replica`` belongs to."""
        return next(group for group in self.members if replica in group)


def consecutive(replicas: int, size: int) -> Groups:
    """Returns groups of ``size`` consecutive replicas, as in Google's MLPerf code.

    Raises:
      UserError: if ``size`` does not divide ``replicas``.
    """
    if size < 1 or replicas % size:
        divisors = ", ".join(str(n) for n in range(1, replicas + 1) if replicas % n == 0)
        raise UserError(
            f"{replicas} replicas cannot be split into groups of {size}; "
            f"groups can be of {divisors}"
        )
    return Groups(tuple(tuple(range(i, i + size)) for i in range(0, replicas, size)))


def columns(rows: Groups) -> Groups:
    """Returns the groups across ``rows``: the first members of all, the second members, ..."""
    return Groups(tuple(zip(*rows.members)))


def torus(topology: Sequence[Sequence[int]]) -> tuple[Groups, Groups]:
    """Returns the rows and the columns of a torus, on which a sum goes along one axis at a time.

    Args:
      topology: the coordinates (x, y, ...) of each replica's core, as in
        ``tf.tpu.experimental.Topology.device_coordinates``. Those that share x and y, and so sit
        on one chip or differ in further axes only, are neighbours in a row.

    Raises:
      UserError: if the replicas do not fill a rectangle.
    """
    places = [tuple(int(axis) for axis in place) for place in topology]
    by_row: dict[int, list[int]] = {}
    for replica in sorted(
        range(len(places)), key=lambda i: (places[i][1], places[i][0], places[i])
    ):
        by_row.setdefault(places[replica][1], []).append(replica)
    rows = list(by_row.values())
    across = [[places[replica][0] for replica in row] for row in rows]
    if any(own != across[0] for own in across):
        raise UserError(
            f"the {len(places)} replicas are no rectangle: rows have "
            f"{', '.join(str(len(row)) for row in rows)} replicas, or stand at different places; "
            "choose another --all_reduce than torus_2d"
        )
    along = Groups(tuple(map(tuple, rows)))
    return along, columns(along)


def group_key(members: Sequence[int], place: int = 0) -> int:
    """Returns the number under which the collectives of a group meet: a hash of its members.

    Members that meet on several devices each need a group for each: ``place`` is its number.

    Numbers below 2**20 are left to TensorFlow's own groups.
    """
    told = f"{tuple(members)}" + (f" at {place}" if place else "")
    return 2**20 + zlib.crc32(told.encode()) % (2**31 - 2**20)
