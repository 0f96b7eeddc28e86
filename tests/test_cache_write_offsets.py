"""Writes at offsets past 2^31 and 2^32."""

import numpy as np
import pytest
from far_blocks import BLOCK_STRIDE, blocks_far_apart, sparse_bytes
from writes import bits, cache_shapes, encoded, op_of, random_rows, token_of

import pagedkv

NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 4, 8, 2, 32
WRAPPED = [2**31, 2**32]


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_offsets_past_two_and_four_gigabytes(backend, rng, layout):
    key, value = random_rows(rng, 6, HEADS, HEAD_SIZE, np.float16)
    slots = np.array([3, 9, 17, 23, 24, 31])  # blocks 0 to 3
    shapes = cache_shapes(layout, NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE, np.uint8)
    buffers = [sparse_bytes(backend, (NUM_BLOCKS - 1) * BLOCK_STRIDE + 4096) for _ in "kv"]
    caches = [blocks_far_apart(buffer, shape) for buffer, shape in zip(buffers, shapes, strict=True)]
    arrays = [backend.put(key), backend.put(value), *caches, backend.put(slots)]
    op_of(layout)(*arrays, kv_cache_dtype="fp8", k_scale=0.5, v_scale=0.25)

    for rows, cache, scale in zip((key, value), caches, (0.5, 0.25), strict=True):
        for token, slot in enumerate(slots):
            block, offset = divmod(int(slot), BLOCK_SIZE)
            target = token_of(cache, layout, block, offset)
            want = encoded(rows[token], "fp8", scale)
            np.testing.assert_array_equal(bits(backend.get(target)).reshape(want.shape), want)
    block_bytes = BLOCK_SIZE * HEADS * HEAD_SIZE
    for buffer in buffers:  # an offset that lost its high bits lands here
        for block in (2, 3):
            for wrap in WRAPPED:
                start = block * BLOCK_STRIDE % wrap
                if start % BLOCK_STRIDE:
                    assert not backend.get(buffer[start : start + block_bytes]).any()


@pytest.mark.parametrize("slot", [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 12345])
@pytest.mark.parametrize("block_size", [16, 17])
def test_slots_past_31_and_32_bits(backend, rng, slot, block_size):
    """With a block stride of 0 all blocks share one block's memory, and huge slot numbers cost nothing to hold."""
    key, value = random_rows(rng, 1, 1, 8, np.float16)
    num_blocks = slot // block_size + 1
    buffers = [backend.put(np.zeros(block_size * 8 + 4096, np.float16)) for _ in "kv"]
    shape, strides = (num_blocks, block_size, 1, 8), (0, 16, 16, 2)
    if backend.name != "cuda":
        caches = [np.lib.stride_tricks.as_strided(buffer, shape, strides) for buffer in buffers]
    else:
        import cupy

        caches = [cupy.lib.stride_tricks.as_strided(buffer, shape, strides) for buffer in buffers]
    pagedkv.reshape_and_cache_flash(backend.put(key), backend.put(value), *caches, backend.put(np.array([slot])))
    for rows, buffer in zip((key, value), buffers, strict=True):
        got = backend.get(buffer)
        offset = slot % block_size * 8
        np.testing.assert_array_equal(got[offset : offset + 8], rows[0, 0])
        assert not got[:offset].any()
        assert not got[offset + 8 :].any()
