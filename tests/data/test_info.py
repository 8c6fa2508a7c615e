import pathlib

import pytest
import tensorflow as tf

from imagenet_fast import Config
from imagenet_fast.base.errors import UserError
from imagenet_fast.data import info
from imagenet_fast.data import manifest as manifests
from imagenet_fast.data.info import read_info

CONVERTERS_FIELDS = {
    # What imagenet_to_gcs.py of tensorflow/tpu writes.
    "image/height": [12],
    "image/width": [10],
    "image/colorspace": [b"RGB"],
    "image/channels": [3],
    "image/class/synset": [b"n01440764"],
    "image/format": [b"JPEG"],
    "image/filename": [b"n01440764_10026.JPEG"],
    "image/encoded": [b"\xff\xd8\xff"],
}


def foreign_example(*labels, label_field="image/class/label"):
    example = tf.train.Example()
    for name, values in {**CONVERTERS_FIELDS, label_field: list(labels)}.items():
        feature = example.features.feature[name]
        if isinstance(values[0], bytes):
            feature.bytes_list.value.extend(values)
        else:
            feature.int64_list.value.extend(values)
    return example.SerializeToString()


@pytest.fixture
def with_manifest(tmp_path, write_data, numbered_example):
    """12 training images in shards of 5, 4 and 3, 2 validation images; 12 classes."""
    examples = [numbered_example(number) for number in range(12)]
    return write_data(
        tmp_path / "data",
        labels=12,
        train=[examples[:5], examples[5:9], examples[9:]],
        validation=[examples[:2]],
    )


@pytest.fixture
def without_manifest(tmp_path, write_data):
    """Shards as other converters write them: nine images, three of each of the labels 1, 2, 3."""
    examples = [foreign_example(1 + number % 3) for number in range(9)]
    return write_data(
        tmp_path / "foreign", train=[examples[:4], examples[4:]], validation=[examples[:3]]
    )


def config(data_dir, **changes):
    return Config(data_dir=str(data_dir), **{"batch_size": 4, **changes})


def problem(data_dir, **changes):
    with pytest.raises(UserError) as caught:
        read_info(config(data_dir, **changes))
    return str(caught.value)


# --- With a manifest ------------------------------------------------------------------------------


def test_info_is_that_of_the_manifest(with_manifest):
    info = read_info(config(with_manifest))
    train = info.splits["train"]
    directory = pathlib.Path(with_manifest)
    assert info.name == "numbers"
    assert info.num_classes == 12 and info.labels[3] == "class 3"
    assert info.label_offset == 0
    assert train.counts == (5, 4, 3) and train.examples == 12
    assert train.paths == tuple(str(directory / f"train-0000{n}-of-00003") for n in range(3))
    assert train.bytes == sum(path.stat().st_size for path in directory.glob("train-*"))
    assert info.splits["validation"].counts == (2,)


def test_digits_are_described_as_prepared(digits):
    info = read_info(Config(data_dir=digits))
    assert info.num_classes == 10
    assert (info.splits["train"].examples, info.splits["validation"].examples) == (1438, 359)


def test_manifests_label_offset_counts(tmp_path, write_data):
    data = write_data(tmp_path / "data", 3, -1, train=[[foreign_example(3)] * 4])
    assert read_info(config(data)).label_offset == -1
    assert "label_offset" in problem(data, label_offset=-1)


@pytest.mark.parametrize("num_classes", [0, 12])
def test_number_of_classes_may_be_given(with_manifest, num_classes):
    assert read_info(config(with_manifest, num_classes=num_classes)).num_classes == 12


def test_other_number_of_classes(with_manifest):
    message = problem(with_manifest, num_classes=10)
    assert "10" in message and "12" in message and manifests.FILE in message


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "too long"),
    ],
)
def test_damaged_shard_is_named_at_once(with_manifest, split, damage, words):
    path = sorted(pathlib.Path(with_manifest).glob(f"{split}-*"))[-1]
    damage(path)
    message = problem(with_manifest)
    assert str(path) in message and words in message


def test_manifest_without_training_shards(tmp_path, write_data, numbered_example):
    data = write_data(tmp_path / "data", 2, validation=[[numbered_example(0)]])
    assert "no training images" in problem(data)


# --- Without a manifest ---------------------------------------------------------------------------


def test_shards_of_other_converters(without_manifest):
    info = read_info(config(without_manifest, num_classes=3, label_offset=-1))
    directory = pathlib.Path(without_manifest)
    train = info.splits["train"]
    assert train.paths == tuple(str(directory / f"train-0000{n}-of-00002") for n in range(2))
    assert train.counts == (4, 5) and train.examples == 9
    assert train.bytes == sum(path.stat().st_size for path in directory.glob("train-*"))
    assert info.splits["validation"].examples == 3
    assert info.labels == ("0", "1", "2") and info.label_offset == -1


def test_shards_of_other_converters_with_several_labels(tmp_path, write_data):
    examples = [foreign_example(1), foreign_example(3, 2), foreign_example(2)]
    directory = write_data(tmp_path / "several", train=[examples])
    assert read_info(config(directory, num_classes=3, label_offset=-1)).multi_label
    assert read_info(config(directory, num_classes=3, label_offset=-1)).label_shape == (3,)
    assert "has label 3" in problem(directory, num_classes=2, label_offset=-1)


