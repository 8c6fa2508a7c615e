"""Strategies, as far as one machine without accelerators can show."""

import contextlib
import pathlib
import signal
import types
import urllib.error

import numpy as np
import pytest
import tensorflow as tf
from patched_devices import FakeGpus, RecordedStrategy, local_devices
from server_processes import other_address
from tf_configs import tf_config_of

from imagenet_fast.base.errors import NotNeeded, UserError
from imagenet_fast.config import Config
from imagenet_fast.distribute import gpus, strategy
from imagenet_fast.distribute.cluster import Cluster, place_of
from imagenet_fast.distribute.strategy import (
    make_strategy,
    per_replica_batch_size,
    tpu_coordinates,
)
from imagenet_fast.distribute.workers import is_chief

ROOT = pathlib.Path(__file__).parents[2]
LOGICAL_CPUS = """
import pytest
import tensorflow as tf
from imagenet_fast import Config, UserError, make_strategy

config = Config(logical_cpus=2, batch_size=6)
strategy = make_strategy(config)
assert type(strategy) is tf.distribute.MirroredStrategy
assert strategy.num_replicas_in_sync == 2
assert all("CPU" in device for device in strategy.extended.worker_devices)
assert len(set(strategy.extended.worker_devices)) == 2

# The same hardware, the same object: data and model must be made for one strategy.
assert make_strategy(config.replace(seed=3, batch_size=8)) is strategy
assert make_strategy(config.replace(strategy="mirrored")).num_replicas_in_sync == 2

one = make_strategy(config.replace(strategy="one_device", batch_size=5))
assert type(one) is tf.distribute.OneDeviceStrategy
assert one.num_replicas_in_sync == 1

with pytest.raises(UserError, match="logical_cpus=3 must be set before TensorFlow starts"):
    make_strategy(config.replace(logical_cpus=3))

if not tf.config.list_physical_devices("TPU"):
    with pytest.raises(UserError, match="cannot use the TPU 'local'"):
        make_strategy(Config(strategy="tpu"))
"""


@pytest.fixture
def no_cluster(monkeypatch):
    for name in ("TF_CONFIG", "SLURM_STEP_NUM_TASKS", "TPU_NAME", "TPU_ACCELERATOR_TYPE"):
        monkeypatch.delenv(name, raising=False)


def replicas(number):
    return types.SimpleNamespace(num_replicas_in_sync=number)


def test_logical_cpus(run_python, no_cluster):
    run_python(["-c", LOGICAL_CPUS])


@pytest.mark.parametrize(
    ("batch", "number", "accumulation", "share"),
    [(256, 1, 1, 256), (256, 8, 1, 32), (8192, 256, 1, 32), (256, 4, 8, 64), (12, 2, 3, 6)],
)
def test_per_replica_batch_size(batch, number, accumulation, share):
    config = Config(batch_size=batch, accumulation_steps=accumulation)
    assert per_replica_batch_size(config, replicas(number)) == share


@pytest.mark.parametrize(
    ("batch", "number", "accumulation", "advice"),
    [
        (100, 8, 1, "over 8 replicas with accumulation_steps=1; try 96 or 104"),
        (256, 3, 1, "try 255 or 258"),
        (12, 4, 2, "over 4 replicas with accumulation_steps=2; try 8 or 16"),
        (4, 8, 1, "try 8"),
        (6, 4, 3, "try 12"),
    ],
)
def test_batch_that_cannot_be_split(batch, number, accumulation, advice):
    config = Config(batch_size=batch, accumulation_steps=accumulation)
    with pytest.raises(UserError) as caught:
        per_replica_batch_size(config, replicas(number))
    assert str(caught.value).startswith(f"batch_size {batch} (global) cannot be split evenly")
    assert str(caught.value).endswith(advice)
    for size in advice.partition("try ")[2].split(" or "):
        per_replica_batch_size(config.replace(batch_size=int(size)), replicas(number))


def test_one_device(no_cluster):
    strategy = make_strategy(Config(strategy="one_device"))
    assert type(strategy) is tf.distribute.OneDeviceStrategy


def test_several_workers_without_addresses(no_cluster):
    with pytest.raises(UserError, match="multi_worker needs the workers' addresses from TF_CONFIG"):
        make_strategy(Config(strategy="multi_worker"))


