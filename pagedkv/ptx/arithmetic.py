"""What arithmetic instructions do, on NumPy arrays with one element per thread.

A handler gets the opcode's parts and its source values, each already an array (or scalar) of the instruction's type,
and returns the result. Integer arithmetic wraps, as it does on the device; ``.ftz`` takes subnormal numbers for 0, on
the way in and on the way out.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Opcode = tuple[str, ...]
Handler = Callable[..., Any]

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}
TINY = np.finfo(np.float32).tiny
WINDOWS = {"shared": 3 << 61, "local": 1 << 62}  # where memory that is not global lies among generic addresses
WINDOW_REACH = 1 << 40
NAN = np.uint32(0x7FFFFFFF).view(np.float32)  # the only one that arithmetic makes

FP8 = {"e4m3x2": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2x2": (ml_dtypes.float8_e5m2, 57344.0)}


def numpy_type(kind: str) -> type:
    """The NumPy type of a PTX type: ``.u32``, ``.b64``, ``.f32``, ``.pred``."""
    if kind == "pred":
        return np.bool_
    return {"u": UNSIGNED, "b": UNSIGNED, "s": SIGNED, "f": FLOAT}[kind[0]][int(kind[1:])]


def bits_of(kind: str) -> int:
    return int(kind[1:])


def flushed(values: Any) -> Any:
    """Subnormal numbers become 0 of their sign."""
    values = np.asarray(values)
    return np.where(np.abs(values) < TINY, np.copysign(np.float32(0), values), values)


def _float_op(function: Handler) -> Handler:
    """A float32 operation with or without ``.ftz``; a NaN that it makes is always the same one."""

    def handler(opcode: Opcode, *values: Any) -> Any:
        flush = flushed if "ftz" in opcode else np.asarray
        result = flush(function(*map(flush, values)))
        return np.where(np.isnan(result), NAN, result)

    return handler


def _fma(x: Any, y: Any, z: Any) -> Any:
    """Rounds once. The product of two float32 is exact in float64; the sum is rounded there to odd, towards what was
    lost, so that the rounding to float32 sees on which side of a tie it is."""
    product, z = np.asarray(x, np.float64) * y, np.asarray(z, np.float64)
    total = product + z
    part = total - product
    lost = (product - (total - part)) + (z - part)
    inexact = np.isfinite(total) & (lost != 0) & (total.view(np.uint64) & np.uint64(1) == 0)
    return np.where(inexact, np.nextafter(total, np.copysign(np.inf, lost)), total).astype(np.float32)


def _mul(opcode: Opcode, x: Any, y: Any) -> Any:
    kind = opcode[-1]
    if kind[0] == "f":
        return _float_op(np.multiply)(opcode, x, y)
    if "wide" in opcode:
        return np.multiply(x, y, dtype=numpy_type(f"{kind[0]}{2 * bits_of(kind)}"))
    if "hi" in opcode:
        return _high_product(x, y, kind)
    return np.multiply(x, y)


def _high_product(x: Any, y: Any, kind: str) -> Any:
    bits = bits_of(kind)
    if bits <= 32:
        wide = numpy_type(f"{kind[0]}{2 * bits}")
        return (np.multiply(x, y, dtype=wide) >> wide(bits)).astype(numpy_type(kind))
    # By 32-bit halves: no product and no sum of these leaves 64 bits.
    x, y = (np.asarray(value).astype(np.uint64) for value in (x, y))
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    carry = (x & low) * (y & low) >> half
    middle = (x >> half) * (y & low) + carry
    other = (x & low) * (y >> half) + (middle & low)
    high = (x >> half) * (y >> half) + (middle >> half) + (other >> half)
    if kind[0] == "s":  # a negative factor was taken for one that is 2**64 larger
        negative, zero = np.uint64(1 << 63), np.uint64(0)
        high = high - np.where(x & negative, y, zero) - np.where(y & negative, x, zero)
    return high.astype(numpy_type(kind))


def _mad(opcode: Opcode, x: Any, y: Any, z: Any) -> Any:
    return np.add(_mul(opcode, x, y), z)


def _shift(function: Handler) -> Handler:
    def handler(opcode: Opcode, x: Any, count: Any) -> Any:
        bits = bits_of(opcode[-1])
        count = np.asarray(count, np.uint32)
        fill = np.where(np.asarray(x) < 0, -1, 0) if opcode[-1][0] == "s" else 0  # shifted out altogether
        shifted = function(x, np.minimum(count, bits - 1).astype(np.asarray(x).dtype))
        return np.where(count < bits, shifted, fill).astype(np.asarray(x).dtype)

    return handler


def _bfi(opcode: Opcode, x: Any, y: Any, position: Any, length: Any) -> Any:
    unsigned = numpy_type(f"u{bits_of(opcode[-1])}")
    position, length = (unsigned(value & np.uint32(255)) for value in (position, length))
    mask = ((unsigned(1) << length) - unsigned(1)) << position
    return (y & ~mask) | (x << position & mask)


def _prmt(opcode: Opcode, x: Any, y: Any, selector: Any) -> Any:
    """Four bytes, each picked from the eight of x and y, or its sign spread over a byte."""
    x, y, selector = (np.asarray(value, np.uint64) for value in (x, y, selector))
    pool, result = x | y << np.uint64(32), np.uint64(0)
    for i in range(4):
        choice = selector >> np.uint64(4 * i) & np.uint64(15)
        byte = pool >> ((choice & np.uint64(7)) * np.uint64(8)) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result = result | np.where(choice & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return result.astype(np.uint32)


COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    # Unordered ones are true where a NaN takes part.
    "neu": np.not_equal,
    "ltu": lambda x, y: ~(x >= y),
    "gtu": lambda x, y: ~(x <= y),
    "leu": lambda x, y: ~(x > y),
    "geu": lambda x, y: ~(x < y),
}


def _setp(opcode: Opcode, x: Any, y: Any) -> Any:
    if "ftz" in opcode:
        x, y = flushed(x), flushed(y)
    if opcode[1] == "ne" and opcode[-1][0] == "f":  # an ordered one, like all without u
        return (x < y) | (x > y)
    return COMPARISONS[opcode[1]](x, y)


def _smaller(x: Any, y: Any) -> Any:
    """The number, if one is a NaN; -0 is smaller than +0."""
    return np.where((x == y) & np.signbit(y), y, np.fmin(x, y))


def _larger(x: Any, y: Any) -> Any:
    return np.where((x == y) & np.signbit(x), y, np.fmax(x, y))


def _rounded(values: Any, kind: str, opcode: Opcode) -> Any:
    if kind in ("bf16", "f16"):
        narrow = np.asarray(values, np.float32).astype(ml_dtypes.bfloat16 if kind == "bf16" else np.float16)
        return np.where(np.isnan(values), np.uint16(0x7FFF), narrow.view(np.uint16))
    target = numpy_type(kind)
    if kind[0] == "f" and ("rni" in opcode or "rzi" in opcode):
        return (np.trunc(values) if "rzi" in opcode else np.rint(values)).astype(target)
    if kind[0] == "f" or np.asarray(values).dtype.kind != "f":
        return np.asarray(values).astype(target)
    whole = np.asarray(np.trunc(values) if "rzi" in opcode else np.rint(values), np.float64)
    limits, not_a_number = np.iinfo(target), 0 if bits_of(kind) < 64 else 1 << 63
    integers = np.clip(whole, limits.min, limits.max).astype(target)
    integers = np.where(whole >= limits.max, target(limits.max), integers)  # which float64 need not hold
    return np.where(np.isnan(whole), np.array(not_a_number, np.uint64).astype(target), integers)


def convert(opcode: Opcode, *values: Any) -> Any:
    """``cvt.to.from``; values come as bits for the formats that NumPy has no type for."""
    target, source = opcode[-2:]
    if target in FP8:  # two floats into a pair of codes, the second operand in the low byte
        fp8, largest = FP8[target]
        high, low = (np.clip(value, -largest, largest).astype(fp8).view(np.uint8).astype(np.uint16) for value in values)
        return low | high << np.uint16(8)
    (value,) = values
    if source == "bf16":
        return _rounded((np.asarray(value, np.uint32) << np.uint32(16)).view(np.float32), target, opcode)
    if "ftz" in opcode and source == "f32":
        value = flushed(value)
    return _rounded(value, target, opcode)


def _cvta(opcode: Opcode, x: Any) -> Any:
    """An offset in shared or local memory as a generic address, or ``to`` an offset again."""
    for space, address in WINDOWS.items():
        if space in opcode:
            window = numpy_type(opcode[-1])(address)
            return x - window if "to" in opcode else x + window
    return x


def _by_operator(function: Handler) -> Handler:
    return lambda opcode, *values: function(*values)


def _by_type(for_floats: Handler, for_integers: Handler) -> Handler:
    floats = _float_op(for_floats)
    return lambda opcode, *values: floats(opcode, *values) if opcode[-1][0] == "f" else for_integers(*values)


def _sign_op(function: Handler) -> Handler:
    """Keeps a NaN as it is but for its sign."""
    return lambda opcode, value: function(flushed(value) if "ftz" in opcode else value)


HANDLERS: dict[str, Handler] = {
    "add": _by_type(np.add, np.add),
    "sub": _by_type(np.subtract, np.subtract),
    "min": _by_type(_smaller, np.minimum),
    "max": _by_type(_larger, np.maximum),
    "neg": _sign_op(np.negative),
    "abs": _sign_op(np.abs),
    "mul": _mul,
    "mad": _mad,
    "fma": _float_op(_fma),
    "rcp": _float_op(lambda x: np.float32(1) / x),
    "copysign": _by_operator(lambda sign, magnitude: np.copysign(magnitude, sign)),
    "and": _by_operator(np.bitwise_and),
    "or": _by_operator(np.bitwise_or),
    "xor": _by_operator(np.bitwise_xor),
    "not": _by_operator(np.invert),
    "shl": _shift(np.left_shift),
    "shr": _shift(np.right_shift),
    "bfi": _bfi,
    "prmt": _prmt,
    "selp": _by_operator(lambda x, y, condition: np.where(condition, x, y)),
    "setp": _setp,
    "cvt": convert,
    "cvta": _cvta,
    "createpolicy": _by_operator(lambda *fraction: np.uint64(0)),  # caches are not modelled
}
