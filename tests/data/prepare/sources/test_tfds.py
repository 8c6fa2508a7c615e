import json
import os

import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.data import records
from imagenet_fast.data.prepare.sources import open_source
from imagenet_fast.data.prepare.sources import tfds as tfds_source


def example(**features):
    import tensorflow as tf

    kinds = {bytes: "bytes_list", int: "int64_list"}
    message = tf.train.Example()
    for name, value in features.items():
        getattr(message.features.feature[name], kinds[type(value)]).value.append(value)
    return message.SerializeToString()


def write(directory, splits, names=("cat", "dog"), features=("image", "label"), **info):
    """Writes what ``tfds build`` writes; ``splits`` holds each shard's examples."""
    directory.mkdir(parents=True, exist_ok=True)
    for split, shards in splits.items():
        for number, members in enumerate(shards):
            file = f"toy-{split}.tfrecord-{number:05d}-of-{len(shards):05d}"
            records.write_records(directory / file, members)
    described = [
        {"name": split, "shardLengths": [str(len(members)) for members in shards]}
        for split, shards in splits.items()
    ]
    info = {"name": "toy", "fileFormat": "tfrecord", "splits": described, **info}
    (directory / "dataset_info.json").write_text(json.dumps(info))
    label = {"classLabel": {"numClasses": "2"}}
    described = {feature: label if feature == "label" else {} for feature in features}
    (directory / "features.json").write_text(json.dumps({"featuresDict": {"features": described}}))
    if names:
        (directory / "label.labels.txt").write_text("\n".join(names) + "\n")


SPLITS = {
    "train": [
        [example(image=b"a", label=0), example(image=b"b", label=1)],
        [],
        [example(image=b"c", label=1, file_name=b"c.jpg")],
    ],
    "test": [[example(image=b"d", label=0)]],
}


def items(source, split):
    return [tuple(source.read(split, index)) for index in range(source.splits[split])]


def test_images_labels_and_names(tmp_path):
    write(tmp_path, SPLITS)
    source = open_source("tfds", tmp_path)
    assert source.name == "toy"
    assert source.labels == ("cat", "dog")
    assert items(source, "train") == [
        (b"a", 0, "toy-train.tfrecord-00000-of-00003[0]"),
        (b"b", 1, "toy-train.tfrecord-00000-of-00003[1]"),
        (b"c", 1, "c.jpg"),
    ]
    assert items(source, "validation") == [(b"d", 0, "toy-test.tfrecord-00000-of-00001[0]")]


def test_validation_is_preferred_to_test_and_the_newest_version_to_others(tmp_path):
    for version, name in (("2.0.0", b"old"), ("10.0.0", b"new")):
        splits = {**SPLITS, "validation": [[example(image=name, label=1)]]}
        write(tmp_path / version, splits)
    assert items(open_source("tfds", tmp_path), "validation")[0][0] == b"new"
    assert items(open_source("tfds", tmp_path / "2.0.0"), "validation")[0][0] == b"old"


def test_a_test_split_beside_validation(tmp_path):
    validation = [[example(image=b"v", label=1)]]
    write(tmp_path, {**SPLITS, "validation": validation})
    source = open_source("tfds", tmp_path)
    assert items(source, "test") == [(b"d", 0, "toy-test.tfrecord-00000-of-00001[0]")]
    assert items(source, "validation")[0][:2] == (b"v", 1)


def test_a_test_split_without_labels(tmp_path):
    secret = {"validation": SPLITS["test"], "test": [[example(image=b"s", label=-1)]]}
    write(tmp_path, {**SPLITS, **secret})
    source = open_source("tfds", tmp_path)
    assert source.splits.keys() == {"train", "validation"}
    assert source.warnings == ("the split 'test' is ignored: it has no labels",)


def test_classes_without_names(tmp_path):
    write(tmp_path, SPLITS, names=None)
    assert open_source("tfds", tmp_path).labels == ("0", "1")


def test_other_directories(tmp_path):
    with pytest.raises(UserError, match=r"it has no dataset_info.json"):
        open_source("tfds", tmp_path)
    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(UserError, match=r"dataset_info.json: is not as TensorFlow Datasets writes"):
        open_source("tfds", tmp_path)


def test_other_file_formats(tmp_path):
    write(tmp_path, SPLITS, fileFormat="array_record")
    with pytest.raises(UserError, match="files are array_record"):
        open_source("tfds", tmp_path)


def test_missing_splits_and_features(tmp_path):
    write(tmp_path, {"train": SPLITS["train"]})
    with pytest.raises(
        UserError,
        match="needs the splits train, and validation or test; has train; --source=folders",
    ):
        open_source("tfds", tmp_path)
    write(tmp_path, SPLITS, features=("image", "objects"))
    with pytest.raises(UserError, match="no feature 'label'; it has image, objects"):
        open_source("tfds", tmp_path)


