"""A tf.data reader of shards that skips only damaged records.

It consists of TensorFlow operations alone, so it also runs on input servers and the hosts of TPU
slices, which cannot call this process' Python functions.

TensorFlow's own reader stops at the first damaged record. This one then locates all records by
their lengths and resumes at the next one. If a length is damaged, the next record starts at the
next length that matches its checksum.

TensorFlow's reader allocates the length that a record claims before it reads. So the lengths are
first compared with the file's size: by a native op or, without a compiler, in Python.
"""

from __future__ import annotations

import functools
import pathlib
import secrets
from collections.abc import Callable, Iterable
from types import ModuleType

import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.native_ops import load_ops
from imagenet_fast.base.paths import is_local
from imagenet_fast.data.records import (
    CRC_MASK,
    HEADER,
    LOST,
    OVERHEAD,
    CorruptRecordError,
    locate_records,
)

_SOURCE = pathlib.Path(__file__).with_name("record_op.cc")
# A truncated file may lack as much of its last record: one that claims more is no image.
_LARGEST_RECORD = 2**30

# As in TFRecordDataset.
_BUFFER = 2**18

# Error codes in place of a record's length.
_BAD_LENGTH, _AT_END = -1, -2
_REASONS = (
    "the checksum of its data is wrong",
    "the checksum of its length is wrong, or the file ends within it",
    "the file ends before it",
)
# ``training.failures`` reports it as a UserError.
_FAILED = ": reading failed where nothing is damaged, as when a disk or a server fails for a moment"


# Arguments: the shard's path, its number of records, and the number of records in earlier shards.
ReadShard = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.data.Dataset]


# There is nothing to convert, and AutoGraph's search would take longer than tracing.
@tf.autograph.experimental.do_not_convert
def read_shard(
    path: tf.Tensor, count: tf.Tensor, start: tf.Tensor, *, native: bool, refer: bool = False
) -> tf.data.Dataset:
    """Returns exactly ``count`` records of a shard, with a note in place of each lost one.

    :func:`~imagenet_fast.data.records.lost_record` parses the notes. A damaged length can hide
    several records: all missing records are assumed to be at the last damaged length.

    Args:
      path: of the shard, which is read into memory if it is damaged.
      count: number of its records.
      start: number of records in earlier shards; not used.
      native: whether to compare lengths with the file's size by the native op, which the process
        that reads must have loaded. Otherwise ``shard_reader`` has compared them.
      refer: whether records may be references, for :func:`load_records`: if they are large and all
        lengths are sound. References are cheap to shuffle and to batch.

    Raises (in the dataset):
      tf.errors.OpError: if the shard cannot be read, or reading fails where nothing is damaged, as
        when a disk or a server fails for a moment.
    """
    count = tf.convert_to_tensor(count, tf.int64)
    if refer:
        references = load_record_op().imagenet_fast_refer_to_records(
            path=path, count=count, **_attributes()
        )
        references = tf.data.Dataset.from_tensor_slices(tf.ensure_shape(references, [None]))

        def read(path: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
            return read_shard(path, count, start, native=native)

        # In a function, because what is concatenated is made ready for each shard, used or not.
        records = tf.data.Dataset.from_tensors((path, count)).flat_map(read)
        return references.concatenate(records).take(count)
    fitting = count
    if native:
        fitting = load_record_op().imagenet_fast_count_fitting(path=path, count=count)
    whole = _until_damage(path, tf.ensure_shape(fitting, []), tf.constant(0, tf.int64))
    rest = tf.data.Dataset.from_tensors((path, count)).flat_map(_from_damage_on)
    return whole.concatenate(rest).take(count)


def load_record_op() -> ModuleType:
    """Returns the native op, after compiling it at the first call.

    Raises:
      OSError: if it cannot be compiled or loaded; the message gives the reason.
    """
    return load_ops(_SOURCE)


def load_records(records: tf.Tensor) -> tf.Tensor:
    """Reads what :func:`read_shard` referred to.

    Args:
      records: records and references, string [records].

    Returns:
      The records, with a note in place of each whose data are damaged, string [records].

    Raises:
      tf.errors.InternalError: at run time, if a shard cannot be read.
    """
    loaded = load_record_op().imagenet_fast_load_records(given=records, **_attributes())
    return tf.ensure_shape(loaded, records.shape)


@functools.cache
def _attributes() -> dict[str, bytes | str]:
    """Returns the attributes of the ops on references."""
    checksum, _, end = _REASONS
    # No record of a file can start as a reference: it would read what it likes.
    token = b"\xff reference " + secrets.token_bytes(16)
    return {
        "token": token,
        "lost": LOST,
        "wrong_checksum": checksum,
        "too_short": end,
        "failed": _FAILED,
    }


def shard_reader(
    paths: Iterable[str], native: bool | None = None, *, refer: bool = False
) -> ReadShard:
    """Returns :func:`read_shard` for these shards.

    Args:
      paths: of the shards. Those in buckets are read without comparing lengths.
      native: whether the process that reads has the native op; None: it is this process.
      refer: with the native op, whether records may be references.

    Raises:
      UserError: if, without the op, a record claims to be larger than its shard by gigabytes.
    """
    if native is None:
        native = _is_native()
    if not native:
        for path in filter(is_local, paths):
            _check_lengths(path)
    return functools.partial(read_shard, native=native, refer=native and refer)


@functools.cache
def _is_native() -> bool:
    try:
        return load_record_op() is not None
    except OSError:
        return False


@functools.cache
def _check_lengths(path: str) -> None:
    try:
        for _ in locate_records(path):
            pass
    except CorruptRecordError as error:
        if error.missing > _LARGEST_RECORD:
            raise UserError(f"{error}; no image is that large: remove the shard") from None


def _until_damage(path: tf.Tensor, count: tf.Tensor, offset: tf.Tensor) -> tf.data.Dataset:
    """Returns at most ``count`` records, from the one at ``offset`` up to the next lost one."""

    def read(path: tf.Tensor, offset: tf.Tensor) -> tf.data.Dataset:
        reader = tf.raw_ops.TFRecordDatasetV2(
            filenames=path, compression_type="", buffer_size=_BUFFER, byte_offsets=offset
        )
        return tf.data.experimental.from_variant(reader, tf.TensorSpec([], tf.string))

    # In a function, because TensorFlow drops the offset when it serializes a dataset.
    reader = tf.data.Dataset.from_tensors((path, offset)).flat_map(read)
    # A file that cannot be opened yields infinitely many errors.
    attempts = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).repeat(count)
    return tf.data.Dataset.choose_from_datasets([reader], attempts).ignore_errors()


