"""JPEG indexes, from ``prepare`` to batches."""

import io
import re
import shutil
import threading

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from imagenet_fast import Config
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.native_ops import load_ops
from imagenet_fast.base.notices import warn_once
from imagenet_fast.data import records
from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.data.examples import ENCODED, JPEG_INDEX, decode_example
from imagenet_fast.data.jpeg.index import index_file
from imagenet_fast.data.manifest import read_manifest, verify
from imagenet_fast.data.prepare.add_index import Added, add_index
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import open_source

IMAGES = 24  # One of them progressive, another one small.


pytestmark = pytest.mark.usefixtures("native_ops")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("images") / "noise"
    random = np.random.RandomState(0)
    for number in range(IMAGES):
        path = root / "train" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = random.randint(0, 256, (12, 16, 3)).astype(np.uint8)
        size = (60, 50) if number == 1 else (253, 190)
        image = Image.fromarray(small).resize(size)
        image.save(path, quality=90, progressive=number == 0)
        path = root / "val" / path.relative_to(root / "train")
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, quality=90)
    return open_source("folders", root)


def make(source, directory, **options):
    prepare(source, directory, train_shards=3, validation_shards=1, progress=False, **options)
    return directory


@pytest.fixture(scope="module")
def indexed(source, tmp_path_factory):
    return make(source, tmp_path_factory.mktemp("data") / "indexed")


@pytest.fixture(scope="module")
def without_index(source, tmp_path_factory):
    """As ``indexed``, to be read only."""
    return make(source, tmp_path_factory.mktemp("data") / "plain", jpeg_index=False)


@pytest.fixture
def plain(without_index, tmp_path):
    """The same, of which a test may change the files."""
    return shutil.copytree(without_index, tmp_path / "plain")


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    warn_once.cache_clear()
    load_ops.cache_clear()
    yield
    load_ops.cache_clear()


def examples(directory):
    paths = sorted(directory.glob("train-*"))
    return [decode_example(record) for path in paths for record in records.read_records(path)]


def batches(directory, split="train", **options):
    config = Config(
        data_dir=str(directory),
        batch_size=8,
        image_size=64,
        strategy="one_device",
        seed=3,
        **options,
    )
    dataset = iter(distributed_dataset(config, split))
    return [[part.numpy() for part in next(dataset)] for _ in range(3)]


@pytest.fixture(scope="module")
def indexed_batches(indexed):
    return batches(indexed)


def assert_same(one, other):
    for parts in zip(one, other):
        for part, other_part in zip(*parts):
            np.testing.assert_array_equal(part, other_part)


