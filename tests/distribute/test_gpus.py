"""The GPUs that a run uses, with patched GPUs."""

import pytest
from patched_devices import FakeGpus

from imagenet_fast import Config
from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute import cuda, gpus
from imagenet_fast.distribute.cluster import Cluster

LISTED = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5a3f)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-77c1)
"""
NOT_LOADED = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that "
    "the latest NVIDIA driver is installed and running."
)


def tasks(host_tasks, index):
    """A Slurm job on one or more hosts, as ``Cluster.from_slurm`` makes it."""
    workers = [f"{host}:{8888 + n}" for host, count in host_tasks.items() for n in range(count)]
    return Cluster(tuple(workers), index, tasks_share_gpus=True)


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("", [0, 1, 2, 3]),
        ("0", []),
        ("3", [0, 1, 2]),
        ("2,", [2]),
        ("3,0", [3, 0]),
        ("1,2,", [1, 2]),
    ],
)
def test_a_number_or_ids(wanted, chosen):
    assert gpus.choose_gpus(Config(gpus=wanted).gpus, 4) == chosen


@pytest.mark.parametrize("wanted", ["-1", "1,1", "two", "0,-1", ",", "0,,1", "1.5"])
def test_malformed_gpus(wanted):
    with pytest.raises(UserError, match=r"gpus is .*, but must be a number of GPUs, or distinct"):
        Config(gpus=wanted)


@pytest.mark.parametrize(
    ("wanted", "available", "message"),
    [
        ("9", 8, "gpus=9, but TensorFlow sees 8 GPUs"),
        ("1", 0, "gpus=1, but TensorFlow sees no GPUs"),
        ("2,8", 8, "gpus=2,8 names GPU 8, but TensorFlow sees 8 GPUs, 0 to 7"),
        ("0,", 0, "gpus=0, names GPU 0, but TensorFlow sees no GPUs"),
    ],
)
def test_gpus_that_do_not_exist(wanted, available, message):
    with pytest.raises(UserError, match=f"{message}; `imagenet-fast doctor`"):
        gpus.choose_gpus(wanted, available)


@pytest.mark.parametrize(
    "options",
    [{"logical_cpus": 2}, {"tpu": "local"}, {"strategy": "tpu"}],
    ids=lambda options: next(iter(options)),
)
def test_contradictions(options):
    with pytest.raises(UserError, match="gpus=2 contradicts"):
        Config(gpus="2", **options)
    Config(gpus="0", **options)


@pytest.mark.parametrize(
    ("cluster", "environment", "wanted", "available", "chosen"),
    [
        # Eight tasks of a host see all its GPUs: one each, by their number on the host.
        (tasks({"a": 8, "b": 8}, 11), {"SLURM_GPUS_ON_NODE": "8"}, "", 8, [3]),
        (tasks({"a": 2, "b": 2}, 2), {"SLURM_GPUS_ON_NODE": "8"}, "", 8, [0, 1, 2, 3]),
        (tasks({"a": 2, "b": 2}, 3), {}, "", 8, [4, 5, 6, 7]),
        # One task a host has all; what cannot be shared out evenly stays idle.
        (tasks({"a": 1, "b": 1}, 1), {"SLURM_GPUS_ON_NODE": "8"}, "", 8, list(range(8))),
        (tasks({"a": 3}, 2), {}, "", 8, [4, 5]),
        # The choice comes first.
        (tasks({"a": 2}, 1), {}, "4", 8, [2, 3]),
        (tasks({"a": 2}, 1), {}, "7,5", 8, [5]),
        # srun has bound one to each task, and no variable says how many the host has.
        (tasks({"a": 2}, 1), {}, "", 1, [0]),
        (tasks({"a": 2}, 1), {"SLURM_GPUS_ON_NODE": ""}, "", 1, [0]),
        # srun has bound two of eight to this task (--gpus-per-task=2).
        (tasks({"a": 4}, 3), {"SLURM_GPUS_ON_NODE": "8"}, "", 2, [0, 1]),
        (tasks({"a": 2}, 1), {}, "0", 8, []),
        # Under TF_CONFIG each process uses what it sees, as with TensorFlow's own resolver.
        (Cluster(("a:1", "a:2"), 1), {"SLURM_GPUS_ON_NODE": "8"}, "", 8, list(range(8))),
    ],
)
def test_tasks_of_a_host_divide_its_gpus(cluster, environment, wanted, available, chosen):
    assert gpus.choose_gpus(wanted, available, cluster, environment) == chosen


def test_more_tasks_than_gpus():
    with pytest.raises(UserError, match=r"4 tasks on a cannot share 2 GPUs: .*--ntasks-per-node"):
        gpus.choose_gpus("", 2, tasks({"a": 4}, 0), {"SLURM_GPUS_ON_NODE": "2"})


@pytest.fixture
def devices(monkeypatch):
    """Four GPUs that TensorFlow sees, of which none were chosen before."""
    monkeypatch.setattr(gpus, "_CHOICES", [])
    return FakeGpus(monkeypatch, 4)


def test_only_chosen_gpus_are_visible(devices):
    assert gpus.use_gpus("") == 4
    assert gpus.use_gpus("3,") == 1
    assert devices.visible == devices.physical[3:]
    # A later choice is made among all GPUs, not among those of an earlier one.
    assert gpus.use_gpus("2") == 2
    assert gpus.use_gpus("0") == 0
    assert gpus.use_gpus("") == 4
    assert devices.visible == devices.physical


def test_gpus_hidden_by_the_program_stay_hidden(devices):
    devices.visible = devices.physical[1:3]
    assert gpus.use_gpus("") == 2
    assert gpus.use_gpus("1,") == 1
    assert devices.visible == devices.physical[2:3]
    assert gpus.use_gpus("") == 2
    with pytest.raises(UserError, match="gpus=3, but TensorFlow sees 2 GPUs"):
        gpus.use_gpus("3")
    devices.visible = []  # the usual way to say that the CPU is meant
    assert gpus.use_gpus("") == 0


def test_a_second_strategy_gets_the_same_gpus(devices):
    """Not a part of the task's part."""
    for _ in range(2):
        assert gpus.use_gpus("", tasks({"a": 2}, 1)) == 2
        assert devices.visible == devices.physical[2:]
    devices.started = True
    assert gpus.use_gpus("", tasks({"a": 2}, 1)) == 2
    with pytest.raises(UserError, match="gpus=1 must be chosen before TensorFlow starts: restart"):
        gpus.use_gpus("1")


