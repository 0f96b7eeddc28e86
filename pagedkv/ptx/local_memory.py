"""Memory of each thread's own. An access must lie inside it, be aligned, and read only what was written."""

from typing import Any

import numpy as np

from .memory import Report, bytes_of, check_place, report_first, words_of


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
        report_first(~self.written[touched].all(axis=1), None, "read of local memory never written", report)
        return words_of(self.data[touched], size)

    def store(self, offsets: np.ndarray, words: list[Any], size: int, index: np.ndarray, report: Report) -> None:
        """Words to each offset in the thread's own memory."""
        touched = self._touched(offsets, size * len(words), index, "store", report)
        self.data[touched], self.written[touched] = bytes_of(words, size, offsets.size), True

    def _touched(self, offsets: np.ndarray, nbytes: int, index: np.ndarray, what: str, report: Report) -> np.ndarray:
        check_place(offsets, nbytes, self.nbytes, f"local {what}", "the thread's memory", report)
        return (index * self.nbytes + offsets)[:, None] + np.arange(nbytes)