def content(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_records_have_the_index_of_their_jpeg(indexed):
    manifest = read_manifest(indexed)
    assert manifest.source["jpeg_index"] is True
    assert manifest.unindexed == 1
    assert not verify(indexed, progress=False)
    found = examples(indexed)
    for example in found:
        (encoded,) = example[ENCODED]
        height, width = example["image/height"][0], example["image/width"][0]
        assert example.get(JPEG_INDEX, [b""])[0] == (index_file(encoded, height, width) or b"")
    assert sum(JPEG_INDEX in example for example in found) == IMAGES - 2


@pytest.mark.long
@pytest.mark.parametrize("split", ["train", "validation"])
def test_only_pixels_at_the_border_depend_on_the_index(
    indexed, indexed_batches, without_index, split
):
    with_index = indexed_batches if split == "train" else batches(indexed, split)
    without = batches(without_index, split)
    different = 0
    for batch, other in zip(with_index, without):
        assert_same([batch[1:]], [other[1:]])
        unequal = batch[0] != other[0]
        different += unequal.sum()
        # A pixel at the border of the crop has a part in few pixels of the image.
        assert not unequal[:, 8:-8, 8:-8].any()
    assert different


@pytest.mark.long
@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_index_that_is_not_used_changes_nothing(indexed, without_index, split):
    assert_same(batches(indexed, split, jpeg_index=False), batches(without_index, split))


def test_add_index_gives_the_bytes_of_prepare(indexed, plain):
    assert add_index(plain, progress=False) == Added(2 * IMAGES - 3, 1)
    assert content(plain) == content(indexed)  # also data.npz
    # Once more, nothing changes.
    before = content(plain)
    assert add_index(plain, progress=False) == Added(2 * IMAGES - 3, 1)
    assert content(plain) == before


@pytest.mark.long
def test_indexes_of_other_jpegs_are_reported_and_replaced(indexed, tmp_path, capfd, monkeypatch):
    wrong = index_file(examples(indexed)[0][ENCODED][0], 300, 300)
    expected = content(indexed)
    data = shutil.copytree(indexed, tmp_path / "data")
    path = min(data.glob("train-*"))
    rewritten = []
    for record in records.read_records(path):
        example = tf.train.Example.FromString(record)
        example.features.feature[JPEG_INDEX].bytes_list.value[:] = [wrong]
        rewritten.append(example.SerializeToString())
    records.write_records(path, rewritten)
    (data / "manifest.json").unlink()
    monkeypatch.setattr("imagenet_fast.data.batches._warned_of_indexes", threading.Event())
    batches(data, num_classes=2)  # Those of a shard are in several batches.
    # Which batch is the first depends on the threads.
    told = capfd.readouterr().err
    assert len(re.findall(r"[1-8] of the 8 JPEGs of a batch do not match their indexes", told)) == 1
    add_index(data, progress=False)
    assert path.read_bytes() == expected[path.name]


def test_interrupted_add_index_can_be_repeated(indexed, plain, monkeypatch):
    from imagenet_fast.data.prepare import add_index as module

    original = module.Path.replace
    moved = []

    def replace(self, target):
        if str(self).endswith(".indexed"):
            moved.append(self)
            if len(moved) == 2:
                raise OSError(5, "Input/output error")
        return original(self, target)

    monkeypatch.setattr(module.Path, "replace", replace)
    with pytest.raises(UserError, match="cannot be written: Input/output error"):
        add_index(plain, threads=1, progress=False)
    monkeypatch.undo()
    add_index(plain, progress=False)
    assert read_manifest(plain) == read_manifest(indexed)
    assert not verify(plain, progress=False)


def test_indexes_for_shards_of_other_converters(plain, indexed):
    for path in (plain / "manifest.json", *plain.glob("data.*")):
        path.unlink()
    assert add_index(plain, progress=False).unindexed == 1
    for path in plain.glob("train-*"):
        assert path.read_bytes() == (indexed / path.name).read_bytes()


def test_no_index_is_added_to_damaged_shards(plain, tmp_path):
    path = min(plain.glob("train-*"))
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="differs from the manifest"):
        add_index(plain, progress=False)
    assert path.read_bytes() == data
    with pytest.raises(UserError, match="has no shards"):
        add_index(tmp_path / "nothing", progress=False)


def test_without_a_compiler(source, plain, indexed, tmp_path, no_compiler, capfd):
    made = make(source, tmp_path / "made")
    assert content(made) == content(plain)
    assert capfd.readouterr().err.count("images will be read more slowly, without indexes") == 1
    make(source, indexed)  # It is finished.


def test_data_without_indexes_is_repaired_without_them(source, plain):
    before = content(plain)
    min(plain.glob("train-*")).unlink()
    make(source, plain)
    assert content(plain) == before


def test_data_with_indexes_is_repaired_with_them(source, tmp_path, monkeypatch):
    made = make(source, tmp_path / "made")
    before = content(made)
    min(made.glob("train-*")).unlink()
    with pytest.raises(UserError, match="jpeg_index True there, False requested"):
        make(source, made, jpeg_index=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    load_ops.cache_clear()
    with pytest.raises(UserError, match="JPEGs cannot be indexed: no C\\+\\+ compiler"):
        make(source, made)
    monkeypatch.undo()
    load_ops.cache_clear()
    make(source, made)
    assert content(made) == before


def test_jpegs_keep_their_bytes(indexed, plain):
    files = [[example[ENCODED] for example in examples(own)] for own in (indexed, plain)]
    assert files[0] == files[1]
    assert all(Image.open(io.BytesIO(file[0])) for file in files[0])
