"""``warmup``: kernels that are there before the first call that needs them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from . import validate
from .checks import check_choice, check_size, float_dtype
from .context import chosen_backend
from .dispatch import backend_module
from .dtypes import KV_CACHE_DTYPES, storage_dtype
from .layout import FLASH_LAYOUTS, cache_shapes

MANY_QUERIES = 4096

# Planning is imported on use: who never calls this need not wait for it.
if TYPE_CHECKING:
    from .launch import Launch


def warmup(
    dtype: Any,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    *,
    layout: str = "packed",
    kv_cache_dtype: str = "auto",
    device: int | None = None,
) -> list[str]:
    """Compiles and loads the kernels that write a cache and read it, so that no later call has to.

    dtype: of keys and queries: float16, bfloat16 or float32, a dtype of NumPy, torch or JAX or its name.
    num_heads, num_kv_heads, head_size, block_size: sizes of the queries and the cache.
    layout: ``"packed"``, which decode reads, ``"NHD"`` or ``"HND"``, which ``flash_attn_varlen_func`` does; with those
        come the kernels of ``merge_attn_states``. With all come those of ``advance_decode`` and, into ``dtype``, of
        ``gather_cache``; ``convert_layout`` and the moves of blocks need an eager call of their own.
    kv_cache_dtype: as given to the ops.
    device: number of the CUDA device, None for the current one.

    Returns the names of the kernels. After it a first call with such arrays, of whatever lengths, can be captured into
    a CUDA graph. It covers arrays that begin at multiples of 16 bytes, as allocations do; a kernel for others compiles
    when it is first called. Inside ``use_backend("ptx")`` the kernels are compiled for the interpreter; NumPy has none.

    ValueError for sizes, a layout or a format that no cache has, TypeError for another dtype or a size that is no
    integer, NotImplementedError for what no op takes: heads above 256, float32 queries on an fp8 cache.

    >>> pagedkv.warmup("bfloat16", num_heads=32, num_kv_heads=8, head_size=128, block_size=16)
    """
    dtype = float_dtype(dtype, "dtype")
    check_choice(layout, "layout", ("packed", *FLASH_LAYOUTS))
    check_choice(kv_cache_dtype, "kv_cache_dtype", tuple(KV_CACHE_DTYPES))
    num_heads, num_kv_heads, head_size, block_size = _sizes(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, block_size=block_size
    )
    stored = storage_dtype(dtype, kv_cache_dtype)
    shapes = cache_shapes(layout, 1, block_size, num_kv_heads, head_size, stored)
    caches = [np.empty(shape, stored) for shape in shapes]
    launches = [*_writes(dtype, caches, num_kv_heads, head_size, layout, kv_cache_dtype), _advance(block_size)]
    launches.append(_gather(dtype, caches, layout, kv_cache_dtype))
    query = np.empty((1, num_heads, head_size), dtype)
    if layout == "packed":
        launches.append(_decode(query, caches, kv_cache_dtype))
    else:
        launches += [*_varlens(query, caches, layout, kv_cache_dtype), _merge(query)]
    name = chosen_backend() or "cuda"
    if name == "numpy":
        return []
    backend_module(name).warmup(launches, device)
    return list(dict.fromkeys(str(launch.instance) for launch in launches))


def _sizes(**sizes: int) -> Iterator[int]:
    for name, size in sizes.items():
        yield check_size(size, name, minimum=1)


def _writes(
    dtype: np.dtype, caches: list[np.ndarray], num_kv_heads: int, head_size: int, layout: str, kv_cache_dtype: str
) -> Iterator["Launch"]:
    """Writes of few tokens and of many, with one scale and with one per head."""
    from .write_plan import FEW_TOKENS, plan_flash_write, plan_packed_write

    packed = layout == "packed"
    plan = plan_packed_write if packed else plan_flash_write
    for num_tokens in (1, FEW_TOKENS + 1):
        new = np.empty((num_tokens, num_kv_heads, head_size), dtype)
        for scale in (None, np.ones(num_kv_heads, np.float32)):
            arrays = (new, new, *caches, np.zeros(num_tokens, np.int64), scale, scale)
            problem = validate.cache_write(
                *arrays, kv_cache_dtype=kv_cache_dtype, packed=packed, layout=None if packed else layout
            )
            yield plan(problem)


def _decode(query: np.ndarray, caches: list[np.ndarray], kv_cache_dtype: str) -> "Launch":
    """The decode step of v1, whose kernel is that of v2 as well."""
    from .decode_plan import plan_decode

    indices = np.zeros((1, 1), np.int32)
    options = {"scale": None, "max_seq_len": None, "alibi_slopes": None, "window_size": (-1, -1), "softcap": 0.0}
    options |= {"sinks": None, "kv_cache_dtype": kv_cache_dtype, "k_scale": None, "v_scale": None}
    options |= {"out": None, "lse_out": None, "return_lse": False, "single_pass": True}
    problem = validate.paged_attention(query, *caches, indices, indices[0], **options)
    return plan_decode(problem, num_sms=1).launch


def _varlens(query: np.ndarray, caches: list[np.ndarray], layout: str, kv_cache_dtype: str) -> Iterator["Launch"]:
    """A decode step, and with scores of both kinds few queries, whose splits are merged, and many."""
    from .varlen_plan import plan_varlen

    indices = np.zeros((1, 2), np.int32)
    names = ("max_seqlen_q", "max_seqlen_k", "softmax_scale", "alibi_slopes", "s_aux", "k_descale", "v_descale")
    options = dict.fromkeys((*names, "out", "lse_out", "workspace"))
    options |= {"causal": True, "window_size": (-1, -1), "softcap": 0.0, "num_splits": 0, "return_softmax_lse": False}
    options |= {"cu_seqlens_q": indices[0], "seqused_k": indices[0, :1], "block_table": indices}
    options |= {"kv_cache_dtype": kv_cache_dtype, "layout": layout}
    calls = [(1, {"max_seqlen_q": 1})]
    for softcap in (0.0, 1.0):
        calls += [(1, {"softcap": softcap, "num_splits": 2}), (MANY_QUERIES, {"softcap": softcap})]
    for num_tokens, change in calls:
        queries = np.broadcast_to(query, (num_tokens, *query.shape[1:]))
        planned = plan_varlen(validate.varlen_attention(queries, *caches, **options | change), num_sms=1)
        yield planned.launch
        if planned.merge is not None:
            yield planned.merge


def _advance(block_size: int) -> "Launch":
    from .advance import validated_advance
    from .step_plan import plan_advance

    table, slots = np.zeros((1, 1), np.int32), np.zeros(1, np.int64)
    return plan_advance(validated_advance(table, table[0], slots, slots, np.zeros(2, np.int32), block_size))


def _gather(dtype: np.dtype, caches: list[np.ndarray], layout: str, kv_cache_dtype: str) -> "Launch":
    from .gather_plan import plan_gather
    from .validate_gather import gather_cache

    indices = np.zeros((1, 2), np.int32)
    options = {"num_tokens": 1, "kv_cache_dtype": kv_cache_dtype, "layout": layout}
    options["dtype"] = None if kv_cache_dtype == "auto" else dtype
    return plan_gather(gather_cache(*caches, indices, indices[0], None, None, None, None, None, **options))


def _merge(output: np.ndarray) -> "Launch":
    from .merge_plan import plan_merge

    lse = np.empty(output.shape[1::-1], np.float32)
    return plan_merge(validate.merge_states(output, lse, output, lse, out=None, lse_out=None))
