"""Shared memory of each CTA, with what is known of it.

Every access is looked at before it happens: whether it is aligned and lies inside the CTA's memory, whether what it
reads was ever written, and whether it is ordered with the other threads' accesses to the same bytes, unless both only
read or both are atomic or strong (volatile, relaxed ...). ``cta_order`` says what orders accesses; besides, a thread
that finds a word by an atomic or a strong load comes after the atomics before that there.

What is known is kept for granules as large as the smallest access so far: accesses are aligned, so each has whole ones.
"""

from typing import Any

import numpy as np

from .cta_order import NOBODY, Accesses, Threads, time_of
from .memory import LARGEST_ACCESS, Change, Report, bytes_of, changed, check_place, report_first, words_of


class SharedMemory:
    """Shared memory of all CTAs, with what is known of each granule."""

    def __init__(self, num_ctas: int, nbytes: int) -> None:
        self.nbytes, self.granule = nbytes, LARGEST_ACCESS
        granules = -(-nbytes // self.granule)  # of a CTA
        self.stride = granules * self.granule
        self.data = np.full(num_ctas * self.stride, 0xFF, np.uint8)  # NaN, should an unwritten byte be used after all
        self.in_flight = np.zeros(num_ctas * granules, np.bool_)  # the target of a cp.async that has not arrived
        self.writer, self.reader, self.changer = (Accesses(num_ctas * granules) for _ in range(3))
        # By byte and thread: when it last found the byte by an atomic or strong load.
        self.found: dict[tuple[int, int], int] = {}

    def load(
        self, offsets: np.ndarray, size: int, count: int, threads: Threads, report: Report, *, strong: bool = False
    ) -> list[np.ndarray]:
        """``count`` words of ``size`` bytes from each offset in the thread's own CTA.

        One that is strong races with no atomic; it leaves nothing behind that a later write could race with.
        """
        nbytes = size * count
        starts = self._starts(offsets, nbytes, threads, "load", report)
        touched = self._granules(starts, nbytes)
        self._check_read(touched, report)
        self._check_order(touched, threads, "read", {"write": self.writer}, report)
        if strong:
            self._find(starts, nbytes, threads)
        else:
            self._check_atomics(touched, threads, "read", report)
            self.reader.record(touched, threads)
        return words_of(self._rows(nbytes)[starts // nbytes], size)

    def store(
        self,
        offsets: np.ndarray,
        words: list[Any],
        size: int,
        threads: Threads,
        report: Report,
        *,
        strong: bool = False,
    ) -> None:
        """Words to each offset in the thread's own CTA. Those that are strong race with atomics as atomics do."""
        nbytes = size * len(words)
        starts = self._starts(offsets, nbytes, threads, "store", report)
        touched = self._granules(starts, nbytes)
        if strong:
            report_first(self.in_flight[touched].any(axis=1), None, "write into a cp.async before its wait", report)
            self._change(touched, threads, "write", report)
        else:
            self._write(touched, threads, report)
        self._rows(nbytes)[starts // nbytes] = bytes_of(words, size, offsets.size)

    def begin_copy(self, offsets: np.ndarray, nbytes: int, threads: Threads, report: Report) -> np.ndarray:
        """A cp.async begins: until it arrives nobody may touch its bytes. Where they start, for its end."""
        starts = self._starts(offsets, nbytes, threads, "cp.async", report)
        touched = self._granules(starts, nbytes)
        self._write(touched, threads, report)
        self._rows(nbytes)[starts // nbytes], self.in_flight[touched] = 0xFF, True
        return starts

    def end_copy(self, starts: np.ndarray, data: np.ndarray, threads: Threads) -> None:
        """It has arrived: its thread has written the bytes ``[threads, nbytes]`` now."""
        nbytes = data.shape[1]
        touched = self._granules(starts, nbytes)
        self._rows(nbytes)[starts // nbytes], self.in_flight[touched] = data, False
        self.writer.record(touched, threads)

    def atomic(self, offsets: np.ndarray, size: int, change: Change, threads: Threads, report: Report) -> np.ndarray:
        """Changes one word per thread, in turn; the words as each found them. Atomics do not race with each other."""
        starts, threads = self._starts(offsets, size, threads, "atomic", report), threads.in_turn()
        touched = self._granules(starts, size)
        self._check_read(touched, report)
        self._change(touched, threads, "atomic", report)
        self._find(starts, size, threads)
        return changed(self.data, np.arange(offsets.size), starts, size, change)

    def words(self, offsets: np.ndarray, threads: Threads) -> np.ndarray:
        """What tells the words at the threads' offsets from all others of the launch, and from global addresses."""
        return ~(threads.cta * self.stride + offsets)

    def _check_read(self, touched: np.ndarray, report: Report) -> None:
        report_first(self.in_flight[touched].any(axis=1), None, "read of a cp.async before its wait", report)
        never = self.writer.last[touched] == NOBODY
        if never.any():
            never &= self.changer.last[touched] == NOBODY
            report_first(never.any(axis=1), None, "read of shared memory never written", report)

    def _write(self, touched: np.ndarray, threads: Threads, report: Report) -> None:
        report_first(self.in_flight[touched].any(axis=1), None, "write into a cp.async before its wait", report)
        self._check_order(touched, threads, "write", {"write": self.writer, "read": self.reader}, report)
        self._check_atomics(touched, threads, "write", report)
        lost = self.writer.record(touched, threads)
        report_first(lost.any(axis=1), None, "race: two threads write one byte of shared memory", report)

    def _change(self, touched: np.ndarray, threads: Threads, what: str, report: Report) -> None:
        self._check_order(touched, threads, what, {"write": self.writer, "read": self.reader}, report)
        self.changer.record(touched, threads)

    def _find(self, starts: np.ndarray, nbytes: int, threads: Threads) -> None:
        times = time_of(threads.stamps)
        for start, thread, time in zip(starts.tolist(), threads.index.tolist(), times.tolist(), strict=True):
            self.found |= {(byte, thread): time for byte in range(start, start + nbytes)}

    @staticmethod
    def _check_order(
        touched: np.ndarray, threads: Threads, what: str, before: dict[str, Accesses], report: Report
    ) -> None:
        for kind, accesses in before.items():
            times = accesses.unordered(touched, threads)
            if times is not None:
                racing = (times > NOBODY).any(axis=1)
                report_first(racing, None, f"race: shared {what} after an unordered {kind}", report)

    def _check_atomics(self, touched: np.ndarray, threads: Threads, what: str, report: Report) -> None:
        times = self.changer.unordered(touched, threads)
        for row, column in () if times is None else np.argwhere(times > NOBODY):
            byte, thread = int(touched[row, column]) * self.granule, int(threads.index[row])
            if times[row, column] > self.found.get((byte, thread), NOBODY):
                report(f"race: shared {what} after an unordered atomic", row)

    def _starts(self, offsets: np.ndarray, nbytes: int, threads: Threads, what: str, report: Report) -> np.ndarray:
        """Where in ``data`` each access starts."""
        check_place(offsets, nbytes, self.nbytes, f"shared {what}", "the CTA's memory", report)
        return threads.cta * self.stride + offsets

    def _granules(self, starts: np.ndarray, nbytes: int) -> np.ndarray:
        """Numbers of the granules of every access, ``[threads, granules]``."""
        if nbytes < self.granule:
            factor, self.granule = self.granule // nbytes, nbytes
            self.in_flight = np.repeat(self.in_flight, factor)
            for accesses in (self.writer, self.reader, self.changer):
                accesses.refine(factor)
        return (starts // self.granule)[:, None] + np.arange(nbytes // self.granule)

    def _rows(self, nbytes: int) -> np.ndarray:
        """All bytes, in rows of aligned accesses of that size."""
        return self.data.reshape(-1, nbytes)
