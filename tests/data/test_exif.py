import io
import random
import struct

import pytest
import tensorflow as tf
from PIL import Image

from imagenet_fast.data import headers
from imagenet_fast.data.exif import jpeg_orientation
from imagenet_fast.data.images import normalize_encoding


def jpeg(*segments):
    file = io.BytesIO()
    Image.new("L", (16, 8)).save(file, "JPEG")
    data = file.getvalue()
    found = b"".join(b"\xff\xe1" + struct.pack(">H", 2 + len(s)) + s for s in segments)
    return data[:2] + found + data[2:]


def exif(*entries, order="<"):
    """A segment with entries of (tag, type, count, four bytes of the value)."""
    packed = b"".join(struct.pack(f"{order}HHI", *entry[:3]) + entry[3] for entry in entries)
    magic = b"II*\0" if order == "<" else b"MM\0*"
    return b"Exif\0\0" + magic + struct.pack(f"{order}IH", 8, len(entries)) + packed + bytes(4)


SIX = exif((0x0112, 3, 1, b"\6\0\0\0"))
XMP = (
    b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:x='adobe:ns:meta/'><rdf:RDF "
    b"xmlns:rdf='http://www.w3.org/1999/02/22-rdf-syntax-ns#'><rdf:Description "
    b"xmlns:tiff='http://ns.adobe.com/tiff/1.0/' tiff:Orientation='6'/></rdf:RDF></x:xmpmeta>"
)
CASES = {
    "short": ((SIX,), 6),
    "big endian": ((exif((0x0112, 3, 1, b"\0\6\0\0"), order=">"),), 6),
    "long": ((exif((0x0112, 4, 1, b"\6\0\0\0")),), 6),
    "byte": ((exif((0x0112, 1, 1, b"\6\0\0\0")),), 1),
    "float": ((exif((0x0112, 11, 1, struct.pack("<f", 6))),), 1),
    "two values": ((exif((0x0112, 3, 2, b"\6\0\6\0")),), 1),
    "float, then short": ((exif((0x0112, 11, 1, bytes(4)), (0x0112, 3, 1, b"\6\0\0\0")),), 6),
    "twice": ((exif((0x0112, 3, 1, b"\6\0\0\0"), (0x0112, 3, 1, b"\3\0\0\0")),), 6),
    "two segments": ((exif((0x010F, 3, 1, bytes(4))), SIX), 1),
    "after another segment": ((b"http://ns.adobe.com/xap/1.0/\0", SIX), 6),
    "XMP": ((XMP,), 1),
    "none": ((), 1),
}


@pytest.mark.parametrize(("segments", "expected"), CASES.values(), ids=CASES)
def test_prepare_and_exported_models_turn_alike(segments, expected):
    data = jpeg(*segments)
    assert jpeg_orientation(data) == expected
    assert int(headers.orientation(tf.constant(data))) == expected
    image = normalize_encoding(data, exif="apply")
    assert (image.height, image.width) == ((16, 8) if expected == 6 else (8, 16))


def test_damaged_exif_is_read_alike():
    generator = random.Random(0)
    orientation = tf.function(headers.orientation, input_signature=[tf.TensorSpec([], tf.string)])
    same = 0
    for _ in range(300):
        data = bytearray(jpeg(SIX, exif((0x0112, 3, 1, b"\0\3\0\0"), order=">"))[:120])
        for _ in range(generator.randrange(4)):
            data[generator.randrange(2, 60)] = generator.choice((0, 1, 6, 0xDA, 0xE1, 0xFF))
        data = bytes(data[: generator.choice((30, 50, 120))])
        found = jpeg_orientation(data)
        assert found == int(orientation(data))
        same += found == 6
    assert 0 < same < 300
