"""Data, runs and models in Google Cloud Storage, as TensorFlow's own client sees it in a fake.

All of it happens in processes of its own: TensorFlow reads where to find the service once.
"""

import functools
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from fake_gcs import FakeGcs
from model_weights import weights_in

from imagenet_fast.data import records
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.page import write_page
from imagenet_fast.data.prepare.sources.arrays import ArraySource
from imagenet_fast.serving.predict import predict

JOB = pathlib.Path(__file__).with_name("buckets_job.py")
STEPS, KILLED_AT = 10, 7
OPTIONS = {
    "model": "resnet8",
    "image_size": 16,
    "train_crop": "none",
    "batch_size": 64,  # 4 steps are an epoch
    "duration": f"{STEPS} steps",
    "eval_every": "5 steps",
    "checkpoint_every": "3 steps",
    "log_every": "1 step",
    "warmup": "0 steps",
    "decay_at": "8 steps",
    "shuffle_buffer": 200,
    "strategy": "one_device",
    "mlperf_log": True,
}
KILLED = {
    **OPTIONS,
    "data_dir": "gs://data/noise",
    "model_dir": "gs://runs/killed",
    "tensorboard": False,
    "examine": False,
}
DAMAGED_SHARD, DAMAGED_RECORD = "train-00002-of-00008", 5


@pytest.fixture(scope="module")
def gcs(tmp_path_factory):
    with FakeGcs(tmp_path_factory.mktemp("gcs")) as service:
        service.buckets = {"data": {}, "runs": {}}
        service.refused = {"closed": 403, "unknown": 401, "away": 503}
        yield service


@pytest.fixture(scope="module")
def damaged(tmp_path_factory, gcs):
    """Shards in a folder, and the same in a bucket; the data of a record is damaged."""
    folder = tmp_path_factory.mktemp("damaged") / "noise"
    generator = np.random.default_rng(0)
    arrays = {
        split: (
            generator.integers(0, 256, (count, 16, 16, 3), np.uint8),
            generator.integers(0, 10, count),
        )
        for split, count in {"train": 256, "validation": 80}.items()
    }
    prepare(ArraySource("noise", "noise", map(str, range(10)), arrays), folder, progress=False)
    gcs.put_folder(folder, "data", "look")
    write_page(str(folder))
    shard = folder / DAMAGED_SHARD
    start = list(records.locate_records(shard))[DAMAGED_RECORD]
    content = bytearray(shard.read_bytes())
    content[start + 40] ^= 0xFF
    shard.write_bytes(content)
    gcs.put_folder(folder, "data", "noise")
    return folder


@pytest.fixture(scope="module")
def run_job(gcs, run_python_session):
    """Runs the job in a process: TensorFlow reads the environment of buckets when imported."""

    def run_job(place, **job):
        (place / "job.json").write_text(json.dumps({**job, "out": str(place / "found.json")}))
        arguments = [JOB, place / "job.json"]
        options = {"environment": gcs.environment, "check": False, "fresh": True}
        finished = run_python_session(arguments, **options)
        expected = 9 if job["do"] == "die" else 0
        assert finished.returncode == expected, finished.stderr[-8000:]
        return finished.stderr

    return run_job


@pytest.fixture(scope="module")
def errors(damaged, run_job, tmp_path_factory):
    """What was found of a folder in a bucket, and of the commands that are refused."""
    folder = tmp_path_factory.mktemp("looked")
    places = {"DATA_DIR": str(damaged), "MODEL_DIR": str(folder / "refused")}
    commands = [with_places(command, places) for command, _ in REFUSALS.values()]
    run_job(
        folder, do="look", look="gs://data/look", folder="gs://data/a/folder", commands=commands
    )
    assert not (folder / "refused").exists()
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def used(damaged, gcs, run_job, tmp_path_factory):
    """The folder of a local run, and what was found of the same run in a bucket."""
    folder = tmp_path_factory.mktemp("used")
    for number in range(3):
        pixels = np.full((20, 20, 3), 80 * number, np.uint8)
        (folder / f"{number}.jpg").write_bytes(tf.io.encode_jpeg(pixels).numpy())
    gcs.put("data", "images/2.jpg", (folder / "2.jpg").read_bytes())
    images = [str(folder / "0.jpg"), str(folder / "1.jpg"), "gs://data/images/2.jpg"]
    job = {
        "local": {**OPTIONS, "data_dir": str(damaged), "model_dir": str(folder / "run")},
        "bucket": {**OPTIONS, "data_dir": "gs://data/noise", "model_dir": "gs://runs/whole"},
        "exported": "gs://runs/models/exported",
        "images": [*images, "gs://data/images/none.jpg"],
    }
    stderr = run_job(folder, do="use", **job)
    found = json.loads((folder / "found.json").read_text())
    return folder / "run", {**found, "images": images, "stderr": stderr}


def fetch(gcs, name, folder):
    """Copies a folder of the bucket with runs to this machine."""
    for file, content in gcs.files("runs", name).items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def rows(run, times=("train_seconds", "wall_seconds", "images_per_second")):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in times} for line in lines]


