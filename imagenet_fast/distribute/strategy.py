"""The ``tf.distribute`` strategy for a run's options."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import threading
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from imagenet_fast.base.addresses import PortInUse, is_loopback
from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import NotNeeded, UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.cuda import find_problem, preload_libraries
from imagenet_fast.distribute.devices import check_same_devices, describe_gpus
from imagenet_fast.distribute.gpus import cpu_is_requested, installed_gpus, use_gpus
from imagenet_fast.distribute.options import ClusterOptions
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy
from imagenet_fast.distribute.reachable import restricted
from imagenet_fast.distribute.virtual import VirtualStrategy
from imagenet_fast.distribute.waiting import log_missing_workers

NO_CLUSTER = (
    "strategy=multi_worker needs the workers' addresses from TF_CONFIG or Slurm's srun; "
    "tools/launch_local.py starts workers on this machine"
)
# Stored because TensorFlow returns a TPU's topology only when it initializes the TPU.
_TPU_COORDINATES: dict[tf.distribute.Strategy, list[tuple[int, ...]]] = {}


def make_strategy(config: ClusterOptions) -> tf.distribute.Strategy:
    """Returns the strategy for ``config``: the same object for the same hardware options.

    ``auto`` is a TPU if one is named or found, else all workers of ``TF_CONFIG`` or Slurm, else
    all GPUs if there are several, else one device.

    With pipelines, each worker is one replica, and the model places its variables.

    With ``replicas``, it has at most as many devices as carry equally many of them: the largest
    number of workers and of each worker's devices.

    Raises:
      NotNeeded: if this worker is left out.
      UserError: if the hardware is missing, or the cluster is malformed.
    """
    found = _find(config, Cluster.from_environment())
    return _make_strategy(
        _with_equal_shares(found, config.replicas[0] if config.replicas else 0),
        config.tpu,
        config.logical_cpus,
        # With fusion=auto, TensorFlow's own packing must not split a single all-reduce.
        0 if config.fusion == "auto" else config.fusion_bytes,
        config.deterministic,
        config.pipeline_stages > 1,
    )


def check_gpus_are_used(options: ClusterOptions) -> None:
    """Checks that a run does not train on the CPU of a machine with GPUs unless requested.

    ``gpus=0``, ``logical_cpus``, an empty ``CUDA_VISIBLE_DEVICES`` and the options of TPUs request
    it.

    Raises:
      UserError: with the reason why TensorFlow sees no GPU, and how to fix it.
    """
    if options.logical_cpus:
        return
    reason = _why_gpus_are_unused(options.strategy, options.tpu, options.gpus)
    if reason:
        raise UserError(f"{reason}. To train on the CPU, add --gpus=0")


def replicas_each(options: SharedOptions, strategy: tf.distribute.Strategy) -> int:
    """Returns the number of logical replicas that each of the strategy's replicas carries.

    Raises:
      UserError: if they cannot carry equally many.
    """
    there = strategy.num_replicas_in_sync
    replicas = options.replicas[0] if options.replicas else there
    if replicas % there:
        raise UserError(
            f"{replicas} replicas cannot be shared equally by {there} devices: use a divisor of "
            f"{replicas}"
        )
    return replicas // there


def per_replica_batch_size(options: SharedOptions, strategy: tf.distribute.Strategy) -> int:
    """Returns the number of images of each of the strategy's replicas in a weight update.

    Raises:
      UserError: if replicas times ``accumulation_steps`` does not divide ``batch_size``.
    """
    replicas = strategy.num_replicas_in_sync * replicas_each(options, strategy)
    parts = replicas * options.accumulation_steps
    if options.batch_size % parts:
        lower = options.batch_size // parts * parts
        advice = f"{lower} or {lower + parts}" if lower else str(parts)
        raise UserError(
            f"batch_size {options.batch_size} (global) cannot be split evenly over {replicas} "
            f"replicas with accumulation_steps={options.accumulation_steps}; try {advice}"
        )
    return options.batch_size // strategy.num_replicas_in_sync


def devices_of(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the names of the replicas' devices in this process."""
    return strategy.extended.worker_devices


def tpu_coordinates(strategy: tf.distribute.Strategy) -> list[tuple[int, ...]]:
    """Returns (x, y, ...) of each replica's TPU core or virtual device; empty for others."""
    if isinstance(strategy, VirtualStrategy):
        return strategy.coordinates
    return _TPU_COORDINATES.get(strategy, [])


class _Found(NamedTuple):
    """The devices for a strategy.

    Attributes:
      kind: of the strategy, never ``auto``.
      cluster: the workers of ``multi_worker``; None: one process.
      each: devices of each process, each of which is a replica; 0: unknown, as of a TPU.
      gpus: whether they are GPUs.
    """

    kind: str
    cluster: Cluster | None
    each: int
    gpus: bool

    @property
    def workers(self) -> int:
        """The number of processes."""
        return len(self.cluster.workers) if self.cluster else 1

    def __str__(self) -> str:
        device = f"{'G' if self.gpus else 'C'}PU{'s' * (self.each > 1)}"
        workers = f"{self.workers} workers x " if self.cluster else ""
        return f"{workers}{self.each} {device}"


