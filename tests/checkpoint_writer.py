"""Writes the index of a TensorFlow checkpoint by hand, with anything in it."""

import struct

import google_crc32c
from tensorflow.core.protobuf import tensor_bundle_pb2

MAGIC = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"
FLOAT, STRING, INT64, VARIANT = 1, 7, 9, 21


def checksum(data):
    """A masked CRC-32C."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


def varint(number):
    data = b""
    while number > 127:
        data += bytes([number & 127 | 128])
        number >>= 7
    return data + bytes([number])


def block(entries, restarts=(0,)):
    """A block of (name, value), with its end."""
    data = b"".join(
        varint(0) + varint(len(name)) + varint(len(value)) + name + value for name, value in entries
    )
    return data + struct.pack(f"<{len(restarts)}I", *restarts) + struct.pack("<I", len(restarts))


def table(entries, restarts=(0,), handle=None, kind=0):
    """An index of entries, by name; ``handle`` replaces the place and size of their block."""
    data = bytearray()

    def place(content, kind=0):
        start = len(data)
        data.extend(content + bytes([kind]))
        data.extend(struct.pack("<I", checksum(content + bytes([kind]))))
        return varint(start) + varint(len(content))

    there = place(block(sorted(entries.items()), restarts), kind)
    if handle:
        there = varint(handle[0]) + varint(handle[1])
    unused, index = place(block([])), place(block([(b"\xff", there)]))
    return bytes(data) + (unused + index).ljust(40, b"\0") + MAGIC


def header(num_shards=1):
    return tensor_bundle_pb2.BundleHeaderProto(
        num_shards=num_shards, version={"producer": 1}
    ).SerializeToString()


def entry(shape, size, *, offset=0, dtype=FLOAT, **fields):
    return tensor_bundle_pb2.BundleEntryProto(
        dtype=dtype,
        shape={"dim": [{"size": length} for length in shape]},
        size=size,
        offset=offset,
        **fields,
    ).SerializeToString()


def write_checkpoint(prefix, entries, data=b"", **how):
    """Writes a checkpoint of one data file; ``entries`` are values by name."""
    index = table({b"": header(), **entries}, **how)
    prefix.with_name(f"{prefix.name}.index").write_bytes(index)
    prefix.with_name(f"{prefix.name}.data-00000-of-00001").write_bytes(data)
