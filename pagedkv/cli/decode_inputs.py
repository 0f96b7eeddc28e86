"""What ``pagedkv bench decode`` reads, a packed cache of random numbers made where it is needed, and the truth of it.

The arrays are NumPy's or, on a card, CuPy's: up to many GB, so that they are drawn in pieces and never pass the host.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pagedkv.layout import cache_shapes

from . import reference
from .compare import Comparison, compare_rows
from .decode_rows import DecodeRow
from .inputs import K_SCALE, V_SCALE, normal, on_host, poisoned, scattered_tables

PIECE = 1 << 26  # numbers drawn at once
DIFFERENT = 1 << 16  # numbers of which a cache is made


@dataclass
class DecodeInputs:
    """One batch: ``arrays`` and ``options`` are what both ops are called with."""

    xp: Any  # NumPy or CuPy
    row: DecodeRow
    dtype: np.dtype
    kv_cache_dtype: str
    head_size: int
    block_size: int

    def __post_init__(self) -> None:
        random = np.random.default_rng(1)
        self.seq_lens = self.row.seq_lens()
        self.tables, num_blocks = scattered_tables(random, self.seq_lens, self.block_size)
        axes = (num_blocks, self.block_size, self.row.num_kv_heads, self.head_size)
        shapes = cache_shapes("packed", *axes, self.cache_dtype)
        sides = zip(shapes, (K_SCALE, V_SCALE), strict=True)
        key_cache, value_cache = (self._random_cache(shape, scale, i) for i, (shape, scale) in enumerate(sides))
        query_shape = (self.row.num_seqs, self.row.num_heads, self.head_size)
        self.arrays = {
            "query": self.xp.asarray(normal(random, query_shape, self.dtype)),
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_tables": self.xp.asarray(self.tables),
            "seq_lens": self.xp.asarray(self.seq_lens),
        }
        scales = {} if self.kv_cache_dtype == "auto" else {"k_scale": K_SCALE, "v_scale": V_SCALE}
        self.options = {"kv_cache_dtype": self.kv_cache_dtype, **scales}

    @property
    def cache_dtype(self) -> np.dtype:
        return self.dtype if self.kv_cache_dtype == "auto" else np.dtype(np.uint8)

    def new_out(self) -> Any:
        """Where a result goes: NaN, so that what is not written shows."""
        return poisoned(self.xp, self.arrays["query"].shape, self.dtype)

    def used_blocks(self) -> np.ndarray:
        """The ids of all blocks that are read, sequence by sequence."""
        counts = -(-self.seq_lens // self.block_size)
        return np.concatenate([row[:count] for row, count in zip(self.tables, counts, strict=True)])

    def _random_cache(self, shape: tuple[int, ...], scale: float, seed: int) -> Any:
        """Normally distributed numbers, as the cache holds them."""
        numbers = normal(np.random.default_rng(seed), (1, DIFFERENT), self.dtype)
        codes = reference.encoded(numbers, self.kv_cache_dtype, scale)[0].view(f"u{self.cache_dtype.itemsize}")
        codes, random = self.xp.asarray(codes), self.xp.random.default_rng(seed)
        cache = self.xp.empty(int(np.prod(shape)), codes.dtype)
        for first in range(0, cache.size, PIECE):
            piece = cache[first : first + PIECE]
            words = random.integers(0, 2**32, -(-piece.size // 2), dtype=np.uint32)
            piece[...] = codes[words.view(np.uint16)[: piece.size]]
        return cache.view(self.cache_dtype).reshape(shape)

    # ---- truth ------------------------------------------------------------------------------------------------------

    def check(self, out: Any) -> Comparison:
        """A result of these inputs against attention in float64, all sequences and heads."""
        return compare_rows("out", on_host(out), *self._truth)

    @cached_property
    def _truth(self) -> tuple[np.ndarray, np.ndarray]:
        """Attention in float64 and in float32."""
        return self._attention(np.float64), self._attention(np.float32)

    def _attention(self, precision: type) -> np.ndarray:
        query = self.arrays["query"].astype(np.float32).astype(precision)
        num_seqs, num_heads, head_size = query.shape
        grouped = query.reshape(num_seqs, self.row.num_kv_heads, -1, head_size)
        out = self.xp.empty_like(grouped)
        for sequence, seq_len in enumerate(self.seq_lens.tolist()):
            blocks = self.arrays["block_tables"][sequence, : -(-seq_len // self.block_size)]
            for head in range(self.row.num_kv_heads):
                key = self._numbers("key_cache", blocks, head, K_SCALE, precision).swapaxes(1, 2)
                value = self._numbers("value_cache", blocks, head, V_SCALE, precision).swapaxes(1, 2)
                rows = (side.reshape(-1, head_size)[:seq_len] for side in (key, value))
                out[sequence, head] = attention(grouped[sequence, head], *rows)
        return on_host(out).reshape(num_seqs, num_heads, head_size)

    def _numbers(self, name: str, blocks: Any, head: int, scale: float, precision: type) -> Any:
        """What some blocks hold of a head, as numbers."""
        codes = self.arrays[name].view(f"u{self.cache_dtype.itemsize}")[blocks, head]
        if self.kv_cache_dtype == "auto":
            return codes.view(self.dtype).astype(np.float32).astype(precision)
        every_code = np.arange(256, dtype=np.uint8).view(reference.FP8[self.kv_cache_dtype])  # CuPy has no float8
        return self.xp.asarray(every_code.astype(precision) * precision(np.float32(scale)))[codes]


def attention(query: Any, key: Any, value: Any) -> Any:
    """Of one token ``[queries_per_kv, head_size]`` over ``[seq_len, head_size]``, by sums of products: a matrix product
    on a card would need a library that nothing else here needs."""
    scores = (key[:, None] * query).sum(axis=-1) * query.dtype.type(query.shape[-1] ** -0.5)
    weights = np.exp(scores - scores.max(axis=0))
    return (weights[..., None] * value[:, None]).sum(axis=0) / weights.sum(axis=0)[:, None]
