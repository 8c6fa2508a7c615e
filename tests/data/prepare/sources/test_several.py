"""Images with several labels: as lists write them, prepared, and read for training."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from imagenet_fast import Config
from imagenet_fast.base.errors import UserError
from imagenet_fast.data import metadata
from imagenet_fast.data.dataset import make_dataset
from imagenet_fast.data.info import read_info
from imagenet_fast.data.manifest import read_manifest, verify
from imagenet_fast.data.prepare.duplicates import Images, find_duplicates
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.page import write_page
from imagenet_fast.data.prepare.sources import open_source
from imagenet_fast.data.prepare.sources.several import SeveralLabels
from imagenet_fast.data.sampling import class_shares

# By file: its labels; and the same in each layout.
LABELS = {"a.png": "cat,dog", "b.png": "dog", "c.png": "bird,cat,dog", "d.png": "bird"}
CLASSES = ("bird", "cat", "dog")
NUMBERS = {"a.png": (1, 2), "b.png": (2,), "c.png": (0, 1, 2), "d.png": (0,)}

SEPARATED = "image,label\n" + "".join(f'{name},"{own}"\n' for name, own in LABELS.items())
LONG = "image,label\n" + "".join(
    f"{name},{label}\n" for name, own in LABELS.items() for label in own.split(",")
)
LISTS = "".join(
    json.dumps({"image": name, "labels": own.split(",")}) + "\n" for name, own in LABELS.items()
)
FLAGS = "id,image,bird,cat,dog\n" + "".join(
    f"{number},{name}," + ",".join(str(int(label in own)) for label in CLASSES) + "\n"
    for number, (name, own) in enumerate(LABELS.items())
)


@pytest.fixture
def make(tmp_path):
    """Writes a list beside images of its files: make(text, suffix)."""

    def write(text, suffix=".csv", files=LABELS):
        for number, name in enumerate(files):
            pixels = np.random.RandomState(number).randint(0, 256, (9, 9, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / name)
        path = tmp_path / f"photos{suffix}"
        path.write_text(text)
        return path

    return write


def test_what_a_column_of_labels_may_be():
    assert SeveralLabels(",").names("a", "cat,dog") == ("cat", "dog")
    for columns in (SeveralLabels(","), SeveralLabels()):
        assert columns.names("a", ["cat", "dog"]) == ("cat", "dog")
    with pytest.raises(UserError, match="a is 'cat dog', but must be a list of names"):
        SeveralLabels().names("a", "cat dog")


@pytest.mark.parametrize(
    ("text", "suffix", "options"),
    [
        (SEPARATED, ".csv", {"label_separator": ","}),
        (SEPARATED.replace(",dog", " ; dog").replace(",cat", ";cat"), ".csv", {}),
        (LONG, ".csv", {"label_separator": ","}),
        (LISTS, ".jsonl", {}),
        (FLAGS, ".csv", {"label_columns": "bird,cat, dog"}),
        (FLAGS.replace("id,", "split,").replace("\n", "\n", 1), ".csv", {"label_columns": "*"}),
    ],
)
def test_each_layout_gives_the_same_labels(make, text, suffix, options):
    if " ; " in text:
        options = {"label_separator": ";"}
    if text.startswith("split,"):
        rows = list(csv.reader(text.splitlines()))
        text = "\n".join(
            ",".join(["train" if n else "split", *row[1:]]) for n, row in enumerate(rows)
        )
    source = open_source("list", make(text, suffix), holdout=0, **options)
    assert source.multi_label and source.labels == CLASSES
    items = [source.read("train", index) for index in range(source.splits["train"])]
    assert {item.filename: item.label for item in items} == NUMBERS
    assert not any("of its own" in warning for warning in source.warnings)


@pytest.mark.parametrize("first", [True, False])
def test_null_in_json_is_no_label(make, first):
    none = '{"image": "e.png", "labels": null}\n'
    path = make(none + LISTS if first else LISTS + none, ".jsonl", [*LABELS, "e.png"])
    source = open_source("list", path, allow_unlabelled=True, holdout=0)
    items = [source.read("train", index) for index in range(5)]
    assert {item.filename: item.label for item in items} == {**NUMBERS, "e.png": ()}
    with pytest.raises(UserError, match="labels is missing, but must be text"):
        open_source("list", path, holdout=0)


@pytest.fixture
def prepared(make, tmp_path):
    text = "image,label,split\n" + "".join(
        f'{name},"{own}",{"validation" if name == "d.png" else "train"}\n'
        for name, own in {**LABELS, "e.png": ""}.items()
    )
    path = make(text, files=[*LABELS, "e.png"])
    source = open_source("list", path, label_separator=",", allow_unlabelled=True)
    prepare(source, tmp_path / "data", train_shards=2, progress=False)
    return tmp_path / "data"


def test_shards_keep_all_labels(prepared):
    manifest = read_manifest(prepared)
    assert manifest.multi_label and manifest.splits["train"].examples == 4
    assert manifest.splits["train"].class_counts == (1, 2, 3)
    assert manifest.splits["validation"].class_counts == (1, 0, 0)
    assert verify(prepared, progress=False) == []
    for kernel in ("native", "tensorflow"):
        config = Config(data_dir=str(prepared), image_size=8, resize_kernel=kernel)
        batches = make_dataset(config.replace(batch_size=2), "train")
        labels = np.concatenate([labels.numpy() for _, labels, _ in batches])
        wanted = {(0, 1, 1), (0, 0, 1), (1, 1, 1), (0, 0, 0)}
        assert labels.dtype == np.int32 and set(map(tuple, labels.tolist())) == wanted
        ((_, labels, weights),) = make_dataset(config.replace(batch_size=2), "validation")
        assert labels.numpy().tolist() == [[1, 0, 0]] and weights.numpy().tolist() == [1]


def test_metadata_has_all_labels_also_if_read_from_the_shards(prepared):
    manifest = read_manifest(prepared)
    rows = metadata.read_metadata(manifest, prepared, progress=False)
    places, classes = metadata.classes_in(rows)
    assert np.bincount(classes).tolist() == [2, 2, 3] and len(np.unique(places)) == 4
    assert sorted(rows["label"].tolist()) == [-1, 0, 0, 1, 2]
    (prepared / metadata.FILE).unlink()
    again = metadata.read_metadata(manifest, prepared, progress=False)
    np.testing.assert_array_equal(again["classes"], rows["classes"])


def test_the_page_counts_labels(prepared):
    write_page(prepared, progress=False)
    page = (prepared / "data.html").read_text()
    assert "several labels an image, 1.40 on average" in page
    assert "<td>3</td>" in page  # of dog


def test_equal_images_with_other_labels_are_told(make, tmp_path):
    path = make('image,label\na.png,"cat,dog"\nb.png,"cat,bird"\nc.png,"cat,dog"\n')
    for name in ("b.png", "c.png"):
        (path.parent / name).write_bytes((path.parent / "a.png").read_bytes())
    source = open_source("list", path, label_separator=",", holdout=0)
    assert any("1 image with other labels" in warning for warning in source.warnings)
    prepare(source, tmp_path / "data", progress=False)
    manifest = read_manifest(tmp_path / "data")
    rows = metadata.read_metadata(manifest, tmp_path / "data", progress=False)
    equal = find_duplicates(Images(manifest, rows, tmp_path / "data")).equal
    assert len(equal) == 2 and equal.two_classes.any()


def test_other_labels_are_another_data_set(make):
    first = open_source("list", make(SEPARATED), label_separator=",", holdout=0)
    other = open_source("list", make(SEPARATED.replace("cat,dog", "cat")), label_separator=",")
    assert first.describe()["fingerprint"] != other.describe()["fingerprint"]


def test_sampling_by_class_is_refused(prepared):
    config = Config(data_dir=str(prepared), sampling="balanced")
    with pytest.raises(UserError, match=r"sampling=balanced .* several labels: leave it out"):
        class_shares(config, read_info(config))


def test_images_without_labels_are_refused(make):
    path = make(SEPARATED.replace('"dog"', '""'))
    with pytest.raises(UserError, match=r"1 of 4 images without a label \(b.png, line 3\).*allow_"):
        open_source("list", path, label_separator=",")
    source = open_source("list", path, label_separator=",", allow_unlabelled=True, holdout=0)
    assert () in [source.read("train", index).label for index in range(4)]


@pytest.mark.parametrize(
    ("text", "suffix", "options", "message"),
    [
        (FLAGS, ".csv", {"label_columns": "bird,cow"}, "label_columns names 'cow', but has only"),
        (FLAGS, ".csv", {"label_columns": "bird,bird"}, "'bird' is used twice"),
        (FLAGS, ".csv", {"label_columns": "image"}, "'image' is used twice"),
        (FLAGS, ".csv", {"label_columns": "id,cat"}, "line 4: id is '2', but must be 0 or 1"),
        (FLAGS, ".csv", {"label_columns": "cat", "label_separator": ","}, "give one of them"),
        (SEPARATED, ".csv", {"allow_unlabelled": True}, "allow_unlabelled has no effect"),
        (LISTS.replace('"dog"', "1.5"), ".jsonl", {}, "labels has 1.5, but must have names"),
        (LISTS.replace('"dog"', r'"d\no"'), ".jsonl", {}, "not one line of text"),
        (FLAGS, ".csv", {"label_columns": "cat", "label_column": "dog"}, "give one of them"),
        (
            SEPARATED.replace('"cat,dog"', """"['cat', 'dog']\""""),
            ".csv",
            {"label_separator": ","},
            r"line 2: label is .*, a list in brackets, but must be only the names, with ','",
        ),
        (
            '{"image": "a.png", "labels": [1, 0, 1]}\n{"image": "b.png", "labels": [0, 1, 1]}\n',
            ".jsonl",
            {},
            "labels of each image are 3 values of 0 or 1, but must be the names or numbers",
        ),
        (LONG + "a.png,dog\n", ".csv", {"label_separator": ",", "group_column": "label"}, "image"),
    ],
)
def test_bad_lists(make, text, suffix, options, message):
    with pytest.raises(UserError, match=message):
        open_source("list", make(text, suffix), **options)