def _with_equal_shares(found: _Found, replicas: int) -> _Found:
    """Returns as many of the devices as can carry equally many logical replicas.

    Raises:
      NotNeeded: if this process has none of them.
    """
    if not replicas or not found.each or replicas % (found.workers * found.each) == 0:
        return found
    choices = [
        (workers * each, workers, each)
        for workers in range(1, found.workers + 1)
        for each in range(1, found.each + 1)
        if replicas % (workers * each) == 0
    ]
    devices, workers, each = max(choices)
    cluster = found.cluster
    if cluster is not None:
        if cluster.index >= workers:
            raise NotNeeded(
                f"worker {cluster.index} is not needed: the first {workers} of "
                f"{found.workers} workers carry the run's {replicas} replicas"
            )
        cluster = dataclasses.replace(cluster, workers=cluster.workers[:workers])
    used = found._replace(cluster=cluster, each=each)
    warn_once(
        f"{replicas} replicas cannot be shared equally by {found}: the run uses {used}, with "
        f"{counted(replicas // devices, 'replica')} each"
    )
    return used


@functools.cache
def _visible_gpus(
    cluster: Cluster | None, kind: str, tpu: str, gpus: str, logical_cpus: int
) -> int:
    """Makes the CPU's parts or the GPUs those of the options; returns the number of GPUs."""
    if logical_cpus:
        _split_cpu(logical_cpus)
        return 0
    preload_libraries()
    count = use_gpus(gpus, cluster)
    reason = _why_gpus_are_unused(kind, tpu, gpus)
    if reason:
        warn_once(f"{reason}. Continuing on the CPU; --gpus=0 hides this warning")
    return count


def _find(config: ClusterOptions, cluster: Cluster | None) -> _Found:
    kind, logical_cpus = config.strategy, config.logical_cpus
    pipeline = config.pipeline_stages > 1
    gpu_count = _visible_gpus(cluster, kind, config.tpu, config.gpus, logical_cpus)
    if pipeline and kind not in ("auto", "one_device", "multi_worker"):
        raise UserError(
            f"pipeline_stages does not work with strategy={kind}, because pipelines choose "
            "their devices: drop one of them"
        )
    if kind == "auto":
        kind = _find_kind(config.tpu, cluster, logical_cpus, pipeline)
    if kind == "multi_worker":
        if cluster is None:
            raise UserError(NO_CLUSTER)
        if logical_cpus > 1 and not pipeline:
            raise UserError(
                f"logical_cpus={logical_cpus} is for one process, but with several workers each "
                "is one replica on its CPU: drop it, and start more workers"
            )
        return _Found(kind, cluster, 1 if pipeline else gpu_count or 1, gpu_count > 0)
    each = len(_replica_devices(logical_cpus)) if kind == "mirrored" else int(kind != "tpu")
    return _Found(kind, None, each, gpu_count > 0)


@functools.cache
def _make_strategy(
    found: _Found,
    tpu: str,
    logical_cpus: int,
    fusion_bytes: int,
    deterministic: bool,
    pipeline: bool,
) -> tf.distribute.Strategy:
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    workers = None
    if found.cluster is not None:
        gpus = tf.config.get_visible_devices("GPU") if found.gpus else []
        workers = _multi_worker_strategy(
            found.cluster, len(gpus) if pipeline else found.each * found.gpus, fusion_bytes
        )
    if pipeline:
        return PipelineStrategy(workers)
    if workers is not None:
        return workers
    if found.kind == "tpu":
        return _tpu_strategy(tpu)
    devices = _replica_devices(logical_cpus)
    if found.kind == "mirrored":
        return tf.distribute.MirroredStrategy(devices[: found.each])
    return tf.distribute.OneDeviceStrategy(devices[0])


def _find_kind(tpu: str, cluster: Cluster | None, logical_cpus: int, pipeline: bool) -> str:
    if _tpu_is_named(tpu) and not pipeline:
        return "tpu"
    if cluster is not None and len(cluster.workers) > 1:
        return "multi_worker"
    if pipeline:
        return "one_device"
    return "mirrored" if len(_replica_devices(logical_cpus)) > 1 else "one_device"


def _tpu_is_named(tpu: str) -> bool:
    # TPU VMs set these variables. TensorFlow's TPU_SYSTEM device exists without a TPU, too.
    return bool(tpu or os.environ.get("TPU_NAME") or os.environ.get("TPU_ACCELERATOR_TYPE"))