def test_uuids_identify_gpus(devices, monkeypatch):
    """CUDA numbers them from 0 in each bound Slurm task, and in each container."""
    monkeypatch.setattr(cuda, "device_uuids", lambda: ["aa", "bb", "cc", "dd"])
    devices.visible = devices.physical[2:]
    assert gpus.visible_uuids() == ["cc", "dd"]
    # TensorFlow lists others than the driver: which is which is not known.
    monkeypatch.setattr(cuda, "device_uuids", lambda: ["aa"])
    assert gpus.visible_uuids() == []


def test_installed_gpus_from_the_drivers_files(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "gpus")
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)
    assert gpus.installed_gpus() == []
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
    (tmp_path / "gpus" / "0000:01:00.0" / "information").write_text(
        "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 16\n"
    )
    assert gpus.installed_gpus() == ["NVIDIA H100 80GB HBM3", "NVIDIA GPU"]


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """Replaces nvidia-smi by a script, on a machine whose driver has no folder."""

    def nvidia_smi(script):
        program = tmp_path / "nvidia-smi"
        program.write_text(script)
        program.chmod(0o755)
        monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "gpus")
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        gpus._run_nvidia_smi.cache_clear()

    yield nvidia_smi
    gpus._run_nvidia_smi.cache_clear()


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n", ["NVIDIA H100 80GB HBM3"] * 2),
        ("#!/bin/sh\necho No devices found.\nexit 6\n", []),
    ],
)
def test_installed_gpus_from_nvidia_smi(nvidia_smi, script, found):
    nvidia_smi(script)
    assert gpus.installed_gpus() == found


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (f'#!/bin/sh\necho "{NOT_LOADED}"\nexit 9\n', rf"nvidia-smi failed \({NOT_LOADED[:-1]}\)"),
        ("#!/bin/sh\necho mismatch >&2\nexit 18\n", r"nvidia-smi failed \(mismatch\)"),
        ("#!/bin/sh\nexit 255\n", r"nvidia-smi failed \(255\)"),
        ("#!/bin/sh\nexec sleep 60\n", r"nvidia-smi hangs \(no answer in 0.5 s\)"),
        ("#!/nowhere/sh\n", r"nvidia-smi cannot be run \(No such file or directory\)"),
    ],
)
def test_a_driver_that_does_not_respond(nvidia_smi, monkeypatch, script, reason):
    nvidia_smi(script)
    monkeypatch.setattr(gpus, "_NVIDIA_SMI_SECONDS", 0.5)
    for _ in range(2):
        with pytest.raises(
            UserError, match=f"driver does not respond: {reason}; load it .*restart"
        ):
            gpus.installed_gpus()


@pytest.mark.parametrize(
    ("wanted", "variables", "meant"),
    [
        ("", {}, False),
        ("0", {}, True),
        ("0,", {}, False),
        ("2", {}, False),
        ("", {"CUDA_VISIBLE_DEVICES": ""}, True),
        ("", {"CUDA_VISIBLE_DEVICES": "-1"}, True),
        ("", {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, False),  # Slurm's, where none was asked for
    ],
)
def test_cpu_is_requested(wanted, variables, meant):
    assert gpus.cpu_is_requested(wanted, variables) == meant


def test_shared_gpu():
    assert gpus.shared_gpu([["aa", "bb"], ["cc"], [], []]) is None
    assert gpus.shared_gpu([["aa", "bb"], ["cc"], ["bb"]]) == (0, 2, "bb")
