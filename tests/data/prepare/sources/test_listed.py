"""Lists of images and labels."""

import json
import os
from collections import Counter

import pytest
from PIL import Image

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.prepare import plan as prepare_plan
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import ListedFile, listed, open_source


@pytest.fixture
def make(tmp_path):
    """Writes a list and images of which each holds its name: make(text, suffix, *names)."""

    def write(text, *names, suffix=".csv", encoding="utf-8"):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(name.encode())
        path = tmp_path / f"photos{suffix}"
        path.write_text(text, encoding=encoding)
        return path

    return write


def items(source, split):
    return [tuple(source.read(split, index)) for index in range(source.splits[split])]


CSV = """image,label,split
b.jpg,dog,train
deep/a.png,cat,train
v.jpg,dog,val
t.jpg,cat,test
"""
NAMES = ("b.jpg", "deep/a.png", "v.jpg", "t.jpg")
TSV = CSV.replace(",", "\t")
LINES = "".join(
    json.dumps(dict(zip(("image", "label", "split"), line.split(",")))) + "\n"
    for line in CSV.splitlines()[1:]
)


@pytest.mark.parametrize(
    ("suffix", "text"), [(".csv", CSV), (".TSV", TSV), (".jsonl", LINES), (".ndjson", LINES)]
)
def test_each_kind_of_list_gives_the_same_images(make, suffix, text):
    path = make(text, "b.jpg", "deep/a.png", "v.jpg", "t.jpg", suffix=suffix)
    source = open_source("list", path)
    assert (source.kind, source.name, source.labels) == ("list", "photos", ("cat", "dog"))
    assert items(source, "train") == [(b"b.jpg", 1, "b.jpg"), (b"deep/a.png", 0, "deep/a.png")]
    assert items(source, "validation") == [(b"v.jpg", 1, "v.jpg")]
    assert items(source, "test") == [(b"t.jpg", 0, "t.jpg")]


def test_custom_columns_and_image_dir(make, tmp_path):
    names = [f"images/{number}.jpg" for number in range(20)]
    rows = "".join(f"{number}.jpg,{number % 2},x\n" for number in range(20))
    path = make(f"id,kind,other\n{rows}", *names)
    options = {"image_column": "id", "label_column": "kind", "image_dir": str(tmp_path / "images")}
    source = open_source("list", path, **options)
    assert source.splits == {"train": 18, "validation": 2}
    found = items(source, "train") + items(source, "validation")
    assert sorted(name for _, _, name in found) == sorted(f"{number}.jpg" for number in range(20))
    assert all(int(name[:-4]) % 2 == label for _, label, name in found)
    other = open_source("list", path, seed=1, **options)
    assert items(other, "validation") != items(source, "validation")
    assert other.describe() != source.describe()


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        (["10", "9", "1"], ("1", "9", "10")),
        (["10", "9", "x"], ("10", "9", "x")),
        (["-1", "3", "-2"], ("-2", "-1", "3")),
        (["2", "10", "1" * 5000], ("10", "1" * 5000, "2")),
        (["b", "B", "a"], ("B", "a", "b")),
    ],
)
def test_order_of_the_classes(make, values, labels):
    names = [f"{number}.jpg" for number in range(3)]
    rows = "".join(f"{name},{value}\n" for name, value in zip(names, values))
    source = open_source("list", make(f"path,class\n{rows}", *names), holdout=0.5)
    assert source.labels == labels


def test_one_column_for_images_and_labels(make):
    with pytest.raises(UserError, match="column 'image' cannot be that of the images and"):
        open_source("list", make(CSV, "b.jpg"), label_column="image")


def test_json_numbers_are_labels(make):
    text = '{"file_name": "a.jpg", "label": 3}\n\n{"file_name": "b.jpg", "label": 11}\n'
    source = open_source("list", make(text, "a.jpg", "b.jpg", suffix=".jsonl"))
    assert source.labels == ("3", "11")


