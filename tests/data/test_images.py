import io
import struct
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
from damaged_images import mutations, png_chunk
from PIL import Image, ImageOps, features
from PIL.BmpImagePlugin import BmpImageFile

from imagenet_fast.data import images
from imagenet_fast.data.images import (
    BadImageError,
    SizeLimit,
    TooManyPixelsError,
    encode_pixels,
    normalize_encoding,
)

RANDOM = np.random.RandomState(0)
# Smooth, as photographs are, so that JPEG changes little.
RAMP = np.stack(
    np.broadcast_arrays(np.arange(48)[:, None] * 5, np.arange(64) * 4, np.full((48, 64), 90)), -1
).astype(np.uint8)


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decoded(image):
    """Decodes as training does."""
    import tensorflow as tf

    return tf.image.decode_jpeg(image.data, channels=3, dct_method="INTEGER_ACCURATE").numpy()


def close(image, pixels):
    return np.abs(decoded(image).astype(int) - pixels).mean() < 2


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_good_jpegs_stay_as_they_are(mode, channels, progressive):
    data = encoded(Image.fromarray(RAMP).convert(mode), "JPEG", progressive=progressive)
    image = normalize_encoding(data)
    assert image[:5] == (data, 48, 64, channels, None)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "AVIF", "JPEG2000"])
