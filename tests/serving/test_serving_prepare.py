"""Images prepared by Pillow and numpy are those that evaluation sees."""

import inspect
import io
import json

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from imagenet_fast import Config, UserError
from imagenet_fast.data.decode import evaluation_image
from imagenet_fast.data.images import normalize_encoding
from imagenet_fast.data.pixel_options import PixelOptions
from imagenet_fast.serving.prepare import ARGUMENTS, prepare_image

# Options of pixels that it approximates, that the exported network applies, or of training alone.
OTHERS = {
    *("jpeg_index", "resize_kernel"),
    *("pixel_mean", "pixel_std", "max_pixels"),
    *("train_sizes", "train_until", "size_ramp", "size_ramp_at", "eval_image_size"),
}


def test_arguments_are_all_options_of_evaluation_s_pixels():
    given = {*inspect.signature(prepare_image).parameters} - {"encoded", "as_in_shards"}
    assert given == {*ARGUMENTS}
    assert {*ARGUMENTS.values()} == {*PixelOptions.__annotations__} - OTHERS


def encoded(width, height, form="PNG", mode="RGB", **options):
    """An image whose pixels all differ from their neighbours, but not by much."""
    noise = np.random.default_rng(0).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), "uint8")
    image = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).convert(mode)
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def both(data, **options):
    """The image by Pillow and by TensorFlow, as int."""
    config = Config(
        image_size=options["size"],
        eval_crop_fraction=options["crop_fraction"],
        resize_method=options["resize_method"],
        antialias=options.get("antialias", False),
        eval_crop=options.get("crop", "square"),
    )
    found, expected = prepare_image(data, **options), evaluation_image(data, config).numpy()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return found.astype(int), expected.astype(int)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("resize_method", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop", ["square", "proportional"])
@pytest.mark.parametrize("crop_fraction", [0.875, 1.0, 0.301])
@pytest.mark.parametrize(("width", "height"), [(80, 61), (45, 200), (32, 32), (7, 5), (1, 1)])
def test_pixels(width, height, crop_fraction, crop, resize_method, antialias):
    data = encoded(width, height)
    options = {
        "crop_fraction": crop_fraction,
        "crop": crop,
        "resize_method": resize_method,
        "antialias": antialias,
    }
    for size in (32, 100):
        found, expected = both(data, size=size, **options)
        assert np.abs(found - expected).max() <= 1
        # Pillow sums in float64, where TensorFlow's halves are not always the same ones.
        assert (found != expected).mean() < (0.02 if antialias else 1e-3)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("JPEG", {"quality": 90, "subsampling": 0}),
        ("JPEG", {"quality": 90, "mode": "L"}),
        ("JPEG", {"quality": 90, "progressive": True, "subsampling": 0}),
        ("PNG", {"mode": "L"}),
        ("PNG", {"mode": "P"}),
    ],
)
def test_kinds(form, options):
    found, expected = both(
        encoded(90, 70, form, **options), size=48, crop_fraction=0.875, resize_method="bilinear"
    )
    assert np.abs(found - expected).max() <= 1
    assert (found != expected).mean() < 1e-3


def random_pixels(*shape, below=256, dtype=np.uint8):
    return np.random.default_rng(0).integers(0, below, shape, dtype)


@pytest.mark.parametrize(
    ("pixels", "mode", "options"),
    [
        (random_pixels(32, 32, 4), "RGBA", {}),
        (random_pixels(32, 32, 2), "LA", {}),
        (random_pixels(32, 32), "L", {"transparency": 9}),
        (random_pixels(32, 32), "1", {}),
        (random_pixels(32, 32, below=2**16, dtype=np.uint16), "I;16", {}),
    ],
)
def test_png_kinds_are_converted_as_for_shards(pixels, mode, options):
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "PNG", **options)
    in_shard = Image.open(io.BytesIO(normalize_encoding(file.getvalue(), "png").data))
    expected = np.asarray(in_shard.convert("RGB")).astype(int)
    for image in both(file.getvalue(), size=32, crop_fraction=1.0, resize_method="bilinear"):
        np.testing.assert_array_equal(image, expected)


def test_only_the_borders_of_subsampled_colours_differ():
    data = encoded(150, 130, "JPEG", quality=90, subsampling=2)
    found, expected = both(data, size=96, crop_fraction=0.875, resize_method="bilinear")
    assert (found != expected)[3:-3, 3:-3].mean() < 1e-3


def test_bad_images():
    data = encoded(40, 30, "JPEG")
    for bad in (b"", b"no image", data[: len(data) // 2]):
        with pytest.raises(UserError, match="not a whole image: "):
            prepare_image(bad, 32)


ALONE = """
import json, sys
from imagenet_fast.serving.prepare import prepare_image
image = prepare_image(open(sys.argv[1], "rb").read(), 16)
print(json.dumps([image.shape, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def test_prepare_image_needs_no_tensorflow(tmp_path, run_python):
    (tmp_path / "image.png").write_bytes(encoded(20, 20))
    shape, modules = json.loads(
        run_python(["-c", ALONE, tmp_path / "image.png"], fresh=True).stdout
    )
    assert shape == [16, 16, 3]
    assert not {"tensorflow", "tf_keras", "keras"} & set(modules)


def test_tensorflow_refuses_the_same_images():
    config = Config(image_size=32)
    data = encoded(40, 30, "PNG")
    with pytest.raises(tf.errors.OpError):
        evaluation_image(data[: len(data) // 2], config)
    with pytest.raises(UserError):
        prepare_image(data[: len(data) // 2], 32)


def test_an_unknown_crop():
    with pytest.raises(UserError, match="there is no crop 'round': it is square or proportional"):
        prepare_image(encoded(8, 8), 4, crop="round")
