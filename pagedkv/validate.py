"""Validation of every op, before dispatch: from what the caller passed to a problem, or to the error that says why not.

What slots, ids and lengths hold is checked in ``indices.py``, since on a device reading them costs a synchronisation.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from . import checks
from .arrays import ArrayView, empty, view
from .checks import wrong
from .dtypes import FLOAT32, FLOATS, UINT8, is_fp8
from .problem import Attention, CacheWrite, MergeStates, PagedCache, ScoreOptions
from .validate_cache import flash_cache, packed_cache
from .workspace import DEFAULT_PARTITION_SIZE, partials_nbytes, shares_nbytes

LONGEST = 2**31 - 1  # tokens of a sequence: a wider window bounds nothing
MOST_SPLITS = 2**16

# ---- writes ---------------------------------------------------------------------------------------------------------


def cache_write(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    k_scale: Any = None,
    v_scale: Any = None,
    *,
    kv_cache_dtype: str,
    packed: bool,
    layout: str | None = None,
) -> CacheWrite:
    """The problem of both writes; the packed one has no ``layout``."""
    names = ("key_cache", "value_cache")
    key, value = view(key, "key"), view(value, "value")
    caches = view(key_cache, names[0]), view(value_cache, names[1])
    slots = checks.index_view(slot_mapping, "slot_mapping", "num_tokens")
    checks.check_ndim(key, "key", "num_tokens num_kv_heads head_size")
    checks.check_shape(value, "value", key.shape)
    checks.check_dtype(key, "key", FLOATS)
    checks.check_dtype(value, "value", (key.dtype,))
    common = {"dtype": key.dtype, "like": "key", "kv_cache_dtype": kv_cache_dtype, "scales": (k_scale, v_scale)}
    build = packed_cache if packed else partial(flash_cache, layout=layout)
    cache = build(*caches, names, **common)
    checks.check_shape(key, "key", (None, cache.shape.num_kv_heads, cache.shape.head_size))
    for new, name in ((key, "key"), (value, "value")):
        checks.check_contiguous(new, name)
    if slots.shape[0] > key.shape[0]:
        raise ValueError(wrong("slot_mapping", f"at most {key.shape[0]} slots, one per row of key", slots.shape[0]))
    checks.check_same_device({"key": key, "value": value, names[0]: cache.key, "slot_mapping": slots})
    for target, name in zip(caches, names, strict=True):
        checks.check_writable(target, name)
    return CacheWrite(key, value, cache, slots)


# ---- reads ----------------------------------------------------------------------------------------------------------


def _options(
    scale: float | None,
    head_size: int,
    num_heads: int,
    dtype: np.dtype,
    *,
    softcap: float,
    alibi_slopes: Any,
    window_size: tuple[int, int],
    sinks: Any,
    names: tuple[str, str] = ("scale", "sinks"),
) -> ScoreOptions:
    scale = head_size**-0.5 if scale is None else checks.check_number(scale, names[0], "a finite number or None")
    softcap = checks.check_number(softcap, "softcap", "a number, 0 for none", minimum=0)
    if 0 < softcap < checks.SMALLEST:
        raise ValueError(wrong("softcap", "0 or a number in float32's normal range", softcap))
    slopes = None if alibi_slopes is None else view(alibi_slopes, "alibi_slopes")
    if slopes is not None:
        checks.check_dtype(slopes, "alibi_slopes", (FLOAT32,))
        checks.check_shape(slopes, "alibi_slopes", (num_heads,))
    sinks = None if sinks is None else view(sinks, names[1])
    if sinks is not None:
        checks.check_dtype(sinks, names[1], dict.fromkeys((FLOAT32, dtype)))
        checks.check_shape(sinks, names[1], (num_heads,))
    return ScoreOptions(scale, softcap, slopes, check_window(window_size), sinks)


def check_window(window_size: Any) -> tuple[int, int]:
    """``window_size`` as two ints, (left, right); an error unless it is that."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(wrong("window_size", "(left, right), -1 for no bound", repr(window_size))) from None
    left, right = (checks.check_count(bound, "window_size", minimum=-1, none=-1) for bound in (left, right))
    return min(left, LONGEST), min(right, LONGEST)


def _output(given: Any, name: str, like: ArrayView, shape: tuple[int, ...], dtype: np.dtype) -> ArrayView:
    if given is None:
        return empty(like, shape, dtype)
    out = view(given, name)
    checks.check_dtype(out, name, (dtype,))
    checks.check_shape(out, name, shape)
    checks.check_writable(out, name)
    return out


