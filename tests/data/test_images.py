import io
import warnings

import numpy as np
import pytest
from damaged_images import mutations, png_chunk
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile

from imagenet_fast.data.images import BadImageError, encode_pixels, normalize_encoding

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
    assert image == (data, 48, 64, channels, None)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "WEBP"])
def test_other_formats_become_jpegs(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    image = normalize_encoding(encoded(Image.fromarray(RAMP), kind, **options))
    assert image[1:] == (48, 64, 3, kind)
    if kind == "GIF":  # 256 colours
        assert np.abs(decoded(image).astype(int) - RAMP).mean() < 12
    else:
        assert close(image, RAMP)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "pixels"])
def test_pngs_keep_each_pixel(kind, mode):
    original = Image.fromarray(RANDOM.randint(0, 256, (15, 11, 3), np.uint8)).convert(mode)
    if kind == "pixels":
        image = encode_pixels(np.asarray(original), "png")
    else:
        options = {"lossless": True} if kind == "WEBP" else {}
        image = normalize_encoding(encoded(original, kind, **options), "png")
    channels = 3 if kind in ("GIF", "WEBP") else len(mode)  # these two know no grey
    assert image[1:] == (15, 11, channels, kind)
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
    assert image[1:] == (48, 64, 3, "CMYK JPEG")
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

    data = encoded(Image.fromarray(RAMP), "BMP")
    for owner in (Image.Image, BmpImageFile):
        monkeypatch.setattr(owner, method, fail)
    with pytest.raises(BadImageError, match=r"cannot .*: (odd|MemoryError|3)$"):
        normalize_encoding(data)


def test_damaged_files_of_nine_formats_are_images_or_bad_images():
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
    assert image[1:] == (48, 64, 3, "CMYK JPEG")
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
    assert image[1:] == (32, 32, 3, "pixels")
    assert np.abs(decoded(image).astype(int) - stripes).mean() < 6  # 4:2:0 would give about 50


def test_pixels_in_any_memory_order():
    first = np.ascontiguousarray(RAMP.transpose(2, 0, 1))
    assert encode_pixels(first.transpose(1, 2, 0)) == encode_pixels(RAMP)


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


def test_what_training_could_not_decode_is_no_png():
    import tensorflow as tf

    most = encode_pixels(np.zeros((1_000_000, 1), np.uint8), "png")
    assert tf.io.decode_png(most.data).shape == (1_000_000, 1, 1)
    with pytest.raises(BadImageError, match=r"^1000001 x 1 pixels cannot be encoded as png: more "):
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
