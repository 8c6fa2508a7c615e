"""Checks what a checkpoint's index claims, and what a network needs, before it is allocated.

TensorFlow takes the memory that an index asks for, and ends the process where it can't, or where it
does not understand an entry. The index is a table of LevelDB_: blocks of sorted names and values,
each value a ``BundleEntryProto``, which says where in the data files a tensor is.

.. _LevelDB: https://github.com/google/leveldb/blob/main/doc/table_format.md
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import tensor_bundle_pb2, trackable_object_graph_pb2

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.base.outside import read_bounded
from imagenet_fast.base.paths import Path, to_path
from imagenet_fast.models.shape_only import spec_of

if not KERAS_2:
    from keras.src.backend.common import global_state

# A variable's entry has about 100 bytes.
_LARGEST_INDEX = 2**26
# Names and owners of the tensors: of large networks a few megabytes, and a few objects a tensor.
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_LARGEST_GRAPH = 2**24
_MOST_OBJECTS = 64
_FOOTER = 48
_MAGIC = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"
# Each string has its length in the file, in up to 10 bytes, and one checksum follows the lengths.
_LENGTH_BYTES, _CHECKSUM_BYTES = 10, 4
_MOST_DIMENSIONS = 32
# Of a dimension, also where another is 0.
_LONGEST = 2**40
# Variables may be made several times, for example to balance a pipeline, and not all are saved.
_COPIES, _ALWAYS = 4, 2**24


@contextlib.contextmanager
def no_larger_than(checkpoint: str, replicas: int = 1) -> Iterator[None]:
    """Limits the variables made in the context by the size of the checkpoint to be restored.

    What asks for more is not its network: a configuration of others could ask for any memory.

    Args:
      checkpoint: its path, without ``.index``.
      replicas: for each of which variables are made.

    Raises:
      UserError: in the context, before such a variable is allocated; or at once, if the
        checkpoint's files cannot be read.
    """
    try:
        files = to_path(checkpoint).parent.glob(f"{to_path(checkpoint).name}.*")
        size = sum(file.stat().st_size for file in files)
    except OSError as error:
        raise UserError(f"checkpoint {checkpoint} cannot be read: {error.strerror}") from None
    limit, made = replicas * (_COPIES * size + _ALWAYS), 0
    too_large = UserError(
        f"the network of the run's configuration is larger than checkpoint {checkpoint}: one of "
        "them is another run's"
    )

    def creator(make: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        nonlocal made
        spec = spec_of(**options)
        made += (spec.shape.num_elements() or 1) * spec.dtype.size
        if made > limit:
            raise too_large
        return make(**options)

    try:
        with tf.variable_creator_scope(creator):
            yield
    finally:
        # Keras goes on after an error in a layer of layers, and fails later: here with another
        # error, and in later models with the variables that it still has to initialize.
        if made > limit:
            if not KERAS_2:
                global_state.set_global_attribute("uninitialized_variables", [])
            raise too_large from None


def claimed_too_large(prefix: str) -> str | None:
    """Returns why TensorFlow must not read a checkpoint, or None if it may.

    To be called before any of TensorFlow's readers. It reads the index, and the lengths of strings;
    checksums are left to TensorFlow.

    Args:
      prefix: the checkpoint's path, without ``.index``.

    Raises:
      OSError: if a file cannot be read.
    """
    try:
        _check(to_path(prefix))
    except (ValueError, struct.error, DecodeError) as error:
        return f"{prefix}.index is damaged, or claims what is not there: {error}"
    return None


def _check(prefix: Path) -> None:
    index = prefix.parent / f"{prefix.name}.index"
    entries: dict[bytes, bytes] = {}
    names = 0
    for key, value in _entries(read_bounded(index, _LARGEST_INDEX)):
        names += len(key)
        if names > _LARGEST_INDEX:  # An entry may share its name's beginning with the one before.
            raise ValueError("its names are too long")
        entries[key] = value
    header = tensor_bundle_pb2.BundleHeaderProto.FromString(entries.pop(b"", b""))
    if header.endianness != header.LITTLE:
        raise ValueError("its numbers are of the other byte order")
    shards = {entry.shard_id: entry for entry in map(_parsed, entries.values())}
    if not all(0 <= shard < header.num_shards for shard in shards):
        raise ValueError(f"it names other files than its {header.num_shards:,}")
    files = {
        shard: prefix.parent / f"{prefix.name}.data-{shard:05}-of-{header.num_shards:05}"
        for shard in shards
    }
    sizes = {shard: _size(file) for shard, file in files.items()}
    claimed: Counter[int] = Counter()
    for key, value in entries.items():
        entry = _parsed(value)
        name = key.decode()
        _check_entry(entry, name, sizes[entry.shard_id])
        if entry.dtype == types_pb2.DT_STRING:
            _check_strings(entry, name, files[entry.shard_id])
        if name == OBJECT_GRAPH:
            _check_graph(entry, files[entry.shard_id], len(entries))
        claimed[entry.shard_id] += entry.size
    for shard, size in claimed.items():
        if size > sizes[shard]:
            raise ValueError(f"its tensors have {size:,} bytes, its data {sizes[shard]:,}")


def _parsed(value: bytes) -> tensor_bundle_pb2.BundleEntryProto:
    return tensor_bundle_pb2.BundleEntryProto.FromString(value)


def _size(file: Path) -> int:
    if not file.is_file():
        raise ValueError(f"{file.name} is no file")
    return file.stat().st_size


def _check_entry(entry: tensor_bundle_pb2.BundleEntryProto, name: str, size: int) -> None:
    if entry.offset < 0 or entry.size < 0 or entry.offset + entry.size > size:
        end = entry.offset + entry.size
        raise ValueError(f"{name} is at {entry.offset:,} to {end:,} of {size:,} bytes")
    shape = [dim.size for dim in entry.shape.dim]
    if entry.slices or entry.shape.unknown_rank or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name} has no plain shape")
    if min(shape, default=0) < 0:
        raise ValueError(f"{name} has shape {shape}")
    if entry.dtype == types_pb2.DT_STRING:
        needed, fits = math.prod(shape), math.prod(shape) <= entry.size
    else:
        needed = math.prod(shape) * _bytes_of_one(entry.dtype, name)
        fits = needed == entry.size
    if not fits or max(shape, default=0) > _LONGEST:
        raise ValueError(f"{name} has shape {shape}, but {entry.size:,} bytes")


def _bytes_of_one(number: int, name: str) -> int:
    try:
        dtype = tf.as_dtype(number)
    except TypeError:
        raise ValueError(f"{name} is of an unknown type") from None
    if dtype != dtype.base_dtype or not (
        dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex
    ):
        raise ValueError(f"{name} is of type {dtype.name}")
    return dtype.size


def _check_strings(entry: tensor_bundle_pb2.BundleEntryProto, name: str, file: Path) -> None:
    """Checks the lengths of a tensor's strings, which are in the data file before the strings."""
    count = math.prod(dim.size for dim in entry.shape.dim)
    with file.open("rb") as opened:
        opened.seek(entry.offset)
        data = opened.read(min(entry.size, count * _LENGTH_BYTES))
    place = total = 0
    for _ in range(count):
        length, place = _varint(data, place)
        total += length
    if place + _CHECKSUM_BYTES + total != entry.size:
        raise ValueError(f"the strings of {name} have {total:,} bytes, of {entry.size:,}")


