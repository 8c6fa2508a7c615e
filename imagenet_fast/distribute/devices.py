"""The devices that a run computes on: their names, and whether all workers have alike ones."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Sequence

import tensorflow as tf

from imagenet_fast.base.environment import cpu_name
from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.exchange import texts_of_all
from imagenet_fast.distribute.gpus import gpu_name, own_uuids, same_gpus
from imagenet_fast.distribute.tpu import is_tpu
from imagenet_fast.distribute.workers import collective_hint, worker_place, workers_of

# A driver that hangs would otherwise make all workers wait forever.
_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class RunDevices:
    """What a run computes on.

    Attributes:
      workers: processes that train together.
      each: devices of each worker.
      kind: ``"CPU"``, ``"GPU"`` or ``"TPU"``.
      name: of the devices of this process, such as ``NVIDIA H100 80GB HBM3``; empty if unknown.
      collective: what carries all-reduces: ``"NCCL"``, ``"gRPC"`` between workers' CPUs, ``"ring"``
        between the logical CPUs of a process, ``"XLA"`` on a TPU; empty if there is one replica.
    """

    workers: int
    each: int
    kind: str
    name: str
    collective: str

    def __str__(self) -> str:
        return (
            (f"{self.workers} workers x " if self.workers > 1 else "")
            + f"{self.each} {self.kind}"
            + (f" ({self.name})" if self.name else "")
            + (f", {self.collective}" if self.collective else "")
        )


def run_devices(strategy: tf.distribute.Strategy, devices: Sequence[str]) -> RunDevices:
    """Returns what a run computes on.

    Args:
      strategy: of the run.
      devices: names of this process' devices that compute, as TensorFlow has them.
    """
    kinds = {tf.DeviceSpec.from_string(device).device_type for device in devices}
    kind = "+".join(sorted(kinds))
    workers, _ = worker_place(strategy)
    names = {"CPU": lambda: [cpu_name()], "GPU": visible_gpu_names}.get(kind, list)()
    return RunDevices(
        workers=workers,
        each=strategy.num_replicas_in_sync if is_tpu(strategy) else len(devices),
        kind=kind,
        name=", ".join(dict.fromkeys(names)),
        collective=_collective(strategy),
    )


def _collective(strategy: tf.distribute.Strategy) -> str:
    if strategy.num_replicas_in_sync == 1:
        return ""
    if is_tpu(strategy):
        return "XLA"
    if workers_of(strategy) is not None:
        return "NCCL" if collective_hint(strategy) == "nccl" else "gRPC"
    # MirroredStrategy takes NCCL for GPUs that are not split (_make_collective_ops_with_fallbacks).
    chosen = strategy.extended._communication_options.implementation.value
    return "NCCL" if chosen == "NCCL" else "ring"


def visible_gpu_names() -> list[str]:
    """Returns the names of the GPUs that this process uses, in TensorFlow's order."""
    return [gpu_name(gpu) for gpu in tf.config.get_visible_devices("GPU")]


def describe_gpus(names: Sequence[str]) -> str:
    """Returns GPUs in words, such as ``8 GPU (NVIDIA H100 80GB HBM3)``; ``no GPU``."""
    if not names:
        return "no GPU"
    kinds = collections.Counter(names)
    if len(kinds) == 1:
        return f"{len(names)} GPU ({names[0]})"
    told = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    return f"{len(names)} GPU ({told})"


def check_same_devices(cluster: Cluster, strategy: tf.distribute.Strategy) -> None:
    """Checks that all workers have equally many GPUs, and that no two use the same one.

    All workers must call it before their first collective, which would otherwise wait forever or
    fail inside NCCL.

    Args:
      cluster: the workers, of which this process is one.
      strategy: theirs.

    Raises:
      UserError: in all workers, naming those that differ and what they have; or naming a worker
        that stopped, or did not list its GPUs in time, after it connected.
    """
    own = {"gpus": visible_gpu_names(), "uuids": own_uuids()}
    try:
        texts = texts_of_all(strategy, json.dumps(own), _SECONDS)
    except tf.errors.UnavailableError as error:
        raise UserError(
            f"a worker connected, but did not list its GPUs: see its output ({error.message})"
        ) from None
    wrong = _difference(cluster, [json.loads(text) for text in texts])
    if wrong:
        raise UserError(wrong)


def _difference(cluster: Cluster, found: Sequence[dict[str, list[str]]]) -> str:
    """Returns what is wrong with the workers' GPUs; nothing if they can train together."""
    counts = [len(worker["gpus"]) for worker in found]
    for other, count in enumerate(counts):
        if count != counts[0]:
            told = " and ".join(
                f"worker {worker} ({cluster.workers[worker]}) has "
                f"{describe_gpus(found[worker]['gpus'])}"
                for worker in (0, other)
            )
            return (
                f"{told}, but all workers need equally many GPUs: choose them with --gpus, or run "
                "`imagenet-fast doctor` on the worker that lacks some"
            )
    shared = same_gpus([worker["uuids"] for worker in found])
    if not shared:
        return ""
    first, second, uuid = shared
    return (
        f"workers {first} ({cluster.workers[first]}) and {second} ({cluster.workers[second]}) both "
        f"use the GPU with UUID {uuid}, but each needs GPUs of its own: set CUDA_VISIBLE_DEVICES "
        "for each, start them with tools/launch_local.py or srun (of GPUs that srun binds, "
        "--gpu-bind decides), or start one worker on each machine"
    )
