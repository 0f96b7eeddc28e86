"""Validation of ``gather_cache`` and ``convert_layout``: from what the caller passed to a problem, or to an error."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from . import checks
from . import layout as layouts
from .arrays import ArrayView, empty, view
from .checks import wrong
from .dtypes import BFLOAT16, FLOAT16, FLOATS, FP8, UINT8, is_fp8
from .indices import check_row_starts
from .problem import ConvertLayout, GatherCache, PagedCache
from .validate_cache import check_fits_packed, flash_cache, packed_cache

CACHE_NAMES, OUT_NAMES = ("key_cache", "value_cache"), ("key_out", "value_out")


def gather_cache(
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    cu_seq_lens: Any,
    seq_starts: Any,
    k_scale: Any,
    v_scale: Any,
    key_out: Any,
    value_out: Any,
    *,
    num_tokens: int | None,
    dtype: Any,
    kv_cache_dtype: str,
    layout: str,
) -> GatherCache:
    """The problem of ``gather_cache``."""
    caches = view(key_cache, CACHE_NAMES[0]), view(value_cache, CACHE_NAMES[1])
    cache = _cache(caches, CACHE_NAMES, layout, kv_cache_dtype, (k_scale, v_scale))
    table = checks.index_view(block_table, "block_table", "num_seqs max_blocks")
    row_starts = checks.index_view(cu_seq_lens, "cu_seq_lens", "num_seqs+1")
    checks.check_shape(row_starts, "cu_seq_lens", (table.shape[0] + 1,))
    starts = None if seq_starts is None else checks.index_view(seq_starts, "seq_starts", "num_seqs")
    if starts is not None:
        checks.check_shape(starts, "seq_starts", (table.shape[0],))
    given = _given(key_out, value_out)
    arrays = {"key_cache": cache.key, "block_table": table, "cu_seq_lens": row_starts, "seq_starts": starts}
    checks.check_same_device(arrays | dict(zip(OUT_NAMES, given, strict=True)))
    out_dtype = _out_dtype(dtype, cache.format, given)
    num_rows = _num_rows(num_tokens, row_starts, given)
    shape = (num_rows, cache.shape.num_kv_heads, cache.shape.head_size)
    outputs = _outputs(given, cache.key, (shape, shape), out_dtype)
    return GatherCache(cache, table, row_starts, starts, *outputs)


def convert_layout(
    key_cache: Any, value_cache: Any, key_out: Any, value_out: Any, *, layout: str, to: str
) -> ConvertLayout:
    """The problem of ``convert_layout``."""
    caches = view(key_cache, CACHE_NAMES[0]), view(value_cache, CACHE_NAMES[1])
    source = _stored(caches, CACHE_NAMES, layout)
    checks.check_choice(to, "to", layouts.LAYOUTS)
    sizes, stored = source.shape, source.key.dtype
    if to == "packed":
        check_fits_packed(sizes, layouts.PACK_BYTES // stored.itemsize)
    axes = (sizes.num_blocks, sizes.block_size, sizes.num_kv_heads, sizes.head_size)
    shapes = layouts.cache_shapes(to, *axes, stored)
    given = _given(key_out, value_out)
    checks.check_same_device({"key_cache": source.key, **dict(zip(OUT_NAMES, given, strict=True))})
    if share_memory([0 if array is None or 0 in array.shape else array.pointer for array in (*caches, *given)]):
        raise ValueError(wrong("key_out and value_out", "memory of their own", "that of another argument"))
    return ConvertLayout(source, _stored(_outputs(given, source.key, shapes, stored), OUT_NAMES, to))


def _given(*outputs: Any) -> list[ArrayView | None]:
    return [None if out is None else view(out, name) for out, name in zip(outputs, OUT_NAMES, strict=True)]


def share_memory(pointers: Sequence[int]) -> bool:
    """Whether a target begins where a source or the other target does. Pointers: two of sources, two of targets, 0 for
    none; or no pointers."""
    targets = [pointer for pointer in pointers[2:] if pointer]
    return len(set(targets)) < len(targets) or not set(targets).isdisjoint(pointers[:2])


def _cache(
    caches: Sequence[ArrayView], names: tuple[str, str], layout: str, kv_cache_dtype: str, scales: tuple[Any, Any]
) -> PagedCache:
    checks.check_choice(layout, "layout", layouts.LAYOUTS)
    checks.check_dtype(caches[0], names[0], (*FLOATS, UINT8, *FP8))
    build = packed_cache if layout == "packed" else partial(flash_cache, layout=layout)
    dtype = caches[0].dtype if caches[0].dtype in FLOATS else FLOAT16  # what an fp8 cache holds is not asked for
    return build(*caches, names, dtype=dtype, like=names[0], kv_cache_dtype=kv_cache_dtype, scales=scales)


def _stored(caches: Sequence[ArrayView], names: tuple[str, str], layout: str) -> PagedCache:
    """A cache whose bits alone matter: codes are codes of any format."""
    kv_cache_dtype = "fp8" if caches[0].dtype == UINT8 else "auto"
    return _cache(caches, names, layout, kv_cache_dtype, (None, None))


def _out_dtype(dtype: Any, kv_format: np.dtype, given: Sequence[ArrayView | None]) -> np.dtype:
    asked = None if dtype is None else checks.float_dtype(dtype, "dtype")
    if not is_fp8(kv_format):
        if asked not in (None, kv_format):
            raise NotImplementedError(wrong("dtype", f"{kv_format.name}, that of key_cache", asked.name))
        return kv_format
    out, name = next(((out, name) for out, name in zip(given, OUT_NAMES, strict=True) if out is not None), (None, ""))
    if asked is None and out is not None:
        checks.check_dtype(out, name, FLOATS)
        return out.dtype
    return asked or BFLOAT16


def _num_rows(num_tokens: int | None, row_starts: ArrayView, given: Sequence[ArrayView | None]) -> int:
    num_rows = checks.check_count(num_tokens, "num_tokens", minimum=0, none=None)
    if num_rows is not None:
        return num_rows
    for out, name in zip(given, OUT_NAMES, strict=True):
        if out is not None:
            checks.check_ndim(out, name, "num_tokens num_kv_heads head_size")
            return out.shape[0]
    if not row_starts.on_host:
        raise ValueError(wrong("num_tokens", "a number or outputs, since cu_seq_lens is on a device", None))
    check_row_starts(row_starts.numpy())
    return int(row_starts.numpy()[-1])


def _outputs(
    given: Sequence[ArrayView | None], like: ArrayView, shapes: Sequence[tuple[int, ...]], dtype: np.dtype
) -> list[ArrayView]:
    """The outputs given, checked, or new ones."""
    for out, name, shape in zip(given, OUT_NAMES, shapes, strict=True):
        if out is None:
            continue
        checks.check_dtype(out, name, (dtype,))
        checks.check_shape(out, name, shape)
        checks.check_contiguous(out, name)
        checks.check_writable(out, name)
    # Nothing is allocated for a call that fails.
    return [empty(like, shape, dtype) if out is None else out for out, shape in zip(given, shapes, strict=True)]
