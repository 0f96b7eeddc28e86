"""Mistakes in a cache write: the error names the argument and comes before anything is written."""

import ml_dtypes
import numpy as np
import pytest
from writes import LAYOUTS, bits, op_of, poisoned_caches, random_rows, scattered_slots

import pagedkv

NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 3, 8, 4, 32


def arguments(rng, layout, cache_dtype=np.float16):
    key, value = random_rows(rng, 10, HEADS, HEAD_SIZE, np.float16)
    key_cache, value_cache = poisoned_caches(layout, NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE, cache_dtype)
    slots = scattered_slots(rng, 10, NUM_BLOCKS * BLOCK_SIZE)
    call = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slot_mapping": slots}
    return call if layout == "packed" else {**call, "layout": layout}


def call(backend, layout, given):
    """Calls the op on the backend; returns the caches as they are afterwards, and the error."""
    put = {name: backend.put(a) if isinstance(a, np.ndarray) else a for name, a in given.items()}
    op = op_of(layout)
    error = None
    try:
        op(**put)
    except Exception as raised:  # the test looks at its type and text
        error = raised
    return [backend.get(put[name]) for name in ("key_cache", "value_cache")], error


def assert_rejected(backend, layout, given, kind, text):
    """The call raises ``kind`` with ``text`` in it, and no byte of the caches has changed."""
    before = [given[name].copy() for name in ("key_cache", "value_cache")]
    after, error = call(backend, layout, given)
    assert type(error) is kind, error
    assert text in str(error)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(bits(old), bits(new))


def resized(array, axis, size):
    shape = list(array.shape)
    shape[axis] = size
    return np.resize(array, shape)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_head_size_of_cache_differs_from_keys(backend, rng, layout):
    given = arguments(rng, layout)
    given["key"], given["value"] = (resized(given[name], 2, 48) for name in ("key", "value"))
    assert_rejected(backend, layout, given, ValueError, "key: expected shape (any, 4, 32), got (10, 4, 48)")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_num_kv_heads_of_cache_differs_from_keys(backend, rng, layout):
    given = arguments(rng, layout)
    given["key"], given["value"] = (resized(given[name], 1, 5) for name in ("key", "value"))
    assert_rejected(backend, layout, given, ValueError, "key: expected shape (any, 4, 32), got (10, 5, 32)")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_value_of_another_shape_or_dtype(backend, rng, layout):
    given = arguments(rng, layout)
    shorter = {**given, "value": given["value"][:9]}
    assert_rejected(backend, layout, shorter, ValueError, "value: expected shape (10, 4, 32), got (9, 4, 32)")
    other = {**given, "value": given["value"].astype(np.float32)}
    assert_rejected(backend, layout, other, TypeError, "value: expected float16, got float32")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_that_differ_from_each_other(backend, rng, layout):
    given = arguments(rng, layout)
    fewer = {**given, "value_cache": given["value_cache"][:2]}
    assert_rejected(backend, layout, fewer, ValueError, "expected shape")
    other = {**given, "value_cache": given["value_cache"].astype(np.float32)}
    assert_rejected(backend, layout, other, TypeError, "value_cache: expected float16, got float32")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shapes", [((1,), (HEADS,)), ((HEADS,), (1,)), ((HEADS,), None)], ids=str)
def test_scales_of_different_shapes(backend, rng, shapes, layout):
    given = arguments(rng, layout, np.uint8) | {"kv_cache_dtype": "fp8"}
    for name, shape in zip(("k_scale", "v_scale"), shapes, strict=True):
        given[name] = None if shape is None else np.ones(shape, np.float32)
    assert_rejected(backend, layout, given, ValueError, "v_scale: expected")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("scale", "kind", "text"),
    [
        (np.ones(3, np.float32), ValueError, "k_scale: expected a number or shape (1) or (4), got shape (3,)"),
        (np.ones(1, np.float16), TypeError, "k_scale: expected float32, got float16"),
        (0.0, ValueError, "k_scale: expected a positive number in float32's normal range, got 0.0"),
        (-1.0, ValueError, "k_scale: expected a positive number in float32's normal range, got -1.0"),
        (float("nan"), ValueError, "k_scale: expected a positive number, got nan"),
        (1e-45, ValueError, "k_scale: expected a positive number"),
        ("1", TypeError, "k_scale: expected an array, got str"),
        (True, TypeError, "k_scale: expected a positive number, got True"),
    ],
    ids=str,
)
def test_scales_of_wrong_kinds(backend, rng, scale, kind, text, layout):
    given = arguments(rng, layout, np.uint8) | {"kv_cache_dtype": "fp8", "k_scale": scale}
    assert_rejected(backend, layout, given, kind, text)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [0, -1, np.nan, np.inf, 1e-45])
