import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from imagenet_fast.config import Config
from imagenet_fast.data.decode import decode_crop_and_resize, evaluation_image, resize
from imagenet_fast.data.examples import encode_example
from imagenet_fast.data.headers import check_header
from imagenet_fast.data.jpeg.image_ops import make_images, read_examples

pytestmark = pytest.mark.usefixtures("native_ops")


def noise(height, width, seed=0):
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8)


def encode(pixels, format="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format, **options)
    return file.getvalue()


def made(files, boxes, config, flipped=None):
    """Images of whole files, by the op."""
    places = tf.constant([[0, len(file), 0, 0] for file in files], tf.int64)
    flipped = [False] * len(files) if flipped is None else flipped
    images, misfits = make_images(
        tf.constant(files), places, tf.constant(boxes), tf.constant(flipped), options=config
    )
    assert not misfits.numpy().any()
    return images.numpy()


# --- Resizing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
def test_pixels_are_bit_equal_to_tensorflows(method, antialias):
    sizes = np.random.RandomState(0).randint(1, 500, (15 if antialias else 60, 2)).tolist()
    # Single pixels and rows, equal sizes, and exactly half and double the size.
    sizes += [[1, 1], [1, 40], [40, 1], [32, 32], [64, 64], [16, 16], [32, 300]]
    images = [noise(*size, seed) for seed, size in enumerate(sizes)]
    files, boxes = [encode(image) for image in images], [[0, 0, *size] for size in sizes]
    for size in (1, 32, 97):
        config = Config(image_size=size, resize_method=method, antialias=antialias)
        for own, image in zip(made(files, boxes, config), images):
            expected = resize(tf.constant(image), config)
            np.testing.assert_array_equal(own, expected, err_msg=f"{image.shape} to {size}")


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
def test_flipped_equals_the_plain_result_flipped(method, antialias):
    config = Config(image_size=24, resize_method=method, antialias=antialias)
    file, box = encode(noise(37, 52)), [0, 0, 37, 52]
    plain, flipped = made([file] * 2, [box] * 2, config, [False, True])
    np.testing.assert_array_equal(flipped, plain[:, ::-1])
    assert (plain != flipped).any()
    image = tf.constant(noise(37, 52))
    np.testing.assert_array_equal(resize(image, config, tf.constant(True)), flipped)
    np.testing.assert_array_equal(resize(image, config, tf.constant(False)), plain)


@pytest.mark.parametrize("antialias", [False, True])
def test_bicubic_overshoot_is_clipped(antialias):
    stripes = np.zeros([16, 16, 3], np.uint8)
    stripes[:, 5:9] = 255
    config = Config(image_size=45, resize_method="bicubic", antialias=antialias)
    (resized,) = made([encode(stripes)], [[0, 0, 16, 16]], config)
    assert resized.min() == 0 and resized.max() == 255
    # Without clipping, values above 255 would wrap around to small ones.
    assert (resized[:, 19:21] == 255).all()


# --- Decoding -------------------------------------------------------------------------------------


def files_of(pixels):
    """One image in all encodings that training decodes, by name."""
    grey = np.ascontiguousarray(pixels[..., 0])
    sixteen = io.BytesIO()
    Image.fromarray(grey.astype(np.uint16) * 257).save(sixteen, "PNG")
    palette = io.BytesIO()
    Image.fromarray(pixels).quantize(16).save(palette, "PNG")
    return {
        **{
            name: encode(pixels, "JPEG", subsampling=name, quality=88)
            for name in ("4:4:4", "4:2:0")
        },
        "4:2:2": encode(pixels, "JPEG", subsampling="4:2:2", restart_marker_blocks=3),
        "progressive": encode(pixels, "JPEG", progressive=True),
        "grey JPEG": encode(grey, "JPEG"),
        "PNG": encode(pixels),
        "grey PNG": encode(grey),
        "16-bit PNG": sixteen.getvalue(),
        "palette": palette.getvalue(),
        "transparent": encode(np.concatenate([pixels, pixels[..., :1]], -1)),
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"resize_method": "bicubic"},
        {"image_size": 9, "antialias": True},
    ],
)
def test_crops_are_those_of_tensorflows_ops(options):
    config = Config(**{"image_size": 24, **options})
    files = list(files_of(noise(131, 205)).values())
    random = np.random.RandomState(0)
    for _ in range(8):
        height, width = random.randint(1, 132), random.randint(1, 206)
        box = [random.randint(132 - height), random.randint(206 - width), height, width]
        images = made(files, [box] * len(files), config)
        for image, file in zip(images, files):
            expected = decode_crop_and_resize(tf.constant(file), tf.constant(box), config)
            np.testing.assert_array_equal(image, expected)