def test_a_byte_order_mark_quotes_and_an_absolute_path(make, tmp_path):
    (tmp_path / "else where").mkdir()
    (tmp_path / "else where" / "a,b.jpg").write_bytes(b"x")
    text = f'image,label\n"{tmp_path}/else where/a,b.jpg","a ""dog"""\n'
    source = open_source("list", make(text, encoding="utf-8-sig"))
    assert source.labels == ('a "dog"',)
    assert items(source, "train")[0][:2] == (b"x", 0)


def test_repeated_lines_stay_and_are_in_one_split(make):
    """For example to see images of a rare class more often."""
    common = [f"common/{number}.jpg" for number in range(36)]
    rare = [f"rare/{number}.jpg" for number in range(12)]
    rows = [f"{name},{name.partition('/')[0]}\n" for name in (*common, *9 * rare)]
    source = open_source("list", make(f"image,label\n{''.join(rows)}", *common, *rare))
    assert source.splits == {"train": 32 + 9 * 11, "validation": 4 + 9}
    counts = {
        split: Counter(item[2] for item in items(source, split))
        for split in ("train", "validation")
    }
    assert not counts["train"].keys() & counts["validation"].keys()
    assert {(name[:4], count) for own in counts.values() for name, count in own.items()} == {
        ("comm", 1),
        ("rare", 9),
    }
    assert (
        "96 lines of photos.csv with an image that is listed before: it is in the data"
        in (source.warnings[0])
    )


def test_repeated_lines_are_prepared_and_resume(make, tmp_path):
    rows = "".join(f"{name}.jpg,{name}\n" for name in "aaabbc")
    path = make(f"image,label\n{rows}")
    for name in "abc":
        Image.new("L", (9, 9), ord(name)).save(tmp_path / f"{name}.jpg")
    source = open_source("list", path, holdout=0)
    directory = tmp_path / "data"
    manifest = prepare(source, directory, train_shards=2, progress=False)
    assert manifest.splits["train"].class_counts == (3, 2, 1)
    content = {file.name: file.read_bytes() for file in directory.iterdir()}
    (directory / "train-00001-of-00002").unlink()
    prepare(open_source("list", path, holdout=0), directory, train_shards=2, progress=False)
    assert content == {file.name: file.read_bytes() for file in directory.iterdir()}


def test_spaces_before_quotes(make):
    source = open_source("list", make('image, label\na.jpg, "x"\n', "a.jpg"))
    assert source.labels == ("x",)


def test_a_copy_that_is_added_goes_to_the_split_of_the_first(make):
    old = {"train": [ListedFile(f"{n}.jpg", 0, 1) for n in range(9)]}
    held_out = ListedFile("9.jpg", 0, 1)
    assignment = {
        "train-00000-of-00001": old["train"],
        "validation-00000-of-00001": [held_out],
    }
    copies = [image._replace(copy=1) for image in (*old["train"], held_out)]
    now = {"train": [*old["train"][1:], held_out, *copies], "validation": [old["train"][0]]}
    updated = prepare_plan.update(assignment, now, set())
    names = {split: {image.file for image in images} for split, images in updated.items()}
    assert not set.intersection(*names.values())
    assert sorted(map(len, updated.values())) == [2, 18]


def test_the_same_file_under_another_path(make, tmp_path):
    path = make("image,label\na.jpg,x\n./a.jpg,x\nsub/../b.jpg,y\n", "a.jpg", "b.jpg", "sub/c.jpg")
    source = open_source("list", path)
    names = [name for _, _, name in items(source, "train")]
    assert sorted(names) == ["a.jpg", "a.jpg", "sub/../b.jpg"]
    text = "image,label\nb.jpg,x\nsub/../b.jpg,y\n"
    with pytest.raises(UserError, match="but 'y' in train in line 3"):
        open_source("list", make(text))
    text = f"image,label,split\na.jpg,x,train\n{tmp_path / 'a.jpg'},x,test\n"
    with pytest.raises(UserError, match="but 'x' in test in line 3"):
        open_source("list", make(text))


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_another_separator_is_told(make, delimiter):
    source = open_source("list", make(CSV.replace(",", delimiter), *NAMES))
    assert source.labels == ("cat", "dog")
    assert f"photos.csv: its columns are separated by {delimiter!r}" in source.warnings


