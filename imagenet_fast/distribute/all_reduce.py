"""Sums of gradients over all replicas, by the algorithms of the published systems.

``builtin``
    What the ``tf.distribute`` strategy does itself.
``flat``
    One ring over all replicas. With keys that are known before the program runs, it saves a round
    trip to the chief for each sum against ``builtin`` on workers.
``hierarchical``
    Jia et al. 2018 (arXiv 1807.11205): a sum in each group, which goes to its first replica, a ring
    among these masters, and back to all of the group. With P replicas in groups of k a number
    crosses between groups 2(P/k - 1) times instead of 2(P - 1), but through one replica of each.
``torus_2d``
    Ying et al. 2018 (arXiv 1811.06992): along a row of the torus each replica gets its part of the
    row's sum, sums it along its column, and all collect the parts along the row again. As few steps
    as ``hierarchical``, and all of a group's replicas carry a part.

On a TPU ``torus_2d`` sums the whole along rows and columns, half of it in the other order, so that
both axes are busy, and the others are ``builtin``: the compiler chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from imagenet_fast.base.errors import UserError, require_choice
from imagenet_fast.distribute.collectives import Communicator, this_replica
from imagenet_fast.distribute.connect import connect
from imagenet_fast.distribute.consistency import check_consistent
from imagenet_fast.distribute.fusion import Fusion, creation_order, pack, unpack
from imagenet_fast.distribute.groups import Groups, columns, consecutive, torus
from imagenet_fast.distribute.half_precision import HalfPrecisionCommunicator
from imagenet_fast.distribute.options import ALL_REDUCE_ALGORITHMS, ALL_REDUCE_DTYPES
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy
from imagenet_fast.distribute.ranks import in_rank_order
from imagenet_fast.distribute.tpu import compiles_all_reduces, cross_replica_sum
from imagenet_fast.distribute.virtual import VirtualGPUStrategy
from imagenet_fast.distribute.workers import collective_hint, workers_of

# Algorithms of several stages. A larger bucket goes through them in pieces of about so many bytes,
# so that one piece is in its first stage while another is in its second.
_STAGED = ("hierarchical", "torus_2d")
_PIECE_BYTES = 4 * 2**20
_SUM = tf.distribute.ReduceOp.SUM


class AllReduce:
    """Sums lists of tensors over all replicas; to be called in replica context.

    To be made by all workers, in the strategy's scope or with the strategy named.

    Args:
      strategy: under which it will be called; None: the current one.
      algorithm: see this module; ``"auto"`` is ``flat`` for several workers on CPUs, else
        ``builtin``: on GPUs NCCL, on a TPU its compiler and within a process TensorFlow choose.
      group_size: replicas in a group, or in a row of the torus. 0: the replicas of one host, if
        there are several and other hosts have as many; the TPU's own rows, if ``topology`` tells
        them; else the divisor of the number of replicas that is nearest to its square root.
      fusion: how gradients are joined.
      dtype: in which float32 gradients travel: ``"float32"``, ``"float16"`` or ``"bfloat16"``. The
        sums are float32 again. They are made in float32, too, but for ``builtin`` and on TPUs.
      topology: the coordinates (x, y, ...) of each replica's core on a TPU.
      place: number of the device on which it will be called, where replicas have several.
      timeout_seconds: after which a sum gives up that not all replicas come to; 0: never.
      name: sums of one name are made in their order; two that are called in one program in another
        order by other workers need different names.

    Attributes:
      algorithm: the one that is used.
      rows: the groups of ``hierarchical`` and rows of ``torus_2d``; None for the others.

    Raises:
      UserError: if the strategy does not have the algorithm, the group does not divide the number
        of replicas, or workers disagree on any of the arguments.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy | None = None,
        *,
        algorithm: str = "auto",
        group_size: int = 0,
        fusion: Fusion | None = None,
        dtype: str = "float32",
        topology: Sequence[Sequence[int]] = (),
        place: int = 0,
        timeout_seconds: float = 0,
        name: str = "gradients",
    ) -> None:
        strategy = strategy or tf.distribute.get_strategy()
        if dtype not in ALL_REDUCE_DTYPES:
            raise UserError(
                f"gradients cannot travel as {dtype!r}: choose from {', '.join(ALL_REDUCE_DTYPES)}"
            )
        self.algorithm = _algorithm(algorithm, strategy, dtype)
        self.fusion = fusion or Fusion()
        self.rows: Groups | None = None
        self._strategy, self._replicas = strategy, strategy.num_replicas_in_sync
        self._on_tpu = compiles_all_reduces(strategy)
        self._half = None if dtype == "float32" else tf.as_dtype(dtype)
        self._place = place
        self._timeout = timeout_seconds
        self._name = name
        self._hint = collective_hint(strategy)
        if self.algorithm in _STAGED:
            if topology and not group_size:
                self.rows, self._columns = torus(topology)
            else:
                size = group_size or default_group_size(strategy)
                self.rows = consecutive(self._replicas, size)
                self._columns = columns(self.rows)
        elif group_size and algorithm not in _STAGED:
            raise UserError(
                f"a group of {group_size} is for all_reduce hierarchical or torus_2d, but here "
                f"all_reduce={algorithm} is {self.algorithm}"
            )
        groups = f" in groups of {self.rows.size}" if self.rows else ""
        told = f"{self.algorithm}{groups} as {dtype}, {self.fusion}, {name}, {place}"
        check_consistent(strategy, "how to sum gradients", told)
        if self.rows and not self._on_tpu:
            self.rows = in_rank_order(strategy, self.rows)
            # So that all members of a column have the same part of their rows' sums.
            self._columns = columns(self.rows)
        if not isinstance(strategy, PipelineStrategy):  # whose stages are on devices of their own
            self.connect()

    def connect(self, device: str = "") -> None:
        """Makes the NCCL communicators that it will use; all workers must come here.

        Args:
          device: on which it will be called, where replicas have several.
        """
        groups = [tuple(range(self._replicas))]
        if self.rows:
            groups = [*self.rows.members, *self._columns.members]
        if self.algorithm != "builtin":
            connect(self._strategy, groups, place=self._place, device=device)

    def __call__(
        self,
        gradients: Sequence[tf.Tensor],
        exact: Sequence[tf.Tensor] = (),
        *,
        variables: Sequence[tf.Variable] | None = None,
    ) -> list[tf.Tensor]:
        """Returns the sums over all replicas.

        Args:
          gradients: of the same shapes in all replicas.
          exact: further tensors, which travel in their own dtype, before the gradients.
          variables: those of the gradients, which tell the order of the layers and the shapes;
            None: the gradients are in that order and know their shapes.

        Returns:
          The sums of ``gradients``, then those of ``exact``, in their order and dtypes.

        Raises:
          UserError: if it was made for another strategy, or ``fusion`` does not fit the gradients.
        """
        context = tf.distribute.get_replica_context()
        if context.num_replicas_in_sync != self._replicas:
            raise UserError(
                f"this AllReduce was made for a strategy with {self._replicas} replica(s), but "
                f"is called under one with {context.num_replicas_in_sync}: make it in the scope of "
                "the strategy that trains"
            )
        self.fusion.check(len(gradients))
        if self._replicas == 1:
            return [*gradients, *exact]
        if self.algorithm == "builtin" and not self.fusion.segments:
            return self._sum_unpacked(gradients, exact)
        tensors = [tf.convert_to_tensor(tensor) for tensor in (*gradients, *exact)]
        order = list(range(len(gradients)))
        if variables is not None:
            order = creation_order(variables)
            for tensor, variable in zip(tensors, variables):  # Those of embeddings do not know it.
                tensor.set_shape(variable.shape)
        buckets = self.fusion.buckets(
            [tensors[i].shape for i in order], [tensors[i].dtype for i in order]
        )
        sums: dict[int, tf.Tensor] = {}
        for i in range(len(gradients), len(tensors)):
            (sums[i],) = self._sum_packed([tensors[i]], f"{self._name}_exact_{i}", half=None)
        for number, bucket in enumerate(buckets):
            positions = [order[i] for i in bucket]
            half = self._half if tensors[positions[0]].dtype == tf.float32 else None
            summed = self._sum_packed(
                [tensors[i] for i in positions], f"{self._name}_{number}", half=half
            )
            sums.update(zip(positions, summed))
        return [sums[i] for i in range(len(tensors))]

    def _sum_unpacked(
        self, gradients: Sequence[tf.Tensor], exact: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Leaves also the fusion to the strategy."""
        if self._half is None:
            return self._builtin([*gradients, *exact])
        sums = self._builtin([tf.cast(gradient, self._half) for gradient in gradients])
        sums = [tf.cast(total, own.dtype) for total, own in zip(sums, gradients)]
        return [*sums, *(self._builtin(list(exact)) if exact else [])]

    def _sum_packed(
        self, tensors: Sequence[tf.Tensor], stream: str, half: tf.DType | None
    ) -> list[tf.Tensor]:
        """Returns the sums of the tensors of a bucket."""
        size = sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors)
        # NCCL's collectives of a GPU run one after another: pieces would not overlap.
        staged = self.algorithm in _STAGED and self._hint != "nccl"
        pieces = max(1, round(size / _PIECE_BYTES)) if staged else 1
        packed = pack(tensors, multiple=self._replicas * pieces)
        sums = [
            self._sum(piece, f"{stream}_{number}", half)
            for number, piece in enumerate(tf.split(packed, pieces))
        ]
        return unpack(tf.concat(sums, axis=0), [tensor.shape for tensor in tensors])

    def _sum(self, tensor: tf.Tensor, stream: str, half: tf.DType | None) -> tf.Tensor:
        """Returns the sum of [replicas * n] numbers."""
        if self._on_tpu or self.algorithm == "builtin":
            sent = tensor if half is None else tf.cast(tensor, half)
            if self.rows is None:
                (total,) = self._builtin([sent])
            else:
                total = sum_along_both_axes(sent, self.rows, self._columns)
            return tf.cast(total, tensor.dtype)
        replica = this_replica()
        kind: Callable[..., Communicator] = Communicator
        if half is not None:
            kind = functools.partial(HalfPrecisionCommunicator, dtype=half)
        meet = functools.partial(
            kind,
            replica=replica,
            place=self._place,
            hint=self._hint,
            timeout_seconds=self._timeout,
        )
        if self.rows is None:
            return meet(range(self._replicas)).all_reduce(tensor, stream)
        row = self.rows.of(replica)
        if self.algorithm == "hierarchical" and self._hint == "nccl":
            masters = self._columns.of(row[0])
            return _sum_in_three_stages(tensor, stream, replica, meet(row), masters, meet)
        part = meet(row).reduce_scatter(tensor, stream)
        if self.algorithm == "torus_2d":
            part = meet(self._columns.of(replica)).all_reduce(part, stream)
        else:
            masters = self._columns.of(row[0])
            part = _sum_through_masters(part, stream, replica, row, masters, meet)
        return meet(row).all_gather(part, stream)

    def _builtin(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        options = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=self.fusion.bytes, timeout_seconds=self._timeout or None
        )
        return tf.distribute.get_replica_context().all_reduce(_SUM, tensors, options)


def default_group_size(strategy: tf.distribute.Strategy) -> int:
    """Returns the group size that :class:`AllReduce` takes where it is not told."""
    replicas = strategy.num_replicas_in_sync
    hosts = _hosts_of_workers(strategy)
    names = list(dict.fromkeys(hosts))
    each = len(hosts) // max(1, len(names))
    on_one_host = replicas // max(1, len(hosts)) * each
    alike = hosts == [name for name in names for _ in range(each)]
    if alike and 1 < on_one_host < replicas:
        return on_one_host
    divisors = [size for size in range(1, replicas + 1) if replicas % size == 0]
    return min(divisors, key=lambda size: abs(size - replicas**0.5))


def sum_along_both_axes(tensor: tf.Tensor, rows: Groups, columns: Groups) -> tf.Tensor:
    """Returns the sum over a TPU's replicas, of a vector, as Ying et al. 2018 make it.

    Half of it is summed along the rows first and half along the columns, then each along the other
    axis, so that the links of both axes are busy all the time.
    """
    half = tensor.shape[0] // 2
    sums = []
    for part, axes in ((tensor[:half], (rows, columns)), (tensor[half:], (columns, rows))):
        for groups in axes:
            part = cross_replica_sum(part, groups)
        sums.append(part)
    return tf.concat(sums, axis=0)


def _sum_through_masters(
    part: tf.Tensor,
    stream: str,
    replica: int,
    row: Sequence[int],
    masters: Sequence[int],
    meet: Callable[[Sequence[int]], Communicator],
) -> tf.Tensor:
    """Returns this replica's part of the sum over all rows, from its part of its own row's sum.

    The first replica of the row collects the row's parts, takes them to the other masters, and
    gives each its part back. With the reduce-scatter before it and the all-gather after it that is
    van de Geijn's broadcast, and the reduction that mirrors it: each takes as long as it takes to
    send the whole twice however many replicas there are, where TensorFlow's own broadcast, a tree
    in which the whole is passed on from node to node, takes that at each level.
    """
    master, *others = row
    if replica != master:
        sent = meet((replica, master)).broadcast(part, stream)
        return meet((master, replica)).broadcast(sent, stream)
    received = [meet((other, master)).broadcast(part, stream) for other in others]
    total = meet(masters).all_reduce(tf.concat([part, *received], axis=0), stream)
    own, *parts = tf.split(total, len(row))
    sent = [meet((master, other)).broadcast(given, stream) for other, given in zip(others, parts)]
    with tf.control_dependencies(sent):  # Else TensorFlow would not send what nobody needs here.
        return tf.identity(own)


def _sum_in_three_stages(
    tensor: tf.Tensor,
    stream: str,
    replica: int,
    row: Communicator,
    masters: Sequence[int],
    meet: Callable[[Sequence[int]], Communicator],
) -> tf.Tensor:
    """Returns the sum over all rows by all-reduces alone, which NCCL's ordering token orders.

    In the row, among the rows' first replicas, and in the row again, where the others give zeros:
    TensorFlow's broadcast takes no token.
    """
    total = row.all_reduce(tensor, stream)
    if replica == row.members[0]:
        total = meet(masters).all_reduce(total, stream)
    else:
        total = tf.zeros_like(total)
    return row.all_reduce(total, f"{stream}_back")


def _algorithm(algorithm: str, strategy: tf.distribute.Strategy, dtype: str) -> str:
    """Returns the algorithm to use under ``strategy``."""
    require_choice("all_reduce", algorithm, ALL_REDUCE_ALGORITHMS)
    if strategy.num_replicas_in_sync == 1:  # a recipe for many may be tried on one
        return "builtin"
    if dtype == "bfloat16" and _is_on_gpus(strategy):
        # NcclManager::AddParticipant takes float16, float32, float64, int32 and int64. The other
        # algorithms move bfloat16 as float16, and sum in float32.
        several = workers_of(strategy) is not None or _is_for_hosts(strategy)
        if algorithm == "auto" and several:
            algorithm = "flat"
        if algorithm in ("auto", "builtin"):
            raise UserError(
                "TensorFlow's NCCL does not sum bfloat16: choose all_reduce_dtype float16 or "
                "float32" + (", or all_reduce=flat" if several else "")
            )
    if compiles_all_reduces(strategy):
        return "torus_2d" if algorithm == "torus_2d" else "builtin"
    if isinstance(strategy, PipelineStrategy):
        if algorithm == "builtin":
            raise UserError(
                "all_reduce=builtin is not for pipelines, each of whose stages sums its gradients "
                "on its own device; choose auto"
            )
        return "flat" if algorithm == "auto" else algorithm
    if algorithm == "auto":
        on_cpus = workers_of(strategy) is not None and collective_hint(strategy) == "ring"
        return "flat" if on_cpus else "builtin"
    if algorithm != "builtin" and workers_of(strategy) is None:
        raise UserError(
            f"all_reduce={algorithm} is for several workers or a TPU, but the strategy is "
            f"{type(strategy).__name__}: its devices belong to one process, within which "
            "TensorFlow sums without a network; choose auto or builtin"
        )
    return algorithm


def _is_on_gpus(strategy: tf.distribute.Strategy) -> bool:
    """Whether the replicas' devices are GPUs, or GPUs that are not there."""
    if isinstance(strategy, VirtualGPUStrategy):
        return True
    return "GPU" in strategy.extended.worker_devices[0]


def _is_for_hosts(strategy: tf.distribute.Strategy) -> bool:
    """Whether GPUs that are not there belong to several hosts, each of which would be a worker."""
    return isinstance(strategy, VirtualGPUStrategy) and strategy.hosts > 1


def _hosts_of_workers(strategy: tf.distribute.Strategy) -> list[str]:
    """Returns the name of each worker's host, in the order of the workers."""
    resolver = strategy.cluster_resolver
    jobs = resolver.cluster_spec().as_dict() if resolver else {}
    addresses = [*jobs.get("chief", []), *jobs.get("worker", [])]
    return [address.rpartition(":")[0] for address in addresses]
