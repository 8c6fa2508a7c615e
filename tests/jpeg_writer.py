"""Baseline JPEGs of random coefficients, of samplings that no library at hand writes."""

import struct

# Codes of one length: of 4 bits for differences of DC coefficients, and of 12 bits, which decoders
# do not look up at once, for AC coefficients; but of 2 bits for the end of a block.
_DC_BITS, _AC_BITS = 4, 12
_END_OF_BLOCK = 0b00
_FIRST_AC = 1 << (_AC_BITS - 2)
_AC_SYMBOLS = [run << 4 | size for run in range(16) for size in range(1, 11)]


def random_jpeg(height, width, sampling, restart_interval, random):
    """Returns a JPEG of 1 or 3 components.

    Args:
      height: in pixels.
      width: in pixels.
      sampling: horizontal x vertical factors of the components, as ``2x2,1x1,1x1``.
      restart_interval: in MCUs; 0: no restart markers.
      random: a ``numpy.random.RandomState``.
    """
    factors = [tuple(map(int, pair.split("x"))) for pair in sampling.split(",")]
    # One component alone is not interleaved: an MCU is a block.
    interleaved = factors if len(factors) > 1 else [(1, 1)]
    across, down = (max(pair[axis] for pair in interleaved) for axis in (0, 1))
    mcus = -(-width // (8 * across)) * -(-height // (8 * down))
    components = [number for number, (h, v) in enumerate(interleaved) for _ in range(h * v)]
    scan = _scan(mcus, components, restart_interval, random)
    return _header(height, width, factors, restart_interval) + scan + b"\xff\xd9"


def split_scans(height, width, random):
    """Returns a JPEG with a scan for each of three components."""
    blocks = -(-width // 8) * -(-height // 8)
    scans = [
        _segment(0xDA, bytes([1, number, 0, 0, 63, 0])) + _scan(blocks, [0], 0, random)
        for number in range(3)
    ]
    header = _header(height, width, [(1, 1)] * 3, 0, with_scan=False)
    return header + b"".join(scans) + b"\xff\xd9"


def _segment(marker, content):
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def _header(height, width, factors, restart_interval, with_scan=True):
    count = len(factors)
    frame = struct.pack(">BHHB", 8, height, width, count)
    frame += b"".join(bytes([number, h << 4 | v, 0]) for number, (h, v) in enumerate(factors))
    dc_counts, ac_counts = bytearray(16), bytearray(16)
    dc_counts[_DC_BITS - 1] = 12
    ac_counts[1], ac_counts[_AC_BITS - 1] = 1, len(_AC_SYMBOLS)
    segments = [
        b"\xff\xd8",
        _segment(0xDB, bytes([0] + [6] * 64)),
        _segment(0xC0, frame),
        _segment(0xC4, b"\x00" + dc_counts + bytes(range(12))),
        _segment(0xC4, b"\x10" + ac_counts + bytes([0, *_AC_SYMBOLS])),
        _segment(0xDD, struct.pack(">H", restart_interval)),
    ]
    if with_scan:
        parts = b"".join(bytes([number, 0]) for number in range(count))
        segments.append(_segment(0xDA, bytes([count]) + parts + bytes([0, 63, 0])))
    return b"".join(segments)


def _scan(mcus, components, restart_interval, random):
    data, bits = b"", ""
    levels = {}
    for mcu in range(mcus):
        if restart_interval and mcu and mcu % restart_interval == 0:
            data += _bytes(bits) + bytes([0xFF, 0xD0 + (mcu // restart_interval - 1) % 8])
            bits, levels = "", {}
        for component in components:
            # Around the middle, so that few pixels are black or white.
            level = int(random.randint(-90, 91))
            bits += _difference(level - levels.get(component, 0))
            levels[component] = level
            bits += _ac_coefficients(random)
    return data + _bytes(bits)


def _difference(value):
    size = abs(value).bit_length()
    return f"{size:0{_DC_BITS}b}" + _magnitude(value, size)


def _ac_coefficients(random):
    bits, place = "", 1
    for run, value in zip(random.randint(0, 16, 6).tolist(), random.randint(-40, 41, 6).tolist()):
        size = abs(value).bit_length()
        if not size or place + run > 62:
            continue
        place += run + 1
        code = _FIRST_AC + _AC_SYMBOLS.index(run << 4 | size)
        bits += f"{code:0{_AC_BITS}b}" + _magnitude(value, size)
    return bits + f"{_END_OF_BLOCK:02b}"


def _magnitude(value, size):
    if not size:
        return ""
    return f"{value if value > 0 else value + (1 << size) - 1:0{size}b}"


def _bytes(bits):
    bits += "1" * (-len(bits) % 8)
    packed = int(bits, 2).to_bytes(len(bits) // 8, "big")
    return packed.replace(b"\xff", b"\xff\x00")
