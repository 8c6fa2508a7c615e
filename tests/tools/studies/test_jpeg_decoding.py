"""The JPEG-decoding study."""

import dataclasses
import importlib
import io
import pathlib
import struct
import sys

import numpy as np
import pytest
from PIL import Image, JpegImagePlugin

from imagenet_fast.data.manifest import read_manifest
from imagenet_fast.lab.benchmarks.decode import VARIANTS

ROOT = pathlib.Path(__file__).parents[3]
STUDY = ROOT / "tools" / "studies" / "jpeg_decoding"
sys.path.insert(0, str(STUDY.parent))
experiments = importlib.import_module("jpeg_decoding.experiments")
jpegs = importlib.import_module("jpeg_decoding.jpegs")
log = importlib.import_module("study.log")
report = importlib.import_module("jpeg_decoding.report")
training = importlib.import_module("jpeg_decoding.training")

# By which Fashion-MNIST is known.
LABELS = [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]


def idx(path, values):
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The command's output for 130 and 20 images like Fashion-MNIST's."""
    folder = tmp_path_factory.mktemp("idx")
    random = np.random.default_rng(0)
    for name, count in (("train", 130), ("t10k", 20)):
        idx(folder / f"{name}-images-idx3-ubyte", random.integers(0, 256, (count, 28, 28)))
        idx(folder / f"{name}-labels-idx1-ubyte", np.resize(LABELS, count))
    output = folder / "jpegs"
    flags = [f"--source_path={folder}", f"--output_dir={output}"]
    assert jpegs.main(flags) == 0
    return output


def picture():
    """A light square on a dark ground, larger than the blocks of a JPEG; uint8 [32, 32]."""
    pixels = np.full((32, 32), 40, np.uint8)
    pixels[16:, 16:] = 220
    return pixels


# --- The images


@pytest.mark.parametrize("drawing", jpegs.DRAWINGS)
def test_colours_are_subsampled(drawing):
    image = Image.open(io.BytesIO(jpegs.encode(picture(), drawing)))
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (32, 32))
    # 4:2:0.
    assert JpegImagePlugin.get_sampling(image) == 2


def test_a_picture_is_in_one_of_brightness_and_colour():
    planes = {}
    for drawing in jpegs.DRAWINGS:
        image = Image.open(io.BytesIO(jpegs.encode(picture(), drawing)))
        image.draft("YCbCr", None)
        planes[drawing] = np.moveaxis(np.asarray(image, int), -1, 0)
    brightness, *colours = planes[jpegs.BRIGHTNESS]
    assert np.abs(brightness - picture()).max() <= 2
    assert np.ptp(colours) <= 1
    brightness, blue, red = planes[jpegs.COLOUR]
    assert np.ptp(brightness) <= 1
    assert [blue[4, 4], blue[28, 28]] == pytest.approx([64 + 20, 64 + 110], abs=2)
    assert [red[4, 4], red[28, 28]] == pytest.approx([191 - 20, 191 - 110], abs=2)


def test_all_colours_are_within_rgb():
    """Clipped colours would change the brightness, or be lost."""
    for value in (0, 255):
        encoded = jpegs.encode(np.full((16, 16), value, np.uint8), jpegs.COLOUR)
        pixel = Image.open(io.BytesIO(encoded)).convert("RGB").getpixel((8, 8))
        assert all(5 < level < 250 for level in pixel)


def test_the_command_makes_both_sets(made):
    manifests = [read_manifest(made / drawing) for drawing in jpegs.DRAWINGS]
    assert [manifest.name for manifest in manifests] == [
        "fashion_mnist in brightness",
        "fashion_mnist in colour",
    ]
    for manifest in manifests:
        assert manifest.splits["train"].class_counts == (39, 0, 26, 13, 0, 26, 0, 13, 0, 13)
        # The JPEGs are taken as they are.
        assert not manifest.converted


def test_the_command_without_data(tmp_path, capsys):
    flags = [f"--source_path={tmp_path / 'x'}", f"--output_dir={tmp_path / 'out'}"]
    assert jpegs.main(flags) == 2
    assert "no such directory" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- The runs


def test_settings_are_runs_of_their_own():
    settings = [setting for drawing in experiments.EXPERIMENTS for setting in drawing.settings]
    assert len({setting.fingerprint for setting in settings}) == len(settings) == 2 * len(VARIANTS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("drawing", "way", "changed"),
    [
        pytest.param(jpegs.BRIGHTNESS, "jpeg_dct=fast", True, marks=pytest.mark.long),
        # There are no colours to enlarge.
        (jpegs.BRIGHTNESS, "jpeg_upsampling=plain", False),
        pytest.param(jpegs.BRIGHTNESS, "jpeg_scaling", True, marks=pytest.mark.long),
        pytest.param(jpegs.COLOUR, "jpeg_upsampling=plain", True, marks=pytest.mark.long),
    ],
)
def test_which_ways_change_which_pixels(made, drawing, way, changed):
    (config,) = (s.config for s in experiments.drawn_in(drawing).settings if s.method == way)
    config = config.replace(data_dir=str(made / drawing), eval_batch_size=20)
    difference = training.difference(config)
    assert (difference > 0.1) if changed else (difference == 0)


@pytest.mark.long
def test_a_run_takes_the_set_of_its_kind(made):
    plain = experiments.drawn_in(jpegs.COLOUR).settings[2]
    few = dataclasses.replace(plain, config=plain.config.replace(batch_size=64, eval_batch_size=20))
    result = training.run(few, 1, str(made))
    assert result["images"] == "colour"
    assert result["difference"] > 1
    assert 0 <= result["error"] <= 1


# --- The page


def test_page_matches_the_log():
    records = log.read(ROOT / "benchmarks" / "jpeg_decoding" / "runs.jsonl")
    text = (ROOT / "docs" / report.PAGE).read_text()
    assert report.filled_page(text, records) == text
