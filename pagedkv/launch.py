"""One kernel launch as plain data: what the planning modules make and the backends run. Needs no CuPy."""

from dataclasses import dataclass

import numpy as np

from .arrays import ArrayView
from .kernels import Instance

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
