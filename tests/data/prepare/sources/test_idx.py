import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.prepare.sources import idx as idx_source
from imagenet_fast.data.prepare.sources import open_source
from imagenet_fast.data.prepare.sources.arrays import pad_images

FASHION = [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def idx(array, rank=None):
    rank = array.ndim if rank is None else rank
    return bytes((0, 0, 8, rank)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(directory, train, validation, zipped=False):
    random = np.random.RandomState(0)
    for prefix, labels in (("train", train), ("t10k", validation)):
        images = random.randint(0, 256, (len(labels), 7, 5), np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", np.array(labels, np.uint8))):
            data = idx(array)
            path = directory / f"{prefix}-{name}-ubyte"
            if zipped:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(data))
            else:
                path.write_bytes(data)


@pytest.mark.parametrize("zipped", [False, True])
def test_pixels_and_labels(tmp_path, zipped):
    write(tmp_path, [*FASHION, 1], [4, 2], zipped)
    source = open_source("idx", tmp_path)
    assert source.name == "fashion_mnist"
    assert source.splits == {"train": 11, "validation": 2}
    assert source.labels[9] == "Ankle boot"
    image, label, filename = source.read("train", 10)
    expected = np.random.RandomState(0).randint(0, 256, (11, 7, 5), np.uint8)[10]
    assert (image == expected).all() and image.dtype == np.uint8
    assert (label, filename) == (1, "train_00010")
    assert source.read("validation", 0).label == 4


def test_data_set_is_recognized_by_labels_or_name(tmp_path):
    write(tmp_path, [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], [0])
    assert open_source("idx", tmp_path).labels == tuple("0123456789")
    write(tmp_path, [1, 2, 3], [0])
    with pytest.raises(UserError, match="with --source=folders, or in Python give"):
        open_source("idx", tmp_path)
    assert open_source("idx", tmp_path, name="mnist").name == "mnist"
    with pytest.raises(UserError, match="did you mean 'fashion_mnist'"):
        open_source("idx", tmp_path, name="fashion-mnist")


def test_padding_with_zeros(tmp_path):
    write(tmp_path, FASHION, [4, 2])
    plain, padded = open_source("idx", tmp_path), open_source("idx", tmp_path, pad_to=10)
    for split, index in (("train", 3), ("validation", 1)):
        image = padded.read(split, index).image
        expected = np.zeros((10, 10), np.uint8)
        expected[1:8, 2:7] = plain.read(split, index).image  # of 7 x 5 pixels
        np.testing.assert_array_equal(image, expected)
        assert image.dtype == np.uint8
    assert padded.read("train", 3)[1:] == plain.read("train", 3)[1:]
    assert padded.describe()["fingerprint"] != plain.describe()["fingerprint"]


def test_no_padding(tmp_path):
    write(tmp_path, FASHION, [4, 2])
    assert (
        open_source("idx", tmp_path, pad_to=0).describe() == open_source("idx", tmp_path).describe()
    )
    assert open_source("idx", tmp_path, pad_to=7).read("train", 0).image.shape == (7, 7)


@pytest.mark.parametrize("size", [6, -32])
def test_padding_to_less_than_the_size(tmp_path, size):
    write(tmp_path, FASHION, [0])
    with pytest.raises(
        UserError, match=f"pad_to={size} is less than the images' 7 x 5 pixels: give 7"
    ):
        open_source("idx", tmp_path, pad_to=size)


def test_rgb_images_get_the_same_padding():
    images = np.random.RandomState(0).randint(1, 256, (2, 3, 4, 3), np.uint8)
    padded = pad_images(images, 5)
    assert padded.shape == (2, 5, 5, 3)
    np.testing.assert_array_equal(padded[:, 1:4, :4], images)
    assert padded.sum() == images.sum()


def test_labels_out_of_range(tmp_path):
    write(tmp_path, [*FASHION, 10], [0])
    with pytest.raises(UserError, match=r"train image 10 has the label 10, outside 0..9"):
        open_source("idx", tmp_path)


def test_more_images_than_labels(tmp_path):
    write(tmp_path, FASHION, [0, 1])
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.array([0], np.uint8)))
    with pytest.raises(UserError, match="validation has 2 images, but 1 label"):
        open_source("idx", tmp_path)


def test_a_missing_file(tmp_path):
    write(tmp_path, FASHION, [0])
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(UserError, match=r"t10k-images-idx3-ubyte: no such file, nor .*ubyte.gz"):
        open_source("idx", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "has 349 bytes of data, but 350 in its header"),
        (lambda data: data + b"x", "has at least 351 bytes of data, but 350 in its header"),
        (
            lambda data: b"\0\0\x0d\3" + data[4:],
            "not an idx file of unsigned bytes in 3 dimensions",
        ),
        (
            lambda data: b"\0\0\x08\1" + data[4:],
            "not an idx file of unsigned bytes in 3 dimensions",
        ),
        (lambda data: b"", "not an idx file"),
    ],
)
def test_files_with_wrong_content(tmp_path, change, message):
    write(tmp_path, FASHION, [0])
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=message):
        open_source("idx", tmp_path)


def test_truncated_gzip_file(tmp_path):
    write(tmp_path, FASHION, [0], zipped=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"ubyte.gz: cannot be read"):
        open_source("idx", tmp_path)


def header(*shape):
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(2**32 - 1, 28, 28), "has 4,294,967,295 items and 3,367,254,359,280 bytes in its"),
        (header(700, 1024, 1024), r"700 items and 734,003,200 bytes.* may have 262,144 items and"),
        (header(2**20, 1, 1), "has 1,048,576 items"),
        (header(0, 28, 28), r"is empty: its header has the shape \(0, 28, 28\)"),
        (header(5, 0, 0), r"is empty: its header has the shape \(5, 0, 0\)"),
        (header(10, 7, 5) + bytes(10**6), "has at least 351 bytes of data, but 350 in its header"),
        (header(10, 7, 5)[:7], "not an idx file of unsigned bytes in 3 dimensions"),
    ],
)
def test_sizes_in_the_header_are_checked_first(tmp_path, zipped, content, message):
    write(tmp_path, FASHION, [0], zipped)
    path = tmp_path / f"train-images-idx3-ubyte{'.gz' * zipped}"
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(UserError, match=f"{path.name}: .*{message}"):
        open_source("idx", tmp_path)


def test_no_more_is_unpacked_than_the_header_says(tmp_path, monkeypatch):
    write(tmp_path, FASHION, [0], zipped=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(header(10, 7, 5) + bytes(10**7)))
    read = []

    class Counting(gzip.GzipFile):
        def read(self, size=-1):
            read.append(size)
            return super().read(size)

    monkeypatch.setattr(idx_source.gzip, "open", Counting)
    with pytest.raises(UserError, match="has at least 351 bytes"):
        open_source("idx", tmp_path)
    assert read == [16, 351]


def test_pipes_do_not_block(tmp_path):
    write(tmp_path, FASHION, [0])
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    os.mkfifo(tmp_path / "train-labels-idx1-ubyte")
    with pytest.raises(UserError, match="train-labels-idx1-ubyte: is not a regular file"):
        open_source("idx", tmp_path)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_debians_fashion_mnist():
    source = open_source("idx")
    assert source.name == "fashion_mnist"
    assert source.splits == {"train": 60_000, "validation": 10_000}
    assert source.labels[source.read("train", 0).label] == "Ankle boot"
    assert source.read("validation", 9_999).image.shape == (28, 28)
