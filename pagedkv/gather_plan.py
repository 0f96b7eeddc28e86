"""How reads of whole tokens are launched: kernel instances, grids and parameters, from the validated problem alone.

Needs no CuPy: the backends that run kernels and the list of instances that CI compiles share it.
"""

import numpy as np

from .arrays import ArrayView
from .dtypes import CUDA_NAMES
from .kernels import Instance
from .launch import LARGEST_GRID, Launch, as_bytes, common_vec, element_of
from .layout import PACK_BYTES, CacheShape, copy_strides
from .params import CONVERT_PARAMS, GATHER_PARAMS, fast_divisor
from .problem import ConvertLayout, GatherCache, PagedCache, Scale

THREADS = 128
TILE_BYTES = 2**14  # that a CTA writes, about: each thread a few packs
TOKENS_IN_FLIGHT = 4  # that a thread should have to load at once
SECTOR_BYTES = 32
MOST_TOKEN_LANES = 16  # with fewer lanes for the packs of a token its rows would not be touched in whole sectors
MOST_ROWS = 2**31 - 1  # that int32 starts can name

Strides = tuple[int, int, int, int]  # of blocks, tokens, heads and packs


# ---- gather_cache ---------------------------------------------------------------------------------------------------


def plan_gather(problem: GatherCache) -> Launch:
    """A CTA for some rows and heads."""
    instance, sizes = gather_instance(problem), problem.cache.shape
    _, _, vec, token_lanes, *_ = instance.arguments
    tile, grid = _tile(sizes, problem.num_rows, problem.key_out.dtype, vec, token_lanes, "key_out")
    table, starts = problem.block_table, problem.seq_starts
    for array, name in ((table, "block_table"), (problem.cu_seq_lens, "cu_seq_lens"), (starts, "seq_starts")):
        if array is not None:
            element_of(array, name)
    sides = [
        _gather_side(problem.cache.key, problem.cache, problem.cache.k_scale, problem.key_out),
        _gather_side(problem.cache.value, problem.cache, problem.cache.v_scale, problem.value_out),
    ]
    strides = (*table.strides, problem.cu_seq_lens.strides[0], 0 if starts is None else starts.strides[0])
    num_rows = min(problem.num_rows, MOST_ROWS)
    fields = (sides, *strides, fast_divisor(sizes.block_size), tile, problem.num_seqs, num_rows)
    return Launch(instance, grid, THREADS, as_bytes(fields, GATHER_PARAMS))


def gather_instance(problem: GatherCache) -> Instance:
    """The instance for a problem's dtypes and layout and the alignment of all four arrays."""
    cache = problem.cache
    arrays = {"key_out": problem.key_out, "value_out": problem.value_out}
    vec = _vec(arrays | {"key_cache": cache.key, "value_cache": cache.value}, cache.shape)
    return gather_instance_for(problem.key_out.dtype, cache.format, vec, is_packed=cache.layout == "packed")


def gather_instance_for(dtype: np.dtype, kv_format: np.dtype, vec: int, *, is_packed: bool) -> Instance:
    """The gather that moves ``vec`` elements at once."""
    lanes = _token_lanes(kv_format) if is_packed else 1
    arguments = (CUDA_NAMES[dtype], CUDA_NAMES[kv_format], vec, lanes, TOKENS_IN_FLIGHT, THREADS)
    return Instance("gather.cu", "gather_cache", arguments)


def gather_arrays(problem: GatherCache) -> list[ArrayView | None]:
    """The kernel's pointer parameters in order, None for a null pointer. A call's own arrays come in the same order."""
    cache = problem.cache
    inputs = [cache.key, cache.value, problem.block_table, problem.cu_seq_lens, problem.seq_starts]
    return [*inputs, cache.k_scale.array, cache.v_scale.array, problem.key_out, problem.value_out]


