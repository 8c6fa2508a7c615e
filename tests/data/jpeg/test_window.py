"""Windows of indexed JPEGs, compared with crops of whole images by libjpeg-turbo."""

import io
import pathlib
import struct
import time

import jpeg_writer
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from imagenet_fast.base.native_ops import load_ops, machine_flags
from imagenet_fast.data.jpeg.index import index_jpegs

HERE = pathlib.Path(__file__).parent
JPEG = HERE.parents[2] / "imagenet_fast" / "data" / "jpeg"
OK, UNSUPPORTED, CORRUPT, BAD_INDEX = range(4)  # jpeg_scan.h
JFIF = bytes.fromhex("ffe000104a46494600010100000100010000")
# In pixels: of MCUs, and not; with chroma of at most two samples in width.
SIZES = [(64, 48), (131, 205), (17, 300), (9, 5), (40, 3)]

pytestmark = [
    pytest.mark.usefixtures("native_ops"),
    pytest.mark.skipif(not machine_flags(), reason="windows are decoded with AVX2"),
]


def noise(height, width, mode="RGB"):
    random = np.random.RandomState(height)
    fine = random.randint(0, 256, (height, width, 3)).astype(np.uint8)
    coarse = Image.fromarray(fine[::8, ::8]).resize((width, height))
    return Image.fromarray(np.where(fine % 2, fine, np.asarray(coarse))).convert(mode)


