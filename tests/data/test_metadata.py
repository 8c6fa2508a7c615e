import base64
import json
import shutil
import zlib

import numpy as np
import pytest
from PIL import Image

from imagenet_fast.base.errors import UserError
from imagenet_fast.data import metadata
from imagenet_fast.data.manifest import JOURNAL, read_manifest
from imagenet_fast.data.metadata import FILE, perceptual_hash, read_metadata
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import open_source


def smooth(seed, size):
    draw = np.random.RandomState(seed).randint(0, 256, (6, 5, 3), np.uint8)
    return Image.fromarray(draw).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """JPEGs, some of them greyscale, and PNGs, of different sizes, in two classes."""
    root = tmp_path_factory.mktemp("images") / "toy"
    for label, name in enumerate(("ant", "bee")):
        (root / name).mkdir(parents=True)
        for index in range(12):
            image = smooth(100 * label + index, (20 + index, 30 + label))
            image = image.convert("L") if index % 5 == 3 else image
            image.save(root / name / f"{index:02d}.{'png' if index % 4 == 1 else 'jpg'}")
    return root


@pytest.fixture(scope="module")
def prepared(folder, tmp_path_factory):
    directory = tmp_path_factory.mktemp("prepared")
    prepare(open_source("folders", folder, holdout=0.25), directory, progress=False)
    return directory


@pytest.fixture
def copy(prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "copy")
    return tmp_path / "copy"


def load(directory):
    return read_metadata(read_manifest(directory), directory, progress=False)


def test_metadata_describes_the_files(prepared, folder):
    rows = load(prepared)
    assert len(rows) == 24
    assert rows["label"].tolist().count(0) == 12
    jpegs = {
        (path.stat().st_size, *Image.open(path).size, len(Image.open(path).getbands()))
        for path in folder.rglob("*.jpg")
    }
    stored = {
        tuple(int(row[name]) for name in ("bytes", "width", "height", "channels")) for row in rows
    }
    assert jpegs <= stored
    assert len(stored - jpegs) <= 6  # those of the PNGs, which are converted
    assert not rows["png"].any()
    assert len(set(rows["digest"].tolist())) == 24


def test_lost_metadata_is_recomputed_from_the_shards(copy, prepared):
    expected = load(prepared)
    for damage in (
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:200]),
        lambda path: path.write_bytes(b""),
        lambda path: np.savez(path, label=np.zeros(24)),
    ):
        damage(copy / FILE)
        found = load(copy)
        for name in metadata.ROW.names:
            if name != "hash":  # of converted images, the original's
                assert np.array_equal(found[name], expected[name]), name
        assert (copy / FILE).exists()


def test_metadata_of_other_shards_is_ignored(copy, folder, tmp_path):
    other = tmp_path / "other"
    prepare(open_source("folders", folder, holdout=0.25), other, seed=5, progress=False)
    shutil.copy(other / FILE, copy / FILE)
    assert not np.array_equal(load(other)["digest"], load(copy)["digest"])


def test_damaged_record_is_named(copy):
    (copy / FILE).unlink()
    shard = next(copy.glob("train-*"))
    data = bytearray(shard.read_bytes())
    data[-40] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match=rf"{shard.name}: record \d+, at byte \d+, is corrupt"):
        load(copy)


@pytest.mark.parametrize("in_journal", [True, False])
def test_resumed_run_has_the_metadata_of_earlier_shards(folder, prepared, tmp_path, in_journal):
    source = open_source("folders", folder, holdout=0.25)
    read, left = source.read, [15]

    def fail(split, index):
        left[0] -= 1
        if left[0] < 0:
            raise OSError("gone")
        return read(split, index)

    source.read = fail
    with pytest.raises(UserError, match="gone"):
        prepare(source, tmp_path, threads=1, progress=False)
    journal = tmp_path / JOURNAL
    first, *lines = map(json.loads, journal.read_text().splitlines())
    assert lines and all(line["metadata"] for line in lines)
    if not in_journal:  # as of a version without metadata
        lines = [{key: line[key] for key in line if key != "metadata"} for line in lines]
        journal.write_text("".join(f"{json.dumps(line)}\n" for line in (first, *lines)))
    prepare(open_source("folders", folder, holdout=0.25), tmp_path, progress=False)
    if in_journal:
        assert (tmp_path / FILE).read_bytes() == (prepared / FILE).read_bytes()
    else:
        assert np.array_equal(load(tmp_path)["digest"], load(prepared)["digest"])


def test_hashes_are_added_once_imagehash_is_installed(copy, monkeypatch):
    monkeypatch.setattr(metadata, "_phash", lambda: None)
    (copy / FILE).unlink()
    assert not load(copy)["hashed"].any()
    hashes = np.arange(256).reshape(16, 16) % 3 == 0
    monkeypatch.setattr(metadata, "_phash", lambda: lambda image, hash_size: Hash(hashes))
    rows = load(copy)
    assert rows["hashed"].all()
    assert np.array_equal(np.unpackbits(rows["hash"][5].view(np.uint8)), hashes.reshape(-1))
    monkeypatch.setattr(metadata, "_read_shards", None)  # the file has them now
    assert np.array_equal(load(copy), rows)


class Hash:
    def __init__(self, bits):
        self.hash = bits


def test_hash_equals_imagehashs():
    imagehash = pytest.importorskip("imagehash")
    for mode in ("RGB", "L"):
        image = smooth(3, (200, 150)).convert(mode)
        bits = np.unpackbits(perceptual_hash(image).view(np.uint8)).astype(bool)
        assert np.array_equal(bits, imagehash.phash(image, 16).hash.reshape(-1))


def test_resized_image_has_nearly_the_same_hash():
    pytest.importorskip("imagehash")
    image = Image.fromarray(np.random.RandomState(0).randint(0, 256, (40, 50, 3), np.uint8))
    image = image.resize((1000, 800), Image.Resampling.BICUBIC)
    hashes = [
        np.unpackbits(perceptual_hash(own).view(np.uint8))
        for own in (image, image.resize((500, 400), Image.Resampling.LANCZOS))
    ]
    assert (hashes[0] != hashes[1]).sum() <= 12
    flipped = perceptual_hash(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    assert (hashes[0] != np.unpackbits(flipped.view(np.uint8))).sum() > 80


def test_metadata_with_labels_of_no_class_is_recomputed(copy):
    before = load(copy)
    with np.load(copy / FILE) as arrays:
        changed = {name: arrays[name] for name in arrays.files}
    for label in (-1, 2, 2**30):
        changed["label"] = np.full(24, label, np.int32)
        np.savez_compressed(copy / FILE, **changed)
        np.testing.assert_array_equal(load(copy)["label"], before["label"])


def test_damaged_rows_of_the_journal():
    rows = [(0, 9, 9, 3, False, 40, 48, 7, False, 0)] * 3
    text = metadata.pack(rows)
    assert len(metadata.unpack(text, 3)) == 3
    bomb = base64.b64encode(zlib.compress(bytes(10**7))).decode()
    for damaged, images in ((text, 2), (text, 4), ("", 3), ("!", 3), (text[:-8], 3), (bomb, 3)):
        assert metadata.unpack(damaged, images) is None