def _check_graph(entry: tensor_bundle_pb2.BundleEntryProto, file: Path, tensors: int) -> None:
    """Checks the graph of objects, of which TensorFlow makes Python objects before it restores."""
    if entry.dtype != types_pb2.DT_STRING or entry.shape.dim or entry.size > _LARGEST_GRAPH:
        raise ValueError(f"{OBJECT_GRAPH} is no text of up to {_LARGEST_GRAPH:,} bytes")
    with file.open("rb") as opened:
        opened.seek(entry.offset)
        data = opened.read(entry.size)
    _, begin = _varint(data, 0)
    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
        data[begin + _CHECKSUM_BYTES :]
    )
    nodes = len(graph.nodes)
    links = 0
    for node in graph.nodes:
        others = [child.node_id for child in node.children]
        others += [slot.original_variable_node_id for slot in node.slot_variables]
        others += [slot.slot_variable_node_id for slot in node.slot_variables]
        links += len(others)
        if max(nodes, links) > _MOST_OBJECTS * (tensors + 1000):
            raise ValueError(f"{OBJECT_GRAPH} has too many objects for {tensors:,} tensors")
        if not all(0 <= other < nodes for other in others):
            raise ValueError(f"{OBJECT_GRAPH} names objects that it does not have")


def _entries(index: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the names and values of a table."""
    footer = index[-_FOOTER:]
    if len(footer) < _FOOTER or footer[-8:] != _MAGIC:
        raise ValueError("it has no footer")
    place = 0
    for _ in range(2):  # The first block is not used.
        start, place = _varint(footer, place)
        size, place = _varint(footer, place)
    end, last = 0, None
    for _, handle in _block(index, start, size):
        start, place = _varint(handle, 0)
        size, _ = _varint(handle, place)
        if start < end:
            raise ValueError("its blocks overlap")
        end = start + size
        for key, value in _block(index, start, size):
            if last is not None and key <= last:
                raise ValueError("its names are not sorted")
            last = key
            yield key, value


def _block(index: bytes, start: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yields the entries of a block of a table.

    TensorFlow begins to read at any of the block's restarts: none may be within an entry.
    """
    if start + size + 5 > len(index):
        raise ValueError("it ends within a block")
    if index[start + size]:
        raise ValueError("it is compressed, which TensorFlow's are not")
    block = index[start : start + size]
    (restarts,) = struct.unpack_from("<I", block, size - 4)
    end = size - 4 - 4 * restarts
    if end < 0:
        raise ValueError("it ends within a block")
    allowed, place, key = set(), 0, b""
    while place < end:
        begin = place
        shared, place = _varint(block, place)
        unshared, place = _varint(block, place)
        length, place = _varint(block, place)
        if shared > len(key) or place + unshared + length > end:
            raise ValueError("it has an entry that ends behind its block")
        if not shared:
            allowed.add(begin)
        key = key[:shared] + block[place : place + unshared]
        place += unshared
        yield key, block[place : place + length]
        place += length
    starts = struct.unpack_from(f"<{restarts}I", block, end)
    # A table without entries has a restart, too.
    if starts[:1] != (0,) or not allowed.issuperset(starts if end else ()):
        raise ValueError("it has a restart within an entry")


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Returns the number of 7 bits a byte at a place, and the place behind it."""
    value = 0
    for shift in range(0, 64, 7):
        if place >= len(data):
            raise ValueError("it ends within a number")
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("it has a number of more than 64 bits")
