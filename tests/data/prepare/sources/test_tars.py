"""Archives of regular files, and those that others could make."""

import bz2
import gzip
import io
import lzma
import os
import tarfile

import pytest

from imagenet_fast.data.prepare.sources import tars
from imagenet_fast.data.prepare.sources.tars import BadTarError, open_tar


def block(name, size=0, kind=tarfile.REGTYPE, **pax):
    """What describes a member, which need not have that size."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.pax_headers = size, kind, pax
    return info.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT)


def member(name, content, **options):
    return block(name, len(content), **options) + content + bytes(-len(content) % 512)


PLAIN = member("a", b"one") + member("d/b", b"") + member("c", b"x" * 1000)
END = bytes(1024)


def read(data, limit=1000, **options):
    options = {"max_members": 10, "max_unpacked": 10**6, **options}
    with open_tar(io.BytesIO(data), **options) as archive:
        return {found.name: archive.read(found, limit) for found in archive}


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_files_and_their_content(compress, tmp_path):
    expected = {"a": b"one", "d/b": b"", "c": b"x" * 1000}
    assert read(compress(PLAIN + END)) == expected
    (tmp_path / "a.tar").write_bytes(compress(PLAIN + END))
    with open_tar(tmp_path / "a.tar", max_members=3, max_unpacked=10**4) as archive:
        assert {found.name: archive.open(found).read() for found in archive} == expected


def test_only_some_may_be_compressed():
    assert read(PLAIN + END, max_unpacked=None).keys() == {"a", "d/b", "c"}
    with pytest.raises(BadTarError):
        read(gzip.compress(PLAIN + END), max_unpacked=None)


def test_an_archive_in_an_archive():
    with open_tar(io.BytesIO(member("in.tar", PLAIN + END) + END), max_members=1) as outer:
        for found in outer:
            with open_tar(outer.open(found), max_members=3) as inner:
                assert {file.name: inner.read(file, 1000)[:3] for file in inner} == {
                    "a": b"one",
                    "d/b": b"",
                    "c": b"xxx",
                }


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
)
def test_what_is_no_file_is_left_out(kind):
    assert read(block("other", 0, kind) + PLAIN + END).keys() == {"a", "d/b", "c"}


SPARSE = {
    "GNU.sparse.major": "0",
    "GNU.sparse.minor": "1",
    "GNU.sparse.map": "0,0",
    "GNU.sparse.size": str(2**40),
}


def test_sparse_files_are_left_out():
    """They hold nothing, and are a terabyte."""
    assert read(block("sparse", **SPARSE) + PLAIN + END).keys() == {"a", "d/b", "c"}


def long_header(kind):
    return block("a", 10**5, kind) + bytes(10**5 + -(10**5) % 512) + PLAIN + END


def sparse_map():
    content = b"999999\n" + b"1\n" * 10**5
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}
    return member("sparse", content, **sparse) + END


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"rubbish" * 100, "bad checksum|invalid header"),
        (gzip.compress(PLAIN + END)[:-20], "ended before|end-of-stream"),
        (block("far", 2**40) + END, "'far' has 1,099,511,627,776 bytes, but can have 1,024"),
        (member("big", b"x" * 1001) + END, "'big' has 1,001 bytes, but may have 1,000"),
        (gzip.compress(member("big", bytes(10**6)) + END), "'big' has 1,000,000 bytes, but can"),
        # What describes a member is read at once.
        (long_header(tarfile.XHDTYPE), "what describes a member is too long"),
        (long_header(tarfile.GNUTYPE_LONGNAME), "what describes a member is too long"),
        (sparse_map(), "what describes a member is too long"),
        (block("a", kind=tarfile.XHDTYPE) * 5000, "what describes a member|recursion"),
        (PLAIN * 4 + END, "more than 10 members"),
        (block("a", size="-1024") + PLAIN, "'a' has -1,024 bytes|negative|bad"),
        (
            b"".join(
                tarfile.TarInfo.create_pax_global_header(
                    {f"key{number}{i}": "x" for i in range(30)}
                )
                + member(f"f{number}", b"")
                for number in range(5)
            ),
            "more than 100 global attributes",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # bytes differ between processes
)
def test_hostile_and_damaged_archives(data, message, monkeypatch):
    monkeypatch.setattr(tars, "_MAX_HEADERS", 60_000)
    with pytest.raises(BadTarError, match=message):
        read(data, max_unpacked=10**6)


def test_seeking_in_what_is_compressed_is_limited():
    """It reads all up to there."""
    data = gzip.compress(block("other", 10**7, tarfile.CONTTYPE) + bytes(10**7))
    with pytest.raises(BadTarError, match="'other' has 10,000,000 bytes, but can have 999,488"):
        read(data)
    data = gzip.compress(block("odd", 10**7, b"Z") + bytes(10**7))
    with pytest.raises(BadTarError, match=r"ends early, or has more than"):
        read(data)


def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadTarError, match="not a regular file"):
        open_tar(tmp_path / "pipe", max_members=1).__enter__()


def test_errors_of_the_caller_stay_as_they_are():
    with pytest.raises(KeyError), open_tar(io.BytesIO(PLAIN + END), max_members=9) as archive:
        for _ in archive:
            raise KeyError
