"""The Markdown table of a ``bench decode`` record."""

from .decode_rows import HOST_US, record_name
from .markdown import Record, origin, table_lines
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
    """A row per batch: the floor, both ops with their ratios to it, and what others needed."""
    ops = list(record["rows"][0]["us"])
    peers = list(PEER_NAMES) if record["peers"] else []
    titles = ["sequences", "context", "heads", "bytes", "floor"]
    titles += [title for op in ops for title in (op, f"{op} / floor")]
    titles += [PEER_NAMES[name] for name in peers]
    rows = [[*_batch(row), *_times(row, ops), *_peer_cells(row, peers)] for row in record["rows"]]
    return "\n".join([*_introduction(record), "", *table_lines(titles, 3, rows), "", *_notes(record)])


def _introduction(record: Record) -> list[str]:
    shape = record["shape"]
    is_crossover = record["name"] == record_name(shape, is_crossover=True)
    purpose = " v1 against v2 over the context, for batches of several sizes." if is_crossover else ""
    return [
        f"{origin(record)}: {shape['dtype']}, {shape['layout']} cache {shape['kv_cache_dtype']}, heads of "
        f"{shape['head_size']}, blocks of {shape['block_size']}, {record['method']}.{purpose}",
        "",
        "us, in brackets TB/s. The floor reads the same blocks through a table and computes nothing; a ratio to "
        "it has its target in brackets, and is bold where it is met.",
    ]


def _batch(row: Record) -> list[str]:
    context = f"{row['context']:,}" + (" on average" if row["is_ragged"] else "")
    return [f"{row['num_seqs']}", context, f"{row['num_heads']}/{row['num_kv_heads']}", size(row["nbytes"])]


def _times(row: Record, ops: list[str]) -> list[str]:
    cells = [f"{row['floor_us']:.1f} ({row['floor_tb_per_s']:.2f})"]
    for op in ops:
        cells += [f"{row['us'][op]:.1f} ({row['tb_per_s'][op]:.2f})", _ratio(row, op)]
    return cells


def _ratio(row: Record, op: str) -> str:
    ratio, target = f"{row['ratio'][op]:.3f}", row["target_ratio"][op]
    if target is None:
        return ratio
    return f"**{ratio}** ({target:.3f})" if row["met"][op] else f"{ratio} ({target:.3f})"


def _peer_cells(row: Record, peers: list[str]) -> list[str]:
    us = row["peers"]["us"] if row["peers"] else {}
    return [f"{us[name]:.1f}" if name in us else "" for name in peers]


def _notes(record: Record) -> list[str]:
    read = record["ceilings"]["read"]
    lines = [
        f"Measured in the same run, in us: empty kernel {record['ceilings']['empty_us']:.2f}; best read "
        f"{size(read['nbytes'])} in {read['us']:.1f} ({read['nbytes'] / read['us'] / 1e6:.2f} TB/s); the host's time "
        f"for an eager call from CuPy arrays, which should be at most {HOST_US:.0f}, {_host_costs(record)}."
    ]
    if record["peers"]:
        source = record["peers"]
        versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
        lines += ["", f"Others as recorded on {source['date']}, {source['card']}: {source['method']}; {versions}."]
    return lines


def _host_costs(record: Record) -> str:
    return "; ".join(
        f"{op} " + ", ".join(f"{us[name]:.1f} {text}" for name, text in CALLS.items())
        for op, us in record["host_us"].items()
    )
