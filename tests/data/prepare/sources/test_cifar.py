import collections
import contextlib
import os
import pickle
import shutil
import struct
import tarfile
from typing import ClassVar

import numpy as np
import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.prepare.sources import cifar, open_source

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
def test_directory_its_parent_and_archive(tmp_path, write, ten):
    kind = "cifar10" if ten else "cifar100"
    folder = tmp_path / "cifar-batches"
    folder.mkdir()
    write(folder, ten)
    check(open_source(kind, folder), ten)
    check(open_source(kind, tmp_path), ten)
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as archive:
        archive.add(folder, "cifar-batches")
    check(open_source(kind, tmp_path / "archive.tar.gz"), ten)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home directory without anything in it, and no other cache of Keras."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KERAS_HOME", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "left",
    ["{0}", "{0}-target/{0}", "{0}/{0}", "{0}.tar.gz", "{0}-target_archive", "{0}_archive"],
)
@pytest.mark.parametrize(
    ("kind", "name"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")]
)
def test_keras_cache_is_found(home, left, kind, name):
    ten = kind == "cifar10"
    path = home / ".keras" / "datasets" / left.format(name)
    path.parent.mkdir(parents=True)
    folder = home / "elsewhere" if path.name != name else path
    folder.mkdir()
    write_pickle(folder, ten)
    if path != folder:
        with tarfile.open(path, "w:gz") as archive:
            archive.add(folder, name)
    check(open_source(kind), ten)
    other = "cifar100" if ten else "cifar10"
    with pytest.raises(UserError, match=f"{other}: not in Keras' cache, {home}/.keras/datasets"):
        open_source(other)


def test_keras_home_has_priority(home, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(home / "cache"))
    own, usual = (home / name / "datasets/cifar-100-python" for name in ("cache", ".keras"))
    usual.mkdir(parents=True)
    write_pickle(usual, ten=False)
    check(open_source("cifar100"), ten=False)  # where Keras leaves it by default
    own.mkdir(parents=True)
    with pytest.raises(UserError, match=f"{own}: is not a complete cifar100"):
        open_source("cifar100")


def test_empty_keras_cache(home, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", "~/cache")
    with pytest.raises(UserError) as caught:
        open_source("cifar10")
    assert str(caught.value) == (
        f"cifar10: not in Keras' cache, {home}/cache/datasets or {home}/.keras/datasets; give "
        "--source_path, or download it with "
        '`python -c "import keras; keras.datasets.cifar10.load_data()"`'
    )


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_cache_of_the_installed_keras(home, monkeypatch, kind):
    data_utils = pytest.importorskip("keras.src.utils.file_utils")
    datasets = pytest.importorskip("keras.datasets")

    def download(url, path, progress):
        (home / "made").mkdir()
        write_pickle(home / "made", kind == "cifar10")
        with tarfile.open(path, "w:gz") as archive:
            name = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[kind]
            archive.add(home / "made", name)

    monkeypatch.setattr(data_utils, "urlretrieve", download)
    monkeypatch.setattr(data_utils, "validate_file", lambda *args, **kwargs: True)
    # It reads HOME once, when it is imported.
    monkeypatch.setattr(data_utils.config, "keras_home", lambda: str(home / ".keras"))
    (home / ".keras").mkdir()
    with contextlib.suppress(ValueError):  # of the number of images
        getattr(datasets, kind).load_data()
    check(open_source(kind), kind == "cifar10")
    (folder,) = (path for path in (home / ".keras/datasets").iterdir() if path.is_dir())
    shutil.rmtree(folder)  # the archive beside it is left
    check(open_source(kind), kind == "cifar10")


def test_both_formats_give_the_same_images(tmp_path):
    for name, write in (("binary", write_binary), ("python", write_pickle)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, True)
    binary, python = (open_source("cifar10", tmp_path / name) for name in ("binary", "python"))
    assert binary.describe() == python.describe()


def test_a_missing_file_is_named(tmp_path, write):
    write(tmp_path, True)
    next(tmp_path.glob("data_batch_3*")).unlink()
    with pytest.raises(UserError, match="is not a complete cifar10: it lacks data_batch_3"):
        open_source("cifar10", tmp_path)


def test_other_data_set_is_refused(tmp_path, write):
    write(tmp_path, False)
    with pytest.raises(UserError, match="is not a complete cifar10"):
        open_source("cifar10", tmp_path)


def test_truncated_binary_file(tmp_path):
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
def test_pickle_that_runs_code_is_refused(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    write_pickle(tmp_path, True)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(value))
    with pytest.raises(UserError, match=r"data_batch_1 cannot be unpickled: it refers to"):
        open_source("cifar10", tmp_path)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("data", [b"", b"rubbish", pickle.dumps([1]), pickle.dumps({b"data": 1})])
def test_pickles_that_are_not_batches(tmp_path, data):
    write_pickle(tmp_path, True)
    (tmp_path / "data_batch_1").write_bytes(data)
    with pytest.raises(UserError, match="data_batch_1"):
        open_source("cifar10", tmp_path)


def test_file_that_is_not_an_archive(tmp_path):
    (tmp_path / "cifar.tar.gz").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="cannot be read as a tar archive"):
        open_source("cifar10", tmp_path / "cifar.tar.gz")


def test_class_names_that_are_not_utf_8(tmp_path):
    write_binary(tmp_path, ten=True)
    path = tmp_path / "batches.meta.txt"
    path.write_bytes(path.read_bytes().replace(b"bird", b"oisea\xe9"))
    assert "oisea\ufffd" in open_source("cifar10", tmp_path).labels


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_files_pickled_again_by_python_3(tmp_path, protocol):
    write_pickle(tmp_path, ten=True)
    expected = open_source("cifar10", tmp_path).describe()
    for path in tmp_path.iterdir():
        values = pickle.loads(path.read_bytes(), encoding="bytes")
        path.write_bytes(pickle.dumps(values, protocol))
    source = open_source("cifar10", tmp_path)
    check(source, ten=True)
    assert source.describe() == expected


def test_pickled_labels_as_an_array_and_images_in_wider_numbers(tmp_path):
    write_pickle(tmp_path, ten=True)
    expected = open_source("cifar10", tmp_path).describe()
    images, labels = batch(0, 4, len(TEN))
    values = {"data": images.astype(np.int16).reshape(4, 3, 32, 32), "labels": labels}
    pickle2(tmp_path / "data_batch_1", values)
    assert open_source("cifar10", tmp_path).describe() == expected


IMAGES, LABELS = batch(0, 4, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"labels": ["cat"] * 4}, "is not a batch of images: .*integers in 0..999"),
        ({"labels": [0.5] * 4}, "cannot be unpickled: it has the opcode BINFLOAT"),
        ({"labels": [[1]] * 4}, "is not a batch of images"),
        ({"labels": [None] * 4}, "is not a batch of images"),
        ({"labels": [True] * 4}, "is not a batch of images"),
        ({"labels": [10**30] * 4}, "is not a batch of images"),
        ({"labels": [-1] * 4}, "is not a batch of images"),
        ({"labels": None}, "is not a batch of images"),
        ({"labels": [[1, 2], [3]]}, "is not a batch of images"),
        ({"labels": LABELS.reshape(2, 2)}, r"has 4 images, but labels of shape \(2, 2\)"),
        ({"labels": [0] * 3}, r"has 4 images, but labels of shape \(3,\)"),
        ({"data": IMAGES.astype(np.int16) + 1000}, r"integers in 0..255"),
        ({"data": IMAGES.astype(np.int16) - 1000}, r"integers in 0..255"),
        ({"data": IMAGES[:, 1:]}, "is not a batch of images"),
        ({"data": None}, "is not a batch of images"),
        ({"data": b"x"}, "is not a batch of images"),
        ({"data": IMAGES.astype(object)}, "the dtype 'O8', not of integers|the dtype 'O'"),
    ],
)
def test_pickled_values_of_other_types(tmp_path, values, message):
    write_pickle(tmp_path, ten=True)
    pickle2(tmp_path / "data_batch_1", {"data": IMAGES, "labels": LABELS.tolist(), **values})
    with pytest.raises(UserError, match=f"data_batch_1 {message}|data_batch_1 .*{message}"):
        open_source("cifar10", tmp_path)


