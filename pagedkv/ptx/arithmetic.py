"""What arithmetic instructions do, on NumPy arrays with one element per thread.

A handler gets the opcode's parts and its source values, each already an array (or scalar) of the instruction's type,
and returns the result. Integer arithmetic wraps, as it does on the device; ``.ftz`` takes subnormal numbers for 0, on
the way in and on the way out.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .rounding import down, odd_sum

Opcode = tuple[str, ...]
Handler = Callable[..., Any]

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}
TINY = np.finfo(np.float32).tiny
WINDOWS = {"shared": 3 << 61, "local": 1 << 62}  # where memory that is not global lies among generic addresses
WINDOW_REACH = 1 << 40
LARGEST_DIVISOR = np.float32(2.0**126)  # of div.approx
NAN = np.uint32(0x7FFFFFFF).view(np.float32)  # the only one that arithmetic makes


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


def _fma(opcode: Opcode, *values: Any) -> Any:
    """Rounds once: a product of two float32 is exact in float64, and its sum there is rounded to odd."""

    def function(x: Any, y: Any, z: Any) -> Any:
        total = odd_sum(np.asarray(x, np.float64) * y, np.asarray(z, np.float64))
        return down(total) if "rm" in opcode else total.astype(np.float32)

    return _float_op(function)(opcode, *values)


def _approximation(function: Handler) -> Handler:
    """Of what the device approximates the value itself, from float64. The device is within 2 units in the last place,
    with a logarithm near 0 within 2**-22, with a ``tanh`` within 2**-11 of its size."""
    return _float_op(lambda *values: function(*(np.asarray(x, np.float64) for x in values)).astype(np.float32))


def _div(opcode: Opcode, x: Any, y: Any) -> Any:
    if opcode[-1][0] != "f":
        return _quotient(x, y)
    return _float_op(_product_with_reciprocal if "approx" in opcode else np.divide)(opcode, x, y)


def _product_with_reciprocal(x: Any, y: Any) -> Any:
    """The quotient, but 0 where the reciprocal is subnormal, which the device takes for 0."""
    return np.where(np.abs(y) > LARGEST_DIVISOR, x * np.copysign(np.float32(0), y), np.divide(x, y))


def _quotient(x: Any, y: Any) -> Any:
    """Toward zero. By 0, of which PTX says nothing, all bits are 1."""
    x, y = np.asarray(x), np.asarray(y)
    unsigned = UNSIGNED[8 * x.itemsize]
    size_x, size_y = (np.where(value < 0, -value, value).astype(unsigned) for value in (x, y))
    size = size_x // np.where(y == 0, unsigned(1), size_y)
    return np.where(y == 0, ~x.dtype.type(0), np.where((x < 0) != (y < 0), -size, size).astype(x.dtype))


def _rem(opcode: Opcode, x: Any, y: Any) -> Any:
    """Of the sign of x; of a division by 0 x itself."""
    return np.where(np.asarray(y) == 0, x, x - _quotient(x, y) * y)


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


def smaller(x: Any, y: Any) -> Any:
    """The number, if one is a NaN; -0 is smaller than +0."""
    return np.where((x == y) & np.signbit(y), y, np.fmin(x, y))


def larger(x: Any, y: Any) -> Any:
    return np.where((x == y) & np.signbit(x), y, np.fmax(x, y))


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
    "min": _by_type(smaller, np.minimum),
    "max": _by_type(larger, np.maximum),
    "neg": _sign_op(np.negative),
    "abs": _sign_op(np.abs),
    "mul": _mul,
    "mad": _mad,
    "fma": _fma,
    "div": _div,
    "rem": _rem,
    "rcp": _float_op(lambda x: np.float32(1) / x),
    "sqrt": _float_op(np.sqrt),
    "rsqrt": _approximation(lambda x: 1 / np.sqrt(x)),
    "ex2": _approximation(np.exp2),
    "lg2": _approximation(np.log2),
    "tanh": _approximation(np.tanh),
    "copysign": _by_operator(lambda sign, magnitude: np.copysign(magnitude, sign)),
    "and": _by_operator(np.bitwise_and),
    "or": _by_operator(np.bitwise_or),
    "xor": _by_operator(np.bitwise_xor),
    "not": _by_operator(np.invert),
    "shl": _shift(np.left_shift),
    "shr": _shift(np.right_shift),
    "slct": _by_operator(lambda x, y, sign: np.where(sign >= 0, x, y)),
    "selp": _by_operator(lambda x, y, condition: np.where(condition, x, y)),
    "setp": _setp,
    "cvta": _cvta,
    "createpolicy": _by_operator(lambda *fraction: np.uint64(0)),  # caches are not modelled
}
