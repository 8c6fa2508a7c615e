import json
import pathlib
import types

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import Config, UserError, build_model
from imagenet_fast.distribute import all_reduce
from imagenet_fast.distribute.all_reduce import AllReduce, default_group_size, sum_along_both_axes
from imagenet_fast.distribute.fusion import Fusion
from imagenet_fast.distribute.groups import columns, consecutive
from imagenet_fast.training.build.model import build_all_reduce

JOB = pathlib.Path(__file__).with_name("all_reduce_job.py")
SMALL_MODEL = {
    "model": "resnet8",
    "image_size": 32,
    "train_crop": "none",
    "synthetic": True,
    "num_classes": 10,
    "batch_size": 8,
    "strategy": "one_device",
}
# As in the job.
SHAPES = ((3, 5), (1000,), (), (7, 11, 13))
# Of 12 workers, TensorFlow ranks 10 and 11 before 2: some groups are in another order than theirs.
JOBS = {
    "4": {
        "workers": 4,
        "groups": (2,),
        "dtypes": ("float32", "float16"),
        "mistakes": True,
    },
    "4 again": {
        "workers": 4,
        "groups": (4,),
        "dtypes": ("float32", "float16", "bfloat16"),
        "trains": {
            # In the default run, test_gpu_collectives.py trains.
            "keras": ("flat", "hierarchical in segments", "builtin in segments", "none"),
            "adam": ("torus 2", "torus in buckets"),
            "classifier": ("hierarchical 2", "torus in buckets", "torus in bfloat16"),
        },
    },
    "12": {"workers": 12, "groups": (4,), "dtypes": ("float32", "float16", "bfloat16")},
}
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8}


def parameters(*cases):
    """Cases that begin with a job, of which all but the first job are long."""
    return [pytest.param(*case, marks=() if case[0] == "4" else pytest.mark.long) for case in cases]


TRAINED = [
    (job, f"{model}: {way}")
    for job, values in JOBS.items()
    for model, ways in values.get("trains", {}).items()
    for way in ways
    if way not in ("none", "torus in bfloat16")
]
ALL = [
    (job, name)
    for job, values in JOBS.items()
    for name in (
        "flat",
        *(f"{way} {size}" for way in ("hierarchical", "torus_2d") for size in values["groups"]),
    )
]
MIXED = [f"mixed {name} {i}" for name in ("flat", "hierarchical", "torus_2d") for i in range(3)]

# --- One process


@pytest.mark.parametrize("algorithm", ["auto", "torus_2d"])
def test_one_replica_keeps_its_gradients(algorithm):
    gradients, metric = [tf.constant([1.0, 2.0]), tf.constant(3.0)], tf.constant(4.0)
    all_reduce = AllReduce(algorithm=algorithm, dtype="float16")
    assert all_reduce.algorithm == "builtin"
    assert all_reduce(gradients, [metric]) == [*gradients, metric]


@pytest.mark.parametrize("algorithm", ["flat", "hierarchical", "torus_2d"])
def test_one_process_has_no_network_to_sum_over(algorithm, monkeypatch):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    monkeypatch.setattr(tf.distribute.MirroredStrategy, "num_replicas_in_sync", 2)
    with pytest.raises(UserError, match=f"all_reduce={algorithm} is for several workers or a TPU"):
        AllReduce(strategy, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["auto", "builtin"])
def test_what_one_process_can_do(algorithm):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    assert AllReduce(strategy, algorithm=algorithm).algorithm == "builtin"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "ring"}, "all_reduce='ring' does not exist; choose from auto, builtin, fl"),
        ({"algorithm": "torus"}, "all_reduce='torus' does not exist; did you mean 'torus_2d'?"),
        ({"dtype": "float64"}, "cannot be sent as 'float64': choose from float32, float16, bfl"),
        (
            {"group_size": 2},
            "all_reduce_group 2 is for all_reduce hierarchical or torus_2d, but all_reduce=auto ",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UserError, match=message):
        AllReduce(**arguments)


def test_segments_must_fit_even_where_nothing_is_summed():
    with pytest.raises(UserError, match="there are 2 gradients, so the last number can be at mos"):
        AllReduce(fusion=Fusion(segments=(2,)))([tf.zeros(1), tf.zeros(1)])


@pytest.mark.parametrize(
    ("replicas", "hosts", "size"),
    [
        (8, "aaaabbbb", 4),  # One replica in each process.
        (8, "ab", 4),  # Four in each.
        (8, "abababab", 2),  # Neighbours are not on one host.
        (8, "aaabbbbb", 2),  # Nor have hosts the same number.
        (8, "aaaaaaaa", 2),  # One host is no group.
        (8, "abcdefgh", 2),
        (16, "abcdefghijklmnop", 4),
        (12, "abcdefghijkl", 3),
        (5, "abcde", 1),
        (2048, "", 32),
    ],
)
def test_default_group(replicas, hosts, size):
    workers = [f"{host}.example:{1000 + i}" for i, host in enumerate(hosts)]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"chief": workers[:1], "worker": workers[1:]} if workers else {})
    )
    strategy = types.SimpleNamespace(num_replicas_in_sync=replicas, cluster_resolver=resolver)
    assert default_group_size(strategy) == size


