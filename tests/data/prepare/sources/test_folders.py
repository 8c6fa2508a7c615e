import os
import re

import pytest
from PIL import Image

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import files, open_source


def write(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def items(source, split):
    return [source.read(split, index) for index in range(source.splits[split])]


@pytest.mark.parametrize("folder", ["validation", "val", "valid", "dev"])
def test_two_folders_of_class_folders(tmp_path, folder):
    write(
        tmp_path,
        "train/dog/b.jpg",
        "train/dog/a.JPEG",
        "train/dog/c.JFIF",
        "train/ant/x.png",
        "train/ant/deeper/y.webp",
        "train/ant/notes.txt",
        "train/.hidden/z.jpg",
        "train/ant/.thumbnail.jpg",
        "train/ant/.ipynb_checkpoints/x.jpg",
        f"{folder}/dog/c.bmp",
    )
    source = open_source("folders", tmp_path)
    assert source.labels == ("ant", "dog")
    assert items(source, "train") == [
        (b"train/ant/deeper/y.webp", 0, "train/ant/deeper/y.webp"),
        (b"train/ant/x.png", 0, "train/ant/x.png"),
        (b"train/dog/a.JPEG", 1, "train/dog/a.JPEG"),
        (b"train/dog/b.jpg", 1, "train/dog/b.jpg"),
        (b"train/dog/c.JFIF", 1, "train/dog/c.JFIF"),
    ]
    assert items(source, "validation") == [
        (f"{folder}/dog/c.bmp".encode(), 1, f"{folder}/dog/c.bmp")
    ]


def test_images_are_recognized_by_suffix(tmp_path):
    kinds = ["jpg", "jpeg", "jpe", "jfif", "png", "gif", "bmp", "webp", "tif", "TIFF"]
    kinds += ["ppm", "pgm", "pnm", "avif", "jp2", "J2K"]
    write(tmp_path, *(f"train/a/1.{kind}" for kind in kinds), "val/a/1.jpg", "train/a/1.txt")
    source = open_source("folders", tmp_path)
    assert sorted(name for name, _, _ in items(source, "train")) == sorted(
        f"train/a/1.{kind}".encode() for kind in kinds
    )


@pytest.mark.parametrize("folder", ["val", ""])
def test_test_folder_is_the_test_split(tmp_path, folder):
    write(tmp_path, *(f"train/a/{index}.jpg" for index in range(10)), "test/a/2.jpg")
    if folder:
        write(tmp_path, f"{folder}/a/3.jpg")
    source = open_source("folders", tmp_path)
    assert source.splits == {"train": 10 if folder else 9, "validation": 1, "test": 1}
    assert items(source, "test") == [(b"test/a/2.jpg", 0, "test/a/2.jpg")]
    (name,) = (item.filename for item in items(source, "validation"))
    assert name.startswith("val/" if folder else "train/")


@pytest.mark.parametrize("name", ["1.jpg", "unknown/1.jpg"])
def test_test_images_without_labels_are_ignored(tmp_path, name):
    write(tmp_path, "train/a/1.jpg", "val/a/2.jpg", f"test/{name}")
    source = open_source("folders", tmp_path)
    assert list(source.splits) == ["train", "validation"]
    warning, _ = source.warnings  # The other is that of a single class.
    assert warning == (
        f"{tmp_path}/test is ignored: it has none of the class folders of {tmp_path}/train"
    )


def test_a_single_class_gives_a_warning(tmp_path):
    write(tmp_path, "photos/cats/1.jpg", "photos/dogs/2.jpg")
    assert (
        "there is only one class, photos: the folders of the classes must be directly in "
        f"{tmp_path}"
    ) in open_source("folders", tmp_path).warnings


def test_images_outside_of_class_folders_give_a_warning(tmp_path):
    write(tmp_path, "train/a/1.jpg", "val/a/2.jpg", *(f"train/{index}.JPG" for index in range(7)))
    warning, _ = open_source("folders", tmp_path).warnings
    assert warning == (
        "images outside of class folders are ignored: train/0.JPG, train/1.JPG, train/2.JPG, "
        "train/3.JPG, train/4.JPG and 2 more"
    )


def test_two_folders_for_validation(tmp_path):
    write(tmp_path, "train/a/1.jpg", "val/a/2.jpg", "dev/a/3.jpg")
    with pytest.raises(UserError, match=r"/val and .*/dev: both names mean validation; keep one"):
        open_source("folders", tmp_path)


def test_classes_that_differ_only_in_case_or_accents_give_a_warning(tmp_path):
    write(tmp_path, *(f"{name}/1.jpg" for name in ("Cat", "cat", "caf\u00e9", "cafe\u0301", "dog")))
    warning = open_source("folders", tmp_path).warnings[0]
    assert warning.startswith("classes differ only in case, spaces or the encoding of accents ")
    assert "'Cat' and 'cat'" in warning and "'dog'" not in warning
    assert "'cafe\u0301' and 'caf\u00e9'" in warning


def test_images_in_several_classes_give_a_warning(tmp_path):
    write(tmp_path, *(f"train/{label}/{index}.jpg" for label in "ab" for index in range(3)))
    write(tmp_path, "val/a/1.jpg", "val/b/1.jpg")
    assert open_source("folders", tmp_path).warnings == ()
    (tmp_path / "train/b/copy.jpg").write_bytes(b"train/a/0.jpg")
    (tmp_path / "val/b/link.jpg").symlink_to("../../train/a/2.jpg")
    (tmp_path / "train/a/same class.jpg").write_bytes(b"train/a/1.jpg")
    (warning,) = open_source("folders", tmp_path).warnings
    assert warning == (
        "2 images in more than one class: train/a/0.jpg and train/b/copy.jpg, "
        "train/a/2.jpg and val/b/link.jpg"
    )


def test_comparison_of_files_is_limited(tmp_path, monkeypatch):
    write(tmp_path, "a/1.jpg", "b/1.jpg")
    (tmp_path / "b/2.jpg").write_bytes(b"a/1.jpg")
    for limit, found in ((20, False), (21, True)):
        monkeypatch.setattr(files, "_COMPARED", limit)
        warnings = open_source("folders", tmp_path).warnings
        assert any("more than one class" in own for own in warnings) == found


@pytest.mark.parametrize("prefix", ["", "train/"])
def test_part_of_each_class_is_held_out_without_a_validation_folder(tmp_path, prefix):
    names = [f"{prefix}{label}/{index}.jpg" for label in ("a", "b") for index in range(10)]
    write(tmp_path, *names)
    source = open_source("folders", tmp_path, holdout=0.2, name="mine")
    assert source.name == "mine"
    train, validation = items(source, "train"), items(source, "validation")
    assert [item.label for item in validation] == [0, 0, 1, 1]
    assert sorted(item.filename for item in train + validation) == sorted(names)
    other = open_source("folders", tmp_path, holdout=0.2, seed=1)
    assert items(other, "validation") != validation
    assert other.describe() != source.describe()


def test_classes_without_validation_images_give_a_warning(tmp_path):
    write(tmp_path, "train/ant/1.jpg", "train/bee/1.jpg", "train/cat/1.jpg", "val/bee/1.jpg")
    (warning,) = open_source("folders", tmp_path).warnings
    assert warning == (
        "there are no validation images to measure the accuracy of 2 classes ('ant', 'cat'); "
        f"add some to {tmp_path}/val"
    )
    write(tmp_path, "val/ant/1.jpg", "val/cat/1.jpg")
    assert open_source("folders", tmp_path).warnings == ()


def test_classes_too_small_to_hold_out_give_a_warning(tmp_path):
    few = [f"{label}/{index}.jpg" for label in "abcdefgh" for index in range(4)]
    write(tmp_path, *few, *(f"many/{index}.jpg" for index in range(10)))
    (warning,) = open_source("folders", tmp_path).warnings
    assert warning == (
        "there are no validation images to measure the accuracy of 8 classes ('a', 'b', 'c', 'd', "
        "'e' and 3 more); --holdout=0.1 is less than one of so few images: increase it, or add "
        "images"
    )
    assert open_source("folders", tmp_path, holdout=0.25).warnings == ()


def test_no_validation_images_give_a_warning(tmp_path):
    write(tmp_path, "ant/1.jpg", "bee/1.jpg")
    source = open_source("folders", tmp_path)
    assert source.splits == {"train": 2, "validation": 0}
    (warning,) = source.warnings
    assert "no validation images to measure accuracy; --holdout=0.1 is less" in warning


def test_description_depends_on_files_but_not_on_the_directory(tmp_path):
    for place in ("here", "there", "other"):
        write(tmp_path / place / "set", "train/a/1.jpg", "val/a/2.jpg")
    write(tmp_path / "other" / "set", "train/a/3.jpg")
    here, there, other = (
        open_source("folders", tmp_path / place / "set").describe()
        for place in ("here", "there", "other")
    )
    assert here == there != other
    (tmp_path / "here/set/train/a/1.jpg").write_bytes(b"longer than it was")
    assert open_source("folders", tmp_path / "here/set").describe() != here


def test_ignored_files_give_a_warning(tmp_path):
    write(
        tmp_path,
        *("train/a/1.jpg", "val/a/2.jpg"),
        *(
            "train/a/3.PSD",
            "train/a/deeper/4.psd",
            "val/a/5.psd",
            "val/a/6.heic",
            "train/a/read_me",
        ),
        *("train/a/.DS_Store", "train/a/Thumbs.db", "train/a/desktop.ini", "train/notes.txt"),
    )
    warning, _ = open_source("folders", tmp_path).warnings
    assert re.fullmatch(
        r"files without an image's suffix \(\.jpg, .*\) are ignored: \.psd 3, "
        r"without a suffix 1, \.heic 1",
        warning,
    )


@pytest.mark.parametrize(
    ("names", "folder"),
    [
        (["Train/a/1.jpg", "Validation/a/1.jpg"], "Train"),
        (["a/1.jpg", "b/1.jpg", "val/a/1.jpg"], "val"),
        (["train/a/1.jpg", "Test/a/1.jpg"], "Test"),
        (["train/a/1.jpg", "val/a/1.jpg", "Test/a/1.jpg"], "Test"),
        (["a/1.jpg", "test/a/1.jpg"], "test"),
    ],
)
def test_folders_with_ambiguous_names_of_splits(tmp_path, names, folder):
    write(tmp_path, *names)
    with pytest.raises(UserError) as caught:
        open_source("folders", tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/{folder}: has the name of a split, not of a class; put class folders for "
        f"training into {tmp_path}/train, for validation, if any, into {tmp_path}/validation (or "
        f"val, valid or dev), and for a final test into {tmp_path}/test"
    )


def test_classes_in_a_train_folder_may_have_any_name(tmp_path):
    write(tmp_path, "train/test/1.jpg", "train/Val/1.jpg", "val/test/1.jpg")
    assert open_source("folders", tmp_path).labels == ("Val", "test")


def test_validation_class_that_train_lacks(tmp_path):
    write(tmp_path, "train/zebra/1.jpg", "val/zebra/2.jpg", "val/zebras/3.jpg")
    with pytest.raises(
        UserError, match=r"val/zebras: .*/train has no such class.*did you mean 'zebra'"
    ):
        open_source("folders", tmp_path)


def test_a_class_without_images(tmp_path):
    write(tmp_path, "train/full/1.jpg", "train/void/readme.txt", "val/full/1.jpg")
    with pytest.raises(UserError, match="train/void: no image"):
        open_source("folders", tmp_path)


def test_no_class_folders(tmp_path):
    write(tmp_path, "1.jpg")
    with pytest.raises(UserError, match="has no class folders"):
        open_source("folders", tmp_path)


def test_nothing_is_held_out(tmp_path):
    write(tmp_path, *(f"{label}/{number}.jpg" for label in "ab" for number in range(20)))
    source = open_source("folders", tmp_path, holdout=0)
    assert source.splits == {"train": 40, "validation": 0}
    (warning,) = (own for own in source.warnings if "no validation images" in own)
    assert "or give another --holdout than 0" in warning


@pytest.mark.parametrize("name", ["@eaDir", "__MACOSX", "#recycle"])
def test_folders_of_file_systems_are_no_classes(tmp_path, name):
    write(tmp_path, "a/1.jpg", "b/1.jpg", f"{name}/1.jpg", f"a/{name}/2.jpg")
    source = open_source("folders", tmp_path)
    assert source.labels == ("a", "b") and source.splits["train"] == 2


def test_folders_beside_train_are_told(tmp_path):
    write(tmp_path, "train/a/1.jpg", "val/a/2.jpg", "testing/a/3.jpg", "extra/4.jpg")
    warnings = open_source("folders", tmp_path).warnings
    assert "folders beside train are ignored: extra, testing" in warnings


def test_a_folder_named_training(tmp_path):
    write(tmp_path, "training/a/1.jpg", "training/b/1.jpg", "val/a/2.jpg")
    assert open_source("folders", tmp_path).splits == {"train": 2, "validation": 1}


def test_a_class_with_the_name_of_a_split(tmp_path):
    write(tmp_path, "train/1.jpg", "bus/1.jpg", "car/1.jpg")
    with pytest.raises(UserError, match="train: has no class folders: if train is itself a class"):
        open_source("folders", tmp_path)


@pytest.mark.parametrize("holdout", [1, -0.5])
def test_an_impossible_fraction(tmp_path, holdout):
    write(tmp_path, "a/1.jpg")
    with pytest.raises(UserError, match=r"must be in \[0, 1\)"):
        open_source("folders", tmp_path, holdout=holdout)


def test_broken_link_is_named(tmp_path):
    write(tmp_path, "a/1.jpg", "b/1.jpg")
    (tmp_path / "a/2.jpg").symlink_to("moved.jpg")
    with pytest.raises(UserError, match=r"a/2\.jpg: cannot be read: No such file or directory"):
        open_source("folders", tmp_path)


def test_broken_link_as_class_folder_is_named(tmp_path):
    write(tmp_path, "a/1.jpg")
    (tmp_path / "b").symlink_to("moved")
    with pytest.raises(UserError, match=r"/b: is a broken link; fix or remove it"):
        open_source("folders", tmp_path)


def test_directory_named_like_an_image(tmp_path):
    write(tmp_path, "a/1.jpg")
    os.mkfifo(tmp_path / "a/2.jpg")
    with pytest.raises(UserError, match=r"a/2\.jpg: is not a regular file; remove it"):
        open_source("folders", tmp_path)


@pytest.mark.parametrize("target", ["..", "../..", "../../val", "../b", "{root}"])
def test_links_to_other_classes_give_no_images(tmp_path, target):
    write(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "val/b/1.jpg")
    (tmp_path / "train/a/up").symlink_to(target.format(root=tmp_path))
    source = open_source("folders", tmp_path)
    assert [(item.filename, item.label) for item in items(source, "train")] == [
        ("train/a/1.jpg", 0),
        ("train/b/1.jpg", 1),
    ]
    (warning,) = source.warnings
    assert warning == "links to folders that count elsewhere are ignored: train/a/up"


def test_a_folder_that_two_classes_link_to_counts_once(tmp_path):
    write(tmp_path / "set", "a/1.jpg", "b/1.jpg")
    write(tmp_path / "shared", "2.jpg")
    for label in ("a", "b"):
        (tmp_path / "set" / label / "more").symlink_to(tmp_path / "shared")
    source = open_source("folders", tmp_path / "set")
    assert [item.filename for item in items(source, "train")] == [
        "a/1.jpg",
        "a/more/2.jpg",
        "b/1.jpg",
    ]
    assert source.warnings[0].endswith("are ignored: b/more")


@pytest.mark.parametrize("name", ["train/b", "val/a"])
def test_two_class_folders_with_the_same_target(tmp_path, name):
    write(tmp_path, "train/a/1.jpg", "val/c/1.jpg", "train/c/1.jpg")
    (tmp_path / name).symlink_to(tmp_path / "train/a")
    with pytest.raises(UserError, match=rf"/{name} and .*/train/a are the same folder"):
        open_source("folders", tmp_path)


def test_class_folders_may_be_links(tmp_path):
    write(tmp_path / "elsewhere", "x/1.jpg", "y/2.jpg")
    (tmp_path / "set").mkdir()
    for label, place in (("a", "x"), ("b", "y")):
        (tmp_path / "set" / label).symlink_to(tmp_path / "elsewhere" / place)
    source = open_source("folders", tmp_path / "set")
    assert [item.filename for item in items(source, "train")] == ["a/1.jpg", "b/2.jpg"]


def test_images_that_links_take_from_outside_are_counted(tmp_path):
    """An archive could hold links to any files."""
    write(tmp_path / "set", "train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "val/b/1.jpg")
    write(tmp_path / "elsewhere", "x/2.jpg", "x/3.jpg", "4.jpg")
    root = tmp_path / "set"
    (root / "train/a/5.jpg").symlink_to("1.jpg")
    assert not any("outside" in own for own in open_source("folders", root).warnings)
    (root / "train/a/4.jpg").symlink_to("../../../elsewhere/4.jpg")
    (root / "val/b/more").symlink_to(tmp_path / "elsewhere" / "x")
    source = open_source("folders", root)
    assert source.splits == {"train": 4, "validation": 4}
    assert source.warnings[0] == f"links that lead outside of {root} give 3 images"


def test_the_size_of_an_image_is_limited(tmp_path, monkeypatch):
    for name in ("a/1.jpg", "b/1.jpg"):
        (tmp_path / name).parent.mkdir()
        Image.new("L", (8, 8)).save(tmp_path / name)
    limit = (tmp_path / "b/1.jpg").stat().st_size
    with (tmp_path / "a/1.jpg").open("ab") as file:
        file.write(b"x")
    monkeypatch.setattr(files, "MAX_IMAGE", limit)
    source = open_source("folders", tmp_path)
    large, right = items(source, "train")
    reason = f"{limit + 1} bytes, more than the limit of {limit}"
    assert str(large.image) == reason
    assert right.image == (tmp_path / "b/1.jpg").read_bytes()
    manifest = prepare(source, tmp_path / "data", train_shards=1, progress=False)
    (skipped,) = manifest.skipped
    assert (skipped.split, skipped.file, skipped.reason) == ("train", "a/1.jpg", reason)


def test_a_file_that_became_a_pipe_does_not_block(tmp_path):
    write(tmp_path, "a/1.jpg", "b/1.jpg")
    source = open_source("folders", tmp_path)
    (tmp_path / "a/1.jpg").unlink()
    os.mkfifo(tmp_path / "a/1.jpg")
    with pytest.raises(UserError, match=r"a/1.jpg: is not a regular file; remove it"):
        source.read("train", 0)


def test_circular_links(tmp_path):
    write(tmp_path, *(f"a/z/{index}.jpg" for index in range(10)), "b/1.jpg")
    (tmp_path / "a/self").symlink_to(".")
    (tmp_path / "a/again").symlink_to("z")
    (tmp_path / "a/other").symlink_to("../b")
    source = open_source("folders", tmp_path)
    names = [item.filename for split in source.splits for item in items(source, split)]
    expected = ["b/1.jpg", *(f"a/again/{index}.jpg" for index in range(10))]
    assert sorted(names) == sorted(expected)


def test_file_names_that_are_not_utf_8(tmp_path):
    for place, name in (("here", b"caf\xe9.jpg"), ("there", b"caf\xe8.jpg")):
        write(tmp_path / place / "set", "a/1.jpg")
        (tmp_path / place / "set/a" / os.fsdecode(name)).write_bytes(b"an image")
    here, there = (open_source("folders", tmp_path / place / "set") for place in ("here", "there"))
    assert here.describe() != there.describe()
    found = {item.filename: item.image for item in items(here, "train")}
    assert found == {"a/1.jpg": b"a/1.jpg", "a/caf\N{REPLACEMENT CHARACTER}.jpg": b"an image"}


def test_class_name_that_is_not_utf_8(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    (tmp_path / os.fsdecode(b"caf\xe9/1.jpg")).write_bytes(b"an image")
    with pytest.raises(UserError, match="which is not one line of text in UTF-8: rename it"):
        open_source("folders", tmp_path)


def test_class_name_of_several_lines(tmp_path):
    write(tmp_path, "two\u2028lines/1.jpg")
    with pytest.raises(UserError, match="which is not one line of text in UTF-8: rename it"):
        open_source("folders", tmp_path)


def test_unreadable_folder_is_named(tmp_path, monkeypatch):
    write(tmp_path, "a/1.jpg", "a/closed/2.jpg")
    scan = os.scandir

    def closed(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(UserError, match="a/closed: cannot be read: Permission denied"):
        open_source("folders", tmp_path)


def test_fingerprint_of_earlier_versions(tmp_path):
    """Data sets that were begun before can be gone on with."""
    write(tmp_path / "set", "ä/1.jpg", "b/2.jpg")
    fingerprint = open_source("folders", tmp_path / "set").describe()["fingerprint"]
    assert fingerprint == "3734ec24122b5ff2a4a760240bc3aaf1a6403e51c8ad8a3db4710f85762950de"
