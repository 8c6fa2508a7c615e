"""Groups of replicas, for all-reduces and batch norm.

Replicas have TensorFlow's ids (``replica_id_in_sync_group``): worker by worker, and device by
device within a worker.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

from imagenet_fast.base.errors import UserError


@dataclasses.dataclass(frozen=True)
class Groups:
    """A partition of all replicas into groups of equal size.

    Attributes:
      members: the replicas of each group, in order.
    """

    members: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """The number of replicas in each group."""
        return len(self.members[0])

    def of(self, replica: int) -> tuple[int, ...]:
        """Returns the members of the group of ``replica``."""
        return next(group for group in self.members if replica in group)


def consecutive(replicas: int, size: int) -> Groups:
    """Returns groups of ``size`` consecutive replicas, as in Google's MLPerf code.

    Raises:
      UserError: if ``size`` does not divide ``replicas``.
    """
    if size < 1 or replicas % size:
        divisors = ", ".join(str(n) for n in range(1, replicas + 1) if replicas % n == 0)
        raise UserError(
            f"{replicas} replicas cannot be split into groups of {size}; possible sizes: {divisors}"
        )
    return Groups(tuple(tuple(range(i, i + size)) for i in range(0, replicas, size)))


def columns(rows: Groups) -> Groups:
    """Returns the groups of the rows' first members, their second members, and so on."""
    return Groups(tuple(zip(*rows.members)))


def torus(topology: Sequence[Sequence[int]]) -> tuple[Groups, Groups]:
    """Returns the rows and the columns of a torus.

    Args:
      topology: the coordinates (x, y, ...) of each replica's core, as in
        ``tf.tpu.experimental.Topology.device_coordinates``. Replicas with the same x and y, such as
        the cores of one chip, are consecutive in a row.

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
    if any(row != across[0] for row in across):
        raise UserError(
            f"the {len(places)} replicas do not form a rectangle: rows have "
            f"{', '.join(str(len(row)) for row in rows)} replicas, or other x coordinates; "
            "choose another --all_reduce than torus_2d"
        )
    along = Groups(tuple(map(tuple, rows)))
    return along, columns(along)


def group_key(members: Sequence[int], place: int = 0) -> int:
    """Returns TensorFlow's key of a group: a hash of its members.

    Keys below 2**20 are left to TensorFlow's own groups.

    ``place`` is the index of the device, if the same replicas form groups on several devices.
    """
    text = f"{tuple(members)}" + (f" at {place}" if place else "")
    return 2**20 + zlib.crc32(text.encode()) % (2**31 - 2**20)
