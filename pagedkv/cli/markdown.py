"""What the Markdown tables of all records share."""

from collections.abc import Iterable, Sequence
from typing import Any

from .table import size

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


def shape_text(record: Record) -> str:
    """Of what a cache is made, and how it was measured."""
    shape = record["shape"]
    return (
        f"{shape['dtype']}, {shape['layout']} cache {shape['kv_cache_dtype']}, heads of {shape['head_size']}, "
        f"blocks of {shape['block_size']}, {record['method']}"
    )


def ceilings_text(record: Record) -> str:
    """What the card allowed in the same run: an empty kernel and the best read."""
    return f"empty kernel {record['ceilings']['empty_us']:.2f}; {best_read_text(record)}"


def best_read_text(record: Record) -> str:
    """The best read of the same run."""
    read = record["ceilings"]["read"]
    rate = read["nbytes"] / read["us"] / 1e6
    return f"best read {size(read['nbytes'])} in {read['us']:.1f} ({rate:.2f} TB/s)"


def with_target(ratio: float, target_ratio: float | None, met: bool | None) -> str:
    """A ratio, bold where it is met, with its target in brackets where it has one."""
    if target_ratio is None:
        return f"{ratio:.3f}"
    return f"**{ratio:.3f}** ({target_ratio:.3f})" if met else f"{ratio:.3f} ({target_ratio:.3f})"
