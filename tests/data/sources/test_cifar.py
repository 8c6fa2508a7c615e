import collections
import os
import pickle
import struct
import tarfile
from typing import ClassVar

import numpy as np
import pytest

from imagenet_fast.data.sources import open_source
from imagenet_fast.errors import UserError

TEN = ("airplane", "automobile", "bird")
HUNDRED = ("apple", "aquarium_fish", "baby", "bear")


class Python2Pickler(pickle._Pickler):
    """Pickles strings as Python 2 did, which wrote the published files."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, value):
        data = value.encode() if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string


def pickle2(path, value):
    with path.open("wb") as file:
        Python2Pickler(file, protocol=2).dump(value)


def batch(seed, size, classes):
    random = np.random.RandomState(seed)
    return random.randint(0, 256, (size, 3072), np.uint8), random.randint(0, classes, size)


def write_binary(directory, ten):
    names, train = (TEN, [f"data_batch_{i}" for i in range(1, 6)]) if ten else (HUNDRED, ["train"])
    for seed, name in enumerate([*train, "test_batch" if ten else "test"]):
        images, labels = batch(seed, 4, len(names))
        columns = [labels] if ten else [np.full(4, 19), labels]  # coarse labels come first
        rows = np.concatenate([np.stack(columns, 1).astype(np.uint8), images], 1)
        (directory / f"{name}.bin").write_bytes(rows.tobytes())
    file = "batches.meta.txt" if ten else "fine_label_names.txt"
    (directory / file).write_text("\n".join(names) + "\n\n")


def write_pickle(directory, ten):
    names, train = (TEN, [f"data_batch_{i}" for i in range(1, 6)]) if ten else (HUNDRED, ["train"])
    for seed, name in enumerate([*train, "test_batch" if ten else "test"]):
        images, labels = batch(seed, 4, len(names))
        keys = {"labels": labels.tolist()} if ten else {"fine_labels": labels.tolist()}
        pickle2(directory / name, {"data": images, **keys})
    file, key = ("batches.meta", "label_names") if ten else ("meta", "fine_label_names")
    pickle2(directory / file, {key: list(names)})


@pytest.fixture(params=["binary", "python"])
def write(request):
    return {"binary": write_binary, "python": write_pickle}[request.param]


def check(source, ten):
    classes = len(TEN if ten else HUNDRED)
    assert source.labels == (TEN if ten else HUNDRED)
    assert source.splits == {"train": 20 if ten else 4, "validation": 4}
    for split, index, seed, row in (("train", 0, 0, 0), ("validation", 3, 5 if ten else 1, 3)):
        images, labels = batch(seed, 4, classes)
        image, label, _ = source.read(split, index)
        assert label == labels[row]
        assert image.shape == (32, 32, 3)
        assert image[1, 2].tolist() == [images[row, c * 1024 + 32 + 2] for c in range(3)]


@pytest.mark.parametrize("ten", [True, False])
def test_a_directory_the_one_above_and_the_archive(tmp_path, write, ten):
    kind = "cifar10" if ten else "cifar100"
    folder = tmp_path / "cifar-batches"
    folder.mkdir()
    write(folder, ten)
    check(open_source(kind, folder), ten)
    check(open_source(kind, tmp_path), ten)
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as archive:
        archive.add(folder, "cifar-batches")
    check(open_source(kind, tmp_path / "archive.tar.gz"), ten)


def test_both_formats_give_the_same_images(tmp_path):
    for name, write in (("binary", write_binary), ("python", write_pickle)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, True)
    binary, python = (open_source("cifar10", tmp_path / name) for name in ("binary", "python"))
    assert binary.describe() == python.describe()


def test_a_missing_file_is_named(tmp_path, write):
    write(tmp_path, True)
    next(tmp_path.glob("data_batch_3*")).unlink()
    with pytest.raises(UserError, match="is not cifar10, or not all of it: no data_batch_3"):
        open_source("cifar10", tmp_path)


def test_the_other_set_is_not_this_one(tmp_path, write):
    write(tmp_path, False)
    with pytest.raises(UserError, match="is not cifar10"):
        open_source("cifar10", tmp_path)


def test_a_cut_binary_file(tmp_path):
    write_binary(tmp_path, True)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        UserError, match=r"data_batch_2.bin has 12291 bytes, not a multiple of 3073"
    ):
        open_source("cifar10", tmp_path)


def test_a_label_out_of_range(tmp_path):
    write_binary(tmp_path, True)
    path = tmp_path / "test_batch.bin"
    path.write_bytes(b"\x63" + path.read_bytes()[1:])
    with pytest.raises(UserError, match=r"validation image 0 has the label 99, outside 0..2"):
        open_source("cifar10", tmp_path)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("value", [Evil(), collections.Counter()])
def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    write_pickle(tmp_path, True)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(value))
    with pytest.raises(UserError, match=r"data_batch_1 cannot be unpickled: it asks for"):
        open_source("cifar10", tmp_path)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("data", [b"", b"rubbish", pickle.dumps([1]), pickle.dumps({b"data": 1})])
def test_pickles_that_are_no_batch(tmp_path, data):
    write_pickle(tmp_path, True)
    (tmp_path / "data_batch_1").write_bytes(data)
    with pytest.raises(UserError, match="data_batch_1"):
        open_source("cifar10", tmp_path)


def test_an_archive_that_is_none(tmp_path):
    (tmp_path / "cifar.tar.gz").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="cannot be read as a tar archive"):
        open_source("cifar10", tmp_path / "cifar.tar.gz")
