"""``fusion=auto``: the fastest candidate, the same in all workers, and nothing else changes."""

import json
import pathlib

import pytest
import tensorflow as tf
from small_config import SMALL

from imagenet_fast import UserError, build_model
from imagenet_fast.distribute.fusion import Fusion, fusion_candidates
from imagenet_fast.training.build import fusion_trials

JOB = pathlib.Path(__file__).with_name("fusion_trials_job.py")


@pytest.fixture(scope="module")
def workers(tmp_path_factory, run_python_session):
    out = tmp_path_factory.mktemp("fusion")
    path = {"PYTHONPATH": f"{JOB.parents[3]}:{JOB.parents[2]}"}
    job = run_python_session([JOB, out], workers=2, environment=path)
    results = [json.loads((out / f"{worker}.json").read_text()) for worker in range(2)]
    return results, job.stdout + job.stderr, out


@pytest.mark.long
def test_the_chief_s_times_decide(workers):
    (chief, other), _, _ = workers
    assert chief["segments"] == other["segments"] == []
    assert chief["bytes"] == other["bytes"] == 0
    assert min(chief["seconds"]) > 0
    assert len(chief["seconds"]) == 2


@pytest.mark.long
def test_trials_leave_the_model_as_it_was(workers):
    """Also the moving averages of batch norm, which sees images in them."""
    results, _, _ = workers
    assert [own["changed"] for own in results] == [[], []]


@pytest.mark.long
def test_a_run_times_once_and_resumes_with_its_choice(workers):
    results, output, out = workers
    assert [own["trials"] for own in results] == [[2, 2], [2, 2]]
    assert (
        output.count("fusion=auto chose --fusion_bytes=0; ") == 2
    )  # of build_model, and of the run
    assert "nothing is left to train" in output
    chosen = json.loads((out / "run" / "fusion.json").read_text())
    assert chosen == {"replicas": 2, "fusion_segments": []}


@pytest.mark.long
def test_the_chief_s_file_counts(workers):
    results, _, _ = workers
    assert [own["loaded"] for own in results] == [[1, 7], [1, 7]]
    assert [own["missing"] for own in results] == [None, None]


def test_another_number_of_replicas_chooses_again(tmp_path):
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    fusion_trials.save_fusion(Fusion(0, (3, 5)), 1, str(tmp_path))
    assert fusion_trials.load_fusion(strategy, str(tmp_path)) == Fusion(0, (3, 5))
    fusion_trials.save_fusion(Fusion(0, ()), 1, str(tmp_path))
    assert fusion_trials.load_fusion(strategy, str(tmp_path)) == Fusion(0, ())
    fusion_trials.save_fusion(Fusion(0, (3, 5)), 2, str(tmp_path))
    assert fusion_trials.load_fusion(strategy, str(tmp_path)) is None


def test_candidates_of_resnet50():
    """A few sizes and the published segments, none twice."""
    megabytes = [1] * 100  # 100 gradients of 1 MiB
    shapes, dtypes = [(n * 2**18,) for n in megabytes], [tf.float32] * 100
    by_25, one, by_4, published = fusion_candidates("resnet50", 25 * 2**20, shapes, dtypes)
    assert by_25 == (25, 50, 75)
    assert one == ()
    assert by_4 == tuple(range(4, 100, 4))
    assert published == (76,)
    # Too few gradients for the published segments: as where layers are frozen.
    few = fusion_candidates("resnet50", 25 * 2**20, shapes[:50], dtypes[:50])
    assert few == [(25,), (), tuple(range(2, 50, 4))]
    assert fusion_candidates("resnet18", 0, shapes[:3], dtypes[:3]) == [()]


def test_medians_without_the_first_call(monkeypatch):
    """In turns; the first call of each, which traces, does not count."""
    now, calls = [0.0], []
    monkeypatch.setattr(fusion_trials.time, "perf_counter", lambda: now[0])

    def step(name, seconds):
        def run():
            now[0] += 100.0 if name not in calls else seconds
            calls.append(name)

        return run

    assert fusion_trials._median_seconds([step("a", 2.0), step("b", 1.0)]) == [2.0, 1.0]
    assert calls == ["a", "b"] * 6


def test_report():
    seconds = {(2, 4): 1.64, (): 2.48, (1,): 1.7}
    assert fusion_trials._report(seconds, (2, 4)) == (
        "fusion=auto chose --fusion_segments=2,4; all-reduces, and time before the update: "
        "3 in 1,640 ms, 1 in 2,480 ms, 2 in 1,700 ms"
    )
    assert "chose --fusion_bytes=0; " in fusion_trials._report({(): 0.5}, ())


def test_one_replica_has_nothing_to_time():
    model = build_model(SMALL.replace(fusion="auto"))
    assert model.all_reduce.fusion == Fusion(SMALL.fusion_bytes)


def test_tpus_are_refused(monkeypatch):
    monkeypatch.setattr(fusion_trials, "compiles_all_reduces", lambda _: True)
    with pytest.raises(UserError, match="imagenet-fast plan --accelerator suggests fusion_segm"):
        fusion_trials.choose_fusion(build_model(SMALL), None, 0, (32, 16, 16, 3))
