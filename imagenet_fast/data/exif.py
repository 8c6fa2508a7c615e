"""The EXIF orientation of JPEGs, in Python; :func:`headers.orientation` is the same in a graph."""

from __future__ import annotations

EXIF_BEGIN = b"Exif\0\0"
ORIENTATION = 0x0112
# Types of numbers in EXIF, of 2 and 4 bytes.
SHORT, LONG = 3, 4
# Segments of a JPEG to search; a colour profile alone can take 255.
MAX_SEGMENTS = 300
_BYTES = {SHORT: 2, LONG: 4}
_ORDERS = {b"II*\0": "little", b"MM\0*": "big"}


def jpeg_orientation(jpeg: bytes) -> int:
    """Returns the EXIF orientation of a JPEG, from 1 to 8; 1 (upright) if there is none.

    It is the first that is one whole number of 2 or 4 bytes in the first EXIF segment. Pillow also
    takes other types, further segments, and XMP's.
    """
    tiff = _first_exif(jpeg)
    order = _ORDERS.get(tiff[:4])

    def number(place: int, size: int) -> int:
        """Returns an unsigned number; bytes behind the end are 0."""
        found = tiff[place : place + size].ljust(size, b"\0")
        return int.from_bytes(found, "little" if order == "little" else "big")

    directory = number(4, 4)
    count = min(number(directory, 2), len(tiff) // 12) if order else 0
    for entry in range(directory + 2, directory + 2 + 12 * count, 12):
        size = _BYTES.get(number(entry + 2, 2))
        if number(entry, 2) == ORIENTATION and size and number(entry + 4, 4) == 1:
            value = number(entry + 8, size)
            return value if 1 <= value <= 8 else 1
    return 1


def _first_exif(jpeg: bytes) -> bytes:
    """Returns the TIFF in a JPEG's first EXIF segment; empty if there is none."""
    place = 2
    for _ in range(MAX_SEGMENTS + 1):
        marker = jpeg[place : place + 2]
        if marker[:1] != b"\xff" or marker[1:] in (b"", b"\xd9", b"\xda"):
            break
        if marker == b"\xff\xff":  # any number of these may precede a marker
            place += 1
            continue
        length = int.from_bytes(jpeg[place + 2 : place + 4].ljust(2, b"\0"), "big")
        begin = place + 4
        if marker == b"\xff\xe1" and jpeg.startswith(EXIF_BEGIN, begin):
            return jpeg[begin + len(EXIF_BEGIN) : place + 2 + length]
        place += 2 + max(length, 2)
    return b""
