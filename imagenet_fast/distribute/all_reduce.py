"""Gradient all-reduce by the algorithms of the published systems.

``builtin``
    The all-reduce of the ``tf.distribute`` strategy.
``flat``
    One ring over all replicas. On workers, its keys are fixed: one round trip to the chief fewer
    than ``builtin``.
``hierarchical``
    Jia et al. 2018 (arXiv 1807.11205): a reduce to the first replica (master) of each group, a ring
    all-reduce among the masters, and a broadcast in each group. With P replicas in groups of k, a
    number crosses between groups 2(P/k - 1) times instead of 2(P - 1), but through one replica of
    each group.
``torus_2d``
    Ying et al. 2018 (arXiv 1811.06992): a reduce-scatter along each row of the torus, an all-reduce
    of each part along its column, an all-gather along the row. It needs as few steps as
    ``hierarchical``, and uses the links of all replicas of a group.

On a TPU, ``torus_2d`` all-reduces half of the data along rows, then columns, and the other half
along columns, then rows, so that both axes are busy. The other algorithms are ``builtin`` there:
the compiler chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from imagenet_fast.base.errors import UserError, require_choice
from imagenet_fast.distribute.collectives import Communicator, this_replica
from imagenet_fast.distribute.connect import connect, in_rank_order
from imagenet_fast.distribute.consistency import check_consistent
from imagenet_fast.distribute.fusion import Fusion, creation_order, pack, unpack
from imagenet_fast.distribute.groups import Groups, columns, consecutive, torus
from imagenet_fast.distribute.options import ALL_REDUCE_ALGORITHMS, ALL_REDUCE_DTYPES
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy
from imagenet_fast.distribute.tpu import compiles_all_reduces, cross_replica_sum
from imagenet_fast.distribute.virtual import VirtualGPUStrategy
from imagenet_fast.distribute.workers import collective_hint, workers_of

# Algorithms of several stages. Buckets are split into pieces of about this size, so that one piece
# can be in the second stage while another is in the first.
_STAGED = ("hierarchical", "torus_2d")
_PIECE_BYTES = 4 * 2**20
_SUM = tf.distribute.ReduceOp.SUM


class AllReduce:
    """All-reduces lists of tensors over all replicas, in replica context.

    All workers must construct it, in the strategy's scope or with the strategy as an argument.

    Args:
      strategy: the strategy under which it will be called; None: the current one.
      algorithm: see this module; ``"auto"`` is ``flat`` for several workers on CPUs, else
        ``builtin``, where NCCL, the TPU's compiler or TensorFlow chooses.
      group_size: replicas in a group, or in a row of the torus. 0: the replicas of one host, if
        each host has the same number, at least two; or the TPU's rows, if ``topology`` is given;
        else the divisor of the number of replicas closest to its square root.
      fusion: how gradients are fused into buckets.
      dtype: the dtype in which float32 gradients are sent: ``"float32"``, ``"float16"`` or
        ``"bfloat16"``. Results are float32. Additions are in float32, too, except in ``builtin``
        and on TPUs.
      topology: the coordinates (x, y, ...) of each replica's TPU core.
      place: the index of the device on which it is called, if replicas have several.
      timeout_seconds: time limit of an all-reduce that some replicas do not join; 0: none.
      name: all-reduces of one name keep their order; those that workers may call in different
        orders need different names.

    Attributes:
      algorithm: the algorithm in use.
      rows: the groups of ``hierarchical`` or rows of ``torus_2d``; None for the others.

    Raises:
      UserError: if the strategy does not support the algorithm, the group size does not divide the
        number of replicas, or workers disagree on the arguments.
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
                f"gradients cannot be sent as {dtype!r}: choose from {', '.join(ALL_REDUCE_DTYPES)}"
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
                f"all_reduce_group {group_size} is for all_reduce hierarchical or torus_2d, but "
                f"all_reduce={algorithm} uses {self.algorithm} here"
            )
        groups = f" in groups of {self.rows.size}" if self.rows else ""
        description = f"{self.algorithm}{groups} as {dtype}, {self.fusion}, {name}, {place}"
        check_consistent(strategy, "the gradient all-reduce", description)
        if self.rows and not self._on_tpu:
            self.rows = in_rank_order(strategy, self.rows)
            # All members of a column then have the same part of their rows' sums.
            self._columns = columns(self.rows)
        if not isinstance(strategy, PipelineStrategy):  # Its stages connect on their devices.
            self.connect()

    def connect(self, device: str = "") -> None:
        """Creates its NCCL communicators; all workers must call it.

        Args:
          device: the device on which it will be called, if replicas have several.
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
          gradients: tensors with the same shapes in all replicas.
          exact: further tensors, sent in their own dtype and before the gradients.
          variables: the gradients' variables, for the order of the layers and the shapes; None:
            the gradients are in that order and have static shapes.

        Returns:
          The sums of ``gradients``, then those of ``exact``, in their order and dtypes.

        Raises:
          UserError: if it was made for another strategy, or ``fusion`` does not fit the gradients.
        """
        context = tf.distribute.get_replica_context()
        if context.num_replicas_in_sync != self._replicas:
            raise UserError(
                f"this AllReduce was made for a strategy with {self._replicas} replica(s), but "
                f"is called under one with {context.num_replicas_in_sync}: construct it in the "
                "scope of the strategy that trains"
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
            for tensor, variable in zip(tensors, variables):
                tensor.set_shape(variable.shape)  # Gradients of embeddings lack it.
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
        """Returns the sums, with the strategy's own fusion."""
        if self._half is None:
            return self._builtin([*gradients, *exact])
        sums = self._builtin([tf.cast(gradient, self._half) for gradient in gradients])
        sums = [tf.cast(total, gradient.dtype) for total, gradient in zip(sums, gradients)]
        return [*sums, *(self._builtin(list(exact)) if exact else [])]

    def _sum_packed(
        self, tensors: Sequence[tf.Tensor], stream: str, half: tf.DType | None
    ) -> list[tf.Tensor]:
        """Returns the sums of a bucket's tensors."""
        size = sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors)
        # NCCL collectives of one GPU run one after another, so pieces would not overlap.
        staged = self.algorithm in _STAGED and self._hint != "nccl"
        pieces = max(1, round(size / _PIECE_BYTES)) if staged else 1
        packed = pack(tensors, multiple=self._replicas * pieces)
        sums = [
            self._sum(piece, f"{stream}_{number}", half)
            for number, piece in enumerate(tf.split(packed, pieces))
        ]
        return unpack(tf.concat(sums, axis=0), [tensor.shape for tensor in tensors])

    def _sum(self, tensor: tf.Tensor, stream: str, half: tf.DType | None) -> tf.Tensor:
        """Returns the sum of a [replicas * n] vector."""
        if self._on_tpu or self.algorithm == "builtin":
            sent = tensor if half is None else tf.cast(tensor, half)
            if self.rows is None:
                (total,) = self._builtin([sent])
            else:
                total = sum_along_both_axes(sent, self.rows, self._columns)
            return tf.cast(total, tensor.dtype)
        replica = this_replica()
        among = functools.partial(
            Communicator,
            replica=replica,
            place=self._place,
            hint=self._hint,
            timeout_seconds=self._timeout,
            half=half,
        )
        if self.rows is None:
            return among(range(self._replicas)).all_reduce(tensor, stream)
        row = among(self.rows.of(replica))
        masters = self._columns.of(row.members[0])
        if self.algorithm == "hierarchical" and self._hint == "nccl":
            # By all-reduces alone, the last with zeros from all but the master: TensorFlow's
            # broadcast takes no ordering token, which NCCL needs.
            total = row.all_reduce(tensor, stream)
            is_master = row.position == 0
            total = among(masters).all_reduce(total, stream) if is_master else tf.zeros_like(total)
            return row.all_reduce(total, f"{stream}_back")
        part = row.reduce_scatter(tensor, stream)
        if self.algorithm == "torus_2d":
            part = among(self._columns.of(replica)).all_reduce(part, stream)
        else:
            part = _all_reduce_through_masters(part, stream, row, masters, among)
        return row.all_gather(part, stream)

    def _builtin(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        options = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=self.fusion.bytes, timeout_seconds=self._timeout or None
        )
        return tf.distribute.get_replica_context().all_reduce(_SUM, tensors, options)


