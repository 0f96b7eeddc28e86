"""gather_cache: ranges of paged sequences as dense rows, every bit against a plain loop."""

import gathers
import ml_dtypes
import numpy as np
import pytest
from cases import FLOATS
from far_blocks import BLOCK_STRIDE, blocks_far_apart, far_along, sparse_bytes
from gathers import LAYOUTS, assert_same_bits, batch, check_gather, expected_rows, outputs_for, put_all
from writes import FP8, cache_shapes

import pagedkv

LENS, STARTS = [37, 0, 5, 50], [3, 7, 16, 31]
SCALES = {"k_scale": 0.3, "v_scale": 1.7}
PER_HEAD = {"k_scale": np.array([0.3, 2.5], np.float32), "v_scale": np.array([0.7, 0.011], np.float32)}


# ---- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtypes(backend, rng, layout, dtype):
    """Unquantised numbers keep every bit, NaN payloads included."""
    check_gather(backend, batch(rng, LENS, STARTS, layout=layout, dtype=dtype))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("kv_cache_dtype", FP8)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8(backend, rng, layout, kv_cache_dtype, dtype):
    """The product with the scale is float32's, and is rounded once to each dtype."""
    check_gather(backend, batch(rng, LENS, STARTS, layout=layout, kv_cache_dtype=kv_cache_dtype, **SCALES), dtype)


@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole", "ranges"])
@pytest.mark.parametrize(
    ("layout", "block_size"),
    [*((layout, size) for layout in ("NHD", "HND") for size in (1, 8, 16, 17, 256)),
     *(("packed", size) for size in (8, 16, 32, 256))],
)  # fmt: skip
def test_block_sizes(backend, rng, layout, block_size, starts):
    check_gather(backend, batch(rng, LENS, starts, layout=layout, block_size=block_size))


