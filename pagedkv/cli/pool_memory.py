"""Pinned memory of the host, and plain copies between it and a card: what moves of blocks are compared with."""

from typing import Any

import cupy
import cupyx
import numpy as np

from pagedkv.arrays import view


def empty_pinned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Host memory that a card reads and writes by itself."""
    return cupyx.empty_pinned(shape, dtype)


def copy(target: Any, source: Any) -> None:
    """The driver's copy of a contiguous array, on the current stream; each side on the card or in pinned memory."""
    runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream()
    addresses = view(target, "target").pointer, view(source, "source").pointer
    runtime.memcpyAsync(*addresses, source.nbytes, runtime.memcpyDefault, stream.ptr)


def wait() -> None:
    """Until the card has done all it was told: from then on the host sees what was copied."""
    cupy.cuda.runtime.deviceSynchronize()
