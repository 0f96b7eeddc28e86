"""Plain text for people: aligned columns, and numbers with units."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; numbers are set to the right."""

    title: str
    width: int
    right: bool = False

    def cell(self, text: object) -> str:
        return f"{text!s:>{self.width}}" if self.right else f"{text!s:<{self.width}}"


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose widths are known beforehand, so that each row prints as soon as it is there."""

    columns: Sequence[Column]

    def header(self) -> str:
        return self.row([column.title for column in self.columns])

    def row(self, cells: Sequence[object]) -> str:
        return "  ".join(column.cell(text) for column, text in zip(self.columns, cells, strict=True)).rstrip()


def duration(microseconds: float) -> str:
    """Three digits and the unit that suits them."""
    for unit, scale in (("us", 1), ("ms", 1e3)):
        if microseconds < 999.5 * scale:
            return f"{_three_digits(microseconds / scale)} {unit}"
    return f"{_three_digits(microseconds / 1e6)} s"


def size(nbytes: int) -> str:
    """Bytes in powers of 1,000, as bandwidths are."""
    for unit, scale in (("B", 1), ("kB", 1e3), ("MB", 1e6)):
        if nbytes < 999.5 * scale:
            return f"{nbytes} B" if scale == 1 else f"{_three_digits(nbytes / scale)} {unit}"
    return f"{_three_digits(nbytes / 1e9)} GB"


def _three_digits(number: float) -> str:
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"