def test_the_separator_is_the_one_that_makes_known_names(make):
    text = "image;label;width, in pixels\nb.jpg;dog;8\ndeep/a.png;cat;9\n"
    source = open_source("list", make(text, *NAMES))
    assert items(source, "train") == [(b"b.jpg", 1, "b.jpg"), (b"deep/a.png", 0, "deep/a.png")]
    text = "picture;kind;width, in pixels\nb.jpg;dog;8\n"
    columns = {"image_column": "picture", "label_column": "kind"}
    assert open_source("list", make(text, *NAMES), **columns).labels == ("dog",)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_first_line_that_names_the_separator(make, mark):
    text = f"sep={mark}\r\n" + CSV.replace(",", mark)
    assert open_source("list", make(text, *NAMES)).labels == ("cat", "dog")
    with pytest.raises(UserError, match=r"no\.jpg, line 3"):
        open_source("list", make(f"sep={mark}\nimage{mark}label\nno.jpg{mark}dog\n", *NAMES))


def test_a_name_that_is_too_long_is_missing_in_its_line(make):
    with pytest.raises(UserError, match=r"1 of 2 files missing in .*line 3"):
        open_source("list", make(f"image,label\nb.jpg,dog\n{300 * 'x'}.jpg,dog\n", *NAMES))


def test_columns_in_another_case(make):
    source = open_source("list", make(CSV.replace("image,label", "Filename,Class "), *NAMES))
    assert items(source, "train") == [(b"b.jpg", 1, "b.jpg"), (b"deep/a.png", 0, "deep/a.png")]
    both = "IMAGE,image,label\nz.jpg,b.jpg,x\n"
    assert items(open_source("list", make(both)), "train") == [(b"b.jpg", 0, "b.jpg")]


def test_names_without_a_suffix(make):
    """As of Kaggle's lists."""
    text = CSV.replace(".jpg", "").replace(".png", "")
    source = open_source("list", make(text, *NAMES))
    assert items(source, "train") == [(b"b.jpg", 1, "b.jpg"), (b"deep/a.png", 0, "deep/a.png")]
    (note,) = (own for own in source.warnings if "without a suffix" in own)
    assert "without a suffix, or in another case: b is b.jpg, deep/a is deep/a.png" in note
    with pytest.raises(UserError, match=r"1 of 4 files missing .*b, line 2\); add them"):
        open_source("list", make(text, "b.png"))  # which of two is meant is unknown


def test_names_in_another_case(make):
    text = CSV.replace("b.jpg", "B.JPG").replace("a.png", "A.png")
    source = open_source("list", make(text, *NAMES))
    assert items(source, "train") == [(b"b.jpg", 1, "b.jpg"), (b"deep/a.png", 0, "deep/a.png")]


def test_labels_that_may_mean_that_none_is_known(make):
    warnings = open_source("list", make(CSV.replace("dog", "NA"), *NAMES)).warnings
    assert any(own.startswith("'NA' are classes: remove their images if") for own in warnings)


def test_backslashes(make):
    source = open_source("list", make(CSV.replace("deep/", "deep\\"), *NAMES))
    assert items(source, "train") == [(b"b.jpg", 1, "b.jpg"), (b"deep/a.png", 0, "deep/a.png")]
    assert r"photos.csv has paths with backslashes: deep\a.png" in source.warnings


def of_patients(make, header="image,label,patient", split=""):
    names = [f"{patient}_{number}.jpg" for patient in "abcdefgh" for number in range(5)]
    lines = [f"{name},{'ill' if name < 'e' else 'well'},{name[0]}{split}" for name in names]
    return make("\n".join([header, *lines, ""]), *names)


