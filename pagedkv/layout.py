"""Layouts of a paged cache: sizes and strides, decided here once. A kernel sees only the strides.

NHD     ``[num_blocks, block_size, num_kv_heads, head_size]``
HND     ``[num_blocks, num_kv_heads, block_size, head_size]``
packed  keys ``[num_blocks, num_kv_heads, head_size / x, block_size, x]``, ``x = 16 // itemsize``,
        values ``[num_blocks, num_kv_heads, head_size, block_size]``
"""

from dataclasses import dataclass

import numpy as np

from .arrays import ArrayView

FLASH_LAYOUTS = ("NHD", "HND")
LAYOUTS = (*FLASH_LAYOUTS, "packed")
PACK_BYTES = 16  # the x innermost features of a packed key cache


@dataclass(frozen=True, slots=True)
class CacheStrides:
    """Elements between neighbours along each outer axis of one cache (K or V). Packed caches fix the inner axes."""

    block: int
    token: int
    head: int


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of a paged cache, whatever its layout."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size


def flash_shape(cache: ArrayView, layout: str) -> CacheShape:
    """Sizes of an NHD or HND cache."""
    num_blocks, middle, inner, head_size = cache.shape
    block_size, num_kv_heads = (middle, inner) if layout == "NHD" else (inner, middle)
    return CacheShape(num_blocks, block_size, num_kv_heads, head_size)


def flash_strides(cache: ArrayView, layout: str) -> CacheStrides:
    """Strides of an NHD or HND cache."""
    block, middle, inner, _ = cache.strides
    return CacheStrides(block, *((middle, inner) if layout == "NHD" else (inner, middle)))


def packed_shape(value_cache: ArrayView) -> CacheShape:
    """Sizes of a packed cache, read off its values."""
    num_blocks, num_kv_heads, head_size, block_size = value_cache.shape
    return CacheShape(num_blocks, block_size, num_kv_heads, head_size)


def packed_key_shape(shape: CacheShape, x: int) -> tuple[int, ...]:
    """The key cache that belongs to a packed value cache."""
    return (shape.num_blocks, shape.num_kv_heads, shape.head_size // x, shape.block_size, x)


def cache_shapes(
    layout: str, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: np.dtype
) -> list[tuple[int, ...]]:
    """Shapes of a key and a value cache whose storage has this dtype."""
    if layout == "packed":
        shape = CacheShape(num_blocks, block_size, num_kv_heads, head_size)
        key = packed_key_shape(shape, PACK_BYTES // dtype.itemsize)
        return [key, (num_blocks, num_kv_heads, head_size, block_size)]
    block = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
    return [(num_blocks, *block, head_size)] * 2


def packed_strides(cache: ArrayView) -> CacheStrides:
    """Block and head strides of a packed key or value cache."""
    return CacheStrides(block=cache.strides[0], token=0, head=cache.strides[1])


def copy_strides(cache: ArrayView, layout: str) -> tuple[int, int, int, int]:
    """Elements between blocks, tokens, heads and packs of features of one cache. Packed values have packs too: as many
    rows of tokens."""
    x = PACK_BYTES // cache.dtype.itemsize
    if layout != "packed":
        strides = flash_strides(cache, layout)
        return strides.block, strides.token, strides.head, x
    block, head = cache.strides[:2]
    is_key, block_size = cache.ndim == 5, cache.shape[3]
    return block, x if is_key else 1, head, block_size * x


def is_contiguous(array: ArrayView, first_axis: int) -> bool:
    """Whether the axes from ``first_axis`` on are contiguous. Axes of one element may have any stride."""
    if 0 in array.shape:
        return True
    expected = 1
    for size, stride in zip(reversed(array.shape[first_axis:]), reversed(array.strides[first_axis:]), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
