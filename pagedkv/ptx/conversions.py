"""``cvt``: between integers and floats of all sizes. Formats that NumPy has no type for come and go as their bits."""

from typing import Any

import ml_dtypes
import numpy as np

from .arithmetic import Handler, Opcode, bits_of, flushed, numpy_type
from .halves import FORMATS as HALVES
from .halves import NAN as HALF_NAN

FP8 = {"e4m3x2": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2x2": (ml_dtypes.float8_e5m2, 57344.0)}
TO_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def convert(opcode: Opcode, *values: Any) -> Any:
    """``cvt.to.from``. Of two values, or of a pair, the first is in the high bits."""
    target, source = opcode[-2:]
    if source in FP8:
        return _wide_pair(values[0], source)
    if target in FP8:
        high, low = (_code(value, *FP8[target]).astype(np.uint16) for value in values)
        return low | high << np.uint16(8)
    if target.endswith("x2"):
        high, low = (_half(value, target.removesuffix("x2")).astype(np.uint32) for value in values)
        return low | high << np.uint32(16)
    (value,) = values
    if source in HALVES:
        value = np.asarray(value).view(HALVES[source]).astype(np.float32)
    elif "ftz" in opcode and source == "f32":
        value = flushed(value)
    return _number(value, target, opcode)


def _number(value: Any, target: str, opcode: Opcode) -> Any:
    if "sat" in opcode:  # a NaN becomes 0
        return np.where(value > 0, np.minimum(value, np.float32(1)), np.float32(0))
    if target in HALVES:
        return _half(value, target)
    value = np.asarray(value)
    for part in set(opcode) & set(TO_WHOLE):
        value = TO_WHOLE[part](value)
    if value.dtype.kind == "f" and target[0] != "f":
        return _integer(value, target)
    return value.astype(numpy_type(target))


def _code(value: Any, fp8: type, largest: float) -> np.ndarray:
    return np.where(np.isnan(value), np.uint8(0x7F), np.clip(value, -largest, largest).astype(fp8).view(np.uint8))


def _half(value: Any, form: str) -> np.ndarray:
    narrow = np.asarray(value, np.float32).astype(HALVES[form])
    return np.where(np.isnan(value), HALF_NAN, narrow.view(np.uint16))


def _wide_pair(codes: Any, source: str) -> np.ndarray:
    """Two 8-bit floats as float16, which holds them all."""
    codes, (fp8, _) = np.asarray(codes, np.uint16), FP8[source]
    low, high = (
        _half((codes >> np.uint16(shift)).astype(np.uint8).view(fp8), "f16").astype(np.uint32) for shift in (0, 8)
    )
    return low | high << np.uint32(16)


def _integer(whole: np.ndarray, target: str) -> np.ndarray:
    """The nearest there is; of a NaN 0, in 64 bits the highest bit alone."""
    kind, whole = numpy_type(target), whole.astype(np.float64)
    limits, not_a_number = np.iinfo(kind), 0 if bits_of(target) < 64 else 1 << 63
    integers = np.clip(whole, limits.min, limits.max).astype(kind)
    integers = np.where(whole >= limits.max, kind(limits.max), integers)  # which float64 need not hold
    return np.where(np.isnan(whole), np.array(not_a_number, np.uint64).astype(kind), integers)


HANDLERS: dict[str, Handler] = {"cvt": convert}
