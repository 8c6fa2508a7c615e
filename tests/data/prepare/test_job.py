import errno
import io
import itertools
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from damaged_images import mutations
from PIL import Image

from imagenet_fast import Config, make_dataset
from imagenet_fast.base.errors import UserError
from imagenet_fast.data import manifest as manifests
from imagenet_fast.data import metadata, records
from imagenet_fast.data.examples import (
    CHANNELS,
    COLORSPACE,
    ENCODED,
    FILENAME,
    FORMAT,
    HEIGHT,
    LABEL,
    SYNSET,
    TEXT,
    WIDTH,
    decode_example,
)
from imagenet_fast.data.info import read_info
from imagenet_fast.data.manifest import FILE, JOURNAL, read_manifest, verify
from imagenet_fast.data.prepare.job import default_shards, prepare
from imagenet_fast.data.prepare.sources import Item, Source, open_source
from imagenet_fast.data.prepare.sources.arrays import ArraySource


def jpeg(seed, mode="RGB", kind="JPEG"):
    pixels = np.random.RandomState(seed).randint(0, 256, (20, 24, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three classes of 40, 20 and 60 images, a quarter of them for validation."""
    root = tmp_path_factory.mktemp("images") / "toy"
    for label, (name, count) in enumerate({"ant": 40, "bee": 20, "cat": 60}.items()):
        (root / name).mkdir(parents=True)
        for index in range(count):
            (root / name / f"{index:03d}.jpg").write_bytes(jpeg(100 * label + index))
    return root


@pytest.fixture
def source(folders):
    return open_source("folders", folders, holdout=0.25)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def read(directory, split):
    return [
        decode_example(record)
        for path in sorted(directory.glob(f"{split}-*"))
        for record in records.read_records(path)
    ]


def test_each_image_is_in_its_split_once_and_unchanged(source, folders, tmp_path):
    manifest = prepare(source, tmp_path, progress=False)
    assert manifest == read_manifest(tmp_path)
    assert verify(tmp_path, progress=False) == []
    assert manifest.labels == ("ant", "bee", "cat")
    assert manifest.splits["train"].class_counts == (30, 15, 45)
    assert manifest.splits["validation"].class_counts == (10, 5, 15)
    assert [len(manifest.splits[split].shards) for split in manifest.splits] == [8, 4]
    examples = read(tmp_path, "train") + read(tmp_path, "validation")
    names = {example[FILENAME][0].decode() for example in examples}
    assert len(examples) == len(names) == 120
    for example in examples:
        name = example[FILENAME][0].decode()
        assert example[ENCODED][0] == (folders / name).read_bytes()
        assert example[TEXT][0].decode() == name.split("/")[0]
        assert manifest.labels[example[LABEL][0]] == name.split("/")[0]
        assert (example[HEIGHT], example[WIDTH]) == ([20], [24])
    assert not (tmp_path / JOURNAL).exists()


@pytest.mark.long
def test_test_images_are_a_separate_split(folders, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(folders, source / "train")
    for label, name in enumerate(("ant", "bee")):
        (source / "test" / name).mkdir(parents=True)
        for index in range(11):
            data = jpeg(1000 + 100 * label + index)
            (source / "test" / name / f"{index}.jpg").write_bytes(data)
    images = open_source("folders", source)
    manifest = prepare(images, tmp_path / "out", validation_shards=2, progress=False)
    assert [split.examples for split in manifest.splits.values()] == [108, 12, 22]
    assert list(manifest.splits) == ["train", "validation", "test"]
    assert manifest.splits["test"].class_counts == (11, 11, 0)
    assert [len(split.shards) for split in manifest.splits.values()] == [8, 2, 4]
    assert verify(tmp_path / "out", progress=False) == []
    assert not any("test" in warning for warning in manifest.warnings)
    config = Config(
        data_dir=str(tmp_path / "out"), image_size=8, eval_batch_size=8, strategy="one_device"
    )
    for with_manifest in (True, False):
        counts = [0, 0, 0]
        dataset = make_dataset(config, "test")
        for _, labels, weights in dataset:
            for label in labels.numpy()[weights.numpy() > 0]:
                counts[label] += 1
        assert (counts, len(dataset)) == ([11, 11, 0], 3)
        if with_manifest:
            (tmp_path / "out" / FILE).unlink()
            config = config.replace(num_classes=3)


def test_both_splits_are_shuffled_by_the_seed(source, tmp_path):
    orders = []
    for seed in (0, 1):
        prepare(source, tmp_path / str(seed), seed=seed, progress=False)
        for split in ("train", "validation"):
            labels = [example[LABEL][0] for example in read(tmp_path / str(seed), split)]
            assert labels != sorted(labels)
            orders.append(labels)
    assert orders[0] != orders[2] and orders[1] != orders[3]


def test_shards_do_not_depend_on_the_number_of_threads(source, tmp_path):
    for threads in (1, 5):
        prepare(source, tmp_path / str(threads), threads=threads, progress=False)
    assert contents(tmp_path / "1") == contents(tmp_path / "5")


SLOW_PREPARE = """
import sys, time
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import open_source

source = open_source("folders", sys.argv[1], holdout=0.25)
read = source.read
def slow_read(split, index):
    time.sleep(0.01)
    return read(split, index)
source.read = slow_read
prepare(source, sys.argv[2], threads=2, progress=False)
"""


def test_killed_run_resumes_to_the_same_bytes(source, folders, tmp_path):
    prepare(source, tmp_path / "whole", progress=False)
    killed = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", SLOW_PREPARE, str(folders), str(killed)])
    journal = killed / JOURNAL
    deadline = time.monotonic() + 60
    while not journal.exists() or journal.read_bytes().count(b"\n") < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (killed / FILE).exists()
    done = [json.loads(line)["shard"]["file"] for line in journal.read_text().splitlines()[1:]]
    assert 3 <= len(done) < 12
    times = {file: (killed / file).stat().st_mtime_ns for file in done}
    prepare(source, killed, progress=False)
    assert contents(killed) == contents(tmp_path / "whole")
    assert {file: (killed / file).stat().st_mtime_ns for file in done} == times  # not made again


def interrupt(source, directory, after):
    """Prepares until ``after`` images were read."""
    fetch = source.read
    seen = []

    def read(split, index):
        seen.append(index)
        if len(seen) > after:
            raise KeyboardInterrupt
        return fetch(split, index)

    source.read = read
    with pytest.raises(KeyboardInterrupt):
        prepare(source, directory, threads=1, progress=False)
    source.read = fetch


@pytest.mark.parametrize("bytes_lost", [1, 30])
def test_truncated_journal_and_missing_shard_are_repaired(source, tmp_path, bytes_lost):
    prepare(source, tmp_path / "whole", progress=False)
    torn = tmp_path / "torn"
    interrupt(source, torn, after=60)
    journal = torn / JOURNAL
    lines = journal.read_bytes().splitlines()
    assert len(lines) > 3
    journal.write_bytes(journal.read_bytes()[:-bytes_lost])
    (torn / json.loads(lines[1])["shard"]["file"]).write_bytes(b"")
    interrupt(source, torn, after=30)
    prepare(source, torn, progress=False)
    assert contents(torn) == contents(tmp_path / "whole")


@pytest.fixture
def begun(folders, tmp_path):
    """A copy of the folders, and a directory with half of its shards made."""
    root, directory = tmp_path / "copy", tmp_path / "begun"
    shutil.copytree(folders, root)
    interrupt(open_source("folders", root, holdout=0.25), directory, after=70)
    return root, directory


def done_files(directory):
    """Returns the names of the images in each shard that is done, by its name."""
    lines = (directory / JOURNAL).read_text().splitlines()[1:]
    names = [json.loads(line)["shard"]["file"] for line in lines]
    return {
        name: {
            decode_example(record)[FILENAME][0].decode()
            for record in records.read_records(directory / name)
        }
        for name in names
    }


def times(directory, files):
    return {file: (directory / file).stat().st_mtime_ns for file in files}


def finish(root, directory):
    """Prepares what was begun, and checks that each image is there once; returns the manifest."""
    manifest = prepare(open_source("folders", root, holdout=0.25), directory, progress=False)
    assert verify(directory, progress=False) == []
    examples = read(directory, "train") + read(directory, "validation")
    names = sorted(example[FILENAME][0].decode() for example in examples)
    assert names == sorted(path.relative_to(root).as_posix() for path in root.glob("*/*"))
    for example in examples:
        assert example[ENCODED][0] == (root / example[FILENAME][0].decode()).read_bytes()
        assert manifest.labels[example[LABEL][0]] == example[TEXT][0].decode()
    return manifest


@pytest.mark.parametrize("in_done", [False, True])
@pytest.mark.parametrize("change", ["remove", "add", "replace"])
def test_changed_file_rewrites_at_most_one_shard(begun, change, in_done):
    root, directory = begun
    done = done_files(directory)
    assert len(done) >= 4
    names = {path.relative_to(root).as_posix() for path in root.glob("*/*")}
    chosen = min(set.union(*done.values()) if in_done else names - set.union(*done.values()))
    before = times(directory, done)
    if change != "add":
        (root / chosen).unlink()
    if change != "remove":
        (root / chosen).with_suffix(".jpeg").write_bytes(jpeg(9999))
    validation = {name for file, own in done.items() if file[0] == "v" for name in own}
    manifest = finish(root, directory)
    kept = {file for file, own in done.items() if change == "add" or chosen not in own}
    assert len(kept) >= len(done) - in_done
    assert times(directory, kept) == {file: before[file] for file in kept}
    # No image was moved to the other split.
    found = {own[FILENAME][0].decode() for own in read(directory, "validation")}
    assert validation - {chosen} <= found
    # What is finished stays so, and can be mended.
    whole = contents(directory)
    source = open_source("folders", root, holdout=0.25)
    assert prepare(source, directory, progress=False) == manifest
    (directory / "train-00002-of-00008").unlink()
    prepare(source, directory, progress=False)
    assert contents(directory) == whole


def test_repeated_changes(begun):
    root, directory = begun
    for number in range(4):
        (root / "cat" / f"{number:03d}.jpg").unlink()
        (root / "ant" / f"new {number}.jpg").write_bytes(jpeg(5000 + number))
        source = open_source("folders", root, holdout=0.25)
        fetch = iter(range(20))

        def read_some(split, index, read=source.read, fetch=fetch):
            if next(fetch, None) is None:
                raise KeyboardInterrupt
            return read(split, index)

        source.read = read_some
        with pytest.raises(KeyboardInterrupt):
            prepare(source, directory, threads=1, progress=False)
    finish(root, directory)


def test_finished_directory_has_only_shards_and_manifest(begun):
    root, directory = begun
    finish(root, directory)
    names = {path.name for path in directory.iterdir()}
    assert names == {FILE, metadata.FILE, *(name for name in names if "-of-" in name)}


def test_run_resumes_after_named_bad_images_are_deleted(begun):
    root, directory = begun
    done = done_files(directory)
    names = {path.relative_to(root).as_posix() for path in root.glob("*/*")}
    bad = sorted(names - set.union(*done.values()))[:3]
    for name in bad:
        (root / name).write_bytes(b"not an image, but of another size")
    before = times(directory, done)
    for left in (2, 1, 0):
        source = open_source("folders", root, holdout=0.25)
        with pytest.raises(UserError, match="more than 0 images") as caught:
            prepare(source, directory, max_bad_images=0, progress=False)
        named = next(name for name in bad if name in str(caught.value))
        (root / named).unlink()
        bad.remove(named)
        assert len(bad) == left
    finish(root, directory)
    assert times(directory, done) == before


def test_other_images_are_not_treated_as_changed_ones(begun, tmp_path):
    root, directory = begun
    for path in sorted(root.glob("*/*"))[::2]:
        path.unlink()
    (root / "ant" / "001.jpg").unlink()
    before = contents(directory)
    with pytest.raises(UserError, match="holds other data"):
        prepare(open_source("folders", root, holdout=0.25), directory, progress=False)
    assert contents(directory) == before


def test_changed_files_of_a_finished_directory_are_reported(begun):
    root, directory = begun
    finish(root, directory)
    before = contents(directory)
    (root / "ant" / "001.jpg").unlink()
    with pytest.raises(UserError) as caught:
        prepare(open_source("folders", root, holdout=0.25), directory, progress=False)
    assert str(caught.value) == (
        f"{directory}: is finished, but the images have changed since (90 train, 30 validation "
        "then, 89 train, 30 validation now): train on it as it is, or prepare the current images "
        "in another directory"
    )
    assert contents(directory) == before


def test_renamed_classes_of_a_finished_directory_are_reported(tmp_path):
    pixels = np.zeros((6, 4, 4, 3), np.uint8)
    split = (pixels, np.arange(6) % 2)
    old = ArraySource("digits", "toy", ("cat", "dgo"), {"train": split})
    new = ArraySource("digits", "toy", ("cat", "dog"), {"train": split})
    prepare(old, tmp_path, progress=False)
    with pytest.raises(UserError, match="is finished, with the class 'dgo', which is 'dog' now"):
        prepare(new, tmp_path, progress=False)
    assert read_manifest(tmp_path).labels == ("cat", "dgo")


def test_an_interrupted_run_leaves_no_temporary_files(source, tmp_path):
    interrupt(source, tmp_path, after=30)
    assert not list(tmp_path.glob(".*"))
    assert not (tmp_path / FILE).exists()


def test_finished_directory_is_unchanged(source, tmp_path):
    first = prepare(source, tmp_path, progress=False)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    source.read = None  # nothing is read
    assert prepare(source, tmp_path, progress=False) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times


@pytest.mark.parametrize("left_over", [False, True])
def test_finished_directory_on_a_read_only_disk(source, tmp_path, monkeypatch, left_over):
    first = prepare(source, tmp_path, progress=False)
    if left_over:  # as where a kill came behind the manifest
        (tmp_path / JOURNAL).touch()

    def read_only(*_, **__):  # also for what is not there
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("unlink", "mkdir", "write_bytes", "write_text", "replace", "touch"):
        monkeypatch.setattr(Path, name, read_only)
    assert prepare(source, tmp_path, progress=False) == first
    assert verify(tmp_path, progress=False) == []


def test_damaged_shard_of_a_finished_directory_is_rewritten(source, tmp_path):
    prepare(source, tmp_path, progress=False)
    before = contents(tmp_path)
    (tmp_path / "train-00003-of-00008").write_bytes(b"short")
    (tmp_path / "validation-00001-of-00004").unlink()
    prepare(source, tmp_path, progress=False)
    assert contents(tmp_path) == before


def test_repair_from_changed_images_is_refused(source, folders, tmp_path):
    prepare(source, tmp_path, progress=False)
    shard = tmp_path / "train-00003-of-00008"
    shard.unlink()
    fetch = source.read
    other = jpeg(999)
    source.read = lambda split, index: fetch(split, index)._replace(image=other)
    with pytest.raises(UserError, match="00003-of-00008: was rewritten and differs"):
        prepare(source, tmp_path, progress=False)
    assert not shard.exists()


@pytest.mark.parametrize("finished", [False, True])
def test_other_data_in_the_directory_is_refused(folders, tmp_path, finished):
    source = open_source("folders", folders, holdout=0.25)
    if finished:
        prepare(source, tmp_path, progress=False)
    else:
        interrupt(source, tmp_path, after=30)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"holds other data.*: seed 0 there, 5 requested"):
        prepare(source, tmp_path, seed=5, progress=False)
    with pytest.raises(UserError, match="encoding 'jpeg' there, 'png' requested"):
        prepare(source, tmp_path, encoding="png", progress=False)
    with pytest.raises(UserError, match="exif 'ignore' there, 'apply' requested"):
        prepare(source, tmp_path, exif="apply", progress=False)
    with pytest.raises(UserError, match="max_side None there, 9 requested"):
        prepare(source, tmp_path, max_side=9, progress=False)
    with pytest.raises(UserError, match="shorter_side None there, 9 requested"):
        prepare(source, tmp_path, shorter_side=9, progress=False)
    with pytest.raises(UserError, match=r"shards .*'train': 8.*'train': 2"):
        prepare(source, tmp_path, train_shards=2, progress=False)
    with pytest.raises(UserError, match=r"held_out \[0.25, 0\] there, \[0.25, 1\] requested"):
        prepare(open_source("folders", folders, holdout=0.25, seed=1), tmp_path, progress=False)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("finished", [False, True])
def test_manifests_without_an_encoding_mean_jpeg(folders, tmp_path, finished):
    source = open_source("folders", folders, holdout=0.25)
    prepare(source, tmp_path / "whole", progress=False)
    older = tmp_path / "older"
    if finished:
        prepare(source, older, progress=False)
    else:
        interrupt(source, older, after=30)
    notes = older / (FILE if finished else JOURNAL)
    text = notes.read_text()
    for told in ('"encoding": "jpeg",', '"max_side": null,', '"shorter_side": null,'):
        assert told in text
        text = re.sub(rf"\s*{told}", "", text)
    text, number = re.subn(r'\s*"exif": "ignore",', "", text)
    assert number == 1
    notes.write_text(text)
    with pytest.raises(UserError, match="encoding 'jpeg' there, 'png' requested"):
        prepare(source, older, encoding="png", progress=False)
    prepare(source, older, progress=False)
    for file, data in contents(tmp_path / "whole").items():
        assert file == FILE or contents(older)[file] == data


def test_shards_of_unknown_origin_are_not_replaced(source, tmp_path):
    (tmp_path / "train-00000-of-00008").write_bytes(b"precious")
    with pytest.raises(UserError, match="holds train-00000-of-00008, which is in no manifest"):
        prepare(source, tmp_path, progress=False)
    assert contents(tmp_path) == {"train-00000-of-00008": b"precious"}


def test_two_processes_at_once_are_refused(source, tmp_path):
    fetch = source.read
    errors = []

    def read(split, index):
        if not errors:
            with pytest.raises(UserError) as caught:
                prepare(source, tmp_path, progress=False)
            errors.append(str(caught.value))
        return fetch(split, index)

    source.read = read
    prepare(source, tmp_path, threads=1, progress=False)
    assert "another process is preparing it" in errors[0]
    assert verify(tmp_path, progress=False) == []


def test_an_unwritable_directory_is_refused_before_any_work(source, tmp_path):
    (tmp_path / "file").touch()
    source.read = None
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"file.*: is not writable: "):
            prepare(source, directory, progress=False)


def test_full_disk_is_a_user_error(source, tmp_path, monkeypatch):
    def full(path, examples):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records, "write_records", full)
    with pytest.raises(UserError, match=r"-of-0000.: cannot be written: No space left"):
        prepare(source, tmp_path, progress=False)


@pytest.mark.parametrize(
    ("limit", "file"),
    [(100, JOURNAL), (3000, r"prepare\.plan"), (7000, r"(train|validation)-0000.-of-0000.")],
    ids=["journal", "plan", "shard"],
)
def test_temporarily_full_disk(source, tmp_path, limit, file):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(UserError) as caught:
            prepare(source, tmp_path / "full", progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.fullmatch(
        rf"{tmp_path}/full/{file}: cannot be written: File too large; once that is fixed, "
        "rerun the command to resume",
        str(caught.value),
    )
    prepare(source, tmp_path / "full", progress=False)
    prepare(source, tmp_path / "whole", progress=False)
    assert contents(tmp_path / "full") == contents(tmp_path / "whole")


def test_a_disk_that_is_full_at_the_end(source, tmp_path, monkeypatch):
    def full(manifest, directory):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(manifests, "write_manifest", full)
        with pytest.raises(UserError, match=r"manifest\.json: cannot be written: No space left"):
            prepare(source, tmp_path, progress=False)
    prepare(source, tmp_path, progress=False)
    assert verify(tmp_path, progress=False) == []


@pytest.fixture
def mixed(tmp_path):
    """A folder of a grey, a CMYK, a PNG, a PNG named .jpg, a truncated and an empty image."""
    root = tmp_path / "mixed"
    images = {
        "cmyk.jpg": jpeg(0, mode="CMYK"),
        "cut.jpg": jpeg(1)[:300],
        "empty.jpg": b"",
        "good.jpg": jpeg(2),
        "grey.jpg": jpeg(3, mode="L"),
        "masked.jpg": jpeg(4, kind="PNG"),
        "picture.png": jpeg(5, kind="PNG"),
        "text.png": b"not an image",
    }
    for split in ("train", "val"):
        (root / split / "only").mkdir(parents=True)
        for name, data in images.items():
            (root / split / "only" / name).write_bytes(data)
    return open_source("folders", root)


def test_unusual_images_are_converted_or_skipped_and_counted(mixed, tmp_path):
    import tensorflow as tf

    manifest = prepare(mixed, tmp_path / "out", progress=False)
    assert manifest.splits["train"].class_counts == (5,)
    assert manifest.converted == {"CMYK JPEG": 2, "PNG": 4}
    skipped = {(skipped.split, Path(skipped.file).name) for skipped in manifest.skipped}
    bad = ("cut.jpg", "empty.jpg", "text.png")
    assert skipped == {(split, name) for split in ("train", "validation") for name in bad}
    assert {skipped.reason for skipped in manifest.skipped} >= {"empty"}
    assert verify(tmp_path / "out", progress=False) == []
    for example in read(tmp_path / "out", "train"):
        pixels = tf.image.decode_jpeg(example[ENCODED][0])
        assert tuple(pixels.shape) == (20, 24, example[CHANNELS][0])


def test_damaged_files_do_not_affect_other_images(folders, tmp_path):
    kinds = itertools.cycle(["jpg", "png", "gif", "bmp", "webp"])
    source = tmp_path / "source" / "toy"
    shutil.copytree(folders, source)
    good = prepare(open_source("folders", source), tmp_path / "good", progress=False)
    for number, (data, kind) in enumerate(zip(mutations(300), kinds)):
        (source / "bee" / f"damaged {number}.{kind}").write_bytes(data)
    images = open_source("folders", source)
    found = prepare(images, tmp_path / "all", max_bad_images=300, progress=False)
    examples = [
        {
            example[FILENAME][0]: example
            for split in found.splits
            for example in read(tmp_path / place, split)
        }
        for place in ("good", "all")
    ]
    assert len(found.skipped) > 100 and len(examples[1]) == 420 - len(found.skipped)
    assert len(examples[0]) == sum(split.examples for split in good.splits.values()) == 120
    assert examples[0] == {name: examples[1][name] for name in examples[0]}
    assert verify(tmp_path / "all", progress=False) == []


def test_too_many_bad_images_are_an_error_also_when_resuming(mixed, tmp_path):
    for _ in range(2):
        with pytest.raises(UserError, match=r"more than 5 images \(max_bad_images\).*such as .*: "):
            prepare(mixed, tmp_path / "out", max_bad_images=5, progress=False)
    assert len(prepare(mixed, tmp_path / "out", max_bad_images=6, progress=False).skipped) == 6


def test_bad_images_of_earlier_runs_count(mixed, tmp_path, monkeypatch):
    def killed(manifest, directory):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(manifests, "write_manifest", killed)
        prepare(mixed, tmp_path, progress=False)
    with pytest.raises(UserError, match="more than 5 images"):
        prepare(mixed, tmp_path, max_bad_images=5, progress=False)


class Pixels(Source):
    """Grey images of one class, whose labels and reading a test can spoil."""

    def __init__(self, train=20, validation=4, label=0, error=None):
        splits = {"train": train, "validation": validation}
        super().__init__("pixels", "pixels", ("one", "two"), splits, "fingerprint", ("n1", "n2"))
        self._label, self._error = label, error

    def read(self, split, index):
        if self._error:
            raise self._error
        return Item(np.full((6, 5), index, np.uint8), self._label, f"{split}{index}")


def test_classes_without_training_images_give_a_warning(tmp_path):
    pixels = np.zeros((6, 8, 8), np.uint8)
    arrays = {
        "train": (pixels, np.array([0, 0, 0, 1, 1, 1])),
        "validation": (pixels, np.array([0, 0, 1, 2, 2, 2])),
        "test": (pixels, np.array([0, 1, 1, 1, 2, 2])),
    }
    source = ArraySource("noise", "noise", ("a", "b", "c", "d"), arrays)
    manifest = prepare(source, tmp_path, progress=False)
    assert manifest.warnings == (
        "class 'c' has no training image, but 3 for validation and 2 for a test",
        "class 'd' has no training image",
    )


def test_many_classes_without_training_images_give_one_warning(tmp_path):
    """As integer labels with gaps do."""
    arrays = {"train": (np.zeros((2, 8, 8), np.uint8), np.array([0, 899]))}
    source = ArraySource("noise", "noise", map(str, range(900)), arrays)
    (warning,) = prepare(source, tmp_path, progress=False).warnings
    names = "'1', '2', '3', '4', '5' and others"
    assert warning == f"898 classes have no training image: {names}"


def test_raw_pixels_synsets_and_classes_without_images(tmp_path):
    manifest = prepare(Pixels(), tmp_path, progress=False)
    assert manifest.converted == {"pixels": 24}
    assert manifest.warnings == ("class 'two' has no training image",)
    for example in read(tmp_path, "train"):
        assert example[SYNSET] == [b"n1"]
        assert example[COLORSPACE] == [b"Grayscale"]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_split_whose_images_are_all_bad(tmp_path, split):
    class Spoiled(Pixels):
        def read(self, own, index):
            item = super().read(own, index)
            return item._replace(image=b"none") if own == split else item

    if split == "train":
        with pytest.raises(UserError, match="pixels: none of its training images can be used"):
            prepare(Spoiled(), tmp_path, progress=False)
        return
    manifest = prepare(Spoiled(), tmp_path, progress=False)
    assert manifest.warnings[-1].startswith("no validation image can be used")
    assert [skipped.split for skipped in manifest.skipped] == ["validation"] * 4
    # To training it is data without that split.
    assert list(read_info(Config(data_dir=str(tmp_path))).splits) == ["train"]


class Noise(ArraySource):
    """Twelve images of noise of 16 pixels in each split, grey or RGB; the label is the place."""

    def __init__(self, grey):
        shape = (12, 16, 16) if grey else (12, 16, 16, 3)
        random = np.random.RandomState(0)
        arrays = {
            split: (random.randint(0, 256, shape, np.uint8), np.arange(12))
            for split in ("train", "validation")
        }
        super().__init__("noise", "noise", map(str, range(12)), arrays)

    def pixels(self, split, label):
        image = self.read(split, label).image
        return image if image.ndim == 3 else np.dstack([image] * 3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("grey", "split", "cache"),
    [
        pytest.param(False, "train", "none", marks=pytest.mark.long),
        pytest.param(False, "train", "encoded", marks=pytest.mark.long),
        pytest.param(False, "train", "decoded", marks=pytest.mark.long),
        pytest.param(False, "validation", "none", marks=pytest.mark.long),
        (True, "train", "none"),
    ],
)
def test_pixels_of_pngs_are_unchanged_in_the_pipeline(tmp_path, grey, split, cache):
    source = Noise(grey)
    manifest = prepare(source, tmp_path, encoding="png", progress=False)
    assert manifest.converted == {"pixels": 24}
    assert manifest.source["encoding"] == "png"
    config = Config(
        data_dir=str(tmp_path),
        image_size=16,
        train_crop="none",
        flip=False,
        eval_crop_fraction=1.0,
        batch_size=6,
        strategy="one_device",
        cache=cache,
    )
    seen = {}
    for images, labels, weights in itertools.islice(make_dataset(config, split), 2):
        assert (weights.numpy() == 1).all()
        seen.update(zip(labels.numpy().tolist(), images.numpy()))
    assert sorted(seen) == list(range(12))
    for label, image in seen.items():
        np.testing.assert_array_equal(image, source.pixels(split, label))


def test_large_images_are_resized_and_counted(tmp_path):
    root = tmp_path / "source"
    sizes = {"a.jpg": (40, 30), "b.jpg": (12, 16), "c.png": (16, 90), "d.png": (9, 9)}
    (root / "only").mkdir(parents=True)
    for name, size in sizes.items():
        Image.new("RGB", size, "teal").save(root / "only" / name, quality=80)
    source = open_source("folders", root, holdout=0.1)
    manifest = prepare(source, tmp_path / "out", max_side=16, progress=False)
    assert manifest.converted == {"JPEG, resized": 1, "PNG": 1, "PNG, resized": 1}
    assert (manifest.source["max_side"], manifest.source["shorter_side"]) == (16, None)
    examples = {
        example[FILENAME][0].decode(): example for example in read(tmp_path / "out", "train")
    }
    found = {name: (*example[WIDTH], *example[HEIGHT]) for name, example in examples.items()}
    assert found == {
        "only/a.jpg": (16, 12),
        "only/b.jpg": (12, 16),
        "only/c.png": (3, 16),
        "only/d.png": (9, 9),
    }
    assert examples["only/b.jpg"][ENCODED][0] == (root / "only/b.jpg").read_bytes()
    with pytest.raises(UserError, match="max_side 16 there, None requested"):
        prepare(source, tmp_path / "out", progress=False)
    assert prepare(source, tmp_path / "out", max_side=16, progress=False) == manifest


def test_images_with_exif_orientation_are_turned_and_counted(tmp_path):
    root = tmp_path / "source"
    (root / "only").mkdir(parents=True)
    for name, orientation in {"a.jpg": 1, "b.jpg": 6, "c.jpg": 8, "d.png": 3}.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.new("RGB", (16, 9), "teal").save(root / "only" / name, exif=exif)
    source = open_source("folders", root, holdout=0.1)
    manifest = prepare(source, tmp_path / "out", exif="apply", progress=False)
    assert manifest.converted == {"JPEG, turned": 2, "PNG, turned": 1}
    assert manifest.source["exif"] == "apply"
    found = {
        example[FILENAME][0].decode(): (*example[WIDTH], *example[HEIGHT])
        for example in read(tmp_path / "out", "train")
    }
    assert found == {
        **dict.fromkeys(("only/a.jpg", "only/d.png"), (16, 9)),
        **dict.fromkeys(("only/b.jpg", "only/c.jpg"), (9, 16)),
    }


def test_large_arrays_are_resized(tmp_path):
    manifest = prepare(Noise(grey=True), tmp_path, shorter_side=8, progress=False)
    assert manifest.converted == {"pixels, resized": 24}
    assert {(*example[HEIGHT], *example[WIDTH]) for example in read(tmp_path, "train")} == {(8, 8)}


@pytest.mark.parametrize(
    ("sides", "error"),
    [
        (
            {"max_side": 8, "shorter_side": 8},
            "max_side and shorter_side cannot be combined: give one",
        ),
        ({"max_side": 0}, "max_side is 0, but must be at least 1"),
        ({"shorter_side": -2}, "shorter_side is -2, but must be at least 1"),
    ],
)
def test_impossible_sides_are_refused_before_any_work(source, tmp_path, sides, error):
    source.read = None
    with pytest.raises(UserError, match=error):
        prepare(source, tmp_path / "x", **sides, progress=False)
    assert not (tmp_path / "x").exists()


def test_an_unknown_encoding_or_exif_is_refused_before_any_work(source, tmp_path):
    source.read = None
    with pytest.raises(UserError, match=r"encoding='pngs' does not exist; did you mean 'png'"):
        prepare(source, tmp_path / "x", encoding="pngs", progress=False)
    with pytest.raises(UserError, match=r"exif='aply' does not exist; did you mean 'apply'"):
        prepare(source, tmp_path / "x", exif="aply", progress=False)
    assert not (tmp_path / "x").exists()


def test_unusual_images_become_pngs(mixed, tmp_path):
    manifest = prepare(mixed, tmp_path / "out", encoding="png", progress=False)
    assert manifest.converted == {"CMYK JPEG": 2, "PNG": 4}
    kinds = {}
    for example in read(tmp_path / "out", "train"):
        image = Image.open(io.BytesIO(example[ENCODED][0]))
        kinds[Path(example[FILENAME][0].decode()).name] = image.format, image.mode
        assert example[FORMAT] == [image.format.encode()]
    assert kinds == {
        "cmyk.jpg": ("PNG", "RGB"),
        "good.jpg": ("JPEG", "RGB"),
        "grey.jpg": ("JPEG", "L"),
        "masked.jpg": ("PNG", "RGB"),
        "picture.png": ("PNG", "RGB"),
    }


@pytest.mark.parametrize("label", [-1, 2])
def test_labels_out_of_range_are_refused(tmp_path, label):
    with pytest.raises(UserError, match=rf"pixels: .* has the label {label}, outside 0\.\.1"):
        prepare(Pixels(label=label), tmp_path, progress=False)


def test_unreadable_source_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"pixels: cannot be read: .*disk on fire"):
        prepare(Pixels(error=OSError("disk on fire")), tmp_path, progress=False)


def test_numbers_of_shards(tmp_path):
    manifest = prepare(Pixels(), tmp_path, train_shards=3, validation_shards=1, progress=False)
    assert [shard.file for shard in manifest.splits["train"].shards] == [
        "train-00000-of-00003",
        "train-00001-of-00003",
        "train-00002-of-00003",
    ]
    assert [shard.examples for shard in manifest.splits["train"].shards] == [7, 7, 6]
    for wrong in (0, 21, -1):
        with pytest.raises(UserError, match=f"between 1 and .* 20, not {wrong}"):
            prepare(Pixels(), tmp_path / "x", train_shards=wrong, progress=False)
    with pytest.raises(UserError, match="no train images"):
        prepare(Pixels(train=0), tmp_path / "x", progress=False)
    with pytest.raises(UserError, match="no validation images"):
        prepare(Pixels(validation=0), tmp_path / "x", validation_shards=2, progress=False)


def test_a_source_without_validation_images(tmp_path):
    manifest = prepare(Pixels(validation=0), tmp_path / "data", progress=False)
    assert list(manifest.splits) == ["train"]
    assert verify(tmp_path / "data", progress=False) == []
    info = read_info(Config(data_dir=str(tmp_path / "data"), batch_size=4))
    assert (info.splits["train"].examples, list(info.splits)) == (20, ["train"])
    # Its training shards are those that it would have with validation images.
    whole = prepare(Pixels(), tmp_path / "whole", progress=False)
    assert manifest.splits["train"] == whole.splits["train"]
    (tmp_path / "data" / "train-00000-of-00008").unlink()
    assert prepare(Pixels(validation=0), tmp_path / "data", progress=False) == manifest
    assert verify(tmp_path / "data", progress=False) == []


@pytest.mark.parametrize(
    ("images", "train", "others"),
    [(1_281_167, 1024, 128), (60_000, 32, 4), (50_000, 32, 4), (1437, 8, 4), (16_000, 16, 4)],
)
def test_default_shards(images, train, others):
    assert default_shards(images) == {"train": train, "validation": others, "test": others}


def test_the_bar_shows_all_images_and_their_rate(source, tmp_path, capsys):
    prepare(source, tmp_path, progress=True)
    assert "120/120" in capsys.readouterr().err


# --- Of others ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shard": {"file": "../../precious", "examples": 1, "bytes": 8, "sha256": ""}}, None),
        ({"class_counts": [1]}, None),
        ({"class_counts": [2**53, 0, 0]}, None),
        ({"metadata": "AAAA"}, None),
        ({"shard": "precious"}, "is damaged .*shard"),
        ({"class_counts": [-1, 1]}, "is damaged .*class_counts"),
        ({"skipped": [{}]}, "is damaged .*skipped"),
    ],
)
def test_a_hostile_journal(source, tmp_path, change, reason):
    """What it claims about other files is ignored; the shards are made again."""
    (tmp_path / "precious").write_text("precious")
    prepare(source, tmp_path / "whole", progress=False)
    hostile = tmp_path / "hostile" / "data"
    interrupt(source, hostile, after=60)
    job, *done = (hostile / JOURNAL).read_text().splitlines()
    done = [json.dumps({**json.loads(line), **change}) for line in done]
    (hostile / JOURNAL).write_text("".join(f"{line}\n" for line in (job, *done)))
    if reason:
        with pytest.raises(UserError, match=reason):
            prepare(source, hostile, progress=False)
    else:
        prepare(source, hostile, progress=False)
        assert contents(hostile) == contents(tmp_path / "whole")
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_journal_that_is_a_link(source, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / JOURNAL).symlink_to(tmp_path / "new")
    with pytest.raises(UserError, match="is a link, through which nothing is written"):
        prepare(source, tmp_path / "data", progress=False)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[]\n", "cannot be read"),
        ('{"file": "x", "images": [["a", "0", 1]]}\n', "cannot be read .*images"),
        ('{"file": "../x-00000-of-00001", "images": []}\n', "names other shards"),
    ],
)
def test_a_hostile_plan(source, tmp_path, content, reason):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "prepare.plan").write_text(content)
    with pytest.raises(UserError, match=reason):
        prepare(source, tmp_path / "data", train_shards=4, validation_shards=2, progress=False)
