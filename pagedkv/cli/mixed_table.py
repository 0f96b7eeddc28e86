"""The Markdown table of a ``bench mixed`` record."""

from .markdown import Record, ceilings_text, origin, shape_text, table_lines, with_target


def mixed_markdown(record: Record) -> str:
    """A row per comparison: both times, and the ratio of the first to the second."""
    heads = "{num_heads}/{num_kv_heads}".format(**record["rows"][0])
    lines = [
        f"{origin(record)}: {heads} heads, {shape_text(record)}.",
        "",
        "us; a ratio has in brackets what it may be at most, and is bold where it is met.",
        "",
        *table_lines(["what", "us", "beside", "us", "ratio"], 4, map(_cells, record["rows"])),
        "",
        f"Measured in the same run, in us: {ceilings_text(record)}.",
    ]
    return "\n".join(lines)


def _cells(row: Record) -> list[str]:
    first, *others = (f"{us:.1f}" for us in row["us"].values())
    ratio = with_target(row["ratio"], row["target_ratio"], row["met"])
    return [row["what"], first, row["beside"], " + ".join(others), ratio]
