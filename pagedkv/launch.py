"""One kernel launch as plain data: what the planning modules make and the backends run. Needs no CuPy."""

from dataclasses import dataclass

import numpy as np

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
