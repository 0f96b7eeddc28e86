"""vLLM 0.24's argument lists: ``from pagedkv.compat import vllm as ops`` for ``from vllm import _custom_ops as ops``.

Names, order and defaults are those of ``vllm/_custom_ops.py``: outputs and workspaces come first, and nothing is
returned. Arrays may be of any framework, as everywhere. What the ops do and raise is said at their namesakes in
``pagedkv``, whose results these have to the bit.
"""

import math
from collections.abc import Sequence
from typing import Any

from .. import moves, ops
from ..arrays import view
from ..checks import check_ndim, wrong
from ..layout import packed_shape

BUFFERS = ("exp_sum", "max_logits", "tmp_out")  # of v2
# Of the block-sparse arguments, what leaves attention dense. `tp_rank` is read by block-sparse attention alone.
DENSE = {
    "blocksparse_local_blocks": 0,
    "blocksparse_vert_stride": 0,
    "blocksparse_block_size": 64,
    "blocksparse_head_sliding_step": 0,
}


def reshape_and_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """Writes new keys and values into a packed cache.

    All arguments as in ``pagedkv.reshape_and_cache``; k_scale and v_scale may be None, numbers or arrays.

    >>> vllm.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, "auto", k_scale, v_scale)
    """
    ops.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def reshape_and_cache_flash(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """Writes new keys and values into a cache of NHD shape; with HND strides it is one of HND.

    All arguments as in ``pagedkv.reshape_and_cache_flash``; k_scale and v_scale may be None, numbers or arrays.

    >>> vllm.reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, "fp8", k_scale, v_scale)
    """
    ops.reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def paged_attention_v1(
    out: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    num_kv_heads: int,
    scale: float,
    block_tables: Any,
    seq_lens: Any,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Attention of one query token per sequence over a packed cache, into ``out``.

    num_kv_heads, block_size: those of the cache; ValueError if they are not.
    tp_rank: not used.
    blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size, blocksparse_head_sliding_step:
        NotImplementedError for other values than the defaults.

    All others as in ``pagedkv.paged_attention_v1``.

    >>> vllm.paged_attention_v1(out, query, key_cache, value_cache, 8, scale, block_tables, seq_lens, 16, 4096, None,
    ...                         "auto", k_scale, v_scale)
    """
    _decode(ops.paged_attention_v1, **locals())


def paged_attention_v2(
    out: Any,
    exp_sum: Any,
    max_logits: Any,
    tmp_out: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    num_kv_heads: int,
    scale: float,
    block_tables: Any,
    seq_lens: Any,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """``paged_attention_v1`` by parts of sequences whose states are merged.

    exp_sum, max_logits, tmp_out: not used, and may be None: partial states are kept elsewhere.

    All others as in ``paged_attention_v1``.

    >>> vllm.paged_attention_v2(out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, 8, scale,
    ...                         block_tables, seq_lens, 16, 4096, None, "auto", k_scale, v_scale)
    """
    given = {name: value for name, value in locals().items() if name not in BUFFERS}
    _decode(ops.paged_attention_v2, **given)


def _decode(op: Any, value_cache: Any, num_kv_heads: int, block_size: int, tp_rank: int, **given: Any) -> None:
    for name, dense in DENSE.items():
        if given.pop(name) != dense:
            raise NotImplementedError(f"{name}: expected {dense}, since attention here is dense")
    cache = view(value_cache, "value_cache")
    check_ndim(cache, "value_cache", "num_blocks num_kv_heads head_size block_size")
    shape = packed_shape(cache)
    for name, size, actual in (
        ("num_kv_heads", num_kv_heads, shape.num_kv_heads),
        ("block_size", block_size, shape.block_size),
    ):
        if size != actual:
            raise ValueError(wrong(name, f"{actual}, as the cache has", size))
    op(value_cache=value_cache, **given)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    max_seqlen_q: int,
    cu_seqlens_q: Any,
    max_seqlen_k: int,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    q_v: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    return_softmax_lse: bool = False,
    out: Any = None,
    scheduler_metadata: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int = 0,
    fa_version: int = 2,
    s_aux: Any = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Any = None,
) -> Any:
    """Attention of packed queries of any lengths over a cache of NHD shape; with HND strides it is one of HND.

    Returns the output, or with ``return_softmax_lse`` output and LSE.

    seqused_k, block_table: NotImplementedError without them, or with ``cu_seqlens_k``: keys are always paged.
    window_size: ``(left, right)``, None for no bounds.
    k_descale, v_descale: as in ``pagedkv.flash_attn_varlen_func``, or ``[num_seqs, num_kv_heads]`` with a first axis of
        stride 0, as ``expand`` makes it; NotImplementedError for scales of each sequence's own.
    q_v, dropout_p, return_attn_probs, cp_world_size: NotImplementedError for other values than the defaults.
    deterministic, scheduler_metadata, q_descale, fa_version, cp_rank, cp_tot_seqused_k: not used. Results are
        deterministic, and queries are not quantised.

    All others as in ``pagedkv.flash_attn_varlen_func``. An fp8 cache is of a float8 dtype.

    >>> out = vllm.flash_attn_varlen_func(q, k, v, 64, cu_seqlens_q, 4096, seqused_k=seqused_k, block_table=block_table)
    """
    for name, value in (("seqused_k", seqused_k), ("block_table", block_table)):
        if value is None:
            raise NotImplementedError(f"{name}: expected an array, since keys are always paged here")
    for name, value in (("cu_seqlens_k", cu_seqlens_k), ("q_v", q_v)):
        if value is not None:
            raise NotImplementedError(f"{name}: expected None, since keys are paged and have values of their own")
    numbers = (("dropout_p", dropout_p, 0.0), ("return_attn_probs", return_attn_probs, False))
    for name, value, default in (*numbers, ("cp_world_size", cp_world_size, 1)):
        if value != default:
            raise NotImplementedError(f"{name}: expected {default}, got {value!r}")
    return ops.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        block_table=block_table,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(-1, -1) if window_size is None else window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
        k_descale=_of_all_sequences(k_descale, "k_descale"),
        v_descale=_of_all_sequences(v_descale, "v_descale"),
        num_splits=num_splits,
        out=out,
        return_softmax_lse=return_softmax_lse,
    )


def _of_all_sequences(descale: Any, name: str) -> Any:
    """Scales ``[num_seqs, num_kv_heads]`` as the one row that all of them are."""
    if len(getattr(descale, "shape", ())) != 2:
        return descale
    num_seqs, num_kv_heads = descale.shape
    of_sequence, of_head = view(descale, name).strides
    if num_seqs == 0:
        return None
    if num_seqs > 1 and of_sequence != 0:
        raise NotImplementedError(f"{name}: expected one row of scales for all sequences, an axis of stride 0")
    return descale[0, :1] if num_kv_heads > 1 and of_head == 0 else descale[0]


def merge_attn_states(
    output: Any,
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    output_lse: Any = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Any = None,
) -> None:
    """Merges attention over two sets of keys into ``output`` and, where it is given, ``output_lse``.

    prefill_tokens_with_context, output_scale: NotImplementedError for other values than None.

    All others as in ``pagedkv.merge_attn_states``.

    >>> vllm.merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse)
    """
    for name, value in (("prefill_tokens_with_context", prefill_tokens_with_context), ("output_scale", output_scale)):
        if value is not None:
            raise NotImplementedError(f"{name}: expected None")
    ops.merge_attn_states(prefix_output, prefix_lse, suffix_output, suffix_lse, out=output, lse_out=output_lse)


def copy_blocks(key_caches: Sequence[Any], value_caches: Sequence[Any], block_mapping: Any) -> None:
    """Copies blocks inside the key and value caches of all layers.

    key_caches, value_caches: a cache per layer in each, as many; ValueError if they are not.
    block_mapping: the mapping of ``pagedkv.copy_blocks``, which says what is raised.

    >>> vllm.copy_blocks(key_caches, value_caches, block_mapping)
    """
    if len(key_caches) != len(value_caches):
        raise ValueError(wrong("value_caches", f"{len(key_caches)} caches like key_caches", len(value_caches)))
    moves.copy_blocks([*key_caches, *value_caches], block_mapping)


def swap_blocks(src: Any, dst: Any, block_size_in_bytes: int, block_mapping: Any) -> None:
    """Copies blocks of one pool to another, on the current stream; host memory must be pinned.

    block_size_in_bytes: of a block of ``src``; ValueError if that is not its size.

    All others as in ``pagedkv.swap_blocks``.

    >>> vllm.swap_blocks(device_cache, host_cache, 32768, block_mapping)
    """
    source = view(src, "src")
    nbytes = math.prod(source.shape[1:]) * source.dtype.itemsize
    if block_size_in_bytes != nbytes:
        raise ValueError(wrong("block_size_in_bytes", f"{nbytes}, as src has", block_size_in_bytes))
    moves.swap_blocks(src, dst, block_mapping)
