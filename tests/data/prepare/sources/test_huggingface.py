"""Data sets in Hugging Face's layouts, made by their own library or by hand."""

import io
import json
import os
import sys
import tarfile

import numpy as np
import pytest
from PIL import Image

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.prepare.sources import files, huggingface, huggingface_files, open_source

datasets = pytest.importorskip("datasets", reason="needs Hugging Face's datasets")
pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def png(number):
    file = io.BytesIO()
    Image.fromarray(np.full((4, 5, 3), number, np.uint8)).save(file, "PNG")
    return file.getvalue()


IMAGES = [png(number) for number in range(24)]
LABELS = [number % 3 for number in range(24)]
CLASSES = ["ant", "bee", "cat"]


def table(numbers, names=CLASSES):
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    rows = {
        "image": [{"bytes": IMAGES[number], "path": f"{number}.png"} for number in numbers],
        "label": [LABELS[number] for number in numbers],
    }
    return datasets.Dataset.from_dict(rows, features=features)


def found(source, split):
    return [tuple(source.read(split, index)) for index in range(source.splits[split])]


def expected(numbers):
    return [(IMAGES[number], LABELS[number], f"{number}.png") for number in numbers]


def parquet(folder):
    folder.mkdir()
    for name, numbers in (
        ("train-00000-of-00002", range(8)),
        ("train-00001-of-00002", range(8, 16)),
    ):
        table(numbers).to_parquet(folder / f"{name}.parquet")
    table(range(16, 20)).to_parquet(folder / "validation-00000-of-00001.parquet")
    table(range(20, 24)).to_parquet(folder / "test-00000-of-00001.parquet")


def saved(folder):
    parts = {"train": range(16), "val": range(16, 20), "test": range(20, 24)}
    datasets.DatasetDict({name: table(own) for name, own in parts.items()}).save_to_disk(folder)


def tars(folder):
    folder.mkdir()
    for split, numbers in (
        ("train", range(16)),
        ("validation", range(16, 20)),
        ("test", range(20, 24)),
    ):
        with tarfile.open(folder / f"{split}-000000.tar", "w") as tar:
            for number in numbers:
                add_sample(tar, number, "png")


def add_sample(tar, number, image_suffix):
    for suffix, content in ((image_suffix, IMAGES[number]), ("cls", b"%d" % LABELS[number])):
        info = tarfile.TarInfo(f"{number:03d}.{suffix}")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))


def class_folders(folder):
    for split, numbers in (
        ("train", range(16)),
        ("validation", range(16, 20)),
        ("test", range(20, 24)),
    ):
        for number in numbers:
            file = folder / split / CLASSES[LABELS[number]] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(IMAGES[number])


def with_metadata(folder):
    for split, numbers in (
        ("train", range(16)),
        ("validation", range(16, 20)),
        ("test", range(20, 24)),
    ):
        (folder / split).mkdir(parents=True)
        with (folder / split / "metadata.jsonl").open("w") as lines:
            for number in numbers:
                (folder / split / f"{number}.png").write_bytes(IMAGES[number])
                row = {"file_name": f"{number}.png", "label": CLASSES[LABELS[number]]}
                lines.write(json.dumps(row) + "\n")


@pytest.mark.parametrize("make", [parquet, saved, tars, class_folders, with_metadata])
def test_each_layout_gives_the_same_images(tmp_path, make):
    make(tmp_path / "insects")
    source = open_source("huggingface", tmp_path / "insects")
    assert (source.kind, source.name) == ("huggingface", "insects")
    assert source.labels == (tuple("012") if make is tars else tuple(CLASSES))
    for split, numbers in (
        ("train", range(16)),
        ("validation", range(16, 20)),
        ("test", range(20, 24)),
    ):
        images = {content: label for content, label, _ in found(source, split)}
        assert images == {content: label for content, label, _ in expected(numbers)}
    assert source.describe() == open_source("huggingface", tmp_path / "insects").describe()


