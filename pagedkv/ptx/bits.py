"""Instructions on the bits of a word: fields, bytes, counts, shifts of two words, any function of three."""

from typing import Any

import numpy as np

from .arithmetic import Handler, Opcode, bits_of, numpy_type

NONE_FOUND = np.uint32(0xFFFFFFFF)
# Neighbours that change places: bits, pairs, fours, bytes, halves of a 32-bit word.
NEIGHBOURS = {1: 0x55555555, 2: 0x33333333, 4: 0x0F0F0F0F, 8: 0x00FF00FF, 16: 0x0000FFFF}


def _insert_field(opcode: Opcode, x: Any, y: Any, position: Any, length: Any) -> Any:
    unsigned = numpy_type(f"u{bits_of(opcode[-1])}")
    position, length = (unsigned(value & np.uint32(255)) for value in (position, length))
    mask = ((unsigned(1) << length) - unsigned(1)) << position
    return (y & ~mask) | (x << position & mask)


def _extract_field(opcode: Opcode, x: Any, position: Any, length: Any) -> Any:
    """A field of the bits from a position on; a signed one is extended by its highest bit, or by the word's."""
    kind = numpy_type(opcode[-1])
    bits = bits_of(opcode[-1])
    position, length = (np.asarray(value & np.uint32(255)) for value in (position, length))
    shifted = x >> np.minimum(position, bits - 1).astype(kind)
    if opcode[-1][0] == "u":
        shifted = np.where(position < bits, shifted, kind(0))
    above = (bits - np.minimum(length, bits)).astype(kind)
    return np.where(length == 0, kind(0), shifted << above >> above)


def _permute_bytes(opcode: Opcode, x: Any, y: Any, selector: Any) -> Any:
    """Four bytes, each picked from the eight of x and y, or its sign spread over a byte."""
    x, y, selector = (np.asarray(value, np.uint64) for value in (x, y, selector))
    pool, result = x | y << np.uint64(32), np.uint64(0)
    for i in range(4):
        choice = selector >> np.uint64(4 * i) & np.uint64(15)
        byte = pool >> ((choice & np.uint64(7)) * np.uint64(8)) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result = result | np.where(choice & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return result.astype(np.uint32)


def _funnel_shift(opcode: Opcode, low: Any, high: Any, count: Any) -> Any:
    """One word of two that are shifted as one: left the upper, right the lower."""
    pair = np.asarray(low, np.uint64) | np.asarray(high, np.uint64) << np.uint64(32)
    count = np.asarray(count & np.uint32(31) if "wrap" in opcode else np.minimum(count, np.uint32(32)), np.uint64)
    shifted = pair << count >> np.uint64(32) if "l" in opcode else pair >> count
    return shifted.astype(np.uint32)


def _logic(opcode: Opcode, x: Any, y: Any, z: Any, table: Any) -> Any:
    """Bit ``4 x + 2 y + z`` of the table, at every place of three words."""
    result = np.uint32(0)
    for entry in range(8):
        if int(table) >> entry & 1:
            result = result | ((x if entry & 4 else ~x) & (y if entry & 2 else ~y) & (z if entry & 1 else ~z))
    return result


def _length(x: Any) -> np.ndarray:
    """How many bits a number without sign takes, of at most 32 or, in two steps, 64."""
    x = np.asarray(x, np.uint64)
    high, low = (np.frexp(part.astype(np.float64))[1] for part in (x >> np.uint64(32), x & np.uint64(0xFFFFFFFF)))
    return np.where(high > 0, high + 32, low)


def _find_leading(opcode: Opcode, x: Any) -> Any:
    """The place of the highest 1, in a negative number of the highest 0, or how far a shift would move it up."""
    bits = bits_of(opcode[-1])
    length = _length(np.asarray(np.where(x < 0, ~x, x)).astype(f"u{bits // 8}"))
    place = bits - length if "shiftamt" in opcode else length - 1
    return np.where(length > 0, place, NONE_FOUND).astype(np.uint32)


def _reverse(opcode: Opcode, x: Any) -> Any:
    word = numpy_type(opcode[-1])
    for distance, mask in NEIGHBOURS.items():
        mask = word(mask * (1 + (1 << 32)) & np.iinfo(word).max)
        x = (x >> word(distance) & mask) | (x & mask) << word(distance)
    return x if word is np.uint32 else x >> word(32) | x << word(32)


HANDLERS: dict[str, Handler] = {
    "bfi": _insert_field,
    "bfe": _extract_field,
    "prmt": _permute_bytes,
    "shf": _funnel_shift,
    "lop3": _logic,
    "popc": lambda opcode, x: np.bitwise_count(x).astype(np.uint32),
    "clz": lambda opcode, x: (bits_of(opcode[-1]) - _length(x)).astype(np.uint32),
    "bfind": _find_leading,
    "brev": _reverse,
}
