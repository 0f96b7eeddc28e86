"""Validated problems: what an op was asked to do, in views and numbers. Backends take them as they are."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import ArrayView
from .layout import CacheShape, CacheStrides


@dataclass(frozen=True, slots=True)
class Scale:
    """An fp8 scale: a number, or a float32 array of one per kv head (of one element: for all heads)."""

    name: str
    value: float = 1.0
    array: ArrayView | None = None

    @property
    def per_head(self) -> bool:
        return self.array is not None and self.array.shape != (1,) and self.array.ndim == 1


@dataclass(frozen=True, slots=True)
class PagedCache:
    """A key and a value cache: storage, format, layout, sizes, strides and scales."""

    key: ArrayView
    value: ArrayView
    format: np.dtype  # of the values: a float dtype or an fp8 one (storage then is uint8 or that dtype)
    layout: str  # "NHD", "HND" or "packed"
    shape: CacheShape
    key_strides: CacheStrides
    value_strides: CacheStrides
    k_scale: Scale
    v_scale: Scale


@dataclass(frozen=True, slots=True)
class CacheWrite:
    """``reshape_and_cache`` and ``reshape_and_cache_flash``."""

    key: ArrayView
    value: ArrayView
    cache: PagedCache
    slot_mapping: ArrayView

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What happens between ``q . k`` and the softmax, in this order. ``window`` is (left, right), -1 for no bound."""

    scale: float
    softcap: float
    alibi_slopes: ArrayView | None
    window: tuple[int, int]
    sinks: ArrayView | None


@dataclass(frozen=True, slots=True)
class Attention:
    """A paged read. Without ``query_start_loc`` sequence s has one query, row s (decode)."""

    query: ArrayView
    cache: PagedCache
    block_table: ArrayView
    seq_lens: ArrayView
    query_start_loc: ArrayView | None
    options: ScoreOptions
    out: ArrayView | None = None  # set, in a problem that a backend gets
    lse_out: ArrayView | None = None
    max_query_len: int | None = None
    max_seq_len: int | None = None
    partition_size: int = 0  # decode: keys per partition, 0 for a single pass
    has_equal_shares: bool = False  # the caller left partitions or splits open: kernels may share keys out evenly
    num_splits: int = 1  # varlen
    workspace: ArrayView | None = None

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def num_partials(self) -> int:
        """Partial states per query and head: partitions or splits; 0 where a single pass needs none."""
        if self.query_start_loc is not None:
            return self.num_splits if self.num_splits > 1 else 0
        return -(-self.longest // self.partition_size) if self.partition_size else 0

    @property
    def longest(self) -> int:
        """Tokens that no sequence exceeds: what a row of the table holds, or the caller's bound."""
        capacity = self.block_table.shape[1] * self.cache.shape.block_size
        return capacity if self.max_seq_len is None else min(capacity, self.max_seq_len)


@dataclass(frozen=True, slots=True)
class MergeStates:
    """``merge_attn_states``."""

    prefix_output: ArrayView
    prefix_lse: ArrayView
    suffix_output: ArrayView
    suffix_lse: ArrayView
    out: ArrayView
    lse_out: ArrayView


@dataclass(frozen=True, slots=True)
class AdvanceDecode:
    """``advance_decode``."""

    block_table: ArrayView
    seq_lens: ArrayView
    slot_mapping: ArrayView
    query_start_loc: ArrayView
    positions: ArrayView | None
    block_size: int

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def max_blocks(self) -> int:
        return self.block_table.shape[1]


@dataclass(frozen=True, slots=True)
class BlockMove:
    """``copy_blocks``, whose targets are its sources, and ``swap_blocks``; arrays by the names in messages."""

    sources: dict[str, ArrayView]
    targets: dict[str, ArrayView]
    mapping: ArrayView  # [num_pairs, 2]: source, destination
    stream: Any = None  # of whatever framework; None for the current one

    @property
    def is_copy(self) -> bool:
        return self.sources is self.targets

    @property
    def touches_host(self) -> bool:
        """Whether one side of a swap is in host memory, which a kernel reaches through a link."""
        return not self.is_copy and any(array.on_host for array in self.arrays)

    @property
    def sides(self) -> list[tuple[ArrayView, ArrayView]]:
        """Source and target of each cache."""
        return list(zip(self.sources.values(), self.targets.values(), strict=True))

    @property
    def arrays(self) -> list[ArrayView]:
        """All arrays, each once."""
        return [*self.targets.values(), *({} if self.is_copy else self.sources).values()]

    @property
    def reference(self) -> ArrayView:
        """The array that says where the move runs: one on a device if there is one."""
        return next((array for array in self.arrays if not array.on_host), self.arrays[0])


@dataclass(frozen=True, slots=True)
class GatherCache:
    """``gather_cache``."""

    cache: PagedCache
    block_table: ArrayView
    cu_seq_lens: ArrayView
    seq_starts: ArrayView | None  # None: every range starts with its sequence
    key_out: ArrayView
    value_out: ArrayView

    @property
    def num_seqs(self) -> int:
        return self.block_table.shape[0]

    @property
    def num_rows(self) -> int:
        """Of the outputs; ``cu_seq_lens`` may fill fewer."""
        return self.key_out.shape[0]


@dataclass(frozen=True, slots=True)
class ConvertLayout:
    """``convert_layout``: two caches of the same sizes and dtype."""

    source: PagedCache
    target: PagedCache
