"""Gathers and conversions: caches of random bits, ranges of sequences in them, what a plain loop makes of both."""

import ml_dtypes
import numpy as np
from writes import BITS, FP8, cache_shapes, token_of

import pagedkv

LAYOUTS = ("NHD", "HND", "packed")
GARBAGE = (-1, 2**31 - 1, "num_blocks")
POISON = 0xA5  # every byte of an output before a call
SPARE_ROWS = 3


def random_bits(rng, shape, dtype, kv_cache_dtype="auto"):
    """Numbers of any bits, NaN payloads included; of codes no NaN and no infinity."""
    dtype = np.dtype(dtype)
    if kv_cache_dtype != "auto":
        largest = 0x7E if FP8[kv_cache_dtype] is ml_dtypes.float8_e4m3fn else 0x7B
        return (rng.integers(0, largest + 1, shape) | rng.integers(0, 2, shape) << 7).astype(np.uint8)
    return rng.integers(0, 2 ** (8 * dtype.itemsize), shape, BITS[dtype.itemsize]).view(dtype)


def random_caches(rng, layout, num_blocks, block_size, heads, head_size, dtype, kv_cache_dtype="auto"):
    """A key and a value cache without two equal places to speak of."""
    stored = dtype if kv_cache_dtype == "auto" else np.uint8
    shapes = cache_shapes(layout, num_blocks, block_size, heads, head_size, stored)
    return [random_bits(rng, shape, stored, kv_cache_dtype) for shape in shapes]


def poisoned(shape, dtype):
    return np.full(np.prod(shape, dtype=int) * np.dtype(dtype).itemsize, POISON, np.uint8).view(dtype).reshape(shape)


def batch(
    rng,
    lens,
    starts=None,
    *,
    layout="NHD",
    block_size=16,
    heads=2,
    head_size=32,
    dtype=np.float16,
    kv_cache_dtype="auto",
    **scales,
):
    """The arguments of one gather. Table entries outside the ranges are garbage."""
    first = np.zeros(len(lens), int) if starts is None else np.array(starts)
    ends = first + np.array(lens, int)
    max_blocks = max([-(-end // block_size) for end in ends.tolist()], default=0) + 1
    num_blocks = sum(-(-n // block_size) + 1 for n in lens) + 2
    free_ids = iter(rng.permutation(num_blocks).tolist())
    garbage = [num_blocks if entry == "num_blocks" else entry for entry in GARBAGE]
    table = np.resize(np.array(garbage, np.int32), (len(lens), max_blocks))
    for row, start, end in zip(table, first.tolist(), ends.tolist(), strict=True):
        if end > start:
            for column in range(start // block_size, -(-end // block_size)):
                row[column] = next(free_ids)
    caches = random_caches(rng, layout, num_blocks, block_size, heads, head_size, dtype, kv_cache_dtype)
    arguments = {"key_cache": caches[0], "value_cache": caches[1], "block_table": table, "layout": layout}
    arguments["cu_seq_lens"] = np.cumsum([0, *lens]).astype(np.int32)
    if starts is not None:
        arguments["seq_starts"] = np.array(starts, np.int32)
    return arguments | ({} if kv_cache_dtype == "auto" else {"kv_cache_dtype": kv_cache_dtype, **scales})


def decoded(stored, kv_cache_dtype, scale, dtype):
    """Numbers of one token ``[heads, head_size]``: codes times the scale in float32, then rounded once."""
    if kv_cache_dtype == "auto":
        return stored
    per_head = np.reshape(np.float32(1 if scale is None else scale), (-1, 1))
    with np.errstate(over="ignore", under="ignore"):
        return (stored.view(FP8[kv_cache_dtype]).astype(np.float32) * per_head).astype(dtype)


def expected_rows(arguments, key_out, value_out):
    """Copies of the outputs with every row of every range put in its place, one by one."""
    layout, kv_cache_dtype = arguments["layout"], arguments.get("kv_cache_dtype", "auto")
    row_starts, table = arguments["cu_seq_lens"].tolist(), arguments["block_table"].astype(int)
    starts = arguments.get("seq_starts", np.zeros(len(table), int)).tolist()
    block_size = arguments["value_cache"].shape[{"NHD": 1, "HND": 2, "packed": 3}[layout]]
    expected = []
    for side, out in (("key", key_out), ("value", value_out)):
        cache, scale, out = arguments[f"{side}_cache"], arguments.get(f"{side[0]}_scale"), out.copy()
        for sequence, start in enumerate(starts):
            for i in range(row_starts[sequence + 1] - row_starts[sequence]):
                block, offset = table[sequence, (start + i) // block_size], (start + i) % block_size
                stored = np.ascontiguousarray(token_of(cache, layout, block, offset)).reshape(out.shape[1:])
                out[row_starts[sequence] + i] = decoded(stored, kv_cache_dtype, scale, out.dtype)
        expected.append(out)
    return expected


def put_all(backend, arguments):
    return {name: backend.put(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}


def outputs_for(arguments, dtype=None, spare_rows=SPARE_ROWS):
    """Poisoned outputs with a few rows more than the ranges have."""
    cache, layout = arguments["value_cache"], arguments["layout"]
    heads, head_size = {"NHD": cache.shape[2:], "HND": cache.shape[1::2], "packed": cache.shape[1:3]}[layout]
    if dtype is None:
        dtype = cache.dtype if arguments.get("kv_cache_dtype", "auto") == "auto" else ml_dtypes.bfloat16
    shape = (int(arguments["cu_seq_lens"][-1]) + spare_rows, heads, head_size)
    return [poisoned(shape, dtype) for _ in "kv"]


def assert_same_bits(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    got, expected = (np.ascontiguousarray(array).view(BITS[expected.itemsize]) for array in (got, expected))
    np.testing.assert_array_equal(got, expected)


def check_gather(backend, arguments, dtype=None):
    """Gathers into poisoned outputs, and holds every byte of them against the plain loop's."""
    outputs = outputs_for(arguments, dtype)
    expected = expected_rows(arguments, *outputs)
    given = put_all(backend, arguments | {"key_out": outputs[0].copy(), "value_out": outputs[1].copy()})
    results = pagedkv.gather_cache(**given)
    assert all(result is given[name] for result, name in zip(results, ("key_out", "value_out"), strict=True))
    for got, want in zip(results, expected, strict=True):
        assert_same_bits(backend.get(got), want)
    return expected
