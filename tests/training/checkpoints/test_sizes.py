"""Checkpoints whose index claims what is not there, which would end the process."""

import os
import re
import struct

import checkpoint_writer as writer
import numpy as np
import pytest
import tensorflow as tf
from checkpoint_writer import (
    INT64,
    STRING,
    VARIANT,
    checksum,
    entry,
    header,
    table,
    varint,
    write_checkpoint,
)

from imagenet_fast.training.checkpoints import sizes as checkpoint_sizes
from imagenet_fast.training.checkpoints.sizes import OBJECT_GRAPH, claimed_too_large

DATA = struct.pack("<4f", 1, 2, 3, 4)
GOOD = entry([4], 16, crc32c=checksum(DATA))


def strings(*lengths):
    """A tensor of strings in a data file, of 3 bytes whatever their lengths."""
    sums = b"".join(struct.pack("<I" if n < 2**32 else "<Q", n) for n in lengths)
    return b"".join(map(varint, lengths)) + struct.pack("<I", checksum(sums)) + b"abc"


def test_what_tensorflow_writes(tmp_path):
    values = {
        "scalar": tf.Variable(1.5),
        "empty": tf.Variable(np.zeros([0, 3], np.float32)),
        "text": tf.Variable(["a", "", "b" * 1000]),
        "half": tf.Variable(tf.ones([3, 5], tf.bfloat16)),
        "count": tf.Variable(np.int64(3)),
        **{f"many{index}": tf.Variable(np.zeros(index)) for index in range(500)},  # two blocks
    }
    prefix = tf.train.Checkpoint(**values).save(str(tmp_path / "ckpt"))
    assert claimed_too_large(prefix) is None


def test_what_the_writer_here_writes(tmp_path):
    """TensorFlow reads it: only what the tests below change is wrong."""
    texts = strings(3)
    text_sum = checksum(struct.pack("<I", 3) + texts[1:5] + b"abc")
    text = entry([], len(texts), offset=16, dtype=STRING, crc32c=text_sum)
    write_checkpoint(tmp_path / "a", {b"numbers": GOOD, b"text": text}, DATA + texts)
    assert claimed_too_large(str(tmp_path / "a")) is None
    reader = tf.train.load_checkpoint(str(tmp_path / "a"))
    assert reader.get_tensor("text") == b"abc"
    np.testing.assert_array_equal(reader.get_tensor("numbers"), [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("values", "data", "message"),
    [
        (entry([2**40], 2**42), DATA, r"a is at 0 to 4,398,046,511,104 of 16 bytes"),
        (entry([2**40], 16), DATA, r"a has shape \[1099511627776\], but 16 bytes"),
        (entry([2**62, 2**62], 16), DATA, "a has shape .*, but 16 bytes"),
        (entry([2**62, 0], 0), b"", "a has shape"),
        (entry([-1], 16), DATA, r"a has shape \[-1\]"),
        (entry([1] * 300, 4), DATA, "a has no plain shape"),
        (entry([4], 0, slices=[{"extent": [{"length": 4}]}]), DATA, "a has no plain shape"),
        (entry([4], 16, offset=2**62), DATA, "a is at 4,611"),
        (entry([4], 16, offset=-8), DATA, "a is at -8"),
        (entry([4], 16, shard_id=7), DATA, "names other files than its 1"),
        (entry([4], 16, dtype=200), DATA, "a is of an unknown type"),
        (entry([4], 16, dtype=101), DATA, "a is of type float32_ref"),
        (entry([], 16, dtype=VARIANT), DATA, "a is of type variant"),
        (entry([4], 16, dtype=INT64), DATA, "a has shape"),
        (entry([], 14, dtype=STRING), strings(2**60), "the strings of a have 1,152,921"),
        (entry([2**40], 16, dtype=STRING), DATA, "a has shape"),
        (entry([2], 16, dtype=STRING), b"\xff" * 16, "more than 64 bits"),
        (b"\xff\xff\xff", DATA, "is damaged"),
    ],
)
def test_an_entry_that_is_not_true(tmp_path, values, data, message):
    write_checkpoint(tmp_path / "ckpt", {b"a": values}, data)
    found = claimed_too_large(str(tmp_path / "ckpt"))
    assert re.search(message, found)
    assert found.startswith(f"{tmp_path / 'ckpt'}.index is damaged, or claims what is not there: ")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"handle": (0, 2**40)}, "ends within a block"),
        ({"handle": (2**60, 2**60)}, "ends within a block"),
        ({"kind": 1}, "is compressed"),
        ({"restarts": (3,)}, "a restart within an entry"),
        ({"restarts": ()}, "a restart within an entry"),
    ],
)
def test_a_table_that_is_not_true(tmp_path, how, message):
    write_checkpoint(tmp_path / "ckpt", {b"a": GOOD}, DATA, **how)
    assert message in claimed_too_large(str(tmp_path / "ckpt"))


