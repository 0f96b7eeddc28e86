"""What follows from the times of a decode record: rates, ratios to the floor, targets; and the times of others."""

from typing import Any

from .bench_peers import comparable, same_batch, source
from .decode_rows import ROWS_BY_NAME, VARLEN_ALLOWANCE, DecodeRow, target_ratio
from .markdown import Record

PEER_SIZES = ("num_seqs", "context", "num_heads", "num_kv_heads")
NO_PEER = (*PEER_SIZES, "read_floor")


def completed(record: Record, plain: Record | None, peers: Record | None) -> Record:
    """The record with what follows. ``plain`` is the record of an unquantised cache, ``peers`` the times of others."""
    peers = comparable(peers, record["shape"])
    plain_rows = {} if plain is None else {row["row"]: row for row in plain["rows"]}
    rows = [
        {
            **row,
            **_derived(row, record["shape"], plain_rows.get(row["row"])),
            "peers": None if peers is None else peer_times(row, peers),
        }
        for row in record["rows"]
    ]
    return {**record, "peers": source(peers), "rows": rows}


def _derived(row: Record, shape: Record, plain: Record | None) -> Record:
    known = ROWS_BY_NAME.get(row["row"]) or DecodeRow(*(row[name] for name in PEER_SIZES))
    ratios = {op: us / row["floor_us"] for op, us in row["us"].items()}
    targets = {op: target_ratio(known, shape, op, row["floor_us"], plain) for op in ratios}
    return {
        "floor_tb_per_s": row["nbytes"] / row["floor_us"] / 1e6,
        "tb_per_s": {op: row["nbytes"] / us / 1e6 for op, us in row["us"].items()},
        "ratio": ratios,
        "target_ratio": targets,
        "met": {op: None if target is None else ratios[op] <= target for op, target in targets.items()},
        **_against_v2(row["us"]),
    }


def _against_v2(us: dict[str, float]) -> Record:
    """Where both were measured: how many times v2's the time of varlen is."""
    if not {"varlen", "v2"} <= us.keys():
        return {}
    ratio = us["varlen"] / us["v2"]
    return {"against_v2": {"ratio": ratio, "target_ratio": VARLEN_ALLOWANCE, "met": ratio <= VARLEN_ALLOWANCE}}


def peer_times(row: Record, peers: Record) -> Record | None:
    """Times of others for these sizes, and the floor of their run; None where there are none."""
    entry = None if row["is_ragged"] else same_batch(peers["decode_us"], row, PEER_SIZES)
    if entry is None:
        return None
    us: dict[str, Any] = {name: us for name, us in entry.items() if name not in NO_PEER and us is not None}
    return {"floor_us": entry["read_floor"], "us": us}
