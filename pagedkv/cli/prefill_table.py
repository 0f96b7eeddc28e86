"""The Markdown table of a ``bench prefill`` record."""

from .bench_peers import source_line
from .markdown import Record, ceilings_text, origin, shape_text, table_lines

PEER_NAMES = {  # as peers.json names them
    "cudnn_contiguous": "cuDNN, contiguous",
    "fa2_contiguous": "FlashAttention-2, contiguous",
    "fa3_contiguous": "FlashAttention-3, contiguous",
    "fa3_paged": "FlashAttention-3, paged",
    "flashinfer_fa3_paged": "FlashInfer fa3, paged",
    "flashinfer_fa2_paged": "FlashInfer fa2, paged",
}


def prefill_markdown(record: Record) -> str:
    """A row per batch: time, rate and its share of the target, and the rates of others."""
    peers = list(PEER_NAMES) if record["peers"] else []
    titles = ["sequences", "length", "heads", "us", "TFLOP/s", "of the target", *(PEER_NAMES[name] for name in peers)]
    rows = [[*_cells(row), *_peer_cells(row, peers)] for row in record["rows"]]
    lines = [
        f"{origin(record)}: `flash_attn_varlen_func`, causal, {shape_text(record)}.",
        "",
        "TFLOP/s of both products, of which half are seen; the target in TFLOP/s in brackets, its share bold where it "
        "is met.",
        "",
        *table_lines(titles, 3, rows),
        "",
        f"Measured in the same run, in us: {ceilings_text(record)}.",
    ]
    return "\n".join([*lines, *source_line(record)])


def _cells(row: Record) -> list[str]:
    heads = f"{row['num_heads']}/{row['num_kv_heads']}"
    return [
        f"{row['num_seqs']}",
        f"{row['length']:,}",
        heads,
        f"{row['us']:.1f}",
        f"{row['tflop_per_s']:.1f}",
        _share(row),
    ]


def _share(row: Record) -> str:
    if row["ratio"] is None:
        return ""
    share = f"{100 * row['ratio']:.1f} %"
    return f"{'**' + share + '**' if row['met'] else share} ({row['target_tflop_per_s']:.0f})"


def _peer_cells(row: Record, peers: list[str]) -> list[str]:
    rates = row["peers"] or {}
    return [f"{rates[name]:.0f}" if name in rates else "" for name in peers]
