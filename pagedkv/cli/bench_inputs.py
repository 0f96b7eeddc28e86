"""What a bench reads: queries, block tables and a cache of random numbers, and the truth of it.

The queries of a sequence are its last tokens, and none sees a later key: in decode as in prefill.
"""

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

import pagedkv

from .bench_cache import CacheKind, RandomCache
from .bench_truth import attention, checked_tokens, keys_seen
from .compare import Comparison, compare_rows
from .inputs import K_SCALE, V_SCALE, normal, on_host, poisoned, scattered_tables

VARLEN, CASCADE = "flash_attn_varlen_func", "cascade_attention"


@dataclass
class BatchInputs:
    """One batch. ``window``: tokens to the left that a query sees beside its own, -1 for all."""

    cache: RandomCache
    query: Any  # [num_tokens, num_heads, head_size]
    tables: np.ndarray  # [num_seqs, max_blocks]
    seq_lens: np.ndarray
    query_lens: np.ndarray
    window: int = -1

    def __post_init__(self) -> None:
        self.xp, self.kind = self.cache.xp, self.cache.kind
        self.starts = np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)
        names = ("tables", "seq_lens", "starts")
        self.indices = {name: self.xp.asarray(getattr(self, name)) for name in names}

    def part(self, sequences: slice) -> "BatchInputs":
        """Some of the sequences, in the same cache."""
        tokens = slice(int(self.starts[sequences.start]), int(self.starts[sequences.stop]))
        lens = {name: getattr(self, name)[sequences] for name in ("tables", "seq_lens", "query_lens")}
        return replace(self, query=self.query[tokens], **lens)

    def used_blocks(self) -> np.ndarray:
        """The ids of all blocks that hold tokens, sequence by sequence."""
        return np.concatenate([row[:count] for row, count in zip(self.tables, self._block_counts(), strict=True)])

    def _block_counts(self) -> list[int]:
        return (-(-self.seq_lens // self.kind.block_size)).tolist()

    # ---- arguments --------------------------------------------------------------------------------------------------

    def arguments(self, op: str) -> dict[str, Any]:
        """What an op is called with, but for the memory that may be given."""
        if op not in (VARLEN, CASCADE):
            return self._decode_arguments()
        arguments = self._varlen_arguments()
        return arguments if op == CASCADE else arguments | {"causal": True, "window_size": (self.window, 0)}

    def _decode_arguments(self) -> dict[str, Any]:
        return {
            "query": self.query,
            "key_cache": self.cache.key,
            "value_cache": self.cache.value,
            "block_tables": self.indices["tables"],
            "seq_lens": self.indices["seq_lens"],
            **self._format("scale"),
        }

    def _varlen_arguments(self) -> dict[str, Any]:
        return {
            "q": self.query,
            "k": self.cache.key,
            "v": self.cache.value,
            "cu_seqlens_q": self.indices["starts"],
            "seqused_k": self.indices["seq_lens"],
            "block_table": self.indices["tables"],
            "max_seqlen_q": int(self.query_lens.max()),
            "max_seqlen_k": int(self.seq_lens.max()),
            "layout": self.kind.layout,
            **self._format("descale"),
        }

    def _format(self, scale: str) -> dict[str, Any]:
        scales = {f"k_{scale}": K_SCALE, f"v_{scale}": V_SCALE} if self.cache.has_scales else {}
        return {"kv_cache_dtype": self.kind.kv_cache_dtype, **scales}

    def memory(self, op: str) -> dict[str, Any]:
        """All memory that an op may be given."""
        out = {"out": self.new_out()}
        if op in ("paged_attention_v1", CASCADE):
            return out
        num_tokens, num_heads, head_size = self.query.shape
        longest = self.tables.shape[1] * self.kind.block_size
        sizes = {"num_tokens": num_tokens, "num_heads": num_heads, "head_size": head_size, "max_seq_len": longest}
        return out | {"workspace": self.xp.empty(pagedkv.workspace_nbytes(op, **sizes), np.uint8)}

    def new_out(self) -> Any:
        """Where a result goes: NaN, so that what is not written shows."""
        return poisoned(self.xp, self.query.shape, self.kind.dtype)

    # ---- check ------------------------------------------------------------------------------------------------------

    def check(self, out: Any) -> Comparison:
        """A result of these inputs against attention in float64: some tokens of each sequence, all their heads."""
        if bool(self.xp.isnan(out.astype(np.float32)).any()):
            return Comparison("out", math.inf, 0.0, "there are NaNs")
        comparison = compare_rows("out", on_host(self._checked_of(out)), *self._truth)
        return replace(comparison, detail=re.sub(r"(?<=token )\d+", self._name_of_token, comparison.detail))

    def _name_of_token(self, number: re.Match) -> str:
        return str(self.checked[int(number[0])])

    def _checked_of(self, rows: Any) -> Any:
        """The rows of checked tokens, as unsigned integers on their way: an index need not know of bfloat16."""
        return rows.view(f"u{rows.itemsize}")[self.xp.asarray(self.checked)].view(rows.dtype)

    @cached_property
    def checked(self) -> np.ndarray:
        """The tokens that are compared."""
        return checked_tokens(self.starts)

    @cached_property
    def _truth(self) -> tuple[np.ndarray, np.ndarray]:
        """Attention in float64 and in float32."""
        query, seen = self._checked_of(self.query), keys_seen(self.checked, self.starts, self.seq_lens, self.window)
        tables = [table[:count] for table, count in zip(self.indices["tables"], self._block_counts(), strict=True)]
        exact, plain = (attention(self.cache, query, tables, seen, precision) for precision in (np.float64, np.float32))
        return exact, plain


def random_batch(
    xp: Any,
    kind: CacheKind,
    num_heads: int,
    num_kv_heads: int,
    seq_lens: np.ndarray,
    query_lens: np.ndarray,
    window: int = -1,
) -> BatchInputs:
    """A batch whose blocks are scattered over a cache of its own."""
    random = np.random.default_rng(1)
    tables, num_blocks = scattered_tables(random, seq_lens, kind.block_size)
    query = random_query(xp, kind, int(query_lens.sum()), num_heads, random)
    return BatchInputs(RandomCache(xp, kind, num_blocks, num_kv_heads), query, tables, seq_lens, query_lens, window)


def random_query(xp: Any, kind: CacheKind, num_tokens: int, num_heads: int, random: np.random.Generator) -> Any:
    """Queries of so many tokens."""
    return xp.asarray(normal(random, (num_tokens, num_heads, kind.head_size), kind.dtype))
