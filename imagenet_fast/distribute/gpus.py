"""The GPUs of this machine: which the driver shows, and which of them a run uses.

Nothing here lists logical devices, which would start TensorFlow before a cluster is configured.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.distribute.cluster import Cluster

_DRIVER = pathlib.Path("/proc/driver/nvidia/gpus")
_NVIDIA_SMI_SECONDS = 20
# By each call of :func:`use_gpus`: the GPUs that the program had left visible, and those chosen.
_CHOICES: list[tuple[list[object], list[object]]] = []
# What CUDA_VISIBLE_DEVICES is set to by a user who wants no GPU. Slurm sets it to "NoDevFiles" in
# jobs that did not ask for any.
_HIDES_ALL = ("", "-1")


def installed_gpus() -> list[str]:
    """Returns the names of the GPUs that NVIDIA's driver shows, whatever TensorFlow sees.

    Reads ``/proc/driver/nvidia``, or asks ``nvidia-smi`` where there is none, as under WSL.

    Raises:
      UserError: if there is an ``nvidia-smi`` but it fails, as where the driver is not loaded.
    """
    if _DRIVER.is_dir():
        return [_model(gpu / "information") for gpu in sorted(_DRIVER.iterdir())]
    if shutil.which("nvidia-smi") is None:
        return []
    names, failure = _ask_nvidia_smi()
    if failure:
        raise UserError(
            f"NVIDIA's driver does not answer: {failure}; load it (`sudo modprobe nvidia`), "
            "restart the machine if the driver was updated, or start the container again"
        )
    return names


@functools.cache
def _ask_nvidia_smi() -> tuple[list[str], str]:
    """Returns the names of the GPUs that ``nvidia-smi`` lists, and why it fails; once a process."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS
        )
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi hangs (no answer in {_NVIDIA_SMI_SECONDS} s)"
    except OSError as error:
        return [], f"nvidia-smi cannot be run ({error.strerror or error})"
    words = " ".join(f"{listed.stdout} {listed.stderr}".split())
    # The status is not 0 either where the driver works and has no device.
    if listed.returncode and not words.startswith("No devices"):
        return [], f"nvidia-smi fails ({words[:300].rstrip('.') or listed.returncode})"
    return re.findall(r"^GPU \d+: (.+?) \(UUID", listed.stdout, re.MULTILINE), ""


def gpu_name(device: object) -> str:
    """Returns the name of a GPU that TensorFlow lists, such as ``NVIDIA H100 80GB HBM3``."""
    import tensorflow as tf  # here: programs print their help without it

    return tf.config.experimental.get_device_details(device).get("device_name", "unknown GPU")


def parse_gpus(text: str) -> int | tuple[int, ...] | None:
    """Returns what the option ``gpus`` asks for: a number, the ids, or None for all GPUs.

    ``3`` is the first three; ``0,2`` are two ids; ``2,`` is the one with id 2.

    Raises:
      ValueError: if ``text`` is neither, or names an id twice.
    """
    if not text:
        return None
    if text.isdecimal():
        return int(text)
    ids = tuple(int(part) for part in text.rstrip(",").split(","))
    if min(ids) < 0 or len(set(ids)) != len(ids):
        raise ValueError(text)
    return ids


