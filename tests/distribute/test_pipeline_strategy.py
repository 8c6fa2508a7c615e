"""The strategy whose replicas are pipelines, and the sums of their stages."""

import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.distribute.all_reduce import AllReduce
from imagenet_fast.distribute.fusion import Fusion
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy
from imagenet_fast.distribute.strategy import make_strategy
from imagenet_fast.distribute.workers import workers_of
from imagenet_fast.pipeline_parallel.stage_all_reduce import StageAllReduce

JOB = pathlib.Path(__file__).with_name("pipeline_strategy_job.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory, run_python_session):
    folder = tmp_path_factory.mktemp("pipelines")
    run_python_session([JOB, folder], workers=2)
    return [json.loads((folder / f"{worker}.json").read_text()) for worker in range(2)]


def test_each_worker_is_a_replica(found):
    assert [own["replica"] for own in found] == [0, 1]
    assert [own["replicas"] for own in found] == [2, 2]
    assert [own["texts"] for own in found] == [["worker 0", "worker 1"]] * 2


def test_variables_stay_on_the_devices_of_their_stages(found):
    for worker, own in enumerate(found):
        one, other = own["devices"]
        assert f"task:{worker}/device:CPU:1" in one and f"task:{worker}/device:CPU:2" in other
        assert own["places"] == [one, one, other, other]


def test_sums_of_stages(found):
    for own in found:
        gradients = [[20.0 * i + 1] * size for i, size in enumerate((2, 3, 2, 3))]
        assert own["sums"] == [*reversed(gradients), [2, 4]]
        assert own["mean"] == [1.5, 3.0]
        assert own["gathered"] == [[1.0, 2.0], [2.0, 4.0]]


def test_alone():
    strategy = make_strategy(Config(pipeline_stages=2))
    assert isinstance(strategy, PipelineStrategy)
    assert strategy is make_strategy(Config(pipeline_stages=3))
    assert workers_of(strategy) is None and strategy.cluster_resolver is None

    def own():
        context = tf.distribute.get_replica_context()
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(3.0))
        return context.replica_id_in_sync_group, total, context.all_gather(tf.ones([2]), axis=0)

    replica, total, gathered = strategy.run(own)
    assert replica == 0 and total == 3 and gathered.shape == [2]


def test_keras_trains_as_ever():
    def fit(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        inputs = np.arange(32, dtype="float32").reshape(8, 4) / 32
        model.fit(inputs, inputs[:, :2], batch_size=4, epochs=2, verbose=0)
        return model.get_weights()

    for own, other in zip(fit(PipelineStrategy()), fit(tf.distribute.OneDeviceStrategy("CPU:0"))):
        np.testing.assert_array_equal(own, other)


def test_another_strategy_cannot_be_with_pipelines():
    with pytest.raises(UserError, match="does not work with strategy=mirrored"):
        make_strategy(Config(pipeline_stages=2, strategy="mirrored"))


def test_segments_are_not_of_one_stage():
    make = lambda place: AllReduce(fusion=Fusion(segments=(2,)), place=place)  # noqa: E731
    with pytest.raises(UserError, match="fusion_segments is not for pipelines"):
        StageAllReduce(["CPU:0"], make)