# Traced once, because tracing usually takes several times as long as reading.
@functools.partial(
    tf.function,
    input_signature=(tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)),
    autograph=False,
)
def _from_damage_on(path: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
    """Returns the records of a shard from the first lost one on, followed by an error."""
    offsets, lengths, times = _places(tf.io.read_file(path), count)
    numbers = tf.cumsum(times, exclusive=True)
    end = tf.size(offsets, tf.int64) - 1

    def count_whole(first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        # Up to the next length that is damaged or does not fit.
        fitting = tf.concat([tf.where(lengths[first:] < 0)[:, 0], [count]], 0)[0]
        whole = _until_damage(path, tf.minimum(count, fitting), offsets[first]).map(lambda _: 0)
        one_more = whole.concatenate(tf.data.Dataset.from_tensors(0))  # a batch cannot be empty
        return tf.size(one_more.batch(count + 1).get_single_element(), tf.int64) - 1

    def find(first: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
        # No records follow the end.
        lost = first + count_whole(tf.minimum(first, end), tf.maximum(end - first, 0))
        return lost + 1, (first, lost)

    def read(first: tf.Tensor, lost: tf.Tensor) -> tf.data.Dataset:
        # The records before the first lost one have been read already.
        whole = _until_damage(path, tf.where(first > 0, lost - first, 0), offsets[first])
        with tf.control_dependencies([require(tf.equal(count_whole(lost, tf.ones_like(lost)), 0))]):
            number = tf.identity(numbers[lost])
        notes = tf.data.Dataset.range(number, number + times[lost])
        return whole.concatenate(notes.map(lambda number: note(number, lost)))

    def note(number: tf.Tensor, lost: tf.Tensor) -> tf.Tensor:
        place = [tf.strings.as_string(part) for part in (number, offsets[lost])]
        reason = tf.gather(_REASONS, tf.maximum(-lengths[lost], 0))
        return tf.strings.join([LOST, *place, reason, path], "\n")

    def require(damaged: tf.Tensor | bool) -> tf.Operation:
        return tf.debugging.Assert(damaged, ["UserError: " + path + _FAILED])

    def fail(path: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([require(False)]):
            return tf.identity(path)

    turns = tf.data.Dataset.range(tf.int64.max).scan(tf.constant(0, tf.int64), find)
    turns = turns.take_while(lambda first, _: first <= end)
    return turns.flat_map(read).concatenate(tf.data.Dataset.from_tensors(path).map(fail))


def _places(content: tf.Tensor, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Locates the records of a file, including lost ones, and its end.

    Returns:
      The offsets; the lengths of the data, or error codes; and the number of records at each
      offset, at least ``count`` in all. Each int64 [places + 1].
    """
    headers, lengths, size = _sound_headers(content)
    headers, lengths = tf.concat([headers, [size]], 0), tf.concat([lengths, [_BAD_LENGTH]], 0)

    def step(offset: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
        index = tf.searchsorted(headers, offset[tf.newaxis])[0]
        length = tf.where(tf.equal(headers[index], offset), lengths[index], _BAD_LENGTH)
        following = tf.where(length < 0, headers[index], offset + length + OVERHEAD)
        return following, (offset, length)

    places = tf.data.Dataset.range(tf.int64.max).scan(tf.constant(0, tf.int64), step)
    places = places.take_while(lambda offset, _: offset < size)
    end = tf.data.Dataset.from_tensors((size, tf.constant(_AT_END, tf.int64)))
    offsets, lengths = places.concatenate(end).batch(tf.int64.max).get_single_element()
    # If records are missing although no length is damaged, they are counted at the end.
    found = tf.size(offsets, tf.int64) - 1
    times = tf.concat([tf.ones([found], tf.int64), [0]], 0)
    costly = tf.where(lengths < 0)[-2:][0]
    times = tf.tensor_scatter_nd_add(times, [costly], [tf.maximum(count - found, 0)])
    return offsets, lengths, times


def _sound_headers(content: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the offsets of valid headers, int64 [n], their lengths, and the file's size."""
    data = tf.io.decode_raw(content, tf.uint8)
    size = tf.size(data, tf.int64)
    starts = tf.maximum(size - OVERHEAD + 1, 0)

    either = tf.bitwise.bitwise_or
    pairs = either(data[:-1], data[1:])
    fours = either(pairs[:-2], pairs[2:])
    # Records are smaller than 4 GiB, so the upper half of a length is 0; and the masked checksum of
    # eight zeros is not 0. This rules out nearly all offsets before any checksum is computed.
    zeros, others = fours[4 : starts + 4], either(fours[:starts], fours[8 : starts + 8])
    places = tf.where(tf.equal(zeros, 0) & (others > 0))[:, 0]
    headers = tf.gather(data, places[:, tf.newaxis] + tf.range(HEADER.size, dtype=tf.int64))
    lengths = tf.cast(tf.bitcast(headers[:, :4], tf.uint32), tf.int64)
    sound = tf.equal(_checksums(headers[:, :8]), tf.bitcast(headers[:, 8:], tf.uint32))
    sound &= places + lengths + OVERHEAD <= size
    return places[sound], lengths[sound], size


def _checksums(data: tf.Tensor) -> tf.Tensor:
    """Returns the masked CRC-32C of each row of bytes: uint8 [rows, n] to uint32 [rows]."""
    xor, right, left = tf.bitwise.bitwise_xor, tf.bitwise.right_shift, tf.bitwise.left_shift
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(0x82F63B78), table >> 1)
    state = tf.fill(tf.shape(data)[:1], tf.constant(2**32 - 1, tf.uint32))
    for column in tf.unstack(data, axis=1):
        index = xor(tf.cast(state, tf.uint8), column)
        state = xor(tf.gather(table, tf.cast(index, tf.int32)), right(state, np.uint32(8)))
    crc = tf.bitwise.invert(state)
    rotated = tf.bitwise.bitwise_or(right(crc, np.uint32(15)), left(crc, np.uint32(17)))
    return rotated + np.uint32(CRC_MASK)
