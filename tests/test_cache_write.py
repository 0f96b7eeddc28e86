"""reshape_and_cache and reshape_and_cache_flash: every kind of input of a write, byte for byte."""

import ml_dtypes
import numpy as np
import pytest
from writes import (
    LAYOUTS,
    bits,
    check_write,
    expected_caches,
    op_of,
    poisoned_caches,
    random_rows,
    runs_of_slots,
    scattered_slots,
    token_of,
    write,
)

import pagedkv

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32]
FORMATS = ["auto", "fp8_e4m3", "fp8_e5m2"]


def cache_dtype(dtype, kv_cache_dtype):
    return dtype if kv_cache_dtype == "auto" else np.uint8


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_dtype_and_format(backend, rng, dtype, kv_cache_dtype, layout):
    key, value = random_rows(rng, 37, 3, 64, dtype)
    caches = poisoned_caches(layout, 5, 16, 3, 64, cache_dtype(dtype, kv_cache_dtype))
    slots = scattered_slots(rng, 37, 80)
    check_write(backend, key, value, caches, slots, layout, kv_cache_dtype=kv_cache_dtype, k_scale=0.37, v_scale=1.9)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_scale_per_head(backend, rng, kv_cache_dtype, layout):
    key, value = random_rows(rng, 20, 6, 32, np.float16)
    k_scale, v_scale = (rng.uniform(0.1, 2, 6).astype(np.float32) for _ in "kv")
    caches = poisoned_caches(layout, 4, 8, 6, 32, cache_dtype(np.float16, kv_cache_dtype))
    slots = scattered_slots(rng, 20, 32)
    options = {"kv_cache_dtype": kv_cache_dtype, "k_scale": k_scale, "v_scale": v_scale}
    check_write(backend, key, value, caches, slots, layout, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1,), ()], ids=str)
def test_scale_of_one_element(backend, rng, shape, layout):
    key, value = random_rows(rng, 5, 2, 32, ml_dtypes.bfloat16)
    caches = poisoned_caches(layout, 2, 8, 2, 32, np.uint8)
    scales = {"k_scale": np.full(shape, 0.3, np.float32), "v_scale": np.full(shape, 0.7, np.float32)}
    check_write(backend, key, value, caches, scattered_slots(rng, 5, 16), layout, kv_cache_dtype="fp8", **scales)


# ---- more and less work per token than a CTA or a warp --------------------------------------------------------------