@pytest.mark.parametrize(
    ("algorithm", "hint", "pieces"),
    [
        ("hierarchical", "ring", 3),
        ("torus_2d", "ring", 3),
        ("torus_2d", "nccl", 1),  # NcclManager: one CUDA stream for all of a GPU's
        ("flat", "ring", 1),
        ("flat", "nccl", 1),
    ],
)
def test_a_bucket_goes_through_the_stages_in_pieces(algorithm, hint, pieces, monkeypatch):
    monkeypatch.setattr(all_reduce, "_PIECE_BYTES", 40)
    own = object.__new__(AllReduce)
    own.algorithm, own._hint, own._replicas, summed = algorithm, hint, 2, []

    def double(tensor, stream, half):
        summed.append((stream, half))
        return 2 * tensor

    own._sum = double
    tensors = [tf.range(25.0), tf.constant([[1.0], [2.0]])]
    sums = own._sum_packed(tensors, "a", tf.float16)
    assert summed == [(f"a_{number}", tf.float16) for number in range(pieces)]
    for total, tensor in zip(sums, tensors):
        np.testing.assert_array_equal(total, 2 * tensor)


def test_a_tpu_sums_along_rows_and_columns_and_the_other_way_round():
    rows = consecutive(8, 4)

    @tf.function
    def trace(tensor):
        return sum_along_both_axes(tensor, rows, columns(rows))

    graph = trace.get_concrete_function(tf.TensorSpec([7])).graph
    sums = [op for op in graph.get_operations() if op.type == "CrossReplicaSum"]
    along, across = rows.members, columns(rows).members
    assert [tuple(map(tuple, tf.get_static_value(op.inputs[1]))) for op in sums] == [
        *(along, across),
        *(across, along),
    ]
    assert [op.inputs[0].shape for op in sums] == [[3], [3], [4], [4]]
    assert sums[1].inputs[0] is sums[0].outputs[0]
    assert sums[3].inputs[0] is sums[2].outputs[0]
    assert graph.outputs[0].shape == [7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fusion_segments": (76,)}, "fusion_segments 76 is out of range: there are 23 gradients"),
    ],
)
def test_options_that_cannot_be_used_are_found_before_the_first_step(options, message):
    with pytest.raises(UserError, match=message):
        build_model(Config(**{**SMALL_MODEL, "strategy": "auto", **options}))


def test_options_reach_the_model():
    options = {"strategy": "auto", "fusion_bytes": 5, "all_reduce_dtype": "bfloat16"}
    model = build_model(Config(**{**SMALL_MODEL, **options}))
    assert model.all_reduce.algorithm == "builtin"
    assert model.all_reduce.fusion == Fusion(5)
    model.all_reduce = build_all_reduce(Config(fusion_segments=(1, 2)))
    assert model.all_reduce.fusion.segments == (1, 2)


# --- Several workers


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, run_python_session):
    """What each worker of a job found, by the job's name; run when it is first asked for."""
    found = {}

    def get(name):
        if name not in found:
            folder = tmp_path_factory.mktemp("workers")
            job = {**JOBS[name], "out": str(folder / "worker")}
            workers = job.pop("workers")
            (folder / "job.json").write_text(json.dumps(job))
            # Once with hash seeds of their own: nothing may be in the order of a set.
            fresh = name == "4 again"
            arguments = [JOB, folder / "job.json"]
            run_python_session(arguments, workers=workers, timeout=1200, fresh=fresh)
            found[name] = [dict(np.load(f"{job['out']}{i}.npz")) for i in range(workers)]
        return found[name]

    return get


