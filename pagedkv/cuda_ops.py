"""CUDA backend: turns problems into launches of the kernels in ``cuda/``."""

import math
import sys
from functools import cache
from typing import Any

import cupy
import numpy as np

from . import indices, kernels
from .arrays import ArrayView, view
from .context import is_checked
from .dtypes import CUDA_NAMES, INT64
from .kernels import Instance
from .layout import CacheStrides
from .params import CACHE_WRITE_PARAMS, fast_divisor
from .problem import CacheWrite, Scale

LARGEST_INT32 = 2**31 - 1

PACK_BYTES = 16  # the widest access of a thread

# Flash layouts: packs that a lane keeps in flight, and what it moves of a token if the token's CTA has lanes enough.
PACKS_IN_FLIGHT = 1
FLASH_WRITE_THREADS = 128

# Packed layout: tokens of a warp, whose slots it stores side by side; the fewer, the more lanes share a token.
TOKENS_PER_WARP = 16
PACKED_WRITE_THREADS = 128


# ---- writes ---------------------------------------------------------------------------------------------------------


def reshape_and_cache_flash(problem: CacheWrite) -> None:
    """One launch of the kernel of the same name: a group of lanes per token, K and V side by side."""
    if problem.num_tokens == 0:
        return
    instance = flash_write_instance(problem)
    lanes_log2 = _lanes_per_token_log2(problem, *instance.arguments[3:])
    grid = (-(-problem.num_tokens // (FLASH_WRITE_THREADS >> lanes_log2)), 2)
    _launch_write(problem, instance, grid, FLASH_WRITE_THREADS, lanes_log2)


def reshape_and_cache(problem: CacheWrite) -> None:
    """One launch of the kernel of the same name: a warp per group of tokens and head, for K and for V."""
    if problem.num_tokens == 0:
        return
    warps = -(-problem.num_tokens // TOKENS_PER_WARP) * problem.cache.shape.num_kv_heads
    grid = (-(-warps * 32 // PACKED_WRITE_THREADS), 2)
    _launch_write(problem, packed_write_instance(problem), grid, PACKED_WRITE_THREADS, 0)


def flash_write_instance(problem: CacheWrite) -> Instance:
    """The template instance for these dtypes, head size and the alignment that both ends of every row share."""
    cache = problem.cache
    distances = [
        _element(new, "key or value") - _element(old, "key_cache or value_cache")
        for new, old in ((problem.key, cache.key), (problem.value, cache.value))
    ]
    sizes = (cache.shape.head_size, _vec(problem, distances), PACKS_IN_FLIGHT, FLASH_WRITE_THREADS)
    return Instance("cache_write.cu", "reshape_and_cache_flash", (*_write_dtypes(problem), *sizes))


def packed_write_instance(problem: CacheWrite) -> Instance:
    """The template instance for these dtypes, head and block size and the alignment of all four arrays."""
    shape = problem.cache.shape
    caches = {"key_cache": problem.cache.key, "value_cache": problem.cache.value}
    arrays = {"key": problem.key, "value": problem.value, **caches}
    elements = [_element(array, name) for name, array in arrays.items()]
    sizes = (shape.head_size, shape.block_size, _vec(problem, elements), TOKENS_PER_WARP, PACKED_WRITE_THREADS)
    return Instance("cache_write.cu", "reshape_and_cache", (*_write_dtypes(problem), *sizes))


def _write_dtypes(problem: CacheWrite) -> tuple[str, str]:
    return CUDA_NAMES[problem.key.dtype], CUDA_NAMES[problem.cache.format]


def _vec(problem: CacheWrite, elements: list[int]) -> int:
    """Elements a thread moves at once: as many as a pack holds and alignment allows."""
    strides = [
        stride
        for array in (problem.key, problem.value, problem.cache.key, problem.cache.value)
        for size, stride in zip(array.shape[:-1], array.strides[:-1], strict=True)
        if size > 1
    ]
    return math.gcd(PACK_BYTES // problem.key.dtype.itemsize, *elements, *strides)


def _element(array: ArrayView, name: str) -> int:
    """The array's address in elements."""
    element, rest = divmod(array.pointer, array.dtype.itemsize)
    if rest:
        raise ValueError(
            f"{name}: expected an address that is a multiple of {array.dtype.itemsize}, got {array.pointer}"
        )
    return element


def _lanes_per_token_log2(problem: CacheWrite, vec: int, packs_in_flight: int, threads: int) -> int:
    shape = problem.cache.shape
    wanted = -(-shape.num_kv_heads * shape.head_size // (vec * packs_in_flight))
    return min(threads.bit_length() - 1, (wanted - 1).bit_length())


def _write_params(problem: CacheWrite, slot_stride: int, lanes_per_token_log2: int) -> np.ndarray:
    cache = problem.cache
    sides = [
        _side(problem.key, cache.key_strides, cache.k_scale),
        _side(problem.value, cache.value_strides, cache.v_scale),
    ]
    divisors = (fast_divisor(cache.shape.block_size), fast_divisor(cache.shape.num_kv_heads))
    fields = (sides, slot_stride, *divisors, problem.num_tokens, lanes_per_token_log2)
    # As plain bytes: CuPy describes a structured dtype field by field at every launch.
    return np.array(fields, CACHE_WRITE_PARAMS).view(f"V{CACHE_WRITE_PARAMS.itemsize}")


def _side(new: ArrayView, strides: CacheStrides, scale: Scale) -> tuple[Any, ...]:
    scale_stride = scale.array.strides[0] if scale.per_head else 0
    return (*new.strides[:2], strides.block, strides.token, strides.head, scale.value, scale_stride)


def _launch_write(
    problem: CacheWrite, instance: Instance, grid: tuple[int, int], threads: int, lanes_per_token_log2: int
) -> None:
    if grid[0] > LARGEST_INT32:
        raise ValueError(f"slot_mapping: expected fewer slots in one call, got {problem.num_tokens}")
    cache = problem.cache
    stream = _stream(problem.key)
    with _on_device(problem.key.device):
        slots = _as_int64(problem.slot_mapping, "slot_mapping", stream)
        if is_checked():
            indices.check_slots(problem, _on_host(slots, "slot_mapping", stream))
        params = _write_params(problem, slots.strides[0], lanes_per_token_log2)
        scales = (0 if scale.array is None else scale.array.pointer for scale in (cache.k_scale, cache.v_scale))
        arrays = (problem.key, problem.value, cache.key, cache.value, slots)
        arguments = (*(array.pointer for array in arrays), *scales, params)
        kernels.load(instance, problem.key.device)(grid, (threads,), arguments, stream=stream)


# ---- devices and streams --------------------------------------------------------------------------------------------


class _ForeignStream:
    """Another framework's stream by its pointer, in the CUDA stream protocol."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@cache
def _foreign_stream(pointer: int) -> Any:
    return cupy.cuda.Stream.from_external(_ForeignStream(pointer)) if pointer else cupy.cuda.Stream.null


def _stream(array: ArrayView) -> Any:
    """The stream on which the array's framework works now, on the array's device."""
    if array.framework == "torch":
        return _foreign_stream(sys.modules["torch"].cuda.current_stream(array.device).cuda_stream)
    return cupy.cuda.get_current_stream(array.device)


class _on_device:  # noqa: N801 - reads as a statement
    """Makes a device current; free where it already is, which CuPy's own context manager is not."""

    def __init__(self, device: int) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.previous = cupy.cuda.runtime.getDevice()
        if self.previous != self.device:
            cupy.cuda.runtime.setDevice(self.device)

    def __exit__(self, *exception: object) -> None:
        if self.previous != self.device:
            cupy.cuda.runtime.setDevice(self.previous)


def _as_cupy(array: ArrayView) -> Any:
    size = array.dtype.itemsize
    span = sum((extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)) + 1
    memory = cupy.cuda.UnownedMemory(array.pointer, span * size, array.owner, array.device)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(array.shape, array.dtype, pointer, tuple(stride * size for stride in array.strides))


def _as_int64(array: ArrayView, name: str, stream: Any) -> ArrayView:
    if array.dtype == INT64:
        return array
    if cupy.cuda.runtime.streamIsCapturing(stream.ptr):
        raise TypeError(f"{name}: expected int64 under graph capture, got {array.dtype.name}")
    with stream:
        return view(_as_cupy(array).astype(INT64), name)


def _on_host(array: ArrayView, name: str, stream: Any) -> np.ndarray:
    if cupy.cuda.runtime.streamIsCapturing(stream.ptr):
        raise RuntimeError(f"{name}: checked() reads the device, which graph capture does not allow")
    with stream:
        return _as_cupy(array).get()