def default_group_size(strategy: tf.distribute.Strategy) -> int:
    """Returns the group size that :class:`AllReduce` uses by default."""
    replicas = strategy.num_replicas_in_sync
    hosts = _hosts_of_workers(strategy)
    names = list(dict.fromkeys(hosts))
    each = len(hosts) // max(1, len(names))
    on_one_host = replicas // max(1, len(hosts)) * each
    equal_hosts = hosts == [name for name in names for _ in range(each)]
    if equal_hosts and 1 < on_one_host < replicas:
        return on_one_host
    divisors = [size for size in range(1, replicas + 1) if replicas % size == 0]
    return min(divisors, key=lambda size: abs(size - replicas**0.5))


def sum_along_both_axes(tensor: tf.Tensor, rows: Groups, columns: Groups) -> tf.Tensor:
    """Returns the sum of a vector over a TPU's replicas, by the algorithm of Ying et al. 2018.

    One half is summed along the rows, then the columns, and the other half along the columns, then
    the rows, so that the links of both axes are always busy.
    """
    half = tensor.shape[0] // 2
    sums = []
    for part, axes in ((tensor[:half], (rows, columns)), (tensor[half:], (columns, rows))):
        for groups in axes:
            part = cross_replica_sum(part, groups)
        sums.append(part)
    return tf.concat(sums, axis=0)