@pytest.fixture
def patched(no_cluster, monkeypatch):
    """Returns what makes the strategy of a worker that sees so many GPUs; none is started."""

    def forget():
        for function in (strategy._visible_gpus, strategy._make_strategy):
            function.cache_clear()

    forget()

    def make(seen, environment, **options):
        monkeypatch.setattr(gpus, "_CHOICES", [])
        devices = FakeGpus(monkeypatch, seen)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", RecordedStrategy)
        for context in ("log_missing_workers", "_port_restricted"):
            monkeypatch.setattr(strategy, context, lambda cluster: contextlib.nullcontext())
        monkeypatch.setattr(strategy, "check_same_devices", lambda *_: None)
        forget()
        return make_strategy(Config(**{"strategy": "multi_worker", **options})), devices

    yield make
    forget()


def tf_config(workers, index):
    return {"TF_CONFIG": tf_config_of(workers, index)}


def slurm(workers, index):
    """One task on each of several hosts, or all on one."""
    hosts = list(dict.fromkeys(worker.partition(":")[0] for worker in workers))
    return {
        "SLURM_PROCID": f"{index}",
        "SLURM_STEP_NUM_TASKS": f"{len(workers)}",
        "SLURM_STEP_NODELIST": ",".join(hosts),
        "SLURM_STEP_TASKS_PER_NODE": f"{len(workers) // len(hosts)}(x{len(hosts)})",
    }


@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("count", [1, 2, 32])
@pytest.mark.parametrize("source", [tf_config, slurm])
def test_workers_have_the_devices_of_tensorflows_own_resolver(
    patched, monkeypatch, gpus, count, source
):
    """Those that ``TFConfigClusterResolver`` gives, with which alone TensorFlow counts GPUs.

    ``CollectiveAllReduceExtended._initialize_local_devices`` decides, which is called here; with
    ``num_accelerators={"GPU": 0}`` each worker would train on its CPU.
    """
    workers, index = tuple(f"host{n}:8888" for n in range(count)), count - 1
    if source is slurm and count == 1:
        pytest.skip("one task of Slurm's is no cluster")
    made, _ = patched(gpus, source(workers, index))
    monkeypatch.setenv("TF_CONFIG", tf_config_of(workers, index))
    theirs = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    assert made.devices == local_devices(theirs)
    assert len(made.devices) == max(gpus, 1)
    assert all(f"/task:{index}/device:{'GPU' if gpus else 'CPU'}:" in name for name in made.devices)
    # AUTO is gRPC in eager mode: see docs/communication.md.
    assert made.options.implementation.value == ("NCCL" if gpus else "AUTO")


def test_tasks_of_one_host_have_gpus_of_their_own(patched):
    workers = tuple(f"host:{8888 + task}" for task in range(4))
    places = []
    for task in range(4):
        made, devices = patched(8, slurm(workers, task))
        assert len(made.devices) == 2
        places += [devices.physical.index(gpu) for gpu in devices.visible]
    assert places == list(range(8))


@pytest.mark.parametrize(
    ("gpus", "count", "replicas", "workers", "each"),
    [
        (8, 4, 32, 4, 8),  # one on each
        (8, 2, 32, 2, 8),  # two on each
        (8, 3, 32, 2, 8),  # not 24 devices
        (8, 1, 4, 1, 4),  # more devices than replicas
        (3, 3, 8, 2, 2),  # not 9
        (0, 7, 8, 4, 1),  # CPUs
        (8, 5, 5, 5, 1),
    ],
)
def test_as_many_devices_as_carry_equally_many_replicas(
    patched, gpus, count, replicas, workers, each
):
    names = tuple(f"host{n}:8888" for n in range(count))
    options = {"batch_size": 4 * replicas, "replicas": (replicas,)}
    for index in range(count):
        if index >= workers:
            with pytest.raises(NotNeeded, match=f"the first {workers} of {count} workers carry"):
                patched(gpus, tf_config(names, index), **options)
            continue
        made, _ = patched(gpus, tf_config(names, index), **options)
        assert len(made.devices) == each
        assert place_of(made.resolver) == ((workers, index) if workers > 1 else (1, 0))


