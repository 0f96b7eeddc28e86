"""How a varlen read is launched: kernel instances, grids, parameters and workspace, from the validated problem alone.

Needs no CuPy: the backends that run kernels and the list of instances that CI compiles share it.
"""

from typing import TypeVar

import numpy as np

from .arrays import ArrayView
from .decode_plan import plan_instance, varlen_decode_instance_for
from .dtypes import CUDA_NAMES, FLOAT32, is_fp8
from .kernels import Instance
from .launch import LARGEST_GRID, Launch, as_bytes
from .layout import PACK_BYTES
from .params import VARLEN_PARAMS, fast_divisor
from .problem import Attention
from .read_plan import ReadLaunch, are_aligned, check_addresses, result_fields, scale_arrays, score_fields
from .workspace import partials_nbytes, shares_nbytes

WARPS = 4
WARP_ROWS, WARP_ROWS_FLOAT32 = 16, 8  # query tokens and heads of a warp's tile
MOST_WARP_TILES = 2  # tiles of a warp that read the same keys
KEYS, FEWER_KEYS = 64, 32  # of a tile; fewer where registers or shared memory hold no more
LARGE_HEAD = 128
STAGES = 2
ROW_INFO_BYTES = 16
MERGE_THREADS = 128
CTAS_PER_SM = 2
LEAST_TILES = 4  # of keys, of a split
FAR_FEWER = 2  # times: queries of a batch, to what they were if all sequences had as many as the longest

T = TypeVar("T")