def test_a_class_without_training_images_is_told(make):
    text = "image,bird ,cat,dog\na.png,0,0,1\nb.png,0,0,1\n"
    source = open_source("list", make(text), label_columns="bird,cat,dog", holdout=0)
    assert source.labels == CLASSES
    (warning,) = (own for own in source.warnings if "no training image has" in own)
    assert "2 classes ('bird', 'cat')" in warning


def test_a_column_that_is_a_class_is_not_said_to_be_ignored(make):
    text = "image,group,cat\na.png,1,0\nb.png,0,1\n"
    warnings = open_source("list", make(text), label_columns="*", holdout=0).warnings
    assert not any("ignored" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("labels", "warning"),
    [
        (["c1|odd", "c2|even", "c3|odd"], "label_separator='|'"),
        (["1.5", "2", "2.25"], "labels are numbers such as 1.5"),
        (["1.0", "2.0"], None),
        (["Smith, John", "Doe, Jane"], None),
    ],
)
def test_single_labels_that_look_like_something_else(make, labels, warning):
    rows = "".join(f'{name},"{label}"\n' for name, label in zip(LABELS, labels))
    warnings = open_source("list", make(f"image,label\n{rows}"), holdout=0).warnings
    found = [own for own in warnings if "of its own" in own]
    assert len(found) == bool(warning) and all(warning in own for own in found)
