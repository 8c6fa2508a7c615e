"""The devices of a run, and workers whose GPUs do not fit together."""

import json
import types

import pytest
import tensorflow as tf
from patched_devices import FakeGpus
from tf_configs import tf_config_of

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute import devices
from imagenet_fast.distribute.cluster import Cluster


def check_all(monkeypatch, workers, gpus):
    """Returns each worker's error, by worker; ``gpus`` has each worker's UUIDs."""
    names = [json.dumps({"gpus": ["NVIDIA L4"] * len(ids), "uuids": ids}) for ids in gpus]
    monkeypatch.setattr(devices, "texts_of_all", lambda strategy, text, seconds: names)
    raised = {}
    for index in range(len(workers)):
        try:
            devices.check_same_devices(Cluster(workers, index), None)
        except UserError as error:
            raised[index] = str(error)
    return raised


def test_workers_with_equal_numbers_of_separate_gpus(monkeypatch):
    two = ("a:1", "b:1")
    assert check_all(monkeypatch, two, [["aa", "bb"], ["cc", "dd"]]) == {}
    assert check_all(monkeypatch, two, [[], []]) == {}


def test_workers_with_different_numbers_of_gpus(monkeypatch):
    raised = check_all(monkeypatch, ("a:1", "b:1", "c:1"), [["aa", "bb"], ["cc", "dd"], ["ee"]])
    assert set(raised) == {0, 1, 2}
    assert len(set(raised.values())) == 1
    assert raised[0].startswith(
        "worker 0 (a:1) has 2 GPU (NVIDIA L4) and worker 2 (c:1) has 1 GPU (NVIDIA L4), but all "
        "workers need the same number of GPUs: choose them with --gpus"
    )
    raised = check_all(monkeypatch, ("a:1", "b:1"), [["0"], []])
    assert "worker 1 (b:1) has no GPU" in raised[1]


def test_two_workers_on_the_same_gpu(monkeypatch):
    raised = check_all(monkeypatch, ("a:1", "a:2"), [["aa", "bb"], ["bb", "cc"]])
    assert set(raised) == {0, 1}
    assert raised[0].startswith("workers 0 (a:1) and 1 (a:2) both use the GPU with UUID bb, but")


def test_workers_exchange_their_gpus_within_a_time_limit(monkeypatch):
    FakeGpus(monkeypatch, 2)
    monkeypatch.setattr(devices, "visible_uuids", lambda: ["aa", "bb"])
    sent = []

    def texts_of_all(_, text, seconds):
        sent.append((json.loads(text), seconds))
        return [text]

    monkeypatch.setattr(devices, "texts_of_all", texts_of_all)
    devices.check_same_devices(Cluster(("a:1",), 0), None)
    # With a limit, because a driver may hang.
    assert sent == [({"gpus": ["NVIDIA H100"] * 2, "uuids": ["aa", "bb"]}, 60)]


def test_a_worker_that_stops_before_it_lists_its_gpus(monkeypatch):
    FakeGpus(monkeypatch, 0)

    def stopped(strategy, text, seconds):
        raise tf.errors.UnavailableError(None, None, "Socket closed (/job:worker/task:1)")

    monkeypatch.setattr(devices, "texts_of_all", stopped)
    with pytest.raises(UserError, match=r"a worker connected, but did not list its GPUs: .*task:1"):
        devices.check_same_devices(Cluster(("a:1", "b:1"), 0), None)


def test_describe_gpus():
    assert devices.describe_gpus([]) == "no GPU"
    assert devices.describe_gpus(["NVIDIA H100"] * 8) == "8 GPU (NVIDIA H100)"
    assert devices.describe_gpus(["L4", "T4", "L4"]) == "3 GPU (2 x L4, 1 x T4)"


def strategy_of(kind, names, implementation="AUTO", replicas=None):
    """An uninitialized strategy with these devices."""
    made = object.__new__(kind)
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    made._extended = types.SimpleNamespace(
        worker_devices=names,
        _communication_options=options,
        _num_replicas_in_sync=replicas or len(names),
        _cluster_resolver=tf.distribute.cluster_resolver.TFConfigClusterResolver(),
    )
    return made


@pytest.mark.parametrize(
    ("strategy", "gpus", "text"),
    [
        (tf.distribute.MultiWorkerMirroredStrategy, 8, "2 workers x 8 GPU (NVIDIA H100), NCCL"),
        (tf.distribute.MultiWorkerMirroredStrategy, 0, "2 workers x 1 CPU (EPYC), gRPC"),
        (tf.distribute.MirroredStrategy, 8, "8 GPU (NVIDIA H100), NCCL"),
        (tf.distribute.OneDeviceStrategy, 1, "1 GPU (NVIDIA H100)"),
        (tf.distribute.OneDeviceStrategy, 0, "1 CPU (EPYC)"),
    ],
)
def test_run_devices(monkeypatch, strategy, gpus, text):
    FakeGpus(monkeypatch, gpus)
    monkeypatch.setattr(devices, "cpu_name", lambda: "EPYC")
    monkeypatch.setenv("TF_CONFIG", tf_config_of(("a:1", "b:1"), 1))
    kind = "GPU" if gpus else "CPU"
    names = [f"/job:worker/task:1/device:{kind}:{number}" for number in range(max(gpus, 1))]
    workers = 2 if strategy is tf.distribute.MultiWorkerMirroredStrategy else 1
    implementation = "NCCL" if gpus else "AUTO"
    made = strategy_of(strategy, names, implementation, replicas=workers * len(names))
    found = devices.run_devices(made, names)
    assert str(found) == text
    assert json.loads(json.dumps(found.collective)) == text.partition("), ")[2]
    assert found.kind == kind


def test_logical_cpus_and_tpus(monkeypatch):
    monkeypatch.setattr(devices, "cpu_name", lambda: "EPYC")
    names = [f"/job:localhost/replica:0/task:0/device:CPU:{number}" for number in range(4)]
    mirrored = strategy_of(tf.distribute.MirroredStrategy, names, "RING")
    assert str(devices.run_devices(mirrored, names)) == "4 CPU (EPYC), ring"
    tpu = strategy_of(tf.distribute.TPUStrategy, ["/device:TPU:0"], replicas=32)
    assert str(devices.run_devices(tpu, ["/job:worker/device:TPU:0"])) == "32 TPU, XLA"
