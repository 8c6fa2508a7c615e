"""Lists of unreadable images, each once in a run."""

import collections
import io
import itertools
import json
import pathlib
import threading
import types

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from imagenet_fast import Config, UserError
from imagenet_fast.data import bad_images
from imagenet_fast.data import dataset as datasets
from imagenet_fast.data.bad_images import (
    BadImages,
    count_kinds,
    describe,
    diagnose,
    list_bad_images,
    read_bad_images,
)
from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.data.examples import ENCODED, decode_example
from imagenet_fast.data.images import encode_pixels
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.records import LOST, locate_records

CLASSES = 61
LABELS = range(CLASSES)
MAX_PIXELS = 1000


def listed(directory, name="bad_images.jsonl"):
    path = pathlib.Path(directory, name)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def damaged(example, **fields):
    """An example, some of whose fields have other values."""
    changed = tf.train.Example.FromString(example)
    for name, values in fields.items():
        feature = changed.features.feature["image/" + name.replace("label", "class/label")]
        feature.Clear()
        if values and isinstance(values[0], bytes):
            feature.bytes_list.value.extend(values)
        else:
            feature.int64_list.value.extend(values)
    return changed.SerializeToString()


# --- One image ------------------------------------------------------------------------------------


@pytest.fixture
def example(numbered_example):
    return numbered_example(7)


@pytest.fixture
def jpeg(example):
    return decode_example(example)[ENCODED][0]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"encoded": []}, "it has 0 values of image/encoded"),
        ({"label": []}, "it has 0 values of image/class/label"),
        ({"label": [1, 2]}, "it has 2 values of image/class/label"),
        ({"label": [b"7"]}, "its image/class/label has the wrong type"),
        ({"encoded": [7]}, "its image/encoded has the wrong type"),
        ({"height": [b"12"]}, "its image/height has the wrong type"),
        ({"width": [10, 10]}, "it has 2 values of image/width"),
        ({"jpeg_index": [7]}, "its image/jpeg_index has the wrong type"),
    ],
)
def test_no_example(example, fields, reason):
    assert diagnose(damaged(example, **fields), LABELS, MAX_PIXELS) == (
        "no example",
        reason,
        "7.jpg",
    )


def test_records_that_are_not_protocol_buffers_have_no_name():
    assert diagnose(b"\xff", LABELS, MAX_PIXELS) == ("no example", "not a tf.train.Example", "")
    assert diagnose(b"\xff", LABELS[:0], MAX_PIXELS) == ("no example", "not a tf.train.Example", "")


def test_names_that_are_not_utf_8(example):
    wrong = {"label": [99]}
    assert (
        diagnose(damaged(example, filename=[b"\xe9.jpg"], **wrong), LABELS, MAX_PIXELS)[2]
        == "\ufffd.jpg"
    )
    for none in ([], [3]):
        assert diagnose(damaged(example, filename=none, **wrong), LABELS, MAX_PIXELS)[2] == ""


@pytest.mark.parametrize("label", [-1, CLASSES, 2**40])
def test_wrong_label(example, label):
    found = diagnose(damaged(example, label=[label]), LABELS, MAX_PIXELS)
    several = damaged(example, label=[LABELS[0], label])
    assert diagnose(several, LABELS, MAX_PIXELS)[0] == "no example"
    assert diagnose(several, LABELS, MAX_PIXELS, multi_label=True)[:2] == found[:2]
    assert found == ("wrong label", f"{label} is not in [0, 61)", "7.jpg")


def test_damaged_images(example, jpeg):
    for part in (jpeg[:-100], jpeg[:100], jpeg[:4], b"GIF89a", b"\x89PNG\r\n"):
        found = diagnose(damaged(example, encoded=[part]), LABELS, MAX_PIXELS)
        assert (found[0], found[2]) == ("damaged image", "7.jpg")
    assert "truncated" in diagnose(damaged(example, encoded=[jpeg[:-100]]), LABELS, MAX_PIXELS)[1]


@pytest.mark.parametrize("image", [b"", b"no image", b"\xff"])
def test_files_that_are_not_images(example, image):
    kind, reason, file = diagnose(damaged(example, encoded=[image]), LABELS, MAX_PIXELS)
    assert (kind, file) == ("no image", "7.jpg")
    assert reason == "empty" if not image else repr(image[:4]) in reason


def test_unsupported_images(example):
    webp = io.BytesIO()
    Image.fromarray(np.zeros([3, 5, 3], np.uint8)).save(webp, "webp")
    found = diagnose(damaged(example, encoded=[webp.getvalue()]), LABELS, MAX_PIXELS)
    assert found == ("unsupported image", "WEBP of 3 x 5 that Pillow can read", "7.jpg")


def test_images_that_are_too_large(example):
    """Told from their headers: there are no pixels to decode."""
    png = io.BytesIO()
    Image.new("L", (40, 26)).save(png, "png")
    found = diagnose(damaged(example, encoded=[png.getvalue()[:60]]), LABELS, MAX_PIXELS)
    assert found == ("large image", "40 x 26 pixels, more than the limit of 1000", "7.jpg")


