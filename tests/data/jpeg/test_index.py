"""Crops decoded from cuts of JPEGs, compared with crops of whole images."""

import io
import os
import pathlib
import subprocess

import jpeg_writer
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from imagenet_fast.base.native_ops import load_ops, machine_flags
from imagenet_fast.config import Config
from imagenet_fast.data import batches
from imagenet_fast.data.examples import encode_example
from imagenet_fast.data.info import DatasetInfo
from imagenet_fast.data.jpeg.image_ops import with_resize_kernel
from imagenet_fast.data.jpeg.index import index_file, index_jpegs

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
JPEG = ROOT / "imagenet_fast" / "data" / "jpeg"
DCT = "INTEGER_ACCURATE"


pytestmark = pytest.mark.usefixtures("native_ops")


def picture(height, width, seed=0):
    """Noise of several sizes, so that coefficients of all frequencies and sizes occur."""
    random = np.random.RandomState(seed)
    parts = [
        Image.fromarray(random.randint(0, 256, (side, side, 3)).astype(np.uint8))
        for side in (3, 20, 90)
    ]
    pixels = [np.asarray(part.resize((width, height)), np.float32) for part in parts]
    return Image.fromarray(np.mean(pixels, 0).astype(np.uint8))


def encode(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def jpegs(height, width, seed=0):
    """JPEGs of all kinds that Pillow writes and that have an index, by their kind."""
    image = picture(height, width, seed)
    kinds = {}
    for optimize in (False, True):
        for restart in ({}, {"restart_marker_blocks": 5}, {"restart_marker_rows": 1}):
            options = {"quality": 92, "optimize": optimize, **restart}
            for subsampling in ("4:4:4", "4:2:2", "4:2:0"):
                file = encode(image, subsampling=subsampling, **options)
                kinds[f"{subsampling} {options}"] = file
            kinds[f"grey {options}"] = encode(image.convert("L"), **options)
    # Tables with codes for a few differences only.
    flat = Image.new("RGB", (width, height), (90, 20, 200))
    flat.paste((250, 250, 0), (width // 3, height // 2, width, height))
    kinds["flat"] = encode(flat, optimize=True, quality=98)
    # A colour profile, EXIF and a comment, which no cut needs.
    kinds["metadata"] = encode(image, icc_profile=bytes(70_000), comment=b"none", dpi=(72, 72))
    return kinds


def load_cut_op():
    names = (
        "always_inline.h",
        "jpeg_cut.cc",
        "jpeg_cut.h",
        "jpeg_index.cc",
        "jpeg_index.h",
        "jpeg_scan.h",
    )
    return load_ops(HERE / "cut_op.cc", *(JPEG / name for name in names))


def cut_jpegs(encoded, indexes, boxes):
    """Returns the cuts, the boxes in them, and which images were cut."""
    cut = load_cut_op().imagenet_fast_cut_jpegs
    return cut(jpegs=encoded, indexes=indexes, boxes=boxes)[:3]


def draw_boxes(height, width, count, random):
    """Any boxes, the whole image, and the smallest ones in its corners."""
    fixed = [
        (0, 0, height, width),
        (0, 0, 1, 1),
        (height - 1, width - 1, 1, 1),
        (0, width - 1, height, 1),
    ]
    heights, widths = random.randint(1, height + 1, count), random.randint(1, width + 1, count)
    tops = random.randint(0, height - heights + 1)
    lefts = random.randint(0, width - widths + 1)
    drawn = np.stack([tops, lefts, heights, widths], 1)
    return np.concatenate([np.array(fixed), drawn]).astype(np.int32)


def check_crops(file, boxes):
    """Returns how many bytes the cuts have, having compared their pixels with the whole image's."""
    index = index_jpegs(tf.constant(file)).numpy()
    assert index
    arguments = {"channels": 3, "dct_method": DCT}
    whole = tf.io.decode_jpeg(file, **arguments).numpy()
    count = len(boxes)
    cuts, cut_boxes, were_cut = cut_jpegs([file] * count, [index] * count, boxes)
    assert were_cut.numpy().all()
    for cut, cut_box, box in zip(cuts.numpy(), cut_boxes.numpy(), boxes):
        pixels = tf.io.decode_jpeg(cut, **arguments).numpy()
        crops = [part[window(own)] for part, own in ((pixels, cut_box), (whole, box))]
        assert crops[0].shape == crops[1].shape
        np.testing.assert_array_equal(*crops, err_msg=f"{box}, cut to {pixels.shape}")
    return sum(map(len, cuts.numpy()))


def window(box):
    top, left, height, width = box
    return slice(top, top + height), slice(left, left + width)


@pytest.mark.parametrize("size", [(131, 205), (64, 48), (17, 300), (9, 5)])
def test_crops_of_cuts_are_those_of_the_whole_image(size):
    random = np.random.RandomState(0)
    for file in jpegs(*size).values():
        check_crops(file, draw_boxes(*size, 40, random))


# Those of the rare samplings are random coefficients: no library here writes them.
@pytest.mark.parametrize(
    "sampling",
    [
        "1x1",
        "2x2",
        "1x2,1x1,1x1",
        "2x1,1x2,1x1",
        "4x1,1x1,1x1",
        "2x2,2x1,1x2",
        "1x4,1x1,1x2",
        "1x1,2x2,2x2",
    ],
)
def test_crops_of_odd_samplings(sampling):
    random = np.random.RandomState(1)
    for interval in (0, 3):
        file = jpeg_writer.random_jpeg(75, 131, sampling, interval, random)
        check_crops(file, draw_boxes(75, 131, 30, random))


def test_cuts_hold_the_blocks_around_the_box_only():
    file = encode(picture(300, 400), subsampling="4:2:0", quality=90)
    # 1/48 of the image: 50 x 50 pixels are in 80 x 96 at most.
    size = check_crops(file, np.array([[100, 100, 50, 50]], np.int32))
    assert size < len(file) * 80 * 96 / (300 * 400) + 1000


def refused():
    image = picture(140, 150)
    file = encode(image)
    twelve_bits = bytearray(file)
    twelve_bits[file.index(b"\xff\xc0") + 4] = 12
    return {
        "progressive": encode(image, progressive=True),
        "CMYK": encode(image.convert("CMYK")),
        "12 bits": bytes(twelve_bits),
        "arithmetic": file.replace(b"\xff\xc0", b"\xff\xc9"),
        "truncated": file[: len(file) // 2],
        "without its end": file[:-2],
        "header": file[: file.index(b"\xff\xda")],
        "empty": b"",
        "PNG": b"\x89PNG\r\n\x1a\n" + bytes(100),
        "height behind the scan": file[:-2] + b"\xff\xdc\x00\x04\x00\x8c\xff\xd9",
        "several scans": jpeg_writer.split_scans(75, 131, np.random.RandomState(0)),
    }


def test_unsupported_files_have_no_index():
    files = refused()
    indexes = index_jpegs(tf.constant(list(files.values()))).numpy()
    assert dict(zip(files, indexes)) == dict.fromkeys(files, b"")
    assert index_file(files["progressive"], 200, 200) == b""
    assert index_file(files["PNG"], 200, 200) is None
    assert index_file(encode(picture(199, 200)), 199, 200) is None
    assert index_file(encode(picture(200, 200)), 200, 200)


def test_images_that_cannot_be_cut_are_unchanged():
    file, other = encode(picture(140, 150)), encode(picture(140, 150, seed=1))
    index, others = index_jpegs(tf.constant([file, other])).numpy()
    damaged = bytearray(index)
    damaged[len(index) // 2] ^= 1
    # Of the same length, with another quantization table, and with another end.
    table, end = bytearray(file), bytearray(file)
    table[file.index(b"\xff\xdb") + 20] ^= 1
    end[-4] ^= 1
    cases = {
        "no index": (file, b"", (0, 0, 9, 9)),
        "damaged index": (file, bytes(damaged), (0, 0, 9, 9)),
        "part of an index": (file, index[: len(index) // 2], (0, 0, 9, 9)),
        "bytes": (file, b"\x01\x02", (0, 0, 9, 9)),
        "later version": (file, b"\x02" + index[1:], (0, 0, 9, 9)),
        "another file's index": (file, others, (0, 0, 9, 9)),
        "another table": (bytes(table), index, (0, 0, 9, 9)),
        "another end": (bytes(end), index, (0, 0, 9, 9)),
        "truncated": (file[:-1000], index, (0, 0, 9, 9)),
        "outside": (file, index, (100, 0, 41, 10)),
        "negative": (file, index, (-1, 0, 4, 4)),
        "empty box": (file, index, (5, 5, 0, 4)),
        "huge": (file, index, (2**31 - 1, 5, 2**31 - 1, 4)),
    }
    files, indexes, boxes = zip(*cases.values())
    cuts, cut_boxes, were_cut = cut_jpegs(files, indexes, boxes)
    assert not were_cut.numpy().any()
    assert tuple(cuts.numpy()) == files
    np.testing.assert_array_equal(cut_boxes, boxes)
    assert cut_jpegs([file], [index], [[0, 0, 9, 9]])[2].numpy().all()


def test_mismatched_shapes_are_an_error():
    ops = load_cut_op()
    for indexes, boxes in (([], [[0, 0, 1, 1]]), ([""], [[0, 0, 1]])):
        with pytest.raises(tf.errors.InvalidArgumentError, match="of one length"):
            ops.imagenet_fast_cut_jpegs(
                jpegs=["x"],
                indexes=tf.constant(indexes, tf.string),
                boxes=tf.constant(boxes, tf.int32),
            )


def test_the_format_is_that_of_the_header_file():
    file = encode(picture(40, 40), subsampling="4:2:0")
    index = index_jpegs(tf.constant(file)).numpy()
    assert index[:2] == bytes([1, 2])  # MCUs of 16 pixels
    assert int.from_bytes(index[2:6], "little") == len(file)

    def fnv1a(data):
        value = 2166136261
        for byte in data:
            value = (value ^ byte) * 16777619 % 2**32
        return value

    place, deciding = 2, b""
    while file[place + 1] != 0xDA:
        end = place + 2 + int.from_bytes(file[place + 2 : place + 4], "big")
        if file[place + 1] in (0xC0, 0xC1, 0xC4, 0xDB, 0xE0, 0xEE):
            deciding += file[place:end]
        place = end
    scan = place + 2 + int.from_bytes(file[place + 2 : place + 4], "big")
    pieces = [(len(file) - 8) * number // 63 for number in range(64)]
    deciding += b"".join(file[piece : piece + 8] for piece in pieces)
    assert int.from_bytes(index[6:10], "little") == fnv1a(deciding)
    assert int.from_bytes(index[-4:], "little") == fnv1a(index[:-4])
    # Two points for each of three rows, and four numbers for each.
    numbers, number = [], 0
    shift = 0
    for byte in index[10:-4]:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(number)
            number = shift = 0
    assert len(numbers) == 2 * 3 * 4
    bits = sum(numbers[::4])
    assert len(file) * 8 - 16 - scan * 8 - bits in range(8)  # padding before the end marker


@pytest.mark.parametrize(
    ("split", "options"),
    [
        pytest.param("train", {}, marks=pytest.mark.long),
        pytest.param("validation", {}, marks=pytest.mark.long),  # test_jpeg_pipeline.py has it, too
    ],
)
def test_batches_with_and_without_an_index(split, options):
    config = with_resize_kernel(
        Config(**{"batch_size": 16, "num_classes": 1, "image_size": 100, **options})
    )
    image = picture(190, 253)
    files = [
        *(encode(image, subsampling=own, quality=90) for own in ("4:4:4", "4:2:0")),
        encode(image, progressive=True),
    ]
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    files.append(buffer.getvalue())

    def images(config, indexed=True, damage=lambda index: index):
        records = [
            encode_example(
                file,
                label=0,
                text="",
                filename="",
                height=190,
                width=253,
                channels=3,
                jpeg_index=damage(index_file(file, 190, 253) or b"") if indexed else b"",
            )
            for file in files * 4
        ]
        info = DatasetInfo("test", ("only",), 0, {})
        if split == "train":
            identities = np.array([(1, 2, number) for number in range(16)])
            order = tf.data.Dataset.from_tensors((tf.constant(records), identities))
            (batch,) = batches.training_batches(order, info, config, 1)
        else:
            order = tf.data.Dataset.from_tensors(tf.constant(records))
            (batch,) = batches.evaluation_batches(order, info, config, 1)
        assert batch[2].numpy().all()
        return batch[0].numpy().astype(int)

    ordinary, cut = images(config, indexed=False), images(config)
    # Where colours are interpolated, decode_and_crop_jpeg lacks the neighbours at the border.
    different = ordinary != cut
    assert not different[:, 8:-8, 8:-8].any()
    assert different[1::4].any()  # It was cut.
    assert not different[0::4].any()  # 4:4:4
    assert not different[2::4].any() and not different[3::4].any()
    # With indexes that do not fit, all is as if there were none.
    np.testing.assert_array_equal(images(config, damage=lambda index: index[:-1]), ordinary)


def sanitized(sanitizers, source, folder, flags=()):
    """Returns the path of a program from this folder, compiled with sanitizers."""
    program = folder / source.partition(".")[0]
    command = ["g++", "-std=c++17", "-O1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    command += [*machine_flags(), f"-I{JPEG}", str(HERE / source), "-o", str(program), *flags]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"no g++ with sanitizers: {built.stderr[:200]}")
    return program


@pytest.mark.long
def test_hostile_bytes_and_indexes(tmp_path):
    """Some seconds of jpeg_fuzz.cc, which says how to run it for longer."""
    program = sanitized("address,undefined", "jpeg_fuzz.cc", tmp_path, ["-fno-exceptions"])
    paths = []
    for number, file in enumerate(jpegs(60, 90).values()):
        paths.append(tmp_path / f"{number}.jpg")
        paths[-1].write_bytes(file)
    done = subprocess.run([program, "1", "1", *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    calls = int(done.stdout.rpartition("calls: ")[2])
    assert calls > 1000
    assert "damaged index, forged: 0" in done.stdout  # The walk itself is reached.


@pytest.mark.long
@pytest.mark.parametrize("sanitizers, threads", [("address,undefined", 1), ("thread", 4)])
def test_hostile_records_and_their_neighbours(sanitizers, threads, tmp_path):
    """Some seconds of image_fuzz.cc, which says how to run it for longer."""
    headers = pathlib.Path(tf.sysconfig.get_include())
    folders = [headers, *(headers / "external" / name for name in ("png", "libjpeg_turbo"))]
    flags = [f"-I{ROOT / 'imagenet_fast/base'}", *(f"-isystem{folder}" for folder in folders)]
    flags += [*tf.sysconfig.get_link_flags(), "-l:libtensorflow_cc.so.2"]
    flags.append(f"-Wl,-rpath,{tf.sysconfig.get_lib()}")
    program = sanitized(sanitizers, "image_fuzz.cc", tmp_path, flags)
    files = list(jpegs(60, 90).values())
    indexes = [*index_jpegs(tf.constant(files)).numpy(), b""]
    buffer = io.BytesIO()
    picture(60, 90).save(buffer, "PNG")
    paths = []
    for number, (file, index) in enumerate(zip([*files, buffer.getvalue()], indexes)):
        paths.append(tmp_path / f"{number}.record")
        sizes = {"height": 60, "width": 90, "channels": 3}
        record = encode_example(file, label=0, text="", filename="", jpeg_index=index, **sizes)
        paths[-1].write_bytes(record)
    options = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [program, "2", "1", str(threads), *paths],
        capture_output=True,
        text=True,
        env={**os.environ, **options},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    counts = dict(line.split(": ") for line in done.stdout.splitlines())
    assert len(counts) == 5 and all(int(count) > 50 for count in counts.values()), counts