def test_the_local_launcher_divides_gpus(patched, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import launch_local

    monkeypatch.setattr(launch_local, "count_gpus", lambda: 8)
    seen = []
    for environment in launch_local.worker_environments([5000, 5001], {}):
        given = environment["CUDA_VISIBLE_DEVICES"].split(",")
        made, _ = patched(len(given), environment)
        assert len(made.devices) == 4
        seen += given
    assert seen == [f"{gpu}" for gpu in range(8)]


@pytest.mark.parametrize(
    ("wanted", "kinds"), [("3", ["GPU"] * 3), ("5,1", ["GPU"] * 2), ("0", ["CPU"])]
)
def test_some_of_a_machines_gpus(patched, wanted, kinds):
    made, devices = patched(8, tf_config(("a:1", "b:1"), 0), gpus=wanted)
    assert [tf.DeviceSpec.from_string(name).device_type for name in made.devices] == kinds
    assert [devices.physical.index(gpu) for gpu in devices.visible] == {
        "3": [0, 1, 2],
        "5,1": [5, 1],
        "0": [],
    }[wanted]
    assert made.options.implementation.value == ("AUTO" if wanted == "0" else "NCCL")


def test_workers_are_not_split_into_logical_cpus(patched, monkeypatch):
    monkeypatch.setattr(strategy, "_split_cpu", lambda parts: None)
    with pytest.raises(
        UserError, match="logical_cpus=2 is for one process, but with several workers"
    ):
        patched(0, tf_config(("a:1", "b:1"), 0), logical_cpus=2)
    # With GPUs there, one logical CPU is the CPU, too.
    made, _ = patched(8, tf_config(("a:1", "b:1"), 0), logical_cpus=1)
    assert made.devices == ("/job:worker/task:0/device:CPU:0",)
    assert made.options.implementation.value == "AUTO"


@pytest.mark.parametrize(
    ("options", "variables", "refused"),
    [
        ({}, {}, True),
        ({"strategy": "one_device"}, {}, True),
        ({"strategy": "multi_worker"}, {}, True),
        ({"gpus": "0"}, {}, False),
        ({"logical_cpus": 2}, {}, False),
        ({"strategy": "tpu"}, {}, False),
        ({}, {"TPU_NAME": "pod"}, False),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, False),
    ],
)
def test_gpus_that_tensorflow_does_not_see(no_cluster, monkeypatch, options, variables, refused):
    FakeGpus(monkeypatch, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(strategy, "installed_gpus", lambda: ["NVIDIA L4"] * 2)
    monkeypatch.setattr(strategy, "find_problem", lambda: "libcudnn.so.9 cannot be loaded")
    expected = (
        r"this machine has 2 GPU \(NVIDIA L4\), but TensorFlow sees none: libcudnn.so.9 cannot be "
        "loaded. `imagenet-fast doctor` .* add --gpus=0"
    )
    with pytest.raises(UserError, match=expected) if refused else contextlib.nullcontext():
        strategy.check_gpus_are_used(Config(**options))
    # Where TensorFlow sees some, whether the program uses them or not, or there are none, nothing
    # is wrong.
    devices = FakeGpus(monkeypatch, 1)
    for visible in (devices.physical, []):
        devices.visible = visible
        strategy.check_gpus_are_used(Config(**options))
    FakeGpus(monkeypatch, 0)
    monkeypatch.setattr(strategy, "installed_gpus", list)
    strategy.check_gpus_are_used(Config(**options))


@pytest.mark.parametrize("gpus", ["", "0"])
def test_a_driver_that_does_not_respond(no_cluster, monkeypatch, gpus):
    """Whether there are GPUs is unknown, so a run uses the CPU only on request."""

    def installed_gpus():
        raise UserError("NVIDIA's driver does not respond: nvidia-smi failed (9); load it")

    FakeGpus(monkeypatch, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(strategy, "installed_gpus", installed_gpus)
    expected = r"nvidia-smi failed \(9\); load it. `imagenet-fast doctor` .* add --gpus=0"
    with contextlib.nullcontext() if gpus else pytest.raises(UserError, match=expected):
        strategy.check_gpus_are_used(Config(gpus=gpus))


PORT_IN_USE = """
import json, os, socket
from imagenet_fast import Config, UserError, make_strategy

with socket.create_server(("127.0.0.1", 0)) as server:
    own = f"127.0.0.1:{server.getsockname()[1]}"
    task = {"cluster": {"worker": [own, "127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}
    os.environ["TF_CONFIG"] = json.dumps(task)
    try:
        make_strategy(Config(strategy="multi_worker"))
    except UserError as error:
        assert f"worker 0 cannot listen on its port {own}; end the program" in str(error), error
    else:
        raise AssertionError
"""


def test_a_port_that_another_program_uses(run_python, no_cluster):
    run_python(["-c", PORT_IN_USE])


LOCAL_WORKER = """
import json, os, socket, sys
from imagenet_fast import Config, make_strategy
from imagenet_fast.base.addresses import free_port

port = free_port()
task = {"cluster": {"worker": [f"localhost:{port}"]}, "task": {"type": "worker", "index": 0}}
os.environ["TF_CONFIG"] = json.dumps(task)
make_strategy(Config(strategy="multi_worker", gpus="0"))
socket.create_connection(("127.0.0.1", port), timeout=5).close()
try:
    socket.create_connection((sys.argv[1], port), timeout=0.5)
except TimeoutError:
    print("restricted", flush=True)
os._exit(0)
"""


def test_workers_on_this_machine_are_not_reached_from_others(run_python, no_cluster):
    finished = run_python(["-c", LOCAL_WORKER, other_address()])
    assert finished.stdout == "restricted\n"
    assert "password" not in finished.stderr


def test_the_first_of_workers_on_several_machines_says_who_reaches_them(capsys):
    workers = ("127.0.0.1:8888", "other:8888")
    with strategy._port_restricted(Cluster(workers, 1)):
        assert capsys.readouterr().err == ""
    with strategy._port_restricted(Cluster(workers, 0)):
        assert capsys.readouterr().err == (
            "the workers' ports have no password: whoever can connect to 127.0.0.1:8888 or another "
            "can run any TensorFlow operation there: read and write files as your account. Let "
            "only the workers' machines reach them\n"
        )


def test_malformed_cluster_stops_even_one_device(no_cluster, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    with pytest.raises(UserError, match="TF_CONFIG lacks 'cluster'"):
        make_strategy(Config(strategy="one_device", batch_size=1))


@pytest.mark.parametrize(
    "error",
    [
        # What TensorFlow raises for a name, outside of Google's cloud and inside.
        urllib.error.URLError("Name or service not known"),
        ValueError("Please provide a TPU Name to connect to."),
        RuntimeError("TPU is not found"),
        tf.errors.NotFoundError(None, None, "TPUs not found in the cluster"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("strategy", ["auto", "tpu"])
def test_tpu_that_cannot_be_used(no_cluster, monkeypatch, strategy, error):
    def resolver(tpu):
        assert tpu == "nowhere"
        raise error

    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", resolver)
    with pytest.raises(UserError, match=r"cannot use the TPU 'nowhere'.* another --strategy"):
        make_strategy(Config(tpu="nowhere", strategy=strategy))


@pytest.mark.parametrize("variable", ["TPU_NAME", "TPU_ACCELERATOR_TYPE"])
def test_variables_of_a_tpu_vm_ask_for_the_tpu(no_cluster, monkeypatch, variable):
    def resolver(tpu):
        raise RuntimeError(f"asked for {tpu}")

    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", resolver)
    monkeypatch.setenv(variable, "v3-8")
    name = "v3-8" if variable == "TPU_NAME" else "local"
    with pytest.raises(UserError, match=f"asked for {name}"):
        # Not the strategy that another test has made with all defaults.
        make_strategy(Config(fusion_bytes=len(variable)))


def test_a_separate_pipeline_in_a_job(no_cluster, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config_of(("a:1", "b:1"), 1))
    strategy = make_strategy(Config(strategy="one_device", pipeline_stages=2))
    assert strategy.num_replicas_in_sync == 1
    assert is_chief(strategy)


def test_where_the_cores_of_a_tpu_are(no_cluster, monkeypatch):
    """Replica ids are host by host, and core by core in each."""
    coordinates = np.array([[[0, 0, 0, 0], [1, 0, 0, 0]], [[0, 1, 0, 0], [1, 1, 0, 0]]])
    topology = types.SimpleNamespace(device_coordinates=coordinates)
    for module, name, value in (
        (tf.distribute.cluster_resolver, "TPUClusterResolver", lambda tpu: tpu),
        (tf.tpu.experimental, "initialize_tpu_system", lambda resolver: topology),
        (tf.config, "experimental_connect_to_cluster", lambda resolver: None),
        (tf.distribute, "TPUStrategy", lambda resolver: FakeStrategy()),
    ):
        monkeypatch.setattr(module, name, value)
    strategy = make_strategy(Config(tpu="somewhere", strategy="tpu", batch_size=8))
    assert tpu_coordinates(strategy) == [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0)]
    assert tpu_coordinates(tf.distribute.get_strategy()) == []


class FakeStrategy:
    num_replicas_in_sync = 4


WORKER = """
import os, signal, time
from imagenet_fast.config import Config
from imagenet_fast.distribute.strategy import make_strategy

make_strategy(Config(strategy="multi_worker", gpus="0"))
print("made", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
print("still here", flush=True)
"""


@pytest.mark.slow
def test_a_worker_ends_on_sigterm(run_python):
    """As what preempts it expects; TensorFlow would ignore the signal."""
    done = run_python(["-c", WORKER], workers=2, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert "made" in done.stdout and "still here" not in done.stdout


@pytest.mark.parametrize(("gpus", "devices"), [(0, "1 CPU"), (1, "1 GPU"), (2, "1 GPU")])
def test_the_devices_that_are_named(monkeypatch, gpus, devices):
    monkeypatch.setattr(strategy, "_visible_gpus", lambda *_: gpus)
    assert str(strategy._find(Config(strategy="one_device"), None)) == devices
