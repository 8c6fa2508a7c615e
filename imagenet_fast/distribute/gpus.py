"""The GPUs of this machine, and those that a run uses.

This module does not list logical devices, which would initialize TensorFlow before a cluster is
configured.
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
# For each call of use_gpus: the GPUs that the program had left visible, and those chosen.
_CHOICES: list[tuple[list[object], list[object]]] = []
# Values of CUDA_VISIBLE_DEVICES of users who want no GPU. ("NoDevFiles" is Slurm's, in jobs that
# did not request GPUs.)
_HIDES_ALL = ("", "-1")


def installed_gpus() -> list[str]:
    """Returns the models of the GPUs that NVIDIA's driver lists, whether TensorFlow sees them.

    Reads ``/proc/driver/nvidia``, or runs ``nvidia-smi`` if that is missing, as under WSL.

    Raises:
      UserError: if ``nvidia-smi`` fails, for example because the driver is not loaded.
    """
    if _DRIVER.is_dir():
        return [_model(gpu / "information") for gpu in sorted(_DRIVER.iterdir())]
    if shutil.which("nvidia-smi") is None:
        return []
    names, failure = _run_nvidia_smi()
    if failure:
        raise UserError(
            f"NVIDIA's driver does not respond: {failure}; load it (`sudo modprobe nvidia`), "
            "restart the machine if the driver was updated, or restart the container"
        )
    return names


@functools.cache
def _run_nvidia_smi() -> tuple[list[str], str]:
    """Returns the models of the GPUs that ``nvidia-smi`` lists, and why it failed; cached."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS
        )
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi hangs (no answer in {_NVIDIA_SMI_SECONDS} s)"
    except OSError as error:
        return [], f"nvidia-smi cannot be run ({error.strerror or error})"
    output = " ".join(f"{listed.stdout} {listed.stderr}".split())
    # The status is also not 0 if the driver works but has no device.
    if listed.returncode and not output.startswith("No devices"):
        return [], f"nvidia-smi failed ({output[:300].rstrip('.') or listed.returncode})"
    return re.findall(r"^GPU \d+: (.+?) \(UUID", listed.stdout, re.MULTILINE), ""


def gpu_name(device: object) -> str:
    """Returns the model of a GPU that TensorFlow lists, such as ``NVIDIA H100 80GB HBM3``."""
    import tensorflow as tf  # Here, so that --help does not import it.

    return tf.config.experimental.get_device_details(device).get("device_name", "unknown GPU")


def parse_gpus(text: str) -> int | tuple[int, ...] | None:
    """Parses the option ``gpus``: a number of GPUs, their ids, or None for all.

    ``3`` means the first three, ``0,2`` two ids, and ``2,`` the id 2.

    Raises:
      ValueError: if ``text`` is malformed, or repeats an id.
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
    """Returns the indices, among the GPUs that TensorFlow sees, of those that a process uses.

    Slurm tasks on one host divide its GPUs evenly, unless ``srun`` has bound GPUs to tasks
    (``--gpus-per-task``, ``--gpu-bind``): then a task sees fewer than ``SLURM_GPUS_ON_NODE``, and
    uses all it sees.

    Args:
      wanted: the option ``gpus``.
      available: the number of GPUs that TensorFlow sees.
      cluster: the processes of the job; None: this process only.
      environment: environment variables.

    Raises:
      UserError: if a requested GPU does not exist, or there are fewer GPUs than tasks.
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
        return chosen  # Each task may see other GPUs; check_same_devices compares them.
    if not each:
        raise UserError(
            f"{tasks} tasks on {cluster.host} cannot share {_count(len(chosen))}: start at most "
            "one task per GPU (srun --ntasks-per-node), or train on CPUs with --gpus=0"
        )
    if len(chosen) % tasks:
        warn_once(
            f"{tasks} tasks on {cluster.host} use {each} of {len(chosen)} GPUs each: "
            f"{_count(len(chosen) % tasks)} unused"
        )
    return chosen[task * each : (task + 1) * each]


def use_gpus(wanted: str, cluster: Cluster | None = None) -> int:
    """Makes the GPUs of :func:`choose_gpus` visible to TensorFlow; returns their number.

    It chooses among those that the program has left visible (``tf.config.set_visible_devices``).

    Raises:
      UserError: as :func:`choose_gpus`, or if TensorFlow is already initialized with other GPUs.
    """
    import tensorflow as tf

    visible = tf.config.get_visible_devices("GPU")
    before, after = _CHOICES[-1] if _CHOICES else (visible, visible)
    # If an earlier call chose the visible ones, choose among those before it.
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


def visible_uuids() -> list[str]:
    """Returns the UUIDs of the GPUs that this process uses; empty if the driver has none."""
    import tensorflow as tf

    from imagenet_fast.distribute.cuda import device_uuids

    physical, uuids = tf.config.list_physical_devices("GPU"), device_uuids()
    if len(uuids) != len(physical):
        return []
    return [uuids[physical.index(gpu)] for gpu in tf.config.get_visible_devices("GPU")]


def cpu_is_requested(wanted: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the user disabled GPUs, by ``--gpus=0`` or ``CUDA_VISIBLE_DEVICES``."""
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
    return "; `imagenet-fast doctor` lists this machine's, and an empty --gpus= uses all"


def _count(gpus: int) -> str:
    return f"{gpus or 'no'} GPU{'s' * (gpus != 1)}"


def _model(information: pathlib.Path) -> str:
    try:
        match = re.search(r"^Model:\s*(.+?)\s*$", information.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else "NVIDIA GPU"


def shared_gpu(uuids: Sequence[Sequence[str]]) -> tuple[int, int, str] | None:
    """Returns two workers that use the same GPU, and its UUID, by those of each; None: none do."""
    users: dict[str, int] = {}
    for worker, gpus in enumerate(uuids):
        for uuid in gpus:
            if users.setdefault(uuid, worker) != worker:
                return users[uuid], worker, uuid
    return None
