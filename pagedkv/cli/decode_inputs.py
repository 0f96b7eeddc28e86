"""What ``pagedkv bench decode`` reads: one query token for each sequence of a row."""

from typing import Any

import numpy as np

from .bench_cache import CacheKind
from .bench_inputs import BatchInputs, random_batch
from .decode_rows import DecodeRow


def decode_inputs(xp: Any, row: DecodeRow, kind: CacheKind) -> BatchInputs:
    """A batch of such sequences. ``xp`` is NumPy or, on a card, CuPy."""
    query_lens = np.ones(row.num_seqs, np.int32)
    return random_batch(xp, kind, row.num_heads, row.num_kv_heads, row.seq_lens(), query_lens)
