"""What a run computes on, in words, and workers whose GPUs do not go together."""

import itertools
import json
import threading
import types

import pytest
import tensorflow as tf
from patched_devices import FakeGpus

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute import devices
from imagenet_fast.distribute.cluster import Cluster


class FakeService:
    """The coordination service: what one worker sets, all read; reading waits."""

    def __init__(self):
        self._values = {}
        self._set = threading.Condition()

    def set_config_key_value(self, key, value):
        with self._set:
            assert key not in self._values
            self._values[key] = value
            self._set.notify_all()

    def get_config_key_value(self, key, timeout_in_ms=0):
        with self._set:
            found = self._set.wait_for(lambda: key in self._values, (timeout_in_ms or 10_000) / 1e3)
            if not found:
                raise tf.errors.DeadlineExceededError(None, None, key)
            return self._values[key]


def check_all(monkeypatch, workers, gpus):
    """Returns what each of the workers raises, by its number; ``gpus`` has the ids of each."""
    service, raised = FakeService(), {}
    own = threading.local()
    monkeypatch.setattr(devices.context, "context", lambda: service)
    monkeypatch.setattr(devices, "own_uuids", lambda: gpus[own.index])
    # Each worker is a process of its own: all count their strategies alike.
    monkeypatch.setattr(devices, "_CALLS", itertools.repeat(0))
    monkeypatch.setattr(devices, "visible_gpu_names", lambda: ["NVIDIA L4"] * len(gpus[own.index]))

    def run(index):
        own.index = index
        try:
            devices.check_same_devices(Cluster(workers, index))
        except UserError as error:
            raised[index] = str(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return raised


def test_workers_with_as_many_gpus_of_their_own(monkeypatch):
    two = ("a:1", "b:1")
    assert check_all(monkeypatch, two, [["aa", "bb"], ["cc", "dd"]]) == {}
    assert check_all(monkeypatch, two, [[], []]) == {}


def test_workers_with_different_numbers_of_gpus(monkeypatch):
    raised = check_all(monkeypatch, ("a:1", "b:1", "c:1"), [["aa", "bb"], ["cc", "dd"], ["ee"]])
    assert set(raised) == {0, 1, 2}
    assert len(set(raised.values())) == 1
    assert raised[0].startswith(
        "worker 0 (a:1) has 2 GPU (NVIDIA L4) and worker 2 (c:1) has 1 GPU (NVIDIA L4), but all "
        "workers need equally many GPUs: choose them with --gpus"
    )
    raised = check_all(monkeypatch, ("a:1", "b:1"), [["0"], []])
    assert "worker 1 (b:1) has no GPU" in raised[1]


def test_two_workers_on_the_same_gpu(monkeypatch):
    raised = check_all(monkeypatch, ("a:1", "a:2"), [["aa", "bb"], ["bb", "cc"]])
    assert set(raised) == {0, 1}
    assert raised[0].startswith("workers 0 (a:1) and 1 (a:2) both use the GPU with UUID bb, but")


def test_a_worker_that_dies_before_it_says_anything(monkeypatch):
    FakeGpus(monkeypatch, 0)
    monkeypatch.setattr(devices.context, "context", FakeService)
    monkeypatch.setattr(devices, "_SECONDS", 0.1)
    with pytest.raises(UserError, match=r"worker 1 \(b:1\) connected, but did not say within"):
        devices.check_same_devices(Cluster(("a:1", "b:1"), 0))


def test_a_process_may_make_several_strategies(monkeypatch):
    """The coordination service takes a key once."""
    service = FakeService()
    FakeGpus(monkeypatch, 0)
    monkeypatch.setattr(devices.context, "context", lambda: service)
    for _ in range(2):
        devices.check_same_devices(Cluster(("a:1",), 0))


def test_gpus_in_words():
    assert devices.describe_gpus([]) == "no GPU"
    assert devices.describe_gpus(["NVIDIA H100"] * 8) == "8 GPU (NVIDIA H100)"
    assert devices.describe_gpus(["L4", "T4", "L4"]) == "3 GPU (2 x L4, 1 x T4)"


def strategy_of(kind, names, implementation="AUTO", replicas=None):
    """A strategy that is not started, with these devices."""
    made = object.__new__(kind)
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    made._extended = types.SimpleNamespace(
        worker_devices=names,
        _communication_options=options,
        _num_replicas_in_sync=replicas or len(names),
    )
    return made


@pytest.mark.parametrize(
    ("strategy", "gpus", "told"),
    [
        (tf.distribute.MultiWorkerMirroredStrategy, 8, "2 workers x 8 GPU (NVIDIA H100), NCCL"),
        (tf.distribute.MultiWorkerMirroredStrategy, 0, "2 workers x 1 CPU (EPYC), gRPC"),
        (tf.distribute.MirroredStrategy, 8, "8 GPU (NVIDIA H100), NCCL"),
        (tf.distribute.OneDeviceStrategy, 1, "1 GPU (NVIDIA H100)"),
        (tf.distribute.OneDeviceStrategy, 0, "1 CPU (EPYC)"),
    ],
)
def test_what_a_run_computes_on(monkeypatch, strategy, gpus, told):
    FakeGpus(monkeypatch, gpus)
    monkeypatch.setattr(devices, "cpu_name", lambda: "EPYC")
    monkeypatch.setenv("TF_CONFIG", Cluster(("a:1", "b:1"), 1).to_tf_config())
    kind = "GPU" if gpus else "CPU"
    names = [f"/job:worker/task:1/device:{kind}:{number}" for number in range(max(gpus, 1))]
    workers = 2 if strategy is tf.distribute.MultiWorkerMirroredStrategy else 1
    implementation = "NCCL" if gpus else "AUTO"
    made = strategy_of(strategy, names, implementation, replicas=workers * len(names))
    found = devices.run_devices(made, names)
    assert str(found) == told
    assert json.loads(json.dumps(found.collective)) == told.partition("), ")[2]
    assert found.kind == kind


def test_logical_cpus_and_tpus(monkeypatch):
    monkeypatch.setattr(devices, "cpu_name", lambda: "EPYC")
    names = [f"/job:localhost/replica:0/task:0/device:CPU:{number}" for number in range(4)]
    mirrored = strategy_of(tf.distribute.MirroredStrategy, names, "RING")
    assert str(devices.run_devices(mirrored, names)) == "4 CPU (EPYC), ring"
    tpu = strategy_of(tf.distribute.TPUStrategy, ["/device:TPU:0"], replicas=32)
    assert str(devices.run_devices(tpu, ["/job:worker/device:TPU:0"])) == "32 TPU, XLA"