def _query(query: Any, name: str) -> ArrayView:
    query = view(query, name)
    checks.check_ndim(query, name, "num_tokens num_heads head_size")
    checks.check_dtype(query, name, FLOATS)
    checks.check_contiguous(query, name)
    return query


def _check_read(query: ArrayView, name: str, cache: PagedCache) -> None:
    checks.check_shape(query, name, (None, None, cache.shape.head_size))
    num_heads, num_kv_heads = query.shape[1], cache.shape.num_kv_heads
    if num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(wrong(name, f"num_heads a multiple of num_kv_heads = {num_kv_heads}", num_heads))
    if is_fp8(cache.format) and query.dtype == FLOAT32:
        raise NotImplementedError(f"{name}: expected float16 or bfloat16 for an fp8 cache, got float32")


def _complete(
    problem: Attention, arrays: dict[str, ArrayView | None], *, out: Any, lse_out: Any, return_lse: bool, workspace: Any
) -> Attention:
    """Adds workspace and outputs to a problem. ``arrays``: all others by name, the query first."""
    query, (query_name, *_) = problem.query, arrays
    checks.check_same_device(arrays)
    if workspace is not None:
        if problem.has_equal_shares:
            needed = shares_nbytes(query.shape[2])
        else:
            needed = partials_nbytes(*query.shape, problem.num_partials)
        workspace = _workspace(workspace, query, query_name, needed)
    # Outputs come last: nothing is allocated for a call that fails.
    result = _output(out, "out", query, query.shape, query.dtype)
    checks.check_contiguous(result, "out")
    lse = None
    if return_lse or lse_out is not None:
        lse = _output(lse_out, "lse_out", query, (query.shape[1], query.shape[0]), FLOAT32)
    checks.check_same_device({query_name: query, "out": result, "lse_out": lse})
    return replace(problem, out=result, lse_out=lse, workspace=workspace)


def _workspace(workspace: Any, query: ArrayView, query_name: str, needed: int) -> ArrayView:
    workspace = view(workspace, "workspace")
    checks.check_dtype(workspace, "workspace", (UINT8,))
    checks.check_ndim(workspace, "workspace", "nbytes")
    checks.check_contiguous(workspace, "workspace")
    checks.check_writable(workspace, "workspace")
    checks.check_same_device({query_name: query, "workspace": workspace})
    if workspace.shape[0] < needed:
        raise ValueError(wrong("workspace", f"at least {needed} bytes", workspace.shape[0]))
    return workspace


def paged_attention(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    *,
    scale: float | None,
    max_seq_len: int | None,
    alibi_slopes: Any,
    window_size: tuple[int, int],
    softcap: float,
    sinks: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
    out: Any,
    lse_out: Any,
    return_lse: bool,
    single_pass: bool,
    partition_size: int | None = None,
    workspace: Any = None,
) -> Attention:
    """The problem of ``paged_attention_v1`` (``single_pass``) and ``v2``."""
    query = _query(query, "query")
    names = ("key_cache", "value_cache")
    caches = view(key_cache, names[0]), view(value_cache, names[1])
    cache = packed_cache(
        *caches, names, dtype=query.dtype, like="query", kv_cache_dtype=kv_cache_dtype, scales=(k_scale, v_scale)
    )
    _check_read(query, "query", cache)
    tables = checks.index_view(block_tables, "block_tables", "num_seqs max_blocks")
    lens = checks.index_view(seq_lens, "seq_lens", "num_seqs")
    checks.check_shape(lens, "seq_lens", (query.shape[0],))
    checks.check_shape(tables, "block_tables", (query.shape[0], None))
    options = _options(
        scale,
        cache.shape.head_size,
        query.shape[1],
        query.dtype,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        window_size=window_size,
        sinks=sinks,
    )
    size = 0
    if not single_pass:
        size = checks.check_count(partition_size, "partition_size", minimum=1, none=DEFAULT_PARTITION_SIZE)
    problem = Attention(
        query,
        cache,
        tables,
        lens,
        query_start_loc=None,
        options=options,
        max_query_len=1,
        max_seq_len=checks.check_count(max_seq_len, "max_seq_len", minimum=0, none=None),
        partition_size=size,
        has_equal_shares=not single_pass and partition_size is None,
    )
    arrays = {"query": query, "key_cache": cache.key, "block_tables": tables, "seq_lens": lens}
    arrays |= {"alibi_slopes": options.alibi_slopes, "sinks": options.sinks}
    return _complete(problem, arrays, out=out, lse_out=lse_out, return_lse=return_lse, workspace=workspace)