def test_images_of_a_group_are_in_one_split(make):
    source = open_source("list", of_patients(make), group_column="Patient", holdout=0.25)
    patients = {
        split: {name[0] for *_, name in items(source, split)} for split in ("train", "validation")
    }
    assert (
        len(patients["validation"] & set("abcd")) == len(patients["validation"] - set("abcd")) == 1
    )
    assert patients["train"] == set("abcdefgh") - patients["validation"]
    assert source.warnings == ()


def test_a_column_of_groups_that_is_not_used(make):
    source = open_source("list", of_patients(make), holdout=0.25)
    assert source.warnings == (
        "photos.csv: 'patient' is ignored: images of one patient may be in both splits, where they "
        "make accuracy look better; --group_column=patient keeps them in one",
    )


def test_a_group_in_two_splits(make):
    text = "image,label,video,split\na.jpg,x,1,train\nb.jpg,x,1,val\nc.jpg,x,2,train\n"
    path = make(text, "a.jpg", "b.jpg", "c.jpg")
    assert open_source("list", path).warnings == ()
    with pytest.raises(UserError, match="group '1' is in train in line 2, but in validation in li"):
        open_source("list", path, group_column="video")


def test_an_image_of_two_groups(make):
    path = make("image,label,video\na.jpg,x,1\nb.jpg,x,2\n./a.jpg,x,2\n", "a.jpg", "b.jpg")
    with pytest.raises(UserError, match="of the group '1' in line 2, but of '2' in line 4; keep"):
        open_source("list", path, group_column="video")


def test_new_images_of_a_group_go_where_the_others_are():
    known = ListedFile("a1.jpg", 0, 5, group="a"), ListedFile("b1.jpg", 0, 5, group="b")
    new = ListedFile("a2.jpg", 0, 5, group="a"), ListedFile("b2.jpg", 0, 5, group="b")
    train, validation = "train-00000-of-00001", "validation-00000-of-00001"
    before = {train: [known[0]], validation: [known[1]]}
    # Drawn anew, the groups are in the other splits.
    files = {"train": [known[1], new[1]], "validation": [known[0], new[0]]}
    after = prepare_plan.update(before, files, ())
    assert after == {train: [known[0], new[0]], validation: [known[1], new[1]]}


def test_an_image_of_no_group(make):
    path = make("image,label,video\na.jpg,x,1\nb.jpg,x,\n", "a.jpg", "b.jpg")
    with pytest.raises(UserError, match="line 3: video is '', but must be one line of text"):
        open_source("list", path, group_column="video")
    with pytest.raises(UserError, match="has no column 'vidoe'; did you mean 'video'"):
        open_source("list", path, group_column="vidoe")


def test_one_missing_file_of_many(make):
    names = [f"{number}.jpg" for number in range(41)]
    rows = "".join(f"{name},x\n" for name in names)
    with pytest.raises(UserError, match=r"1 of 41 files missing .*40.jpg, line 42\); add them, or"):
        open_source("list", make(f"image,label\n{rows}", *names[:-1]))


@pytest.mark.parametrize(
    ("labels", "warning"),
    [
        (["cat", "cat|dog", "dog"], "1 label of several classes, such as 'cat|dog'"),
        (["c1", '"c1,odd"', "c2"], "1 label of several classes, such as 'c1,odd'"),
        (["1.5", "2.25"], "the labels are numbers such as 1.5: each is a class of its own"),
        (['"Smith, John"', '"Doe, Jane"'], None),
        (["1", "2"], None),
    ],
)
def test_labels_that_are_no_single_classes(make, labels, warning):
    names = [f"{number}.jpg" for number in range(len(labels))]
    rows = "".join(f"{name},{label}\n" for name, label in zip(names, labels))
    warnings = open_source("list", make(f"image,label\n{rows}", *names)).warnings
    found = [own for own in warnings if "of its own" in own]
    assert len(found) == bool(warning) and all(own.startswith(warning) for own in found)


