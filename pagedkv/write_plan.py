"""How a cache write is launched: kernel instance, grid and parameters, from the validated problem alone.

Needs no CuPy: the backends that run kernels and the list of instances that CI compiles share it.
"""

import numpy as np

from .arrays import ArrayView
from .dtypes import CUDA_NAMES, is_fp8
from .kernels import Instance
from .launch import LARGEST_GRID, Launch, as_bytes, common_vec, element_of
from .layout import CacheStrides
from .params import CACHE_WRITE_PARAMS, fast_divisor
from .problem import CacheWrite, Scale

# Few tokens want latency, many want bandwidth; tuned on an H200.
FEW_TOKENS = 512

# Flash layouts: packs that a lane keeps in flight, and threads of a CTA. Short CTAs come closest to a plain copy.
FEW_FLASH = (2, 64)
MANY_FLASH, MANY_FLASH_FP8 = (4, 32), (4, 64)

# Packed layout: tokens that a warp turns at once, and threads of a CTA. Sixteen 16-bit slots of a feature are one
# 32-byte sector.
FEW_PACKED, MANY_PACKED = (8, 128), (16, 32)


def plan_flash_write(problem: CacheWrite) -> Launch:
    """A power-of-two group of lanes per token."""
    instance = flash_write_instance(problem)
    *_, vec, packs_in_flight, threads = instance.arguments
    packs = problem.cache.shape.num_kv_heads * problem.cache.shape.head_size // vec
    lanes_log2 = min((-(-packs // packs_in_flight) - 1).bit_length(), threads.bit_length() - 1)
    tokens_per_cta = threads >> lanes_log2
    return _launch(problem, instance, -(-problem.num_tokens // tokens_per_cta), threads, lanes_log2)


def plan_packed_write(problem: CacheWrite) -> Launch:
    """A warp per tile of tokens and head."""
    instance = packed_write_instance(problem)
    *_, tile_tokens, threads = instance.arguments
    warps = -(-problem.num_tokens // tile_tokens) * problem.cache.shape.num_kv_heads
    return _launch(problem, instance, -(-warps * 32 // threads), threads, 0)


def _launch(problem: CacheWrite, instance: Instance, ctas: int, threads: int, lanes_log2: int) -> Launch:
    if ctas > LARGEST_GRID:
        raise ValueError(f"slot_mapping: expected fewer slots in one call, got {problem.num_tokens}")
    # blockIdx.y picks K or V.
    return Launch(instance, (ctas, 2), threads, write_params(problem, lanes_log2))


# ---- instances ------------------------------------------------------------------------------------------------------


def flash_write_instance(problem: CacheWrite) -> Instance:
    """The instance for a problem's dtypes, head size and the alignment that both ends of every row share."""
    cache = problem.cache
    distances = [
        element_of(problem.key, "key") - element_of(cache.key, "key_cache"),
        element_of(problem.value, "value") - element_of(cache.value, "value_cache"),
    ]
    per_head = cache.k_scale.per_head and is_fp8(cache.format)
    sizes, few = (cache.shape.head_size, _vec(problem, distances)), problem.num_tokens <= FEW_TOKENS
    return flash_write_instance_for(problem.key.dtype, cache.format, *sizes, scale_per_head=per_head, few=few)


def packed_write_instance(problem: CacheWrite) -> Instance:
    """The instance for a problem's dtypes, head and block size and the alignment of all four arrays."""
    cache = problem.cache
    caches = {"key_cache": cache.key, "value_cache": cache.value}
    arrays = {"key": problem.key, "value": problem.value, **caches}
    vec = _vec(problem, [element_of(array, name) for name, array in arrays.items()])
    sizes = (cache.shape.head_size, cache.shape.block_size, vec)
    return packed_write_instance_for(problem.key.dtype, cache.format, *sizes, few=problem.num_tokens <= FEW_TOKENS)


def flash_write_instance_for(
    dtype: np.dtype,
    cache_format: np.dtype,
    head_size: int,
    vec: int,
    *,
    scale_per_head: bool = False,
    few: bool = False,
) -> Instance:
    """The NHD and HND write that moves ``vec`` elements at once."""
    dtypes = (CUDA_NAMES[dtype], CUDA_NAMES[cache_format], str(scale_per_head).lower())
    many = MANY_FLASH_FP8 if is_fp8(cache_format) else MANY_FLASH
    arguments = (*dtypes, head_size, vec, *(FEW_FLASH if few else many))
    return Instance("cache_write.cu", "reshape_and_cache_flash", arguments)


def packed_write_instance_for(
    dtype: np.dtype, cache_format: np.dtype, head_size: int, block_size: int, vec: int, *, few: bool = False
) -> Instance:
    """The packed write that moves ``vec`` elements at once."""
    dtypes = (CUDA_NAMES[dtype], CUDA_NAMES[cache_format])
    arguments = (*dtypes, head_size, block_size, vec, *(FEW_PACKED if few else MANY_PACKED))
    return Instance("cache_write.cu", "reshape_and_cache", arguments)


def _vec(problem: CacheWrite, elements: list[int]) -> int:
    cache = problem.cache
    return common_vec([problem.key, problem.value, cache.key, cache.value], elements)


# ---- parameters -----------------------------------------------------------------------------------------------------


def write_arrays(problem: CacheWrite) -> list[ArrayView | None]:
    """The kernels' pointer parameters in order, None for a null pointer. A call's own arrays come in the same order."""
    cache = problem.cache
    arrays = [problem.key, problem.value, cache.key, cache.value, problem.slot_mapping]
    return [*arrays, cache.k_scale.array, cache.v_scale.array]


def write_params(problem: CacheWrite, lanes_per_token_log2: int) -> np.ndarray:
    """The kernel's by-value struct."""
    cache = problem.cache
    element_of(problem.slot_mapping, "slot_mapping")
    sides = [
        _side(problem.key, cache.key_strides, cache.k_scale),
        _side(problem.value, cache.value_strides, cache.v_scale),
    ]
    divisors = (fast_divisor(cache.shape.block_size), fast_divisor(cache.shape.num_kv_heads))
    fields = (sides, problem.slot_mapping.strides[0], *divisors, problem.num_tokens, lanes_per_token_log2)
    return as_bytes(fields, CACHE_WRITE_PARAMS)


def _side(new: ArrayView, strides: CacheStrides, scale: Scale) -> tuple[int | float, ...]:
    if scale.array is not None:
        element_of(scale.array, scale.name)
    scale_stride = scale.array.strides[0] if scale.per_head else 0
    return (*new.strides[:2], strides.block, strides.token, strides.head, scale.value, scale_stride)
