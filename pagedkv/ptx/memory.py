"""Memory as a kernel sees it: global buffers, one piece of shared memory per CTA, parameters.

Every access is looked at before it happens. Global: inside a buffer that the kernel was given, and aligned. Shared: the
same, and read only after it was written, and not while another thread's access to the same byte is unordered with it.
Two accesses are ordered if a barrier of the CTA lies between them or, inside one warp, a ``__syncwarp``. Each byte of
shared memory remembers its last writer and its last reader with the barriers they had passed.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import ArrayView
from .arithmetic import UNSIGNED

Report = Callable[[str, int], None]  # says what is wrong, in which of the active threads

NOBODY = -1


class GlobalMemory:
    """The buffers a launch may touch, each exactly as far as its array reaches."""

    def __init__(self, arrays: list[ArrayView]) -> None:
        spans = sorted(filter(None, map(_span, arrays)))
        self.bases = np.array([low for low, _ in spans], np.uint64)
        self.sizes = np.array([high - low for low, high in spans], np.int64)
        self.buffers = [_bytes_at(low, high - low) for low, high in spans]

    def load(self, addresses: np.ndarray, size: int, count: int, report: Report) -> list[np.ndarray]:
        """``count`` words of ``size`` bytes from each address."""
        words = np.empty((count, addresses.size), UNSIGNED[8 * size])
        for lanes, buffer, offsets in self._located(addresses, size * count, "load", report):
            for i in range(count):
                words[i, lanes] = _gathered(buffer, offsets + i * size, size)
        return list(words)

    def store(self, addresses: np.ndarray, words: list[Any], size: int, report: Report) -> None:
        """Words to each address; of two threads that store to one, the higher wins."""
        for lanes, buffer, offsets in self._located(addresses, size * len(words), "store", report):
            for i, word in enumerate(words):
                values = np.broadcast_to(np.asarray(word, UNSIGNED[8 * size]), addresses.shape)[lanes]
                _scatter(buffer, offsets + i * size, values, size)

    def _located(self, addresses: np.ndarray, nbytes: int, what: str, report: Report):
        which = np.searchsorted(self.bases, addresses, side="right") - 1
        for buffer in np.unique(which):
            lanes = np.flatnonzero(which == buffer)
            if buffer < 0:
                report(f"global {what} outside every array", lanes[0])
            offsets = (addresses[lanes] - self.bases[buffer]).astype(np.int64)
            _first(offsets + nbytes > self.sizes[buffer], lanes, f"global {what} outside every array", report)
            _first(addresses[lanes] % np.uint64(nbytes) != 0, lanes, f"misaligned {nbytes}-byte global {what}", report)
            yield lanes, self.buffers[buffer], offsets


class SharedMemory:
    """Shared memory of all CTAs, with what is known of each byte."""

    def __init__(self, num_ctas: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.data = np.full(num_ctas * nbytes, 0xFF, np.uint8)  # NaN, should an unwritten byte be used after all
        self.writer, self.reader = (_Access(self.data.size) for _ in range(2))

    def load(self, offsets: np.ndarray, size: int, count: int, threads: "Threads", report: Report) -> list[np.ndarray]:
        """``count`` words of ``size`` bytes from each offset in the thread's own CTA."""
        touched = self._touched(offsets, size * count, threads, "load", report)
        _first((self.writer.thread[touched] == NOBODY).any(axis=1), None, "read of shared memory never written", report)
        _first(self.writer.races(touched, threads), None, "race: shared read after an unordered write", report)
        self.reader.record(touched, threads)
        return [_gathered(self.data, touched[:, i * size], size) for i in range(count)]

    def store(self, offsets: np.ndarray, words: list[Any], size: int, threads: "Threads", report: Report) -> None:
        """Words to each offset in the thread's own CTA."""
        touched = self._touched(offsets, size * len(words), threads, "store", report)
        _first(self.writer.races(touched, threads), None, "race: shared write after an unordered write", report)
        _first(self.reader.races(touched, threads), None, "race: shared write after an unordered read", report)
        self.writer.record(touched, threads)
        _first((self.writer.thread[touched] != threads.index[:, None]).any(axis=1), None,
               "race: two threads write one byte of shared memory", report)  # fmt: skip
        for i, word in enumerate(words):
            values = np.broadcast_to(np.asarray(word, UNSIGNED[8 * size]), offsets.shape)
            _scatter(self.data, touched[:, i * size], values, size)

    def _touched(self, offsets: np.ndarray, nbytes: int, threads: "Threads", what: str, report: Report) -> np.ndarray:
        """Indices into ``data`` of every byte of every access, ``[threads, nbytes]``."""
        outside = (offsets < 0) | (offsets + nbytes > self.nbytes)
        _first(outside, None, f"shared {what} outside the CTA's memory", report)
        _first(offsets % nbytes != 0, None, f"misaligned {nbytes}-byte shared {what}", report)
        return (threads.cta * self.nbytes + offsets)[:, None] + np.arange(nbytes)