def test_unchanged_records_are_counted_once(without_manifest, write_data, monkeypatch):
    counted = []
    count = info.index_shard
    monkeypatch.setattr(info, "index_shard", lambda path: counted.append(path) or count(path))
    for batch_size in (4, 2):
        asked = config(without_manifest, num_classes=3, label_offset=-1, batch_size=batch_size)
        assert read_info(asked).splits["train"].counts == (4, 5)
    assert len(counted) == 3
    examples = [foreign_example(1)] * 3
    write_data(pathlib.Path(without_manifest), train=[examples, examples])
    assert read_info(asked).splits["train"].counts == (3, 3)
    assert "label 1" in problem(without_manifest, num_classes=3, label_offset=7)


def test_other_files_do_not_matter(without_manifest):
    directory = pathlib.Path(without_manifest)
    (directory / "train-00000-of-00002.crc").write_bytes(b"x")
    (directory / "labels.txt").write_text("x")
    info = read_info(config(directory, num_classes=3, label_offset=-1))
    assert info.splits["train"].counts == (4, 5)


def test_number_of_classes_is_required_without_a_manifest(without_manifest):
    assert "--num_classes" in problem(without_manifest)


def test_labels_from_one_need_an_offset(without_manifest):
    message = problem(without_manifest, num_classes=3)
    assert "label 3" in message and "--label_offset=-1" in message
    assert "train-00000-of-00002, record 2" in message


def test_labels_from_zero_must_not_be_given_the_offset(tmp_path, write_data):
    data = write_data(tmp_path / "data", train=[[foreign_example(label) for label in (1, 0, 1, 0)]])
    assert "record 1" in problem(data, num_classes=2, label_offset=-1)
    assert read_info(config(data, num_classes=2)).num_classes == 2


@pytest.mark.parametrize("shard", [0, 2, 4])
def test_labels_of_first_middle_and_last_shard_are_checked(tmp_path, write_data, shard):
    shards = [[foreign_example(0)] * 2 for _ in range(5)]
    shards[shard][1] = foreign_example(7)
    data = write_data(tmp_path / "data", train=shards)
    assert f"train-0000{shard}-of-00005, record 1 has label 7" in problem(data, num_classes=7)
    assert read_info(config(data, num_classes=8)).splits["train"].examples == 10


def test_labels_of_validation_are_checked(tmp_path, write_data):
    good, bad = [foreign_example(0)] * 4, [foreign_example(-1)]
    data = write_data(tmp_path / "data", train=[good], validation=[bad])
    assert "validation-00000-of-00001, record 0 has label -1" in problem(data, num_classes=1)


@pytest.mark.parametrize(
    "record",
    [b"no example at all", b"", foreign_example(1, label_field="label"), foreign_example(b"cat")],
    ids=["not an Example", "empty", "another field", "text"],
)
def test_records_without_a_label(tmp_path, write_data, record):
    data = write_data(tmp_path / "data", train=[[foreign_example(0), record]])
    assert "train-00000-of-00001, record 1" in problem(data, num_classes=2, batch_size=1)


def test_empty_shard_is_named(without_manifest):
    path = pathlib.Path(without_manifest) / "train-00001-of-00002"
    path.write_bytes(b"")
    message = problem(without_manifest, num_classes=3, label_offset=-1)
    assert str(path) in message and "empty" in message


def test_truncated_shard_is_named(without_manifest):
    path = pathlib.Path(without_manifest) / "train-00001-of-00002"
    path.write_bytes(path.read_bytes()[:-1])
    message = problem(without_manifest, num_classes=3, label_offset=-1)
    assert str(path) in message and "record 4" in message


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_missing_shard_is_named(tmp_path, write_data, shard):
    data = write_data(tmp_path / "data", train=[[foreign_example(0)] * 4 for _ in range(3)])
    path = pathlib.Path(data) / f"train-0000{shard}-of-00003"
    path.unlink()
    message = problem(data, num_classes=1)
    assert str(path) in message and "missing" in message


def test_shards_of_two_sets(tmp_path, write_data):
    write_data(tmp_path / "data", train=[[foreign_example(0)] * 4])
    data = write_data(tmp_path / "data", train=[[foreign_example(0)] * 4 for _ in range(2)])
    assert "train-00000-of-00002" in problem(data, num_classes=1)


def test_corrupt_record_is_left_to_the_training_loop(without_manifest):
    # It is skipped and counted there, as under a manifest.
    path = pathlib.Path(without_manifest) / "train-00000-of-00002"
    content = bytearray(path.read_bytes())
    content[20] ^= 1  # in the data of the first record
    path.write_bytes(content)
    info = read_info(config(without_manifest, num_classes=3, label_offset=-1))
    assert info.splits["train"].counts == (4, 5)


# --- No data, little data, made-up data -----------------------------------------------------------


def test_data_dir_is_required():
    with pytest.raises(UserError, match=r"--data_dir.*--synthetic"):
        read_info(Config())


def test_no_such_directory(tmp_path):
    assert str(tmp_path / "absent") in problem(tmp_path / "absent")


def test_data_dir_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "not a directory" in problem(tmp_path / "file")


def test_directory_without_shards(tmp_path):
    message = problem(tmp_path, num_classes=3)
    assert manifests.FILE in message and "prepare" in message


def test_directory_of_an_interrupted_prepare(tmp_path):
    (tmp_path / "prepare.journal").touch()
    message = problem(tmp_path)
    assert message == (
        f"{tmp_path} is not finished: rerun the `imagenet-fast prepare` command that makes it"
    )


def test_synthetic_data_is_as_large_as_imagenet():
    info = read_info(Config(synthetic=True, num_classes=7, data_dir="/no/such/directory"))
    assert info.num_classes == 7
    assert list(info.splits) == ["train"]
    assert info.splits["train"].examples == 1_281_167