@pytest.mark.parametrize("names", [None, 3, "text", [], [1, 2, 3], {"a": 1}])
def test_pickled_class_names_of_other_types(tmp_path, names):
    write_pickle(tmp_path, ten=True)
    pickle2(tmp_path / "batches.meta", {"label_names": names})
    with pytest.raises(UserError, match=r"batches.meta has no label_names that are a list of text"):
        open_source("cifar10", tmp_path)


def test_half_a_character_in_a_class_name(tmp_path):
    write_pickle(tmp_path, ten=True)
    names = {"label_names": ["a", "\ud83d", "c"]}
    (tmp_path / "batches.meta").write_bytes(pickle.dumps(names))
    assert open_source("cifar10", tmp_path).labels == ("a", "?", "c")


def archive_with(tmp_path, change):
    """An archive of the pickled version, in which ``change`` replaces what describes a batch."""
    folder = tmp_path / "files"
    folder.mkdir()
    write_pickle(folder, ten=True)
    with tarfile.open(tmp_path / "cifar.tar.gz", "w:gz") as archive:
        for path in folder.iterdir():
            info = archive.gettarinfo(path, f"cifar/{path.name}")
            if path.name == "data_batch_1":
                archive.addfile(change(info))
            else:
                with path.open("rb") as file:
                    archive.addfile(info, file)
    return tmp_path / "cifar.tar.gz"


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_pipes_in_an_archive(tmp_path, kind):
    def change(info):
        info.type, info.linkname, info.size = kind, "cifar/nowhere", 0
        return info

    with pytest.raises(UserError, match=r"is not a complete cifar10: it lacks data_batch_1$"):
        open_source("cifar10", archive_with(tmp_path, change))