def test_pictures_beside_tables_are_ignored(tmp_path):
    parquet(tmp_path / "own")
    for name in ("test.png", "train_a.png", "train_b.png", "train_c.png"):
        (tmp_path / "own" / name).write_bytes(IMAGES[0])
    source = open_source("huggingface", tmp_path / "own")
    assert source.splits == {"train": 16, "validation": 4, "test": 4}
    assert source.labels == tuple(CLASSES)


def test_other_columns_of_images_are_not_opened(tmp_path):
    """They may name any file, or any address."""
    images = [{"bytes": image, "path": None} for image in IMAGES[:4]]
    others = [{"bytes": None, "path": "/dev/ptmx"}] * 4
    features = datasets.Features(
        {"image": datasets.Image(), "mask": datasets.Image(), "label": datasets.Value("int64")}
    )
    rows = {"image": images, "mask": others, "label": [0, 1, 0, 1]}
    table = pyarrow.table(rows).replace_schema_metadata(features.arrow_schema.metadata)
    (tmp_path / "own").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "own" / "train.parquet")
    source = open_source("huggingface", tmp_path / "own", image_column="image", allow_outside=True)
    assert source.read("train", 0).image == IMAGES[0]
    assert set(source._rows["train"].features) == {"image"}


def test_names_with_several_dots_in_a_tar(tmp_path):
    """WebDataset would take most of them for other columns, and train on the rest."""
    (tmp_path / "own").mkdir()
    with tarfile.open(tmp_path / "own" / "train-0.tar", "w") as tar:
        add_sample(tar, 0, "png")
        add_sample(tar, 1, "5.png")
    with pytest.raises(UserError, match=r"'001.5.png' has several dots, .* example to 001_5.png"):
        open_source("huggingface", tmp_path / "own")


@pytest.mark.parametrize("first", [0, 8])  # the library looks at the first five samples
def test_tars_of_images_in_two_formats(tmp_path, first):
    (tmp_path / "own").mkdir()
    with tarfile.open(tmp_path / "own" / "train-0.tar", "w") as tar:
        for number in range(16):
            suffix = "jpg" if number >= first and number % 2 else "png"
            add_sample(tar, number, suffix)
    source = open_source("huggingface", tmp_path / "own")
    read = [*found(source, "train"), *found(source, "validation")]
    assert sorted((content, label) for content, label, _ in read) == sorted(
        zip(IMAGES[:16], LABELS)
    )


def test_part_of_each_class_is_held_out(tmp_path):
    (tmp_path / "one").mkdir()
    table(range(24)).to_parquet(tmp_path / "one" / "all.parquet")
    source = open_source("huggingface", tmp_path / "one", holdout=0.25)
    assert source.splits == {"train": 18, "validation": 6}
    assert sorted(label for _, label, _ in found(source, "validation")) == [0, 0, 1, 1, 2, 2]
    both = found(source, "train") + found(source, "validation")
    assert sorted(both) == sorted(expected(range(24)))


def test_columns_with_other_names_and_types(tmp_path):
    (tmp_path / "own").mkdir()
    rows = {"picture": IMAGES, "kind": [("x", "y")[label % 2] for label in LABELS]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "own" / "train.parquet")
    with pytest.raises(UserError, match="no image column with a usual name; it has 'picture', 'ki"):
        open_source("huggingface", tmp_path / "own")
    with pytest.raises(UserError, match="no column 'pictur'; did you mean 'picture'"):
        open_source("huggingface", tmp_path / "own", image_column="pictur")
    options = {"image_column": "picture", "label_column": "kind"}
    source = open_source("huggingface", tmp_path / "own", **options)
    assert source.labels == ("x", "y")
    images = {content: label for content, label, _ in found(source, "train")}
    assert images.items() <= {c: label % 2 for c, label in zip(IMAGES, LABELS)}.items()


