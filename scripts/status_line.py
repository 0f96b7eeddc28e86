"""A line about progress that stays at the bottom of a terminal while text scrolls above it."""

import os
from typing import TextIO

SAVE, RESTORE = "\x1b7", "\x1b8"  # the cursor
UP, CLEAR_LINE = "\x1b[A", "\x1b[2K"


class StatusLine:
    """Takes the last row of the terminal behind `stream` out of what scrolls, and gives it back at the end.

    What others write to the terminal needs no care: the cursor stays where their text ends. Where `stream` is no
    terminal nothing is written.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._num_rows = 0  # when the last row was taken

    def __enter__(self) -> "StatusLine":
        if self._is_terminal:
            self._write(f"\n{UP}")  # from the last row onto the one above
        return self

    def show(self, text: str) -> None:
        if not self._is_terminal:
            return
        num_columns, num_rows = os.get_terminal_size(self._stream.fileno())
        if num_rows < 3:  # some terminals do not know their size and say 0
            return
        scrolled = "" if num_rows == self._num_rows else f"\x1b[1;{num_rows - 1}r"  # once, and after a change of size
        self._num_rows = num_rows
        self._write(f"{SAVE}{scrolled}\x1b[{num_rows};1H{CLEAR_LINE}{text[: num_columns - 1]}{RESTORE}")

    def __exit__(self, *error: object) -> None:
        if self._num_rows:
            self._write(f"{SAVE}\x1b[r\x1b[{self._num_rows};1H{CLEAR_LINE}{RESTORE}")

    def _write(self, codes: str) -> None:
        self._stream.write(codes)
        self._stream.flush()