class Threads:
    """Some threads of a launch: their number in the grid, CTA, warp, and the barriers they have passed."""

    __slots__ = ("cta", "cta_epoch", "index", "warp", "warp_epoch")

    def __init__(self, index: np.ndarray, cta: np.ndarray, cta_epoch: np.ndarray, warp_epoch: np.ndarray) -> None:
        self.index, self.cta, self.warp = index, cta, index // 32
        self.cta_epoch, self.warp_epoch = cta_epoch[cta], warp_epoch[self.warp]


class _Access:
    """The last thread that accessed each byte, and the epochs of its CTA and warp at the time."""

    def __init__(self, nbytes: int) -> None:
        self.thread = np.full(nbytes, NOBODY, np.int64)
        self.cta_epoch, self.warp_epoch = np.zeros(nbytes, np.int64), np.zeros(nbytes, np.int64)

    def record(self, touched: np.ndarray, threads: Threads) -> None:
        self.thread[touched] = threads.index[:, None]
        self.cta_epoch[touched] = threads.cta_epoch[:, None]
        self.warp_epoch[touched] = threads.warp_epoch[:, None]

    def races(self, touched: np.ndarray, threads: Threads) -> np.ndarray:
        """For each thread, whether another's access to one of its bytes is unordered with it."""
        other = self.thread[touched]
        same_cta_epoch = self.cta_epoch[touched] == threads.cta_epoch[:, None]
        other_warp = other // 32 != threads.warp[:, None]
        same_warp_epoch = self.warp_epoch[touched] == threads.warp_epoch[:, None]
        unordered = same_cta_epoch & (other_warp | same_warp_epoch)
        return ((other != NOBODY) & (other != threads.index[:, None]) & unordered).any(axis=1)


def _span(array: ArrayView) -> tuple[int, int] | None:
    """The first address of an array and the one behind its last; None if it has no elements."""
    if 0 in array.shape:
        return None
    reach = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
    size = array.dtype.itemsize
    low = array.pointer + size * sum(step for step in reach if step < 0)
    return low, array.pointer + size * (sum(step for step in reach if step > 0) + 1)


def _bytes_at(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def _gathered(buffer: np.ndarray, offsets: np.ndarray, size: int) -> np.ndarray:
    """Words at any byte offset."""
    return buffer[offsets[:, None] + np.arange(size)].view(UNSIGNED[8 * size])[:, 0]


def _scatter(buffer: np.ndarray, offsets: np.ndarray, words: np.ndarray, size: int) -> None:
    buffer[offsets[:, None] + np.arange(size)] = np.ascontiguousarray(words)[:, None].view(np.uint8)


def _first(bad: np.ndarray, lanes: np.ndarray | None, what: str, report: Report) -> None:
    """Reports the first bad thread, if there is one."""
    if bad.any():
        first = int(np.argmax(bad))
        report(what, first if lanes is None else int(lanes[first]))
