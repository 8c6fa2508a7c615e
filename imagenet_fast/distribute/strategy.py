"""The ``tf.distribute`` strategy that options ask for."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.cuda import preload_libraries, why_no_gpu
from imagenet_fast.distribute.devices import check_same_devices, describe_gpus
from imagenet_fast.distribute.gpus import cpu_is_meant, installed_gpus, use_gpus
from imagenet_fast.distribute.options import ClusterOptions
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy
from imagenet_fast.distribute.virtual import VirtualStrategy
from imagenet_fast.distribute.waiting import waiting_told

NO_CLUSTER = (
    "strategy=multi_worker needs TF_CONFIG, or Slurm's srun, to name the workers; "
    "tools/launch_local.py starts workers on this machine"
)
# TensorFlow tells a TPU's topology once, when it is initialized.
_TPU_COORDINATES: dict[tf.distribute.Strategy, list[tuple[int, ...]]] = {}


def make_strategy(config: ClusterOptions) -> tf.distribute.Strategy:
    """Returns the strategy for ``config``: the same object for the same hardware options.

    ``auto`` takes the TPU if one is named or found, several workers if ``TF_CONFIG`` or Slurm
    says so, all GPUs if there are several, else one device.

    With pipelines, which put their weights on devices themselves, each worker is one replica.

    Raises:
      UserError: if the hardware is not there, or the cluster is malformed.
    """
    return _make_strategy(
        config.strategy,
        config.tpu,
        config.gpus,
        config.logical_cpus,
        # A single all-reduce may be fastest, which TensorFlow's own packing must not split.
        0 if config.fusion == "auto" else config.fusion_bytes,
        config.deterministic,
        config.pipeline_stages > 1,
    )


def check_gpus_are_used(options: ClusterOptions) -> None:
    """Checks that a run does not train on the CPU where there are GPUs, unless that is meant.

    ``gpus=0``, ``logical_cpus`` and an empty ``CUDA_VISIBLE_DEVICES`` mean it; a TPU is meant by
    its own options.

    Raises:
      UserError: with the reason why TensorFlow sees none of the GPUs, and what to do.
    """
    reason = (
        ""
        if options.logical_cpus
        else _why_gpus_are_unused(options.strategy, options.tpu, options.gpus)
    )
    if reason:
        raise UserError(f"{reason}. To train on the CPU, add --gpus=0")


def per_replica_batch_size(options: SharedOptions, strategy: tf.distribute.Strategy) -> int:
    """Returns the images of a weight update that each replica sees.

    Raises:
      UserError: if ``batch_size`` is not so many equal shares of ``accumulation_steps`` parts.
    """
    replicas = strategy.num_replicas_in_sync
    parts = replicas * options.accumulation_steps
    if options.batch_size % parts:
        lower = options.batch_size // parts * parts
        advice = f"{lower} or {lower + parts}" if lower else str(parts)
        raise UserError(
            f"batch_size {options.batch_size} (global) cannot be split evenly over {replicas} "
            f"replicas with accumulation_steps={options.accumulation_steps}; try {advice}"
        )
    return options.batch_size // replicas


def devices_of(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the names of the replicas' devices, as far as this process knows them."""
    return strategy.extended.worker_devices


def tpu_coordinates(strategy: tf.distribute.Strategy) -> list[tuple[int, ...]]:
    """Returns (x, y, ...) of each replica's core in a TPU, or of a virtual device; else nothing."""
    if isinstance(strategy, VirtualStrategy):
        return strategy.coordinates
    return _TPU_COORDINATES.get(strategy, [])


@functools.cache
def _make_strategy(
    kind: str,
    tpu: str,
    gpus: str,
    logical_cpus: int,
    fusion_bytes: int,
    deterministic: bool,
    pipeline: bool,
) -> tf.distribute.Strategy:
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    if logical_cpus:
        _split_cpu(logical_cpus)
    cluster = Cluster.from_environment()
    own_gpus = 0
    if not logical_cpus:
        preload_libraries()
        own_gpus = use_gpus(gpus, cluster)
        reason = _why_gpus_are_unused(kind, tpu, gpus)
        if reason:
            warn_once(f"{reason}. Continuing on the CPU; --gpus=0 hides this warning")
    if pipeline:
        if kind not in ("auto", "one_device", "multi_worker"):
            raise UserError(
                f"a pipeline has devices of its own, and does not work with strategy={kind}: drop "
                "one of them"
            )
        in_a_job = cluster is not None and len(cluster.workers) > 1
        several = kind == "multi_worker" or (kind == "auto" and in_a_job)
        workers = _multi_worker_strategy(cluster, own_gpus, fusion_bytes) if several else None
        return PipelineStrategy(workers)
    if kind == "auto":
        kind = _find_kind(tpu, cluster, logical_cpus)
    if kind == "tpu":
        return _tpu_strategy(tpu)
    if kind == "multi_worker":
        if logical_cpus > 1:
            raise UserError(
                f"logical_cpus={logical_cpus} is for one process, but several workers train here, "
                "each of which is one replica on its CPU: drop it, and start more workers"
            )
        return _multi_worker_strategy(cluster, own_gpus, fusion_bytes)
    devices = _replica_devices(logical_cpus)
    if kind == "mirrored":
        return tf.distribute.MirroredStrategy(devices)
    return tf.distribute.OneDeviceStrategy(devices[0])