def test_split_without_labels_is_ignored(tmp_path):
    (tmp_path / "own").mkdir()
    table(range(16)).to_parquet(tmp_path / "own" / "train.parquet")
    features = table([0]).features
    rows = {"image": [{"bytes": IMAGES[0], "path": None}], "label": [-1]}
    test = datasets.Dataset.from_dict(rows, features=features)
    test.to_parquet(tmp_path / "own" / "test.parquet")
    source = open_source("huggingface", tmp_path / "own")
    assert sorted(source.splits) == ["train", "validation"]
    assert "the split test is ignored: it has no labels" in source.warnings


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"image": [1, 2], "label": [0, 1]}, "column 'image' has int64, but must have images"),
        ({"image": IMAGES[:2], "label": [0, None]}, "row 1 of train has no 'label', or one that"),
        ({"image": IMAGES[:2], "label": [0.5, 1.5]}, "must have class labels, text, or integers"),
        ({"image": IMAGES[:2], "label": [-1, 1]}, "integers from 0"),
        ({"image": [], "label": []}, "cannot load it|no split 'train', or"),
    ],
)
def test_columns_of_the_wrong_type(tmp_path, rows, message):
    (tmp_path / "own").mkdir()
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "own" / "train.parquet")
    with pytest.raises(UserError, match=message):
        open_source("huggingface", tmp_path / "own")


def test_folders_that_are_not_data_sets(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        open_source("huggingface", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="Hugging Face's datasets cannot load it"):
        open_source("huggingface", tmp_path / "empty")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "train.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(UserError, match="Hugging Face's datasets cannot load it"):
        open_source("huggingface", tmp_path / "bad")
    saved_as = datasets.DatasetDict({"one": table(range(3)), "two": table(range(3))})
    saved_as.save_to_disk(tmp_path / "other")
    with pytest.raises(UserError, match="its splits are 'one', 'two', but must be train"):
        open_source("huggingface", tmp_path / "other")


def test_a_row_without_an_image_is_one_bad_image(tmp_path):
    (tmp_path / "own").mkdir()
    features = table([0]).features
    rows = {"image": [None, *({"bytes": own, "path": None} for own in IMAGES[1:9])]}
    rows["label"] = LABELS[:9]
    datasets.Dataset.from_dict(rows, features=features).to_parquet(
        tmp_path / "own" / "train.parquet"
    )
    source = open_source("huggingface", tmp_path / "own")
    assert b"" in [
        content for content, _, _ in found(source, "train") + found(source, "validation")
    ]


def test_splits_that_number_their_classes_differently(tmp_path):
    """What ``save_to_disk`` wrote keeps the class labels of each split."""
    other = table(range(16, 20), ["cat", "ant", "bee"])  # 0 is cat
    parts = {"train": table(range(16)), "validation": other}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    source = open_source("huggingface", tmp_path / "saved")
    read = found(source, "validation")
    names = [["cat", "ant", "bee"][LABELS[number]] for number in range(16, 20)]
    assert [source.labels[label] for _, label, _ in read] == names

    parts["validation"] = table(range(16, 20), ["owl", "ant", "bee"])
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "unknown")
    with pytest.raises(
        UserError, match="validation has the label 'owl', which is not a class: 'ant'"
    ):
        open_source("huggingface", tmp_path / "unknown")


def test_images_in_untyped_parquet(tmp_path):
    """As pandas and others write them again: bytes and a path, without the library's types."""
    (tmp_path / "plain").mkdir()
    rows = [{"bytes": IMAGES[number], "path": f"{number}.png"} for number in range(12)]
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    labels = [CLASSES[LABELS[number]] for number in range(12)]
    written = pyarrow.table({"image": pyarrow.array(rows, kind), "label": labels})
    pyarrow.parquet.write_table(written, tmp_path / "plain" / "train.parquet")
    source = open_source("huggingface", tmp_path / "plain")
    read = [*found(source, "train"), *found(source, "validation")]
    assert sorted(read, key=lambda own: int(own[2][:-4])) == expected(range(12))


