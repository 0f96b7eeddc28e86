"""The Markdown table of a ``bench decode`` record."""

from .bench_peers import source_line
from .decode_rows import HOST_US, record_name
from .markdown import Record, ceilings_text, origin, shape_text, table_lines, with_target
from .table import size

PEER_NAMES = {  # as peers.json names them
    "vllm_v1": "vLLM v1",
    "vllm_v2": "vLLM v2",
    "flashinfer_cuda_core": "FlashInfer CUDA cores",
    "flashinfer_tensor_core": "FlashInfer tensor cores",
    "flash_attn_3": "FlashAttention-3",
}
CALLS = {"given": "with all memory given", "allocated": "with none"}


def decode_markdown(record: Record) -> str:
    """A row per batch: the floor, all ops with their ratios to it, and what others needed."""
    ops = list(record["rows"][0]["us"])
    peers = list(PEER_NAMES) if record["peers"] else []
    against_v2 = ["varlen / v2"] if _is_against_v2(record) else []
    titles = ["sequences", "context", "heads", "bytes", "floor"]
    titles += [title for op in ops for title in (op, f"{op} / floor")] + against_v2
    titles += [PEER_NAMES[name] for name in peers]
    rows = [[*batch_cells(row), *_times(row, ops), *_peer_cells(row, peers)] for row in record["rows"]]
    return "\n".join([*_introduction(record), "", *table_lines(titles, 3, rows), "", *_notes(record)])


def is_crossover(record: Record) -> bool:
    """Whether a record is of v1 against v2 over the context."""
    return record["name"] == record_name(record["shape"], is_crossover=True)


def _is_against_v2(record: Record) -> bool:
    return "against_v2" in record["rows"][0]


def _introduction(record: Record) -> list[str]:
    purpose = " v1 against v2 over the context, for batches of several sizes." if is_crossover(record) else ""
    beside = " `v2` reads a packed cache of its own in the same run." if _is_against_v2(record) else ""
    return [
        f"{origin(record)}: {shape_text(record)}.{purpose}",
        "",
        "us, in brackets TB/s. The floor reads the same blocks through a table and computes nothing; a ratio to "
        f"it has its target in brackets, and is bold where it is met.{beside}",
    ]


def batch_cells(row: Record) -> list[str]:
    """What a row measures: sequences, context, heads, bytes."""
    context = f"{row['context']:,}" + (" on average" if row["is_ragged"] else "")
    return [f"{row['num_seqs']}", context, f"{row['num_heads']}/{row['num_kv_heads']}", size(row["nbytes"])]


def _times(row: Record, ops: list[str]) -> list[str]:
    cells = [f"{row['floor_us']:.1f} ({row['floor_tb_per_s']:.2f})"]
    for op in ops:
        ratio = with_target(row["ratio"][op], row["target_ratio"][op], row["met"][op])
        cells += [f"{row['us'][op]:.1f} ({row['tb_per_s'][op]:.2f})", ratio]
    return [*cells, with_target(**row["against_v2"])] if "against_v2" in row else cells


def _peer_cells(row: Record, peers: list[str]) -> list[str]:
    us = row["peers"]["us"] if row["peers"] else {}
    return [f"{us[name]:.1f}" if name in us else "" for name in peers]


def _notes(record: Record) -> list[str]:
    costs = (
        f"Measured in the same run, in us: {ceilings_text(record)}; the host's time for an eager call from CuPy "
        f"arrays, which should be at most {HOST_US:.0f}, {_host_costs(record)}."
    )
    return [costs, *source_line(record)]


def _host_costs(record: Record) -> str:
    return "; ".join(
        f"{op} " + ", ".join(f"{us[name]:.1f} {text}" for name, text in CALLS.items())
        for op, us in record["host_us"].items()
    )
