"""The header of JPEG XL files, which the decoder tells only together with the pixels.

The parser follows ISO/IEC 18181-1, Annex D, as far as planning needs it. For anything beyond it returns None.
"""

from __future__ import annotations

from latentry.media.formats.header import ByteReader, ImageHeader, hdr_format

CODESTREAM_START = b"\xff\x0a"
CONTAINER_START = b"\0\0\0\x0cJXL \r\n\x87\n"
_HEADER_BYTES = 256
_RATIOS = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))


def read_jxl_header(read: ByteReader) -> ImageHeader | None:
    """The header of a JPEG XL file; None if it is something else or unusual."""
    prefix = read(0, 12)
    if prefix[:2] == CODESTREAM_START:
        codestream = read(0, _HEADER_BYTES)
    elif prefix == CONTAINER_START:
        codestream = _first_part(read)
    else:
        return None
    if codestream[:2] != CODESTREAM_START:
        return None
    try:
        return _parse(_Bits(codestream[2:]))
    except (EOFError, ValueError):
        return None


def _first_part(read: ByteReader) -> bytes:
    """The beginning of the codestream in a container."""
    offset = 0
    while len(head := read(offset, 16)) >= 8:
        size, kind, header_bytes = int.from_bytes(head[:4], "big"), head[4:8], 8
        if size == 1:
            size, header_bytes = int.from_bytes(head[8:16], "big"), 16
        if kind in (b"jxlc", b"jxlp"):
            return read(offset + header_bytes + (4 if kind == b"jxlp" else 0), _HEADER_BYTES)
        if size < header_bytes:
            break
        offset += size
    return b""


class _Bits:
    """Reads numbers from bits, the lowest bit of a byte first."""

    def __init__(self, data: bytes) -> None:
        self._value = int.from_bytes(data, "little")
        self._num_left = 8 * len(data)

    def take(self, count: int) -> int:
        if count > self._num_left:
            raise EOFError
        found = self._value & ((1 << count) - 1)
        self._value >>= count
        self._num_left -= count
        return found

    def choose(self, *options: tuple[int, int]) -> int:
        """One of four (offset, number of bits), by two bits."""
        offset, count = options[self.take(2)]
        return offset + self.take(count)

    def enum(self) -> int:
        return self.choose((0, 0), (1, 0), (2, 4), (18, 6))


def _parse(bits: _Bits) -> ImageHeader | None:
    small = bits.take(1)
    height = 8 * (1 + bits.take(5)) if small else _side(bits)
    ratio = bits.take(3)
    if ratio:
        numerator, denominator = _RATIOS[ratio - 1]
        width = height * numerator // denominator
    else:
        width = 8 * (1 + bits.take(5)) if small else _side(bits)
    orientation, hdr = 1, None
    if not bits.take(1):  # not all metadata has its default
        if bits.take(1):  # extra fields
            orientation = 1 + bits.take(3)
            if bits.take(1):
                return None  # a preview's size, which is not used, and the fields behind it
            if bits.take(1) or bits.take(1):
                return None  # a preview or an animation
        _skip_bit_depth(bits)
        bits.take(1)
        for _ in range(bits.choose((0, 0), (1, 0), (2, 4), (1, 12))):
            if not bits.take(1):
                return None  # a channel other than plain opacity
        bits.take(1)
        hdr_numbers = _colour_encoding(bits)
        hdr = None if hdr_numbers is None else hdr_format(*hdr_numbers)
    return ImageHeader(width, height, orientation, hdr)


def _side(bits: _Bits) -> int:
    return bits.choose((1, 9), (1, 13), (1, 18), (1, 30))


def _skip_bit_depth(bits: _Bits) -> None:
    if bits.take(1):  # floating point
        bits.choose((32, 0), (16, 0), (24, 0), (1, 6))
        bits.take(4)
    else:
        bits.choose((8, 0), (10, 0), (12, 0), (1, 6))


def _colour_encoding(bits: _Bits) -> tuple[int, int] | None:
    """(primaries, transfer function) by the numbers of ITU-T H.273; None for sRGB or an ICC profile."""
    if bits.take(1):  # sRGB
        return None
    wants_profile = bits.take(1)
    colour_space = bits.enum()
    if wants_profile or colour_space == 2:
        return None
    if bits.enum() == 2:  # a white point of its own
        for _ in range(2):
            bits.choose((0, 19), (524288, 19), (1048576, 20), (2097152, 21))
    primaries = 1
    if colour_space != 1:  # not grey
        primaries = bits.enum()
        if primaries == 2:
            for _ in range(6):
                bits.choose((0, 19), (524288, 19), (1048576, 20), (2097152, 21))
    if bits.take(1):  # a power function
        return None
    return primaries, bits.enum()