def test_problems_give_warnings(make):
    text = "image,label,split\na.jpg,Dog,train\nb.jpg,dog,train\nc.jpg,dog,valid\n"
    path = make(text, "a.jpg", "b.jpg", "c.jpg")
    warnings = open_source("list", path).warnings
    assert any("differ only in case" in own and "'Dog' and 'dog'" in own for own in warnings)
    assert any("accuracy of 1 class (" in own for own in warnings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no image"),
        ("image,label\n", "lists no image"),
        (
            "a.jpg,x\nb.jpg,y\n",
            r"no column image or .*; it has 'a.jpg', 'x': give .*--image_column",
        ),
        ("image,kind\na.jpg,x\n", r"no column label or class .*--label_column"),
        ("image,label\na.jpg,x,y\n", "line 2: has more values than columns"),
        ("image,label\na.jpg\n", "line 2: label is missing, but must be text"),
        ("image,label\na.jpg,\n", "line 2: label is '', but must be one line of text"),
        (
            "image,label\na.jpg,x\n\nz.jpg,x\n",
            r"1 of 2 files missing in .*z.jpg, line 4.*image_dir",
        ),
        ("image,label\na.jpg,x\na.jpg,y\n", "a.jpg is 'x' in train in line 2, but 'y' in train"),
        ("image,label,split\na.jpg,x,train\na.jpg,x,val\n", "but 'x' in validation in line 3"),
        ("image,label,split\na.jpg,x,rest\n", "line 2: split is 'rest', but must be one of train"),
        ("image,label,split\na.jpg,x,val\n", "has no training images"),
        (
            "image,label,split\na.jpg,dog,train\nb.jpg,dg,val\n",
            r"1 class of validation without training images \('dg'\); did you mean 'dog'",
        ),
        ('image,label\n"a.jpg,x\n', "cannot be read as CSV"),
        ("image,label,image\na,0,b", "has two columns 'image'; rename one of them"),
    ],
)
def test_bad_lists(make, text, message):
    with pytest.raises(UserError, match=message):
        open_source("list", make(text, "a.jpg", "b.jpg"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: is not JSON"),
        ("[1]", "line 1: is not a JSON object"),
        ('{"image": "a.jpg", "label": null}', "line 1: label is missing"),
        ('{"image": ["a.jpg"], "label": "x"}', r'line 1: image is \["a.jpg"\], but must be text'),
        ('{"image": "a.jpg", "label": true}', "line 1: label is true"),
        ('{"image": "a.jpg", "label": "x"}\n{"label": "x"}', "line 2: image is missing"),
        (
            '{"image": "a.jpg", "label": "x"}\n{"image": "b.jpg", "label": "x", "split": "test"}',
            "line 2: has 'split', which the first line lacks",
        ),
        (
            r'{"image": "a.jpg", "label": "\ud83d"}',
            r"class 0 is named '\\ud83d', which is not one line of text",
        ),
        ("[" * 100_000, "line 1: is not JSON"),
    ],
)
def test_bad_json_lines(make, text, message):
    with pytest.raises(UserError, match=message):
        open_source("list", make(text, "a.jpg", suffix=".jsonl"))


def test_files_that_are_not_lists(make, tmp_path):
    with pytest.raises(UserError, match=r"the name of a list must end in one of \.csv"):
        open_source("list", make("", suffix=".txt"))
    with pytest.raises(UserError, match="cannot be read: No such file"):
        open_source("list", tmp_path / "none.csv")
    with pytest.raises(UserError, match="is not in UTF-8"):
        open_source("list", make("image,label\na.jpg,\xfc\n", "a.jpg", encoding="latin-1"))
    with pytest.raises(UserError, match="has no column 'labl'; did you mean 'label'"):
        open_source("list", make("image,label\na.jpg,x\n", "a.jpg"), label_column="labl")
    with pytest.raises(UserError, match=r"must be in \[0, 1\)"):
        open_source("list", make("image,label\na.jpg,x\n", "a.jpg"), holdout=1.5)