def test_scales_in_an_array(backend, rng, bad, layout):
    """What a scale array holds is checked on the host, and inside ``checked()`` on a device."""
    scales = np.ones(HEADS, np.float32)
    scales[2] = bad
    given = arguments(rng, layout, np.uint8) | {"kv_cache_dtype": "fp8", "k_scale": np.ones_like(scales)}
    with pagedkv.checked():
        assert_rejected(backend, layout, given | {"v_scale": scales}, ValueError, "v_scale: expected positive numbers")


def test_scales_beyond_float32(rng):
    for scale in (1e39, 2**200, float("inf")):
        given = arguments(rng, "NHD", np.uint8) | {"kv_cache_dtype": "fp8", "k_scale": scale}
        with pytest.raises(ValueError, match="k_scale: expected a positive number"):
            pagedkv.reshape_and_cache_flash(**given)


@pytest.mark.parametrize("name", ["key", "value", "key_cache", "slot_mapping"])
def test_foreign_byte_order(rng, name):
    given = arguments(rng, "NHD")
    given[name] = given[name].astype(given[name].dtype.newbyteorder())
    with pytest.raises(TypeError, match=f"{name}: expected the machine's own byte order, got >"):
        pagedkv.reshape_and_cache_flash(**given)


def test_caches_of_no_legal_dtype(rng):
    for dtype in (np.float64, np.complex128, np.longdouble, "V32"):
        given = arguments(rng, "packed")
        given["key_cache"] = np.zeros((NUM_BLOCKS, HEADS, HEAD_SIZE // 8, BLOCK_SIZE, 8), dtype)
        with pytest.raises(TypeError, match="key_cache: expected float16 or"):
            pagedkv.reshape_and_cache(**given)


def test_last_axis_of_value_alone(rng):
    given = arguments(rng, "NHD")
    wide = np.zeros((10, HEADS, 2 * HEAD_SIZE), np.float16)
    with pytest.raises(ValueError, match="value: expected last axis contiguous"):
        pagedkv.reshape_and_cache_flash(**{**given, "value": wide[..., ::2]})


def test_subclasses_are_read_as_the_memory_they_are(rng):
    """A mask changes nothing; a memory map is an array."""
    given = arguments(rng, "NHD")
    plain = {**given, "key_cache": given["key_cache"].copy(), "value_cache": given["value_cache"].copy()}
    pagedkv.reshape_and_cache_flash(**plain)
    masked = {**given, "key": np.ma.array(given["key"], mask=True)}
    masked["slot_mapping"] = np.ma.array(given["slot_mapping"], mask=True)
    masked["key_cache"] = np.ma.array(given["key_cache"], mask=True, hard_mask=True, copy=False)
    pagedkv.reshape_and_cache_flash(**masked)
    np.testing.assert_array_equal(bits(given["key_cache"]), bits(plain["key_cache"]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, bool, np.uint32, np.uint64])
def test_slots_of_wrong_kinds(backend, rng, dtype, layout):
    given = arguments(rng, layout)
    given["slot_mapping"] = given["slot_mapping"].astype(dtype)
    expected = f"slot_mapping: expected signed integers, got {np.dtype(dtype).name}"
    assert_rejected(backend, layout, given, TypeError, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_of_wrong_shapes(backend, rng, layout):
    given = arguments(rng, layout)
    more = {**given, "slot_mapping": np.arange(11)}
    assert_rejected(
        backend, layout, more, ValueError, "slot_mapping: expected at most 10 slots, one per row of key, got 11"
    )
    square = {**given, "slot_mapping": np.arange(4).reshape(2, 2)}
    assert_rejected(backend, layout, square, ValueError, "slot_mapping: expected [num_tokens], got shape (2, 2)")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_read_only_cache(rng, name, layout):
    given = arguments(rng, layout)
    given[name].flags.writeable = False
    op = op_of(layout)
    other = given["value_cache" if name == "key_cache" else "key_cache"]
    before = other.copy()
    with pytest.raises(ValueError, match=f"{name}: expected a writable array, got a read-only one"):
        op(**given)
    np.testing.assert_array_equal(bits(other), bits(before))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_storage_with_auto(backend, rng, layout):
    given = arguments(rng, layout, np.uint8)
    assert_rejected(backend, layout, given, TypeError, "key_cache: expected kv_cache_dtype='fp8'")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_dtype_and_kv_cache_dtype_that_clash(backend, rng, layout):
    plain = arguments(rng, layout) | {"kv_cache_dtype": "fp8"}
    assert_rejected(backend, layout, plain, TypeError, "key_cache: expected uint8 or float8_e4m3fn, got float16")
    unknown = arguments(rng, layout) | {"kv_cache_dtype": "int8"}
    assert_rejected(
        backend, layout, unknown, ValueError, "kv_cache_dtype: expected one of auto, fp8, fp8_e4m3, fp8_e5m2"
    )
    half = arguments(rng, layout, np.float16)
    half["key"], half["value"] = (half[name].astype(ml_dtypes.bfloat16) for name in ("key", "value"))
    assert_rejected(backend, layout, half, TypeError, "key_cache: expected bfloat16 like key")


def test_an_array_with_an_fp8_dtype_carries_its_format(rng):
    given = arguments(rng, "NHD", ml_dtypes.float8_e5m2)
    pagedkv.reshape_and_cache_flash(**given)  # auto
    given["kv_cache_dtype"] = "fp8"
    with pytest.raises(TypeError, match="key_cache: expected float8_e4m3fn or uint8"):
        pagedkv.reshape_and_cache_flash(**given)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_last_axis_that_is_not_contiguous(backend, rng, layout):
    given = arguments(rng, layout)
    put = {name: backend.put(a) if isinstance(a, np.ndarray) else a for name, a in given.items()}
    wide = backend.put(np.zeros((10, HEADS, 2 * HEAD_SIZE), np.float16))
    put["key"] = wide[..., ::2]
    op = op_of(layout)
    with pytest.raises(ValueError, match="key: expected last axis contiguous"):
        op(**put)


def test_sizes_that_are_not_legal_or_not_built(backend, rng):
    def caches(layout, block_size, head_size, dtype=np.float16):
        return dict(
            zip(("key_cache", "value_cache"), poisoned_caches(layout, 3, block_size, 1, head_size, dtype), strict=True)
        )

    def rows(head_size):
        return dict(zip(("key", "value"), random_rows(rng, 4, 1, head_size, np.float16), strict=True))

    slots = {"slot_mapping": np.arange(4)}
    odd = rows(12) | caches("NHD", 8, 12) | slots | {"layout": "NHD"}
    assert_rejected(backend, "NHD", odd, ValueError, "head_size: expected a multiple of 8, got 12")
    large = rows(264) | caches("NHD", 8, 264) | slots | {"layout": "NHD"}
    assert_rejected(backend, "NHD", large, NotImplementedError, "head_size: expected at most 256, got 264")
    blocks = rows(16) | caches("packed", 12, 16) | slots
    assert_rejected(backend, "packed", blocks, ValueError, "block_size: expected one of (8, 16, 32, 64, 128, 256)")
    fp8 = rows(40) | caches("packed", 8, 40, np.uint8) | slots | {"kv_cache_dtype": "fp8"}
    assert_rejected(backend, "packed", fp8, ValueError, "head_size: expected a multiple of x = 16")
    for layout in ("NDH", "packed", None):  # packed caches have an op of their own
        unknown = arguments(rng, "NHD") | {"layout": layout}
        assert_rejected(backend, "NHD", unknown, ValueError, f"layout: expected one of NHD, HND, got {layout!r}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_past_the_cache_and_slots_named_twice(backend, rng, layout):
    """Checked always on the host, and inside ``checked()`` on a device."""
    given = arguments(rng, layout)
    with pagedkv.checked():
        past = {**given, "slot_mapping": np.array([3, 24, -1])}
        assert_rejected(backend, layout, past, IndexError, "slot_mapping: expected slots below 24, got 24")
        twice = {**given, "slot_mapping": np.array([3, -1, 7, 3, -1])}
        assert_rejected(
            backend, layout, twice, ValueError, "slot_mapping: expected each slot at most once, got slot 3 twice"
        )
        _, error = call(backend, layout, given)
    assert error is None


def test_lists_and_numbers_are_not_arrays(rng):
    given = arguments(rng, "NHD")
    with pytest.raises(TypeError, match="slot_mapping: expected an array, got list"):
        pagedkv.reshape_and_cache_flash(**{**given, "slot_mapping": [0, 1]})
    with pytest.raises(TypeError, match="key: expected an array, got NoneType"):
        pagedkv.reshape_and_cache_flash(**{**given, "key": None})


def test_cuda_backend_with_host_arrays(rng):
    given = arguments(rng, "NHD")
    with pagedkv.use_backend("cuda"), pytest.raises(TypeError, match="expected arrays on a CUDA device, got cpu"):
        pagedkv.reshape_and_cache_flash(**given)
    with pytest.raises(ValueError, match="use_backend: expected one of numpy, ptx, cuda"), pagedkv.use_backend("gpu"):
        pass
