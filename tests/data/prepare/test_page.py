import hashlib
import html.parser
import io
import itertools
import json
import os
import re
import shlex
import shutil
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from imagenet_fast.base.errors import UserError
from imagenet_fast.commands import prepare as command
from imagenet_fast.data import metadata
from imagenet_fast.data.prepare import page as data_page
from imagenet_fast.data.prepare.duplicates import FILE as DUPLICATES
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.page import FILE, write_page
from imagenet_fast.data.prepare.page_figures import thumbnail
from imagenet_fast.data.prepare.sources import open_source

NAMES = ("ant & <bee>", "cat", "dog")


def photo(seed, size=(70, 60)):
    draw = np.random.RandomState(seed).randint(0, 256, (24, 20, 3), np.uint8)
    return Image.fromarray(draw).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three classes: 9, 6 and 4 images for training, 2 each for validation, with duplicates."""
    root = tmp_path_factory.mktemp("images") / "toy"
    for split, label in itertools.product(("train", "val"), range(3)):
        place = root / split / NAMES[label]
        place.mkdir(parents=True)
        for count in range((9, 6, 4)[label] if split == "train" else 2):
            seed = 1000 * (split == "val") + 100 * label + count
            kind = "png" if count == 1 else "jpg"
            photo(seed, (70 + 10 * count, 60)).save(place / f"{count}.{kind}", quality=90)
    train, val = root / "train", root / "val"
    shutil.copy(train / NAMES[0] / "2.jpg", train / NAMES[0] / "again.jpg")
    shutil.copy(train / NAMES[0] / "2.jpg", train / NAMES[1] / "other class.jpg")
    shutil.copy(train / NAMES[1] / "3.jpg", val / NAMES[1] / "leak.jpg")
    Image.open(train / NAMES[2] / "0.jpg").save(val / NAMES[2] / "coarse.jpg", quality=70)
    (train / NAMES[2] / "bad.jpg").write_bytes(b"<script>no image")
    return root


@pytest.fixture(scope="module")
def prepared(folder, tmp_path_factory):
    directory = tmp_path_factory.mktemp("prepared")
    prepare(open_source("folders", folder), directory, progress=False)
    return directory


class Elements(html.parser.HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.links, self.text = Counter(), [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset")]

    def handle_data(self, data):
        self.text.append(data)


def page_of(directory):
    write_page(str(directory), progress=False)
    return (directory / FILE).read_text(encoding="ascii")


def test_page_is_self_contained(prepared):
    elements = Elements(page_of(prepared))
    assert not {"script", "link", "iframe", "object"} & elements.tags.keys()
    assert elements.links and all(link.startswith("data:image/") for link in elements.links)
    assert "bee" not in elements.tags  # a class is named so
    assert NAMES[0] in elements.text


def test_thumbnails_warn_of_no_metadata():
    """Of a camera's second pictures, here damaged, Pillow warns."""
    file = io.BytesIO()
    Image.new("RGB", (300, 200)).save(file, "JPEG")
    data = file.getvalue()
    damaged = data[:2] + b"\xff\xe2\x00\x0aMPF\x00junk" + data[2:]
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        Image.open(io.BytesIO(damaged))
        assert len(raised) == 1
        assert thumbnail(damaged, 64, 80, crop=True).startswith("<img")
    assert len(raised) == 1


def test_counts_match_the_files(prepared, folder):
    text = page_of(prepared)
    table = text[text.index("<h2>Images by class") :]
    lines = re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', table)[:3]
    for name, (shown, cells) in zip(NAMES, lines):
        assert shown == html.escape(name)
        files = [len(list((folder / split / name).iterdir())) for split in ("train", "val")]
        files[0] -= name == NAMES[2]  # the bad one
        assert re.findall(r">(\d+)</td>", cells) == list(map(str, files))
    assert "bad.jpg" in text and "not an image of a known format" in text
    pngs = sum(1 for _ in folder.rglob("*.png"))
    assert re.search(rf">PNG</th>.*?>{pngs}</td>", text)
    widths = [Image.open(path).width for path in folder.rglob("[0-9l]*.*")]
    assert re.search(rf"Width in pixels</th><td>{min(widths)}</td>.*?<td>{max(widths)}</td>", text)


def equal_files(folder):
    same = defaultdict(list)
    for place, _, files in os.walk(folder):
        for name in files:
            path = Path(place, name)
            same[hashlib.sha256(path.read_bytes()).digest()].append(path)
    return [{str(path.relative_to(folder)) for path in own} for own in same.values() if own[1:]]


def listed(directory, equal):
    lines = map(json.loads, (directory / DUPLICATES).read_text().splitlines())
    return [line for line in lines if line["equal_files"] == equal]


def test_equal_files_are_found(prepared, folder):
    write_page(str(prepared), progress=False)
    pairs = listed(prepared, equal=True)
    assert len(pairs) == 3
    groups = equal_files(folder)
    for pair in pairs:
        assert any({image["file"] for image in pair["images"]} <= group for group in groups)
        for image in pair["images"]:
            split, name, _ = Path(image["file"]).parts
            assert (image["split"], image["class"]) == (
                {"val": "validation"}.get(split, split),
                name,
            )
    assert {image["file"] for pair in pairs for image in pair["images"]} == set.union(*groups)
    # Pairs in two classes come first, then those in two splits.
    assert pairs[0]["images"][0]["class"] != pairs[0]["images"][1]["class"]
    assert [image["split"] for image in pairs[-2]["images"]] == ["train", "validation"]


