"""Records of benchmarks: JSON under ``results/<card>/``, and the Markdown tables and README sections made of them."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from .decode_section import decode_section
from .decode_table import decode_markdown
from .gather_table import gather_markdown
from .markdown import Record, best_read_text, origin, table_lines
from .mixed_table import mixed_markdown
from .pool_table import pool_markdown
from .prefill_table import prefill_markdown
from .table import size

PEERS = "peers"  # the name of what other libraries needed, which is no record of ours


def place(results: Path, card: str, name: str) -> Path:
    """Where a record of a card goes."""
    return results / re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-") / f"{name}.json"


def load(results: Path, card: str, name: str) -> Record | None:
    """A record of a card, if there is one."""
    path = place(results, card, name)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def save(record: Record, results: Path) -> Path:
    """Writes a record to its place; one that is there is replaced whole or not at all."""
    path = place(results, record["card"], record.get("name", record["bench"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def records(results: Path) -> list[Record]:
    """All records, card by card."""
    paths = (path for path in sorted(results.glob("*/*.json")) if path.stem != PEERS)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def sections(results: Path) -> dict[str, str]:
    """Markdown of each benchmark, by the name of its README section; nothing where there is no record."""
    stored = records(results)
    of_section = {name: [record for record in stored if _section(record) == name] for name in SECTIONS}
    return {f"bench {name}": SECTIONS[name](of_bench) for name, of_bench in of_section.items()}


def _section(record: Record) -> str:
    """Decode has a section for each layout."""
    bench, layout = record["bench"], record["shape"].get("layout", "packed")
    return f"decode {layout}" if bench == "decode" and layout != "packed" else bench


def filled(readme: str, tables: dict[str, str]) -> str:
    """The README with each section between its markers replaced; ValueError for a section without markers."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        head, found, rest = readme.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"no markers {begin} and {end} in the file")
        lines = filter(None, (begin, table, end))
        readme = head + "\n".join(lines) + tail
    return readme


def write_markdown(record: Record) -> str:
    """The table of ``bench write``: a row per layout, format and pattern of slots, a column per number of tokens."""
    counts = sorted({row["num_tokens"] for row in record["rows"]})
    kinds = list(dict.fromkeys((row["layout"], row["kv_cache_dtype"], row["slots"]) for row in record["rows"]))
    cells = {(row["layout"], row["kv_cache_dtype"], row["slots"], row["num_tokens"]): row for row in record["rows"]}
    shape, ceilings = record["shape"], record["ceilings"]
    lines = [
        f"{origin(record)}: {shape['num_kv_heads']} x {shape['head_size']} {shape['dtype']}, "
        f"blocks of {shape['block_size']}, {record['method']}.",
        "",
        "us, and for few tokens how many more than an empty kernel, for many the rate as a share of a plain copy of "
        "the same bytes.",
        "",
    ]
    titles = ["layout", "cache", "slots", *(f"{count:,}" for count in counts)]
    rows = ([_cell(cells[*kind, count]) if (*kind, count) in cells else "" for count in counts] for kind in kinds)
    lines += table_lines(titles, 3, ([*kind, *row] for kind, row in zip(kinds, rows, strict=True)))
    copies = ", ".join(f"{size(int(nbytes))} in {us:.1f}" for nbytes, us in ceilings["copy_us"].items())
    lines += [
        "",
        f"Measured in the same run, in us: empty kernel {ceilings['empty_us']:.2f}; best copy, bytes read and written, "
        f"{copies}; {best_read_text(record)}.",
    ]
    return "\n".join(lines)


def _cell(row: Record) -> str:
    if row["share_of_copy"] is None:
        return f"{row['us']:.2f} (+{row['us'] - row['empty_us']:.2f})"
    return f"{row['us']:.1f} ({100 * row['share_of_copy']:.1f} %)"


def _all(markdown: Callable[[Record], str]) -> Callable[[list[Record]], str]:
    """Tables one below the other."""
    return lambda stored: "\n\n".join(map(markdown, stored))


MARKDOWN: dict[str, Callable[[Record], str]] = {
    "write": write_markdown,
    "decode": decode_markdown,
    "prefill": prefill_markdown,
    "mixed": mixed_markdown,
    "pool": pool_markdown,
    "gather": gather_markdown,
}
SECTIONS: dict[str, Callable[[list[Record]], str]] = {
    "write": _all(write_markdown),
    "decode": decode_section,
    "decode NHD": decode_section,
    "decode HND": decode_section,
    "prefill": _all(prefill_markdown),
    "mixed": _all(mixed_markdown),
    "pool": _all(pool_markdown),
    "gather": _all(gather_markdown),
}
