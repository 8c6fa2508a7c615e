"""Indexes for the JPEGs of existing shards: unusual records, interruptions and other processes."""

import fcntl
import os
import shutil

import pytest
import tensorflow as tf
from PIL import Image

from imagenet_fast import Config
from imagenet_fast.base.errors import UserError
from imagenet_fast.data import records
from imagenet_fast.data.examples import ENCODED, HEIGHT, JPEG_INDEX, WIDTH
from imagenet_fast.data.info import read_info
from imagenet_fast.data.jpeg.index import index_file
from imagenet_fast.data.manifest import check_sizes, read_manifest, verify
from imagenet_fast.data.prepare.add_index import Added, add_index
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import open_source

JPEGS = 4


pytestmark = pytest.mark.usefixtures("native_ops")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for number in range(JPEGS):
        path = root / ("val" if number == 3 else "train") / "a" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (200, 201), (50 * number, 100, 9)).save(path)
    return root


@pytest.fixture
def shards(source, tmp_path):
    _prepare(source, tmp_path / "data")
    return tmp_path / "data"


def _prepare(source, directory):
    opened = open_source("folders", source)
    return prepare(
        opened, directory, train_shards=2, validation_shards=1, jpeg_index=False, progress=False
    )


def test_a_second_process_is_refused(shards):
    lock = shards / ".add_index.lock"
    with lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="data: another process is adding indexes"):
            add_index(shards, progress=False)
    assert lock.exists()  # it is the other process'
    assert add_index(shards, progress=False) == Added(JPEGS, 0)
    assert not lock.exists()


def test_data_that_prepare_has_not_finished_are_refused(shards):
    (shards / "manifest.json").rename(shards / "prepare.journal")
    with pytest.raises(UserError, match="unfinished: rerun the `imagenet-fast prepare` command"):
        add_index(shards, progress=False)


def test_records_without_sizes_or_images(source, tmp_path):
    jpeg = (source / "train" / "a" / "0.jpg").read_bytes()
    without_size, zeros, empty, no_image = (tf.train.Example() for _ in range(4))
    for example in (without_size, zeros, empty):
        example.features.feature[ENCODED].bytes_list.value.append(jpeg)
    for side in (HEIGHT, WIDTH):
        zeros.features.feature[side].int64_list.value.append(0)
        empty.features.feature[side].int64_list.SetInParent()
    no_image.features.feature[ENCODED].bytes_list.SetInParent()
    path = tmp_path / "train-00000-of-00001"
    examples = (without_size, zeros, empty, no_image)
    records.write_records(path, [example.SerializeToString() for example in examples])
    assert add_index(tmp_path, progress=False) == Added(3, 0)
    *found, last = map(tf.train.Example.FromString, records.read_records(path))
    index = index_file(jpeg, 201, 200)
    assert [one.features.feature[JPEG_INDEX].bytes_list.value[0] for one in found] == [index] * 3
    assert last == no_image


def test_a_missing_shard_is_named(shards):
    (shards / "train-00001-of-00002").unlink()
    with pytest.raises(UserError, match="train-00001-of-00002: is missing; see"):
        add_index(shards, progress=False)


def test_pipes_are_refused(shards):
    """They would block for ever."""
    for name in (".add_index.lock", "train-00000-of-00002"):
        path = shards / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        with pytest.raises(UserError, match="not a regular file") as caught:
            add_index(shards, progress=False)
        path.unlink()
    assert str(caught.value) == f"{path}: is not a regular file; remove it"


def test_data_are_whole_between_the_manifest_and_a_shard(source, shards, monkeypatch):
    from imagenet_fast.data.prepare import add_index as module

    before = read_manifest(shards)
    original = module.Path.replace

    def replace(self, target):
        if self.name == "train-00000-of-00002.indexed":
            raise KeyboardInterrupt
        return original(self, target)

    monkeypatch.setattr(module.Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        add_index(shards, threads=1, progress=False)
    monkeypatch.undo()
    (problem,) = verify(shards, progress=False)
    assert "rerun `imagenet-fast prepare --add_index`, which was interrupted" in problem
    assert read_info(Config(data_dir=str(shards))).splits["train"].examples == JPEGS - 1
    content = {path.name: path.read_bytes() for path in shards.glob("*-of-*")}
    _prepare(source, shards)
    assert content == {path.name: path.read_bytes() for path in shards.glob("*-of-*")}
    assert add_index(shards, progress=False) == Added(JPEGS, 0)
    assert not verify(shards, progress=False)
    assert not list(shards.glob("*.indexed"))
    # A run that is about to start has read the manifest before.
    check_sizes(before, shards, "train")
    shutil.copy(shards / "train-00000-of-00002", shards / "validation-00000-of-00001")
    with pytest.raises(UserError, match="validation-00000-of-00001: is too long"):
        check_sizes(before, shards, "validation")