def _why_gpus_are_unused(kind: str, tpu: str, gpus: str) -> str:
    """Returns why a run does not use this machine's GPUs; empty if it does, or as requested."""
    if kind == "tpu" or (kind == "auto" and _tpu_is_named(tpu)) or cpu_is_requested(gpus):
        return ""
    if tf.config.list_physical_devices("GPU"):  # The program may hide them on purpose.
        return ""
    try:
        installed = installed_gpus()
    except UserError as error:
        return f"{error}. `imagenet-fast doctor` checks this machine"
    if not installed:
        return ""
    return (
        f"this machine has {describe_gpus(installed)}, but TensorFlow sees none: {find_problem()}. "
        "`imagenet-fast doctor` checks this machine"
    )


def _replica_devices(logical_cpus: int) -> list[str]:
    gpus = tf.config.list_logical_devices("GPU")
    if gpus and not logical_cpus:
        return [device.name for device in gpus]
    return [device.name for device in tf.config.list_logical_devices("CPU")][: logical_cpus or 1]


def _split_cpu(parts: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    pieces = [tf.config.LogicalDeviceConfiguration() for _ in range(parts)]
    try:
        tf.config.set_logical_device_configuration(cpu, pieces)
    except RuntimeError:
        # TensorFlow is initialized, which is fine if it has the same number of devices.
        if len(tf.config.list_logical_devices("CPU")) != parts:
            raise UserError(
                f"logical_cpus={parts} must be set before TensorFlow starts: restart the process"
            ) from None


def _multi_worker_strategy(
    cluster: Cluster, gpus: int, fusion_bytes: int
) -> tf.distribute.MultiWorkerMirroredStrategy:
    implementations = tf.distribute.experimental.CommunicationImplementation
    with log_missing_workers(cluster), _explain_used_port(cluster), _port_restricted(cluster):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=cluster_resolver(cluster, gpus),
            communication_options=tf.distribute.experimental.CommunicationOptions(
                bytes_per_pack=fusion_bytes,
                # AUTO means gRPC rings: in eager mode TensorFlow uses NCCL only on request
                # (CollectiveParamResolverLocal::AssignCollectiveType).
                implementation=implementations.NCCL if gpus else implementations.AUTO,
            ),
        )
    check_same_devices(cluster, strategy)
    _keep_sigterm()
    return strategy


def _keep_sigterm() -> None:
    """Makes SIGTERM do what it did before TensorFlow's preemption notifier, which ignores it.

    To be called once workers have exchanged something: the notifier takes the signal in a thread.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _port_restricted(cluster: Cluster) -> Iterator[None]:
    """Keeps other machines from this worker's port if all workers are on this one; else says so.

    Workers on several machines are not restricted to their addresses: on a host itself, its name
    often stands for the loopback.
    """
    if all(map(is_loopback, cluster.hosts)):
        port = int(cluster.workers[cluster.index].rpartition(":")[2])
        with restricted([port], trusted_network=True) as reach:
            yield
        if reach.addresses is None:
            warn_once(reach.notice())
        return
    if cluster.index == 0:
        warn_once(
            "the workers' ports have no password: whoever can connect to "
            f"{cluster.workers[0]} or another can run any TensorFlow operation there: read and "
            "write files as your account. Let only the workers' machines reach them"
        )
    yield


@contextlib.contextmanager
def _explain_used_port(cluster: Cluster) -> Iterator[None]:
    """Names the port that another program uses, which TensorFlow's error does not."""
    try:
        yield
    except (tf.errors.UnknownError, PortInUse) as error:
        in_use = isinstance(error, PortInUse) or "Could not start gRPC server" in str(error)
        if not in_use:
            raise
        raise UserError(
            f"worker {cluster.index} cannot listen on its port {cluster.workers[cluster.index]}; "
            "end the program that uses it, or choose another port for it on all workers"
        ) from None


def cluster_resolver(
    cluster: Cluster, gpus: int
) -> tf.distribute.cluster_resolver.SimpleClusterResolver:
    """Returns the resolver for ``MultiWorkerMirroredStrategy``, with this worker's GPU count.

    The strategy counts GPUs itself only with a ``TFConfigClusterResolver``. Any other resolver must
    give their number, or each worker trains on its CPU
    (``CollectiveAllReduceExtended._initialize_local_devices``).
    """
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(cluster.workers)}),
        task_type="worker",
        task_id=cluster.index,
        num_accelerators={"GPU": gpus},
        rpc_layer="grpc",
    )


def _tpu_strategy(tpu: str) -> tf.distribute.TPUStrategy:
    name = tpu or os.environ.get("TPU_NAME") or "local"
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        if name != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        topology = tf.tpu.experimental.initialize_tpu_system(resolver)
        strategy = tf.distribute.TPUStrategy(resolver)
    except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
        raise UserError(
            f"cannot use the TPU {name!r}: {str(error).partition(chr(10))[0]}. A TPU VM needs the "
            "package tensorflow-tpu instead of tensorflow; elsewhere choose another --strategy. "
            "`imagenet-fast doctor` shows the devices of this machine"
        ) from error
    # [hosts, cores of a host, axes]: replica ids are also host by host.
    _TPU_COORDINATES[strategy] = [
        tuple(place) for host in topology.device_coordinates.tolist() for place in host
    ]
    return strategy
