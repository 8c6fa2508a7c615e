"""Caches in memory and on a local disk do not change batches."""

import os
import pathlib

import numpy as np
import pytest

from imagenet_fast import Config, UserError
from imagenet_fast.data import cache
from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.data.order import SplitPart

SHARDS = (23, 9, 17, 8, 4)
# As in evaluation.
UNCHANGED = {"train_crop": "none", "flip": False}
IMAGES = sum(SHARDS)


@pytest.fixture
def numbered(tmp_path, write_data, numbered_example):
    """61 images in five shards, two of them unreadable; an image's label is its number."""
    examples = iter([numbered_example(number) for number in range(IMAGES)])
    shards = [[next(examples) for _ in range(size)] for size in SHARDS]
    shards[0][3] = numbered_example(3, jpeg=b"no image")
    shards[2][5] = b"no example"
    return write_data(tmp_path / "data", labels=IMAGES, train=shards)


def batches(count, first_step=0, **options):
    config = Config(batch_size=8, image_size=8, strategy="one_device", seed=5, **options)
    dataset = iter(distributed_dataset(config, "train", first_step))
    return [[part.numpy() for part in next(dataset)] for _ in range(count)]


def assert_same(one, other):
    for batch, other_batch in zip(one, other):
        _, labels, weights = batch
        np.testing.assert_array_equal(labels, other_batch[1])
        np.testing.assert_array_equal(weights, other_batch[2])
        seen = weights == 1
        np.testing.assert_array_equal(batch[0][seen], other_batch[0][seen])


def assert_evaluated(batches, evaluated):
    """Of unchanged images: those of their numbers."""
    for images, labels, weights in batches:
        assert weights.any()
        np.testing.assert_array_equal(images[weights == 1], evaluated[labels[weights == 1]])


@pytest.mark.parametrize(
    ("kind", "options", "first_step"),
    [
        ("decoded", {"train_crop": "pad"}, 0),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("encoded", {}, 5),
                ("encoded", {"color_jitter": 0.4}, 0),
                ("encoded", {"train_crop": "pad"}, 0),
                ("decoded", {"train_crop": "pad", "color_jitter": 0.4}, 5),
                ("decoded", {"train_crop": "none", "flip": False}, 5),
            )
        ),
    ],
)
def test_batches_are_those_without_a_cache(numbered, capsys, kind, options, first_step):
    """From the first one on, or from one in the middle of an epoch."""
    plain = batches(12, data_dir=numbered, **options)
    assert sum((weights == 0).sum() for _, _, weights in plain) > 1
    noun = {"encoded": "records", "decoded": "images"}[kind]
    own = {"data_dir": numbered, "cache": kind, "first_step": first_step}
    assert_same(plain[first_step:], batches(12 - first_step, **own, **options))
    assert f"cache: reading {IMAGES} train {noun}" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("kind", ["encoded", "decoded"])
def test_shards_without_records(tmp_path, write_data, numbered_examples, evaluated, kind):
    shards = [[], numbered_examples[:9], [], numbered_examples[9:]]
    data = write_data(tmp_path / "data", labels=IMAGES, train=shards)
    epoch = batches(7, cache=kind, data_dir=data, **UNCHANGED)
    assert_evaluated(epoch, evaluated)
    assert len({*np.concatenate([labels for _, labels, _ in epoch])}) == 7 * 8


@pytest.mark.long
@pytest.mark.parametrize("kind", ["encoded", "decoded"])
def test_rewritten_data_is_read_again(tmp_path, write_data, numbered_examples, evaluated, kind):
    for first in (0, 16):
        examples = numbered_examples[first : first + 16]
        data = write_data(tmp_path / "data", labels=IMAGES, train=[examples])
        epoch = batches(2, cache=kind, data_dir=data, **UNCHANGED)
        assert_evaluated(epoch, evaluated)
        labels = np.concatenate([labels for _, labels, _ in epoch])
        assert sorted(labels) == list(range(first, first + 16))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["encoded", "decoded"])
