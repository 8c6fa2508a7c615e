"""Collectives of workers with GPUs, read from the programs of training steps.

What TensorFlow does with them is decided in its C++ code:

- ``CollectiveParamResolverLocal::AssignCollectiveType``: NCCL only for the hint ``nccl``;
- ``NcclManager::GetCommunicator``: a communicator for each group, and one CUDA stream for all
  communicators of a GPU;
- ``NcclManager::LoopKernelLaunches``: kernels are launched in the order in which their operations
  came, and an operation is done when its kernel is;
- ``NcclManager``'s ``kValidDataTypes``: float16, float32, float64, int32 and int64.

In Python, ``AutomaticControlDependencies`` orders the operations that name one resource, and
``CollectiveReplicaLauncher`` names one token in all of a replica's.
"""

import collections
import json
import pathlib
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute import all_reduce, group_sum
from imagenet_fast.distribute.all_reduce import AllReduce
from imagenet_fast.distribute.collectives import Communicator
from imagenet_fast.distribute.connect import straddles
from imagenet_fast.distribute.groups import columns, consecutive, group_key
from imagenet_fast.distribute.virtual import VirtualGPUStrategy

JOB = pathlib.Path(__file__).with_name("gpu_collectives_job.py")
# By the way to sum gradients: how many groups a replica is in, batch norm's pair and, for the
# strategy's own collectives, all replicas among them.
STEPS = {
    "keras": None,
    "builtin": {"algorithm": "builtin"},
    "flat": {"algorithm": "flat"},
    "hierarchical": {"algorithm": "hierarchical", "group_size": 2},
    "torus_2d": {"algorithm": "torus_2d", "group_size": 2, "dtype": "bfloat16"},
}
FEW = ("keras", "torus_2d")
WAYS = [pytest.param(way, marks=() if way in FEW else pytest.mark.long) for way in STEPS]
VALID = {"float16", "float32", "float64", "int32", "int64"}


@pytest.fixture(scope="module")
def found(run_python_session, tmp_path_factory):
    """Returns a function: what the job found of a way; the few are asked for together."""
    results = {}

    def find(way):
        if way not in results:
            folder = tmp_path_factory.mktemp("gpu_collectives")
            steps = {own: STEPS[own] for own in STEPS if (own in FEW) == (way in FEW)}
            job = {"out": str(folder / "out.json"), "steps": steps}
            (folder / "job.json").write_text(json.dumps(job))
            run_python_session([JOB, folder / "job.json"])
            results.update(json.loads((folder / "out.json").read_text()))
        return results[way]

    return find


def queues(operations):
    """Returns each replica's collectives, in the order in which its token runs them."""
    by_token = collections.defaultdict(list)
    for operation in operations:
        by_token["".join(operation["tokens"])].append(operation)
    return by_token


def left_waiting(by_token):
    """Runs each replica's collectives one after another; returns those that wait for ever.

    One runs when it is the next of as many replicas as its group has members.
    """
    waiting = {token: list(operations) for token, operations in by_token.items()}
    while True:
        heads = collections.defaultdict(list)
        for token, operations in waiting.items():
            if operations:
                heads[operations[0]["group"], operations[0]["kind"]].append(token)
        ready = [
            tokens for tokens in heads.values() if len(tokens) == waiting[tokens[0]][0]["size"]
        ]
        if not ready:
            return {token: operations for token, operations in waiting.items() if operations}
        for token in ready[0]:
            waiting[token].pop(0)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", ["step", "average"])
