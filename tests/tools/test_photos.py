import importlib.util
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "photos.py"


def load():
    spec = importlib.util.spec_from_file_location("photos", TOOL)
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look up a module's annotations.
    sys.modules["photos"] = module
    spec.loader.exec_module(module)
    return module


photos = load()
IMAGES = {"train": 10, "validation": 3}


@pytest.fixture
def source(tmp_path):
    """Two photographs of plain colors, recognizable in their crops, and a text file."""
    folder = tmp_path / "photos" / "deeper"
    folder.mkdir(parents=True)
    Image.new("RGB", (900, 700), (200, 30, 30)).save(folder / "red.jpg")
    Image.new("RGBA", (650, 1200), (30, 30, 200, 255)).save(folder / "blue.png")
    (folder / "notes.txt").write_text("no photograph")
    return tmp_path / "photos"


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.jpg")
    }


def test_each_photograph_is_a_class_with_its_share_of_the_images(tmp_path, source):
    photos.make_images(source, tmp_path / "out", IMAGES)
    counts = {}
    for name in contents(tmp_path / "out"):
        folder = name.rsplit("/", maxsplit=1)[0]
        counts[folder] = counts.get(folder, 0) + 1
    assert counts == {
        "train/00_blue": 5,
        "train/01_red": 5,
        "validation/00_blue": 2,
        "validation/01_red": 1,
    }
    with Image.open(next((tmp_path / "out/train/01_red").iterdir())) as image:
        assert image.format == "JPEG"
        assert np.allclose(np.asarray(image), (200, 30, 30), atol=3)


def test_windows_are_of_imagenet_sizes_and_inside_the_photograph():
    random = np.random.default_rng(0)
    windows = [photos.choose_crop((1600, 1203), random) for _ in range(400)]
    upright = 0
    for window in windows:
        width, height = window.size
        upright += height > width
        assert 400 <= max(window.size) <= 600
        assert 1.32 < max(window.size) / min(window.size) < 1.51
        left, top, right, bottom = window.box
        assert left >= 0
        assert top >= 0
        assert right <= 1600 + 1e-6
        assert bottom <= 1203 + 1e-6
        # Never enlarged, and not distorted.
        assert (right - left) / width >= 1
        assert (right - left) / width == pytest.approx((bottom - top) / height)
        assert 90 <= window.quality <= 95
    assert 0.15 < upright / len(windows) < 0.35
    assert 480 < np.mean([max(window.size) for window in windows]) < 520


def test_the_seed_alone_decides(tmp_path, source):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        photos.make_images(source, tmp_path / name, IMAGES, seed)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert a.keys() == c.keys()
    assert all(a[name] != c[name] for name in a)


def test_all_images_are_different(tmp_path):
    (tmp_path / "photos").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (700, 800, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "photos/noise.png")
    photos.make_images(tmp_path / "photos", tmp_path / "out", IMAGES)
    assert len(set(contents(tmp_path / "out").values())) == sum(IMAGES.values())


def test_large_images_are_tiles_of_different_crops():
    noise = np.random.default_rng(0).integers(0, 256, (700, 800, 3), np.uint8)
    photo = Image.fromarray(noise)
    small, quality = photos.make_image(photo, np.random.default_rng(1), photos.Format())
    large, _ = photos.make_image(photo, np.random.default_rng(1), photos.Format(tiles=2))
    width, height = small.size
    assert large.size == (2 * width, 2 * height) and 90 <= quality <= 95
    tiles = [
        np.asarray(large.crop((x, y, x + width, y + height)))
        for y in (0, height)
        for x in (0, width)
    ]
    np.testing.assert_array_equal(tiles[0], small)
    assert len({tile.tobytes() for tile in tiles}) == 4


def test_photographs_that_are_too_small_are_left_out(tmp_path, source, capsys):
    Image.new("RGB", (2000, 599)).save(source / "flat.jpg")
    photos.make_images(source, tmp_path / "out", IMAGES)
    assert {path.name for path in (tmp_path / "out/train").iterdir()} == {"00_blue", "01_red"}
    assert "flat.jpg: 2000x599 is smaller than 600x600" in capsys.readouterr().err


def test_a_folder_that_exists_is_left_alone(tmp_path, source):
    (tmp_path / "out").mkdir()
    with pytest.raises(photos.PhotosError, match="out exists already"):
        photos.make_images(source, tmp_path / "out", IMAGES)


@pytest.mark.parametrize("damage", ["no image at all", "cut short"])
def test_a_damaged_photograph_is_named_and_nothing_is_made(tmp_path, source, damage):
    path = source / "deeper" / "red.jpg"
    path.write_bytes(path.read_bytes()[:-200] if damage == "cut short" else b"text")
    with pytest.raises(photos.PhotosError, match=r"red\.jpg: (corrupt|not a JPEG or PNG)"):
        photos.make_images(source, tmp_path / "out", IMAGES)
    assert not (tmp_path / "out").exists()


def test_too_few_images(tmp_path, source):
    with pytest.raises(photos.PhotosError, match=r"1 validation images are too few: .* 2 photo"):
        photos.make_images(source, tmp_path / "out", {"train": 2, "validation": 1})


def test_no_photographs(tmp_path):
    with pytest.raises(photos.PhotosError, match="no photographs"):
        photos.find_photos(tmp_path)


def test_the_package_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(photos, "DEFAULT_SOURCE", tmp_path / "absent")
    with pytest.raises(photos.PhotosError, match="absent: no such folder; `apt-get install mate-"):
        photos.find_photos(tmp_path / "absent")


@pytest.mark.long
def test_the_command(tmp_path, source):
    def run(*flags):
        command = [sys.executable, TOOL, f"--output_dir={tmp_path / 'out'}", *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    made = run(f"--source={source}", "--train_images=4", "--validation_images=2")
    assert made.returncode == 0, made.stderr
    assert f"{tmp_path / 'out'}: 6 images, " in made.stdout
    failed = run(f"--source={tmp_path / 'nowhere'}")
    assert failed.returncode == 2
    assert "photos.py: error:" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert run("--seed=-1").returncode == 2
    assert run("--tiles=0").returncode == 2


def test_quality_is_one_or_a_range():
    assert photos.parse(["--output_dir=x"]).quality == (90, 95)
    assert photos.parse(["--output_dir=x", "--quality=100"]).quality == (100, 100)
    assert photos.parse(["--output_dir=x", "--quality=70,80"]).quality == (70, 80)
    window = photos.choose_crop((900, 700), np.random.default_rng(0), (70, 70))
    assert window.quality == 70


@pytest.mark.parametrize("quality", ["0", "101", "80,70", "high", "1,2,3"])
def test_no_quality(quality, capsys):
    with pytest.raises(SystemExit):
        photos.parse(["--output_dir=x", f"--quality={quality}"])
    assert "--quality" in capsys.readouterr().err
