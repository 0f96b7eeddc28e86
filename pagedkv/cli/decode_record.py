"""What follows from the times of a decode record: rates, ratios to the floor, targets; and what other libraries needed.

Those were measured once on the same kind of card and are kept beside the records, in ``results/<card>/peers.json``.
"""

from typing import Any

from .decode_rows import DEFAULT_SHAPE, ROWS_BY_NAME, DecodeRow, target_ratio
from .markdown import Record

SOURCE = ("card", "date", "method", "versions")  # of the times of others
PEER_SIZES = ("num_seqs", "context", "num_heads", "num_kv_heads")
NO_PEER = (*PEER_SIZES, "read_floor")


def completed(record: Record, plain: Record | None, peers: Record | None) -> Record:
    """The record with what follows. ``plain`` is the record of an unquantised cache, ``peers`` the times of others."""
    peers = peers if peers is not None and _is_comparable(record["shape"]) else None
    plain_rows = {} if plain is None else {row["row"]: row for row in plain["rows"]}
    rows = [
        {
            **row,
            **_derived(row, record["shape"], plain_rows.get(row["row"])),
            "peers": None if peers is None else peer_times(row, peers),
        }
        for row in record["rows"]
    ]
    source = None if peers is None else {name: peers[name] for name in SOURCE}
    return {**record, "peers": source, "rows": rows}


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
    }


def peer_times(row: Record, peers: Record) -> Record | None:
    """Times of others for these sizes, and the floor of their run; None where there are none."""
    if row["is_ragged"]:
        return None
    for entry in peers["decode_us"]:
        if all(entry[name] == row[name] for name in PEER_SIZES):
            us: dict[str, Any] = {name: us for name, us in entry.items() if name not in NO_PEER and us is not None}
            return {"floor_us": entry["read_floor"], "us": us}
    return None


def _is_comparable(shape: Record) -> bool:
    """Whether the others were measured on such a cache: 16 bits, of either kind."""
    same = ("kv_cache_dtype", "head_size", "block_size")
    return shape["dtype"] != "float32" and all(shape[name] == DEFAULT_SHAPE[name] for name in same)