@pytest.mark.parametrize("head_size", [8, 40, 72, 128, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_head_sizes(backend, rng, layout, head_size):
    check_gather(backend, batch(rng, [9, 24], [5, 0], layout=layout, head_size=head_size))


@pytest.mark.parametrize("head_size", [16, 48, 128, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_head_sizes_of_fp8(backend, rng, layout, head_size):
    sizes = {"layout": layout, "head_size": head_size if layout == "packed" else head_size - 8}
    check_gather(backend, batch(rng, [9, 24], [5, 0], kv_cache_dtype="fp8", **sizes, **SCALES), np.float16)


@pytest.mark.parametrize("heads", [1, 3, 17, 71])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_of_heads(backend, rng, layout, heads):
    """Many heads are shared out among CTAs."""
    check_gather(backend, batch(rng, [9, 12], [5, 0], layout=layout, heads=heads, head_size=64))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lengths_around_tiles(backend, rng, layout, length):
    check_gather(backend, batch(rng, [length], [3], layout=layout, heads=1, head_size=8))


@pytest.mark.parametrize("lens", [[0], [0, 0, 7], [7, 0, 0], [0, 5, 0, 0, 9, 0], [1] * 40, [0] * 30 + [3] + [0] * 34])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_sequences_among_others(backend, rng, layout, lens):
    starts = rng.integers(0, 40, len(lens)).tolist()
    check_gather(backend, batch(rng, lens, starts, layout=layout, heads=1, head_size=16, block_size=8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_sequences(backend, rng, layout):
    check_gather(backend, batch(rng, [], layout=layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rows(backend, rng, layout):
    arguments = batch(rng, [0, 0], layout=layout)
    key, value = pagedkv.gather_cache(**put_all(backend, arguments), num_tokens=0)
    assert key.shape == value.shape == (0, 2, 32)


def test_what_is_outside_the_ranges_is_never_followed(backend, rng):
    """Rows of sequences with nothing to read may hold anything, and so may their starts."""
    arguments = batch(rng, [0, 20, 0], [3, 3, 3])
    arguments["block_table"][[0, 2]] = -(2**31), 2**31 - 1, -1
    arguments["seq_starts"][[0, 2]] = -5, 2**31 - 1
    check_gather(backend, arguments)


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_one_block_in_several_places(backend, rng, layout):
    """A shared prefix is read as often as it is asked for."""
    arguments = batch(rng, [20, 20, 20], layout=layout)
    arguments["block_table"][1:] = arguments["block_table"][0]
    first, second, third = np.split(check_gather(backend, arguments)[0][:60], 3)
    assert_same_bits(first, second)
    assert_same_bits(first, third)


# ---- scales ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scales",
    [
        {},
        {"k_scale": 0.25},
        {"v_scale": np.array([3.1], np.float32)},
        SCALES,
        PER_HEAD,
        {"k_scale": 2, "v_scale": 1e-30},
    ],
    ids=["none", "K", "V", "numbers", "heads", "far apart"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales(backend, rng, layout, scales):
    check_gather(backend, batch(rng, LENS, STARTS, layout=layout, kv_cache_dtype="fp8", **scales), np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_of_many_heads(backend, rng, layout):
    """Which CTAs share out among themselves."""
    scales = {name: rng.uniform(0.1, 3, 71).astype(np.float32) for name in ("k_scale", "v_scale")}
    sizes = {"layout": layout, "heads": 71, "head_size": 64}
    check_gather(backend, batch(rng, [9, 12], [5, 0], kv_cache_dtype="fp8", **sizes, **scales), np.float32)


def test_scales_with_strides(backend, rng):
    arguments = batch(rng, LENS, kv_cache_dtype="fp8", **PER_HEAD)
    expected = expected_rows(arguments, *outputs_for(arguments, spare_rows=0))
    given = put_all(backend, arguments)
    for name, scale in PER_HEAD.items():
        given[name] = backend.put(np.repeat(scale, 3))[1::3]
    for got, want in zip(pagedkv.gather_cache(**given, num_tokens=len(expected[0])), expected, strict=True):
        assert_same_bits(backend.get(got), want)


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scale", [1.0, 0.3, 300.0, 2.0**-126])
def test_every_code(backend, rng, kv_cache_dtype, dtype, scale):
    """A NaN gives some NaN, what is past the dtype's range infinity, all others the rounded product."""
    arguments = batch(rng, [4], heads=2, block_size=4, kv_cache_dtype=kv_cache_dtype, k_scale=scale, v_scale=scale)
    block = arguments["block_table"][0, 0]
    for name in ("key_cache", "value_cache"):
        arguments[name][block] = np.arange(256, dtype=np.uint8).reshape(4, 2, 32)
    expected = expected_rows(arguments, *outputs_for(arguments, dtype, spare_rows=0))
    given = put_all(backend, arguments)
    for got, want in zip(pagedkv.gather_cache(**given, dtype=dtype, num_tokens=4), expected, strict=True):
        got, is_nan = backend.get(got), np.isnan(want)
        assert np.isnan(got[is_nan]).all()
        assert_same_bits(got[~is_nan], want[~is_nan])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_products_are_float32s(backend, rng, dtype):
    """Where the exact product is just past the middle of two numbers, and float32's is the middle: the even one."""
    middle = np.float32(1 + float(ml_dtypes.finfo(dtype).eps) / 2)
    factors = [(code, middle / code) for code in np.float32([5, 7, 9, 11, 13]) if code * (middle / code) == middle]
    code, scale = next((code, scale) for code, scale in factors if float(code) * float(scale) > float(middle))
    arguments = batch(rng, [9], kv_cache_dtype="fp8", k_scale=float(scale), v_scale=1.0)
    arguments["key_cache"][...] = np.array(code, FP8["fp8"]).view(np.uint8)
    key, _ = check_gather(backend, arguments, dtype)
    assert (key[:9] == 1).all()


def test_fp8_is_bfloat16_unless_asked(backend, rng):
    arguments = batch(rng, LENS, kv_cache_dtype="fp8", **SCALES)
    given = put_all(backend, arguments) | {"num_tokens": sum(LENS)}
    assert backend.get(pagedkv.gather_cache(**given)[0]).dtype == ml_dtypes.bfloat16
    for dtype in ("float16", np.float32, np.dtype(ml_dtypes.bfloat16), ml_dtypes.bfloat16):
        key, value = pagedkv.gather_cache(**given, dtype=dtype)
        assert backend.get(key).dtype == backend.get(value).dtype == np.dtype(dtype)
    value_out = outputs_for(arguments, np.float32, spare_rows=0)[1]
    key, _ = pagedkv.gather_cache(**given, value_out=backend.put(value_out))
    assert backend.get(key).dtype == np.float32


def test_float8_arrays_carry_their_format(host_backend, rng):
    arguments = batch(rng, LENS, STARTS, kv_cache_dtype="fp8_e5m2", **SCALES)
    expected = expected_rows(arguments, *outputs_for(arguments, spare_rows=0))
    for name in ("key_cache", "value_cache"):
        arguments[name] = arguments[name].view(ml_dtypes.float8_e5m2)
    del arguments["kv_cache_dtype"]
    for got, want in zip(pagedkv.gather_cache(**arguments), expected, strict=True):
        assert_same_bits(got, want)


# ---- outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_outputs(backend, rng, layout):
    arguments = batch(rng, LENS, STARTS, layout=layout)
    expected = expected_rows(arguments, *outputs_for(arguments, spare_rows=0))
    given = put_all(backend, arguments) | {"num_tokens": sum(LENS)}
    for got, want in zip(pagedkv.gather_cache(**given), expected, strict=True):
        assert_same_bits(backend.get(got), want)
    _, value_out = outputs_for(arguments, spare_rows=0)
    for got, want in zip(pagedkv.gather_cache(**given, value_out=backend.put(value_out)), expected, strict=True):
        assert_same_bits(backend.get(got), want)


def test_rows_are_read_off_starts_on_the_host(host_backend, rng):
    arguments = batch(rng, LENS, STARTS)
    key, value = pagedkv.gather_cache(**arguments)
    assert key.shape == value.shape == (sum(LENS), 2, 32)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_outputs(backend, rng, layout):
    """Halves of one buffer, each with other heads beside it; what lies between stays as it was."""
    arguments = batch(rng, LENS, STARTS, layout=layout)
    wide = gathers.poisoned((sum(LENS) + 3, 5, 96), np.float16)
    expected = wide.copy()
    places = (np.s_[:, :2, :32], np.s_[:, 2:4, 40:72])
    key, value = expected_rows(arguments, *(expected[place] for place in places))
    expected[places[0]], expected[places[1]] = key, value
    on_backend = backend.put(wide)
    outputs = {"key_out": on_backend[places[0]], "value_out": on_backend[places[1]]}
    pagedkv.gather_cache(**put_all(backend, arguments), **outputs)
    assert_same_bits(backend.get(on_backend), expected)


@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("name", ["key_cache", "value_cache", "key_out", "value_out"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_misaligned_bases(backend, rng, layout, name, offset):
    arguments = batch(rng, [20, 9], [3, 0], layout=layout)
    outputs = dict(zip(("key_out", "value_out"), outputs_for(arguments), strict=True))
    expected = expected_rows(arguments, *outputs.values())
    given = put_all(backend, arguments | outputs)
    array = backend.get(given[name])
    room = np.empty(array.size + offset, array.dtype)
    room[offset:] = array.ravel()
    given[name] = backend.put(room)[offset:].reshape(array.shape)
    for got, want in zip(pagedkv.gather_cache(**given), expected, strict=True):
        assert_same_bits(backend.get(got), want)


# ---- strides of inputs ----------------------------------------------------------------------------------------------


def strided_caches(backend, rng, kind, arguments):
    """Key and value caches as views of other buffers, alike in content to those of the arguments."""
    key, value = arguments["key_cache"], arguments["value_cache"]
    if kind == "halves":  # [num_blocks, 2, ...]
        both = backend.put(np.stack([cache.reshape(len(cache), -1) for cache in (key, value)], axis=1))
        return both[:, 0].reshape(key.shape), both[:, 1].reshape(value.shape)
    if kind == "one buffer":  # [.., 2 * head_size]
        both = backend.put(np.concatenate([key, value], axis=-1))
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]
    if kind == "HND memory":  # an NHD-shaped view
        return [backend.put(np.ascontiguousarray(cache.swapaxes(1, 2))).swapaxes(1, 2) for cache in (key, value)]
    if kind == "backwards":
        return [backend.put(np.ascontiguousarray(cache[::-1]))[::-1] for cache in (key, value)]
    # Each its own: every other block of one, some heads of the other.
    wide = np.concatenate([value, value], axis=2 if arguments["layout"] == "NHD" else 1)
    heads = np.s_[:, :, 2:] if arguments["layout"] == "NHD" else np.s_[:, 2:]
    return backend.put(np.repeat(key, 2, axis=0))[::2], backend.put(wide)[heads]


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("layout", "kind"),
    [*((layout, kind) for layout in LAYOUTS for kind in ("halves", "backwards", "each its own")),
     ("NHD", "one buffer"), ("HND", "one buffer"), ("NHD", "HND memory"), ("HND", "HND memory")],
)  # fmt: skip
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_strided_caches(backend, rng, layout, kind, kv_cache_dtype):
    arguments = batch(rng, LENS, STARTS, layout=layout, kv_cache_dtype=kv_cache_dtype, **SCALES)
    outputs = outputs_for(arguments)
    expected = expected_rows(arguments, *outputs)
    given = put_all(backend, arguments | dict(zip(("key_out", "value_out"), outputs, strict=True)))
    given["key_cache"], given["value_cache"] = strided_caches(backend, rng, kind, arguments)
    for got, want in zip(pagedkv.gather_cache(**given), expected, strict=True):
        assert_same_bits(backend.get(got), want)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_integer_kinds_and_strides(backend, rng, dtype):
    arguments = batch(rng, [37, 0, 5, 50], [3, 7, 16, 31])
    arguments["block_table"] = arguments["block_table"].clip(-1, 100)
    outputs = outputs_for(arguments, spare_rows=0)
    expected = expected_rows(arguments, *outputs)
    given = put_all(backend, arguments)
    for name in ("cu_seq_lens", "seq_starts"):
        given[name] = backend.put(np.repeat(arguments[name], 3).astype(dtype))[1::3]
    wide = np.repeat(np.repeat(arguments["block_table"], 2, axis=0), 3, axis=1).astype(dtype)
    wide[1::2], wide[:, 1::3], wide[:, 2::3] = 99, 98, 97
    given["block_table"] = backend.put(wide)[::2, ::3]
    for got, want in zip(pagedkv.gather_cache(**given, num_tokens=len(expected[0])), expected, strict=True):
        assert_same_bits(backend.get(got), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offsets_past_two_and_four_gigabytes(backend, rng, layout):
    num_blocks, block_size, heads, head_size = 4, 8, 2, 32
    shapes = cache_shapes(layout, num_blocks, block_size, heads, head_size, np.uint8)
    buffers = [sparse_bytes(backend, (num_blocks - 1) * BLOCK_STRIDE + 4096) for _ in "kv"]
    caches = [blocks_far_apart(buffer, shape) for buffer, shape in zip(buffers, shapes, strict=True)]
    near = [gathers.random_bits(rng, shape, np.uint8, "fp8") for shape in shapes]
    for cache, content in zip(caches, near, strict=True):
        for block in range(num_blocks):
            cache[block] = backend.put(content[block])
    table = np.array([[3, 0], [2, 1]], np.int32)
    arguments = {"key_cache": near[0], "value_cache": near[1], "block_table": table, "layout": layout}
    arguments |= {"cu_seq_lens": np.array([0, 12, 21], np.int32), "kv_cache_dtype": "fp8", **SCALES}
    expected = expected_rows(arguments, *outputs_for(arguments, spare_rows=0))
    given = put_all(backend, arguments) | {"key_cache": caches[0], "value_cache": caches[1], "num_tokens": 21}
    for got, want in zip(pagedkv.gather_cache(**given), expected, strict=True):
        assert_same_bits(backend.get(got), want)


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "heads"])
def test_outputs_far_apart(host_backend, rng, axis):
    """Rows, or heads of a row, beyond 2^31 and 2^32."""
    arguments = batch(rng, [4], heads=4, head_size=8)
    expected = expected_rows(arguments, *outputs_for(arguments, spare_rows=0))
    rooms = [sparse_bytes(host_backend, 2 * 3 * BLOCK_STRIDE + 4096) for _ in "kv"]
    outputs = [far_along(axis, room, (4, 4, 8), np.float16) for room in rooms]
    pagedkv.gather_cache(**arguments, key_out=outputs[0], value_out=outputs[1])
    for got, want in zip(outputs, expected, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("axis", [1, 2], ids=["tokens", "heads"])
def test_tokens_and_heads_far_apart(host_backend, rng, axis):
    """Inside a block, beyond 2^31 and 2^32."""
    arguments = batch(rng, [6], [1], heads=4, head_size=8, block_size=4, kv_cache_dtype="fp8")
    expected = expected_rows(arguments, *outputs_for(arguments, spare_rows=0))
    for name in ("key_cache", "value_cache"):
        near = arguments[name]
        room = sparse_bytes(host_backend, 3 * BLOCK_STRIDE + 4096)
        arguments[name] = far_along(axis, room, near.shape, np.uint8)
        arguments[name][...] = near
    for got, want in zip(pagedkv.gather_cache(**arguments), expected, strict=True):
        assert_same_bits(got, want)


def test_a_table_with_rows_far_apart(host_backend, rng):
    arguments = batch(rng, [20, 9, 4, 7], heads=1, head_size=8)
    expected = expected_rows(arguments, *outputs_for(arguments, spare_rows=0))
    room, table = sparse_bytes(host_backend, 4 * 3 * BLOCK_STRIDE + 4096), arguments["block_table"]
    arguments["block_table"] = far_along(0, room, table.shape, np.int32)
    arguments["block_table"][...] = table
    for got, want in zip(pagedkv.gather_cache(**arguments), expected, strict=True):
        assert_same_bits(got, want)


def test_inputs_are_left_alone(backend, rng):
    arguments = batch(rng, LENS, STARTS, kv_cache_dtype="fp8", **PER_HEAD)
    given = put_all(backend, {name: a.copy() if isinstance(a, np.ndarray) else a for name, a in arguments.items()})
    pagedkv.gather_cache(**given, num_tokens=sum(LENS))
    for name, array in arguments.items():
        if isinstance(array, np.ndarray):
            assert_same_bits(backend.get(given[name]), array)


def test_what_was_written_comes_back(backend, rng):
    """Through reshape_and_cache and its scattered slots."""
    key, value = (rng.standard_normal((40, 2, 32)).astype(np.float16) for _ in "kv")
    caches = [backend.put(cache) for cache in gathers.random_caches(rng, "packed", 6, 8, 2, 32, np.float16)]
    table = np.array([[5, 1, 3, 0, 4]], np.int32)
    slots = table[0, np.arange(40) // 8].astype(np.int64) * 8 + np.arange(40) % 8
    pagedkv.reshape_and_cache(*map(backend.put, (key, value)), *caches, backend.put(slots))
    rows = pagedkv.gather_cache(
        *caches, backend.put(table), backend.put(np.array([0, 40], np.int32)), num_tokens=40, layout="packed"
    )
    for got, want in zip(rows, (key, value), strict=True):
        assert_same_bits(backend.get(got), want)


# ---- mistakes -------------------------------------------------------------------------------------------------------

RISE = "cu_seq_lens: expected starts that rise from 0"
MISTAKES = {
    "unknown layout": ({"layout": "NDH"}, ValueError, "layout: expected one of NHD, HND, packed"),
    "caches of another layout": ({"layout": "packed"}, ValueError, "key_cache: expected \\[num_blocks"),
    "integers in the cache": ({"key_cache": np.zeros((9, 16, 2, 32), np.int32)}, TypeError, "key_cache: expected fl"),
    "uint8 without a format": ({"key_cache": np.zeros((9, 16, 2, 32), np.uint8)}, TypeError, "key_cache: expected kv_"),
    "a format that is not the cache's": ({"kv_cache_dtype": "fp8"}, TypeError, "key_cache: expected uint8"),
    "values of another dtype": ({"value_cache": np.zeros((9, 16, 2, 32), np.float32)}, TypeError, "value_cache: "),
    "values of another shape": ({"value_cache": np.zeros((9, 16, 3, 32), np.float16)}, ValueError, "value_cache: "),
    "another dtype": ({"dtype": "float32"}, NotImplementedError, "dtype: expected float16, that of key_cache"),
    "no dtype": ({"dtype": "int8"}, TypeError, "dtype: expected one of float16, bfloat16, float32"),
    "a table of one axis": ({"block_table": np.zeros(4, np.int32)}, ValueError, "block_table: "),
    "a table of floats": ({"block_table": np.zeros((2, 3), np.float32)}, TypeError, "block_table: expected signed"),
    "starts for fewer sequences": ({"cu_seq_lens": np.zeros(2, np.int32)}, ValueError, "cu_seq_lens: expected shape"),
    "unsigned starts": ({"cu_seq_lens": np.zeros(3, np.uint32)}, TypeError, "cu_seq_lens: expected signed integers"),
    "ranges of fewer sequences": ({"seq_starts": np.zeros(1, np.int32)}, ValueError, "seq_starts: expected shape"),
    "ranges of bool": ({"seq_starts": np.zeros(2, bool)}, TypeError, "seq_starts: expected signed integers"),
    "fewer rows than asked": ({"num_tokens": 31}, ValueError, "key_out: expected shape \\(31, 2, 32\\)"),
    "a negative number of rows": ({"num_tokens": -1}, ValueError, "num_tokens: expected at least 0"),
    "half a row": ({"num_tokens": 0.5}, TypeError, "num_tokens: expected an integer or None"),
    "outputs of two lengths": ({"value_out": np.full((31, 2, 32), 7, np.float16)}, ValueError, "value_out: expected s"),
    "other heads": ({"key_out": np.full((32, 3, 32), 7, np.float16)}, ValueError, "key_out: expected shape"),
    "output of two axes": ({"key_out": np.full((32, 64), 7, np.float16)}, ValueError, "key_out: expected \\[num_"),
    "output of float32": ({"value_out": np.full((32, 2, 32), 7, np.float32)}, TypeError, "value_out: expected float16"),
    "scales of two kinds": ({"k_scale": np.ones(2, np.float32)}, ValueError, "v_scale: expected a scale per head"),
    "a scale of 0": ({"k_scale": 0.0}, ValueError, "k_scale: expected a positive number"),
}  # fmt: skip
# What indices hold: checked where reading them is free, and inside checked().
WRONG_INDICES = {
    "a first row past 0": ({"cu_seq_lens": [1, 20, 29]}, ValueError, RISE),
    "starts that fall": ({"cu_seq_lens": [0, 20, 19]}, ValueError, RISE),
    "more rows than the output": ({"cu_seq_lens": [0, 20, 33]}, ValueError, "cu_seq_lens: expected at most 32"),
    "a negative start": ({"seq_starts": [3, -1]}, ValueError, "seq_starts: expected starts of at least 0, got -1"),
    "a token past the row": ({"seq_starts": [3, 40]}, IndexError, "cu_seq_lens: expected ranges that end by token 48"),
    "a token far past it": ({"seq_starts": [2**31 - 1, 0]}, IndexError, "cu_seq_lens: expected ranges that end by"),
    "a block past the pool": ({"block_table": [[0, 9, 0], [0, 0, 0]]}, IndexError, "block_table: expected visible ids"),
    "a negative block": ({"block_table": [[0, 0, 0], [-1, 0, 0]]}, IndexError, "block_table: expected visible ids"),
}  # fmt: skip


def mistaken(rng, layout="NHD"):
    """A call with nothing wrong: two ranges in a pool of nine blocks, and an output of more rows."""
    arguments = batch(rng, [20, 9], [3, 0], layout=layout)
    caches = gathers.random_caches(rng, layout, 9, 16, 2, 32, np.float16)
    arguments["block_table"] = np.array([[0, 1, 8], [5, 8, 8]], np.int32)
    return arguments | dict(zip(("key_cache", "value_cache"), caches, strict=True))


def assert_rejected(backend, arguments, change, error, text):
    """The call raises, and no byte of the outputs that it would have written has changed."""
    outputs = {name: np.full((32, 2, 32), 7, np.float16) for name in ("key_out", "value_out")}
    given = put_all(backend, arguments | outputs | change)
    with pytest.raises(error, match=f"^{text}"):
        pagedkv.gather_cache(**given)
    for name in outputs:
        assert (backend.get(given[name]) == 7).all()


@pytest.mark.parametrize(("change", "error", "text"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(backend, rng, change, error, text):
    assert_rejected(backend, mistaken(rng), change, error, text)


@pytest.mark.parametrize(("change", "error", "text"), WRONG_INDICES.values(), ids=WRONG_INDICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrong_indices(backend, rng, layout, change, error, text):
    change = {name: np.array(value, np.int32) for name, value in change.items()}
    with pagedkv.checked():
        assert_rejected(backend, mistaken(rng, layout), change, error, text)


STARTS_THAT_WRAP = {  # where differences or sums are taken in the dtype itself
    "int8": ({"cu_seq_lens": np.array([0, 127, -128], np.int8)}, ValueError, RISE),
    "int64": ({"cu_seq_lens": np.array([0, 2**63 - 1, -(2**63)])}, ValueError, RISE),
    "past int32": ({"cu_seq_lens": np.array([0, 20, 2**32 + 29])}, ValueError, "cu_seq_lens: expected at most 32"),
    "a far start": ({"seq_starts": np.array([3, 2**63 - 1])}, IndexError, "cu_seq_lens: expected ranges that end by"),
    "a start past int32": ({"seq_starts": np.array([3, 2**32])}, IndexError, "cu_seq_lens: expected ranges that end"),
    "a block past int32": ({"block_table": np.full((2, 3), 2**32 + 1)}, IndexError, "block_table: expected visible id"),
}


@pytest.mark.parametrize(("change", "error", "text"), STARTS_THAT_WRAP.values(), ids=STARTS_THAT_WRAP)
def test_wrong_indices_that_would_wrap(backend, rng, change, error, text):
    with pagedkv.checked():
        assert_rejected(backend, mistaken(rng), change, error, text)


def test_starts_without_sequences(backend, rng):
    arguments = put_all(backend, batch(rng, []) | {"cu_seq_lens": np.array([5], np.int32)})
    with pagedkv.checked(), pytest.raises(ValueError, match=f"^{RISE}"):
        pagedkv.gather_cache(**arguments, num_tokens=9)


@pytest.mark.parametrize(
    "starts",
    [np.array([0, 127, -128], np.int8), np.array([0, 20, -5]), np.array([4, 20, 29])],
    ids=["wrap", "fall", "rise"],
)
def test_rows_cannot_be_read_off_starts_that_do_not_rise_from_0(host_backend, rng, starts):
    with pytest.raises(ValueError, match=f"^{RISE}"):
        pagedkv.gather_cache(**mistaken(rng) | {"cu_seq_lens": starts})


@pytest.mark.parametrize("bad", [0, -1, np.nan, np.inf])
def test_scales_in_an_array(backend, rng, bad):
    arguments = batch(rng, [5], kv_cache_dtype="fp8", k_scale=np.ones(2, np.float32))
    with pagedkv.checked(), pytest.raises(ValueError, match=r"^v_scale: expected positive numbers"):
        pagedkv.gather_cache(**put_all(backend, arguments | {"v_scale": np.array([1, bad], np.float32)}), num_tokens=5)


@pytest.mark.parametrize("name", ["key_out", "value_out"])
def test_read_only_outputs(host_backend, rng, name):
    arguments = batch(rng, [5])
    outputs = dict(zip(("key_out", "value_out"), outputs_for(arguments), strict=True))
    outputs[name].flags.writeable = False
    with pytest.raises(ValueError, match=rf"^{name}: expected a writable array"):
        pagedkv.gather_cache(**arguments, **outputs)
    assert all((output.view(np.uint8) == gathers.POISON).all() for output in outputs.values())


def test_output_with_a_strided_last_axis(backend, rng):
    arguments = batch(rng, [5])
    key_out = backend.put(np.zeros((5, 2, 64), np.float16))[..., ::2]
    with pytest.raises(ValueError, match=r"^key_out: expected last axis contiguous"):
        pagedkv.gather_cache(**put_all(backend, arguments), key_out=key_out)


# ---- frameworks -----------------------------------------------------------------------------------------------------


def test_torch(rng):
    torch = pytest.importorskip("torch")
    arguments = batch(rng, LENS, STARTS, dtype=np.float32)
    expected = expected_rows(arguments, *outputs_for(arguments, spare_rows=0))
    given = {name: torch.from_numpy(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}
    for got, want in zip(pagedkv.gather_cache(**given), expected, strict=True):
        assert isinstance(got, torch.Tensor)
        assert_same_bits(got.numpy(), want)


def test_jax(rng):
    jax = pytest.importorskip("jax")
    arguments = batch(rng, LENS, STARTS, dtype=np.float32)
    expected = expected_rows(arguments, *outputs_for(arguments, spare_rows=0))
    given = {name: jax.numpy.asarray(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}
    with jax.default_device(jax.devices("cpu")[0]):
        for got, want in zip(pagedkv.gather_cache(**given), expected, strict=True):
            assert isinstance(got, jax.Array)
            assert_same_bits(np.asarray(got), want)
        with pytest.raises(TypeError, match=r"^key_out: expected an array that can be written, got an immutable JAX"):
            pagedkv.gather_cache(**given, key_out=jax.numpy.zeros_like(expected[0]))
