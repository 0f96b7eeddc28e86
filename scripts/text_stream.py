"""Texts as they grow, token by token, printed in the order of their prompts."""

import re
from collections.abc import Callable
from unicodedata import combining, east_asian_width

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a decoder makes of bytes that are not UTF-8, or not yet


class TextStream:
    """The text of tokens that come one by one, in pieces that are each final.

    A token is bytes, and may end within a character: such bytes wait for the next token, as does white space, which is
    dropped at the ends of the text. All pieces together are `decode(token_ids).strip()`.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._token_ids: list[int] = []  # that end within a character
        self._space = ""
        self._is_started = False

    def push(self, token_id: int) -> str:
        """The piece of text that this token completes, often one word, sometimes nothing."""
        self._token_ids.append(token_id)
        text = self._decode(self._token_ids)
        if text.endswith(INCOMPLETE):
            return ""
        self._token_ids.clear()
        return self._final(text)

    def finish(self) -> str:
        """What is left at the end: bytes that stayed incomplete."""
        text = self._decode(self._token_ids) if self._token_ids else ""
        self._token_ids.clear()
        return self._final(text)

    def _final(self, text: str) -> str:
        text = self._space + text if self._is_started else text.lstrip()
        final = text.rstrip()
        self._space = text[len(final) :]
        self._is_started |= bool(final)
        return final


class OrderedTexts:
    """Texts that grow side by side, written one after the other: the first that is not finished as it grows, while
    those behind it are kept until their turn comes.

    headings: what is written before each text. decode: of token ids. write: takes the pieces.
    """

    def __init__(self, headings: list[str], decode: Callable[[list[int]], str], write: Callable[[str], None]) -> None:
        self._streams = [TextStream(decode) for _ in headings]
        self._kept = list(headings)
        self._is_finished = [False for _ in headings]
        self._write = write
        self._current = 0
        self._flush()

    def push(self, i: int, token_id: int, *, is_last: bool) -> None:
        """The next token of text `i`."""
        self._kept[i] += self._streams[i].push(token_id)
        if is_last:
            self._kept[i] += self._streams[i].finish() + "\n"
            self._is_finished[i] = True
        if i == self._current:
            self._flush()

    def _flush(self) -> None:
        while self._current < len(self._kept):
            if self._kept[self._current]:
                self._write(self._kept[self._current])
            self._kept[self._current] = ""
            if not self._is_finished[self._current]:
                return
            self._current += 1


class Wrapper:
    """Passes text on and breaks its lines at `width` columns, before words where it can.

    The terminal's own break splits words, and while it is due some terminals forget where the cursor is when it is
    restored (see `StatusLine`): so text stays out of the last column.
    """

    def __init__(self, write: Callable[[str], None], width: int) -> None:
        self._write = write
        self._width = max(width, 2)
        self._column = 0

    def __call__(self, text: str) -> None:
        self._write("".join(self._placed(part) for part in re.findall(r"\n|\s|\S+", text)))

    def _placed(self, part: str) -> str:
        """A line break, a space or a word, with a line break before it or in it as need be."""
        if part == "\n":
            self._column = 0
            return part
        placed = ""
        if self._column > 0 and self._column + columns_of(part) > self._width:
            placed, self._column = "\n", 0
            part = part.lstrip()
        for character in part:
            if self._column + columns_of(character) > self._width:
                placed, self._column = placed + "\n", 0
            placed, self._column = placed + character, self._column + columns_of(character)
        return placed


def columns_of(text: str) -> int:
    """That a text takes on a terminal, or a few more."""
    return sum(0 if combining(character) else 1 + (east_asian_width(character) in "WF") for character in text)
