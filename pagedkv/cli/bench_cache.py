"""A paged cache of random numbers, as benches read it, and what its blocks hold as numbers.

The arrays are NumPy's or, on a card, CuPy's: up to many GB, so that they are drawn in pieces and never pass the host.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pagedkv.dtypes import storage_dtype
from pagedkv.layout import cache_shapes

from . import reference
from .inputs import K_SCALE, V_SCALE, normal
from .markdown import Record

PIECE = 1 << 26  # numbers drawn at once
DIFFERENT = 1 << 16  # numbers of which a cache is made
SCALES = {"key": K_SCALE, "value": V_SCALE}


@dataclass(frozen=True, slots=True)
class CacheKind:
    """What a cache is like, whatever its blocks and heads are in number."""

    dtype: np.dtype  # of queries
    kv_cache_dtype: str
    layout: str
    head_size: int
    block_size: int

    @property
    def cache_dtype(self) -> np.dtype:
        return storage_dtype(self.dtype, self.kv_cache_dtype)

    @property
    def shape(self) -> Record:
        """As a record says it."""
        return asdict(self) | {"dtype": self.dtype.name}


@dataclass
class RandomCache:
    """Keys and values, ``key`` and ``value``: normally distributed numbers in every slot."""

    xp: Any  # NumPy or CuPy
    kind: CacheKind
    num_blocks: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        kind = self.kind
        axes = (self.num_blocks, kind.block_size, self.num_kv_heads, kind.head_size)
        key_shape, value_shape = cache_shapes(kind.layout, *axes, kind.cache_dtype)
        self.key = self._random(key_shape, SCALES["key"], seed=0)
        self.value = self._random(value_shape, SCALES["value"], seed=1)

    @property
    def has_scales(self) -> bool:
        return self.kind.kv_cache_dtype != "auto"

    def _random(self, shape: tuple[int, ...], scale: float, seed: int) -> Any:
        """As the cache holds them."""
        dtype = self.kind.cache_dtype
        numbers = normal(np.random.default_rng(seed), (1, DIFFERENT), self.kind.dtype)
        codes = reference.encoded(numbers, self.kind.kv_cache_dtype, scale)[0].view(f"u{dtype.itemsize}")
        codes, random = self.xp.asarray(codes), self.xp.random.default_rng(seed)
        cache = self.xp.empty(math.prod(shape), codes.dtype)
        for first in range(0, cache.size, PIECE):
            piece = cache[first : first + PIECE]
            words = random.integers(0, 2**32, -(-piece.size // 2), dtype=np.uint32)
            piece[...] = codes[words.view(np.uint16)[: piece.size]]
        return cache.view(dtype).reshape(shape)

    def rows(self, side: str, blocks: Any, head: int, precision: type) -> Any:
        """What some blocks hold of a head, token by token, as numbers ``[tokens, head_size]``."""
        kind = self.kind
        codes = getattr(self, side).view(f"u{kind.cache_dtype.itemsize}")
        codes = (codes[:, :, head] if kind.layout == "NHD" else codes[:, head])[blocks]
        numbers = self._numbers(codes, SCALES[side], precision)
        if kind.layout == "packed":
            numbers = numbers.swapaxes(1, 2)  # tokens before features
        return numbers.reshape(-1, kind.head_size)

    def _numbers(self, codes: Any, scale: float, precision: type) -> Any:
        if not self.has_scales:
            return codes.view(self.kind.dtype).astype(np.float32).astype(precision)
        every_code = np.arange(256, dtype=np.uint8).view(reference.FP8[self.kind.kv_cache_dtype])  # CuPy has no float8
        return self.xp.asarray(every_code.astype(precision) * precision(np.float32(scale)))[codes]
