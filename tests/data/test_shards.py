"""Reading of shards, with notes in place of lost records."""

import functools
import itertools
import pathlib
import struct
import subprocess
import sys

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import UserError
from imagenet_fast.data import shards
from imagenet_fast.data.records import locate_records, lost_record, write_records
from imagenet_fast.data.shards import shard_reader
from imagenet_fast.training.failures import errors_explained

DATA = "the checksum of its data is wrong"
LENGTH = "the checksum of its length is wrong, or the file ends within it"
END = "the file ends before it"


@pytest.fixture
def shard(tmp_path, write_data, numbered_examples):
    """A shard of the first 20 numbered examples."""
    write_data(tmp_path / "data", train=[numbered_examples[:20]])
    return pathlib.Path(tmp_path, "data", "train-00000-of-00001")


def corrupt(shard, *places):
    """Changes a bit in each place: (number of a record, distance from its start in bytes)."""
    content, offsets = bytearray(shard.read_bytes()), list(locate_records(shard))
    for number, distance in places:
        content[offsets[number] + distance] ^= 0x10
    shard.write_bytes(content)
    return offsets


def cut(shard, size):
    shard.write_bytes(shard.read_bytes()[:size])


def read(shard, count=20, native=None):
    read_shard = shard_reader([str(shard)], native)
    return list(read_shard(str(shard), count, 0).as_numpy_iterator())


def check(shard, examples, lost):
    """Checks that all are read but those that are lost: {number: (offset, reason)}."""
    found = read(shard)
    assert len(found) == 20
    for number, (record, example) in enumerate(zip(found, examples)):
        if number in lost:
            assert lost_record(record) == (number, *lost[number], str(shard))
        else:
            assert record == example and lost_record(record) is None


def test_records_of_a_whole_shard(shard, numbered_examples):
    check(shard, numbered_examples, {})


def test_no_more_records_than_were_counted(shard, numbered_examples):
    assert read(shard, count=5) == numbered_examples[:5]
    corrupt(shard, (2, 100))
    found = read(shard, count=5)
    assert found[3:] == numbered_examples[3:5]
    assert lost_record(found[2]).record == 2


@pytest.mark.parametrize(
    ("number", "distance", "reason"), [(0, 1, LENGTH), (7, 100, DATA), (19, 1, LENGTH)]
)
def test_records_around_a_damaged_one_are_read(shard, numbered_examples, number, distance, reason):
    offsets = corrupt(shard, (number, distance))
    check(shard, numbered_examples, {number: (offsets[number], reason)})


def test_several_damaged_records(shard, numbered_examples):
    offsets = corrupt(shard, (3, 100), (8, 1), (19, 100))
    lost = {3: DATA, 8: LENGTH, 19: DATA}
    check(shard, numbered_examples, {n: (offsets[n], reason) for n, reason in lost.items()})


def test_neighbours_that_are_lost_together(shard, numbered_examples):
    # Where the length of a record is not known, neither is the place of the next one's.
    offsets = corrupt(shard, (2, 100), (5, 1), (6, 1), (7, 10), (11, 100))
    together = dict.fromkeys((5, 6, 7), (offsets[5], LENGTH))
    check(shard, numbered_examples, {2: (offsets[2], DATA), **together, 11: (offsets[11], DATA)})


def test_a_cut_within_a_record(shard, numbered_examples):
    offsets = list(locate_records(shard))
    cut(shard, offsets[13] + 30)
    lost = dict.fromkeys(range(13, 20), (offsets[13], LENGTH))
    check(shard, numbered_examples, lost)


def test_a_cut_between_records(shard, numbered_examples):
    size = list(locate_records(shard))[17]
    cut(shard, size)
    check(shard, numbered_examples, dict.fromkeys((17, 18, 19), (size, END)))


def test_an_empty_file(shard, numbered_examples):
    cut(shard, 0)
    check(shard, numbered_examples, dict.fromkeys(range(20), (0, END)))


def claim(shard, number, length, at_end=False):
    """Makes a record claim a length, with a valid checksum."""
    content, offsets = bytearray(shard.read_bytes()), list(locate_records(shard))
    size = struct.pack("<Q", length)
    header = size + checksum(size)
    content[offsets[number] : offsets[number] + len(header)] = header
    shard.write_bytes(content)
    return offsets[number]


CHILD = """
import sys
from imagenet_fast.data.shards import shard_reader
path, native = sys.argv[1], sys.argv[2] == "True"
read = shard_reader([path] * native, native)
print(sum(1 for _ in read(path, 20, 0)))
"""


@pytest.mark.parametrize("length", [2**32, 2**40, 2**62, 2**64 - 1])
@pytest.mark.parametrize("number", [0, 7])
def test_a_record_that_claims_more_than_there_is(shard, numbered_examples, number, length):
    """TensorFlow's reader allocates it first: RecordReader::ReadChecksummed of record_reader.cc."""
    offset = claim(shard, number, length)
    lost = {number: (offset, LENGTH)}
    check(shard, numbered_examples, lost)


def test_such_a_record_after_a_damaged_one(shard, numbered_examples):
    offsets = corrupt(shard, (3, 100))
    claim(shard, 9, 2**40)
    check(shard, numbered_examples, {3: (offsets[3], DATA), 9: (offsets[9], LENGTH)})


def test_such_a_record_without_the_native_op(shard, numbered_examples):
    claim(shard, 7, 2**40)
    with pytest.raises(UserError, match=r"record 7, at byte .* no image is that large"):
        shard_reader([str(shard)], native=False)
    assert shard_reader(["gs://bucket/train-00000-of-00001"], native=False)


