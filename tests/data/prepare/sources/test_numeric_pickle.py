"""Pickles: those that NumPy writes, and those that others could."""

import pickle
import pickletools
import struct

import numpy as np
import pytest

from imagenet_fast.data.prepare.sources import numeric_pickle
from imagenet_fast.data.prepare.sources.numeric_pickle import read_numeric_pickle

ARRAY = np.arange(24, dtype=np.uint8).reshape(4, 6)


def old(value):
    """As NumPy 1, whose private modules have other names than NumPy 2's."""
    return pickle.dumps(value, 4).replace(
        b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray"
    )


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", ">u4", "<i8"])
def test_arrays(protocol, order, dtype):
    array = np.asarray(ARRAY.astype(dtype), order=order)
    read = read_numeric_pickle(pickle.dumps({"data": array, "again": [1]}, protocol))
    np.testing.assert_array_equal(read["data"], array)
    assert read["data"].dtype == array.dtype and read["again"] == [1]


def test_arrays_of_numpy_1_and_those_that_cannot_be_written_to():
    np.testing.assert_array_equal(read_numeric_pickle(old({"data": ARRAY}))["data"], ARRAY)
    fixed = ARRAY.copy()
    fixed.flags.writeable = False
    for protocol in (4, 5):
        read = read_numeric_pickle(pickle.dumps({"data": fixed}, protocol))
        np.testing.assert_array_equal(read["data"], ARRAY)


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values(protocol):
    values = {
        "numbers": [0, 1, -1, 255, 256, 65536, 2**40, -(2**70), True, False, None],
        "text": ["a", "\xe4" * 300, "\u20ac"],
        "nested": {"a": (), "b": (1,), "c": (1, 2), "d": (1, 2, 3), "e": (1, 2, 3, 4), "f": []},
        "many": list(range(3000)),
    }
    values["same"] = values["nested"]
    assert read_numeric_pickle(pickle.dumps(values, protocol)) == values


def test_bytes():
    values = {b"a": b"short", "b": b"long" * 100}
    assert read_numeric_pickle(pickle.dumps(values, 4)) == {"a": b"short", "b": b"long" * 100}


def call(function, *arguments):
    """The pickle of a call of NumPy's ``function``, whose arguments are pickled already."""
    return b"cnumpy\n" + function + b"\n(" + b"".join(arguments) + b"tR"


def dumped(*values):
    """A pickle of a dictionary with a value, given in parts."""
    return b"\x80\x02}U\x04data" + b"".join(values) + b"s."


def state(dtype, content, shape=b"K\x02\x85"):
    """What completes an array of one dimension."""
    return b"(K\x01" + shape + dtype + b"\x89U" + bytes([len(content)]) + content + b"tb"


EMPTY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
BYTE = call(b"dtype", b"U\x02u1", b"K\x00", b"K\x01")


