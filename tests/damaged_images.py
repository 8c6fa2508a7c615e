"""Image files with damage of every kind."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

_KINDS = (
    *("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "AVIF", "JPEG2000"),
    *("ICO", "TGA"),
)


def png_chunk(kind, data):
    """Returns a chunk of a PNG, with its checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def mutations(count):
    """Yields damaged files of eleven formats, of which chunks of PNGs have right checksums."""
    random = np.random.RandomState(0)
    ramp = np.arange(48 * 64 * 3).reshape(48, 64, 3).astype(np.uint8)
    files = [
        _encoded(Image.fromarray(random.randint(0, 256, (9, 7, 3), np.uint8)).convert(mode), kind)
        for kind in _KINDS
        for mode in ("RGB", "L")
    ]
    files += [
        _encoded(Image.fromarray(ramp).convert("CMYK"), "JPEG"),
        _encoded(Image.fromarray(ramp), "PNG", icc_profile=b"profile", dpi=(72, 72)),
        _encoded(Image.fromarray(ramp).convert("P"), "PNG", transparency=3),
        _encoded(Image.fromarray(ramp), "WEBP", exif=b"Exif\0\0MM\0*", icc_profile=b"profile"),
        _encoded(Image.fromarray(ramp), "GIF", comment=b"comment"),
    ]
    for number in range(count):
        data = bytearray(files[number % len(files)])
        place = random.randint(len(data) if random.randint(2) else 60)
        kind = number // len(files) % 5
        if kind == 0:
            del data[place:]
        elif kind == 1:
            del data[place : place + random.randint(1, 30)]
        elif kind == 2:
            data[place:place] = random.bytes(random.randint(1, 40))
        elif kind == 3:
            data[place : place + 4] = random.choice([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"])
        else:
            data[min(place, len(data) - 1)] ^= 1 << random.randint(8)
        yield bytes(_with_checksums(data) if data[:4] == b"\x89PNG" else data)


def _with_checksums(png):
    whole, place = png[:8], 8
    while place + 12 <= len(png):
        end = place + 8 + int.from_bytes(png[place : place + 4], "big")
        if end + 4 > len(png):
            break
        whole += png_chunk(bytes(png[place + 4 : place + 8]), bytes(png[place + 8 : end]))
        place = end + 4
    return whole + png[place:]