@pytest.mark.long
def test_that_it_would_end_the_process(shard):
    claim(shard, 7, 2**40)
    run = functools.partial(subprocess.run, capture_output=True, text=True)
    guarded, unguarded = (
        run([sys.executable, "-c", CHILD, str(shard), str(native)]) for native in (True, False)
    )
    assert guarded.stdout.strip() == "20"
    assert unguarded.returncode < 0


# --- Against a reader in plain Python -------------------------------------------------------------


def checksum(data):
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def expected(content, count):
    """Returns what a file holds: records, and (number, offset) of those that are lost."""

    def length_at(place):
        header = content[place : place + 12]
        length = int.from_bytes(header[:8], "little")
        if len(header) == 12 and checksum(header[:8]) == header[8:]:
            return length if place + length + 16 <= len(content) else None
        return None

    places, place = [], 0
    while place < len(content):
        length = length_at(place)
        places.append((place, length))
        if length is not None:
            place += length + 16
            continue
        later = range(place + 1, len(content))
        place = next((later for later in later if length_at(later) is not None), len(content))
    unknown = [number for number, (_, length) in enumerate(places) if length is None]
    at = unknown[-1] if unknown else len(places)
    more = [(places[at][0] if unknown else len(content), None)] * (count - len(places))
    found = []
    for number, (place, length) in enumerate([*places[:at], *more, *places[at:]][:count]):
        data = content[place + 12 : place + 12 + (length or 0)]
        end = place + 12 + len(data)
        whole = length is not None and checksum(data) == content[end : end + 4]
        found.append(data if whole else (number, place))
    return found


def damaged(content, random):
    """Returns a file with damage of some kind in a few places."""
    content = bytearray(content)
    for _ in range(random.integers(1, 4)):
        place, size = random.integers(len(content) + 1), random.integers(1, 60)
        some = random.bytes(size)
        change = random.integers(6)
        if change == 0:
            del content[place:]
        elif change == 1:
            del content[place : place + size]
        elif change == 2:
            content[place:place] = some
        elif change == 3:
            content[place : place + size] = bytes(size)
        elif change == 4:
            content += content[place:]
        elif content:
            content[min(place, len(content) - 1)] ^= 1 << random.integers(8)
    return bytes(content)


@pytest.mark.long
def test_shards_that_are_damaged_at_random(tmp_path):
    random = np.random.default_rng(0)
    files, count = [], 12
    for index in range(30):
        sizes = random.choice([0, 1, 30, 90], count)
        write_records(tmp_path / str(index), map(random.bytes, sizes))
        files.append(damaged((tmp_path / str(index)).read_bytes(), random))
        (tmp_path / str(index)).write_bytes(files[-1])
    paths = tf.data.Dataset.range(len(files)).map(
        lambda index: f"{tmp_path}/" + tf.strings.as_string(index)
    )
    # As data sets come to an input server.
    graph = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(
            paths.flat_map(lambda path: shard_reader([])(path, count, 0))
        )
    )
    assert b"PyFunc" not in graph.numpy()
    records = paths.flat_map(lambda path: shard_reader([])(path, count, 0)).as_numpy_iterator()
    lost = 0
    for index, content in enumerate(files):
        found = list(itertools.islice(records, count))
        notes = [lost_record(record) for record in found]
        lost += sum(note is not None for note in notes)
        found = [note[:2] if note else record for note, record in zip(notes, found)]
        assert found == expected(content, count), index
    assert next(records, None) is None
    assert 30 < lost < 270


def test_references_of_several_shards_in_any_order(tmp_path):
    expected, given = [], []
    for number in range(3):
        records = [bytes([number, index]) * 8192 for index in range(4)]
        path = tmp_path / f"train-0000{number}-of-00003"
        write_records(path, records)
        read_shard = shard_reader([str(path)], refer=True)
        expected += records
        given += read_shard(str(path), 4, 0).as_numpy_iterator()
    assert max(map(len, given)) < 1000
    expected.append(b"no reference")
    given.append(b"no reference")
    for seed in range(3):
        order = np.random.RandomState(seed).permutation(len(given))
        loaded = shards.load_records(tf.constant([given[index] for index in order]))
        assert loaded.numpy().tolist() == [expected[index] for index in order]


# --- What is no damage ----------------------------------------------------------------------------


def test_missing_shard_is_named(shard):
    shard.unlink()
    with pytest.raises(UserError) as caught, errors_explained(then="begins anew"):
        read(shard)
    assert str(caught.value).startswith(f"{shard}: cannot be read: No such file or directory; ")


@pytest.mark.parametrize("corrupted", [(), (12,)])
def test_reading_that_fails_where_nothing_is_damaged(shard, monkeypatch, corrupted):
    """TensorFlow's reader fails behind the fifth record, but only the first time."""
    corrupt(shard, *((number, 100) for number in corrupted))
    reader, first = shards._until_damage, [5]

    def failing(path, count, offset):
        return reader(path, first.pop() if first else count, offset)

    monkeypatch.setattr(shards, "_until_damage", failing)
    with pytest.raises(UserError) as caught, errors_explained(then="begins anew"):
        read(shard)
    assert str(caught.value) == (
        f"{shard}: reading failed where nothing is damaged, as when a disk or a server fails for a "
        "moment; after fixing that, the same command begins anew"
    )