def test_labels_that_are_not_class_indices(tmp_path):
    """Numbers of something else, which would take as many classes and all memory."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": [{"bytes": IMAGES[0], "path": None}] * 2, "label": [0, 10**9]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "far")
    with pytest.raises(UserError, match=r"'label' has the label 1000000000.*as text"):
        open_source("huggingface", tmp_path / "far")


def test_classes_that_differ_only_in_case_give_a_warning(tmp_path):
    table(range(12), ["ant", "Ant", "cat"]).save_to_disk(tmp_path / "alike")
    source = open_source("huggingface", tmp_path / "alike")
    assert any("'ant' and 'Ant'" in warning for warning in source.warnings)


def naming(folder, file):
    """Writes a table whose rows name a file."""
    folder.mkdir()
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    rows = pyarrow.array([{"bytes": None, "path": str(file)}] * 4, kind)
    table = pyarrow.table({"image": rows, "label": ["x", "x", "y", "y"]})
    pyarrow.parquet.write_table(table, folder / "train.parquet")


def test_rows_that_name_files_outside_of_the_folder(tmp_path):
    folder = tmp_path / "own"
    (tmp_path / "private.png").write_bytes(b"private")
    for file in (tmp_path / "private.png", folder / "../private.png", folder / "link.png"):
        naming(folder, file)
        (folder / "link.png").symlink_to("../private.png")
        source = open_source("huggingface", folder)
        with pytest.raises(UserError, match=r"own: row \d of train names .*give --allow_outside"):
            source.read("train", 0)
        source = open_source("huggingface", folder, allow_outside=True)
        assert source.read("train", 0).image == b"private"
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    naming(folder, folder / "own.png")
    (folder / "own.png").write_bytes(IMAGES[0])
    assert open_source("huggingface", folder).read("train", 0).image == IMAGES[0]
    (folder / "own.png").unlink()
    os.mkfifo(folder / "own.png")
    with pytest.raises(UserError, match=r"own.png: is not a regular file"):
        open_source("huggingface", folder).read("train", 0)


def test_links_in_the_hubs_cache(tmp_path):
    """There, all files of a snapshot are links."""
    snapshot, blobs = tmp_path / "data--x" / "snapshots" / "1f", tmp_path / "data--x" / "blobs"
    class_folders(snapshot)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.rglob("*.png"))):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    source = open_source("huggingface", snapshot)
    images = {content: label for content, label, _ in found(source, "train")}
    assert images == {content: label for content, label, _ in expected(range(16))}


@pytest.mark.parametrize("card", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "files",
    [
        "data_files: ../other/*.parquet",
        "data_files: [a.parquet, /etc/*.csv]",
        "data_files: [{split: train, path: [a.parquet, x/../../y]}]",
        "data_files: ~/x.parquet",
        "data_dir: ../other",
        "data_files: http://127.0.0.1:9/a.parquet",
        "data_files: zip://a::b",
    ],
)
def test_a_card_that_names_files_outside(tmp_path, card, files):
    folder = tmp_path / "own"
    parquet(folder)
    text = f"configs:\n- config_name: default\n  {files}\n"
    (folder / card).write_text(f"---\n{text}---\nHello" if card == "README.md" else text)
    advice = "" if "::" in files or "//" in files else ", or give --allow_outside if you know who"
    with pytest.raises(UserError, match=f"{card}: names .* not in its folder; correct it{advice}"):
        open_source("huggingface", folder)


def test_a_card_that_names_its_own_files(tmp_path):
    folder = tmp_path / "own"
    parquet(folder)
    (folder / "more").mkdir()
    (folder / "test-00000-of-00001.parquet").rename(folder / "more" / "last..parquet")
    (folder / "README.md").write_text(
        "---\nlicense: mit\nhomepage: https://example.org\nconfigs:\n- config_name: default\n"
        "  data_files:\n  - split: train\n    path: train-*\n  - split: validation\n"
        "    path: validation-*\n  - split: test\n    path: more/last..parquet\n---\n"
    )
    source = open_source("huggingface", folder)
    assert source.splits == {"train": 16, "validation": 4, "test": 4}


@pytest.mark.parametrize(
    "text",
    ["---\n[\n---\n", "---\nconfigs: 3\n---\n", "---\nconfigs: &a [*a]\n---\n", "---\n- 1\n---\n"],
)
def test_cards_that_are_damaged(tmp_path, text):
    parquet(tmp_path / "own")
    (tmp_path / "own" / "README.md").write_text(text)
    with pytest.raises(UserError, match=r"description cannot be read|cannot load it"):
        open_source("huggingface", tmp_path / "own")


def test_a_script_is_not_run(tmp_path):
    parquet(tmp_path / "own")
    (tmp_path / "own" / "own.py").write_text("raise SystemExit")
    with pytest.raises(UserError, match=r"own/own.py: may be run by old versions"):
        open_source("huggingface", tmp_path / "own")


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("dataset_dict.json", {"splits": ["train", "../other"]}),
        ("train/state.json", {"_data_files": [{"filename": "../../other/a.arrow"}]}),
        ("train/state.json", {"_data_files": [{"filename": "/a.arrow"}]}),
        ("dataset_dict.json", {"splits": 3}),
        ("dataset_dict.json", ["train"]),
        ("train/state.json", {"_data_files": [["a"]]}),
    ],
)
def test_saved_data_that_names_files_outside(tmp_path, file, change):
    saved(tmp_path / "own")
    path = tmp_path / "own" / file
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, **change} if isinstance(change, dict) else change))
    with pytest.raises(UserError, match=r"not in its folder|its description cannot be read"):
        open_source("huggingface", tmp_path / "own")


def test_offsets_in_an_arrow_file_that_lead_elsewhere(tmp_path):
    """The library maps the file and follows them."""
    datasets.DatasetDict({"train": table(range(16))}).save_to_disk(tmp_path / "own")
    (path,) = (tmp_path / "own" / "train").glob("*.arrow")
    content = bytearray(path.read_bytes())
    ends = np.cumsum([0, *(len(image) for image in IMAGES[:16])]).astype("<i4")
    place = content.index(ends.tobytes())
    content[place + 4 : place + 8] = (2**31 - 2**20).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"arrow: is damaged: .*Offset invariant failure"):
        open_source("huggingface", tmp_path / "own")
    path.write_bytes(content[:200])
    with pytest.raises(UserError, match=r"arrow: is damaged|cannot load it"):
        open_source("huggingface", tmp_path / "own")


def test_labels_of_other_types_in_another_split(tmp_path):
    image = [{"bytes": IMAGES[0], "path": None}]
    for label in ([[1]], [{"a": 1}], None):
        rows = {"image": image, **({} if label is None else {"label": label})}
        other = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
        name = str(label)
        datasets.DatasetDict({"train": table(range(16)), "validation": other}).save_to_disk(
            tmp_path / name
        )
        message = "validation has no column 'label'" if label is None else "has the label .* not a"
        with pytest.raises(UserError, match=message):
            open_source("huggingface", tmp_path / name)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits memory so")
def test_one_image_in_many_rows(tmp_path, monkeypatch):
    """A kilobyte that unpacks to a gigabyte: a dictionary of one value."""
    (tmp_path / "own").mkdir()
    names = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(np.zeros(1000, np.int32)), pyarrow.array([bytes(2**20)])
    )
    rows = pyarrow.table({"image": names, "label": ["x"] * 1000})
    pyarrow.parquet.write_table(rows, tmp_path / "own" / "train.parquet", compression="zstd")
    assert (tmp_path / "own" / "train.parquet").stat().st_size < 10_000
    monkeypatch.setattr(huggingface, "_MEMORY", 2**28)
    with pytest.raises(UserError, match=r"datasets cannot load it: .*alloc"):
        open_source("huggingface", tmp_path / "own")


def test_the_size_of_an_image_is_limited(tmp_path, monkeypatch):
    parquet(tmp_path / "own")
    source = open_source("huggingface", tmp_path / "own")
    monkeypatch.setattr(files, "MAX_IMAGE", 60)
    assert str(source.read("train", 0).image).endswith("bytes, more than the limit of 60")


def test_aliases_of_yaml_are_not_expanded():
    """Ten levels of ten aliases each would be 10**10 texts."""
    value = ["x"]
    for _ in range(10):
        value = [value] * 10
    assert huggingface_files._texts({"data_files": value, "split": "train"}) == {"x", "train"}
    value.append(value)
    assert huggingface_files._texts(value) == {"x"}


@pytest.mark.parametrize("zeros", ["0", ""])
def test_labels_that_would_lose_their_zeros(tmp_path, zeros):
    rows = "".join(f"{number}.png,{zeros}{number}\n" for number in range(3))
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    (tmp_path / "metadata.csv").write_text(f"file_name,label\n{rows}")
    if not zeros:
        source = open_source("huggingface", tmp_path, holdout=0)
        assert source.labels == ("0", "1", "2")
        return
    with pytest.raises(UserError, match="label '00' would be read as a number, without its zeros"):
        open_source("huggingface", tmp_path)


def test_no_validation_images_give_a_warning(tmp_path):
    table(range(24)).to_parquet(tmp_path / "all.parquet")
    source = open_source("huggingface", tmp_path, holdout=0)
    assert any("there are no validation images" in text for text in source.warnings)


# --- Several labels -------------------------------------------------------------------------------


def several(folder, column, kind):
    features = datasets.Features({"image": datasets.Image(), **kind})
    rows = {"image": [{"bytes": IMAGES[n], "path": f"{n}.png"} for n in range(6)], **column}
    folder.mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "train.parquet")
    return folder


TEXTS = [["ant", "cat"], ["bee"], ["cat"], ["ant", "bee", "cat"], ["bee"], ["ant"]]
SEVERAL = [(0, 2), (1,), (2,), (0, 1, 2), (1,), (0,)]
FLAGS = {name: [int(name in own) for own in TEXTS] for name in CLASSES}


@pytest.mark.parametrize(
    ("column", "kind", "options"),
    [
        (
            {"labels": SEVERAL},
            {"labels": datasets.Sequence(datasets.ClassLabel(names=CLASSES))},
            {},
        ),
        ({"labels": TEXTS}, {"labels": datasets.Sequence(datasets.Value("string"))}, {}),
        (
            {"label": ["|".join(own) for own in TEXTS]},
            {"label": datasets.Value("string")},
            {"label_separator": "|"},
        ),
        (FLAGS, dict.fromkeys(CLASSES, datasets.Value("int64")), {"label_columns": "*"}),
    ],
)
def test_several_labels(tmp_path, column, kind, options):
    folder = several(tmp_path / "data", column, kind)
    source = open_source("huggingface", folder, holdout=0, **options)
    assert source.multi_label and list(source.labels) == CLASSES
    assert [item[1] for item in found(source, "train")] == SEVERAL


def test_rows_without_labels(tmp_path):
    kind = {"labels": datasets.Sequence(datasets.Value("string"))}
    folder = several(tmp_path / "data", {"labels": [[], *TEXTS[1:]]}, kind)
    with pytest.raises(UserError, match=r"1 of 6 images without a label \(row 0 of train\)"):
        open_source("huggingface", folder)
    assert open_source("huggingface", folder, allow_unlabelled=True).multi_label
    with pytest.raises(UserError, match="has no effect"):
        kind = {"label": datasets.Value("string")}
        single = several(tmp_path / "single", {"label": list("aabbaa")}, kind)
        open_source("huggingface", single, allow_unlabelled=True)


@pytest.mark.parametrize(
    ("column", "kind", "options", "message"),
    [
        (
            [[0, None], *SEVERAL[1:]],
            datasets.Sequence(datasets.ClassLabel(names=CLASSES)),
            {},
            r"row 0 of train has the label None, which is not in 0\.\.2",
        ),
        (
            [[int(name in own) for name in CLASSES] for own in TEXTS],
            datasets.Sequence(datasets.Value("int64")),
            {},
            "labels of each image are 3 values of 0 or 1",
        ),
        (
            [0, 1, 2, 0, 1, 2],
            datasets.ClassLabel(names=CLASSES),
            {"label_separator": ","},
            "has class labels, one for each image, but label_separator is for text",
        ),
    ],
)
def test_bad_labels_of_several(tmp_path, column, kind, options, message):
    folder = several(tmp_path / "data", {"labels": column}, {"labels": kind})
    with pytest.raises(UserError, match=message):
        open_source("huggingface", folder, **options)