def _find_kind(tpu: str, cluster: Cluster | None, logical_cpus: int) -> str:
    if _tpu_is_named(tpu):
        return "tpu"
    if cluster is not None and len(cluster.workers) > 1:
        return "multi_worker"
    return "mirrored" if len(_replica_devices(logical_cpus)) > 1 else "one_device"


def _tpu_is_named(tpu: str) -> bool:
    # TensorFlow lists a TPU_SYSTEM device where there is no TPU: only these variables, which TPU
    # VMs set, tell.
    return bool(tpu or os.environ.get("TPU_NAME") or os.environ.get("TPU_ACCELERATOR_TYPE"))


def _why_gpus_are_unused(kind: str, tpu: str, gpus: str) -> str:
    """Returns why a run would leave the GPUs unused, though nothing says that the CPU is meant."""
    if kind == "tpu" or (kind == "auto" and _tpu_is_named(tpu)) or cpu_is_meant(gpus):
        return ""
    if tf.config.list_physical_devices("GPU"):  # Whether all are hidden is the program's choice.
        return ""
    try:
        installed = installed_gpus()
    except UserError as error:
        return f"{error}. `imagenet-fast doctor` checks this machine"
    if not installed:
        return ""
    return (
        f"this machine has {describe_gpus(installed)}, but TensorFlow sees none: {why_no_gpu()} "
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
        # TensorFlow has started. That is fine if it was with as many devices.
        if len(tf.config.list_logical_devices("CPU")) != parts:
            raise UserError(
                f"logical_cpus={parts} must be set before TensorFlow starts: restart the process"
            ) from None


def _multi_worker_strategy(
    cluster: Cluster | None, gpus: int, fusion_bytes: int
) -> tf.distribute.MultiWorkerMirroredStrategy:
    if cluster is None:
        raise UserError(NO_CLUSTER)
    implementations = tf.distribute.experimental.CommunicationImplementation
    with waiting_told(cluster), _port_told(cluster):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=cluster_resolver(cluster, gpus),
            communication_options=tf.distribute.experimental.CommunicationOptions(
                bytes_per_pack=fusion_bytes,
                # AUTO would be gRPC rings: in eager mode TensorFlow takes NCCL only where it is
                # asked for (CollectiveParamResolverLocal::AssignCollectiveType).
                implementation=implementations.NCCL if gpus else implementations.AUTO,
            ),
        )
    check_same_devices(cluster, strategy)
    return strategy


@contextlib.contextmanager
def _port_told(cluster: Cluster) -> Iterator[None]:
    """Tells which port of this worker's is taken, which TensorFlow does not."""
    try:
        yield
    except tf.errors.UnknownError as error:
        if "Could not start gRPC server" not in str(error):
            raise
        raise UserError(
            f"worker {cluster.index} cannot listen on its port {cluster.workers[cluster.index]}; "
            "end the program that does, or name another port for it on all workers"
        ) from None


def cluster_resolver(
    cluster: Cluster, gpus: int
) -> tf.distribute.cluster_resolver.SimpleClusterResolver:
    """Returns what tells ``MultiWorkerMirroredStrategy`` its workers, and this one's GPUs.

    The strategy counts GPUs itself only where it is given a ``TFConfigClusterResolver``; any other
    resolver has to say their number, or each worker trains on its CPU
    (``CollectiveAllReduceExtended._initialize_local_devices``).

    Args:
      cluster: the workers, of which this process is one.
      gpus: the number of GPUs that it uses.
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
    # [hosts, cores of a host, axes]: replicas are numbered host by host, too.
    _TPU_COORDINATES[strategy] = [
        tuple(place) for host in topology.device_coordinates.tolist() for place in host
    ]
    return strategy