MANY_HEADS = [(40, 128, np.float16), (64, 128, np.float16), (128, 128, np.float16), (17, 256, np.float32)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_kv_heads", "head_size", "dtype"), MANY_HEADS)
def test_more_work_per_token_than_threads(backend, rng, num_kv_heads, head_size, dtype, layout):
    key, value = random_rows(rng, 9, num_kv_heads, head_size, dtype)
    caches = poisoned_caches(layout, 3, 8, num_kv_heads, head_size, dtype)
    check_write(backend, key, value, caches, scattered_slots(rng, 9, 24), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_work_per_token_than_threads_fp8(backend, rng, layout):
    key, value = random_rows(rng, 9, 65, 128, ml_dtypes.bfloat16)
    caches = poisoned_caches(layout, 3, 8, 65, 128, np.uint8)
    options = {"kv_cache_dtype": "fp8", "k_scale": 0.05, "v_scale": 0.02}
    check_write(backend, key, value, caches, scattered_slots(rng, 9, 24), layout, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_kv_heads", "head_size"), [(1, 16), (1, 8), (2, 24)])
def test_less_work_per_token_than_a_warp(backend, rng, num_kv_heads, head_size, layout):
    key, value = random_rows(rng, 11, num_kv_heads, head_size, np.float16)
    caches = poisoned_caches(layout, 2, 8, num_kv_heads, head_size, np.float16)
    check_write(backend, key, value, caches, scattered_slots(rng, 11, 16), layout)


# ---- alignment and strides ------------------------------------------------------------------------------------------


def offset_copy(array, elements):
    """The same array in memory of its own that begins ``elements`` after a 16-byte boundary, poison around it."""
    room = np.full(array.nbytes + 64 + elements * array.itemsize, 0x7F, np.uint8)
    start = -room.ctypes.data % 16 + elements * array.itemsize
    target = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    target[...] = array
    return target


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_rows_that_are_not_16_byte_multiples(backend, rng, kv_cache_dtype, layout):
    num_kv_heads, head_size = (13, 40) if kv_cache_dtype == "auto" or layout != "packed" else (13, 48)
    key, value = random_rows(rng, 10, num_kv_heads, head_size, np.float16)
    caches = poisoned_caches(layout, 3, 8, num_kv_heads, head_size, cache_dtype(np.float16, kv_cache_dtype))
    options = {"kv_cache_dtype": kv_cache_dtype, "k_scale": 0.3, "v_scale": 2.5}
    check_write(backend, key, value, caches, scattered_slots(rng, 10, 24), layout, **options)


class OffsetBackend:
    """A backend whose arrays begin some elements after a 16-byte boundary: (inputs, caches)."""

    def __init__(self, backend, inputs, caches):
        self.backend, self.offsets = backend, {3: inputs, 4: caches, 5: caches}

    def put(self, array):
        elements = self.offsets.get(array.ndim, 0)
        if self.backend.name != "cuda":
            return offset_copy(array, elements)
        import cupy

        room = cupy.full(array.size + elements, 0x7F, np.uint8 if array.itemsize == 1 else array.dtype)
        target = room[elements:].reshape(array.shape)
        target[...] = self.backend.put(array)
        return target

    def get(self, array):
        return self.backend.get(array)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(("inputs", "caches"), [(1, 0), (0, 1), (1, 1), (2, 2), (3, 7), (4, 4), (5, 5), (0, 4), (7, 7)])
def test_base_pointers_at_any_element(backend, rng, inputs, caches, kv_cache_dtype, layout):
    key, value = random_rows(rng, 10, 3, 48, np.float16)
    poisoned = poisoned_caches(layout, 2, 8, 3, 48, cache_dtype(np.float16, kv_cache_dtype))
    shifted = OffsetBackend(backend, inputs, caches)
    options = {"kv_cache_dtype": kv_cache_dtype, "k_scale": 0.3, "v_scale": 2.5}
    check_write(shifted, key, value, poisoned, scattered_slots(rng, 10, 16), layout, **options)


class SlicedBackend:
    """A backend that sees key and value as heads of one qkv tensor, and the caches as slices of one buffer."""

    def __init__(self, backend, cache_buffer):
        self.backend, self.cache_buffer = backend, cache_buffer
        self.seen = 0

    def put(self, array):
        if array.ndim == 3:
            return self.sliced(array, axis=1, count=3)
        if array.ndim == 4 and self.cache_buffer is not None:
            return self.sliced(array, axis=self.cache_buffer, count=2)
        return self.backend.put(array)

    def sliced(self, array, axis, count):
        """The array as slice 1 (first call) or slice 0 (second) of a buffer ``count`` times as long on one axis."""
        which, self.seen = (self.seen + 1) % 2, self.seen + 1
        shape = list(array.shape)
        shape[axis] *= count
        is_cache = array.ndim == 4
        buffer = self.backend.put(np.full(shape, 0, array.dtype) if not is_cache else np.resize(array, shape))
        index = [slice(None)] * array.ndim
        index[axis] = slice(which * array.shape[axis], (which + 1) * array.shape[axis])
        view = buffer[tuple(index)]
        view[...] = self.backend.put(array)
        return view

    def get(self, array):
        return self.backend.get(array)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("buffer_axis", [0, 1, 2, 3], ids=["blocks", "middle", "inner", "2 x head_size"])
def test_strided_inputs(backend, rng, buffer_axis, layout):
    key, value = random_rows(rng, 12, 4, 32, np.float16)
    caches = poisoned_caches(layout, 3, 8, 4, 32, np.float16)
    check_write(SlicedBackend(backend, buffer_axis), key, value, caches, scattered_slots(rng, 12, 24), layout)


def test_strided_inputs_packed(backend, rng):
    key, value = random_rows(rng, 12, 4, 32, np.float16)
    both = np.full((3, 2, 4 * 32 * 8), 0x7F, np.uint8).astype(np.float16)  # [num_blocks, 2, ...]
    on_device = backend.put(both)
    key_cache, value_cache = on_device[:, 0].reshape(3, 4, 4, 8, 8), on_device[:, 1].reshape(3, 4, 32, 8)
    slots = scattered_slots(rng, 12, 24)
    expected = poisoned_caches("packed", 3, 8, 4, 32, np.float16)
    keys, values = expected_caches(key, value, [np.full_like(c, 127) for c in expected], slots, "packed")
    qkv = backend.put(np.concatenate([key, key, value], axis=1))
    pagedkv.reshape_and_cache(qkv[:, 4:8], qkv[:, 8:], key_cache, value_cache, backend.put(slots))
    got = backend.get(on_device)
    np.testing.assert_array_equal(got[:, 0], keys.reshape(3, -1))
    np.testing.assert_array_equal(got[:, 1], values.reshape(3, -1))


def test_key_and_value_caches_of_different_strides(backend, rng):
    key, value = random_rows(rng, 12, 4, 32, np.float16)
    slots = scattered_slots(rng, 12, 24)
    key_buffer = backend.put(np.zeros((3, 4, 8, 32), np.float16))  # HND memory seen as NHD
    value_buffer = backend.put(np.zeros((3, 8, 4, 48), np.float16))  # padded heads
    pagedkv.reshape_and_cache_flash(
        backend.put(key), backend.put(value), key_buffer.swapaxes(1, 2), value_buffer[..., :32], backend.put(slots)
    )
    keys, values = backend.get(key_buffer), backend.get(value_buffer)
    for token, slot in enumerate(slots):
        np.testing.assert_array_equal(keys[slot // 8, :, slot % 8], key[token])
        np.testing.assert_array_equal(values[slot // 8, slot % 8, :, :32], value[token])
    assert not values[..., 32:].any()


class ReversedBackend:
    """A backend that sees rows and blocks back to front: negative strides."""

    def __init__(self, backend):
        self.backend = backend

    def put(self, array):
        return self.backend.put(np.ascontiguousarray(array[::-1]))[::-1]

    def get(self, array):
        return self.backend.get(array)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_negative_strides(backend, rng, layout, kv_cache_dtype):
    key, value = random_rows(rng, 40, 3, 32, np.float16)
    slots = scattered_slots(rng, 40, 64)
    slots[[0, 20]] = -1
    caches = poisoned_caches(layout, 4, 16, 3, 32, cache_dtype(np.float16, kv_cache_dtype))
    options = {"kv_cache_dtype": kv_cache_dtype, "k_scale": 0.3, "v_scale": 2.5}
    check_write(ReversedBackend(backend), key, value, caches, slots, layout, **options)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_physical_hnd_is_told_by_layout_alone(backend, rng, layout):
    key, value = random_rows(rng, 20, 8, 16, np.float16)
    caches = poisoned_caches(layout, 4, 8, 8, 16, np.float16)  # kv heads == block_size
    check_write(backend, key, value, caches, scattered_slots(rng, 20, 32), layout)


@pytest.mark.parametrize("block_size", [1, 17, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_any_block_size_in_flash_layouts(backend, rng, layout, block_size):
    key, value = random_rows(rng, 20, 2, 16, np.float16)
    num_blocks = -(-30 // block_size)
    caches = poisoned_caches(layout, num_blocks, block_size, 2, 16, np.float16)
    check_write(backend, key, value, caches, scattered_slots(rng, 20, num_blocks * block_size), layout)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_block_sizes_of_the_packed_layout(backend, rng, kv_cache_dtype, block_size):
    key, value = random_rows(rng, 300, 2, 32, np.float16)
    slots, num_blocks = runs_of_slots(rng, [270, 30], block_size)
    caches = poisoned_caches("packed", num_blocks, block_size, 2, 32, cache_dtype(np.float16, kv_cache_dtype))
    options = {"kv_cache_dtype": kv_cache_dtype, "k_scale": 0.3, "v_scale": 2.5}
    check_write(backend, key, value, caches, slots, "packed", **options)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lengths", [[32], [64], [5, 40, 1, 23, 31], [33, 33], [100]])
@pytest.mark.parametrize("first_offset", [0, 3, 15])
def test_runs_of_consecutive_slots(backend, rng, dtype, lengths, first_offset):
    slots, num_blocks = runs_of_slots(rng, lengths, 16, first_offset)
    key, value = random_rows(rng, slots.size, 2, 40, dtype)
    caches = poisoned_caches("packed", num_blocks, 16, 2, 40, dtype)
    check_write(backend, key, value, caches, slots, "packed")


# ---- padding --------------------------------------------------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding(backend, rng, layout):
    """Negative slots anywhere, fewer slots than rows; the last slot of the last block stays as it was."""
    key, value = random_rows(rng, 80, 2, 32, np.float16)
    slots = scattered_slots(rng, 70, 95)
    slots[[0, 7, 31, 32, 69]] = -1, -2, -(2**40), -1, -16
    caches = poisoned_caches(layout, 6, 16, 2, 32, np.float16)
    last = bits(token_of(caches[1], layout, 5, 15)).copy()
    check_write(backend, key, value, caches, slots, layout)
    written = write(backend, key, value, caches, slots, layout)
    np.testing.assert_array_equal(bits(token_of(written[1], layout, 5, 15)), last)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_alone_writes_nothing(backend, rng, layout):
    key, value = random_rows(rng, 40, 2, 32, np.float16)
    check_write(backend, key, value, poisoned_caches(layout, 2, 8, 2, 32, np.float16), np.full(40, -1), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_tokens(backend, rng, layout):
    key, value = random_rows(rng, 3, 2, 32, np.float16)
    slots = np.zeros(0, np.int64)
    check_write(backend, key, value, poisoned_caches(layout, 2, 8, 2, 32, np.float16), slots, layout)


# ---- integers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_integer_kinds(backend, rng, dtype, layout):
    key, value = random_rows(rng, 9, 2, 32, np.float16)
    slots = scattered_slots(rng, 9, 32).astype(dtype)
    check_write(backend, key, value, poisoned_caches(layout, 4, 8, 2, 32, np.float16), slots, layout)


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
def test_slots_narrower_than_the_block_size(backend, rng, dtype):
    """The block size need not fit the slots' own dtype."""
    block_size = 256 if dtype == np.int8 else 40000
    key, value = random_rows(rng, 9, 1, 8, np.float16)
    caches = poisoned_caches("NHD", 1, block_size, 1, 8, np.float16)
    check_write(backend, key, value, caches, scattered_slots(rng, 9, 127).astype(dtype), "NHD")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_strided_slots(backend, rng, dtype, layout):
    key, value = random_rows(rng, 9, 2, 32, np.float16)
    slots = scattered_slots(rng, 9, 32)
    spread = np.full((9, 3), 10**6, dtype)
    spread[:, 1] = slots
    caches = poisoned_caches(layout, 4, 8, 2, 32, np.float16)
    expected = expected_caches(key, value, caches, slots, layout)
    arrays = [backend.put(array) for array in (key, value, *caches)]
    op_of(layout)(*arrays, backend.put(spread)[:, 1])
    for got, want in zip(arrays[2:], expected, strict=True):
        np.testing.assert_array_equal(bits(backend.get(got)), bits(want))
