"""The doctor's all-reduce on logical CPUs; over workers it is tested with the command."""

import json

import pytest

JOB = """
import dataclasses, json, sys
import tensorflow as tf
from imagenet_fast import Config
from imagenet_fast.doctor import all_reduce
from imagenet_fast.doctor.worker import run_check

half = "bfloat16"
config = Config(logical_cpus=4)
findings = run_check("all-reduce", config)
findings += run_check("all-reduce", config.replace(all_reduce_dtype=half))
findings += run_check("all-reduce", config.replace(all_reduce="flat"))

class Losing(all_reduce.AllReduce):
    # As where collectives of two programs are matched with each other.
    def __call__(self, tensors):
        first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
        return super().__call__([tf.where(first, 0.0, own) for own in tensors])

all_reduce.AllReduce = Losing
findings += run_check("all-reduce", config)
findings += run_check("all-reduce", config.replace(all_reduce_dtype=half))
print(json.dumps([dataclasses.asdict(own) for own in findings]))
"""


@pytest.fixture(scope="module")
def findings(run_python_session):
    return json.loads(run_python_session(["-c", JOB]).stdout.splitlines()[-1])


@pytest.mark.long
def test_sum_and_bandwidth_over_four_devices(findings):
    right, half, *_ = findings
    assert (right["state"], half["state"]) == ("ok", "ok")
    assert right["found"].startswith("4 CPU (")
    assert "), ring; builtin, float32: 17 MB in " in right["found"]
    numbers = right["numbers"]
    assert numbers["error"] == 0
    # What nccl-tests calls bus bandwidth: 2 (n - 1) / n of the bytes.
    rate = 2 * 3 / 4 * numbers["bytes"] / numbers["seconds"] / 1e9
    assert numbers["gigabytes_per_second"] == pytest.approx(rate)


@pytest.mark.long
def test_an_unsupported_algorithm(findings):
    assert findings[2]["state"] == "wrong"
    assert "all_reduce=flat is for several workers" in findings[2]["found"]


@pytest.mark.long
def test_a_wrong_sum(findings):
    for own in findings[3:]:
        assert own["state"] == "wrong"
        assert "but the sum is wrong by 10.0%" in own["found"]
        assert "another --all_reduce" in own["advice"]


def test_one_device_has_nothing_to_sum():
    from imagenet_fast import Config
    from imagenet_fast.doctor.all_reduce import check_devices

    (own,) = check_devices(Config(strategy="one_device"))
    assert (own.state, own.found) == ("ok", "one device: nothing to sum")


def test_workers_with_different_directories(monkeypatch):
    """As ``train`` refuses them; the other worker is a stand-in."""
    from imagenet_fast import Config
    from imagenet_fast.distribute import consistency
    from imagenet_fast.doctor.worker import run_check

    def texts_of_all(strategy, text):
        return [text, json.dumps({**json.loads(text), "model_dir": "b"})]

    monkeypatch.setattr(consistency, "workers_of", lambda strategy: [0, 1])
    monkeypatch.setattr(consistency, "texts_of_all", texts_of_all)
    (own,) = run_check("cluster", Config(strategy="one_device", model_dir="a"))
    assert own.state == "wrong"
    assert "model_dir is a at the chief, b at worker 1" in own.found