def test_each_names_nccl_and_its_replicas_token(found, way, program):
    """A ring over gRPC, or a token for each stream, would be slow, or wait for ever."""
    operations = found(way)[program]
    assert {operation["hint"] for operation in operations} == {"nccl"}
    assert {operation["dtype"] for operation in operations} <= VALID
    # The strategy's own launchers', which its collectives in the step have, too.
    assert set(queues(operations)) == {f"strategy {replica}" for replica in range(4)}
    for own in queues(operations).values():
        for before, after in zip(own, own[1:]):
            assert before["name"] in after["after"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_all_replicas_have_one_order(found, way):
    operations = found(way)["step"]
    # Batch norm's groups and the strategy's: several communicators on a GPU.
    groups = {operation["group"] for operation in operations}
    assert len(groups) >= 3
    own = queues(operations)
    assert left_waiting(own) == {}
    # That is a check: two replicas that differ in the order of two groups wait for ever.
    token = next(iter(own))
    order = [operation["group"] for operation in own[token]]
    first = next(i for i in range(len(order) - 1) if order[i] != order[i + 1])
    own[token][first], own[token][first + 1] = own[token][first + 1], own[token][first]
    assert left_waiting(own)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_weights_are_those_of_the_strategys_own(found, way):
    tolerance = 1e-3 if STEPS[way] and STEPS[way].get("dtype") else 1e-6
    weights = np.array(found(way)["weights"])
    np.testing.assert_allclose(weights, found("keras")["weights"], atol=tolerance)
    assert np.abs(weights).max() > 0.1


def kinds(operations):
    """How many collectives of a kind there are, by the group's size."""
    return collections.Counter((operation["kind"], operation["size"]) for operation in operations)


@pytest.mark.long
@pytest.mark.slow
def test_the_algorithms_are_those_that_were_asked_for(found):
    """Whole groups on one GPU: the ways to sum do not fall back on one another."""
    steps = {way: found(way)["step"] for way in ("hierarchical", "torus_2d")}
    # Only what the strategy sums itself is among all four.
    for step in steps.values():
        assert kinds(step)["CollectiveReduceV2", 4] == 4
    assert kinds(steps["torus_2d"])["CollectiveAllToAllV2", 2] > 0
    # Masters sum among themselves once for each bucket more than the others.
    own = queues(steps["hierarchical"])
    assert len(own["strategy 0"]) == len(own["strategy 2"]) > len(own["strategy 1"])
    # In a torus all replicas do the same.
    assert len({len(own) for own in queues(steps["torus_2d"]).values()}) == 1


@pytest.mark.slow
@pytest.mark.long
def test_flat_is_in_more_parts_than_builtin(found):
    flat, builtin = (kinds(found(way)["step"]) for way in ("flat", "builtin"))
    assert set(flat) == {("CollectiveReduceV2", 2), ("CollectiveReduceV2", 4)}
    assert flat["CollectiveReduceV2", 4] > builtin["CollectiveReduceV2", 4]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_communicators_are_made_one_after_another_before_training(found, way):
    """Each made by its group's first collective, which locks the process until other hosts come."""
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    ranked = [[row, -1] for row in rows]
    expected = {
        "keras": [],
        "builtin": [],
        "flat": [[[0, 1, 2, 3], 0]],
        "hierarchical": [*ranked, *([group, 0] for group in rows + columns)],
        "torus_2d": [*ranked, *([group, 0] for group in rows + columns)],
    }
    assert [own[:2] for own in found(way)["connected"]] == expected[way]
    # Those of the gradients are all there; batch norm's pairs are each within a process.
    keys = {own[2] for own in found(way)["connected"]}
    pairs = {group_key(row) for row in rows}
    strategys = {operation["group"] for operation in found("keras")["step"]} - pairs
    used = {operation["group"] for operation in found(way)["step"]}
    assert used - pairs - strategys <= keys


@pytest.mark.parametrize(
    ("size", "each", "found"),
    [
        (8, 8, False),  # the replicas of a process
        (2, 8, False),
        (16, 8, False),  # of two whole processes
        (2, 1, False),  # one replica a process is in one group
        (6, 4, True),  # two of the second process are in the first group, two in the second
        (3, 2, True),
    ],
)
def test_groups_that_reach_over_processes_in_several_ways(size, each, found):
    assert straddles(consecutive(48, size), each) == found


def test_columns_of_a_torus_do():
    assert straddles(columns(consecutive(16, 8)), 8)
    assert not straddles(columns(consecutive(16, 8)), 1)


def test_such_batch_norm_is_refused(monkeypatch):
    strategy = object.__new__(tf.distribute.MultiWorkerMirroredStrategy)
    devices = ("/job:worker/task:0/device:GPU:0", "/job:worker/task:0/device:GPU:1")
    strategy._extended = types.SimpleNamespace(worker_devices=devices)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    monkeypatch.setattr(group_sum, "this_replica", lambda: 0)
    with pytest.raises(
        UserError, match=r"bn: a worker of 2 GPUs would belong to several groups of 3"
    ):
        group_sum.group_sum(tf.ones([3]), consecutive(12, 3), "bn")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (tf.distribute.MultiWorkerMirroredStrategy, "float32, or all_reduce=flat"),
        (tf.distribute.MirroredStrategy, "float32$"),
    ],
)
def test_nccl_does_not_sum_bfloat16(kind, told):
    strategy = object.__new__(kind)
    devices = ("/job:worker/task:0/device:GPU:0", "/job:worker/task:0/device:GPU:1")
    strategy._extended = types.SimpleNamespace(worker_devices=devices, _num_replicas_in_sync=2)
    with pytest.raises(UserError, match=f"NCCL does not support bfloat16: choose .* {told}"):
        AllReduce(strategy, algorithm="builtin", dtype="bfloat16")


