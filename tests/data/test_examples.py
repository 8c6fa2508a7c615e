"""The fields of examples, and what others read of them."""

import struct

import pytest

from imagenet_fast.data.examples import decode_example, encode_example


def example(encoded=b"\xff\xd8jpeg", **changes):
    arguments = {
        "label": 7,
        "text": "tench, Tinca tinca",
        "filename": "n01440764_1.JPEG",
        "height": 40,
        "width": 30,
        "channels": 3,
        **changes,
    }
    return encode_example(encoded, **arguments)


def test_examples_have_the_fields_of_the_imagenet_converters():
    assert decode_example(example(synset="n01440764")) == {
        "image/encoded": [b"\xff\xd8jpeg"],
        "image/format": [b"JPEG"],
        "image/class/label": [7],
        "image/class/text": [b"tench, Tinca tinca"],
        "image/class/synset": [b"n01440764"],
        "image/height": [40],
        "image/width": [30],
        "image/channels": [3],
        "image/colorspace": [b"RGB"],
        "image/filename": [b"n01440764_1.JPEG"],
    }


def test_a_png_is_told_by_its_first_bytes():
    png = b"\x89PNG\r\n\x1a\n and more"
    fields = decode_example(example(png))
    assert (fields["image/encoded"], fields["image/format"]) == ([png], [b"PNG"])


def test_grey_and_no_synset():
    fields = decode_example(example(channels=1))
    assert fields["image/colorspace"] == [b"Grayscale"]
    assert "image/class/synset" not in fields


def test_model_garden_style_parsing():
    import tensorflow as tf

    parsed = tf.io.parse_single_example(
        example(),
        {
            "image/encoded": tf.io.FixedLenFeature((), tf.string, ""),
            "image/class/label": tf.io.FixedLenFeature((), tf.int64, -1),
        },
    )
    assert parsed["image/encoded"].numpy() == b"\xff\xd8jpeg"
    assert parsed["image/class/label"].numpy() == 7


def test_what_is_no_example_is_a_value_error():
    with pytest.raises(ValueError, match=r"not a tf.train.Example"):
        decode_example(struct.pack("<Q", 1 << 63) + b"\xff")
