"""Dot products as tensor cores add them.

Products are exact. Some of them and the accumulator are added in one step, as integers: each is shifted to the largest
exponent among them and loses, toward zero, the bits that lie more than so many places below it. The sum of what is left
is exact, and what a float32 cannot hold of it is cut off, again toward zero. The next products are added to that.

An exponent here is that of the operands: a product's is the sum of its factors', also where its significand has grown
to 2 and more; a subnormal number has that of the smallest normal one, and products that are 0 have none.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from .arithmetic import NAN
from .rounding import toward_zero

NO_EXPONENT = -400  # so low that even with the largest factor no product of numbers but 0 has a lower one


class Adder(NamedTuple):
    """How a card adds: the bits kept below the largest exponent, and how many products one step takes."""

    fraction_bits: int
    products: int


# What others found on these cards: P. Xie et al., "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix
# Cores", 2025. An H200 gives the same bits (``tests/golden``).
AMPERE = Adder(fraction_bits=24, products=8)
HOPPER = Adder(fraction_bits=25, products=16)


def dot(a: np.ndarray, b: np.ndarray, c: np.ndarray, adder: Adder) -> np.ndarray:
    """``[..., m, k]`` times ``[..., n, k]`` plus float32 ``[..., m, n]``: float32."""
    a, b = a.swapaxes(-1, -2)[..., :, None], b.swapaxes(-1, -2)[..., None, :]  # [..., k, m, 1], [..., k, 1, n]
    a_exponents, b_exponents = _exponents(a), _exponents(b)
    a, b = a.astype(np.float64), b.astype(np.float64)
    for first in range(0, a.shape[-3], adder.products):
        step = np.s_[..., first : first + adder.products, :, :]
        c = _add(a[step] * b[step], a_exponents[step] + b_exponents[step], c, adder.fraction_bits)
    return c


def dot_of_bytes(a: np.ndarray, b: np.ndarray, c: np.ndarray, adder: Adder) -> np.ndarray:
    """8-bit floats: Hopper has no ``mma`` of its own for them and takes them as float16, of each four the first two,
    then the others, and adds ``c`` last, as any float32. Found by trying; ``tests/golden`` has the card's bits.
    """
    first_two, total = np.arange(a.shape[-1]) % 4 < 2, np.zeros_like(c)
    for taken in (first_two, ~first_two):
        total = dot(a[..., taken].astype(np.float16), b[..., taken].astype(np.float16), total, adder)
    return np.where(np.isnan(total + c), NAN, total + c)


def _add(products: np.ndarray, exponents: np.ndarray, c: np.ndarray, fraction_bits: int) -> np.ndarray:
    """One step, in which ``products`` is used up. An infinite term or a NaN stays what it is through all of it."""
    place = np.maximum(exponents.max(axis=-3), _exponents(c)) - fraction_bits  # of the last bit that is kept
    up, down = np.ldexp(1.0, -place), np.ldexp(1.0, place)
    products *= up[..., None, :, :]
    cut = np.trunc(products, out=products).sum(axis=-3) + np.trunc(c * up)
    total = toward_zero(cut * down)
    return np.where(np.isnan(total), NAN, total)


def _exponents(values: np.ndarray) -> np.ndarray:
    """That of the leading bit, at least the format's smallest; of 0 none."""
    _, exponent = np.frexp(values.astype(np.float32))  # for a significand below 1
    exponent = np.maximum(exponent - 1, ml_dtypes.finfo(values.dtype).minexp)
    return np.where(values == 0, NO_EXPONENT, exponent).astype(np.int16)