def test_similar_images_match_imagehash(prepared, folder):
    imagehash = pytest.importorskip("imagehash")
    write_page(str(prepared), progress=False)
    paths = sorted(path for path in folder.rglob("*.*") if path.suffix and path.name != "bad.jpg")
    hashes = {path: imagehash.phash(Image.open(path), 16) for path in paths}
    expected = {
        frozenset((str(one.relative_to(folder)), str(other.relative_to(folder))))
        for one, other in itertools.combinations(paths, 2)
        if hashes[one] - hashes[other] <= 12 and one.read_bytes() != other.read_bytes()
    }
    assert len(expected) == 1
    found = listed(prepared, equal=False)
    assert {frozenset(image["file"] for image in pair["images"]) for pair in found} == expected
    one, other = (folder / image["file"] for image in found[0]["images"])
    assert found[0]["distance"] == hashes[one] - hashes[other]


def test_page_says_how_to_install_imagehash(prepared, tmp_path, monkeypatch):
    directory = tmp_path / "it's <here>"
    shutil.copytree(prepared, directory)
    (directory / metadata.FILE).unlink()
    monkeypatch.setattr(metadata, "_phash", lambda: None)
    text = page_of(directory)
    assert "pip install ImageHash" in text
    assert f"prepare --data_page --data_dir={shlex.quote(str(directory))}" in html.unescape(text)
    assert len(listed(directory, equal=True)) == 3 and not listed(directory, equal=False)


@pytest.mark.long
def test_many_classes_are_folded_and_samples_are_bounded(prepared, monkeypatch):
    monkeypatch.setattr(data_page, "_FEW_CLASSES", 2)
    monkeypatch.setattr(data_page, "_SAMPLES", 3)
    monkeypatch.setattr(data_page, "_MAX_SAMPLES", 2)
    text = page_of(prepared)
    assert "<summary>All 3 classes</summary>" in text
    assert "4 to 10 training images (ratio 2.5)" in text
    assert "The first 2 of 3 classes." in text
    samples = text[text.index("<h2>Samples") :]
    assert samples.count("<img") == 2


@pytest.mark.long
def test_command_warns_of_duplicates_and_rewrites_the_page(folder, tmp_path, capsys):
    arguments = ["--source=folders", f"--source_path={folder}", f"--data_dir={tmp_path / 'out'}"]
    assert command.main(arguments) == 0
    shown = capsys.readouterr()
    told = "warning: pairs of equal files: 3, 1 of them in two classes, 1 of them in two"
    assert told in shown.err
    assert "in more than one class" in shown.err
    assert f"a page on the images: {tmp_path / 'out' / FILE}\n" in shown.out
    page = (tmp_path / "out" / FILE).read_bytes()
    (tmp_path / "out" / FILE).unlink()
    assert command.main([f"--data_dir={tmp_path / 'out'}", "--data_page"]) == 0
    assert (tmp_path / "out" / FILE).read_bytes() == page
    assert told in capsys.readouterr().err


def test_prepare_succeeds_without_the_page(folder, tmp_path, capsys, monkeypatch):
    def fail(*arguments):
        raise UserError("train-00001-of-00008: record 3 is corrupt")

    monkeypatch.setattr(data_page, "read_metadata", fail)
    arguments = ["--source=folders", f"--source_path={folder}", f"--data_dir={tmp_path / 'out'}"]
    assert command.main(arguments) == 0
    shown = capsys.readouterr()
    assert "warning: no data.html: train-00001-of-00008: record 3 is corrupt" in shown.err
    assert "data.html" not in shown.out
    with pytest.raises(UserError, match="record 3"):
        command.main([f"--data_dir={tmp_path / 'out'}", "--data_page"])


@pytest.mark.parametrize(
    ("enough", "less", "told"),
    [("1", "0", ""), ("4%", "3%", "=3% of 30"), ("0.04", "0.03", "=0.03 of 30")],
)
def test_bad_images_may_be_a_number_or_a_fraction(folder, tmp_path, enough, less, told):
    assert sum(path.is_file() for path in folder.rglob("*.*")) == 30  # one of them is bad
    source = open_source("folders", folder)
    message = re.escape(f"more than 0 images (max_bad_images{told}) cannot be used, such as")
    with pytest.raises(UserError, match=message):
        prepare(source, tmp_path, max_bad_images=less, progress=False)
    assert len(prepare(source, tmp_path, max_bad_images=enough, progress=False).skipped) == 1


def test_names_are_text_wherever_they_are_shown(tmp_path, monkeypatch):
    """Of the data set, classes, files, splits, warnings, sources and reasons."""
    script = "<script>alert(1)</script>"
    root = tmp_path / f"data {script.replace('/', '%')}"
    for label in ("cat", script.replace("/", "%")):
        (root / label).mkdir(parents=True)
        for number in range(4):
            path = root / label / f"{number}{script.replace('/', '%')}.jpg"
            photo(0).save(path) if number < 3 else path.write_bytes(b"no image")
    directory = tmp_path / "prepared"
    prepare(open_source("folders", root, holdout=0.25), directory, progress=False)
    written = json.loads((directory / "manifest.json").read_text())
    hostile = {
        **written,
        "name": script,
        "labels": [script, f"{script}2"],
        "warnings": [script],
        "converted": {script: 3},
        "source": {**written["source"], "source": script, "name": script},
        "skipped": [{"split": script, "file": script, "reason": script}],
    }
    (directory / "manifest.json").write_text(json.dumps(hostile))
    page = page_of(directory)
    assert not {"script"} & Elements(page).tags.keys()
    assert script in "".join(Elements(page).text)