def files(run):
    """Names of a run's files; TensorBoard's have the time in theirs."""
    names = (path.relative_to(run) for path in run.rglob("*") if path.is_file())
    return sorted(str(name.parent if "tfevents" in name.name else name) for name in names)


# In the default run, what a run does in a bucket is done to a folder, and runs are on disk.
@pytest.mark.long
def test_a_run_in_a_bucket_is_the_run_on_disk(used, gcs, tmp_path):
    local, _ = used
    run = fetch(gcs, "whole", tmp_path)
    assert files(run) == files(local)
    assert {"report.html", "mlperf.log", "tensorboard/train"} < set(files(run))
    expected = weights_in(local)
    assert any("optimizer/" in name and np.ndim(value) for name, value in expected.items())
    for name, value in weights_in(run).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert rows(run) == rows(local)
    assert [row["step"] for row in rows(run) if row["kind"] == "validation"] == [5, 10]
    assert "<svg" in (run / "report.html").read_text()
    scalars = (run / "tensorboard" / "train").iterdir()
    events = tf.compat.v1.train.summary_iterator(str(next(scalars)))
    assert STEPS in {event.step for event in events}


@pytest.mark.long
@pytest.mark.parametrize("file", ["metrics.jsonl", "mlperf.log", "tensorboard%2Ftrain"])
def test_lines_are_uploaded_together(used, gcs, file):
    # At first, before each of 4 checkpoints, at the end; and rarely, where all of it takes long.
    begin = f"uploadType=resumable&name=whole%2F{file}"
    uploads = [path for _, _, path in gcs.requests if begin in path and ".tmp" not in path]
    assert 4 <= len(uploads) < STEPS


@pytest.mark.long
def test_the_page_on_the_images_in_a_bucket_is_that_on_disk(errors, damaged, gcs):
    page = gcs.files("data", "look")["data.html"].decode()
    assert page.count("<img") >= 80
    # The page may tell how to make it again there.
    expected = (damaged / "data.html").read_text()
    assert page.replace("gs://data/look", "HERE") == expected.replace(str(damaged), "HERE")


@pytest.mark.long
def test_a_damaged_record_in_a_bucket_is_skipped_and_counted(used, gcs, tmp_path):
    local, found = used
    run = fetch(gcs, "whole", tmp_path)
    bad = [json.loads(line) for line in (run / "bad_images.jsonl").read_text().splitlines()]
    assert [(image["shard"], image["record"]) for image in bad] == [(DAMAGED_SHARD, DAMAGED_RECORD)]
    assert (run / "bad_images.jsonl").read_text() == (local / "bad_images.jsonl").read_text()
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, local)]
    assert summaries[0]["bad_images"] == {"lost record": 1}
    skipped = [summary["images_skipped_in_training"] for summary in summaries]
    assert skipped[0] == skipped[1] >= 2, "once an epoch"
    assert "listed in gs://runs/whole/bad_images.jsonl" in found["stderr"]


@pytest.mark.long
def test_evaluation_export_and_prediction(used, gcs, tmp_path):
    local, found = used
    last = rows(local)[-1]
    assert last["kind"] == "validation" and last["step"] == STEPS
    assert found["evaluated"]["top1"] == last["top1"]
    assert found["evaluated"]["checkpoint"] == f"gs://runs/whole/checkpoints/ckpt-{STEPS}"
    *predicted, missing = found["predicted"]
    assert missing["error"] == "No such file or directory"
    # What lies in the bucket is the whole model.
    assert not any(".tmp" in name for name in gcs.files("runs", "models"))
    exported = fetch(gcs, "models/exported", tmp_path / "exported")
    (tmp_path / "2.jpg").write_bytes(gcs.files("data", "images")["2.jpg"])
    images = [*found["images"][:2], str(tmp_path / "2.jpg")]
    # Equal but for rounding, which differs with the batch and the threads.
    for answer, own in zip(predicted, predict(str(exported), images), strict=True):
        assert [best["label"] for best in answer["predictions"]] == [
            best["label"] for best in own["predictions"]
        ]
        assert [best["probability"] for best in answer["predictions"]] == pytest.approx(
            [best["probability"] for best in own["predictions"]], rel=1e-5
        )
    assert (exported / "assets.extra" / "tf_serving_warmup_requests").stat().st_size


@pytest.fixture(scope="module")
def resume(gcs, run_python_session):
    """Runs the command of the killed run again, and returns the finished process."""

    def resume():
        flags = [f"--{name}={value}" for name, value in KILLED.items()]
        arguments = ["-m", "imagenet_fast", "train", *flags]
        return run_python_session(arguments, environment=gcs.environment, fresh=True)

    return resume


@pytest.fixture(scope="module")
def resumed(used, gcs, run_job, resume, tmp_path_factory):
    """The folder of the run when it was killed, and what was printed when it resumed."""
    folder = tmp_path_factory.mktemp("killed")
    run_job(folder, do="die", killed=KILLED, killed_at=KILLED_AT)
    return fetch(gcs, "killed", folder / "run"), resume()


