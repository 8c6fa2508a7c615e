"""What the header tells: sizes as Pillow reads them, and why an image is refused."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from imagenet_fast import Config
from imagenet_fast.data import headers
from imagenet_fast.data.decode import evaluation_image
from imagenet_fast.data.headers import NO_IMAGE, check_header, image_size, reason_of_failure
from imagenet_fast.data.images import TooManyPixelsError, normalize_encoding
from imagenet_fast.data.preparation import Preparation
from imagenet_fast.serving.as_in_shard import as_in_shard

LIMIT = 1000
CONVERT = "cannot be decoded: convert it to a baseline JPEG or to PNG"


def encode(form, width=40, height=25, mode="RGB", **options):
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, form, **options)
    return file.getvalue()


def chunk(kind, data=b""):
    crc = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + crc


def png_header(width, height):
    """A PNG without pixels."""
    ihdr = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", ihdr) + chunk(b"IDAT") + chunk(b"IEND")


def with_sof(jpeg, **bytes_at):
    """The JPEG with other bytes in its SOF segment: ``marker``, ``precision``, ``components``."""
    data = bytearray(jpeg)
    start = data.index(b"\xff\xc0")
    for name, value in bytes_at.items():
        data[start + {"marker": 1, "precision": 4, "components": 9}[name]] = value
    return bytes(data)


reason = tf.function(
    lambda encoded: reason_of_failure(encoded, LIMIT),
    input_signature=[tf.TensorSpec([], tf.string)],
)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("mode", [pytest.param("L", marks=pytest.mark.long), "RGB"])
def test_sizes_up_to_the_limit(form, mode):
    encoded = encode(form, 40, 25, mode)
    np.testing.assert_array_equal(image_size(encoded, LIMIT), [25, 40])
    with pytest.raises(tf.errors.InvalidArgumentError):
        image_size(encode(form, 40, 26, mode), LIMIT)
    assert reason(encode(form, 40, 26, mode)) == "40 x 26 pixels, more than the limit of 1000"


def test_pixels_are_not_looked_at():
    for form in ("JPEG", "PNG"):
        encoded = encode(form)
        np.testing.assert_array_equal(image_size(encoded[:-20], LIMIT), [25, 40])


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_the_default_limit_is_that_of_prepare(form):
    """Of one pixel row less than Pillow refuses, and of that row, by headers alone."""
    width, height = 13_373, 13_381
    assert width * height < Config().max_pixels < width * (height + 1)
    for rows, refused in ((height, False), (height + 1, True)):
        data = png_header(width, rows)
        if form == "JPEG":
            data = bytearray(encode("JPEG"))
            sof = data.index(b"\xff\xc0")
            data[sof + 5 : sof + 9] = struct.pack(">HH", rows, width)
            data = bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            if refused:
                with pytest.raises(TooManyPixelsError):
                    normalize_encoding(data)
            else:
                assert Image.open(io.BytesIO(data)).size == (width, rows)
        if refused:
            with pytest.raises(tf.errors.InvalidArgumentError):
                image_size(data, Config().max_pixels)
            told = reason_of_failure(data, Config().max_pixels).numpy().decode()
            assert told == f"{width} x {rows} pixels, more than the limit of 178956970"
        else:
            np.testing.assert_array_equal(image_size(data, Config().max_pixels), [rows, width])


@pytest.mark.parametrize("width", [0, 1, 2**16, 2**31, 2**32 - 1])
@pytest.mark.parametrize("height", [0, 2**31 - 1, 2**31, 2**32 - 1])
def test_no_product_is_too_large_to_be_refused(width, height):
    data = png_header(width, height)
    with pytest.raises(tf.errors.InvalidArgumentError):
        image_size(data, LIMIT)
    told = f"{width} x {height} pixels, more than the limit of 1000" if width and height else ""
    assert reason(data).numpy().decode() == (told or NO_IMAGE)


def test_a_size_anywhere_but_at_the_beginning_is_none():
    """What a decoder might find behind it has not been compared with the limit."""
    whole = encode("PNG")
    for data in (
        whole[:8] + chunk(b"tEXt", b"a\0b") + whole[8:],
        whole[:12] + b"iHDR" + whole[16:],
        whole[:11] + b"\x0e" + whole[12:],
    ):
        with pytest.raises(tf.errors.InvalidArgumentError):
            image_size(data, LIMIT)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("GIF", "GIF"),
        ("BMP", "BMP"),
        ("WEBP", "WebP"),
        ("TIFF", "TIFF"),
        ("PPM", "PPM"),
        ("ICO", "ICO"),
        ("AVIF", "HEIC or AVIF"),
        ("JPEG2000", "JPEG 2000"),
    ],
)
def test_other_formats_are_named(form, name):
    encoded = encode(form)
    with pytest.raises(tf.errors.InvalidArgumentError):
        check_header(encoded, LIMIT)
    assert reason(encoded) == f"{name} {CONVERT}"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"marker": 0xC3}, "lossless JPEG"),
        ({"marker": 0xC6}, "hierarchical JPEG"),
        ({"precision": 12}, "12-bit JPEG"),
        ({"components": 2}, "JPEG of 2 components"),
    ],
)
def test_kinds_of_jpegs_are_named(changes, kind):
    # The marker comes behind a segment that holds one, too.
    jpeg = encode("JPEG", exif=b"Exif\0\0" + b"\xff\xc1" * 9)
    encoded = with_sof(jpeg, **changes)
    assert reason(encoded) == f"{kind} {CONVERT}"
    with pytest.raises(tf.errors.InvalidArgumentError):
        evaluation_image(encoded, Config(image_size=8))


def test_arithmetic_coding_is_read_as_by_pillow():
    """Of what was coded in another way, both read the same nonsense."""
    encoded = with_sof(encode("JPEG", 32, 32), marker=0xC9)
    pillow = np.asarray(Image.open(io.BytesIO(encoded)))
    config = Config(image_size=32, eval_crop_fraction=1.0)
    np.testing.assert_array_equal(evaluation_image(encoded, config), pillow)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text",
        b"\xff",
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xc0",
        b"\xff\xd8\xff\xc0\x00\x11\x08",
        b"\xff\xd8" + b"\xff" * 100_000,
        b"\xff\xd8" + b"\xff\xe0\xff\xff" * 100_000,
        b"\xff\xd8\xff\xda" + b"\xff\xc3" * 9,
        b"\x89PNG\r\n\x1a\n",
        encode("JPEG")[:100],
        encode("JPEG"),
        encode("PNG")[:20],
    ],
)
def test_what_is_no_image_is_told_so(data):
    assert reason(data) == NO_IMAGE


@pytest.mark.long
def test_every_beginning_of_a_file_has_a_reason():
    for form in ("JPEG", "PNG"):
        encoded = encode(form, 8, 8)
        beginnings = tf.constant([encoded[:length] for length in range(len(encoded))])
        reasons = tf.map_fn(reason, beginnings)
        assert set(reasons.numpy()) == {NO_IMAGE.encode()}


def test_only_cmyk_jpegs_are_changed():
    for mode in ("L", "RGB"):
        encoded = encode("JPEG", mode=mode)
        assert check_header(encoded, LIMIT)[0] == encoded
    cmyk = encode("JPEG", mode="CMYK")
    checked = check_header(cmyk, LIMIT)[0].numpy()
    assert len(checked) == len(cmyk) + 16
    np.testing.assert_array_equal(
        tf.io.decode_jpeg(checked, channels=3), tf.io.decode_jpeg(cmyk, channels=3)
    )


@pytest.mark.parametrize("byte_order", "<>")
@pytest.mark.parametrize("orientations", [(), (6,), (1, 6), (6, 1), (9,), (0,)])
def test_orientation_is_the_one_that_pillow_reads(byte_order, orientations):
    entries = b"".join(
        struct.pack(f"{byte_order}HHIHH", 0x0112, 3, 1, value, 0) for value in orientations
    )
    magic = b"II*\0" if byte_order == "<" else b"MM\0*"
    tiff = magic + struct.pack(f"{byte_order}IH", 8, len(orientations)) + entries + bytes(4)
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "JPEG", exif=b"Exif\0\0" + tiff)
    found = int(headers.orientation(tf.constant(file.getvalue())))
    expected = Image.open(file).getexif().get(0x0112, 1)
    assert found == (expected if 1 <= expected <= 8 else 1)


@pytest.mark.parametrize("length", range(0, 60, 7))
def test_an_orientation_in_damaged_exif(length):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (8, 8)).save(file, "JPEG", exif=exif.tobytes()[: 6 + length])
    assert 1 <= int(headers.orientation(tf.constant(file.getvalue()))) <= 8
    assert int(headers.orientation(tf.constant(file.getvalue()[: min(length, 40)]))) == 1


def test_jpegs_of_many_scans_are_refused_before_decoding():
    """Each takes the time of a whole image."""
    file = io.BytesIO()
    Image.new("L", (16, 16)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    begin = data.rindex(b"\xff\xda")
    scan = data[begin : data.rindex(b"\xff\xd9")]
    options = Config(image_size=8)
    shrunk = Preparation(max_side=8)
    for decode in (
        lambda jpeg: evaluation_image(jpeg, options),
        lambda jpeg: as_in_shard(jpeg, shrunk, LIMIT),
    ):
        decode(tf.constant(data[:begin] + 400 * scan + data[begin:]))
        with pytest.raises(tf.errors.InvalidArgumentError, match="over 500 scans"):
            decode(tf.constant(data[:begin] + 600 * scan + data[begin:]))
