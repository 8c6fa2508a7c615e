"""Joining gradients by measured times: the same in all workers, and nothing else is changed."""

import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from small_config import SMALL

from imagenet_fast import UserError, build_model
from imagenet_fast.cost_model.fusion import SumCost
from imagenet_fast.distribute.fusion import Fusion
from imagenet_fast.training import measured_fusion
from imagenet_fast.training.measured_fusion import FusionTimes

JOB = pathlib.Path(__file__).with_name("measured_fusion_job.py")
TIMES = FusionTimes(
    (0.5, 0.3, 0.1), (4_000_000, 1_000_000, 8_000_000), 1.0, SumCost(0.01, 5e-8, 1e-8)
)


@pytest.fixture(scope="module")
def workers(tmp_path_factory, run_python_session):
    out = tmp_path_factory.mktemp("fusion")
    path = {"PYTHONPATH": f"{JOB.parents[2]}:{JOB.parents[1]}"}
    run_python_session([JOB, out], workers=2, environment=path)
    return [json.loads((out / f"{worker}.json").read_text()) for worker in range(2)]


@pytest.mark.long
def test_workers_agree(workers):
    one, other = workers
    assert one["segments"] == other["segments"]
    assert one["times"] == other["times"]
    assert one["cuts"] == other["cuts"]
    assert one["bytes"] == 0


@pytest.mark.long
def test_a_search_leaves_the_model_as_it_was(workers):
    """Also the moving averages of batch norm, which sees images in it."""
    assert [own["changed"] for own in workers] == [[], []]


@pytest.mark.long
def test_what_is_measured(workers):
    """The last layer's gradients are known first, and all of them within the step."""
    times = workers[0]["times"]
    known = np.array(times["known"])
    assert known[-1] < known[0] == known.max() < times["passes"]
    assert np.all(np.diff(known) <= 0)
    model = build_model(SMALL)
    assert sum(times["sizes"]) == 4 * sum(v.shape.num_elements() for v in model.trainable_variables)
    start, per_byte, aside = times["cost"]
    assert start > 0
    assert 0 < start + sum(times["sizes"]) * (per_byte + aside) < 10


@pytest.mark.long
def test_the_chief_s_file_counts(workers):
    assert [own["kept"] for own in workers] == [[1, 7], [1, 7]]
    assert [own["missing"] for own in workers] == [None, None]


def test_a_run_goes_on_with_what_it_found(tmp_path):
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    measured_fusion.keep(Fusion(0, (3, 5)), 1, str(tmp_path))
    assert measured_fusion.kept(strategy, str(tmp_path)) == Fusion(0, (3, 5))
    measured_fusion.keep(Fusion(0, ()), 1, str(tmp_path))
    assert measured_fusion.kept(strategy, str(tmp_path)) == Fusion(0, ())
    measured_fusion.keep(Fusion(0, (3, 5)), 2, str(tmp_path))
    assert measured_fusion.kept(strategy, str(tmp_path)) is None


def test_what_is_told():
    assert TIMES.best() == (2,)
    # The sum of 8 MB is done at 0.59 s, that of 1 MB at 0.65, after the first gradient is ready.
    assert TIMES.waited((2,)) == pytest.approx(0.59 + 0.26 - 0.5)
    assert TIMES.waited((1, 2)) == pytest.approx(0.65 + 0.21 - 0.5)
    assert TIMES.waited(()) == pytest.approx(0.13 + 0.66)
    told = TIMES.told((2,), ())
    assert told.startswith("gradients in 2 sums, after 2 of 3: 350 ms to wait for")
    assert "by fusion_bytes, in 1 sum, 790 ms. A sum takes 10 ms and 50 ms a MB" in told


def test_one_replica_has_nothing_to_search():
    model = build_model(SMALL.replace(fusion="auto"))
    assert model.all_reduce.fusion == Fusion(SMALL.fusion_bytes)


def test_tpus_have_no_clock(monkeypatch):
    monkeypatch.setattr(measured_fusion, "compiles_all_reduces", lambda _: True)
    with pytest.raises(UserError, match="imagenet-fast plan --accelerator tells fusion_segm"):
        measured_fusion.measure(build_model(SMALL), None, (32, 16, 16, 3))


def test_a_run_searches_once(tmp_path, run_python):
    """Then it goes on with what it found, which is in its folder."""
    options = [f"--{name}={getattr(SMALL, name)}" for name in ("num_classes", "model")]
    options += ["--synthetic", "--image_size=16", "--train_crop=none", "--batch_size=32"]
    options += ["--duration=2 steps", "--noexamine", "--notensorboard", "--eval_every=2 steps"]
    job = ["-m", "imagenet_fast", "train", *options, "--fusion=auto", f"--model_dir={tmp_path}"]
    first = run_python(job, workers=2)
    assert first.stdout.count("gradients in ") + first.stderr.count("gradients in ") == 1
    found = json.loads((tmp_path / "fusion.json").read_text())
    assert found["replicas"] == 2
    again = run_python(job, workers=2)
    assert "gradients in " not in again.stdout + again.stderr
    assert "nothing is left to train" in again.stdout + again.stderr
    assert json.loads((tmp_path / "fusion.json").read_text()) == found