def encode(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def decode_window(file, box, index=None):
    """Returns the result and the pixels."""
    files = [HERE / "window_op.cc"]
    files += [JPEG / f"{name}.cc" for name in ("jpeg_index", "jpeg_window")]
    files += sorted(JPEG.glob("*.h"))
    result, pixels = load_ops(*files).imagenet_fast_decode_window(
        jpeg=file, index=index or make_index(file), box=np.array(box, np.int32)
    )
    return int(result), pixels.numpy()


def make_index(file):
    return index_jpegs(tf.constant(file)).numpy()


def whole(file):
    return tf.io.decode_jpeg(file, channels=3, dct_method="INTEGER_ACCURATE").numpy()


def boxes(height, width, count, seed=0):
    """The whole image, its corners and borders, and any."""
    random = np.random.RandomState(seed)
    found = [(0, 0, height, width), (0, 0, 1, 1), (height - 1, width - 1, 1, 1)]
    found += [(0, width - 1, height, 1), (height - 1, 0, 1, width)]
    for _ in range(count):
        size = random.randint(1, height + 1), random.randint(1, width + 1)
        found.append(
            (random.randint(height - size[0] + 1), random.randint(width - size[1] + 1), *size)
        )
    return found


def check(file, count=12, expected=OK):
    """Checks that windows have the whole image's pixels, or are left to libjpeg-turbo."""
    image = whole(file)
    for top, left, height, width in boxes(*image.shape[:2], count):
        result, pixels = decode_window(file, (top, left, height, width))
        assert result == expected
        if expected == OK:
            crop = image[top : top + height, left : left + width]
            np.testing.assert_array_equal(pixels, crop, err_msg=f"{(top, left, height, width)}")


def with_quantization(file, *values):
    """The file with other numbers in its tables, in turn: its coefficients stand for others."""
    changed = bytearray(file)
    at = 0
    while (at := file.find(b"\xff\xdb", at)) >= 0:
        tables = (int.from_bytes(file[at + 2 : at + 4], "big") - 2) // 65
        for table in range(tables):
            begin = at + 5 + 65 * table
            changed[begin : begin + 64] = bytes(np.resize(values, 64).astype(np.uint8))
        at += 4
    return bytes(changed)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_windows_have_the_whole_images_pixels(size, subsampling):
    narrow = size[1] <= 4 and subsampling != "4:4:4"
    for options in (
        {"restart_marker_blocks": 3},
        {"optimize": True},
        {"quality": 5},
        {"quality": 100},
    ):
        file = encode(noise(*size), subsampling=subsampling, **options)
        check(file, expected=UNSUPPORTED if narrow else OK)


@pytest.mark.parametrize("size", SIZES)
def test_greyscale(size):
    for quality in (50, 100):
        check(encode(noise(*size, mode="L"), quality=quality))
    random = np.random.RandomState(0)
    # Its sampling has no meaning.
    check(jpeg_writer.random_jpeg(*size, "2x2", 0, random))


@pytest.mark.parametrize("sampling", ["1x1,1x1,1x1", "2x1,1x1,1x1", "2x2,1x1,1x1"])
def test_codes_that_are_not_looked_up_at_once(sampling):
    for interval in (0, 5):
        file = jpeg_writer.random_jpeg(75, 131, sampling, interval, np.random.RandomState(1))
        check(file[:2] + JFIF + file[2:])


@pytest.mark.parametrize("sampling", ["1x2,1x1,1x1", "4x1,1x1,1x1", "2x2,2x1,1x2", "1x1,2x2,2x2"])
def test_other_samplings_are_left_to_the_library(sampling):
    file = jpeg_writer.random_jpeg(75, 131, sampling, 0, np.random.RandomState(1))
    check(file[:2] + JFIF + file[2:], 1, UNSUPPORTED)


def adobe(transform):
    return b"\xff\xee\x00\x0eAdobe\x00\x64" + bytes(4) + bytes([transform])


@pytest.mark.parametrize(
    ("segments", "ids", "expected"),
    [
        (JFIF, (1, 2, 3), OK),
        (JFIF, (82, 71, 66), OK),
        (b"", (1, 2, 3), OK),
        (b"", (82, 71, 66), UNSUPPORTED),  # RGB
        (b"", (0, 1, 2), UNSUPPORTED),
        (adobe(1), (82, 71, 66), OK),
        (adobe(0), (1, 2, 3), UNSUPPORTED),  # RGB
        (adobe(0) + JFIF, (1, 2, 3), OK),
    ],
)
def test_colours_are_ycbcr_as_decoders_find_out(segments, ids, expected):
    file = encode(noise(40, 60))
    assert file[2 : 2 + len(JFIF)] == JFIF
    changed = bytearray(file[:2] + segments + file[2 + len(JFIF) :])
    frame, scan = changed.index(b"\xff\xc0"), changed.index(b"\xff\xda")
    for number, name in enumerate(ids):
        changed[frame + 10 + 3 * number] = changed[scan + 5 + 2 * number] = name
    check(bytes(changed), 4, expected)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_no_number_overflows_unseen(mode):
    """Beyond what images of 8 bits have, libjpeg-turbo's vectors overflow or clip."""
    results = set()
    for image in (
        noise(48, 64, mode),
        Image.new(mode, (48, 64)),
        Image.new(mode, (48, 64), "white"),
    ):
        file = encode(image, quality=100)
        for values in ((1,), (2,), (7,), (15, 16, 17), (40,), (61, 200), (253,), (255,)):
            patched = with_quantization(file, *values)
            image_of_8_bits = whole(patched)
            for top, left, height, width in boxes(*image_of_8_bits.shape[:2], 6):
                result, pixels = decode_window(patched, (top, left, height, width))
                results.add(result)
                if result == OK:
                    crop = image_of_8_bits[top : top + height, left : left + width]
                    np.testing.assert_array_equal(pixels, crop, err_msg=f"{values}")
    assert results == {OK, UNSUPPORTED}


def test_a_product_of_more_than_16_bits_is_seen():
    wave = 128 + 51 * np.cos((2 * np.arange(64) + 1) * np.pi / 16)
    image = Image.fromarray(np.tile(wave.round().astype(np.uint8), (48, 1)))
    # A coefficient of 288 or so, whose product's lowest 16 bits are small.
    file = with_quantization(encode(image, quality=100), 255)
    check(file, 2, UNSUPPORTED)


def test_tables_of_16_bits_are_left_to_the_library():
    file = encode(noise(48, 64, "L"))
    at = file.index(b"\xff\xdb")
    wide = b"\xff\xdb" + (2 + 129).to_bytes(2, "big") + b"\x10"
    wide += b"".join(bytes([0, value]) for value in file[at + 5 : at + 69])
    check(file[:at] + wide + file[at + 69 :], 2, UNSUPPORTED)


def test_a_window_of_damaged_bits_is_left_to_the_library():
    """Also if the index's hashes, of parts of the file, do not show the damage."""
    file = encode(noise(200, 300), quality=90)
    index = make_index(file)
    # Each row of its blocks ends at a point of the index.
    box = (0, 60, 200, 130)
    assert decode_window(file, box, index)[0] == OK
    results = []
    for at in range(1000, len(file) - 1000, 61):
        damaged = bytearray(file)
        damaged[at] ^= 0x10
        result, pixels = decode_window(bytes(damaged), box, index)
        results.append(result)
        if result == OK:
            # The damage is outside, or all after it is where it was.
            images = (whole(version)[:, 60:190] for version in (file, bytes(damaged)))
            assert any(np.array_equal(pixels, image) for image in images)
    assert {OK, CORRUPT, BAD_INDEX} <= set(results)


def flat(height, width):
    """A grey JPEG of blocks that are all equal, without Pillow: it may be large."""
    header = encode(Image.new("L", (8, 8), 128))
    header = header[: header.index(b"\xff\xda") + 10]
    frame = header.index(b"\xff\xc0") + 5
    size = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    blocks = -(-height // 8) * -(-width // 8)
    # Four times the codes 00 and 1010: no difference of DC coefficients, and the block's end.
    scan = (0b001010001010001010001010).to_bytes(3, "big") * -(-blocks // 4)
    return header[:frame] + size + header[frame + 4 :] + scan + b"\xff\xd9"


def test_a_window_larger_than_the_librarys_limit_is_left_to_it():
    file = flat(24_000, 23_000)
    result, _ = decode_window(file, (0, 0, 24_000, 23_000))
    assert result == UNSUPPORTED
    result, pixels = decode_window(file, (23_000, 22_000, 1_000, 1_000))
    assert result == OK and (pixels == 128).all()


def fnv(data, value=2166136261):
    for byte in data:
        value = (value ^ byte) * 16777619 % 2**32
    return value


def forged(index, file):
    """An index with the hashes of another file; see jpeg_index.h."""
    header = file[2 : file.index(b"\xff\xda")]  # all of its segments count
    pieces = ((len(file) - 8) * i // 63 for i in range(64))
    hashed = fnv(b"".join([header, *(file[at : at + 8] for at in pieces)]))
    body = index[:2] + struct.pack("<II", len(file), hashed) + index[10:-4]
    return body + struct.pack("<I", fnv(body))


def test_bytes_behind_the_scan_take_no_time():
    file = flat(65_528, 64)
    index = make_index(file)
    assert forged(index, file) == index
    seconds = []
    for behind in (b"\xff\xd9", bytes(30 << 20)):
        longer = file[:-2] + behind
        start = time.process_time()
        # A run of each row of blocks.
        result, _ = decode_window(longer, (0, 0, 65_528, 4), forged(index, longer))
        seconds.append(time.process_time() - start)
        assert result == OK
    # It was a thousand times as long when each run searched all bytes.
    assert seconds[1] < 20 * seconds[0] + 2


def test_a_code_of_ones_only_is_not_indexed():
    """No decoder takes it, even if it does not occur."""
    file = bytearray(encode(noise(48, 64, "L")))
    table = file.index(b"\xff\xc4\x00\xb5\x10")
    counts = table + 5
    file[counts + 15] += 1  # of 16 bits
    end = table + 2 + 0xB5
    file[end:end] = b"\x0b"  # an unused symbol
    file[table + 3] += 1
    with pytest.raises(tf.errors.InvalidArgumentError):
        whole(bytes(file))
    assert make_index(bytes(file)) == b""