GOOD = encode(noise(20, 30), "JPEG")


@pytest.mark.parametrize(
    ("file", "box"),
    [
        (b"", [0, 0, 1, 1]),
        (b"GIF89a" + bytes(30), [0, 0, 1, 1]),
        (GOOD[: len(GOOD) // 3], [15, 0, 5, 30]),
        (encode(noise(20, 30))[:-200], [0, 0, 20, 30]),
        (encode(noise(40, 40)), [0, 0, 1, 1]),  # too large
        *(
            (file, box)
            for file in (GOOD, encode(noise(20, 30)))
            for box in ([0, 0, 21, 30], [-1, 0, 3, 3], [0, 0, 0, 5], [19, 29, 2, 2])
        ),
        (GOOD, [2**31 - 1, 0, 2**31 - 1, 1]),
    ],
)
def test_what_cannot_be_decoded_is_an_error(file, box):
    config = Config(image_size=8, max_pixels=600)
    with pytest.raises(tf.errors.InvalidArgumentError, match="image 1 of the batch cannot be"):
        made([GOOD, file], [[0, 0, 20, 30], box], config)


def test_places_outside_of_a_record_are_an_error():
    config = Config(image_size=8)
    for place in ([0, len(GOOD) + 1, 0, 0], [-1, 5, 0, 0], [5, -1, 0, 0], [0, len(GOOD), 2**62, 9]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="image 0 of the batch"):
            make_images(
                tf.constant([GOOD]),
                tf.constant([place], tf.int64),
                tf.constant([[0, 0, 20, 30]]),
                tf.constant([False]),
                options=config,
            )
    with pytest.raises(tf.errors.InvalidArgumentError, match="of one length"):
        make_images(
            tf.constant([GOOD]),
            tf.constant([[0, 1, 0, 0]], tf.int64),
            tf.constant([[0, 0, 20, 30]]),
            tf.constant([], tf.bool),
            options=config,
        )


def test_evaluation_image_has_no_native_op():
    config = Config(image_size=8, resize_kernel="native")
    spec = tf.TensorSpec([], tf.string)
    graph = tf.function(lambda one: evaluation_image(one, config)).get_concrete_function(spec).graph
    names = {op.type for op in graph.get_operations()}
    functions = graph.as_graph_def().library.function
    names |= {node.op for function in functions for node in function.node_def}
    assert "ResizeBilinear" in names
    assert not any(name.startswith("ImagenetFast") for name in names)


# --- Examples -------------------------------------------------------------------------------------


def record(file=GOOD, **fields):
    values = {"label": 7, "text": "seven", "filename": "a.jpg", "height": 20, "width": 30}
    return encode_example(file, **{**values, "channels": 3, **fields})


def read(records, with_index=True, from_headers=False, max_pixels=10**6, with_label=True):
    return read_examples(
        tf.constant(records),
        with_index=with_index,
        from_headers=from_headers,
        max_pixels=max_pixels,
        with_label=with_label,
    )


def test_examples_are_read_in_place():
    records = [
        record(),
        record(label=-(2**40), height=1, width=2**31, synset="n01440764", jpeg_index=b"index"),
    ]
    examples = read(records)
    np.testing.assert_array_equal(examples.labels, [7, -(2**40)])
    # int32, as tf.cast: a size that does not fit is none, so those of the headers are taken.
    np.testing.assert_array_equal(examples.sizes, [[20, 30], [20, 30]])
    found = [
        [one[begin : begin + size] for begin, size in (place[:2], place[2:])]
        for one, place in zip(records, examples.places.numpy())
    ]
    assert found == [[GOOD, b""], [GOOD, b"index"]]
    assert not read(records, with_index=False).places.numpy()[:, 2:].any()


def test_records_of_any_number_of_labels():
    records = [record(label=own) for own in ((), (3,), (300, 5, -1))]
    examples = read(records, with_label=False)
    for one, (begin, size, *_) in zip(records, examples.places.numpy()):
        assert one[begin : begin + size] == GOOD
    for other in (records[0], records[2]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="no usual layout"):
            read([other])


def test_fields_may_have_any_order_and_packing():
    def text(number, data):
        size = len(data)
        return bytes([number << 3 | 2, size & 127 | 128, size >> 7]) + data

    def entry(key, feature):
        return text(1, text(1, key) + text(2, feature))

    image = entry(b"image/encoded", text(1, text(1, GOOD)))
    for label in (b"\x08\x05", text(1, b"\x05")):  # not packed, and packed
        features = entry(b"image/class/label", text(3, label)) + entry(b"x", b"") + image
        examples = read([text(1, features)], with_index=False)
        assert examples.labels.numpy() == [5]
        begin, size, *_ = examples.places.numpy()[0]
        assert text(1, features)[begin : begin + size] == GOOD


def changed(change):
    example = tf.train.Example.FromString(record())
    change(example.features.feature)
    return example.SerializeToString()


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b"\xff" * 30,
        record()[:-1],
        record() + record(),
        changed(lambda fields: fields.pop("image/encoded")),
        changed(lambda fields: fields.pop("image/class/label")),
        changed(lambda fields: fields["image/class/label"].int64_list.value.append(3)),
        changed(lambda fields: fields["image/encoded"].bytes_list.value.append(b"x")),
        changed(lambda fields: fields["image/height"].float_list.value.append(3)),
        changed(lambda fields: fields["image/jpeg_index"].int64_list.value.append(3)),
    ],
)
def test_unusual_records_are_left_to_tensorflow(odd):
    with pytest.raises(tf.errors.InvalidArgumentError, match="record 1 of the batch has no usual"):
        read([record(), odd])


