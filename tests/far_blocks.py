"""Arrays whose blocks or rows lie far apart, of which only the touched pages exist on the host."""

import mmap

import numpy as np

BLOCK_STRIDE = 3 * 2**29  # elements: blocks 2 and 3 lie past 2^31 and 2^32


def sparse_bytes(backend, nbytes):
    """Memory of this size, zero where it has not been written."""
    if backend.name != "cuda":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    import cupy

    return cupy.zeros(nbytes, np.uint8)


def blocks_far_apart(buffer, shape):
    """A view of the buffer with BLOCK_STRIDE between blocks."""
    inner = np.empty(shape[1:], np.uint8).strides
    strides = (BLOCK_STRIDE, *inner)
    if isinstance(buffer, np.ndarray):
        return np.lib.stride_tricks.as_strided(buffer, shape, strides)
    import cupy

    return cupy.lib.stride_tricks.as_strided(buffer, shape, strides)


def far_along(axis, buffer, shape, dtype):
    """A view of a buffer on the host with BLOCK_STRIDE between neighbours along one axis, dense along the others."""
    strides = list(np.empty([1 if i == axis else extent for i, extent in enumerate(shape)], dtype).strides)
    strides[axis] = BLOCK_STRIDE * np.dtype(dtype).itemsize
    return np.lib.stride_tricks.as_strided(buffer.view(dtype), shape, strides)
