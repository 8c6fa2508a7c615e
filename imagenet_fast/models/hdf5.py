"""Reads the arrays of HDF5 files that Keras wrote; the files may be hostile.

The HDF5 library follows links into other files, takes memory for any claimed shape, and hangs in
damaged files. Keras needs little of the format: groups, and plain arrays of numbers in one piece.
This reader knows no more (`HDF5 File Format Specification`_, version 3: superblock 0, groups with
symbol tables, object headers 1), which is what h5py writes unless it is asked for another version.

.. _HDF5 File Format Specification: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterator

import numpy as np

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MOST_NAMES = 100_000
_LONGEST_PATH = 4096
# Types of messages in an object's header.
_DATA_SPACE, _DATA_TYPE, _EXTERNAL_FILES, _LAYOUT, _FILTERS = 0x1, 0x3, 0x7, 0x8, 0xB
_CONTINUATION, _SYMBOL_TABLE = 0x10, 0x11
_LINK_INFO, _LINK = 0x2, 0x6
# Bit offset, precision, places and sizes of exponent and mantissa, and bias, by bytes.
_IEEE = {
    2: (0, 16, 10, 5, 0, 10, 15),
    4: (0, 32, 23, 8, 0, 23, 127),
    8: (0, 64, 52, 11, 0, 52, 1023),
}


@dataclasses.dataclass
class Hdf5Content:
    """What a file holds, by its path in the file, such as ``layers/conv2d/vars/0``.

    Attributes:
      groups: the paths of groups, each after that of the group that it is in.
      arrays: views of the file's bytes.
    """

    groups: list[str]
    arrays: dict[str, np.ndarray]


def read_hdf5(data: bytes) -> Hdf5Content:
    """Returns the groups and arrays in the content of a file; attributes are ignored.

    Raises:
      ValueError: if it is damaged, or has something else than Keras writes: links, data in other
        files, compressed data, other types than numbers, or arrays larger than the file.
    """
    try:
        return _Reader(data).content()
    except struct.error:
        raise ValueError("it ends too early, or is damaged") from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._seen: set[int] = set()
        # Damaged parts may overlap, so that a small file seems to hold much.
        self._names = 0
        self._header_bytes = 0
        self._array_bytes = 0

    def content(self) -> Hdf5Content:
        if self._data[: len(_SIGNATURE)] != _SIGNATURE:
            raise ValueError("it is not an HDF5 file")
        if self._unpack("<B4xBB", 8) != (0, 8, 8):
            raise ValueError("it is of a version of HDF5 that Keras does not write")
        base, root = self._unpack("<Q32xQ", 24)
        if base:
            raise ValueError("it does not begin with HDF5's data")
        groups: list[str] = []
        arrays: dict[str, np.ndarray] = {}
        objects = [("", root)]
        while objects:
            path, address = objects.pop()
            messages = self._messages(address, path)
            if _SYMBOL_TABLE in messages:
                groups.append(path)
                tree, heap = struct.unpack_from("<QQ", messages[_SYMBOL_TABLE])
                for name, child in self._children(tree, heap, path):
                    objects.append((f"{path}/{name}" if path else name, child))
            elif messages.keys() & {_LINK_INFO, _LINK}:
                raise ValueError(f"the group /{path} is of a version that Keras does not write")
            else:
                arrays[path] = self._array(messages, path)
        return Hdf5Content(groups[1:], arrays)

    def _unpack(self, layout: str, start: int) -> tuple[int, ...]:
        return struct.unpack_from(layout, self._data, min(start, len(self._data)))

    def _visit(self, address: int) -> None:
        """Refuses to come to a place twice: the file might lead in circles."""
        if address in self._seen:
            raise ValueError(f"two things in it are at {address:,}")
        self._seen.add(address)

    def _messages(self, address: int, path: str) -> dict[int, bytes]:
        """Returns the messages in an object's header by type; of several, the last."""
        self._visit(address)
        version, size = self._unpack("<B7xI", address)
        if version != 1:
            raise ValueError(f"{path or 'the root'} has a header that Keras does not write")
        blocks = [(address + 16, size)]
        messages: dict[int, bytes] = {}
        while blocks:
            start, size = blocks.pop()
            self._header_bytes += size
            if self._header_bytes > len(self._data):
                raise ValueError("its headers are larger than the file")
            block, place = self._data[start : start + size], 0
            if len(block) < size:
                raise ValueError(f"{size:,} bytes at {start:,} are behind its end")
            while place + 8 <= size:
                kind, length = struct.unpack_from("<HH", block, place)
                message = block[place + 8 : place + 8 + length]
                place += 8 + length
                if kind == _CONTINUATION:
                    blocks.append(struct.unpack_from("<QQ", message))
                    self._visit(blocks[-1][0])
                else:
                    messages[kind] = message
        return messages

    def _children(self, tree: int, heap: int, path: str) -> Iterator[tuple[str, int]]:
        """Yields the name and the address of each object in a group."""
        self._check_mark(heap, b"HEAP", path)
        (names,) = self._unpack("<Q", heap + 24)
        nodes = [tree]
        while nodes:
            node = nodes.pop()
            self._visit(node)
            self._check_mark(node, b"TREE", path)
            kind, level, used = self._unpack("<BBH", node + 4)
            if kind:
                raise ValueError(f"the group /{path} is damaged")
            self._count(used)
            below = self._unpack(f"<{2 * used}Q", node + 24)[1::2]
            if level:
                nodes += below
                continue
            for leaf in below:
                self._visit(leaf)
                yield from self._leaf(leaf, names, path)

    def _count(self, used: int) -> None:
        self._names += used
        if self._names > _MOST_NAMES:
            raise ValueError(f"it holds more than {_MOST_NAMES:,} names")

    def _leaf(self, leaf: int, names: int, path: str) -> Iterator[tuple[str, int]]:
        self._check_mark(leaf, b"SNOD", path)
        (used,) = self._unpack("<H", leaf + 6)
        self._count(used)
        for index in range(used):
            start, address, cached = self._unpack("<QQI", leaf + 8 + 40 * index)
            start += names
            end = self._data.find(b"\0", start, start + max(0, _LONGEST_PATH - len(path)))
            if end <= start:
                raise ValueError(f"the group /{path} holds a name that is empty or too long")
            name = self._data[start:end].decode()
            if cached == 2 or name == "." or "/" in name:
                raise ValueError(f"{name} in the group /{path} is a link")
            yield name, address

    def _check_mark(self, address: int, mark: bytes, path: str) -> None:
        if self._data[address : address + 4] != mark:
            raise ValueError(f"the group /{path} is damaged")

    def _array(self, messages: dict[int, bytes], path: str) -> np.ndarray:
        if not messages.keys() >= {_DATA_SPACE, _DATA_TYPE, _LAYOUT}:
            raise ValueError(f"{path} is neither a group nor an array")
        if messages.keys() & {_EXTERNAL_FILES, _FILTERS}:
            raise ValueError(f"the data of {path} is compressed, or in another file")
        shape = _shape(messages[_DATA_SPACE], path)
        dtype = _dtype(messages[_DATA_TYPE], path)
        version, kind = struct.unpack_from("<BB", messages[_LAYOUT])
        if version != 3 or kind > 1:
            raise ValueError(f"the data of {path} is not in one piece")
        # Python's integers: NumPy's overflow.
        needed = math.prod(shape) * dtype.itemsize
        if kind == 0:
            (size,) = struct.unpack_from("<H", messages[_LAYOUT], 2)
            source, start = messages[_LAYOUT][4 : 4 + size], 0
        else:
            start, size = struct.unpack_from("<QQ", messages[_LAYOUT], 2)
            source = self._data
        if needed and (size != needed or start + needed > len(source)):
            raise ValueError(f"{path} has shape {shape}, but not the data for it")
        self._array_bytes += needed
        if max(self._array_bytes, *shape, 0) > len(self._data):
            raise ValueError("its arrays are larger than the file")
        if not needed:
            return np.zeros(shape, dtype)
        return np.frombuffer(source, dtype, math.prod(shape), start).reshape(shape)


def _shape(message: bytes, path: str) -> tuple[int, ...]:
    version, rank, _, kind = struct.unpack_from("<4B", message)
    if version not in (1, 2) or rank > 32 or (version == 2 and kind > 1):
        raise ValueError(f"{path} has a shape that Keras does not write")
    return struct.unpack_from(f"<{rank}Q", message, 8 if version == 1 else 4)


def _dtype(message: bytes, path: str) -> np.dtype:
    """Returns an integer or floating-point type of NumPy."""
    kind, flags, size = struct.unpack_from("<BB2xI", message)
    order = ">" if flags & 1 else "<"
    name = ""
    if kind & 15 == 0 and size in (1, 2, 4, 8):
        if struct.unpack_from("<HH", message, 8) == (0, 8 * size):
            name = "i" if flags & 8 else "u"
    elif kind & 15 == 1 and size in _IEEE and not flags & 64:
        name = "f" if struct.unpack_from("<HHBBBBI", message, 8) == _IEEE[size] else ""
    if name:
        return np.dtype(f"{order}{name}{size}")
    raise ValueError(f"{path} is not an array of numbers")