def test_any_bytes_are_read_or_refused():
    """Damage at each place of a record; what is read is as TensorFlow's parser reads it."""
    whole, random, equal = record(), np.random.RandomState(0), 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] = random.randint(256)
        damaged = bytes(damaged[: len(whole) - place % 3])
        try:
            examples = read([damaged], with_index=False)
        except tf.errors.InvalidArgumentError:
            continue
        begin, size, *_ = examples.places.numpy()[0]
        fields = tf.io.parse_single_example(
            damaged,
            {
                "image/encoded": tf.io.FixedLenFeature([], tf.string),
                "image/class/label": tf.io.FixedLenFeature([], tf.int64),
            },
        )
        assert damaged[begin : begin + size] == fields["image/encoded"].numpy()
        assert examples.labels.numpy() == [fields["image/class/label"].numpy()]
        equal += 1
    assert equal > 300


def test_sizes_from_headers():
    files = list(files_of(noise(131, 205)).values())
    records = [record(file, height=1, width=1) for file in files]
    sizes = read(records, from_headers=True).sizes
    np.testing.assert_array_equal(
        sizes, [check_header(tf.constant(file), 10**6)[1] for file in files]
    )
    # One without a size is enough.
    np.testing.assert_array_equal(read([*records, record(files[0], height=0)]).sizes[0], [131, 205])
    cmyk = io.BytesIO()
    Image.fromarray(noise(20, 30)).convert("CMYK").save(cmyk, "JPEG")
    for file, limit in (
        (b"", 10**6),
        (b"no image" * 9, 10**6),
        (cmyk.getvalue(), 10**6),
        (GOOD, 599),
    ):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="image 0 of the batch has no usual"
        ):
            read([record(file)], from_headers=True, max_pixels=limit)