def test_an_array_by_hand():
    read = read_numeric_pickle(dumped(EMPTY, state(BYTE, b"\1\2")))
    assert read["data"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        # An array of objects follows the addresses that its bytes are.
        (dumped(call(b"ndarray", b"K\x01\x85", BYTE, b"U\x08AAAAAAAA")), "it calls ndarray"),
        (dumped(call(b"dtype", b"U\x01O", b"K\x00", b"K\x01")), "the dtype 'O', not of integers"),
        (dumped(call(b"dtype", b"U\x02V8", b"K\x00", b"K\x01")), "the dtype 'V8', not of"),
        (dumped(call(b"dtype", b"U\x04u1,O", b"K\x00", b"K\x01")), "the dtype 'u1,O', not"),
        (dumped(BYTE, b"(K\x03U\x01|", BYTE, b"\x85NNJ\0\0\0\0K\0K\0tb"), "another dtype than int"),
        # An array without bytes, which would be uninitialised memory.
        (dumped(EMPTY), "an array without content"),
        (dumped(EMPTY, state(BYTE, b"", b"K\x09\x85")), "another size than its 0 bytes"),
        (dumped(EMPTY, state(BYTE, b"123")), "another size than its 3 bytes"),
        (dumped(EMPTY, state(BYTE, b"12", b"(K\2" + b"K\1" * 80 + b"t")), "another size"),
        (
            dumped(EMPTY, state(BYTE, b"12", b"J\xff\xff\xff\xffJ\xfe\xff\xff\xff\x86")),
            "another si",
        ),
        (dumped(EMPTY, state(BYTE, b"12", b"\x8a\x09" + b"\0" * 8 + b"\1\x85")), "another size"),
        (dumped(b"cnumpy\nndarray\nK\x00\x85K\x00\x86b"), "not enough values"),
        (dumped(b"cposix\nsystem\n(U\x02lstR"), "refers to posix.system, which"),
        (dumped(b"cnumpy.f2py\ncompile\n"), "refers to numpy.f2py.compile, which"),
        (dumped(b"P1\n"), "the opcode PERSID"),
        (dumped(b"cnumpy\nndarray\n)\x81"), "the opcode NEWOBJ"),
        (dumped(b"\x82\x01"), "the opcode EXT1"),
        (b"\x80\x02].", "it holds list, not a dictionary"),
        (b"\x80\x02}K\x01K\x02s.", "int in place of bytes"),
        (b"\x80\x02K\x01K\x02K\x03s.", "int in place of dict"),
        (b"\x80\x02}h\x05s.", "damaged: KeyError"),
        (b"\x80\x02.", "damaged: IndexError"),
        (b"\x80\x02t.", "damaged: IndexError"),
        (b"\x80\x02\x87.", "its stack is empty"),
        (b"\x80\x02}", "pickle exhausted"),
        (b"\x80\x02}U\x09ab", "expected 9 bytes"),
        (b"", "pickle exhausted"),
        (b"\xff", "opcode"),
    ],
)
def test_other_pickles_are_refused(pickled, message):
    with pytest.raises(ValueError, match=message):
        read_numeric_pickle(pickled)


def test_keys_that_are_nested_deeply():
    """Their hash would overflow the stack of the process."""
    pickled = b"\x80\x02}K\x00" + b"\x85" * 200_000 + b"K\x00s."
    with pytest.raises(ValueError, match="tuple in place of bytes"):
        read_numeric_pickle(pickled)


def test_a_list_in_itself():
    read = read_numeric_pickle(b"\x80\x02}U\x01a]q\x00h\x00as.")
    assert read["a"][0] is read["a"]


def test_the_number_of_parts_is_limited(monkeypatch):
    pickled = pickle.dumps({"a": list(range(50))})
    parts = sum(1 for _ in pickletools.genops(pickled))
    monkeypatch.setattr(numeric_pickle, "_MAX_OPCODES", parts)
    assert len(read_numeric_pickle(pickled)["a"]) == 50
    monkeypatch.setattr(numeric_pickle, "_MAX_OPCODES", parts - 1)
    with pytest.raises(ValueError, match=f"more than {parts - 1} parts"):
        read_numeric_pickle(pickled)


def test_a_place_in_the_memo_takes_no_memory():
    """Python's own reader makes a table up to the highest place."""
    assert read_numeric_pickle(b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b".") == {}


def test_damage_at_any_place_gives_one_kind_of_error():
    pickled = pickle.dumps({"data": ARRAY, "labels": [1, 2, 3, 300], "names": ["a", "b"]}, 4)
    random = np.random.RandomState(0)
    for _ in range(3000):
        damaged = bytearray(pickled)
        for place in random.randint(0, len(damaged), random.randint(1, 4)):
            damaged[place] = random.randint(256)
        try:
            read = read_numeric_pickle(bytes(damaged[: random.randint(1, len(damaged) + 1)]))
        except ValueError:
            continue
        assert isinstance(read, dict)