def test_missing_files_and_records(tmp_path):
    write(tmp_path, SPLITS)
    shard = tmp_path / "toy-train.tfrecord-00000-of-00003"
    records.write_records(shard, [example(image=b"a", label=0)])
    with pytest.raises(UserError, match=r"00000-of-00003: has 1 record, but 2 in"):
        open_source("tfds", tmp_path)
    shard.unlink()
    with pytest.raises(UserError, match=r"no file .*-train.tfrecord-00000-of-00003"):
        open_source("tfds", tmp_path)


def test_corrupt_records_and_examples(tmp_path):
    write(tmp_path, {**SPLITS, "test": [[b"\xff\xff", example(image=b"d"), example(label=1)]]})
    source = open_source("tfds", tmp_path)
    for index in range(3):
        with pytest.raises(UserError, match=f"record {index} is not an example with an image"):
            source.read("validation", index)
    shard = tmp_path / "toy-train.tfrecord-00002-of-00003"
    content = bytearray(shard.read_bytes())
    content[20] ^= 1
    shard.write_bytes(content)
    with pytest.raises(records.CorruptRecordError, match="00002-of-00003: record 0"):
        source.read("train", 2)


@pytest.mark.parametrize(
    "info",
    [
        "[]",
        '{"splits": [{"name": "train"}, {"name": "test"}]}',
        '{"splits": [{"name": "train", "shardLengths": ["x"]}, {"name": "test"}]}',
        "3",
    ],
)
def test_invalid_descriptions(tmp_path, info):
    write(tmp_path, SPLITS)
    (tmp_path / "dataset_info.json").write_text(info)
    with pytest.raises(UserError, match=r"dataset_info.json: is not as TensorFlow Datasets writes"):
        open_source("tfds", tmp_path)


@pytest.mark.parametrize(
    ("image", "told"),
    [
        ({"image": {"dtype": "float32", "encodingFormat": "png"}}, "is float32"),
        ({"tensor": {"dtype": "uint8"}}, "is a tensor"),
    ],
)
def test_features_that_are_not_images(tmp_path, image, told):
    """TensorFlow Datasets keep floats as the bytes of RGBA PNGs."""
    write(tmp_path, SPLITS)
    features = {"image": image, "label": {"classLabel": {"numClasses": "2"}}}
    (tmp_path / "features.json").write_text(json.dumps({"featuresDict": {"features": features}}))
    with pytest.raises(UserError, match=rf"features.json: its feature 'image' {told}"):
        open_source("tfds", tmp_path)


def features_of(label, image=None):
    return {"featuresDict": {"features": {"image": image or {}, "label": label}}}


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (features_of({"classLabel": {"numClasses": "2000000000"}}), "2,000,000,000 classes, not 1"),
        (features_of({"classLabel": {"numClasses": 1_000_001}}), "1,000,001 classes, not 1"),
        (features_of({"classLabel": {"numClasses": "0"}}), "'label' is not a class label"),
        (features_of({}), "'label' is not a class label"),
        (features_of({"classLabel": {"numClasses": "many"}}), "not as TensorFlow Datasets writes"),
        (features_of({"classLabel": {"numClasses": "9" * 99}}), "not as TensorFlow Datasets write"),
        (features_of({"classLabel": {"numClasses": -1}}), "not as TensorFlow Datasets writes it"),
        (features_of({"classLabel": [1]}), "not as TensorFlow Datasets writes it"),
        (features_of(5), "not as TensorFlow Datasets writes it"),
        (features_of({}, {"image": {"dtype": 3}}), "not as TensorFlow Datasets writes it"),
        ([], "not as TensorFlow Datasets writes it"),
        ({"featuresDict": None}, "not as TensorFlow Datasets writes it"),
        ({}, "no feature 'image'"),
    ],
)
def test_features_of_other_types_and_sizes(tmp_path, features, message):
    write(tmp_path, SPLITS, names=None)
    (tmp_path / "features.json").write_text(json.dumps(features))
    with pytest.raises(UserError, match=message):
        open_source("tfds", tmp_path)


def test_descriptions_that_are_too_large_or_nested_deeply(tmp_path, monkeypatch):
    write(tmp_path, SPLITS)
    for file in ("features.json", "dataset_info.json"):
        (tmp_path / file).write_text("[" * 200_000)
        with pytest.raises(UserError, match=f"{file}: is not as .*: is nested too deeply"):
            open_source("tfds", tmp_path)
    write(tmp_path, SPLITS)
    monkeypatch.setattr(tfds_source, "_MAX_LABELS", 7)
    with pytest.raises(UserError, match=r"label.labels.txt: cannot be read: has 8 bytes, but may"):
        open_source("tfds", tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        example(image=b"d", label=b"x"),
        example(image=3, label=1),
        example(label=1),
        example(image=b"d"),
    ],
    ids=["text and bytes", "two numbers", "no image", "no label"],  # bytes differ between processes
)
def test_examples_of_other_types(tmp_path, record):
    write(tmp_path, {**SPLITS, "test": [[record]]})
    source = open_source("tfds", tmp_path)
    with pytest.raises(UserError, match="record 0 is not an example with an image and a label"):
        source.read("validation", 0)


