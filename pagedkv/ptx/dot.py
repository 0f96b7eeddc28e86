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

NO_EXPONENT = -(1 << 14)  # below that of any product


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
    a_exponent, b_exponent = _exponents(a), _exponents(b)
    a, b = a.astype(np.float64), b.astype(np.float64)
    for first in range(0, a.shape[-1], adder.products):
        step = np.s_[..., first : first + adder.products]
        products = a[step][..., :, None, :] * b[step][..., None, :, :]
        exponents = a_exponent[step][..., :, None, :] + b_exponent[step][..., None, :, :]
        c = _add(products, exponents, c, adder.fraction_bits)
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
    """One step. An infinite term or a NaN stays what it is through all of it."""
    shift = fraction_bits - np.maximum(exponents.max(axis=-1), _exponents(c))
    cut = np.trunc(np.ldexp(products, shift[..., None])).sum(axis=-1) + np.trunc(np.ldexp(c.astype(np.float64), shift))
    total = toward_zero(np.ldexp(cut, -shift))
    return np.where(np.isnan(total), NAN, total)


def _exponents(values: np.ndarray) -> np.ndarray:
    """That of the leading bit, at least the format's smallest; of 0 none."""
    _, exponent = np.frexp(values.astype(np.float64))  # for a significand below 1
    exponent = np.maximum(exponent - 1, ml_dtypes.finfo(values.dtype).minexp)
    return np.where(values == 0, NO_EXPONENT, exponent)
