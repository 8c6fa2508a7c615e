"""Files that others may have made."""

import dataclasses
import os
import zipfile

import numpy as np
import pytest

from imagenet_fast.base import outside
from imagenet_fast.base.outside import Count, check_types, parse_json, read_arrays, read_bounded


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    sides: tuple[Count, ...] = ()


def test_a_file_of_bounded_size(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(OSError, match="has 5 bytes, but may have 4") as caught:
        read_bounded(path, 4)
    assert caught.value.filename == str(path)


def test_a_file_that_is_sparse_takes_no_memory(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="1,099,511,627,776 bytes"):
        read_bounded(path, 2**20)


def test_what_is_no_file_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            read_bounded(path, 100)


def test_json_of_a_type():
    assert parse_json('{"name": "a", "sides": [1, 2]}', Shape) == Shape("a", (1, 2))
    assert parse_json(b'{"name": "\\ud800", "more": 1}', Shape) == Shape("\ud800")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[" * 10**6, "nested too deeply"),
        ('{"a":' * 10**6, "nested too deeply"),
        ("[1]", "Expected `object`, got `array`"),
        ('{"sides": []}', "missing required field `name`"),
        ('{"name": 1}', "Expected `str`, got `int` - at `$.name`"),
        ('{"name": "a", "sides": [-1]}', "Expected `int` >= 0 - at `$.sides"),
        ('{"name": "a", "sides": [true]}', "got `bool`"),
        ('{"name": "a", "sides": [1e300]}', "got `float`"),
        ('{"name": "a", "sides": [' + "9" * 4000 + "]}", "Expected `int` <="),
        ('{"name": "a", "sides": [' + "9" * 5000 + "]}", "[Ee]xceeds"),
        (b'{"name": "\xff"}', "invalid start byte"),
        ("[" + "0," * 2**24 + "0]", "may have 33,554,432"),
    ],
)
def test_other_json(text, reason):
    with pytest.raises(ValueError, match=reason.replace("$", r"\$").replace("[]", r"\[\]")):
        parse_json(text, Shape)


def test_types_of_an_object():
    check_types({"a": 1, "b": 0.5}, {"a": int}, float)
    for values in ({"b": 0.5}, {"a": "1"}, {"a": 1, "b": "0.5"}):
        with pytest.raises(ValueError, match=r"[ab]: Expected"):
            check_types(values, {"a": int}, float)


def write_npz(path, **entries):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(f"{name}.npy", content)


def npy(header, data=b""):
    text = f"{header}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def test_arrays(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", x=np.arange(3), y=np.array("text"))
    arrays = read_arrays(tmp_path / "a.npz")
    assert arrays["x"].tolist() == [0, 1, 2] and str(arrays["y"]) == "text"


@pytest.mark.parametrize(
    "content",
    [
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (9223372036854775807,)}"),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,)}", bytes(80)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}"),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"cos\nsystem\n."),
        npy("{'descr': 'nonsense', 'fortran_order': False, 'shape': ()}"),
        npy("__import__('os').system('true')"),
        npy("(" * 5000),
        b"",
    ],
)
def test_arrays_that_are_none(tmp_path, content):
    write_npz(tmp_path / "a.npz", x=content)
    with pytest.raises(ValueError):
        read_arrays(tmp_path / "a.npz")


def test_arrays_that_expand(tmp_path, monkeypatch):
    monkeypatch.setattr(outside, "MAX_ARRAYS", 10_000)
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(100_000))
    assert (tmp_path / "a.npz").stat().st_size < 5000
    with pytest.raises(ValueError, match="arrays of more than 10,000 bytes"):
        read_arrays(tmp_path / "a.npz")


def test_damaged_archives(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", x=np.arange(1000))
    content = (tmp_path / "a.npz").read_bytes()
    for damaged in (content[:-30], content[:50] + bytes(50) + content[100:], b"", b"PK\x05\x06"):
        (tmp_path / "a.npz").write_bytes(damaged)
        with pytest.raises(ValueError):
            read_arrays(tmp_path / "a.npz")