@pytest.mark.parametrize(("name", "shown"), [(7, "toy-test.tfrecord"), (b"\xff.jpg", "\ufffd.jpg")])
def test_odd_names_of_images(tmp_path, name, shown):
    write(tmp_path, {**SPLITS, "test": [[example(image=b"d", label=1, file_name=name)]]})
    assert open_source("tfds", tmp_path).read("validation", 0).filename.startswith(shown)


def test_half_a_character_in_the_name_of_the_data_set(tmp_path):
    write(tmp_path, SPLITS, name="a\ud800")
    assert open_source("tfds", tmp_path).name == "a?"


def test_pipes_do_not_block(tmp_path):
    write(tmp_path, SPLITS)
    for file in ("toy-train.tfrecord-00001-of-00003", "dataset_info.json"):
        (tmp_path / file).unlink()
        os.mkfifo(tmp_path / file)
        with pytest.raises(UserError, match=r"no file|has no dataset_info"):
            open_source("tfds", tmp_path)


def test_class_names_that_are_not_utf_8(tmp_path):
    write(tmp_path, SPLITS)
    (tmp_path / "label.labels.txt").write_bytes(b"cat\n\xff\n")
    assert open_source("tfds", tmp_path).labels == ("cat", "\ufffd")


def test_a_split_without_files(tmp_path):
    write(tmp_path, {**SPLITS, "train": []})
    with pytest.raises(UserError, match=r"dataset_info.json: its split 'train' has no files"):
        open_source("tfds", tmp_path)


# --- By name


@pytest.fixture
def tfds():
    return pytest.importorskip("tensorflow_datasets", reason="needs TensorFlow Datasets")


@pytest.fixture
def tiny(tfds):
    """A data set that TensorFlow Datasets know, of 10 and 4 images, and its pixels."""
    import numpy as np

    class TinyInsects(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "image": tfds.features.Image(shape=(4, 5, 3), encoding_format="png"),
                "label": tfds.features.ClassLabel(names=["ant", "bee"]),
            }
            return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {
                "train": self._generate_examples(0, 10),
                "test": self._generate_examples(10, 14),
            }

        def _generate_examples(self, first, end):
            for number in range(first, end):
                pixels = np.full((4, 5, 3), number, np.uint8)
                yield number, {"image": pixels, "label": number % 2}

    yield "tiny_insects"
    tfds.core.registered._DATASET_REGISTRY.pop("tiny_insects")


def test_a_data_set_by_its_name(tmp_path, tiny):
    import tensorflow as tf

    source = open_source("tfds", tmp_path, tfds_name=tiny)
    assert (source.name, source.labels) == ("tiny_insects", ("ant", "bee"))
    assert source.splits == {"train": 10, "validation": 4}
    assert source.warnings == ("there is no split 'validation': 'test' is used as validation",)
    for split, first in (("train", 0), ("validation", 10)):
        numbers = []
        for content, label, _ in items(source, split):
            pixels = tf.image.decode_png(content).numpy()
            assert pixels.shape == (4, 5, 3) and pixels.min() == pixels.max()
            assert pixels[0, 0, 0] % 2 == label
            numbers.append(int(pixels[0, 0, 0]))
        assert sorted(numbers) == list(range(first, first + source.splits[split]))
    # Read without TensorFlow Datasets, it is the same.
    assert open_source("tfds", tmp_path / tiny).describe() == source.describe()
    assert open_source("tfds", tmp_path, tfds_name=f"{tiny}:1.0.0").describe() == source.describe()


def test_names_that_cannot_be_used(tmp_path, tiny, tfds):
    with pytest.raises(UserError, match=r"has no 'cifar11'; did you mean 'cifar10"):
        open_source("tfds", tmp_path, tfds_name="cifar11")
    with pytest.raises(UserError, match=r"tfds_name='tiny_insects:9\.0\.0' cannot be used"):
        open_source("tfds", tmp_path, tfds_name=f"{tiny}:9.0.0")
    with pytest.raises(UserError, match="has no feature 'image'; it has "):
        open_source("tfds", tmp_path, tfds_name="ag_news_subset")


def test_a_data_set_that_cannot_be_prepared(tmp_path, tiny, tfds, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no network\nmore")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", fail)
    with pytest.raises(UserError, match=r"cannot prepare tiny_insects: no network$"):
        open_source("tfds", tmp_path, tfds_name=tiny)


def test_neither_a_path_nor_a_name():
    with pytest.raises(UserError, match="needs source_path or tfds_name"):
        open_source("tfds")
