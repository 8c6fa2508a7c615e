"""Images of given classes in given shares, in an order that resumes."""

import functools
import json
import pathlib
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf
from small_network import small_network

from imagenet_fast import Config, UserError, build_model, make_dataset
from imagenet_fast.data import metadata, records
from imagenet_fast.data.examples import LABEL, decode_example
from imagenet_fast.data.info import SplitInfo, read_info
from imagenet_fast.data.manifest import read_manifest, verify
from imagenet_fast.data.order import shares_of, training_order
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources.arrays import ArraySource
from imagenet_fast.data.sampling import Sampling, class_shares, make_sampling

# Images of three classes, 1, 9 and 50, in mixed order.
CLASSES = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [1, 9, 50])).astype(np.int32)
EQUAL = np.full(3, 1 / 3)


def copies(sampling, epoch, total):
    return sampling.copies(tf.constant(epoch, tf.int64), total).numpy()


@pytest.mark.parametrize("total", [60, 61, 32])
@pytest.mark.parametrize("shares", [[1, 1, 1], [1, 2, 1], [0, 3, 1]])
def test_classes_have_their_shares_and_images_of_a_class_too(shares, total):
    shares = np.array(shares) / np.sum(shares)
    sampling = Sampling(CLASSES, shares, seed=3)
    draw = tf.function(functools.partial(sampling.copies, total=total))
    drawn = np.stack([draw(tf.constant(epoch, tf.int64)) for epoch in range(200)])
    assert (drawn.sum(axis=1) == total).all()
    for label, share in enumerate(shares):
        own = drawn[:, label == CLASSES]
        assert np.abs(own.sum(axis=1) - share * total).max() < 1
        assert np.ptp(own, axis=1).max() <= 1
        # On average, each image of the class equally often: what remains is drawn anew.
        mean = share * total / own.shape[1]
        assert np.abs(own.mean(axis=0) - mean).max() < 4 * np.sqrt(0.25 / 200)


def test_epochs_differ_by_the_seed_and_the_epoch_alone():
    one = [copies(Sampling(CLASSES, EQUAL, seed=3), epoch, 60) for epoch in (0, 1, 0)]
    np.testing.assert_array_equal(one[0], one[2])
    assert (one[0] != one[1]).any()
    assert (copies(Sampling(CLASSES, EQUAL, seed=4), 0, 60) != one[0]).any()


def order(first_step=0, pipelines=1, steps=8, **options):
    """Returns each pipeline's numbers of images, by step."""
    config = Config(batch_size=12, sampling="balanced", **options)
    counts = (20, 5, 35)
    split = SplitInfo(tuple(map(str, counts)), counts, 0, 60)

    def read(path, count, start):
        return tf.data.Dataset.range(start, start + count)

    streams = []
    for pipeline in range(pipelines):
        images = 12 // pipelines
        dataset = training_order(
            *shares_of(split, config, images, pipelines, pipeline),
            read,
            config,
            steps_per_epoch=5,
            first_step=first_step,
            threads=2,
            sampling=Sampling(CLASSES, EQUAL, config.seed),
        )
        taken = dataset.take(steps - first_step).as_numpy_iterator()
        streams.append(np.stack([numbers for numbers, _ in taken]))
    return streams


def test_an_epoch_has_each_class_equally_often():
    (numbers,) = order()
    epoch = CLASSES[numbers[:5]]
    assert np.bincount(epoch.ravel()).tolist() == [20, 20, 20]
    # Copies are shuffled, and not side by side.
    assert len({tuple(np.bincount(step, minlength=3)) for step in epoch}) > 1


def test_a_resumed_order_is_the_uninterrupted_one():
    (whole,) = order()
    for first in (1, 7):
        (resumed,) = order(first_step=first)
        np.testing.assert_array_equal(resumed, whole[first:])


def test_shards_of_each_worker_are_refused():
    with pytest.raises(
        UserError, match="sampling draws images from all shards, but shard_by=files"
    ):
        Config(sampling="balanced", shard_by="files")


@pytest.mark.parametrize("shard_by", ["auto", "records"])
def test_pipelines_share_one_order(shard_by):
    (whole,) = order(shard_by=shard_by)
    parts = order(pipelines=3, shard_by=shard_by)
    for step, numbers in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([part[step] for part in parts]), numbers)


@pytest.fixture(scope="module")
def unbalanced(tmp_path_factory):
    """Shards of 60 images, each of one brightness, of the classes of ``CLASSES``."""
    images = np.repeat(4 * np.arange(60, dtype=np.uint8), 64).reshape(-1, 8, 8)
    arrays = dict.fromkeys(("validation", "train"), (images, CLASSES))
    directory = tmp_path_factory.mktemp("unbalanced")
    source = ArraySource("noise", "noise", ("rare", "some", "most"), arrays)
    prepare(source, directory, train_shards=3, encoding="png", progress=False, jpeg_index=False)
    return str(directory)


def config_of(data_dir, **options):
    return Config(
        data_dir=data_dir,
        image_size=8,
        batch_size=12,
        train_crop="none",
        flip=False,
        strategy="one_device",
        sampling="balanced",
    ).replace(**options)


