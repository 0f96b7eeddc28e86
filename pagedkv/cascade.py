"""Cascade attention: a prefix that all sequences share is read once, with the queries of all of them."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from .arrays import ArrayView, empty, view
from .checks import check_choice, check_ndim, check_size, index_view, wrong
from .dtypes import FLOAT32
from .layout import FLASH_LAYOUTS
from .ops import flash_attn_varlen_func, merge_attn_states


def cascade_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any,
    seqused_k: Any,
    block_table: Any,
    common_prefix_len: int,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    s_aux: Any = None,
    kv_cache_dtype: str = "auto",
    k_descale: Any = None,
    v_descale: Any = None,
    out: Any = None,
    lse_out: Any = None,
    return_softmax_lse: bool = False,
    layout: str = "NHD",
) -> Any:
    """Causal attention of sequences whose first tokens are the same blocks, which are read once for all of them.

    The result is that of ``flash_attn_varlen_func(..., causal=True)`` within rounding.

    common_prefix_len: tokens, whole blocks; the first row of ``block_table`` says which. Every sequence's queries come
        after them: ``seqused_k - query_len`` is no less.
    cu_seqlens_q: as there; rows past its last entry get 0 and an LSE of -inf.

    All others as in ``flash_attn_varlen_func``. Windows and ALiBi do not go with a shared prefix. Sinks count once.
    The states of the two parts are new memory at every call, so what goes into a CUDA graph is the two reads and
    ``merge_attn_states`` themselves.

    Raises what ``flash_attn_varlen_func`` does, and ValueError for a prefix that is no whole number of blocks or longer
    than the table; on the host also for a sequence whose queries begin inside it. After Ye et al., "Cascade Inference"
    (2024).

    >>> out = cascade_attention(q, k, v, cu_seqlens_q=starts, seqused_k=lens, block_table=table, common_prefix_len=4096)
    """
    check_choice(layout, "layout", FLASH_LAYOUTS)
    table = index_view(block_table, "block_table", "num_seqs max_blocks")
    lens = index_view(seqused_k, "seqused_k", "num_seqs")
    prefix_len = check_size(common_prefix_len, "common_prefix_len", minimum=0)
    shared = {"softmax_scale": softmax_scale, "softcap": softcap, "kv_cache_dtype": kv_cache_dtype, "layout": layout}
    shared |= {"k_descale": k_descale, "v_descale": v_descale}
    results = {"out": out, "lse_out": lse_out}
    num_seqs = lens.shape[0]
    if prefix_len == 0 or num_seqs == 0:
        own = {"cu_seqlens_q": cu_seqlens_q, "seqused_k": seqused_k, "block_table": block_table, "s_aux": s_aux}
        own |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "return_softmax_lse": return_softmax_lse}
        return flash_attn_varlen_func(q, k, v, causal=True, **own, **shared, **results)

    num_blocks = _whole_blocks(prefix_len, view(k, "k"), layout, table.shape[1])
    starts = index_view(cu_seqlens_q, "cu_seqlens_q", "num_seqs+1")
    _check_queries_come_after(prefix_len, starts, lens)
    of_prefix = {
        "cu_seqlens_q": starts.owner[::num_seqs],  # its first entry and its last
        "seqused_k": _filled(lens, (1,), lens.dtype, prefix_len),
        "block_table": table.owner[:1, :num_blocks],
        "max_seqlen_k": prefix_len,
    }
    of_suffix = {
        "cu_seqlens_q": cu_seqlens_q,
        "seqused_k": _lowered(lens, prefix_len),
        "block_table": table.owner[:, num_blocks:],
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": None if max_seqlen_k is None else max_seqlen_k - prefix_len,
    }
    of_suffix |= {"causal": True, "s_aux": s_aux}
    query, parts = view(q, "q"), []
    check_ndim(query, "q", "num_tokens num_heads head_size")
    for own in (of_prefix, of_suffix):
        # Padding is none of a sequence's: it keeps an LSE that says that nothing was seen.
        lse = _filled(query, query.shape[1::-1], FLOAT32, -math.inf)
        parts += [flash_attn_varlen_func(q, k, v, **own, **shared, lse_out=lse), lse]
    merged = merge_attn_states(*parts, **results)
    return merged if return_softmax_lse else merged[0]


def _filled(like: ArrayView, shape: tuple[int, ...], dtype: np.dtype, value: float) -> Any:
    """A new array beside ``like``, filled without the host waiting for it."""
    array = empty(like, shape, dtype).owner
    with _device_of(like):
        array[...] = value
    return array


def _lowered(lens: ArrayView, by: int) -> Any:
    with _device_of(lens):
        return lens.owner - by


def _device_of(array: ArrayView) -> AbstractContextManager:
    """Makes the array's device the current one: CuPy computes there, torch wherever its tensors are."""
    return nullcontext() if array.on_host or array.framework == "torch" else array.owner.device


def _whole_blocks(prefix_len: int, cache: ArrayView, layout: str, most: int) -> int:
    check_ndim(cache, "k", "num_blocks block_size num_kv_heads head_size")
    block_size = cache.shape[1 if layout == "NHD" else 2]
    if block_size == 0 or prefix_len % block_size or prefix_len // block_size > most:
        expected = f"at most {most} whole blocks of {block_size} tokens"
        raise ValueError(wrong("common_prefix_len", expected, prefix_len))
    return prefix_len // block_size


def _check_queries_come_after(prefix_len: int, starts: ArrayView, lens: ArrayView) -> None:
    if not (starts.on_host and lens.on_host) or starts.shape != (lens.shape[0] + 1,):
        return  # on a device nobody reads them; a wrong shape is for the op to tell
    earliest = int((lens.numpy().astype(int) - (starts.numpy()[1:].astype(int) - starts.numpy()[:-1])).min())
    if earliest < prefix_len:
        expected = f"queries that begin at {prefix_len}, where the common prefix ends, or later"
        raise ValueError(wrong("seqused_k", expected, f"one that begins at {earliest}"))
