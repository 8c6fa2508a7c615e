"""Progressive JPEGs as baseline ones, without a change of pixels."""

import io
import shutil

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from imagenet_fast.base.errors import UserError
from imagenet_fast.commands import run
from imagenet_fast.data import records
from imagenet_fast.data.examples import ENCODED, JPEG_INDEX
from imagenet_fast.data.images import normalize_encoding
from imagenet_fast.data.prepare.baseline_jpegs import find_jpegtran, is_progressive, to_baseline
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import open_source

needs_jpegtran = pytest.mark.skipif(not shutil.which("jpegtran"), reason="needs jpegtran")


def jpeg(mode="RGB", progressive=True, size=(250, 200), **options):
    pixels = np.random.RandomState(0).randint(0, 256, (size[1] // 8, size[0] // 8, 3), np.uint8)
    image = Image.fromarray(pixels).resize(size).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "jpeg", progressive=progressive, **options)
    return buffer.getvalue()


@needs_jpegtran
@pytest.mark.parametrize(
    ("mode", "options"), [("RGB", {}), ("RGB", {"subsampling": 0}), ("L", {})], ids=str
)
def test_same_pixels_and_metadata(mode, options):
    exif = Image.Exif()
    exif[0x0112] = 6
    before = normalize_encoding(jpeg(mode, exif=exif, **options))
    assert is_progressive(before)
    after = to_baseline(before, find_jpegtran())
    assert (after.converted_from, after.height, after.width) == ("progressive JPEG", 200, 250)
    decoded = Image.open(io.BytesIO(after.data))
    assert "progressive" not in decoded.info and decoded.getexif()[0x0112] == 6
    np.testing.assert_array_equal(np.asarray(decoded), np.asarray(before.pixels))
    assert not is_progressive(normalize_encoding(after.data))


@needs_jpegtran
def test_damaged_images_stay():
    image = normalize_encoding(jpeg())
    damaged = image._replace(data=image.data[:-300])
    assert to_baseline(damaged, find_jpegtran()) is damaged


def incomplete():
    """Returns a JPEG without its last scans, which decoders smooth if it is progressive."""
    data = jpeg()
    for _ in range(4):
        data = data[: data.rindex(b"\xff\xda")]
    return data[: data.rindex(b"\xff\xc4")] + b"\xff\xd9"


@needs_jpegtran
def test_incomplete_images_stay():
    image = normalize_encoding(incomplete())
    assert is_progressive(image)
    assert to_baseline(image, find_jpegtran()) is image


@needs_jpegtran
def test_the_command_names_what_it_cannot_convert(tmp_path, capsys, monkeypatch):
    def no_page(directory):
        raise OSError

    monkeypatch.setattr(
        "imagenet_fast.data.prepare.page.write_page", no_page
    )  # which takes seconds
    for name, data in (("train", incomplete()), ("val", jpeg())):
        (tmp_path / "photos" / name / "a").mkdir(parents=True)
        (tmp_path / "photos" / name / "a" / "0.jpg").write_bytes(data)
    data_dir = f"--data_dir={tmp_path / 'data'}"
    path = f"--source_path={tmp_path / 'photos'}"
    assert run(["prepare", "--source=folders", path, data_dir, "--make_baseline"]) == 0
    printed = capsys.readouterr().out
    assert "1 JPEG without an index will be decoded more slowly: --make_baseline cannot" in printed


@pytest.fixture
def program(tmp_path, monkeypatch):
    """program(text) is the only jpegtran, a script."""

    def make(text):
        path = tmp_path / "jpegtran"
        path.write_text(text)
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return str(path)

    return make


@pytest.mark.parametrize("command", ["/bin/cat", "exit 0", "echo no JPEG", "exit 1"])
def test_programs_that_do_not_make_baseline_jpegs_are_refused(program, command):
    """mozjpeg's writes progressive ones by default, like `cat` here."""
    path = program(f"#!/bin/sh\n{command}\n")
    with pytest.raises(UserError, match=f"{path} does not make baseline JPEGs, as libjpeg-turbo's"):
        find_jpegtran()


def test_a_program_that_cannot_be_run(program):
    path = program("#!/no/such/shell\n")
    with pytest.raises(UserError, match=f"make_baseline: {path} cannot be run: No such file"):
        find_jpegtran()


def test_other_pixels_are_not_taken(program, tmp_path):
    (tmp_path / "other.jpg").write_bytes(jpeg("L", progressive=False))
    path = program(f"#!/bin/sh\nexec /bin/cat {tmp_path}/other.jpg\n")
    image = normalize_encoding(jpeg())
    assert to_baseline(image, path) is image


def test_without_the_program(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="make_baseline needs the program jpegtran: install"):
        find_jpegtran()


@needs_jpegtran
def test_prepare(tmp_path):
    for split in ("train", "validation"):
        for name in ("a", "b"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            folder.joinpath("0.jpg").write_bytes(jpeg())
            folder.joinpath("1.jpg").write_bytes(jpeg(progressive=False))
    source = open_source("folders", str(tmp_path / "photos"))
    options = {"train_shards": 1, "validation_shards": 1, "progress": False}
    manifest = prepare(source, tmp_path / "data", make_baseline=True, **options)
    assert manifest.converted == {"progressive JPEG": 4}
    assert manifest.unindexed == 0
    (path,) = (tmp_path / "data").glob("train-*")
    for record in records.read_records(path):
        features = tf.train.Example.FromString(record).features.feature
        assert (
            "progressive" not in Image.open(io.BytesIO(features[ENCODED].bytes_list.value[0])).info
        )
        assert features[JPEG_INDEX].bytes_list.value
    # The same data set with another option is another job.
    with pytest.raises(UserError, match="make_baseline"):
        prepare(source, tmp_path / "data", **options)
