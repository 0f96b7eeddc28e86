"""The Markdown tables of a ``bench pool`` record: what the host does, and moves of blocks on the card."""

from .markdown import Record, ceilings_text, origin, table_lines
from .table import size


def pool_markdown(record: Record) -> str:
    """Both tables, or the one that was measured."""
    parts = [
        _host_markdown(record) if record["host"] else "",
        _moves_markdown(record) if record["rows"] else "",
        record.get("no_moves", ""),
    ]
    return "\n\n".join(filter(None, parts))


# ---- on the host ----------------------------------------------------------------------------------------------------


def _host_markdown(record: Record) -> str:
    """A row per call, and for a step what loops need."""
    host = record["host"]
    rows = [cells for row in host["rows"] for cells in _host_cells(row)]
    lines = [
        f"{_software(record)}: on the host, {host['cpu']}{_cores(host['num_cores'])}, Python {host['python']}, "
        f"blocks of {host['rows'][0]['block_size']}, {host['method']}.",
        "",
        "us, with the target in brackets, bold where it is met; for a step also what plain Python loops over lists of "
        "block ids need, and what they need more to make an array of those.",
        "",
        *table_lines(["what", "us", "best", "loops", "and their block table"], 1, rows),
    ]
    return "\n".join(lines)


def _software(record: Record) -> str:
    """Where a record comes from; without a card there is less to say."""
    if record["card"] is not None:
        return origin(record)
    return f"NumPy {record['versions']['numpy']}, {record['date']}"


def _cores(count: int | None) -> str:
    if count is None:  # not chosen
        return ""
    return f", {count} core" if count == 1 else f", {count} cores"


def _host_cells(row: Record) -> list[list[str]]:
    us, target = _us(row["us"]), _us(row["target_us"])
    times = [f"{'**' + us + '**' if row['met'] else us} ({target})", _us(row["best_us"])]
    loops = [_us(row[name]["us"]) if name in row else "" for name in ("loops", "loops_block_table")]
    cells = [[row["what"], *times, *loops]]
    if "hashing" in row:
        hashing = row["hashing"]
        cells.append([hashing["what"], _us(hashing["us"]), _us(hashing["best_us"]), "", ""])
    return cells


def _us(microseconds: float) -> str:
    return f"{microseconds:,.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


# ---- on the card ----------------------------------------------------------------------------------------------------


def _moves_markdown(record: Record) -> str:
    """A row per move: its time, and the plain copy's as a share of it."""
    shape = record["shape"]
    form = f"{shape['num_layers']} layers of {shape['dtype']} {shape['layout']} caches"
    block = f"blocks of {shape['block_size']} x {shape['num_kv_heads']} x {shape['head_size']}"
    titles = ["what", "blocks", "bytes", "us", "GB/s", "plain copy", "share"]
    lines = [
        f"{origin(record)}: moves in {form}, {block}, {record['method']}.",
        "",
        "us, and as a share of it what a plain copy of the same bytes needs in the same run: inside the card the best "
        "of copy kernels and driver, between card and pinned host memory the driver's copy in one piece. The target in "
        "brackets, the share bold where it is met.",
        "",
        *table_lines(titles, 1, map(_move_cells, record["rows"])),
        "",
        f"GB/s of bytes that are read, and as many are written. Measured in the same run, in us: "
        f"{ceilings_text(record)}.",
    ]
    return "\n".join(lines)


def _move_cells(row: Record) -> list[str]:
    share = f"{100 * row['share']:.1f} %"
    return [
        row["what"],
        f"{row['num_pairs']:,} x {row['num_caches']}",
        size(row["nbytes"]),
        f"{row['us']:.1f}",
        f"{row['nbytes'] / row['us'] / 1e3:.1f}",
        f"{row['plain_us']:.1f}",
        f"{'**' + share + '**' if row['met'] else share} ({100 * row['target_share']:.0f} %)",
    ]
