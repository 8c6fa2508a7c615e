"""The doctor writes where training writes, reads what it reads, and leaves nothing behind."""

import json
import pathlib
import shutil

import pytest
from fake_gcs import FakeGcs

from imagenet_fast import Config
from imagenet_fast.doctor import files
from imagenet_fast.doctor.files import check_data_dir, check_model_dir, check_temporary_files


def test_without_directories_nothing_is_checked():
    assert check_model_dir(Config()) == check_data_dir(Config()) == []


@pytest.mark.parametrize("exists", [True, False])
def test_a_model_dir_that_can_be_written(tmp_path, exists):
    directory = tmp_path / "runs" / "mine"
    if exists:
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    (found,) = check_model_dir(Config(model_dir=str(directory)))
    assert found.state == "ok"
    assert found.found.startswith(f"{directory}: 8 MB written and renamed in ")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_dir_below_a_file(tmp_path):
    (tmp_path / "runs").write_text("")
    (found,) = check_model_dir(Config(model_dir=str(tmp_path / "runs" / "mine")))
    assert (found.state, found.name) == ("wrong", "model_dir")
    assert found.found.endswith("/runs/mine: Not a directory")
    assert "--model_dir" in found.advice


def test_a_model_dir_that_cannot_be_written():
    """No user can write there, root included."""
    (found,) = check_model_dir(Config(model_dir="/proc/self"))
    assert found.state == "wrong"
    assert found.found.startswith("cannot write in /proc/self: ")


def test_a_disk_that_fills_up(tmp_path, monkeypatch):
    """And what could be written goes, too."""

    def write_file(path, content):
        path.write_bytes(content[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_file", write_file)
    (found,) = check_model_dir(Config(model_dir=str(tmp_path)))
    assert found.state == "wrong"
    assert found.found == f"cannot write in {tmp_path}: No space left on device"
    assert not list(tmp_path.iterdir())


def test_a_disk_that_returns_other_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "write_file", lambda path, content: path.write_bytes(b"0"))
    (found,) = check_model_dir(Config(model_dir=str(tmp_path)))
    assert found.state == "wrong"
    assert found.found == f"{tmp_path}: a file read back differs from what was written"


def test_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    assert check_temporary_files(Config()) == []
    assert not list(tmp_path.iterdir())
    full = pathlib.Path("/dev/full")
    monkeypatch.setattr(files.tempfile, "TemporaryFile", lambda: full.open("wb", buffering=0))
    (found,) = check_temporary_files(Config())
    assert (found.name, found.state) == ("temporary files", "wrong")
    assert found.found == f"cannot write 8 MB in {tmp_path}: No space left on device"
    assert "TMPDIR" in found.advice


@pytest.fixture
def copy(digits, tmp_path):
    """A copy of the data, to be damaged."""
    return pathlib.Path(shutil.copytree(digits, tmp_path / "digits"))


def test_data_that_can_be_read(digits):
    (found,) = check_data_dir(Config(data_dir=digits))
    assert found.state == "ok"
    assert "digits, all shards complete; 1438 records read, " in found.found
    assert found.numbers["records"] == 1438


def test_data_without_a_manifest(copy):
    (copy / "manifest.json").unlink()
    (found,) = check_data_dir(Config(data_dir=str(copy)))
    assert found.state == "ok"
    assert "training shards without a manifest; 1438 records read" in found.found


def test_missing_data(tmp_path):
    (found,) = check_data_dir(Config(data_dir=str(tmp_path / "none")))
    assert found.state == "wrong"
    assert found.found.endswith("/none: no such directory")
    assert "imagenet-fast prepare" in found.advice


@pytest.mark.parametrize("name", ["run[1]", "run*", "a?/run"])
def test_a_model_dir_that_training_refuses(tmp_path, name):
    (found,) = check_model_dir(Config(model_dir=str(tmp_path / name)))
    assert (found.state, found.name) == ("wrong", "model_dir")
    assert "TensorFlow cannot read files from paths with *, ?, [" in found.found


def test_a_manifest_without_training_images(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    train = manifest["splits"].pop("train")
    (copy / "manifest.json").write_text(json.dumps(manifest))
    (found,) = check_data_dir(Config(data_dir=str(copy)))
    assert (found.state, found.found) == ("wrong", f"{copy}: no split 'train'")
    empty = {"shards": [], "class_counts": [0] * len(train["class_counts"])}
    manifest["splits"]["train"] = empty
    (copy / "manifest.json").write_text(json.dumps(manifest))
    (found,) = check_data_dir(Config(data_dir=str(copy)))
    assert (found.state, found.found) == ("wrong", f"{copy} has no training images")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("train-00000-of-00001", "/train-00000-of-00001 is empty"),
        ("train-00003-of-00008", "/train-00000-of-00008 is missing (6 more like it)"),
    ],
)
def test_incomplete_shards_without_a_manifest(tmp_path, name, told):
    (tmp_path / name).write_bytes(b"")
    (found,) = check_data_dir(Config(data_dir=str(tmp_path)))
    assert found.state == "wrong"
    assert found.found == f"{tmp_path}{told}"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda shard: shard.unlink(), "is missing"),
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-9]), "is truncated"),
        (lambda shard: shard.write_bytes(b"\0" * shard.stat().st_size), "record 0, at byte 0, is"),
    ],
)
def test_damaged_data(copy, damage, told):
    damage(min(copy.glob("train-*")))
    (found,) = check_data_dir(Config(data_dir=str(copy)))
    assert found.state == "wrong"
    assert told in found.found


IN_BUCKETS = """
import dataclasses, json
from imagenet_fast import Config
from imagenet_fast.doctor.files import check_model_dir
found = [check_model_dir(Config(model_dir=f"gs://{name}/run"))[0] for name in ("runs", "closed")]
print(json.dumps([dataclasses.asdict(own) for own in found]))
"""


@pytest.mark.long
def test_buckets(tmp_path, run_python):
    """One that can be written, where nothing stays, and one that cannot."""
    with FakeGcs(tmp_path) as service:
        service.buckets = {"runs": {}}
        service.refused = {"closed": 403}
        finished = run_python(["-c", IN_BUCKETS], environment=service.environment, fresh=True)
        assert service.buckets == {"runs": {}}
        assert any(method == "POST" for method, *_ in service.requests)
    written, refused = json.loads(finished.stdout.splitlines()[-1])
    assert written["state"] == "ok"
    assert written["found"].startswith("gs://runs/run: 8 MB written and renamed in ")
    assert refused["state"] == "wrong"
    assert "Permission denied" in refused["found"]