def choose_gpus(
    wanted: str,
    available: int,
    cluster: Cluster | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[int]:
    """Returns the positions, among the GPUs that TensorFlow sees, of those that a process uses.

    The tasks that Slurm starts on one host share its GPUs out evenly, unless ``srun`` has bound
    some to each task already (``--gpus-per-task``, ``--gpu-bind``): then a task sees fewer than
    Slurm's ``SLURM_GPUS_ON_NODE`` and keeps what it sees.

    Args:
      wanted: the option ``gpus``.
      available: the number of GPUs that TensorFlow sees.
      cluster: the processes of the job; None: this one alone.
      environment: the variables that Slurm has set.

    Raises:
      UserError: if a GPU that is asked for does not exist, or tasks have no GPU of their own.
    """
    chosen = _chosen(wanted, available)
    if not cluster or not cluster.tasks_share_gpus or not chosen:
        return chosen
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdecimal() and available < int(on_node):
        return chosen
    task, tasks = cluster.place_on_host()
    each = len(chosen) // tasks
    if not each and not on_node.isdecimal():
        return chosen  # Each task may see GPUs of its own; check_same_devices compares them.
    if not each:
        raise UserError(
            f"{tasks} tasks on {cluster.host} cannot share {_count(len(chosen))}: start at most "
            "one task for each GPU (srun --ntasks-per-node), or train on CPUs with --gpus=0"
        )
    if len(chosen) % tasks:
        warn_once(
            f"{tasks} tasks on {cluster.host} use {each} of {len(chosen)} GPUs each: "
            f"{_count(len(chosen) % tasks)} not used"
        )
    return chosen[task * each : (task + 1) * each]


def use_gpus(wanted: str, cluster: Cluster | None = None) -> int:
    """Makes TensorFlow use the GPUs that :func:`choose_gpus` chooses; returns their number.

    They are chosen among those that the program itself has left visible, by
    ``tf.config.set_visible_devices``, which stays if nothing is chosen.

    Raises:
      UserError: as :func:`choose_gpus`; or if TensorFlow has started with other GPUs.
    """
    import tensorflow as tf

    visible = tf.config.get_visible_devices("GPU")
    before, after = _CHOICES[-1] if _CHOICES else (visible, visible)
    # What an earlier call has chosen is no choice of the program's.
    gpus = before if visible == after else visible
    chosen = [gpus[place] for place in choose_gpus(wanted, len(gpus), cluster)]
    if chosen != visible:
        try:
            tf.config.set_visible_devices(chosen, "GPU")
        except RuntimeError:
            raise UserError(
                f"gpus={wanted or 'all'} must be chosen before TensorFlow starts: restart the "
                "process"
            ) from None
    _CHOICES.append((gpus, chosen))
    return len(chosen)


def own_uuids() -> list[str]:
    """Returns the UUIDs of the GPUs that this process uses; none where the driver does not say."""
    import tensorflow as tf

    from imagenet_fast.distribute.cuda import device_uuids

    physical, uuids = tf.config.list_physical_devices("GPU"), device_uuids()
    if len(uuids) != len(physical):
        return []
    return [uuids[physical.index(gpu)] for gpu in tf.config.get_visible_devices("GPU")]


def cpu_is_meant(wanted: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the user has said that no GPU is to be used, by ``--gpus=0`` or CUDA's variable."""
    return parse_gpus(wanted) == 0 or environment.get("CUDA_VISIBLE_DEVICES") in _HIDES_ALL


def _chosen(wanted: str, available: int) -> list[int]:
    asked = parse_gpus(wanted)
    if asked is None:
        return list(range(available))
    if isinstance(asked, int):
        if asked > available:
            raise UserError(f"gpus={wanted}, but TensorFlow sees {_count(available)}{_doctor()}")
        return list(range(asked))
    missing = [str(place) for place in asked if place >= available]
    if missing:
        raise UserError(
            f"gpus={wanted} names GPU {', '.join(missing)}, but TensorFlow sees "
            f"{_count(available)}{', 0 to ' + str(available - 1) if available else ''}{_doctor()}"
        )
    return list(asked)


def _doctor() -> str:
    return "; `imagenet-fast doctor` shows this machine's, and an empty --gpus= takes all"


def _count(gpus: int) -> str:
    return f"{gpus or 'no'} GPU{'s' * (gpus != 1)}"


def _model(information: pathlib.Path) -> str:
    try:
        found = re.search(r"^Model:\s*(.+?)\s*$", information.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else "NVIDIA GPU"


def same_gpus(uuids: Sequence[Sequence[str]]) -> tuple[int, int, str] | None:
    """Returns two workers that use one and the same GPU, and its UUID; None: there are none.

    Args:
      uuids: those of each worker's GPUs.
    """
    users: dict[str, int] = {}
    for worker, own in enumerate(uuids):
        for uuid in own:
            if users.setdefault(uuid, worker) != worker:
                return users[uuid], worker, uuid
    return None
