"""Sums and exchanges among some of the replicas."""

import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.distribute import collectives
from imagenet_fast.distribute.collectives import Communicator

JOB = pathlib.Path(__file__).with_name("collectives_job.py")
# Of replica r.
VALUES = [np.arange(4.0) + 10 * r for r in range(4)]
GROUPS = {
    "row": [(0, 1), (0, 1), (2, 3), (2, 3)],
    "column": [(0, 2), (1, 3), (0, 2), (1, 3)],
    "alone": [(0,), (1,), (2,), (3,)],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory, run_python_session):
    folder = tmp_path_factory.mktemp("collectives")
    run_python_session([JOB, folder / "worker"], workers=4)
    return [json.loads((folder / f"worker{i}.json").read_text()) for i in range(4)]


@pytest.mark.slow
def test_streams_in_different_orders(found):
    for own in found:
        for stream in ("first", "second", "third"):
            assert own[stream] == sum(VALUES).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", GROUPS)
def test_groups(found, kind):
    for replica, own in enumerate(found):
        members = GROUPS[kind][replica]
        values = [VALUES[member] for member in members]
        position, whole = members.index(replica), sum(values)
        assert own[f"{kind}_sum"] == whole.tolist()
        assert own[f"{kind}_part"] == np.split(whole, len(members))[position].tolist()
        assert own[f"{kind}_all"] == np.concatenate(values).tolist()
        assert own[f"{kind}_first"] == values[0].tolist()


@pytest.mark.slow
def test_dtypes_of_one_stream(found):
    for replica, own in enumerate(found):
        assert own["bfloat16"] == sum(VALUES[r] for r in GROUPS["row"][replica]).tolist()


def test_shape_must_be_known():
    communicator = Communicator([0, 1], 0)

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def reduce(tensor):
        return communicator.all_gather(tensor, "somewhere")

    with pytest.raises(ValueError, match=r"all_gather in somewhere: the shape \(None,\)"):
        reduce.get_concrete_function()


def test_keys_that_are_the_same_by_accident(monkeypatch):
    monkeypatch.setattr(collectives.zlib, "crc32", lambda text: 7)

    @tf.function
    def reduce(tensor):
        communicator = Communicator([0, 1], 0)
        return communicator.all_reduce(tensor, "one") + communicator.all_reduce(tensor, "two")

    with pytest.raises(RuntimeError, match="two collectives have the same key"):
        reduce.get_concrete_function(tf.zeros([3]))