# --- The list -------------------------------------------------------------------------------------


@pytest.fixture
def bad(tmp_path):
    return BadImages(tmp_path / "run" / "bad_images.jsonl", "train", LABELS, MAX_PIXELS)


def test_a_line_for_each(bad, example):
    bad.add(damaged(example, label=[61]))
    bad.add(LOST + b"\n12\n3456\na reason\n/data/train-00003-of-00004")
    image, record = listed(bad.path.parent)
    assert len(image.pop("sha256")) == 16
    assert image == {
        "split": "train",
        "kind": "wrong label",
        "file": "7.jpg",
        "reason": "61 is not in [0, 61)",
    }
    assert record == {
        "split": "train",
        "kind": "lost record",
        "shard": "train-00003-of-00004",
        "record": 12,
        "offset": 3456,
        "reason": "a reason",
    }


def test_each_is_listed_once_and_at_once(bad, example):
    for _ in range(3):
        for label in (61, 62):
            bad.add(damaged(example, label=[label]))
            assert len(listed(bad.path.parent)) >= label - 60
    assert [line["reason"][:2] for line in listed(bad.path.parent)] == ["61", "62"]


def test_images_without_names_are_distinguished(bad):
    bad.add(b"\xff")
    bad.add(b"\xff\xff")
    assert len(listed(bad.path.parent)) == 2


@pytest.fixture
def forget():
    """Forgets what this process knows of lists, as if it was another one."""
    return bad_images._list_at.cache_clear


@pytest.mark.parametrize("cut", ["", '{"split": "tra', "{"])
def test_another_process_continues_the_list(bad, example, forget, cut):
    bad.add(damaged(example, label=[61]))
    with bad.path.open("a") as file:
        file.write(cut)  # killed while it was writing
    assert len(read_bad_images(str(bad.path.parent))) == 1
    forget()
    for label in (61, 62):
        bad.add(damaged(example, label=[label]))
    assert [line["reason"][:2] for line in listed(bad.path.parent)] == ["61", "62"]


def test_removed_run_starts_a_new_list(bad, example):
    for _ in range(2):
        bad.add(damaged(example, label=[61]))
        assert len(listed(bad.path.parent)) == 1
        bad.path.unlink()
        bad.path.parent.rmdir()


