"""The batches that ``pagedkv bench decode`` measures, and how near to the floor each is to come.

A target is a ratio to the floor of the same run, for 16-bit caches with heads of 128 and blocks of 16. It was set from
what a prototype reached on an H200 and from what the fastest peer needs there; a short row has room for launch, table
look-up and merge, which the floor does not pay in full.
"""

from dataclasses import dataclass

import numpy as np

from .bench_shape import is_plain, shape_name
from .markdown import Record

SPREAD = 0.8  # of the logarithm of a ragged batch's lengths
V1_ALLOWANCE = 1.1  # times v2's target: a single pass cannot divide what does not come out even
OTHER_SIZES = 1.1  # the target of other head and block sizes, and of ragged batches
FP8_SHARE = 1.15 / 2  # of the time with a 16-bit cache, which has twice the bytes
HOST_US = 25.0  # that an eager call with one launch may keep the host
LONG_US = 29.0  # a floor from which bytes, and not latency, decide
VARLEN_ALLOWANCE = 1.03  # times v2, of the same run on a packed cache
# Ops by the layout of the cache, and what they are in the package. Beside varlen v2 has a packed cache of its own.
OPS = {"packed": ("v1", "v2"), "NHD": ("varlen", "v2"), "HND": ("varlen", "v2")}
FUNCTIONS = {"v1": "paged_attention_v1", "v2": "paged_attention_v2", "varlen": "flash_attn_varlen_func"}


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One query token for each of ``num_seqs`` sequences of ``context`` tokens, in a ragged batch on average."""

    num_seqs: int
    context: int
    num_heads: int
    num_kv_heads: int
    target: float | None = None  # v2's
    fills_card: bool = False  # by sequences and kv heads alone, so that v1 has a target too
    is_ragged: bool = False

    @property
    def name(self) -> str:
        context = "ragged" if self.is_ragged else str(self.context)
        return f"{self.num_seqs}x{context}-{self.num_heads}/{self.num_kv_heads}"

    def seq_lens(self) -> np.ndarray:
        """Tokens of each sequence. Those of a ragged batch are log-normal, the same in every run."""
        if not self.is_ragged:
            return np.full(self.num_seqs, self.context, np.int32)
        drawn = np.random.default_rng(0).lognormal(0, SPREAD, self.num_seqs)
        return np.maximum(1, np.rint(drawn * (self.context / drawn.mean()))).astype(np.int32)


ROWS = (
    DecodeRow(1, 1024, 32, 8, 1.45),
    DecodeRow(1, 4096, 32, 8, 1.25),
    DecodeRow(1, 32768, 32, 8, 1.07),
    DecodeRow(1, 131072, 64, 8, 1.04),
    DecodeRow(8, 4096, 64, 8, 1.07),
    DecodeRow(8, 4096, 32, 32, 1.03),
    DecodeRow(32, 4096, 32, 8, 1.03, fills_card=True),
    DecodeRow(32, 2048, 32, 32, 1.025, fills_card=True),
    DecodeRow(64, 8192, 32, 8, 1.015, fills_card=True),
    DecodeRow(128, 8192, 64, 8, 1.015, fills_card=True),
    DecodeRow(256, 1024, 64, 8, 1.035, fills_card=True),
    DecodeRow(256, 2048, 64, 8, OTHER_SIZES, is_ragged=True),
)
# Where v1 and v2 cross over the context, for batches of several sizes: what ``paged_attention`` chooses by.
CROSSOVER_TOKENS = 2**19  # of a batch, at most
CROSSOVER = tuple(
    DecodeRow(num_seqs, context, 32, 8)
    for num_seqs in (1, 4, 16, 64, 256)
    for context in (256, 1024, 4096, 16384)
    if num_seqs * context <= CROSSOVER_TOKENS
)
ROWS_BY_NAME = {row.name: row for row in ROWS}


def nbytes(row: DecodeRow, head_size: int, itemsize: int) -> int:
    """Bytes of all keys and values."""
    return 2 * int(row.seq_lens().sum()) * row.num_kv_heads * head_size * itemsize


def target_ratio(row: DecodeRow, shape: Record, op: str, floor_us: float, plain: Record | None) -> float | None:
    """At most how many times the floor ``op`` should take, or None where nothing was set.

    ``plain`` is the same row with a cache of the query's dtype, which is what fp8 is measured by.
    """
    if row.target is None or shape["dtype"] == "float32" or (op == "v1" and not row.fills_card):
        return None
    if shape["kv_cache_dtype"] != "auto":
        return None if plain is None or op not in plain["us"] else _fp8_target_us(plain, op) / floor_us
    return (row.target if is_plain(shape) else OTHER_SIZES) * (V1_ALLOWANCE if op == "v1" else 1)


def _fp8_target_us(plain: Record, op: str) -> float:
    """Half of the bytes in little more than half of the time; where latency decides, in no more than the same."""
    return plain["us"][op] * (FP8_SHARE if plain["floor_us"] > LONG_US else 1)


def record_name(shape: Record, is_crossover: bool = False) -> str:
    """``decode``, and of another shape or other rows what sets it apart."""
    return "-".join([shape_name("decode", shape, layout="packed"), *["crossover"] * is_crossover])
