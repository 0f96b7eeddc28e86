"""Roundings that NumPy does not have: toward zero, down, and to odd.

A number rounded to odd is the next one toward zero, its last bit set if anything was lost. Rounded again, to at least
two bits fewer, it gives what one rounding of the exact number gives: that last bit keeps it from looking like a tie.
"""

import numpy as np


def odd_sum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The sum of two float64, rounded to odd."""
    total = x + y
    part = total - x
    lost = (x - (total - part)) + (y - part)
    inexact = np.isfinite(total) & (lost != 0) & (total.view(np.uint64) & np.uint64(1) == 0)
    return np.where(inexact, np.nextafter(total, np.copysign(np.inf, lost)), total)


def odd_float32(values: np.ndarray) -> np.ndarray:
    """float64 as float32, rounded to odd; from 2**128 on infinite."""
    cut = toward_zero(values)
    lost = np.isfinite(cut) & (cut != values)
    return (cut.view(np.uint32) | lost).view(np.float32)


def toward_zero(values: np.ndarray) -> np.ndarray:
    """float64 as float32; from 2**128 on infinite."""
    near = values.astype(np.float32)
    grown = (np.abs(near) > np.abs(values)) & (np.abs(values) < 2.0**128)
    return np.where(grown, np.nextafter(near, np.float32(0)), near)


def down(values: np.ndarray) -> np.ndarray:
    """float64 as the next float32 that is not larger."""
    near = values.astype(np.float32)
    return np.where(near > values, np.nextafter(near, np.float32(-np.inf)), near)
