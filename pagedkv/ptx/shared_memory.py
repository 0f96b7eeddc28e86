"""Shared memory of each CTA, with what is known of each byte.

Every access is looked at before it happens: whether it is aligned and lies inside the CTA's memory, whether what it
reads was ever written, and whether it is ordered with the other threads' accesses to the same bytes, unless both only
read or both are atomic or strong (volatile, relaxed ...). ``cta_order`` says what orders accesses. A thread that has
changed a word by an atomic is not ordered after the atomics before it there: its plain accesses need a barrier, too.
"""

from typing import Any

import numpy as np

from .cta_order import NOBODY, Accesses, Threads
from .memory import Change, Report, bytes_of, changed, check_place, report_first, words_of


class SharedMemory:
    """Shared memory of all CTAs, with what is known of each byte."""

    def __init__(self, num_ctas: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.data = np.full(num_ctas * nbytes, 0xFF, np.uint8)  # NaN, should an unwritten byte be used after all
        self.in_flight = np.zeros(self.data.size, np.bool_)  # the target of a cp.async that has not arrived
        self.writer, self.reader, self.changer = (Accesses(self.data.size) for _ in range(3))

    def load(
        self, offsets: np.ndarray, size: int, count: int, threads: Threads, report: Report, *, strong: bool = False
    ) -> list[np.ndarray]:
        """``count`` words of ``size`` bytes from each offset in the thread's own CTA.

        One that is strong races with no atomic; it leaves nothing behind that a later write could race with.
        """
        touched = self._touched(offsets, size * count, threads, "load", report)
        self._check_read(touched, report)
        report_first(self.writer.races(touched, threads), None, "race: shared read after an unordered write", report)
        if not strong:
            changed_before = self.changer.races(touched, threads)
            report_first(changed_before, None, "race: shared read after an unordered atomic", report)
            self.reader.record(touched, threads)
        return words_of(self.data[touched], size)

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
        touched = self._touched(offsets, size * len(words), threads, "store", report)
        if strong:
            report_first(self.in_flight[touched].any(axis=1), None, "write into a cp.async before its wait", report)
            self._change(touched, threads, "write", report)
        else:
            self._check_write(touched, threads, report)
            self.writer.record(touched, threads)
            self._check_one_writer(touched, threads, report)
        self.data[touched] = bytes_of(words, size, offsets.size)

    def begin_copy(self, offsets: np.ndarray, nbytes: int, threads: Threads, report: Report) -> np.ndarray:
        """A cp.async begins: until it arrives nobody may touch its bytes. Their indices, ``[threads, nbytes]``."""
        touched = self._touched(offsets, nbytes, threads, "cp.async", report)
        self._check_write(touched, threads, report)
        self.data[touched], self.in_flight[touched] = 0xFF, True
        self.writer.record(touched, threads)
        self._check_one_writer(touched, threads, report)
        return touched

    def end_copy(self, touched: np.ndarray, data: np.ndarray, threads: Threads) -> None:
        """It has arrived: its thread has written the bytes now."""
        self.data[touched], self.in_flight[touched] = data, False
        self.writer.record(touched, threads)

    def _check_read(self, touched: np.ndarray, report: Report) -> None:
        report_first(self.in_flight[touched].any(axis=1), None, "read of a cp.async before its wait", report)
        never = (self.writer.last[touched] == NOBODY) & (self.changer.last[touched] == NOBODY)
        report_first(never.any(axis=1), None, "read of shared memory never written", report)

    def _change(self, touched: np.ndarray, threads: Threads, what: str, report: Report) -> None:
        for before, accesses in (("write", self.writer), ("read", self.reader)):
            racing = accesses.races(touched, threads)
            report_first(racing, None, f"race: shared {what} after an unordered {before}", report)
        self.changer.record(touched, threads)

    def _check_write(self, touched: np.ndarray, threads: Threads, report: Report) -> None:
        report_first(self.in_flight[touched].any(axis=1), None, "write into a cp.async before its wait", report)
        report_first(self.writer.races(touched, threads), None, "race: shared write after an unordered write", report)
        report_first(self.reader.races(touched, threads), None, "race: shared write after an unordered read", report)
        report_first(self.changer.races(touched, threads), None, "race: shared write after an unordered atomic", report)

    def _check_one_writer(self, touched: np.ndarray, threads: Threads, report: Report) -> None:
        several = (self.writer.last[touched] != threads.stamps[:, None]).any(axis=1)
        report_first(several, None, "race: two threads write one byte of shared memory", report)

    def atomic(self, offsets: np.ndarray, size: int, change: Change, threads: Threads, report: Report) -> np.ndarray:
        """Changes one word per thread, in turn; the words as each found them. Atomics do not race with each other."""
        touched = self._touched(offsets, size, threads, "atomic", report)
        self._check_read(touched, report)
        self._change(touched, threads, "atomic", report)
        return changed(self.data, np.arange(offsets.size), touched[:, 0], size, change)

    def words(self, offsets: np.ndarray, threads: Threads) -> np.ndarray:
        """What tells the words at the threads' offsets from all others of the launch, and from global addresses."""
        return ~(threads.cta * self.nbytes + offsets)

    def _touched(self, offsets: np.ndarray, nbytes: int, threads: Threads, what: str, report: Report) -> np.ndarray:
        """Indices into ``data`` of every byte of every access, ``[threads, nbytes]``."""
        check_place(offsets, nbytes, self.nbytes, f"shared {what}", "the CTA's memory", report)
        return (threads.cta * self.nbytes + offsets)[:, None] + np.arange(nbytes)
