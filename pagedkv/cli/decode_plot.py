"""A picture of a ``bench decode`` record: how far each batch is from its floor, ours and others."""

from pathlib import Path
from typing import Any

from .decode_table import PEER_NAMES
from .markdown import Record

MISSING = "--plot needs matplotlib: pip install 'pagedkv[plot]'"
# Ticks of the axis of ratios, which is logarithmic in what is above 1: that is where results differ.
RATIOS = (1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 6, 11, 31)
NEAREST, FARTHEST = 1.005, 41  # a ratio outside is drawn at the edge
OURS = {
    "varlen": ("pagedkv varlen", "#7a4fa3", "P", 74),
    "v2": ("pagedkv v2", "#d1495b", "o", 74),
    "v1": ("pagedkv v1", "#edae49", "D", 46),
}
PEER_STYLES = {
    "vllm_v1": ("#9aa5b1", "s"),
    "vllm_v2": ("#5f6c7b", "s"),
    "flashinfer_cuda_core": ("#a9c6de", "^"),
    "flashinfer_tensor_core": ("#30638e", "^"),
    "flash_attn_3": ("#3d8b7d", "v"),
}
OTHERS = " in the same run; others were measured once, in a run of their own"
INK, FAINT = "#2b2f36", "#d9dde3"


def check_matplotlib() -> None:
    """ImportError with the command that installs it: before a benchmark has run, not behind it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(MISSING) from error


def plot(record: Record, path: Path) -> None:
    """Draws a record into a PNG file."""
    from matplotlib.figure import Figure

    rows = record["rows"]
    figure = Figure(figsize=(10, 2.2 + 0.42 * len(rows)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    _draw_axes(axes, record)
    _draw_targets(axes, rows)
    for name, (colour, marker) in PEER_STYLES.items():
        points = [_peer_ratio(row, name) for row in rows]
        _draw_points(axes, points, label=PEER_NAMES[name], color=colour, marker=marker, s=36, zorder=3)
    for op, (label, colour, marker, area) in OURS.items():
        points = [row["ratio"].get(op) for row in rows]
        _draw_points(axes, points, label=label, color=colour, marker=marker, s=area, zorder=4, edgecolors="white")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, labelcolor=INK)
    figure.savefig(path, format="png")


def _draw_axes(axes: Any, record: Record) -> None:
    rows, shape = record["rows"], record["shape"]
    axes.set_xscale("log")
    axes.set_xlim((NEAREST - 1) / 1.1, (FARTHEST - 1) * 1.1)
    axes.set_xticks([ratio - 1 for ratio in RATIOS], [f"{ratio:g}" for ratio in RATIOS])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), [_row_label(row) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(f"time / time of reading the same blocks{OTHERS if record['peers'] else ''}", color=INK)
    cache = f"{shape['dtype']}, {shape['layout']} cache {shape['kv_cache_dtype']}, heads of {shape['head_size']}"
    title = f"Decode on {record['card']}: {cache}, blocks of {shape['block_size']}"
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")


def _draw_targets(axes: Any, rows: list[Record]) -> None:
    """Of v2, which varlen shares, as bars across the line of a row."""
    targets = [row["target_ratio"].get("v2", row["target_ratio"].get("varlen")) for row in rows]
    _draw_points(axes, targets, label="target of v2", color=INK, marker="|", s=190, linewidths=1.6, zorder=2)


def _draw_points(axes: Any, ratios: list[float | None], **style: Any) -> None:
    points = [(min(max(ratio, NEAREST), FARTHEST) - 1, y) for y, ratio in enumerate(ratios) if ratio is not None]
    if points:
        axes.scatter(*zip(*points, strict=True), **style)


def _peer_ratio(row: Record, name: str) -> float | None:
    """To the floor of the run in which the others were measured."""
    us = row["peers"]["us"].get(name) if row["peers"] else None
    return None if us is None else us / row["peers"]["floor_us"]


def _row_label(row: Record) -> str:
    context = "ragged" if row["is_ragged"] else f"{row['context']:,}"
    return f"{row['num_seqs']} × {context},  {row['num_heads']}/{row['num_kv_heads']} heads"
