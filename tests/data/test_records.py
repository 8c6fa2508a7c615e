import pathlib

import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.data import records

DATA = [b"first", b"", bytes(range(256)) * 40, b"\0" * 100, b"last"]
OFFSETS = [0, 21, 37, 37 + 16 + 256 * 40, 37 + 16 + 256 * 40 + 116]


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "shard"
    records.write_records(path, DATA)
    return path


def flip(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x40
    path.write_bytes(content)


def test_tensorflow_reads_what_was_written_and_the_other_way_round(shard, tmp_path):
    import tensorflow as tf

    assert [record.numpy() for record in tf.data.TFRecordDataset(str(shard))] == DATA
    with tf.io.TFRecordWriter(str(tmp_path / "theirs")) as writer:
        for data in DATA:
            writer.write(data)
    assert (tmp_path / "theirs").read_bytes() == shard.read_bytes()


def test_write_records_says_what_it_wrote(tmp_path):
    import hashlib

    path = tmp_path / "shard"
    written = records.write_records(path, iter(DATA))
    content = path.read_bytes()
    assert written == (len(DATA), len(content), hashlib.sha256(content).hexdigest())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(shard):
    def failing():
        yield b"new"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        records.write_records(shard, failing())
    assert list(records.read_records(shard)) == DATA
    assert list(shard.parent.iterdir()) == [shard]


def test_index_and_random_access(shard):
    assert records.index_shard(shard) == len(DATA)
    assert list(records.locate_records(shard)) == OFFSETS
    assert [records.read_record(shard, i, offset) for i, offset in enumerate(OFFSETS)] == DATA


def test_an_empty_file_has_no_records(tmp_path):
    (tmp_path / "empty").touch()
    assert records.index_shard(tmp_path / "empty") == 0
    assert list(records.read_records(tmp_path / "empty")) == []


def test_reading_stops_at_the_corrupt_record_and_names_it(shard):
    flip(shard, OFFSETS[2] + 500)
    reader = records.read_records(shard)
    assert [next(reader), next(reader)] == DATA[:2]
    with pytest.raises(
        records.CorruptRecordError, match=r"record 2, at byte 37.*its data"
    ) as caught:
        next(reader)
    assert (caught.value.record, caught.value.offset) == (2, 37)
    assert records.index_shard(shard) == len(DATA)  # the lengths are whole
    with pytest.raises(records.CorruptRecordError, match="record 2, at byte 37"):
        records.read_record(shard, 2, 37)


def test_a_corrupt_length_is_found_by_every_reader(shard):
    flip(shard, OFFSETS[3] + 1)
    for read in (records.index_shard, lambda path: list(records.read_records(path))):
        with pytest.raises(records.CorruptRecordError, match=r"record 3, .* its length"):
            read(shard)


@pytest.mark.parametrize("cut", [1, 10, 19])
def test_a_cut_file_is_named(shard, cut):
    shard.write_bytes(shard.read_bytes()[:-cut])
    with pytest.raises(records.CorruptRecordError, match=r"record 4, .*the file ends"):
        list(records.read_records(shard))
    *whole, damage = records.read_past_damage(shard, len(DATA))
    assert whole == DATA[:4]
    assert damage[:2] == (4, OFFSETS[4])
    assert "the file ends" in damage.reason and not damage.bounded


@pytest.mark.parametrize("count", [0, 3, len(DATA)])
def test_no_damage_in_a_whole_file(shard, count):
    assert list(records.read_past_damage(shard, count)) == DATA


def test_a_file_that_ends_early_in_good_order_is_damaged(shard):
    size = len(shard.read_bytes())
    damage = records.Damage(len(DATA), size, "the file ends before it", bounded=False)
    assert list(records.read_past_damage(shard, len(DATA) + 2)) == [*DATA, damage]


@pytest.mark.parametrize("number", [0, 2, 3])
@pytest.mark.parametrize("place", ["length", "checksum of length", "data", "checksum of data"])
def test_what_follows_a_corrupt_record_is_read(shard, number, place):
    offset, reason = {
        "length": (OFFSETS[number] + 2, "the checksum of its length is wrong"),
        "checksum of length": (OFFSETS[number] + 9, "the checksum of its length is wrong"),
        "data": (OFFSETS[number] + 12, "the checksum of its data is wrong"),
        "checksum of data": (OFFSETS[number + 1] - 1, "the checksum of its data is wrong"),
    }[place]
    flip(shard, offset)
    damage = records.Damage(number, OFFSETS[number], reason, bounded="data" in place)
    expected = [*DATA[:number], damage, *DATA[number + 1 :]]
    assert list(records.read_past_damage(shard, len(DATA))) == expected


def test_several_corrupt_records(shard):
    flip(shard, OFFSETS[0] + 13)
    flip(shard, OFFSETS[2])
    flip(shard, OFFSETS[3] + 30)
    found = list(records.read_past_damage(shard, len(DATA)))
    assert [found[1], found[4]] == [DATA[1], DATA[4]]
    damages = [found[0], found[2], found[3]]
    assert [(damage.record, damage.offset, damage.bounded) for damage in damages] == [
        (0, OFFSETS[0], True),
        (2, OFFSETS[2], False),
        (3, OFFSETS[3], True),
    ]


class FailingFile:
    """A file that cannot be read so many times."""

    def __init__(self, file, failures):
        self._file, self._failures = file, failures

    def __getattr__(self, name):
        return getattr(self._file, name)

    def read(self, length):
        if self._failures:
            raise OSError(self._failures.pop(), "Input/output error")
        return self._file.read(length)


@pytest.fixture
def failing(monkeypatch):
    """failing(times): so many reads of files fail; returns the pauses made, in seconds."""

    def fail(times):
        pauses, failures = [], [5] * times
        monkeypatch.setattr(records.time, "sleep", pauses.append)
        plain_open = pathlib.Path.open

        def open_failing(path, mode="r", *args):
            file = plain_open(path, mode, *args)
            return FailingFile(file, failures) if mode == "rb" else file

        monkeypatch.setattr(pathlib.Path, "open", open_failing)
        return pauses

    return fail


def test_reading_that_fails_for_a_moment_is_tried_again(shard, failing):
    pauses = failing(3)
    assert list(records.read_records(shard)) == DATA
    assert pauses == [1, 2, 4]
    pauses = failing(2)
    assert list(records.read_past_damage(shard, len(DATA))) == DATA
    assert pauses == [1, 2]


def test_reading_that_goes_on_failing_names_the_file(shard, failing):
    pauses = failing(4)
    with pytest.raises(UserError, match=r"shard: cannot be read: Input/output error"):
        list(records.read_records(shard))
    assert pauses == [1, 2, 4]


def test_a_file_that_is_not_there_is_not_waited_for(tmp_path, failing):
    pauses = failing(0)
    with pytest.raises(UserError, match="nowhere: cannot be read: No such file"):
        list(records.read_past_damage(tmp_path / "nowhere", 3))
    assert pauses == []


def test_a_missing_file_is_the_users_error(tmp_path):
    for read in (records.read_records, records.locate_records):
        with pytest.raises(UserError, match="nowhere: cannot be read"):
            next(read(tmp_path / "nowhere"))