def test_tensors_that_share_their_bytes(tmp_path):
    """A small file with a thousand names for its bytes would be a thousand times as large."""
    write_checkpoint(tmp_path / "ckpt", {b"a": GOOD, b"b": GOOD}, DATA)
    assert "have 32 bytes, its data 16" in claimed_too_large(str(tmp_path / "ckpt"))


def test_any_damaged_byte(tmp_path):
    """Whatever it changes: the answer is a text or None, and no other error."""
    write_checkpoint(tmp_path / "ckpt", {b"a": GOOD, b"b": entry([], 0)}, DATA)
    index = (tmp_path / "ckpt.index").read_bytes()
    for place in range(len(index)):
        for value in (0, 0x7F, 0xFF):
            changed = index[:place] + bytes([value]) + index[place + 1 :]
            (tmp_path / "ckpt.index").write_bytes(changed)
            assert isinstance(claimed_too_large(str(tmp_path / "ckpt")), (str, type(None)))


def test_no_index_or_no_data(tmp_path):
    with pytest.raises(FileNotFoundError):
        claimed_too_large(str(tmp_path / "ckpt"))
    (tmp_path / "ckpt.index").write_bytes(b"")
    assert "has no footer" in claimed_too_large(str(tmp_path / "ckpt"))
    (tmp_path / "ckpt.index").write_bytes(table({b"": header(), b"a": GOOD}))
    assert "data-00000-of-00001 is no file" in claimed_too_large(str(tmp_path / "ckpt"))
    os.mkfifo(tmp_path / "ckpt.data-00000-of-00001")
    assert "data-00000-of-00001 is no file" in claimed_too_large(str(tmp_path / "ckpt"))


def test_names_that_share_their_beginnings(tmp_path, monkeypatch):
    """A table of megabytes can hold names of gigabytes."""
    entries = {b"a" * n: writer.entry([1], 4, offset=4 * n) for n in range(60)}
    (tmp_path / "ckpt.index").write_bytes(writer.table({**entries, b"": writer.header()}))
    (tmp_path / "ckpt.data-00000-of-00001").write_bytes(bytes(4 * 60))
    assert claimed_too_large(str(tmp_path / "ckpt")) is None
    content = (tmp_path / "ckpt.index").read_bytes()
    monkeypatch.setattr(checkpoint_sizes, "read_bounded", lambda *_: content)
    monkeypatch.setattr(checkpoint_sizes, "_LARGEST_INDEX", 1000)
    assert "its names are too long" in claimed_too_large(str(tmp_path / "ckpt"))


def with_graph(tmp_path, content, dtype=STRING, shape=()):
    data = varint(len(content)) + bytes(4) + content
    write_checkpoint(
        tmp_path / "ckpt", {OBJECT_GRAPH.encode(): entry(shape, len(data), dtype=dtype)}, data
    )
    return claimed_too_large(str(tmp_path / "ckpt"))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (b"junk", "Error parsing message|is damaged"),
        (b"\n\0" * 70_000, "has too many objects for 1 tensors"),
        (b"\n\4\n\2\x08\7", "names objects that it does not have"),
        (b"\n\6\x1a\4\x08\0\x18\7", "names objects that it does not have"),
        (b"\n\4\n\2\x08\0", None),
    ],
)
def test_a_graph_of_objects_that_is_not_true(tmp_path, graph, message):
    """TensorFlow would raise all kinds of errors, or make objects for hours."""
    found = with_graph(tmp_path, graph)
    assert found is None if message is None else re.search(message, found)


def test_a_graph_of_objects_of_another_size_or_type(tmp_path, monkeypatch):
    assert "is no text" in with_graph(tmp_path, bytes(3), dtype=INT64, shape=())
    monkeypatch.setattr(checkpoint_sizes, "_LARGEST_GRAPH", 8)
    assert "is no text of up to 8 bytes" in with_graph(tmp_path, b"\n\0" * 8)
