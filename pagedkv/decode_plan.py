"""How a decode step is launched: kernel instance, grid, parameters and workspace, from the validated problem alone.

Needs no CuPy: the backends that run kernels and the list of instances that CI compiles share it.
"""

from dataclasses import dataclass

import numpy as np

from .arrays import ArrayView
from .dtypes import CUDA_NAMES, FLOAT32, is_fp8
from .kernels import Instance
from .launch import LARGEST_GRID, Launch, as_bytes
from .params import DECODE_PARAMS, fast_divisor
from .problem import Attention
from .read_plan import ReadLaunch, are_aligned, check_addresses, result_fields, scale_arrays, score_fields
from .workspace import MOST_CTAS, MOST_ROWS, partials_nbytes

CTAS_PER_SM = 2
LEAST_TILES = 4  # of a CTA: one for each of its warps
# Fewer tiles of a CTA than these are better left to one CTA per SM; tuned on an H200.
MANY_TILES, MANY_TILES_FP8 = 64, 32
LEAST_EVEN = 0.85  # of all CTAs: how many are enough for shares that end where units do
SHARED_BYTES = 96 * 1024  # of a CTA: two of them fit into an SM of sm_90, one into those of sm_86, sm_89 and sm_120
MOST_TILES_AHEAD = 2
MOST_HEADS = 16  # of a warp: two columns of the tensor cores' tiles
MOST_UNITS = 4  # of a CTA at once
MOST_TOGETHER = 8  # CTAs that read the same blocks at the same time
TILE_TOKENS = 32
MOST_TILES = 2**31 - 1  # that shares can be counted in


def plan_decode(problem: Attention, num_sms: int) -> ReadLaunch:
    """v1 has one CTA per unit, v2 one per partition or, without a partition size, an equal share of all tiles each."""
    cache = problem.cache
    named = {"query": problem.query, "key_cache": cache.key, "value_cache": cache.value, "sinks": problem.options.sinks}
    check_addresses(problem, named | {"block_tables": problem.block_table, "seq_lens": problem.seq_lens})
    return plan_instance(problem, decode_instance(problem), num_sms)


