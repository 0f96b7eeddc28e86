"""How a varlen read is launched: kernel instances, grids, parameters and workspace, from the validated problem alone.

Needs no CuPy: the backends that run kernels and the list of instances that CI compiles share it.
"""

from typing import TypeVar

import numpy as np

from .arrays import ArrayView
from .dtypes import CUDA_NAMES, FLOAT32, is_fp8
from .kernels import Instance
from .launch import LARGEST_GRID, Launch, as_bytes
from .layout import PACK_BYTES
from .params import VARLEN_PARAMS, fast_divisor
from .problem import Attention
from .read_plan import ReadLaunch, are_aligned, check_addresses, result_fields, scale_arrays, score_fields
from .workspace import partials_nbytes

WARPS = 4
WARP_ROWS, WARP_ROWS_FLOAT32 = 16, 8  # query tokens and heads of a warp
KEYS, KEYS_OF_LARGE_HEADS, KEYS_FLOAT32 = 64, 32, 32  # of a tile
LARGE_HEAD = 128
STAGES = 2
ROW_BYTES = 16  # two offsets of a key's row
MERGE_THREADS = 128

T = TypeVar("T")


def plan_varlen(problem: Attention) -> ReadLaunch:
    """A CTA for each tile of queries, kv head and split; as many tiles as lengths may come to."""
    cache = problem.cache
    named = {"q": problem.query, "k": cache.key, "v": cache.value, "s_aux": problem.options.sinks}
    named |= {"block_table": problem.block_table, "seqused_k": problem.seq_lens}
    check_addresses(problem, named | {"cu_seqlens_q": problem.query_start_loc})
    instance = varlen_instance(problem)
    num_tokens, num_heads, head_size = problem.query.shape
    splits = max(1, problem.num_splits)
    ctas = _most_tiles(problem) * cache.shape.num_kv_heads * splits
    num_states = num_tokens * num_heads * splits if splits > 1 else 0
    merging = -(-num_tokens * num_heads * 32 // MERGE_THREADS)
    if max(ctas, merging) > LARGEST_GRID:
        raise ValueError(f"q: expected fewer query tokens and splits in one call, got {num_tokens} and {splits}")
    params = _params(problem, splits, num_states)
    launch = Launch(instance, (ctas,), 32 * WARPS, params, _shared_bytes(problem))
    merge = None
    if splits > 1:
        merger = merge_splits_instance_for(problem.query.dtype, head_size, is_aligned=_is_aligned(problem))
        merge = Launch(merger, (merging,), MERGE_THREADS, params)
    return ReadLaunch(launch, partials_nbytes(1, num_states, head_size, 1), merge=merge)


def varlen_instance(problem: Attention) -> Instance:
    """The instance for a problem's dtypes, head size and alignment."""
    head_size = problem.cache.shape.head_size
    return varlen_instance_for(problem.query.dtype, problem.cache.format, head_size, is_aligned=_is_aligned(problem))


def varlen_instance_for(
    dtype: np.dtype, cache_format: np.dtype, head_size: int, *, is_aligned: bool = True
) -> Instance:
    """The kernel for 16-bit queries on tensor cores, for float32 on CUDA cores."""
    sizes = (head_size, _keys(dtype, head_size), WARPS, str(is_aligned).lower())
    return Instance("varlen_attention.cu", "varlen_attention", (CUDA_NAMES[dtype], CUDA_NAMES[cache_format], *sizes))


def merge_splits_instance_for(dtype: np.dtype, head_size: int, *, is_aligned: bool = True) -> Instance:
    """The kernel that merges what splits leave."""
    arguments = (CUDA_NAMES[dtype], head_size, str(is_aligned).lower())
    return Instance("varlen_attention.cu", "merge_splits", arguments)


def _keys(dtype: np.dtype, head_size: int) -> int:
    if dtype == FLOAT32:
        return KEYS_FLOAT32
    return KEYS if head_size <= LARGE_HEAD else KEYS_OF_LARGE_HEADS


def _rows(dtype: np.dtype) -> int:
    return WARPS * (WARP_ROWS_FLOAT32 if dtype == FLOAT32 else WARP_ROWS)


def _most_tiles(problem: Attention) -> int:
    """Tiles of queries that there may be, whatever the lengths: each sequence may leave one unfilled."""
    group, rows = problem.num_heads // problem.cache.shape.num_kv_heads, _rows(problem.query.dtype)
    most = problem.query.shape[0] * group // rows + problem.num_seqs
    if problem.max_query_len is None:
        return most
    return min(most, problem.num_seqs * -(-problem.max_query_len * group // rows))


def _shared_bytes(problem: Attention) -> int:
    """SMEM_BYTES of the kernel's two mainloops."""
    head_size = problem.cache.shape.head_size
    keys, rows = _keys(problem.query.dtype, head_size), _rows(problem.query.dtype)
    if problem.query.dtype == FLOAT32:
        return rows * (head_size + keys) * 4
    ring = STAGES * 2 * keys * -(-head_size // 16) * 16 * problem.cache.format.itemsize
    acc_row = head_size + ((16 if is_fp8(problem.cache.format) else 8) - head_size) % 32
    return max(ring, rows * acc_row * 4) + 2 * keys * ROW_BYTES


def _is_aligned(problem: Attention) -> bool:
    """Whether every pack of 16 bytes begins at a multiple of 16, and rows end with one."""
    cache = problem.cache
    return cache.shape.head_size * cache.format.itemsize % PACK_BYTES == 0 and are_aligned(problem, cache_axes=3)


# ---- parameters -----------------------------------------------------------------------------------------------------


def varlen_arrays(problem: Attention) -> list[ArrayView | None]:
    """The kernel's pointer parameters in order but for the workspace, None for a null pointer."""
    cache, options = problem.cache, problem.options
    arrays = [problem.query, cache.key, cache.value, problem.block_table, problem.seq_lens, problem.query_start_loc]
    return [*arrays, options.alibi_slopes, options.sinks, *scale_arrays(cache), problem.out, problem.lse_out]


def merge_split_arrays(arrays: list[T], workspace: T) -> list[T]:
    """Of those, or their addresses, what the kernel that merges splits takes."""
    *_, query_starts, _, sinks, _, v_scale, out, lse = arrays
    return [workspace, query_starts, sinks, v_scale, out, lse]


def _params(problem: Attention, splits: int, num_states: int) -> np.ndarray:
    cache, options, shape = problem.cache, problem.options, problem.cache.shape
    sides = (cache.key_strides, cache.value_strides)
    divisors = (
        shape.block_size,
        problem.num_heads // shape.num_kv_heads,
        shape.num_kv_heads,
        splits,
        problem.num_heads,
    )
    fields = (
        *problem.query.strides[:2],
        *(stride for side in sides for stride in (side.block, side.token, side.head)),
        *problem.block_table.strides,
        *problem.seq_lens.strides,
        *problem.query_start_loc.strides,
        *result_fields(problem),
        num_states,
        *map(fast_divisor, divisors),
        *score_fields(problem),
        problem.num_seqs,
        *options.window,
        options.sinks is not None and options.sinks.dtype == FLOAT32,
    )
    return as_bytes(fields, VARLEN_PARAMS)