# In the default run, training/test_train.py kills a run on disk.
@pytest.mark.long
def test_a_killed_run_goes_on_from_a_bucket(used, gcs, resumed, tmp_path):
    local, _ = used
    killed, finished = resumed
    assert rows(killed)[-1]["step"] >= 6, "rows are there when a checkpoint needs them"
    assert not (killed / "summary.json").exists()
    assert "from step 6" in finished.stderr
    assert "gs://runs/killed/report.html" in finished.stdout
    run = fetch(gcs, "killed", tmp_path / "run")
    expected = weights_in(local)
    for name, value in weights_in(run).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    places = [[(row["kind"], row["step"]) for row in rows(folder)] for folder in (run, local)]
    assert places[0] == places[1]
    keys = [line.split('"key": "')[1].split('"')[0] for line in (run / "mlperf.log").open()]
    assert keys.count("init_start") == keys.count("run_stop") == 1


@pytest.mark.long
def test_a_damaged_checkpoint_in_a_bucket_is_set_aside_there(used, gcs, resumed, resume, tmp_path):
    local, _ = used
    run = fetch(gcs, "killed", tmp_path / "run")
    shard = "killed/checkpoints/ckpt-10.data-00000-of-00001"
    content = bytearray((run / "checkpoints" / "ckpt-10.data-00000-of-00001").read_bytes())
    content[len(content) // 2] ^= 1
    gcs.put("runs", shard, bytes(content))
    finished = resume()
    assert "set aside as damaged-ckpt-10; the run resumes from step 9" in finished.stderr
    run = fetch(gcs, "killed", tmp_path / "again")
    assert (run / "checkpoints" / "damaged-ckpt-10.data-00000-of-00001").read_bytes() == content
    expected = weights_in(local)
    for name, value in weights_in(run).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


REFUSALS = {
    "no bucket": (
        ["train", "--data_dir=gs://nowhere/digits", "--model_dir=MODEL_DIR"],
        "gs://nowhere/digits: there is no bucket gs://nowhere",
    ),
    "no folder": (
        ["train", "--data_dir=gs://data/none", "--model_dir=MODEL_DIR"],
        "data_dir gs://data/none does not exist",
    ),
    "no access": (
        ["train", "--data_dir=gs://closed/digits", "--model_dir=MODEL_DIR"],
        "gs://closed/digits: Permission denied (the account does not have storage.objects.get "
        "access): the account needs a role in that bucket, such as Storage Object Admin",
    ),
    "not logged in": (
        ["train", "--data_dir=gs://unknown/digits", "--model_dir=MODEL_DIR"],
        "gs://unknown/digits: not authenticated to Google Cloud Storage (Invalid Credentials): "
        "log in with `gcloud auth application-default login`",
    ),
    "away": (
        ["train", "--data_dir=gs://away/noise", "--model_dir=MODEL_DIR"],
        "gs://away/noise: Google Cloud Storage failed (Service Unavailable)",
    ),
    "no bucket for the run": (
        ["train", "--data_dir=DATA_DIR", "--model_dir=gs://nowhere/run", "--model=resnet8"],
        "cannot write to model_dir gs://nowhere/run: there is no bucket gs://nowhere; choose "
        "another --model_dir",
    ),
    "no access for the run": (
        ["train", "--data_dir=DATA_DIR", "--model_dir=gs://closed/run", "--model=resnet8"],
        "cannot write to model_dir gs://closed/run: Permission denied (the account does "
        "not have storage.objects.get access)",
    ),
    "no run": (
        ["evaluate", "--model_dir=gs://runs/none"],
        "gs://runs/none holds no training run: gs://runs/none/config.json: No such file",
    ),
    "no model": (
        ["predict", "--saved_model=gs://nowhere/model", "cat.jpg"],
        "gs://nowhere/model: there is no bucket gs://nowhere",
    ),
    "no model there": (
        ["predict", "--saved_model=gs://data/model", "cat.jpg"],
        "saved_model gs://data/model does not exist",
    ),
    "prepared there": (
        ["prepare", "--source=digits", "--data_dir=gs://data/noise"],
        "data_dir is gs://data/noise, but must be a local path; copy it to the "
        "bucket from there, with `gcp/tpu copy_data`",
    ),
    "prepared from there": (
        ["prepare", "--source=list", "--source_path=gs://data/photos.csv", "--data_dir=DATA_DIR"],
        "source_path is gs://data/photos.csv, but must be a local path",
    ),
}


def with_places(command, places):
    return [
        functools.reduce(lambda text, name: text.replace(name, places[name]), places, argument)
        for argument in command
    ]


def test_a_folder_in_a_bucket_is_like_one_on_disk(errors):
    assert errors[0] == ""


def test_what_cannot_be_used_is_told_at_once(errors):
    for (name, (command, reason)), (status, stderr, seconds) in zip(
        REFUSALS.items(), errors[1:], strict=True
    ):
        assert status == 2, (name, stderr)
        assert f"imagenet-fast {command[0]}: error: " in stderr and reason in stderr, name
        assert seconds < 30, name
