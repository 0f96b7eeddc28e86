"""Validation of caches and their scales, shared by writes and reads."""

from typing import Any

import numpy as np

from . import checks
from . import layout as layouts
from .arrays import ArrayView, view
from .checks import wrong
from .dtypes import FLOAT32, FLOATS, FP8, KV_CACHE_DTYPES, UINT8
from .layout import CacheShape, CacheStrides
from .problem import PagedCache, Scale

MAX_HEAD_SIZE = 256
HEAD_SIZE_STEP = 8
PACKED_BLOCK_SIZES = (8, 16, 32, 64, 128, 256)


def _cache_format(cache: ArrayView, name: str, dtype: np.dtype, like: str, kv_cache_dtype: str) -> np.dtype:
    checks.check_choice(kv_cache_dtype, "kv_cache_dtype", tuple(KV_CACHE_DTYPES))
    named = KV_CACHE_DTYPES[kv_cache_dtype]
    if cache.dtype in FP8:  # carries its own format
        if named not in (None, cache.dtype):
            raise TypeError(
                wrong(name, f"{named.name} or uint8 for kv_cache_dtype={kv_cache_dtype!r}", cache.dtype.name)
            )
        return cache.dtype
    if named is not None:
        checks.check_dtype(cache, name, (UINT8, named))
        return named
    if cache.dtype == UINT8:
        raise TypeError(f"{name}: expected kv_cache_dtype='fp8' or another fp8 format for uint8 storage, got 'auto'")
    if cache.dtype != dtype:
        raise TypeError(wrong(name, f"{dtype.name} like {like} for kv_cache_dtype='auto'", cache.dtype.name))
    return dtype


def _scale(scale: Any, name: str, num_kv_heads: int) -> Scale:
    if scale is None:
        return Scale(name)
    if isinstance(scale, int | float | np.integer | np.floating):
        number = checks.check_number(scale, name, "a positive number")
        if number < checks.SMALLEST:
            raise ValueError(wrong(name, "a positive number in float32's normal range", number))
        return Scale(name, value=number)
    array = view(scale, name)
    checks.check_dtype(array, name, (FLOAT32,))
    if array.shape not in ((), (1,), (num_kv_heads,)):
        raise ValueError(wrong(name, f"a number or shape (1) or ({num_kv_heads})", f"shape {array.shape}"))
    return Scale(name, array=array)


def check_scale_pair(k_scale: Any, v_scale: Any, names: tuple[str, str], num_kv_heads: int) -> tuple[Scale, Scale]:
    """The scales of K and V, both of one kind; an error for what is none."""
    k, v = (_scale(scale, name, num_kv_heads) for scale, name in zip((k_scale, v_scale), names, strict=True))
    if k.per_head != v.per_head:
        kinds = {True: "a scale per head", False: "one scale"}
        raise ValueError(wrong(names[1], f"{kinds[k.per_head]} like {names[0]}", kinds[v.per_head]))
    return k, v


def _check_head_size(shape: CacheShape) -> None:
    if shape.head_size % HEAD_SIZE_STEP or shape.head_size == 0:
        raise ValueError(wrong("head_size", f"a multiple of {HEAD_SIZE_STEP}", shape.head_size))
    if shape.head_size > MAX_HEAD_SIZE:
        raise NotImplementedError(wrong("head_size", f"at most {MAX_HEAD_SIZE}", shape.head_size))


def check_block_form(layout: str, block_size: int, num_kv_heads: int, head_size: int, storage: np.dtype) -> None:
    """ValueError or NotImplementedError for blocks that no op takes in this layout."""
    shape = CacheShape(0, block_size, num_kv_heads, head_size)
    if layout == "packed":
        check_fits_packed(shape, layouts.PACK_BYTES // storage.itemsize)
    _check_head_size(shape)


def flash_cache(key: ArrayView, value: ArrayView, names: tuple[str, str], *, layout: str, **common: Any) -> PagedCache:
    """An NHD or HND cache; ``common`` is what ``_paged_cache`` takes by keyword."""
    checks.check_choice(layout, "layout", layouts.FLASH_LAYOUTS)
    axes = {
        "NHD": "num_blocks block_size num_kv_heads head_size",
        "HND": "num_blocks num_kv_heads block_size head_size",
    }
    for cache, name in zip((key, value), names, strict=True):
        checks.check_ndim(cache, name, axes[layout])
        checks.check_contiguous(cache, name)
    checks.check_shape(value, names[1], key.shape)
    shape = layouts.flash_shape(key, layout)
    strides = (layouts.flash_strides(cache, layout) for cache in (key, value))
    return _paged_cache(key, value, names, layout, shape, *strides, **common)


def check_fits_packed(shape: CacheShape, x: int) -> None:
    """ValueError for sizes that no packed cache has."""
    if shape.head_size % x:
        raise ValueError(wrong("head_size", f"a multiple of x = {x} in the packed layout", shape.head_size))
    if shape.block_size not in PACKED_BLOCK_SIZES:
        raise ValueError(wrong("block_size", f"one of {PACKED_BLOCK_SIZES} in the packed layout", shape.block_size))


def packed_cache(key: ArrayView, value: ArrayView, names: tuple[str, str], **common: Any) -> PagedCache:
    """A packed cache; ``common`` is what ``_paged_cache`` takes by keyword."""
    checks.check_ndim(key, names[0], "num_blocks num_kv_heads head_size/x block_size x")
    checks.check_ndim(value, names[1], "num_blocks num_kv_heads head_size block_size")
    checks.check_dtype(key, names[0], (*FLOATS, UINT8, *FP8))
    shape = layouts.packed_shape(value)
    x = layouts.PACK_BYTES // key.dtype.itemsize
    check_fits_packed(shape, x)
    checks.check_shape(key, names[0], layouts.packed_key_shape(shape, x))
    for cache, name in zip((key, value), names, strict=True):
        checks.check_contiguous(cache, name, first_axis=2)
    strides = (layouts.packed_strides(cache) for cache in (key, value))
    return _paged_cache(key, value, names, "packed", shape, *strides, **common)


def _paged_cache(
    key: ArrayView,
    value: ArrayView,
    names: tuple[str, str],
    kv_layout: str,
    shape: CacheShape,
    key_strides: CacheStrides,
    value_strides: CacheStrides,
    *,
    dtype: np.dtype,
    like: str,
    kv_cache_dtype: str,
    scales: tuple[Any, Any],
    scale_names: tuple[str, str] = ("k_scale", "v_scale"),
) -> PagedCache:
    kv_format = _cache_format(key, names[0], dtype, like, kv_cache_dtype)
    checks.check_dtype(value, names[1], (key.dtype,))
    _check_head_size(shape)
    if shape.block_size < 1 or shape.num_kv_heads < 1:
        raise ValueError(wrong(names[0], "at least one slot and one head per block", f"shape {key.shape}"))
    k_scale, v_scale = check_scale_pair(*scales, scale_names, shape.num_kv_heads)
    checks.check_same_device(
        {names[0]: key, names[1]: value, scale_names[0]: k_scale.array, scale_names[1]: v_scale.array}
    )
    return PagedCache(key, value, kv_format, kv_layout, shape, key_strides, value_strides, k_scale, v_scale)
