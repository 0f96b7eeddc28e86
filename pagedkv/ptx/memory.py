"""What all kinds of memory share: words and bytes, changes of a word, and a look at addresses before their use."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .arithmetic import UNSIGNED

Report = Callable[[str, int], None]  # says what is wrong, in which of the active threads
Change = Callable[[int, np.ndarray], Any]  # an active thread and the word it finds, to the word it leaves
LARGEST_ACCESS = 32  # bytes


def words_of(data: np.ndarray, size: int) -> list[np.ndarray]:
    """Bytes ``[threads, nbytes]`` as words of ``size`` bytes, an array of all threads for each."""
    return list(data.view(UNSIGNED[8 * size]).T)


def bytes_of(words: list[Any], size: int, num_threads: int) -> np.ndarray:
    """Words, each a scalar or an array of all threads, as bytes ``[threads, nbytes]``."""
    data = np.empty((num_threads, len(words)), UNSIGNED[8 * size])
    for i, word in enumerate(words):
        data[:, i] = word
    return data.view(np.uint8)


def changed(buffer: Any, lanes: np.ndarray, offsets: np.ndarray, size: int, change: Change) -> np.ndarray:
    """Changes the word at each offset of a buffer, in turn; the words as they were found."""
    before = np.empty(lanes.size, UNSIGNED[8 * size])
    for i, (lane, offset) in enumerate(zip(lanes, offsets, strict=True)):
        touched = np.arange(offset, offset + size)[None]
        word = buffer[touched].reshape(size).view(UNSIGNED[8 * size])
        before[i] = word[0]
        buffer[touched] = np.asarray(change(lane, word)).reshape(1).view(np.uint8)[None]
    return before


def check_place(offsets: np.ndarray, nbytes: int, extent: int, what: str, memory: str, report: Report) -> None:
    report_first((offsets < 0) | (offsets + nbytes > extent), None, f"{what} outside {memory}", report)
    report_first(offsets % nbytes != 0, None, f"misaligned {nbytes}-byte {what}", report)


def report_first(bad: np.ndarray, lanes: np.ndarray | None, what: str, report: Report) -> None:
    """Reports the first bad thread, if there is one."""
    if bad.any():
        first = int(np.argmax(bad))
        report(what, first if lanes is None else int(lanes[first]))