def _all_reduce_through_masters(
    part: tf.Tensor,
    stream: str,
    row: Communicator,
    masters: Sequence[int],
    among: Callable[[Sequence[int]], Communicator],
) -> tf.Tensor:
    """Returns a replica's part of the sum over all rows, from its part of its row's sum.

    The row's first replica gathers the parts, all-reduces them with the other masters, and scatters
    them again.

    Not a row all-reduce, the masters' all-reduce and TensorFlow's broadcast, a tree that sends all
    data at each level: for a row of k replicas with n bytes each, these take 2(k-1)/k + log2(k)
    times the time to send n bytes, and 2(k-1) + log2(k) latencies. This function, with the
    reduce-scatter before and the all-gather after it (van de Geijn's broadcast, and the
    corresponding reduction), takes 4(k-1)/k times, and k + 2 latencies: less for k > 2.
    """
    master, *others = row.members
    if row.position > 0:
        replica = row.members[row.position]
        sent = among((replica, master)).broadcast(part, stream)
        return among((master, replica)).broadcast(sent, stream)
    received = [among((other, master)).broadcast(part, stream) for other in others]
    total = among(masters).all_reduce(tf.concat([part, *received], axis=0), stream)
    first, *parts = tf.split(total, row.size)
    sent = [among((master, other)).broadcast(rest, stream) for other, rest in zip(others, parts)]
    with tf.control_dependencies(sent):  # TensorFlow would prune sends without a consumer.
        return tf.identity(first)


def _algorithm(algorithm: str, strategy: tf.distribute.Strategy, dtype: str) -> str:
    """Returns the algorithm to use under ``strategy``."""
    require_choice("all_reduce", algorithm, ALL_REDUCE_ALGORITHMS)
    if strategy.num_replicas_in_sync == 1:  # Recipes for many replicas also run on one.
        return "builtin"
    if dtype == "bfloat16" and _is_on_gpus(strategy):
        # NcclManager::AddParticipant accepts float16, float32, float64, int32 and int64. The other
        # algorithms send bfloat16 as float16 bits, and add in float32.
        virtual = isinstance(strategy, VirtualGPUStrategy)
        several = workers_of(strategy) is not None or (virtual and strategy.hosts > 1)
        if algorithm == "auto" and several:
            algorithm = "flat"
        if algorithm in ("auto", "builtin"):
            raise UserError(
                "TensorFlow's NCCL does not support bfloat16: choose all_reduce_dtype float16 or "
                "float32" + (", or all_reduce=flat" if several else "")
            )
    if compiles_all_reduces(strategy):
        return "torus_2d" if algorithm == "torus_2d" else "builtin"
    if isinstance(strategy, PipelineStrategy):
        if algorithm == "builtin":
            raise UserError(
                "all_reduce=builtin is not for pipelines, whose stages all-reduce their gradients "
                "on separate devices; choose auto"
            )
        return "flat" if algorithm == "auto" else algorithm
    if algorithm == "auto":
        on_cpus = workers_of(strategy) is not None and collective_hint(strategy) == "ring"
        return "flat" if on_cpus else "builtin"
    if algorithm != "builtin" and workers_of(strategy) is None:
        raise UserError(
            f"all_reduce={algorithm} is for several workers or a TPU, but the devices of "
            f"{type(strategy).__name__} belong to one process, which needs no network; choose auto "
            "or builtin"
        )
    return algorithm


def _is_on_gpus(strategy: tf.distribute.Strategy) -> bool:
    """Whether the replicas' devices are GPUs, or virtual ones."""
    if isinstance(strategy, VirtualGPUStrategy):
        return True
    return "GPU" in strategy.extended.worker_devices[0]


def _hosts_of_workers(strategy: tf.distribute.Strategy) -> list[str]:
    """Returns each worker's host name, in worker order."""
    resolver = strategy.cluster_resolver
    jobs = resolver.cluster_spec().as_dict() if resolver else {}
    addresses = [*jobs.get("chief", []), *jobs.get("worker", [])]
    return [address.rpartition(":")[0] for address in addresses]