@pytest.mark.parametrize("cache", ["encoded", "decoded"])
def test_batches_of_a_cache(unbalanced, cache):
    data = make_dataset(config_of(unbalanced, cache=cache), "train")
    labels = np.concatenate([labels for _, labels, _ in data])
    assert np.bincount(labels).tolist() == [20, 20, 20]
    images = np.concatenate([images for images, _, _ in data])
    expected = make_dataset(config_of(unbalanced), "train")
    for _ in range(2):
        again = np.concatenate([images for images, _, _ in expected])
    np.testing.assert_array_equal(images, again)


def test_shares_from_a_file(unbalanced, tmp_path):
    path = tmp_path / "shares.json"
    path.write_text(json.dumps({"rare": 0, "most": 3}))
    data = make_dataset(config_of(unbalanced, sampling=str(path)), "train")
    labels = np.concatenate([labels for _, labels, _ in data])
    assert np.bincount(labels).tolist() == [0, 15, 45]


def test_classes_are_read_from_the_shards_where_their_metadata_are_gone(unbalanced, monkeypatch):
    config = config_of(unbalanced)
    expected = make_sampling(config, read_info(config)).classes
    assert sorted(expected) == sorted(CLASSES)
    monkeypatch.setattr(metadata, "_load", lambda *_: None)
    np.testing.assert_array_equal(make_sampling(config, read_info(config)).classes, expected)


@pytest.mark.parametrize("labels", [[0] * 60, [0] * 59 + [9], [0] * 59 + [-1]])
def test_labels_that_contradict_the_manifest(unbalanced, monkeypatch, labels):
    """Those of others may be anything."""
    manifest = read_manifest(unbalanced)
    rows = metadata.read_metadata(manifest, pathlib.Path(unbalanced)).copy()
    rows["label"][:60] = labels
    monkeypatch.setattr(metadata, "_load", lambda *_: rows)
    config = config_of(unbalanced)
    with pytest.raises(UserError, match="labels of train images are not those of the manifest"):
        make_sampling(config, read_info(config))


def test_a_record_without_a_label(unbalanced, tmp_path):
    shutil.copytree(unbalanced, tmp_path / "data")
    (tmp_path / "data" / "data.npz").unlink()
    for path in (tmp_path / "data").glob("train-*"):
        examples = [decode_example(record) for record in records.read_records(path)]
        feature = tf.train.Feature(float_list=tf.train.FloatList(value=[1.0]))
        example = tf.train.Example(features=tf.train.Features(feature={LABEL: feature}))
        records.write_records(path, [example.SerializeToString()] * len(examples))
    sizes = json.loads((tmp_path / "data" / "manifest.json").read_text())
    for shard in sizes["splits"]["train"]["shards"]:
        shard["bytes"] = (tmp_path / "data" / shard["file"]).stat().st_size
    (tmp_path / "data" / "manifest.json").write_text(json.dumps(sizes))
    config = config_of(str(tmp_path / "data"))
    message = r"record 0: its label is 1.0, but must be a whole number of 32 bits"
    with pytest.raises(UserError, match=message):
        make_sampling(config, read_info(config))
    problems = verify(tmp_path / "data", progress=False)
    assert any(re.search(message, problem) for problem in problems)


def test_a_class_without_images(tmp_path):
    arrays = {"train": (np.zeros([2, 8, 8], np.uint8), np.array([0, 2]))}
    prepare(ArraySource("noise", "noise", "abc", arrays), tmp_path, progress=False)
    config = config_of(str(tmp_path))
    with pytest.raises(UserError, match=r"class 'b' has no training image to draw: .*\{\"b\": 0\}"):
        class_shares(config, read_info(config))


def test_data_without_a_manifest(unbalanced, tmp_path):
    for path in pathlib.Path(unbalanced).glob("*-of-*"):
        shutil.copy(path, tmp_path)
    config = config_of(str(tmp_path), num_classes=3)
    with pytest.raises(UserError, match="needs to know each image's class: prepare the data"):
        make_dataset(config, "train")


def test_where_it_would_have_no_effect():
    for options in ({"synthetic": True, "num_classes": 3}, {"data_on_device": True}):
        with pytest.raises(UserError, match="sampling=balanced has no effect"):
            Config(sampling="balanced", **options)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[1]", "is not a JSON object of numbers by class"),
        ('{"rare": -1}', "is not a JSON object of numbers by class.*Expected `float` >= 0"),
        ('{"rare": "2"}', "is not a JSON object of numbers by class"),
        ('{"rar": 2}', "names 'rar', which is no class; did you mean 'rare'"),
        ('{"rare": 0, "some": 0, "most": 0}', "gives 0 to all classes"),
    ],
)
@pytest.mark.parametrize("option", ["sampling", "class_weights"])
def test_files_that_cannot_be_used(unbalanced, tmp_path, option, content, reason):
    path = tmp_path / "values.json"
    path.write_text(content)
    with pytest.raises(UserError, match=f"{option}: .*{reason}"):
        use(unbalanced, option, str(path))


@pytest.mark.parametrize("option", ["sampling", "class_weights"])
def test_files_that_are_not_there(unbalanced, tmp_path, option):
    with pytest.raises(UserError, match=f"{option}: balance cannot .*; did you mean 'balanced'"):
        use(unbalanced, option, "balance")
    with pytest.raises(UserError, match=f"{option}: .*values.json cannot be read: No such file"):
        use(unbalanced, option, str(tmp_path / "values.json"))


def use(data_dir, option, value):
    """Does what reads the option."""
    config = config_of(data_dir, sampling="").replace(**{option: value})
    if option == "sampling":
        make_dataset(config, "train")
    else:
        build_model(config, model=small_network)
