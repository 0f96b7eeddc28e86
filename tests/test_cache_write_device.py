"""What only a device shows: graph capture and replay, checked(), index conversion, repeated calls, foreign streams."""

import numpy as np
import pytest
from writes import (
    LAYOUTS,
    bits,
    expected_caches,
    op_of,
    poisoned_caches,
    random_rows,
    runs_of_slots,
    scattered_slots,
)

import pagedkv

pytestmark = pytest.mark.gpu

SHAPE = {"num_blocks": 4, "block_size": 16, "num_kv_heads": 2, "head_size": 64}


def case(cupy, rng, layout, num_tokens=40):
    key, value = random_rows(rng, num_tokens, 2, 64, np.float16)
    caches = poisoned_caches(layout, *SHAPE.values(), np.float16)
    slots = scattered_slots(rng, num_tokens, 64)
    expected = expected_caches(key, value, caches, slots, layout)
    return [cupy.asarray(array) for array in (key, value, *caches, slots)], expected


def assert_written(arrays, expected):
    for got, want in zip(arrays[2:4], expected, strict=True):
        np.testing.assert_array_equal(bits(got.get()), bits(want))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graph_replay_with_other_contents(cupy, rng, layout):
    """Captured once; replayed after keys, values and slots in the same buffers have changed."""
    arrays, _ = case(cupy, rng, layout)
    op, stream = op_of(layout), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        op(*arrays)
        stream.begin_capture()
        op(*arrays)
        graph = stream.end_capture()
    stream.synchronize()
    fresh, expected = case(cupy, rng, layout)
    for buffer, content in zip(arrays, fresh, strict=True):
        buffer[...] = content
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert_written(arrays, expected)


def test_capture_refuses_what_needs_the_host(cupy, rng):
    arrays, _ = case(cupy, rng, "NHD")
    narrow = arrays[4].astype(np.int32)
    pagedkv.reshape_and_cache_flash(*arrays)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(TypeError, match="slot_mapping: expected int64 under graph capture, got int32"):
                pagedkv.reshape_and_cache_flash(*arrays[:4], narrow)
            with pagedkv.checked(), pytest.raises(RuntimeError, match="graph capture"):
                pagedkv.reshape_and_cache_flash(*arrays)
        finally:
            stream.end_capture()


def test_repeated_calls_see_what_changed(cupy, rng):
    """Same shapes again, with another scale, alignment, stride or dtype: each is a launch of its own."""
    key, value = random_rows(rng, 10, 2, 64, np.float16)
    slots = cupy.asarray(scattered_slots(rng, 10, 64))
    for _ in range(2):
        for scale in (0.5, 2.0):
            options = {"kv_cache_dtype": "fp8", "k_scale": scale, "v_scale": 1.0}
            caches = poisoned_caches("NHD", *SHAPE.values(), np.uint8)
            arrays = [cupy.asarray(array) for array in (key, value, *caches)] + [slots]
            pagedkv.reshape_and_cache_flash(*arrays, **options)
            assert_written(arrays, expected_caches(key, value, caches, slots.get(), "NHD", **options))
        for offset in (0, 1, 4):
            room = cupy.zeros(key.size + offset, np.float16)
            shifted = room[offset:].reshape(key.shape)
            shifted[...] = cupy.asarray(key)
            caches = poisoned_caches("NHD", *SHAPE.values(), np.float16)
            arrays = [shifted, cupy.asarray(value), *map(cupy.asarray, caches), slots]
            pagedkv.reshape_and_cache_flash(*arrays)
            assert_written(arrays, expected_caches(key, value, caches, slots.get(), "NHD"))


def test_errors_come_at_every_call(cupy, rng):
    """A call that was rejected is not remembered, nor does a good one excuse a bad one."""
    arrays, expected = case(cupy, rng, "NHD")
    pagedkv.reshape_and_cache_flash(*arrays)
    for _ in range(2):
        with pytest.raises(ValueError, match="value: expected shape"):
            pagedkv.reshape_and_cache_flash(arrays[0], arrays[1][:5], *arrays[2:])
        with pytest.raises(TypeError, match="slot_mapping: expected signed integers"):
            pagedkv.reshape_and_cache_flash(*arrays[:4], arrays[4].astype(np.float32))
    assert_written(arrays, expected)


def test_writes_follow_the_current_stream(cupy, rng, queue_slow_work):
    """A write queued behind slow work on a stream sees what that work leaves."""
    arrays, _ = case(cupy, rng, "NHD")
    fresh, expected = case(cupy, rng, "NHD")
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        queue_slow_work()
        for buffer, content in zip(arrays, fresh, strict=True):
            buffer[...] = content
        pagedkv.reshape_and_cache_flash(*arrays)
    stream.synchronize()
    assert_written(arrays, expected)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_tokens_take_the_wide_tiles(cupy, rng, layout):
    """More tokens than the latency-bound shapes serve, in runs that begin anywhere in a block."""
    slots, num_blocks = runs_of_slots(rng, [300, 17, 1, 290, 63], 16, first_offset=5)
    key, value = random_rows(rng, slots.size, 2, 64, np.float16)
    caches = poisoned_caches(layout, num_blocks, 16, 2, 64, np.float16)
    arrays = [cupy.asarray(array) for array in (key, value, *caches, slots)]
    op_of(layout)(*arrays)
    assert_written(arrays, expected_caches(key, value, caches, slots, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_one_array_is_misaligned(cupy, rng, layout):
    """Each of the four arrays in turn begins one element after a boundary."""
    key, value = random_rows(rng, 10, 2, 64, np.float16)
    caches = poisoned_caches(layout, *SHAPE.values(), np.float16)
    slots = scattered_slots(rng, 10, 64)
    expected = expected_caches(key, value, caches, slots, layout)
    for misaligned in range(4):
        arrays = [cupy.asarray(array) for array in (key, value, *caches, slots)]
        room = cupy.zeros(arrays[misaligned].size + 1, np.float16)
        shifted = room[1:].reshape(arrays[misaligned].shape)
        shifted[...] = arrays[misaligned]
        arrays[misaligned] = shifted
        op_of(layout)(*arrays)
        assert_written(arrays, expected)