def test_other_formats_become_jpegs(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    image = normalize_encoding(encoded(Image.fromarray(RAMP), kind, **options))
    assert image[1:5] == (48, 64, 3, kind)
    if kind == "GIF":  # 256 colours
        assert np.abs(decoded(image).astype(int) - RAMP).mean() < 12
    else:
        assert close(image, RAMP)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM", "JPEG2000", "pixels"])
def test_pngs_keep_each_pixel(kind, mode):
    original = Image.fromarray(RANDOM.randint(0, 256, (15, 11, 3), np.uint8)).convert(mode)
    if kind == "pixels":
        image = encode_pixels(np.asarray(original), "png")
    else:
        options = {"lossless": True} if kind == "WEBP" else {}
        image = normalize_encoding(encoded(original, kind, **options), "png")
    channels = 3 if kind in ("GIF", "WEBP") else len(mode)  # these two know no grey
    assert image[1:5] == (15, 11, channels, kind)
    assert Image.open(io.BytesIO(image.data)).format == "PNG"
    assert png_channels(image.data) == channels
    np.testing.assert_array_equal(decoded(image), np.asarray(original.convert("RGB")))


def png_channels(data):
    """Returns the channels that the header of a PNG of 8 bits tells."""
    assert data[24] == 8
    return {0: 1, 2: 3}[data[25]]


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_jpegs_do_not_become_pngs(mode):
    data = encoded(Image.fromarray(RAMP).convert(mode), "JPEG")
    assert normalize_encoding(data, "png").data == data


def test_cmyk_jpegs_become_rgb_pngs_without_its_profile():
    data = encoded(Image.fromarray(RAMP).convert("CMYK"), "JPEG", icc_profile=b"of CMYK")
    image = normalize_encoding(data, "png")
    assert image[1:5] == (48, 64, 3, "CMYK JPEG")
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(decoded(image), expected)
    assert b"iCCP" not in image.data


def with_chunk(png, kind, data):
    """Returns a PNG with one more chunk behind its header."""
    return png[:33] + png_chunk(kind, data) + png[33:]


@pytest.mark.parametrize("encoding", ["jpeg", "png"])
@pytest.mark.parametrize(
    "data",
    [
        encoded(Image.fromarray(RAMP), "GIF", comment=b"long " * 20_000),
        with_chunk(encoded(Image.fromarray(RAMP), "PNG"), b"tEXt", b"Comment\0" + bytes(99_000)),
        encoded(Image.fromarray(RAMP), "PNG", icc_profile=b"no profile"),
        encoded(Image.fromarray(RAMP), "PNG", icc_profile=bytes(17_000_000)),
        encoded(Image.fromarray(RAMP), "WEBP", icc_profile=b"profile " * 3_000_000),
        encoded(Image.fromarray(RAMP).convert("CMYK"), "JPEG", comment=b"long " * 13_000),
    ],
    ids=["GIF", "PNG", "profile", "large profile", "WebP", "CMYK"],
)
def test_metadata_is_not_copied_and_may_be_of_any_size_or_damaged(data, encoding):
    try:
        image = normalize_encoding(data, encoding)
    except BadImageError as error:  # Pillow itself refuses some while it reads.
        assert "Decompressed data too large" in str(error)
        return
    assert len(image.data) < 10_000
    assert Image.open(io.BytesIO(image.data)).info.keys() <= {"jfif", *JFIF}
    assert close(image, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


JFIF = ("jfif_version", "jfif_unit", "jfif_density")


class _OddError(Exception):
    pass


@pytest.mark.parametrize("method", ["load", "convert", "save"])
@pytest.mark.parametrize("error", [_OddError("odd at 0x7f12"), MemoryError(), KeyError(3)])
def test_whatever_pillow_raises_makes_one_bad_image(monkeypatch, method, error):
    def fail(*_, **__):
        raise error

    data = encoded(Image.fromarray(RAMP).quantize(16), "BMP")
    for owner in (Image.Image, BmpImageFile):
        monkeypatch.setattr(owner, method, fail)
    with pytest.raises(BadImageError, match=r"cannot .*: (odd|MemoryError|3)$"):
        normalize_encoding(data)


def test_damaged_files_of_eleven_formats_are_images_or_bad_images():
    outcomes = {"image": 0, "bad": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of metadata
        for data in mutations(700):
            try:
                image = normalize_encoding(data)
            except BadImageError as error:
                outcomes["bad"] += 1
                assert len(str(error).splitlines()) == 1
            else:
                outcomes["image"] += 1
                assert Image.open(io.BytesIO(image.data)).size == (image.width, image.height)
    assert min(outcomes.values()) > 100


def test_cmyk_jpegs_become_rgb():
    data = encoded(Image.fromarray(RAMP).convert("CMYK"), "JPEG", quality=95)
    image = normalize_encoding(data)
    assert image[1:5] == (48, 64, 3, "CMYK JPEG")
    assert close(image, RAMP)


def test_what_is_transparent_becomes_white():
    alpha = np.full((48, 64), 255, np.uint8)
    alpha[:24] = 0
    data = encoded(Image.fromarray(np.dstack([RAMP, alpha])), "PNG")
    expected = RAMP.copy()
    expected[:24] = 255
    assert close(normalize_encoding(data), expected)


def test_a_transparent_palette_becomes_white():
    image = Image.new("P", (16, 16), 0)
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.paste(1, (0, 0, 16, 8))
    result = decoded(normalize_encoding(encoded(image, "PNG", transparency=0)))
    assert (result[12, 8] > 250).all()
    assert result[3, 8, 2] > 180 and result[3, 8, 0] < 20


def test_grey_stays_grey_whatever_the_depth():
    grey = RAMP[:, :, 0]
    deep = Image.fromarray(grey.astype(np.uint16) * 256)
    for image in (
        normalize_encoding(encoded(Image.fromarray(grey), "PNG")),
        normalize_encoding(encoded(deep, "PNG")),
        encode_pixels(grey),
    ):
        assert image.channels == 1
        assert close(image, np.dstack([grey] * 3))


def test_pixels_are_encoded_without_chroma_subsampling():
    stripes = np.zeros((32, 32, 3), np.uint8)
    stripes[:, ::2] = (200, 40, 40)
    stripes[:, 1::2] = (40, 40, 200)
    image = encode_pixels(stripes)
    assert image[1:5] == (32, 32, 3, "pixels")
    assert np.abs(decoded(image).astype(int) - stripes).mean() < 6  # 4:2:0 would give about 50


def test_pixels_in_any_memory_order():
    first = np.ascontiguousarray(RAMP.transpose(2, 0, 1))
    assert encode_pixels(first.transpose(1, 2, 0)).data == encode_pixels(RAMP).data


@pytest.mark.parametrize(
    "pixels", [np.zeros((8, 8)), np.zeros((8, 8, 4), np.uint8), np.zeros((0, 8), np.uint8)]
)
def test_other_arrays_are_refused(pixels):
    with pytest.raises(ValueError, match="pixels must be uint8"):
        encode_pixels(pixels)


def test_what_is_too_wide_for_a_jpeg_is_bad():
    wide = np.zeros((4, 70000), np.uint8)
    data = encoded(Image.fromarray(wide), "PNG")
    for encode in (lambda: normalize_encoding(data), lambda: encode_pixels(wide)):
        with pytest.raises(BadImageError, match=r"^70000 x 4 pixels cannot be encoded as jpeg: "):
            encode()
    assert normalize_encoding(data, "png").width == 70000


def test_pngs_that_training_cannot_decode_raise():
    import tensorflow as tf

    most = encode_pixels(np.zeros((1_000_000, 1), np.uint8), "png")
    assert tf.io.decode_png(most.data).shape == (1_000_000, 1, 1)
    with pytest.raises(
        BadImageError, match=r"^1000001 x 1 pixels cannot be encoded as png: training "
    ):
        encode_pixels(np.zeros((1, 1_000_001), np.uint8), "png")


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_truncated_images_are_bad(kind):
    data = encoded(Image.fromarray(RANDOM.randint(0, 256, (48, 64, 3), np.uint8)), kind)
    with pytest.raises(BadImageError, match="cannot be decoded"):
        normalize_encoding(data[: len(data) // 2])


@pytest.mark.parametrize("data", [b"", b"<html>not found</html>", b"\xff\xd8\xff"])
def test_what_is_no_image_is_bad_and_the_reason_always_the_same(data):
    reasons = set()
    for _ in range(2):
        with pytest.raises(BadImageError) as caught:
            normalize_encoding(data)
        reasons.add(str(caught.value))
    assert len(reasons) == 1


def test_tensorflow_decodes_the_first_picture_of_an_mpo():
    buffer = io.BytesIO()
    Image.fromarray(RAMP).save(
        buffer, "MPO", save_all=True, append_images=[Image.fromarray(255 - RAMP)], quality=95
    )
    image = normalize_encoding(buffer.getvalue())
    assert image.converted_from is None
    assert close(image, RAMP)


@pytest.mark.parametrize(
    ("limit", "size", "expected"),
    [
        (SizeLimit(max_side=50), (100, 60), (50, 30)),
        (SizeLimit(max_side=50), (60, 100), (30, 50)),
        (SizeLimit(shorter_side=50), (100, 60), (83, 50)),
        (SizeLimit(shorter_side=50), (60, 100), (50, 83)),
        (SizeLimit(max_side=50), (5000, 3), (50, 1)),
        (SizeLimit(max_side=3), (8, 4), (3, 2)),
        (SizeLimit(max_side=50), (50, 50), None),
        (SizeLimit(shorter_side=50), (9000, 50), None),
        (SizeLimit(), (9000, 9000), None),
    ],
)
def test_what_is_above_a_limit_becomes_smaller_in_its_aspect(limit, size, expected):
    assert limit.smaller(*size) == expected


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("kind", ["PNG", "BMP", "pixels"])
def test_large_images_are_resized_as_by_pillow(kind, mode):
    original = Image.fromarray(RANDOM.randint(0, 256, (48, 64, 3), np.uint8)).convert(mode)
    if kind == "pixels":
        image = encode_pixels(np.asarray(original), "png", SizeLimit(max_side=20))
    else:
        image = normalize_encoding(
            encoded(original, kind), "png", size_limit=SizeLimit(max_side=20)
        )
    assert image[1:5] == (15, 20, len(mode), f"{kind}, resized")
    expected = original.resize((20, 15), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(decoded(image), np.asarray(expected.convert("RGB")))


def photograph(width, height, **options):
    noise = Image.fromarray(np.random.RandomState(3).randint(0, 256, (9, 12, 3), np.uint8))
    smooth = np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    grain = np.random.RandomState(4).randint(-9, 10, smooth.shape)
    pixels = np.clip(smooth + grain, 0, 255).astype(np.uint8)
    return encoded(Image.fromarray(pixels), "JPEG", quality=92, **options)


@pytest.mark.parametrize(
    ("kind", "options"), [("JPEG", {}), ("JPEG", {"progressive": True}), ("MPO", {})]
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_large_jpegs_are_decoded_small_without_harm(kind, options, mode):
    data = photograph(410, 307)  # no multiple of 8: what is decoded has a part of a pixel too much
    if mode != "RGB" or kind == "MPO":
        data = encoded(Image.open(io.BytesIO(data)).convert(mode), kind, quality=92, **options)
    whole = Image.open(io.BytesIO(data)).convert("L" if mode == "L" else "RGB")
    image = normalize_encoding(data, "png", size_limit=SizeLimit(max_side=50))
    name = "CMYK JPEG" if mode == "CMYK" else "JPEG"
    assert image[1:5] == (37, 50, 1 if mode == "L" else 3, f"{name}, resized")
    expected = np.asarray(whole.resize((50, 37), Image.Resampling.BICUBIC).convert("RGB"))
    difference = np.abs(decoded(image).astype(int) - expected)
    assert difference.mean() < 0.6 and difference.max() <= 4


def test_a_large_jpeg_is_decoded_at_no_less_than_twice_its_new_size(monkeypatch):
    sizes = []
    resize = Image.Image.resize

    def noted(image, *arguments, **options):
        sizes.append(image.size)
        return resize(image, *arguments, **options)

    data = photograph(400, 300)
    monkeypatch.setattr(Image.Image, "resize", noted)
    for side in (200, 100, 99, 48, 24):
        normalize_encoding(data, size_limit=SizeLimit(max_side=side))
    assert sizes == [(400, 300), (200, 150), (200, 150), (100, 75), (50, 38)]


@pytest.mark.parametrize("encoding", ["jpeg", "png"])
def test_jpegs_within_the_limit_keep_their_bytes(encoding):
    data = encoded(Image.fromarray(RAMP), "JPEG")
    for limit in (SizeLimit(max_side=64), SizeLimit(shorter_side=48)):
        image = normalize_encoding(data, encoding, size_limit=limit)
        assert image[:5] == (data, 48, 64, 3, None)


def test_a_large_jpeg_becomes_one_of_high_quality_without_its_metadata():
    large = encoded(Image.fromarray(RAMP), "JPEG", comment=b"comment", quality=60)
    image = normalize_encoding(large, size_limit=SizeLimit(shorter_side=24))
    assert image[1:5] == (24, 32, 3, "JPEG, resized")
    whole = decoded(large_image := normalize_encoding(large))
    assert large_image.data == large
    small = Image.fromarray(whole).resize((32, 24), Image.Resampling.BICUBIC)
    assert image.data == encoded(small, "JPEG", quality=95, subsampling=0)
    assert b"comment" not in image.data


def test_a_large_truncated_jpeg_is_bad():
    data = photograph(400, 300)
    with pytest.raises(BadImageError, match="cannot be decoded"):
        normalize_encoding(data[: len(data) // 2], size_limit=SizeLimit(max_side=25))


def tiff(pixels, bits, photometric=1, kind=1):
    """Returns a TIFF of bytes or numbers of shape (height, bytes in a row) or (height, width).

    ``kind`` is the samples' format: 1 unsigned, 2 signed, 3 float.
    """
    data = pixels.tobytes()
    width = pixels.shape[1] * pixels.dtype.itemsize * 8 // bits
    tags = [(256, width), (257, len(pixels)), (258, bits), (259, 1), (262, photometric), (273, 8)]
    tags += [(277, 1), (278, len(pixels)), (279, len(data)), (339, kind)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    end = struct.pack("<H", len(tags)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + end


# 16 bits, all of whose upper 8 occur.
DEEP = (np.arange(48 * 64).reshape(48, 64) * 21).astype(np.uint16)


def twelve_bits(pixels):
    """Returns 12-bit numbers, two in three bytes."""
    even, odd = pixels[:, ::2], pixels[:, 1::2]
    return np.stack([even >> 4, (even << 4 & 240) | odd >> 8, odd & 255], -1).astype(np.uint8)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (tiff(DEEP, 16), DEEP >> 8),
        (tiff(DEEP, 16, photometric=0), 255 - (DEEP >> 8)),
        (tiff(twelve_bits(DEEP >> 4).reshape(48, -1), 12), DEEP >> 8),
        (encoded(Image.fromarray(DEEP), "TIFF", compression="tiff_lzw"), DEEP >> 8),
        (encoded(Image.fromarray(DEEP.astype(">u2")), "TIFF"), DEEP >> 8),
        (encoded(Image.fromarray(DEEP), "JPEG2000"), DEEP >> 8),
        (b"P5 64 48 65535\n" + DEEP.astype(">u2").tobytes(), DEEP >> 8),
        (b"P5 64 48 4095\n" + (DEEP >> 4).astype(">u2").tobytes(), DEEP >> 8),
        (tiff((DEEP >> 8).astype(np.uint8), 8, photometric=0), 255 - (DEEP >> 8)),
    ],
    ids=["TIFF", "white 0", "12 bits", "LZW", "MM", "JPEG 2000", "PGM", "PGM of 12", "8 bits"],
)
def test_deep_grey_keeps_its_upper_8_bits(data, expected):
    image = normalize_encoding(data, "png")
    assert image.channels == 1
    np.testing.assert_array_equal(decoded(image)[:, :, 0], expected)


def test_16_bit_colours_become_those_of_8():
    deep = RANDOM.randint(0, 2**16, (48, 64, 3)).astype(">u2")
    image = normalize_encoding(b"P6 64 48 65535\n" + deep.tobytes(), "png")
    assert np.abs(decoded(image).astype(int) - deep / 257).max() <= 0.5


@pytest.mark.parametrize(
    "data",
    [
        tiff((DEEP / 65535).astype(np.float32), 32, kind=3),
        tiff(DEEP.astype(np.uint32) << 15, 32),
        tiff((DEEP >> 1).astype(np.int16), 16, kind=2),
        b"Pf\n64 48\n-1\n" + (DEEP / 65535).astype("<f4").tobytes(),
    ],
    ids=["float", "32 bits", "signed", "PFM"],
)
def test_pixels_of_no_known_range_are_bad_and_not_clipped(data):
    with pytest.raises(BadImageError, match=r"floats, signed or have 32 bits.* convert it to 8 or"):
        normalize_encoding(data)


def test_a_tiff_of_a_kind_that_pillow_does_not_read_is_told():
    with pytest.raises(BadImageError, match="a damaged TIFF, or of a kind that Pillow does"):
        normalize_encoding(tiff(DEEP.astype(np.uint64), 64))


@pytest.mark.parametrize("kind", ["TIFF", "AVIF", "GIF", "WEBP"])
def test_of_several_pages_it_is_the_first(kind):
    pages = [Image.new("L", (64, 48), grey) for grey in (200, 20)]
    data = encoded(pages[0], kind, save_all=True, append_images=pages[1:])
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert close(normalize_encoding(data), np.full((48, 64, 3), 200))


def test_a_turned_tiff_is_resized_as_it_is_seen():
    data = encoded(Image.fromarray(RAMP), "TIFF", tiffinfo={274: 6})
    image = normalize_encoding(data, "png", size_limit=SizeLimit(max_side=32))
    assert image[1:5] == (32, 24, 3, "TIFF, resized")


@pytest.mark.parametrize(
    ("kind", "feature", "name"),
    [("AVIF", "avif", "AVIF"), ("JPEG2000", "jpg_2000", "JPEG 2000"), ("WEBP", "webp", "WebP")],
)
def test_what_this_pillow_was_built_without_is_named(monkeypatch, kind, feature, name):
    files = [encoded(Image.fromarray(RAMP), kind)]
    if kind == "JPEG2000":
        files.append(encoded(Image.fromarray(RAMP), kind, no_jp2=True))
    check = features.check
    monkeypatch.setattr(features, "check", lambda own: own != feature and check(own))
    for data in files:
        with pytest.raises(BadImageError, match=f"^this Pillow was built without {name}; install"):
            normalize_encoding(data)
    assert normalize_encoding(encoded(Image.fromarray(RAMP), "PPM")).converted_from == "PPM"


def test_a_pillow_that_does_not_know_avif_reads_the_rest(monkeypatch):
    Image.init()
    monkeypatch.delitem(Image.OPEN, "AVIF")
    assert normalize_encoding(encoded(Image.fromarray(RAMP), "TIFF")).converted_from == "TIFF"
    with pytest.raises(BadImageError, match="not an image of a known format"):
        normalize_encoding(b"neither of them")


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("kind", ["TIFF", "PPM", "AVIF", "JPEG2000"])
def test_truncated_files_of_other_formats_are_bad(kind):
    data = encoded(Image.fromarray(RANDOM.randint(0, 256, (48, 64, 3), np.uint8)), kind)
    for length in (len(data) // 2, 20):
        with pytest.raises(BadImageError) as caught:
            normalize_encoding(data[:length])
        assert "0x" not in str(caught.value)


def with_orientation(image, kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_as_by_pillow(kind, orientation):
    data = with_orientation(Image.fromarray(RAMP), kind, orientation)
    image = normalize_encoding(data, "png", exif="apply")
    if kind == "JPEG" and orientation == 1:
        assert image[:5] == normalize_encoding(data, "png")[:5] == (data, 48, 64, 3, None)
        return
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    done = ", turned" if orientation > 1 else ""
    assert image[1:5] == (expected.height, expected.width, 3, kind + done)
    np.testing.assert_array_equal(decoded(image), np.asarray(expected))
    assert not Image.open(io.BytesIO(image.data)).getexif()
    ignored = Image.open(io.BytesIO(normalize_encoding(data, "png").data))
    np.testing.assert_array_equal(np.asarray(ignored), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("exif", ["ignore", "apply"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_is_turned_once_in_any_case(orientation, exif):
    data = encoded(Image.fromarray(RAMP), "TIFF", tiffinfo={274: orientation})
    image = normalize_encoding(data, "png", exif=exif)
    expected = RAMP
    if orientation > 1:
        jpeg = with_orientation(Image.fromarray(RAMP), "PNG", orientation)
        expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg))))
    np.testing.assert_array_equal(decoded(image), expected)


@pytest.mark.parametrize("limit", [SizeLimit(max_side=30), SizeLimit(shorter_side=23)])
def test_large_images_that_are_not_upright_are_resized_and_turned(limit):
    data = with_orientation(Image.open(io.BytesIO(photograph(410, 307))), "JPEG", 6)
    image = normalize_encoding(data, size_limit=limit, exif="apply")
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    size = limit.smaller(*turned.size)
    assert image[1:5] == (*size[::-1], 3, "JPEG, resized, turned")
    difference = decoded(image).astype(int) - turned.resize(size, Image.Resampling.BICUBIC)
    assert np.abs(difference).mean() < 3


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("exif", [b"Exif\0\0MM\0*\0\0\xff\xff", b"Exif\0\0II*", b"Exif\0\0" * 9])
def test_where_exif_is_damaged_or_odd_the_image_is_as_it_was(exif):
    data = encoded(Image.fromarray(RAMP), "JPEG", exif=exif)
    assert normalize_encoding(data, exif="apply").data == data
    for orientation in (0, 9, 65535):
        data = with_orientation(Image.fromarray(RAMP), "JPEG", orientation)
        assert normalize_encoding(data, exif="apply").data == data


def test_a_png_whose_exif_is_no_number_is_an_image_all_the_same():
    text = b"Raw profile type exif\0\nexif\n9\nno hexadecimal number"
    data = with_chunk(encoded(Image.fromarray(RAMP), "PNG"), b"tEXt", text)
    with pytest.raises(ValueError, match="hexadecimal"):
        Image.open(io.BytesIO(data)).getexif()
    assert normalize_encoding(data, exif="apply").converted_from == "PNG"


def test_a_jpeg_of_many_scans_is_refused():
    """Each takes the time of a whole image."""
    data = encoded(Image.fromarray(RAMP), "JPEG", progressive=True)
    begin = data.rindex(b"\xff\xda")
    scan = data[begin : data.rindex(b"\xff\xd9")]
    normalize_encoding(data[:begin] + 100 * scan + data[begin:])
    with pytest.raises(BadImageError, match="a JPEG of more than 500 scans"):
        normalize_encoding(data[:begin] + 500 * scan + data[begin:])


def test_scans_of_previews_do_not_count():
    scan = b"\xff\xda\0\x02"
    preview = b"\xff\xe1" + struct.pack(">H", 2 + 600 * len(scan)) + 600 * scan
    data = encoded(Image.fromarray(RAMP), "JPEG")
    assert normalize_encoding(data[:2] + preview + data[2:]).converted_from is None


# The most memory that a 13,000 x 13,000 image may take to be refused or not.
@pytest.mark.parametrize(
    ("kind", "mode", "options", "refused"),
    [
        ("PNG", "RGB", {}, False),
        ("PNG", "RGBA", {}, True),
        ("PNG", "LA", {}, False),
        ("PNG", "I;16", {}, False),
        ("JPEG", "RGB", {}, False),
        ("JPEG", "RGB", {"progressive": True}, True),
        ("WEBP", "RGB", {}, True),
        ("TIFF", "RGBA", {"compression": "tiff_deflate"}, True),
        ("JPEG2000", "RGB", {}, True),
    ],
)
def test_images_that_take_over_a_gibibyte_are_refused(monkeypatch, kind, mode, options, refused):
    side = 1300
    monkeypatch.setattr(images, "_MOST_MEMORY", images._MOST_MEMORY // 100)
    data = encoded(Image.new(mode, (side, side)), kind, **options)
    if refused:
        reason = r"1300 x 1300 pixels, whose conversion would take 0.0 GiB of memory"
        with pytest.raises(TooManyPixelsError, match=reason):
            normalize_encoding(data)
    else:
        normalize_encoding(data)


PEAK = """
import resource, sys
from PIL import Image
from imagenet_fast.data import images

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

data = sys.stdin.buffer.read()
image = images._open(data)
images.normalize_encoding(open(sys.argv[1], "rb").read())
before, expected = peak(), images._memory(image, None, False)
images.normalize_encoding(data)
print(peak() - before, expected)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss")
@pytest.mark.parametrize(
    ("kind", "mode"), [("PNG", "RGBA"), ("PNG", "I;16"), ("WEBP", "RGBA"), ("JPEG2000", "RGB")]
)
def test_conversion_takes_no_more_memory_than_expected(tmp_path, kind, mode):
    (tmp_path / "small").write_bytes(encoded(Image.new(mode, (900, 900)), kind))
    data = encoded(Image.new(mode, (3000, 3000)), kind)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "small")],
        input=data,
        capture_output=True,
        check=True,
    )
    peak, expected = map(int, done.stdout.split())
    assert peak < expected + 2**24


def test_a_jpeg_of_very_many_segments():
    data = encoded(Image.new("RGB", (16, 16)), "JPEG")
    with pytest.raises(BadImageError, match="a JPEG of more than 65,536 segments"):
        normalize_encoding(data[:2] + 70_000 * b"\xff\xe0\0\2" + data[2:])
    few = normalize_encoding(data[:2] + 1_000 * b"\xff\xe0\0\2" + data[2:])
    assert (few.width, few.height) == (16, 16)


def test_a_tile_may_be_larger_than_its_image():
    # Tags and values: size, bits, compression, photometric, bands, tile, its offset and bytes.
    tags = {256: 16, 257: 16, 258: 8, 259: 1, 262: 1, 277: 1, 322: 20_000, 323: 20_000}
    tags |= {324: 8 + 2 + 12 * 10 + 4, 325: 256}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    data = struct.pack("<4sIH", b"II*\0", 8, len(tags)) + entries + bytes(4 + 256)
    with pytest.raises(TooManyPixelsError, match="whose conversion would take 1"):
        normalize_encoding(data)


def test_large_images_are_converted_one_at_a_time(monkeypatch):
    monkeypatch.setattr(images, "_MUCH_MEMORY", 100_000)
    lock = threading.Lock()
    held = []
    monkeypatch.setattr(images, "to_grey_or_rgb", lambda image: held.append(lock.locked()) or image)
    for side in (100, 200):
        data = encoded(Image.new("RGB", (side, side)), "PNG")
        normalize_encoding(data, one_at_a_time=lock)
    assert held == [False, True]
    assert not lock.locked()
