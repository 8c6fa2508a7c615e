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


def test_tensorflow_reads_and_writes_the_same_format(shard, tmp_path):
    import tensorflow as tf

    assert [record.numpy() for record in tf.data.TFRecordDataset(str(shard))] == DATA
    with tf.io.TFRecordWriter(str(tmp_path / "theirs")) as writer:
        for data in DATA:
            writer.write(data)
    assert (tmp_path / "theirs").read_bytes() == shard.read_bytes()


def test_write_records_returns_counts_and_checksum(tmp_path):
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


@pytest.mark.parametrize("record", [b"", b"\xff", b"lost record", *DATA])
def test_other_records_are_not_notes(record):
    assert records.lost_record(record) is None


def test_a_note_of_a_lost_record():
    note = records.LOST + b"\n3\n1000\nthe reason\n/a\nb/train-0"  # A name may have any character.
    assert records.lost_record(note) == (3, 1000, "the reason", "/a\nb/train-0")


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


def test_failed_reads_are_retried(shard, failing):
    pauses = failing(3)
    assert list(records.read_records(shard)) == DATA
    assert pauses == [1, 2, 4]


def test_permanent_failure_names_the_file(shard, failing):
    pauses = failing(4)
    with pytest.raises(UserError, match=r"shard: cannot be read: Input/output error"):
        list(records.read_records(shard))
    assert pauses == [1, 2, 4]


def test_missing_file_is_not_retried(tmp_path, failing):
    pauses = failing(0)
    with pytest.raises(UserError, match="nowhere: cannot be read: No such file"):
        list(records.read_records(tmp_path / "nowhere"))
    assert pauses == []


def test_missing_file_is_a_user_error(tmp_path):
    for read in (records.read_records, records.locate_records):
        with pytest.raises(UserError, match="nowhere: cannot be read"):
            next(read(tmp_path / "nowhere"))


def test_a_planted_link_is_not_written_through(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / ".shard.tmp").symlink_to(precious)
    (tmp_path / "shard").symlink_to(precious)
    records.write_records(tmp_path / "shard", [b"one", b"two"])
    assert precious.read_text() == "precious"
    assert list(records.read_records(tmp_path / "shard")) == [b"one", b"two"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / ".shard.0123456789ab.tmp").write_bytes(b"half")
    (tmp_path / ".other.0123456789ab.tmp").write_bytes(b"another's")
    records.write_records(tmp_path / "shard", [b"one"])
    assert len(list(tmp_path.iterdir())) == 3  # another process might be writing it
    records.remove_unfinished(tmp_path, ["shard"])
    assert {path.name for path in tmp_path.iterdir()} == {"shard", ".other.0123456789ab.tmp"}
