"""One kernel launch as plain data: what the planning modules make and the backends run. Needs no CuPy."""

import math
from dataclasses import dataclass

import numpy as np

from .arrays import ArrayView
from .kernels import Instance
from .layout import PACK_BYTES

LARGEST_GRID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Launch:
    """Instance, CTAs, threads of each, by-value parameters and bytes of dynamic shared memory."""

    instance: Instance
    grid: tuple[int, ...]
    threads: int
    params: np.ndarray
    shared_bytes: int = 0


def as_bytes(fields: tuple, struct: np.dtype) -> np.ndarray:
    """A by-value struct. As plain bytes: CuPy describes a structured dtype field by field at every launch."""
    return np.array(fields, struct).view(f"V{struct.itemsize}")


def element_of(array: ArrayView, name: str) -> int:
    """The array's address in elements. ValueError if it is no whole number of them."""
    element, rest = divmod(array.pointer, array.dtype.itemsize)
    if rest:
        expected = f"an address that is a multiple of {array.dtype.itemsize}"
        raise ValueError(f"{name}: expected {expected}, got {array.pointer}")
    return element


def widest_vec(dtype: np.dtype) -> int:
    """Elements of a full pack."""
    return PACK_BYTES // dtype.itemsize


def common_vec(arrays: list[ArrayView], elements: list[int]) -> int:
    """Elements of the first array's dtype that a thread moves at once: as many as a pack holds and as divide both
    ``elements`` and every stride but those of the last axes."""
    strides = [
        stride
        for array in arrays
        for size, stride in zip(array.shape[:-1], array.strides[:-1], strict=True)
        if size > 1
    ]
    return math.gcd(widest_vec(arrays[0].dtype), *elements, *strides)
