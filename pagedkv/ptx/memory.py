"""Memory as a kernel sees it: global buffers, shared memory of each CTA, local memory of each thread.

Every access is looked at before it happens: whether it is aligned and lies inside a buffer that the kernel was given,
or inside the CTA's or thread's own memory, and whether what it reads there was ever written. In shared memory no access
may be unordered with another thread's to the same byte, unless both only read or both are atomic. Two accesses are
ordered if a barrier of the CTA lies between them or, inside one warp, a ``__syncwarp``. Each byte of shared memory
remembers its last writer and its last reader with the barriers they had passed, and when it last had several readers: a
write by the last of them is a race with the others.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import ArrayView
from .arithmetic import UNSIGNED
from .warp import WARP_SIZE

Report = Callable[[str, int], None]  # says what is wrong, in which of the active threads
Change = Callable[[int, np.ndarray], Any]  # an active thread and the word it finds, to the word it leaves

NOBODY = -1


class GlobalMemory:
    """The buffers a launch may touch, each exactly as far as its array reaches; arrays that overlap share one."""

    def __init__(self, arrays: list[ArrayView]) -> None:
        spans = []
        for low, high in sorted(filter(None, map(_span, arrays))):
            if spans and low < spans[-1][1]:
                spans[-1] = (spans[-1][0], max(high, spans[-1][1]))
            else:
                spans.append((low, high))
        self.bases = np.array([low for low, _ in spans], np.uint64)
        self.sizes = np.array([high - low for low, high in spans], np.int64)
        self.buffers = [_bytes_at(low, high - low) for low, high in spans]

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
        data = _bytes_of(words, size, addresses.size)
        nbytes = data.shape[1]
        for lanes, buffer, offsets in self._located(addresses, nbytes, nbytes, "store", report):
            buffer[offsets[:, None] + np.arange(nbytes)] = data[lanes]

    def atomic(self, addresses: np.ndarray, size: int, change: Change, report: Report) -> np.ndarray:
        """Changes one word per thread, in turn; the words as each found them."""
        before = np.empty(addresses.size, UNSIGNED[8 * size])
        for lanes, buffer, offsets in self._located(addresses, size, size, "atomic", report):
            before[lanes] = _changed(buffer, lanes, offsets, size, change)
        return before

    def _located(self, addresses: np.ndarray, nbytes: int, align: int, what: str, report: Report):
        which = np.searchsorted(self.bases, addresses, side="right") - 1
        for buffer in np.unique(which):
            lanes = np.flatnonzero(which == buffer)
            if buffer < 0:
                report(f"global {what} outside every array", lanes[0])
            offsets = (addresses[lanes] - self.bases[buffer]).astype(np.int64)
            _first(offsets + nbytes > self.sizes[buffer], lanes, f"global {what} outside every array", report)
            _first(addresses[lanes] % np.uint64(align) != 0, lanes, f"misaligned {align}-byte global {what}", report)
            yield lanes, self.buffers[buffer], offsets


class LocalMemory:
    """Each thread's own memory: arrays with an index that the compiler does not know, and spilled registers."""

    def __init__(self, num_threads: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.data, self.written = (
            np.full(num_threads * nbytes, 0xFF, np.uint8),
            np.zeros(num_threads * nbytes, np.bool_),
        )

    def load(self, offsets: np.ndarray, size: int, count: int, index: np.ndarray, report: Report) -> list[np.ndarray]:
        """``count`` words of ``size`` bytes from each offset in the memory of the threads with these numbers."""
        touched = self._touched(offsets, size * count, index, "load", report)
        _first(~self.written[touched].all(axis=1), None, "read of local memory never written", report)
        return words_of(self.data[touched], size)

    def store(self, offsets: np.ndarray, words: list[Any], size: int, index: np.ndarray, report: Report) -> None:
        """Words to each offset in the thread's own memory."""
        touched = self._touched(offsets, size * len(words), index, "store", report)
        self.data[touched], self.written[touched] = _bytes_of(words, size, offsets.size), True

    def _touched(self, offsets: np.ndarray, nbytes: int, index: np.ndarray, what: str, report: Report) -> np.ndarray:
        _check_place(offsets, nbytes, self.nbytes, f"local {what}", "the thread's memory", report)
        return (index * self.nbytes + offsets)[:, None] + np.arange(nbytes)


class SharedMemory:
    """Shared memory of all CTAs, with what is known of each byte."""

    def __init__(self, num_ctas: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.data = np.full(num_ctas * nbytes, 0xFF, np.uint8)  # NaN, should an unwritten byte be used after all
        self.in_flight = np.zeros(self.data.size, np.bool_)  # the target of a cp.async that has not arrived
        self.writer, self.reader, self.changer = (_Access(self.data.size) for _ in range(3))

    def load(self, offsets: np.ndarray, size: int, count: int, threads: "Threads", report: Report) -> list[np.ndarray]:
        """``count`` words of ``size`` bytes from each offset in the thread's own CTA."""
        touched = self._touched(offsets, size * count, threads, "load", report)
        _first(self.in_flight[touched].any(axis=1), None, "read of a cp.async before its wait", report)
        _first((self.writer.thread[touched] == NOBODY).any(axis=1), None, "read of shared memory never written", report)
        _first(self.writer.races(touched, threads), None, "race: shared read after an unordered write", report)
        _first(self.changer.races(touched, threads), None, "race: shared read after an unordered atomic", report)
        self.reader.record(touched, threads)
        return words_of(self.data[touched], size)

    def store(self, offsets: np.ndarray, words: list[Any], size: int, threads: "Threads", report: Report) -> None:
        """Words to each offset in the thread's own CTA."""
        touched = self._touched(offsets, size * len(words), threads, "store", report)
        self._check_write(touched, threads, report)
        self.writer.record(touched, threads)
        self._check_one_writer(touched, threads, report)
        self.data[touched] = _bytes_of(words, size, offsets.size)

    def begin_copy(self, offsets: np.ndarray, nbytes: int, threads: "Threads", report: Report) -> np.ndarray:
        """A cp.async begins: until it arrives nobody may touch its bytes. Their indices, ``[threads, nbytes]``."""
        touched = self._touched(offsets, nbytes, threads, "cp.async", report)
        self._check_write(touched, threads, report)
        self.data[touched], self.in_flight[touched] = 0xFF, True
        self.writer.record(touched, threads)
        self._check_one_writer(touched, threads, report)
        return touched

    def end_copy(self, touched: np.ndarray, data: np.ndarray, threads: "Threads") -> None:
        """It has arrived: its thread has written the bytes now."""
        self.data[touched], self.in_flight[touched] = data, False
        self.writer.record(touched, threads)

    def _check_write(self, touched: np.ndarray, threads: "Threads", report: Report) -> None:
        _first(self.in_flight[touched].any(axis=1), None, "write into a cp.async before its wait", report)
        _first(self.writer.races(touched, threads), None, "race: shared write after an unordered write", report)
        _first(self.reader.races(touched, threads), None, "race: shared write after an unordered read", report)
        _first(self.changer.races(touched, threads), None, "race: shared write after an unordered atomic", report)

    def _check_one_writer(self, touched: np.ndarray, threads: "Threads", report: Report) -> None:
        several = (self.writer.thread[touched] != threads.index[:, None]).any(axis=1)
        _first(several, None, "race: two threads write one byte of shared memory", report)

    def atomic(self, offsets: np.ndarray, size: int, change: Change, threads: "Threads", report: Report) -> np.ndarray:
        """Changes one word per thread, in turn; the words as each found them. Atomics do not race with each other."""
        touched = self._touched(offsets, size, threads, "atomic", report)
        _first(self.in_flight[touched].any(axis=1), None, "read of a cp.async before its wait", report)
        _first((self.writer.thread[touched] == NOBODY).any(axis=1), None, "read of shared memory never written", report)
        _first(self.writer.races(touched, threads), None, "race: shared atomic after an unordered write", report)
        _first(self.reader.races(touched, threads), None, "race: shared atomic after an unordered read", report)
        self.changer.record(touched, threads)
        return _changed(self.data, np.arange(offsets.size), touched[:, 0], size, change)

    def _touched(self, offsets: np.ndarray, nbytes: int, threads: "Threads", what: str, report: Report) -> np.ndarray:
        """Indices into ``data`` of every byte of every access, ``[threads, nbytes]``."""
        _check_place(offsets, nbytes, self.nbytes, f"shared {what}", "the CTA's memory", report)
        return (threads.cta * self.nbytes + offsets)[:, None] + np.arange(nbytes)


class Threads:
    """Some threads of a launch: their number in the grid, CTA, warp, and the barriers they have passed.

    An epoch of a warp ends at each barrier of its CTA, too, and no other warp has one of the same number.
    """

    __slots__ = ("cta", "cta_epoch", "index", "warp", "warp_epoch")

    def __init__(self, index: np.ndarray, cta: np.ndarray, cta_epoch: np.ndarray, warp_epoch: np.ndarray) -> None:
        self.index, self.cta, self.warp = index, cta, index // WARP_SIZE
        self.cta_epoch = cta_epoch[cta]
        self.warp_epoch = warp_epoch[self.warp] * warp_epoch.size + self.warp


class _Access:
    """The last thread that accessed each byte and the epochs of its CTA and warp at the time.

    ``several_warps`` is the last epoch of the CTA in which threads of more than one warp did, ``several_lanes`` the
    last epoch of the warp in which more than one of its threads did.
    """

    def __init__(self, nbytes: int) -> None:
        self.thread = np.full(nbytes, NOBODY, np.int64)
        self.cta_epoch, self.warp_epoch = np.full(nbytes, -1, np.int64), np.full(nbytes, -1, np.int64)
        self.several_warps, self.several_lanes = np.full(nbytes, -1, np.int64), np.full(nbytes, -1, np.int64)

    def record(self, touched: np.ndarray, threads: Threads) -> None:
        self._join(touched, threads)
        self.thread[touched] = threads.index[:, None]
        self.cta_epoch[touched] = threads.cta_epoch[:, None]
        self.warp_epoch[touched] = threads.warp_epoch[:, None]
        self._join(touched, threads)  # with the threads of this very instruction

    def races(self, touched: np.ndarray, threads: Threads) -> np.ndarray:
        """For each thread, whether another's access to one of its bytes is unordered with it."""
        other_warp, other_lane = self._others(touched, threads)
        other_warp |= self.several_warps[touched] == threads.cta_epoch[:, None]
        other_lane |= self.several_lanes[touched] == threads.warp_epoch[:, None]
        return (other_warp | other_lane).any(axis=1)

    def _join(self, touched: np.ndarray, threads: Threads) -> None:
        other_warp, other_lane = self._others(touched, threads)
        self.several_warps[touched[other_warp]] = self._spread(threads.cta_epoch, touched)[other_warp]
        self.several_lanes[touched[other_lane]] = self._spread(threads.warp_epoch, touched)[other_lane]

    def _others(self, touched: np.ndarray, threads: Threads) -> tuple[np.ndarray, np.ndarray]:
        """Where the remembered thread is unordered with these and of another warp, or another one of the same warp."""
        other, index = self.thread[touched], threads.index[:, None]
        other_warp = (other != NOBODY) & (other // WARP_SIZE != threads.warp[:, None])
        same_cta_epoch = self.cta_epoch[touched] == threads.cta_epoch[:, None]
        same_warp_epoch = self.warp_epoch[touched] == threads.warp_epoch[:, None]
        return other_warp & same_cta_epoch, (other != NOBODY) & (other != index) & same_warp_epoch

    @staticmethod
    def _spread(epoch: np.ndarray, touched: np.ndarray) -> np.ndarray:
        return np.broadcast_to(epoch[:, None], touched.shape)


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


def words_of(data: np.ndarray, size: int) -> list[np.ndarray]:
    """Bytes ``[threads, nbytes]`` as words of ``size`` bytes, an array of all threads for each."""
    return list(data.view(UNSIGNED[8 * size]).T)


def _bytes_of(words: list[Any], size: int, num_threads: int) -> np.ndarray:
    """Words, each a scalar or an array of all threads, as bytes ``[threads, nbytes]``."""
    data = np.empty((num_threads, len(words)), UNSIGNED[8 * size])
    for i, word in enumerate(words):
        data[:, i] = word
    return data.view(np.uint8)


def _changed(buffer: np.ndarray, lanes: np.ndarray, offsets: np.ndarray, size: int, change: Change) -> np.ndarray:
    before = np.empty(lanes.size, UNSIGNED[8 * size])
    for i, (lane, offset) in enumerate(zip(lanes, offsets, strict=True)):
        word = buffer[offset : offset + size].view(UNSIGNED[8 * size])
        before[i] = word[0]
        word[0] = np.asarray(change(lane, word)).view(UNSIGNED[8 * size])
    return before


def _check_place(offsets: np.ndarray, nbytes: int, extent: int, what: str, memory: str, report: Report) -> None:
    _first((offsets < 0) | (offsets + nbytes > extent), None, f"{what} outside {memory}", report)
    _first(offsets % nbytes != 0, None, f"misaligned {nbytes}-byte {what}", report)


def _first(bad: np.ndarray, lanes: np.ndarray | None, what: str, report: Report) -> None:
    """Reports the first bad thread, if there is one."""
    if bad.any():
        first = int(np.argmax(bad))
        report(what, first if lanes is None else int(lanes[first]))