def varlen_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any,
    seqused_k: Any,
    block_table: Any,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Any,
    s_aux: Any,
    kv_cache_dtype: str,
    k_descale: Any,
    v_descale: Any,
    num_splits: int,
    out: Any,
    lse_out: Any,
    workspace: Any,
    return_softmax_lse: bool,
    layout: str,
) -> Attention:
    """The problem of ``flash_attn_varlen_func``."""
    query = _query(q, "q")
    cache = flash_cache(
        view(k, "k"),
        view(v, "v"),
        ("k", "v"),
        layout=layout,
        dtype=query.dtype,
        like="q",
        kv_cache_dtype=kv_cache_dtype,
        scales=(k_descale, v_descale),
        scale_names=("k_descale", "v_descale"),
    )
    _check_read(query, "q", cache)
    table = checks.index_view(block_table, "block_table", "num_seqs max_blocks")
    lens = checks.index_view(seqused_k, "seqused_k", "num_seqs")
    starts = checks.index_view(cu_seqlens_q, "cu_seqlens_q", "num_seqs+1")
    checks.check_shape(starts, "cu_seqlens_q", (lens.shape[0] + 1,))
    checks.check_shape(table, "block_table", (lens.shape[0], None))
    options = _options(
        softmax_scale,
        cache.shape.head_size,
        query.shape[1],
        query.dtype,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        window_size=window_size,
        sinks=s_aux,
        names=("softmax_scale", "s_aux"),
    )
    if causal:
        options = replace(options, window=(options.window[0], 0))
    num_splits = checks.check_count(num_splits, "num_splits", minimum=0, none=0, maximum=MOST_SPLITS)
    problem = Attention(
        query,
        cache,
        table,
        lens,
        query_start_loc=starts,
        options=options,
        max_query_len=checks.check_count(max_seqlen_q, "max_seqlen_q", minimum=0, none=None),
        max_seq_len=checks.check_count(max_seqlen_k, "max_seqlen_k", minimum=0, none=None),
        num_splits=num_splits,
        has_equal_shares=num_splits == 0,
    )
    arrays = {"q": query, "k": cache.key, "block_table": table, "seqused_k": lens, "cu_seqlens_q": starts}
    arrays |= {"alibi_slopes": options.alibi_slopes, "s_aux": options.sinks}
    return _complete(problem, arrays, out=out, lse_out=lse_out, return_lse=return_softmax_lse, workspace=workspace)


# ---- merging --------------------------------------------------------------------------------------------------------


def merge_states(
    prefix_output: Any, prefix_lse: Any, suffix_output: Any, suffix_lse: Any, out: Any, lse_out: Any
) -> MergeStates:
    """The problem of ``merge_attn_states``."""
    outputs = {
        "prefix_output": view(prefix_output, "prefix_output"),
        "suffix_output": view(suffix_output, "suffix_output"),
    }
    lses = {"prefix_lse": view(prefix_lse, "prefix_lse"), "suffix_lse": view(suffix_lse, "suffix_lse")}
    reference = outputs["prefix_output"]
    checks.check_ndim(reference, "prefix_output", "num_tokens num_heads head_size")
    num_tokens, num_heads, _ = reference.shape
    for name, output in outputs.items():
        checks.check_dtype(output, name, FLOATS if output is reference else (reference.dtype,))
        checks.check_shape(output, name, reference.shape)
        checks.check_contiguous(output, name)
    for name, lse in lses.items():
        checks.check_dtype(lse, name, (FLOAT32,))
        checks.check_shape(lse, name, (num_heads, num_tokens))
    checks.check_same_device({**outputs, **lses})
    result = _output(out, "out", reference, reference.shape, reference.dtype)
    lse = _output(lse_out, "lse_out", reference, (num_heads, num_tokens), FLOAT32)
    checks.check_same_device({"prefix_output": reference, "out": result, "lse_out": lse})
    return MergeStates(reference, lses["prefix_lse"], outputs["suffix_output"], lses["suffix_lse"], result, lse)
