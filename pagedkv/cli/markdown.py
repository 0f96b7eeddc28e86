"""What the Markdown tables of all records share."""

from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]


def origin(record: Record) -> str:
    """Card, software, date and commit of a record."""
    return (
        f"{record['card']}, driver {record['driver']}, CuPy {record['versions']['cupy']}, {record['date']}, "
        f"commit `{record['commit']}`"
    )


def table_lines(titles: Sequence[str], numbers_from: int, rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a table whose columns from ``numbers_from`` on are set to the right."""
    rule = "|" + "---|" * numbers_from + "---:|" * (len(titles) - numbers_from)
    return [_line(titles), rule, *map(_line, rows)]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
