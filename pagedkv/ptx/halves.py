"""Arithmetic on 16-bit floats, one in a register or two: ``f16``, ``bf16``, ``f16x2``, ``bf16x2``.

Values come as the register's bits. Every result is rounded once; subnormal numbers stay what they are.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .arithmetic import Handler, Opcode, larger, smaller
from .rounding import odd_float32, odd_sum

FORMATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
TYPES = {*FORMATS, *(f"{form}x2" for form in FORMATS)}
NAN = np.uint16(0x7FFF)  # in both formats, and the only one that arithmetic makes


def _rounded_once(function: Callable[..., np.ndarray]) -> Handler:
    """An operation on float64, which is exact or rounds in a way that does not show once 16 bits are left."""

    def handler(opcode: Opcode, *words: Any) -> np.ndarray:
        kind = opcode[-1]
        form, word = FORMATS[kind.removesuffix("x2")], np.uint32 if kind.endswith("x2") else np.uint16
        numbers = [np.atleast_1d(np.asarray(each, word))[:, None].view(form).astype(np.float64) for each in words]
        exact = function(*numbers)
        codes = np.where(np.isnan(exact), NAN, odd_float32(exact).astype(form).view(np.uint16))
        return codes.view(word)[:, 0]

    return handler


HANDLERS: dict[str, Handler] = {
    "add": _rounded_once(np.add),  # what float64 rounds here is close to a summand and far from a tie
    "sub": _rounded_once(np.subtract),
    "mul": _rounded_once(np.multiply),
    "fma": _rounded_once(lambda x, y, z: odd_sum(x * y, z)),
    "min": _rounded_once(smaller),
    "max": _rounded_once(larger),
    "neg": _rounded_once(np.negative),
    "abs": _rounded_once(np.abs),
}