def plan_varlen(problem: Attention, num_sms: int) -> ReadLaunch:
    """A decode step where sequences have one query each. Else a CTA for each tile of queries, kv head and split, as
    many tiles as lengths may come to, and a decode step before it if there may well be sequences with one query."""
    cache = problem.cache
    named = {"q": problem.query, "k": cache.key, "v": cache.value, "s_aux": problem.options.sinks}
    named |= {"block_table": problem.block_table, "seqused_k": problem.seq_lens}
    check_addresses(problem, named | {"cu_seqlens_q": problem.query_start_loc})
    if _is_one_each(problem):
        return plan_instance(problem, _decode_instance(problem), num_sms)
    num_tokens, num_heads, head_size = problem.query.shape
    ctas = _most_tiles(problem) * cache.shape.num_kv_heads
    splits = _num_splits(problem, ctas, num_sms)
    ctas *= splits
    num_states = num_tokens * num_heads * splits if splits > 1 else 0
    merging = -(-num_tokens * num_heads * 32 // MERGE_THREADS)
    if max(ctas, merging) > LARGEST_GRID:
        raise ValueError(f"q: expected fewer query tokens and splits in one call, got {num_tokens} and {splits}")
    before = None
    if splits == 1 and _has_short_queries(problem):
        before = plan_instance(problem, _decode_instance(problem), num_sms)
    params = _params(problem, splits, num_states, least_queries=0 if before is None else 2)
    launch = Launch(varlen_instance(problem), (ctas,), 32 * WARPS, params, _shared_bytes(problem))
    merge = None
    if splits > 1:
        merger = merge_splits_instance_for(problem.query.dtype, head_size, is_aligned=_is_aligned(problem))
        merge = Launch(merger, (merging,), MERGE_THREADS, params)
    workspace_bytes = partials_nbytes(1, num_states, head_size, 1)
    return ReadLaunch(launch, workspace_bytes, merge=merge, before=before)


def _num_splits(problem: Attention, ctas: int, num_sms: int) -> int:
    """The caller's, or as many as give every SM its CTAs, if sequences are long enough and a workspace of any call's
    size holds their states."""
    if not problem.has_equal_shares:
        return problem.num_splits
    num_tokens, num_heads, head_size = problem.query.shape
    room = shares_nbytes(head_size) // partials_nbytes(num_tokens, num_heads, head_size, 1)
    key_tiles = -(-problem.longest // _keys(problem))
    return max(1, min(CTAS_PER_SM * num_sms // ctas, key_tiles // LEAST_TILES, room))


def varlen_instance(problem: Attention) -> Instance:
    """The instance for a problem's dtypes, head size, alignment and lengths of queries."""
    if _is_one_each(problem):
        return _decode_instance(problem)
    sizes = (problem.cache.shape.head_size, _keys(problem), _warp_tiles(problem))
    flags = {"has_options": _has_options(problem), "is_aligned": _is_aligned(problem)}
    return varlen_instance_for(problem.query.dtype, problem.cache.format, *sizes, **flags)


def _has_options(problem: Attention) -> bool:
    """Whether scores need more than a factor."""
    return problem.options.softcap != 0 or problem.options.alibi_slopes is not None


def _decode_instance(problem: Attention) -> Instance:
    shape = problem.cache.shape
    group = problem.num_heads // shape.num_kv_heads
    return varlen_decode_instance_for(problem.query.dtype, problem.cache.format, shape.head_size, group)


def _can_decode(problem: Attention) -> bool:
    """Whether the kernel for sequences with one query has what is asked."""
    return problem.has_equal_shares and problem.query.dtype != FLOAT32 and _is_aligned(problem)


def _is_one_each(problem: Attention) -> bool:
    """Whether no sequence has more than one query, by the caller's bound or since there is but one."""
    return _longest_query(problem) <= 1 and _can_decode(problem)


def _has_short_queries(problem: Attention) -> bool:
    """Whether many sequences have far fewer queries than the longest, as where some decode while others begin."""
    all_as_long = problem.num_seqs * _longest_query(problem)
    return problem.query.shape[0] * FAR_FEWER <= all_as_long and problem.num_seqs > 1 and _can_decode(problem)


def _longest_query(problem: Attention) -> int:
    """Queries that no sequence exceeds."""
    num_tokens, bound = problem.query.shape[0], problem.max_query_len
    return num_tokens if bound is None else min(bound, num_tokens)


def varlen_instance_for(
    dtype: np.dtype,
    cache_format: np.dtype,
    head_size: int,
    keys: int,
    warp_tiles: int,
    *,
    has_options: bool = False,
    is_aligned: bool = True,
) -> Instance:
    """The kernel for 16-bit queries on tensor cores, for float32 on CUDA cores, which has all options."""
    flags = (has_options or dtype == FLOAT32, is_aligned)
    sizes = (head_size, keys, WARPS, warp_tiles, *(str(flag).lower() for flag in flags))
    return Instance("varlen_attention.cu", "varlen_attention", (CUDA_NAMES[dtype], CUDA_NAMES[cache_format], *sizes))


def merge_splits_instance_for(dtype: np.dtype, head_size: int, *, is_aligned: bool = True) -> Instance:
    """The kernel that merges what splits leave."""
    arguments = (CUDA_NAMES[dtype], head_size, str(is_aligned).lower())
    return Instance("varlen_attention.cu", "merge_splits", arguments)


def _keys(problem: Attention) -> int:
    """Of a tile. The same for all calls on a cache with the same options: results depend on it."""
    is_plain = not is_fp8(problem.cache.format) and not _has_options(problem)
    is_small = problem.query.dtype != FLOAT32 and problem.cache.shape.head_size <= LARGE_HEAD
    return KEYS if is_plain and is_small else FEWER_KEYS


def _warp_tiles(problem: Attention) -> int:
    """More than one where queries fill them and registers hold them. No result depends on it."""
    if problem.query.dtype == FLOAT32 or problem.cache.shape.head_size > LARGE_HEAD:
        return 1
    query_len = -(-problem.query.shape[0] // problem.num_seqs)
    if problem.max_query_len is not None:
        query_len = problem.max_query_len
    rows = query_len * problem.num_heads // problem.cache.shape.num_kv_heads
    return MOST_WARP_TILES if rows > WARPS * WARP_ROWS else 1


def _rows(problem: Attention) -> int:
    """Of a CTA's tile."""
    if problem.query.dtype == FLOAT32:
        return WARPS * WARP_ROWS_FLOAT32
    return WARPS * WARP_ROWS * _warp_tiles(problem)


def _most_tiles(problem: Attention) -> int:
    """Tiles of queries that there may be, whatever the lengths: each sequence may leave one unfilled."""
    group, rows = problem.num_heads // problem.cache.shape.num_kv_heads, _rows(problem)
    most = problem.query.shape[0] * group // rows + problem.num_seqs
    return min(most, problem.num_seqs * -(-_longest_query(problem) * group // rows))


def _shared_bytes(problem: Attention) -> int:
    """SMEM_BYTES of the kernel's two mainloops."""
    head_size = problem.cache.shape.head_size
    keys, rows = _keys(problem), _rows(problem)
    if problem.query.dtype == FLOAT32:
        return rows * (head_size + keys) * 4
    padded = -(-head_size // 16) * 16
    ring = STAGES * 2 * keys * padded * problem.cache.format.itemsize
    acc_row = head_size + ((16 if is_fp8(problem.cache.format) else 8) - head_size) % 32
    return max(rows * padded * 2 + ring, rows * acc_row * 4) + rows * ROW_INFO_BYTES


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


def _params(problem: Attention, splits: int, num_states: int, least_queries: int) -> np.ndarray:
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
        least_queries,
        *options.window,
        options.sinks is not None and options.sinks.dtype == FLOAT32,
    )
    return as_bytes(fields, VARLEN_PARAMS)