def test_sizes_in_an_archive_are_checked_first(tmp_path):
    def change(info):
        info.size = 2**29
        return info

    path = archive_with(tmp_path, change)
    with pytest.raises(
        UserError, match=r"archive: 'cifar/data_batch_1' has 536,870,912 bytes, but may have 167,"
    ):
        open_source("cifar10", path)


@pytest.mark.parametrize("limit", ["_MAX_BATCH", "_MAX_FILES", "_MAX_NAMES"])
def test_files_in_a_folder_may_have_so_many_bytes(tmp_path, monkeypatch, write, limit):
    write(tmp_path, ten=True)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    names = next(size for name, size in sizes.items() if name.startswith("batches.meta"))
    most = {"_MAX_BATCH": max(sizes.values()), "_MAX_FILES": sum(sizes.values())}
    monkeypatch.setattr(cifar, limit, most.get(limit, names))
    check(open_source("cifar10", tmp_path), ten=True)
    monkeypatch.setattr(cifar, limit, most.get(limit, names) - 1)
    with pytest.raises(UserError, match=r"cannot be read: has [\d,]+ bytes, but may have"):
        open_source("cifar10", tmp_path)


def test_a_pipe_in_place_of_an_archive_or_file(tmp_path):
    os.mkfifo(tmp_path / "cifar.tar.gz")
    with pytest.raises(UserError, match="cannot be read as a tar archive: it is not a regular"):
        open_source("cifar10", tmp_path / "cifar.tar.gz")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_pickle(folder, ten=True)
    (folder / "data_batch_2").unlink()
    os.mkfifo(folder / "data_batch_2")
    with pytest.raises(UserError, match="it lacks data_batch_2"):
        open_source("cifar10", folder)
