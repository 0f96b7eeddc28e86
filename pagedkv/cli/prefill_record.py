"""What follows from the times of a prefill record: rates, targets; and the rates of other libraries."""

from .bench_peers import comparable, same_batch, source
from .markdown import Record
from .prefill_rows import target_tflops

PEER_SIZES = ("num_seqs", "length", "num_heads", "num_kv_heads")


def completed(record: Record, peers: Record | None) -> Record:
    """The record with what follows. ``peers`` are the rates of others."""
    peers = comparable(peers, record["shape"])
    rows = [{**row, **_derived(row, record["shape"]), "peers": peer_rates(row, peers)} for row in record["rows"]]
    return {**record, "peers": source(peers), "rows": rows}


def _derived(row: Record, shape: Record) -> Record:
    tflops, target = row["flops"] / row["us"] / 1e6, target_tflops(row["row"], shape)
    ratio = None if target is None else tflops / target
    return {
        "tflop_per_s": tflops,
        "target_tflop_per_s": target,
        "ratio": ratio,
        "met": None if ratio is None else ratio >= 1,
    }


def peer_rates(row: Record, peers: Record | None) -> dict[str, float] | None:
    """TFLOP/s of others for these sizes; None where there are none."""
    entry = None if peers is None else same_batch(peers.get("prefill_tflops", ()), row, PEER_SIZES)
    if entry is None:
        return None
    return {name: rate for name, rate in entry.items() if name not in PEER_SIZES and rate is not None}