@pytest.fixture
def private(tmp_path):
    """A file outside of the list's folder, and links to it: from there, and of a folder."""
    folder = tmp_path / "set"
    folder.mkdir()
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "p.jpg").write_bytes(b"private")
    (folder / "link.jpg").symlink_to("../private/p.jpg")
    (folder / "links").symlink_to("../private")
    for name in ("a.jpg", "b.jpg"):
        (folder / name).write_bytes(name.encode())
    (folder / "own.jpg").symlink_to("a.jpg")
    return folder


@pytest.mark.parametrize(
    "file",
    [
        "../private/p.jpg",
        "{0}/private/p.jpg",
        "link.jpg",
        "links/p.jpg",
        "links/../set/../private/p.jpg",
    ],
)
def test_files_outside_of_the_lists_folder(private, file):
    file = file.format(private.parent)
    path = private / "list.csv"
    path.write_text(f"image,label\n{file},x\na.jpg,x\nb.jpg,y\n")
    with pytest.raises(UserError) as caught:
        open_source("list", path)
    assert str(caught.value) == (
        f"{path}: 1 of 3 files outside of {private} ({file}, line 2); give --allow_outside if you "
        "know who made the list, or the directory of all images with --image_dir"
    )
    source = open_source("list", path, allow_outside=True)
    assert b"private" in [image for image, _, _ in items(source, "train")]


def test_the_images_folder_bounds_what_is_outside(private):
    path = private / "list.csv"
    path.write_text(f"image,label\n{private.parent}/private/p.jpg,x\n{private}/a.jpg,y\n")
    source = open_source("list", path, image_dir=str(private.parent))
    assert source.splits["train"] + source.splits["validation"] == 2
    with pytest.raises(UserError, match=f"1 of 2 files outside of {private.parent}/private"):
        open_source("list", path, image_dir=str(private.parent / "private"))


def test_links_within_the_folder_and_links_to_it_are_inside(private):
    (private / "list.csv").write_text("image,label\nown.jpg,x\nb.jpg,y\n")
    (private.parent / "other").symlink_to("set")
    for folder in (private, private.parent / "other"):
        assert open_source("list", folder / "list.csv").labels == ("x", "y")
        assert open_source("list", private / "list.csv", image_dir=str(folder)).labels


@pytest.mark.parametrize("name", ["list.csv", "list.jsonl"])
def test_a_pipe_does_not_block(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=f"{name}: is not a regular file"):
        open_source("list", tmp_path / name)


def test_a_pipe_as_an_image_does_not_block(make, tmp_path):
    os.mkfifo(tmp_path / "a.jpg")
    with pytest.raises(UserError, match="1 of 2 files missing"):
        open_source("list", make("image,label\na.jpg,x\nb.jpg,y\n", "b.jpg"))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_the_length_of_a_line_is_limited(make, monkeypatch, suffix):
    monkeypatch.setattr(listed, "_MAX_LINE", 40)
    text = CSV if suffix == ".csv" else LINES
    path = make(text.replace("t.jpg", "t.jpg" * 20), suffix=suffix)
    with pytest.raises(UserError, match=r"line \d: has more than 40 characters"):
        open_source("list", path)


def test_many_columns(make):
    """Looking for equal names must not take the square of their number."""
    with pytest.raises(UserError, match="has no column image or"):
        open_source("list", make(",".join(map(str, range(100_000))) + "\n1\n"))


@pytest.mark.parametrize("name", [r"a\u0000b", r"\ud83d.jpg", r"\u001b[31m.jpg"])
def test_names_that_no_file_can_have(make, name):
    text = f'{{"image": "{name}", "label": "x"}}\n'
    with pytest.raises(UserError, match="1 of 1 file missing") as caught:
        open_source("list", make(text, suffix=".jsonl"))
    str(caught.value).encode()
