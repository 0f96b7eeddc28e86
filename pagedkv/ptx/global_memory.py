"""Global memory: the buffers that a launch was given.

Every access is looked at before it happens: whether it is aligned, lies inside one buffer, and touches nothing but
elements of the arrays there. The gaps between the rows of a strided array belong to nobody.
"""

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..arrays import ArrayView
from .arithmetic import UNSIGNED
from .memory import Change, Report, bytes_of, changed, report_first, words_of
from .pages import SparseBuffer


class GlobalMemory:
    """The buffers a launch may touch, each exactly as far as its array reaches; arrays that overlap share one."""

    def __init__(self, arrays: list[ArrayView]) -> None:
        buffers: list[_Buffer] = []
        for array in sorted((_buffer_of(array) for array in arrays if 0 not in array.shape), key=lambda each: each.low):
            if buffers and array.low < buffers[-1].high:
                buffers[-1] = buffers[-1].joined(array)
            else:
                buffers.append(array)
        self.buffers = buffers
        self.bases = np.array([buffer.low for buffer in buffers], np.uint64)
        self.data = [buffer.data() for buffer in buffers]

    def load(self, addresses: np.ndarray, size: int, count: int, report: Report) -> list[np.ndarray]:
        """``count`` words of ``size`` bytes from each address."""
        return words_of(self.read(addresses, size * count, size * count, report), size)

    def read(self, addresses: np.ndarray, nbytes: int, align: int, report: Report) -> np.ndarray:
        """``[threads, nbytes]`` from each address, which must be a multiple of ``align``."""
        data = np.empty((addresses.size, nbytes), np.uint8)
        for lanes, buffer, offsets in self._located(addresses, nbytes, align, "load", report):
            data[lanes] = buffer[offsets[:, None] + np.arange(nbytes)]
        return data

    def store(self, addresses: np.ndarray, words: list[Any], size: int, report: Report) -> None:
        """Words to each address; of two threads that store to one, the higher wins."""
        data = bytes_of(words, size, addresses.size)
        nbytes = data.shape[1]
        for lanes, buffer, offsets in self._located(addresses, nbytes, nbytes, "store", report):
            buffer[offsets[:, None] + np.arange(nbytes)] = data[lanes]

    def atomic(self, addresses: np.ndarray, size: int, change: Change, report: Report) -> np.ndarray:
        """Changes one word per thread, in turn; the words as each found them."""
        before = np.empty(addresses.size, UNSIGNED[8 * size])
        for lanes, buffer, offsets in self._located(addresses, size, size, "atomic", report):
            before[lanes] = changed(buffer, lanes, offsets, size, change)
        return before

    def _located(
        self, addresses: np.ndarray, nbytes: int, align: int, what: str, report: Report
    ) -> Iterator[tuple[np.ndarray, Any, np.ndarray]]:
        """For each buffer the lanes that access it, its bytes and the offsets there."""
        which = np.searchsorted(self.bases, addresses, side="right") - 1
        for number in np.unique(which):
            lanes = np.flatnonzero(which == number)
            if number < 0:
                report(f"global {what} outside every array", lanes[0])
            buffer = self.buffers[number]
            offsets = (addresses[lanes] - self.bases[number]).astype(np.int64)
            outside, misaligned = offsets + nbytes > buffer.high - buffer.low, addresses[lanes] % np.uint64(align) != 0
            report_first(outside, lanes, f"global {what} outside every array", report)
            report_first(misaligned, lanes, f"misaligned {align}-byte global {what}", report)
            report_first(buffer.in_gap(offsets, nbytes), lanes, f"global {what} between the rows of an array", report)
            yield lanes, self.data[number], offsets


class _Rows(NamedTuple):
    """Where the elements of an array lie: ``nbytes`` from its first byte on, again at each step of the axes around."""

    low: int
    nbytes: int
    axes: list[tuple[int, int]]  # extent and stride in bytes, outermost first

    def hold(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """Which accesses lie in one row."""
        rest = addresses - self.low
        for extent, stride in self.axes:
            rest = rest - np.clip(rest // stride, 0, extent - 1) * stride
        return (rest >= 0) & (rest + nbytes <= self.nbytes)


class _Buffer(NamedTuple):
    """Addresses from ``low`` on to before ``high``, and the rows of the arrays there."""

    low: int
    high: int
    rows: list[_Rows]
    sparse: SparseBuffer | None

    def joined(self, other: "_Buffer") -> "_Buffer":
        return _Buffer(self.low, max(self.high, other.high), self.rows + other.rows, self.sparse)

    def data(self) -> Any:
        """Its bytes, to be indexed by offsets ``[threads, bytes]``."""
        if self.sparse is not None:
            return self.sparse.pages
        nbytes = self.high - self.low
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(self.low), np.uint8)

    def in_gap(self, offsets: np.ndarray, nbytes: int) -> np.ndarray:
        """Which accesses touch anything but the rows."""
        if not any(rows.axes for rows in self.rows):
            return np.zeros(offsets.size, np.bool_)
        return ~np.any([rows.hold(offsets + self.low, nbytes) for rows in self.rows], axis=0)


def _buffer_of(array: ArrayView) -> _Buffer:
    size = array.dtype.itemsize
    axes = [(extent, size * stride) for extent, stride in zip(array.shape, array.strides, strict=True)]
    low = array.pointer + sum((extent - 1) * min(stride, 0) for extent, stride in axes)
    rows = _rows_of(low, size, sorted(((extent, abs(stride)) for extent, stride in axes), key=lambda axis: axis[1]))
    span = size + sum((extent - 1) * abs(stride) for extent, stride in axes)
    return _Buffer(low, low + span, [rows], array.owner if isinstance(array.owner, SparseBuffer) else None)


def _rows_of(low: int, size: int, axes: list[tuple[int, int]]) -> _Rows:
    """Axes by ascending stride. Rows that adjoin or overlap become one, rows that interleave one with their gaps."""
    span, row, gaps = size, size, []
    for extent, stride in axes:
        inner, span = span, span + (extent - 1) * stride
        if extent == 1:
            continue
        if stride < inner or (stride == inner and not gaps):
            row, gaps = span, []
        else:
            gaps.insert(0, (extent, stride))
    return _Rows(low, row, gaps)
