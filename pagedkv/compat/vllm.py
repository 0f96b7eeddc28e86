"""vLLM 0.24's argument lists: ``from pagedkv.compat import vllm as ops`` for ``from vllm import _custom_ops as ops``.

Names, order and defaults are those of ``vllm/_custom_ops.py``: outputs and workspaces come first, and nothing is
returned. Arrays may be of any framework, as everywhere. What the ops do and raise is said at their namesakes in
``pagedkv``, whose results these have to the bit.
"""

from typing import Any

from .. import ops
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