def test_nothing_is_read_after_the_first_time(numbered, capsys, kind):
    options = {"data_dir": numbered, "train_crop": "none", "cache": kind}
    first = batches(3, **options)
    for shard in pathlib.Path(numbered).glob("train-*"):
        before = shard.stat()
        shard.write_bytes(bytes(before.st_size))
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if it were the same
    capsys.readouterr()
    assert_same(first, batches(3, **options))
    assert "reading" not in capsys.readouterr().err


@pytest.mark.long
def test_options_that_do_not_affect_images_keep_the_cache(numbered, capsys):
    options = {"data_dir": numbered, "train_crop": "none", "cache": "decoded"}
    first = batches(3, **options)
    capsys.readouterr()
    assert_same(first, batches(3, learning_rate=7.0, duration="3 steps", **options))
    assert "reading" not in capsys.readouterr().err
    batches(1, **{**options, "train_crop": "pad", "eval_crop_fraction": 0.5})
    assert "reading" in capsys.readouterr().err


def test_random_crops_of_decoded_images_are_refused():
    with pytest.raises(UserError, match="cache=encoded, or train_crop=pad or none"):
        Config(cache="decoded", train_crop="inception")


def test_shards_are_copied_once(numbered, evaluated, tmp_path, monkeypatch):
    local = tmp_path / "local"
    options = {"data_dir": numbered, "cache_dir": str(local), **UNCHANGED}
    first = batches(9, **options)
    assert_evaluated(first, evaluated)
    (folder,) = local.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in pathlib.Path(numbered).glob("train-*")
    )
    monkeypatch.setattr(cache, "_copy", lambda *_: pytest.fail("copied again"))
    assert_same(first, batches(9, **options))


def test_copies_in_the_home_directory(numbered, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    part = SplitPart((f"{numbered}/train-00000-of-00005",), (23,), 1, 0, by_files=False)
    (copy,) = cache.copy_shards(part, "~/local").paths
    assert copy.startswith(f"{tmp_path}/local/")


def test_shards_of_the_same_name_have_different_copies(tmp_path):
    parts = []
    for name in ("one", "two"):
        path = tmp_path / name / "data" / "train-00000-of-00001"
        path.parent.mkdir(parents=True)
        path.write_text(name)
        part = SplitPart((str(path),), (1,), pipelines=1, pipeline=0, by_files=False)
        parts.append(cache.copy_shards(part, str(tmp_path / "local")))
    assert [pathlib.Path(part.paths[0]).read_text() for part in parts] == ["one", "two"]


def test_truncated_copy_is_replaced(numbered, tmp_path):
    path = pathlib.Path(numbered) / "train-00000-of-00005"
    part = SplitPart((str(path),), (23,), pipelines=1, pipeline=0, by_files=False)
    (copy,) = cache.copy_shards(part, str(tmp_path / "local")).paths
    pathlib.Path(copy).write_bytes(b"half")
    cache.copy_shards(part, str(tmp_path / "local"))
    assert pathlib.Path(copy).read_bytes() == path.read_bytes()


def test_rewritten_shard_is_copied_again(tmp_path):
    """With other labels it may have as many bytes as before."""
    path = tmp_path / "train-00000-of-00001"
    part = SplitPart((str(path),), (1,), pipelines=1, pipeline=0, by_files=False)
    for number, text in enumerate(["label 0", "label 1"]):
        path.write_text(text)
        os.utime(path, (1e9, 1e9 + 60 * number))
        (copy,) = cache.copy_shards(part, str(tmp_path / "local")).paths
        assert pathlib.Path(copy).read_text() == text


def test_unwritable_directory_is_named(numbered, tmp_path):
    (tmp_path / "file").write_text("")
    part = SplitPart((f"{numbered}/train-00000-of-00005",), (23,), 1, 0, by_files=False)
    with pytest.raises(UserError, match=r"cache_dir: cannot copy .*train-00000"):
        cache.copy_shards(part, str(tmp_path / "file"))