def plan_instance(problem: Attention, instance: Instance, num_sms: int) -> ReadLaunch:
    """A decode step by one of the kernels that decode."""
    shape = problem.cache.shape
    group = problem.num_heads // shape.num_kv_heads
    heads, warps, tiles_ahead = _tiling(problem.query.dtype, problem.cache.format, shape.head_size, group)
    units_per_kv_head = -(-group // heads)
    units = Units(problem.num_seqs, shape.num_kv_heads * units_per_kv_head, heads, warps)
    division = _division(problem, units, num_sms)
    if division.ctas > LARGEST_GRID:
        raise ValueError(f"query: expected fewer sequences and partitions in one call, got {division.ctas} in all")
    params = _params(problem, units_per_kv_head, units, division)
    shared = warps * _scan_bytes(problem.query.dtype, problem.cache.format, shape.head_size, heads, tiles_ahead)
    launch = Launch(instance, (division.ctas,), warps * 32, params, shared)
    workspace_bytes = partials_nbytes(1, division.num_states, shape.head_size, 1)
    return ReadLaunch(launch, workspace_bytes, units.count if division.num_states else 0)


@dataclass(frozen=True, slots=True)
class Units:
    """What CTAs take: a sequence and ``heads`` query heads of one kv head each."""

    num_seqs: int
    per_sequence: int
    heads: int
    warps: int  # of a CTA

    @property
    def count(self) -> int:
        return self.num_seqs * self.per_sequence


@dataclass(frozen=True, slots=True)
class Division:
    """How units are divided over CTAs. ``partition_size`` is 0 for equal shares, of any number of tiles."""

    ctas: int
    num_states: int  # that they may leave to be merged
    partition_size: int
    num_partitions: int = 1  # of a unit, at most
    units_per_bundle: int = 1  # that a CTA takes at once
    ctas_per_share: int = 1  # that take the bundles of a group side by side


def _division(problem: Attention, units: Units, num_sms: int) -> Division:
    tiles = max(1, -(-problem.longest // TILE_TOKENS))
    if problem.has_equal_shares and units.count * tiles <= MOST_TILES:
        at_once = _units_per_bundle(units, num_sms)
        together = _ctas_per_share(units.per_sequence // at_once)
        many_tiles = MANY_TILES_FP8 if is_fp8(problem.cache.format) else MANY_TILES
        ctas = together * _num_shares(units.count // at_once // together, tiles, together, num_sms, many_tiles)
        states = 2 * ctas * at_once * units.heads
        return Division(ctas, states, partition_size=0, units_per_bundle=at_once, ctas_per_share=together)
    if problem.has_equal_shares or problem.partition_size == 0:
        return Division(units.count, 0, partition_size=LARGEST_GRID)
    partitions = max(1, problem.num_partials)
    states = problem.num_seqs * problem.num_heads * problem.num_partials
    return Division(units.count * partitions, states, min(problem.partition_size, LARGEST_GRID), partitions)


def _units_per_bundle(units: Units, num_sms: int) -> int:
    """As many as leave a bundle for nearly every CTA: more would be cut, and their states merged by few warps."""
    ctas = min(CTAS_PER_SM * num_sms, MOST_CTAS)
    most = min(MOST_UNITS, units.warps, MOST_ROWS // units.heads)
    for count in (4, 2):
        if count <= most and units.per_sequence % count == 0 and units.count >= LEAST_EVEN * ctas * count:
            return count
    return 1


def _ctas_per_share(bundles_per_sequence: int) -> int:
    """As many bundles of a sequence as are taken side by side: what lies side by side is then read together."""
    return next(count for count in range(MOST_TOGETHER, 0, -1) if bundles_per_sequence % count == 0)


def _num_shares(groups: int, tiles: int, together: int, num_sms: int, many_tiles: int) -> int:
    """Shares of the tiles of so many groups, if sequences are as long as they may be; each of ``together`` CTAs."""
    bundles = groups * together
    # Bundles that are shorter than that are better begun by as many CTAs as there may be.
    wanted = max(min(num_sms, bundles * tiles // LEAST_TILES), bundles * tiles // many_tiles, bundles)
    shares = max(1, min(CTAS_PER_SM * num_sms, wanted, MOST_CTAS) // together)
    # Shares that end where groups do, if all sequences are of one length, leave fewer states to merge.
    even = groups * (shares // groups) if groups <= shares else -(-groups // -(-groups // shares))
    return even if even >= LEAST_EVEN * shares else shares


# ---- instances ------------------------------------------------------------------------------------------------------


def decode_instance(problem: Attention) -> Instance:
    """The instance for a problem's dtypes, sizes, group of query heads and alignment."""
    shape = problem.cache.shape
    group = problem.num_heads // shape.num_kv_heads
    sizes = (shape.head_size, shape.block_size, group)
    return decode_instance_for(
        problem.query.dtype, problem.cache.format, *sizes, is_aligned=are_aligned(problem, cache_axes=2)
    )


def decode_instance_for(
    dtype: np.dtype, cache_format: np.dtype, head_size: int, block_size: int, group: int, *, is_aligned: bool = True
) -> Instance:
    """The kernel for groups of ``group`` query heads that share a kv head."""
    sizes = (head_size, block_size, *_tiling(dtype, cache_format, head_size, group), str(is_aligned).lower())
    return Instance("paged_attention.cu", "paged_attention", (CUDA_NAMES[dtype], CUDA_NAMES[cache_format], *sizes))


def varlen_decode_instance_for(dtype: np.dtype, cache_format: np.dtype, head_size: int, group: int) -> Instance:
    """The kernel over NHD and HND caches, for 16-bit queries on rows of whole packs that are aligned."""
    sizes = (head_size, *_tiling(dtype, cache_format, head_size, group))
    return Instance("varlen_decode.cu", "varlen_decode", (CUDA_NAMES[dtype], CUDA_NAMES[cache_format], *sizes))


def _tiling(dtype: np.dtype, cache_format: np.dtype, head_size: int, group: int) -> tuple[int, int, int]:
    """Query heads of a warp, warps and, of each, tiles on their way: as many as shared memory allows, and fewer warps
    where one does not fit."""
    heads = 8 if group <= 8 or dtype == FLOAT32 else MOST_HEADS
    for warps in (4, 2, 1):
        for tiles_ahead in range(MOST_TILES_AHEAD, 0, -1):
            if warps * _scan_bytes(dtype, cache_format, head_size, heads, tiles_ahead) <= SHARED_BYTES:
                return heads, warps, tiles_ahead
    raise AssertionError("one tile of the largest head fits")


def _scan_bytes(dtype: np.dtype, cache_format: np.dtype, head_size: int, heads: int, tiles_ahead: int) -> int:
    """Shared memory of a warp's scan: SMEM_BYTES of the kernel's two scans."""
    accumulators = heads * head_size * 4
    if dtype == FLOAT32:
        return 2 * accumulators + heads * TILE_TOKENS * 4
    stage = TILE_TOKENS * head_size * cache_format.itemsize
    return (2 * tiles_ahead + 1) * stage + (0 if accumulators <= stage else accumulators)


# ---- parameters -----------------------------------------------------------------------------------------------------


def decode_arrays(problem: Attention) -> list[ArrayView | None]:
    """The kernel's pointer parameters in order but for workspace and counters, None for a null pointer."""
    cache, options = problem.cache, problem.options
    arrays = [problem.query, cache.key, cache.value, problem.block_table, problem.seq_lens]
    arrays += [options.alibi_slopes, options.sinks, *scale_arrays(cache)]
    return [*arrays, problem.out, problem.lse_out]


def _params(problem: Attention, units_per_kv_head: int, units: Units, division: Division) -> np.ndarray:
    cache, options, shape = problem.cache, problem.options, problem.cache.shape
    left, _ = options.window
    fields = (
        *problem.query.strides[:2],
        *(
            stride
            for side in (cache.key_strides, cache.value_strides)
            for stride in (side.block, side.token, side.head)
        ),
        *problem.block_table.strides,
        *problem.seq_lens.strides,
        *((0,) if problem.query_start_loc is None else problem.query_start_loc.strides),
        *result_fields(problem),
        division.num_states,
        fast_divisor(shape.block_size),
        *score_fields(problem),
        problem.num_seqs,
        problem.num_heads // shape.num_kv_heads,
        units_per_kv_head,
        units.per_sequence,
        division.units_per_bundle,
        division.ctas_per_share,
        units.per_sequence // division.units_per_bundle // division.ctas_per_share,
        units.warps // division.units_per_bundle,
        left,
        division.partition_size,
        division.num_partitions,
        problem.num_heads,
        options.sinks is not None and options.sinks.dtype == FLOAT32,
    )
    return as_bytes(fields, DECODE_PARAMS)
