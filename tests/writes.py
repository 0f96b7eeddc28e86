"""Cache writes: poisoned caches in every layout, and where the bytes of each token belong, token by token."""

import functools

import ml_dtypes
import numpy as np

import pagedkv

FP8 = {"fp8": ml_dtypes.float8_e4m3fn, "fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
POISON = 0x7F  # every byte: a NaN in fp8, a large or NaN value elsewhere; what matters is that it stays
LAYOUTS = ("NHD", "HND", "packed")


def bits(array):
    """The array's bits, so that NaNs compare."""
    return array.view(BITS[array.itemsize])


def op_of(layout):
    """The op that writes this layout, to be called with arrays and options."""
    if layout == "packed":
        return pagedkv.reshape_and_cache
    return functools.partial(pagedkv.reshape_and_cache_flash, layout=layout)


def cache_shapes(layout, num_blocks, block_size, num_kv_heads, head_size, dtype):
    """Shapes of a key and a value cache."""
    x = 16 // np.dtype(dtype).itemsize
    return {
        "NHD": [(num_blocks, block_size, num_kv_heads, head_size)] * 2,
        "HND": [(num_blocks, num_kv_heads, block_size, head_size)] * 2,
        "packed": [
            (num_blocks, num_kv_heads, head_size // x, block_size, x),
            (num_blocks, num_kv_heads, head_size, block_size),
        ],
    }[layout]


def poisoned_caches(layout, num_blocks, block_size, num_kv_heads, head_size, dtype):
    """A key and a value cache, every byte poison."""
    shapes = cache_shapes(layout, num_blocks, block_size, num_kv_heads, head_size, dtype)
    itemsize = np.dtype(dtype).itemsize
    return [np.full(np.prod(shape) * itemsize, POISON, np.uint8).view(dtype).reshape(shape) for shape in shapes]


def token_of(cache, layout, block, offset):
    """The view [num_kv_heads, head_size] (packed keys: [num_kv_heads, head_size / x, x]) of one slot."""
    if layout == "NHD":
        return cache[block, offset]
    if layout == "HND":
        return cache[block, :, offset]
    return cache[block, :, :, offset]


def block_size_of(value_cache, layout):
    return value_cache.shape[{"NHD": 1, "HND": 2, "packed": 3}[layout]]


def encoded(rows, kv_cache_dtype, scale):
    """What the cache holds for rows [num_kv_heads, head_size]."""
    if kv_cache_dtype == "auto":
        return rows
    fp8 = FP8[kv_cache_dtype]
    largest = np.float32(ml_dtypes.finfo(fp8).max)
    quotient = rows.astype(np.float32) / np.reshape(np.float32(1 if scale is None else scale), (-1, 1))
    return np.clip(quotient, -largest, largest).astype(fp8).view(np.uint8)


def expected_caches(key, value, caches, slots, layout, kv_cache_dtype="auto", k_scale=None, v_scale=None):
    """Copies of the caches with each live token put in its place."""
    expected = [cache.copy() for cache in caches]
    block_size = block_size_of(caches[1], layout)
    for token, slot in enumerate(np.asarray(slots).tolist()):
        if slot < 0:
            continue
        for rows, cache, scale in zip((key, value), expected, (k_scale, v_scale), strict=True):
            target = token_of(cache, layout, slot // block_size, slot % block_size)
            target[...] = encoded(rows[token], kv_cache_dtype, scale).reshape(target.shape)
    return expected


def write(backend, key, value, caches, slots, layout, **options):
    """Calls the op of the layout on the backend's arrays; returns the caches as NumPy arrays."""
    put = {name: backend.put(option) if isinstance(option, np.ndarray) else option for name, option in options.items()}
    arrays = [backend.put(array) for array in (key, value, *caches, np.asarray(slots))]
    op_of(layout)(*arrays, **put)
    return [backend.get(array) for array in arrays[2:4]]


def check_write(backend, key, value, caches, slots, layout, **options):
    """Writes, and holds every byte of both caches against the expected ones."""
    expected = expected_caches(key, value, caches, slots, layout, **options)
    written = write(backend, key, value, caches, slots, layout, **options)
    for got, want, name in zip(written, expected, ("key_cache", "value_cache"), strict=True):
        np.testing.assert_array_equal(bits(got), bits(want), err_msg=name)


def random_rows(rng, num_tokens, num_kv_heads, head_size, dtype):
    """New keys and values, different from each other."""
    shape = (num_tokens, num_kv_heads, head_size)
    return [(rng.standard_normal(shape) * 3).astype(dtype) for _ in "kv"]


def scattered_slots(rng, num_tokens, num_slots):
    """Distinct slots in random order."""
    return rng.permutation(num_slots)[:num_tokens]


def runs_of_slots(rng, lengths, block_size, first_offset=0):
    """Consecutive slots of several sequences, each in scattered blocks of its own, as a prefill writes them.
    -> slots, num_blocks"""
    blocks_per_seq = [-(-(first_offset + length) // block_size) for length in lengths]
    ids = iter(rng.permutation(sum(blocks_per_seq)))
    slots = []
    for length, count in zip(lengths, blocks_per_seq, strict=True):
        table = np.array([next(ids) for _ in range(count)])
        position = first_offset + np.arange(length)
        slots.append(table[position // block_size] * block_size + position % block_size)
    return np.concatenate(slots), sum(blocks_per_seq)
