"""The devices of a run, and a check that all workers have suitable ones."""

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
from imagenet_fast.distribute.gpus import gpu_name, shared_gpu, visible_uuids
from imagenet_fast.distribute.tpu import is_tpu
from imagenet_fast.distribute.workers import collective_hint, worker_place, workers_of

# A hanging driver of one worker must not make all workers wait forever.
_LIST_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class RunDevices:
    """The devices of a run.

    Attributes:
      workers: number of worker processes.
      each: devices of each worker.
      kind: ``"CPU"``, ``"GPU"`` or ``"TPU"``.
      name: the model of this process's devices, such as ``NVIDIA H100 80GB HBM3``; empty: unknown.
      collective: the implementation of all-reduces: ``"NCCL"``, ``"gRPC"`` between workers' CPUs,
        ``"ring"`` between the logical CPUs of a process, ``"XLA"`` on a TPU; empty: one replica.
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
    """Returns the devices of a run; ``devices`` are TensorFlow's names of this process'."""
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
    # MirroredStrategy uses NCCL for physical GPUs (_make_collective_ops_with_fallbacks).
    implementation = strategy.extended._communication_options.implementation.value
    return "NCCL" if implementation == "NCCL" else "ring"


def visible_gpu_names() -> list[str]:
    """Returns the models of the GPUs that this process uses, in TensorFlow's order."""
    return [gpu_name(gpu) for gpu in tf.config.get_visible_devices("GPU")]


def describe_gpus(names: Sequence[str]) -> str:
    """Returns a description of GPUs, such as ``8 GPU (NVIDIA H100 80GB HBM3)`` or ``no GPU``."""
    if not names:
        return "no GPU"
    counts = collections.Counter(names)
    if len(counts) == 1:
        return f"{len(names)} GPU ({names[0]})"
    return f"{len(names)} GPU ({', '.join(f'{n} x {name}' for name, n in counts.items())})"


def check_same_devices(cluster: Cluster, strategy: tf.distribute.Strategy) -> None:
    """Checks that all workers have the same number of GPUs, and share none.

    All workers must call it before their first collective, which could otherwise wait forever or
    fail inside NCCL. ``make_strategy`` calls it as soon as the workers have connected, so its time
    limit covers a worker that hangs while it lists its GPUs.

    Raises:
      UserError: in all workers, with the workers that differ and their GPUs, or with a worker that
        stopped, or did not list its GPUs in time, after it connected.
    """
    gpus = {"gpus": visible_gpu_names(), "uuids": visible_uuids()}
    try:
        texts = texts_of_all(strategy, json.dumps(gpus), _LIST_SECONDS)
    except tf.errors.UnavailableError as error:
        raise UserError(
            f"a worker connected, but did not list its GPUs: see its output ({error.message})"
        ) from None
    problem = _gpu_problem(cluster, [json.loads(text) for text in texts])
    if problem:
        raise UserError(problem)


def _gpu_problem(cluster: Cluster, found: Sequence[dict[str, list[str]]]) -> str:
    """Returns why the workers cannot train together with their GPUs; empty if they can."""
    counts = [len(worker["gpus"]) for worker in found]
    for other, count in enumerate(counts):
        if count != counts[0]:
            have = " and ".join(
                f"worker {worker} ({cluster.workers[worker]}) has "
                f"{describe_gpus(found[worker]['gpus'])}"
                for worker in (0, other)
            )
            return (
                f"{have}, but all workers need the same number of GPUs: choose them with --gpus, "
                "or run `imagenet-fast doctor` on the worker with missing ones"
            )
    shared = shared_gpu([worker["uuids"] for worker in found])
    if not shared:
        return ""
    first, second, uuid = shared
    return (
        f"workers {first} ({cluster.workers[first]}) and {second} ({cluster.workers[second]}) both "
        f"use the GPU with UUID {uuid}, but workers cannot share GPUs: set CUDA_VISIBLE_DEVICES "
        "for each, start them with tools/launch_local.py or srun (check its --gpu-bind), or start "
        "one worker on each machine"
    )
