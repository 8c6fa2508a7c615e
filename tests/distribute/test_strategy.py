"""Strategies that one machine without accelerators can show."""

import types
import urllib.error

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.config import Config
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.strategy import (
    make_strategy,
    per_replica_batch_size,
    tpu_coordinates,
)
from imagenet_fast.distribute.workers import is_chief
from imagenet_fast.errors import UserError

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


def test_several_workers_without_their_names(no_cluster):
    with pytest.raises(UserError, match="multi_worker needs TF_CONFIG, or Slurm's srun"):
        make_strategy(Config(strategy="multi_worker"))


def test_malformed_cluster_stops_even_one_device(no_cluster, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    with pytest.raises(UserError, match="TF_CONFIG lacks 'cluster'"):
        make_strategy(Config(strategy="one_device", fusion_bytes=1))


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


def test_a_pipeline_of_ones_own_in_a_job(no_cluster, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", Cluster(("a:1", "b:1"), 1).to_tf_config())
    strategy = make_strategy(Config(strategy="one_device", pipeline_stages=2))
    assert strategy.num_replicas_in_sync == 1
    assert is_chief(strategy)


def test_where_the_cores_of_a_tpu_are(no_cluster, monkeypatch):
    """Replicas are numbered host by host, and core by core in each."""
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