def not_there(hosts):
    return VirtualGPUStrategy([(gpu, host) for host in range(hosts) for gpu in range(4)])


@pytest.mark.parametrize(
    ("algorithm", "hosts", "told"),
    [
        ("auto", 1, "float32$"),
        ("builtin", 1, "float32$"),
        ("builtin", 2, "float32, or all_reduce="),
    ],
)
def test_gpus_that_are_not_there_do_not_either(algorithm, hosts, told):
    with pytest.raises(UserError, match=f"NCCL does not support bfloat16: choose .* {told}"):
        AllReduce(not_there(hosts), algorithm=algorithm, dtype="bfloat16")


@pytest.mark.parametrize(("algorithm", "hosts"), [("auto", 2), ("flat", 1), ("torus_2d", 2)])
def test_what_workers_could_sum_is_compiled_for_gpus_that_are_not_there(algorithm, hosts):
    assert AllReduce(not_there(hosts), algorithm=algorithm, dtype="bfloat16")


def test_bfloat16_travels_as_float16_by_default():
    strategy = object.__new__(tf.distribute.MultiWorkerMirroredStrategy)
    devices = ("/job:worker/task:0/device:GPU:0",)
    strategy._extended = types.SimpleNamespace(worker_devices=devices, _num_replicas_in_sync=2)
    assert all_reduce._algorithm("auto", strategy, "bfloat16") == "flat"
    assert all_reduce._algorithm("auto", strategy, "float16") == "builtin"


@pytest.mark.parametrize(
    "operation", ["CollectiveReduceV2", "CollectiveGatherV2", "CollectiveAllToAllV2"]
)
def test_tensorflow_has_kernels_for_gpus(operation):
    """``DEFAULT`` is every device without kernels of its own: collective_ops.cc."""
    registered = kernels.get_registered_kernels_for_op(operation).kernel
    assert {"GPU", "DEFAULT"} & {kernel.device_type for kernel in registered}


def test_a_pipelines_stages_each_have_one_token():
    """There the strategy is none of TensorFlow's; each stage has a GPU, and a place, of its own."""

    @tf.function
    def traced():
        for place in (0, 1):
            group = Communicator((0, 1), 0, place=place, hint="nccl")
            pair = Communicator((0, 2), 0, place=place, hint="nccl")
            group.all_reduce(tf.ones([2]), "first")
            pair.all_gather(group.all_reduce(tf.ones([2]), "second"), "first")

    graph = traced.get_concrete_function().graph
    nodes = [node for node in graph.get_operations() if node.type.startswith("Collective")]
    tokens = [node.inputs[-1].name for node in nodes]
    assert len(nodes) == 6
    assert tokens == [tokens[0]] * 3 + [tokens[3]] * 3
    assert tokens[0] != tokens[3]


def test_broadcasts_cannot_be_ordered():
    with pytest.raises(RuntimeError, match="cannot be ordered among other NCCL collectives"):
        Communicator((0, 1), 0, hint="nccl").broadcast(tf.ones([2]), "test")