def test_threads_list_each_image_once(bad, example):
    examples = [damaged(example, label=[label]) for label in range(61, 91)]
    barrier = threading.Barrier(8)

    def add_all():
        barrier.wait()
        for wrong in examples:
            bad.add(wrong)

    threads = [threading.Thread(target=add_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [line["reason"] for line in listed(bad.path.parent)]
    assert sorted(lines) == [f"{label} is not in [0, 61)" for label in range(61, 91)]


def test_a_list_that_cannot_be_written(bad):
    bad.path.parent.write_text("not a directory")
    with pytest.raises(UserError, match=r"cannot write .*bad_images.jsonl: "):
        bad.add(b"\xff")


INFO = DatasetInfo("numbers", tuple(map(str, range(10))), -1, {})


def test_each_input_pipeline_has_a_file_of_its_own(tmp_path):
    config = Config(model_dir=str(tmp_path), max_pixels=MAX_PIXELS)
    first, third = (list_bad_images(config, INFO, "train", number) for number in (0, 2))
    assert first == BadImages(tmp_path / "bad_images.jsonl", "train", range(1, 11), MAX_PIXELS)
    assert third == BadImages(
        tmp_path / "bad_images-00002.jsonl", "train", range(1, 11), MAX_PIXELS
    )


def test_no_list_without_a_directory():
    assert list_bad_images(Config(), INFO, "train", 0) is None
    assert describe("") == "" and read_bad_images("") == []


# --- What is told of it ---------------------------------------------------------------------------


def test_all_lists_together(tmp_path):
    config = Config(model_dir=str(tmp_path))
    note = LOST + b"\n3\n100\nits checksum\ntrain-"
    for worker in (0, 1):
        bad = list_bad_images(config, INFO, "train", worker)
        bad.add(note + b"1")  # both read this shard
        bad.add(note + b"%d" % (2 + worker))
    list_bad_images(config, INFO, "validation", 0).add(b"\xff")
    found = read_bad_images(str(tmp_path))
    assert len(found) == 4
    assert list(count_kinds(found).items()) == [("lost record", 3), ("no example", 1)]
    assert describe(str(tmp_path)) == (
        "unreadable images: 4 (3 lost record, 1 no example), listed in "
        f"{tmp_path}/bad_images*.jsonl"
    )


def test_the_first_few(bad, example):
    directory = str(bad.path.parent)
    assert describe(directory, examples=2) == ""
    bad.add(damaged(example, label=[61]))
    bad.add(b"\xff")
    told = (
        f"unreadable images: 2 (1 no example, 1 wrong label), listed in {bad.path}: "
        "7.jpg (wrong label: 61 is not in [0, 61)); "
        "an image without a name (no example: not a tf.train.Example)"
    )
    assert describe(directory, examples=2) == told
    bad.add(LOST + b"\n6\n100\nits checksum\ntrain-5")
    more = told.replace("2 (1 no", "3 (1 lost record, 1 no")
    assert describe(directory, examples=2) == more + "; ..."
    assert describe(directory, 3).endswith("; record 6 of train-5 (lost record: its checksum)")


# --- A pipeline -----------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path, write_data, bad_examples):
    """The bad examples in two shards for each split, the last record of the second one lost."""
    examples, numbers = bad_examples
    shards = [examples[:30], examples[30:]]
    directory = write_data(tmp_path / "data", labels=CLASSES, train=shards, validation=shards)
    for path in pathlib.Path(directory).glob("*-00001-of-00002"):
        content = bytearray(path.read_bytes())
        content[list(locate_records(path))[29] + 50] ^= 0x10
        path.write_bytes(content)
    return directory, [*numbers, 59]


def take(dataset, steps):
    return list(itertools.islice(dataset, steps))


@pytest.mark.long
@pytest.mark.parametrize("split", ["train", "validation"])
def test_pipeline_lists_unreadable_images(data, tmp_path, split):
    directory, numbers = data
    config = Config(
        data_dir=directory,
        model_dir=str(tmp_path / "run"),
        image_size=8,
        batch_size=15,
        train_crop="none",
        strategy="one_device",
    )
    # Two epochs of training, of four steps each; some of them are done again.
    for first_step, steps in ((0, 6), (2, 6)) if split == "train" else ((0, 5),):
        take(distributed_dataset(config, split, first_step), steps)
    found = read_bad_images(config.model_dir)
    assert {line.get("file", line.get("shard")): line["kind"] for line in found} == {
        "4.jpg": "damaged image",
        "9.jpg": "damaged image",
        "10.jpg": "no image",
        "20.jpg": "wrong label",
        "33.jpg": "wrong label",
        "": "no example",
        "60.jpg": "damaged image",
        f"{split}-00001-of-00002": "lost record",
    }
    assert sum(count_kinds(found).values()) == len(numbers) == 9
    assert {line["split"] for line in found} == {split}
    assert len(listed(config.model_dir)) == 9


class TwoHosts:
    """Stands for a strategy with two hosts, each with an input pipeline and a replica."""

    num_replicas_in_sync = 2
    extended = types.SimpleNamespace(
        worker_devices=[f"/job:worker/replica:0/task:{host}/device:CPU:0" for host in (0, 1)]
    )

    def distribute_datasets_from_function(self, function):
        contexts = [tf.distribute.InputContext(2, host, 2) for host in (0, 1)]
        return collections.UserList(map(function, contexts))  # which may have attributes


@pytest.mark.long
def test_images_listed_by_two_workers_count_once(data, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "make_strategy", lambda config: TwoHosts())
    config = Config(data_dir=data[0], model_dir=str(tmp_path), image_size=8, batch_size=20)
    for dataset in distributed_dataset(config, "validation"):
        take(dataset, 4)
    own = [listed(tmp_path, name) for name in ("bad_images.jsonl", "bad_images-00001.jsonl")]
    # Each reads all shards, but makes every second image only.
    names = [[line["file"] for line in lines if "file" in line] for lines in own]
    assert sorted(names[0] + names[1]) == sorted(
        ["4.jpg", "9.jpg", "10.jpg", "20.jpg", "33.jpg", "", "", "60.jpg"]
    )
    assert names[0] and names[1]
    assert sum("shard" in line for lines in own for line in lines) == 1
    assert len(read_bad_images(str(tmp_path))) == 9


@pytest.mark.long
def test_without_a_directory_nothing_is_listed(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"image_size": 8, "train_crop": "none", "batch_size": 15, "strategy": "one_device"}
    config = Config(data_dir=data[0], **options)
    weights = [batch[2] for batch in take(distributed_dataset(config, "train"), 4)]
    assert np.sum(weights) < 60
    assert list(tmp_path.rglob("bad_images*")) == []


def test_wrong_size_in_a_record_is_not_a_bad_image(tmp_path, write_data, numbered_example, bad):
    """Image 3 is larger than its record says: only its batch is made with care."""
    large = encode_pixels(np.zeros([40, 30, 3], np.uint8)).data
    examples = [numbered_example(n, jpeg=large if n == 3 else None) for n in range(CLASSES)]
    directory = write_data(tmp_path / "data", labels=CLASSES, train=[examples])
    config = Config(
        data_dir=directory,
        model_dir=str(bad.path.parent),
        image_size=8,
        batch_size=61,
        strategy="one_device",
    )
    (batch,) = take(distributed_dataset(config, "train"), 1)
    assert np.all(batch[2] == 1)
    assert not bad.path.exists()