@pytest.mark.slow
@pytest.mark.parametrize(("job", "name"), parameters(*TRAINED))
def test_same_weights_as_the_strategys_own_sum(jobs, job, name):
    own = f"{name.partition(':')[0]}: strategy: weights"
    for result in jobs(job):
        np.testing.assert_allclose(result[f"{name}: weights"], result[own], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.long
def test_other_weights_without_a_sum(jobs):
    for result in jobs("4 again"):
        difference = result["keras: none: weights"] - result["keras: strategy: weights"]
        assert np.abs(difference).max() > 0.01


@pytest.mark.slow
@pytest.mark.long
def test_metrics_are_exact_even_where_gradients_are_not(jobs):
    result = jobs("4 again")[0]
    exact, narrow = (result[f"classifier: {x}: loss"] for x in ("strategy", "torus in bfloat16"))
    np.testing.assert_allclose(narrow[0], exact[0], rtol=1e-6)  # From the same first weights.
    weights = result["classifier: strategy: weights"]
    rounded = result["classifier: torus in bfloat16: weights"]
    assert 1e-6 < np.abs(rounded - weights).max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "name"),
    parameters(
        *((job, f"{way} float32") for job, way in ALL),
        *((job, name) for job in JOBS for name in MIXED),
    ),
)
def test_sums_of_tensors(jobs, job, name):
    sums, exact = expected_sums(JOBS[job]["workers"])
    for result in jobs(job):
        for i, total in enumerate(sums):
            np.testing.assert_allclose(result[f"{name}: {i}"], total, rtol=0, atol=1e-5)
        np.testing.assert_allclose(result[f"{name}: {len(sums)}"], [exact], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "algorithm", "dtype"),
    parameters(
        *(
            (job, algorithm, dtype)
            for job, algorithm in [*((job, "builtin") for job in JOBS), *ALL]
            for dtype in JOBS[job]["dtypes"]
            if dtype in ROUNDING
        )
    ),
)
def test_error_of_sums_that_travel_in_16_bits(jobs, job, algorithm, dtype):
    workers, step = JOBS[job]["workers"], ROUNDING[dtype]
    first, *others = jobs(job)
    error = relative_error(first, workers, f"{algorithm} {dtype}")
    print(f"{workers} workers, {algorithm}, {dtype}: relative error {error:.2e}")
    # Not as exact as 32 bits, of which the error is about 1e-7, nor worse than a few roundings.
    assert step / 10 < error < 2 * step
    _, exact = expected_sums(workers)
    np.testing.assert_allclose(first[f"{algorithm} {dtype}: {len(SHAPES)}"], [exact], rtol=1e-6)
    for other in others:  # All replicas must take the same step.
        for i in range(len(SHAPES)):
            name = f"{algorithm} {dtype}: {i}"
            np.testing.assert_array_equal(other[name], first[name])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("algorithm", [way for job, way in ALL if job == "12"])
def test_sums_in_float32_are_nearer_than_a_rings_in_16_bits(jobs, algorithm, dtype):
    result = jobs("12")[0]
    ring = relative_error(result, 12, f"builtin {dtype}")
    assert relative_error(result, 12, f"{algorithm} {dtype}") < 0.95 * ring


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "rows"),
    parameters(
        ("4", [[0, 1, 2, 3]]),
        ("12", [[0, 1, 2, 3], [4, 5, 6, 7], [10, 11, 8, 9]]),
    ),
)
def test_rows_are_in_the_order_in_which_tensorflow_ranks(jobs, job, rows):
    for result in jobs(job):
        assert result["rows"].tolist() == rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("group", "replicas cannot be split into groups of 3"),
        ("elsewhere", "this AllReduce was made for a strategy with 1 replica(s), but is called"),
        ("segments", "fusion_segments 4 is out of range: there are 4 gradients, so the last"),
        ("algorithms", "worker 1 'torus_2d in groups of 2 as float32"),
        ("algorithms", "worker 0 'flat as float32"),
        ("groups", "worker 1 'torus_2d in groups of 1"),
        ("groups", "worker 0 'torus_2d in groups of 2"),
    ],
)
def test_mistakes_are_found_by_all_workers(jobs, mistake, message):
    for result in jobs("4"):
        assert message in str(result[f"mistake: {mistake}"])


@pytest.mark.slow
def test_the_last_layers_sum_waits_for_no_other_gradients(jobs):
    for result in jobs("4"):
        assert json.loads(str(result["awaited"])) == [[4, 5], [2, 3], [0, 1]]


@pytest.mark.slow
def test_auto_is_flat_for_workers(jobs):
    assert {str(result["auto"]) for result in jobs("4")} == {"flat"}


def expected_sums(workers):
    """The sums of what the job's workers draw, and of their exact tensors, in float64."""
    random = [np.random.RandomState(worker) for worker in range(workers)]
    drawn = [
        [np.asarray(own.standard_normal(shape), np.float32) for shape in SHAPES] for own in random
    ]
    sums = [np.sum([own[i] for own in drawn], axis=0, dtype=np.float64) for i in range(len(SHAPES))]
    return sums, sum(0.1 + worker for worker in range(workers))


def relative_error(result, workers, name):
    """The root mean square of a sum's errors, over that of the sum."""
    sums, _ = expected_sums(workers)
    total = np.concatenate([own.ravel() for own in sums])
    found = np.concatenate([result[f"{name}: {i}"].ravel() for i in range(len(SHAPES))])
    return np.sqrt(np.mean((found - total) ** 2) / np.mean(total**2))
