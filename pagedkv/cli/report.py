"""Records of benchmarks: JSON under ``results/<card>/``, and the Markdown tables and README sections made of them."""

import json
import re
from pathlib import Path
from typing import Any

from .table import size

Record = dict[str, Any]


def save(record: Record, results: Path) -> Path:
    """Writes a record to its place; one that is there is replaced whole or not at all."""
    folder = results / re.sub(r"[^a-z0-9]+", "-", record["card"].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['bench']}.json"
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def sections(results: Path) -> dict[str, str]:
    """Markdown of each benchmark that has records, by the name of its README section."""
    tables: dict[str, list[str]] = {}
    for path in sorted(results.glob("*/*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        tables.setdefault(f"bench {record['bench']}", []).append(MARKDOWN[record["bench"]](record))
    return {name: "\n\n".join(parts) for name, parts in tables.items()}


def filled(readme: str, tables: dict[str, str]) -> str:
    """The README with each section between its markers replaced; ValueError for a section without markers."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        head, found, rest = readme.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"no markers {begin} and {end} in the file")
        readme = f"{head}{begin}\n{table}\n{end}{tail}"
    return readme


def write_markdown(record: Record) -> str:
    """The table of ``bench write``: a row per layout, format and pattern of slots, a column per number of tokens."""
    counts = sorted({row["num_tokens"] for row in record["rows"]})
    kinds = list(dict.fromkeys((row["layout"], row["kv_cache_dtype"], row["slots"]) for row in record["rows"]))
    cells = {(row["layout"], row["kv_cache_dtype"], row["slots"], row["num_tokens"]): row for row in record["rows"]}
    shape, ceilings = record["shape"], record["ceilings"]
    lines = [
        f"{record['card']}, driver {record['driver']}, CuPy {record['versions']['cupy']}, {record['date']}, "
        f"commit `{record['commit']}`: {shape['num_kv_heads']} x {shape['head_size']} {shape['dtype']}, "
        f"blocks of {shape['block_size']}, {record['method']}.",
        "",
        "us, and for few tokens how many more than an empty kernel, for many the rate as a share of a plain copy of "
        "the same bytes.",
        "",
        "| layout | cache | slots | " + " | ".join(f"{count:,}" for count in counts) + " |",
        "|---|---|---|" + "---:|" * len(counts),
    ]
    for kind in kinds:
        row = [_cell(cells[*kind, count]) if (*kind, count) in cells else "" for count in counts]
        lines.append("| " + " | ".join([*kind, *row]) + " |")
    copies = ", ".join(f"{size(int(nbytes))} in {us:.1f}" for nbytes, us in ceilings["copy_us"].items())
    lines += [
        "",
        f"Measured in the same run, in us: empty kernel {ceilings['empty_us']:.2f}; best copy, bytes read and written, "
        f"{copies}; best read {size(ceilings['read']['nbytes'])} in {ceilings['read']['us']:.1f} "
        f"({ceilings['read']['nbytes'] / ceilings['read']['us'] / 1e6:.2f} TB/s).",
    ]
    return "\n".join(lines)


def _cell(row: Record) -> str:
    if row["share_of_copy"] is None:
        return f"{row['us']:.2f} (+{row['us'] - row['empty_us']:.2f})"
    return f"{row['us']:.1f} ({100 * row['share_of_copy']:.1f} %)"


MARKDOWN = {"write": write_markdown}