def _gather_side(side: ArrayView, cache: PagedCache, scale: Scale, out: ArrayView) -> tuple:
    if scale.array is not None:
        element_of(scale.array, scale.name)
    out_strides = (0, *out.strides[:2], PACK_BYTES // out.dtype.itemsize)
    scale_stride = scale.array.strides[0] if scale.per_head else 0
    return copy_strides(side, cache.layout), out_strides, scale.value, scale_stride


# ---- convert_layout -------------------------------------------------------------------------------------------------


def plan_convert(problem: ConvertLayout) -> Launch:
    """A CTA for some slots and heads."""
    instance, source, target = convert_instance(problem), problem.source, problem.target
    _, vec, token_lanes, *_ = instance.arguments
    sizes, turns = source.shape, token_lanes > 1
    tile, grid = _tile(sizes, sizes.num_slots, source.key.dtype, vec, token_lanes, "key_cache")
    sides = [
        (_block_strides(source.key, source, turns), _block_strides(target.key, target, turns)),
        (_block_strides(source.value, source, turns), _block_strides(target.value, target, turns)),
    ]
    fields = (sides, fast_divisor(sizes.block_size), tile, sizes.num_slots)
    return Launch(instance, grid, THREADS, as_bytes(fields, CONVERT_PARAMS))


def convert_instance(problem: ConvertLayout) -> Instance:
    """The instance for a problem's element size and layouts and the alignment of all four arrays."""
    source, target = problem.source, problem.target
    arrays = {"key_cache": source.key, "value_cache": source.value, "key_out": target.key, "value_out": target.value}
    vec = _vec(arrays, source.shape)
    return convert_instance_for(source.key.dtype, vec, source.layout == "packed", target.layout == "packed")


def convert_instance_for(dtype: np.dtype, vec: int, from_packed: bool, to_packed: bool) -> Instance:
    """The conversion that moves ``vec`` elements at once. Within packed blocks nothing is turned round."""
    turns = from_packed != to_packed
    to_packed = str(turns and to_packed).lower()
    lanes = _token_lanes(dtype) if turns else 1
    arguments = (dtype.itemsize, vec, lanes, to_packed, TOKENS_IN_FLIGHT, THREADS)
    return Instance("gather.cu", "convert_layout", arguments)


def convert_arrays(problem: ConvertLayout) -> list[ArrayView]:
    """The kernel's pointer parameters in order. A call's own arrays come in the same order."""
    return [problem.source.key, problem.source.value, problem.target.key, problem.target.value]


def _block_strides(side: ArrayView, cache: PagedCache, turns: bool) -> Strides:
    if turns or cache.layout != "packed":
        return copy_strides(side, cache.layout)
    # What a packed block holds of a head is contiguous, and is copied as if it were rows of features.
    block, head = side.strides[:2]
    return block, cache.shape.head_size, head, PACK_BYTES // side.dtype.itemsize


# ---- both -----------------------------------------------------------------------------------------------------------


def _vec(arrays: dict[str, ArrayView], sizes: CacheShape) -> int:
    """Elements that a thread moves at once; the first array has the widest ones."""
    elements = [element_of(array, name) for name, array in arrays.items()]
    return common_vec(list(arrays.values()), [*elements, sizes.head_size])


def _token_lanes(dtype: np.dtype) -> int:
    """Adjacent lanes that take adjacent tokens: of packed values as many as share a sector."""
    return min(MOST_TOKEN_LANES, SECTOR_BYTES // dtype.itemsize)


def _tile(
    sizes: CacheShape, num_tokens: int, dtype: np.dtype, vec: int, token_lanes: int, name: str
) -> tuple[tuple, tuple[int, int, int]]:
    """The fields of a ``CopyTile``, and the grid: tiles of tokens, K and V, groups of heads."""
    head_bytes, packs_per_head = sizes.head_size * dtype.itemsize, sizes.head_size // vec
    fewest = 1 if token_lanes == 1 else token_lanes * TOKENS_IN_FLIGHT
    num_heads = _largest_divisor(sizes.num_kv_heads, TILE_BYTES // (head_bytes * fewest))
    tile_tokens = min(THREADS, max(fewest, TILE_BYTES // (head_bytes * num_heads) // token_lanes * token_lanes))
    ctas = -(-num_tokens // tile_tokens)
    if ctas > LARGEST_GRID:
        raise ValueError(f"{name}: expected fewer tokens in one call, got {num_tokens}")
    teams = THREADS // token_lanes  # of lanes that take adjacent tokens
    packs_per_step = min(num_heads * packs_per_head, teams)
    tokens_per_step = teams // packs_per_step * token_lanes
    divisors = (fast_divisor(packs_per_head), fast_divisor(packs_per_step))
    return (*divisors, tokens_per_step, num_heads, tile_tokens), (ctas, 2, sizes.num_kv_heads // num_heads)


def _largest_divisor(number: int, most: int) -> int:
    return max((divisor for divisor in range(1, most + 1) if number % divisor == 0), default=1)
