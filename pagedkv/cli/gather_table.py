"""The Markdown table of a ``bench gather`` record."""

from .markdown import Record, ceilings_text, origin, table_lines
from .table import size


def gather_markdown(record: Record) -> str:
    """A row per call: its time, and the plain copy's as a share of it."""
    shape = record["shape"]
    tokens = f"{shape['num_seqs']} sequences of {shape['context']:,} tokens"
    block = f"blocks of {shape['block_size']} x {shape['num_kv_heads']} x {shape['head_size']}"
    titles = ["what", "bytes read", "and written", "us", "plain copy", "share"]
    lines = [
        f"{origin(record)}: keys and values of {tokens}, {shape['dtype']}, {block}, {record['method']}.",
        "",
        "us, and as a share of it what the best plain copy of as many bytes, read and written, needs in the same run.",
        "",
        *table_lines(titles, 1, map(_cells, record["rows"])),
        "",
        f"Measured in the same run, in us: {ceilings_text(record)}.",
    ]
    return "\n".join(lines)


def _cells(row: Record) -> list[str]:
    if "plain_us" not in row:
        return [row["what"], "", "", f"{row['us']:.1f}", "", ""]
    nbytes = [size(row[name]) for name in ("read_bytes", "written_bytes")]
    return [row["what"], *nbytes, f"{row['us']:.1f}", f"{row['plain_us']:.1f}", f"{100 * row['share']:.1f} %"]
