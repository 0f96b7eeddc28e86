"""convert_layout: every slot of every block in another layout, every bit as it was."""

from itertools import product

import gathers
import ml_dtypes
import numpy as np
import pytest
from far_blocks import BLOCK_STRIDE, blocks_far_apart, far_along, sparse_bytes
from gathers import LAYOUTS, assert_same_bits, put_all, random_caches
from writes import block_size_of, cache_shapes, token_of

import pagedkv

PAIRS = list(product(LAYOUTS, LAYOUTS))
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.uint8]


def expected_caches(key_cache, value_cache, layout, to):
    """The same slots in caches of the other layout, one by one."""
    block_size = block_size_of(value_cache, layout)
    num_blocks = len(value_cache)
    slots = [token_of(value_cache, layout, block, offset) for block, offset in np.ndindex(num_blocks, block_size)]
    heads, head_size = slots[0].shape
    shapes = cache_shapes(to, num_blocks, block_size, heads, head_size, value_cache.dtype)
    expected = [np.empty(shape, value_cache.dtype) for shape in shapes]
    for cache, target in zip((key_cache, value_cache), expected, strict=True):
        for block, offset in np.ndindex(num_blocks, block_size):
            place = token_of(target, to, block, offset)
            place[...] = np.ascontiguousarray(token_of(cache, layout, block, offset)).reshape(place.shape)
    return expected


def check_convert(backend, rng, layout, to, num_blocks=3, block_size=16, heads=2, head_size=32, dtype=np.float16):
    """Into new caches and into given, poisoned ones."""
    caches = random_caches(rng, layout, num_blocks, block_size, heads, head_size, dtype)
    expected = expected_caches(*caches, layout, to)
    given = [backend.put(cache) for cache in caches]
    outputs = [backend.put(gathers.poisoned(cache.shape, cache.dtype)) for cache in expected]
    results = pagedkv.convert_layout(*given, layout, to, key_out=outputs[0], value_out=outputs[1])
    assert all(result is output for result, output in zip(results, outputs, strict=True))
    for converted in (results, pagedkv.convert_layout(*given, layout, to)):
        for got, want in zip(converted, expected, strict=True):
            assert_same_bits(backend.get(got), want)
    for got, want in zip(given, caches, strict=True):
        assert_same_bits(backend.get(got), want)


# ---- what is moved --------------------------------------------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize(("layout", "to"), PAIRS)
def test_dtypes(backend, rng, layout, to, dtype):
    check_convert(backend, rng, layout, to, dtype=dtype)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize(("layout", "to"), PAIRS)
def test_block_sizes(backend, rng, layout, to, block_size):
    check_convert(backend, rng, layout, to, block_size=block_size, num_blocks=2)


@pytest.mark.parametrize("block_size", [1, 17, 300])
@pytest.mark.parametrize(("layout", "to"), list(product(("NHD", "HND"), repeat=2)))
def test_any_block_size_in_flash_layouts(backend, rng, layout, to, block_size):
    check_convert(backend, rng, layout, to, block_size=block_size)


@pytest.mark.parametrize("head_size", [8, 40, 72, 128, 256])
@pytest.mark.parametrize(("layout", "to"), PAIRS)
def test_head_sizes(backend, rng, layout, to, head_size):
    check_convert(backend, rng, layout, to, head_size=head_size)


@pytest.mark.parametrize("head_size", [16, 48, 256])
@pytest.mark.parametrize(("layout", "to"), PAIRS)
def test_head_sizes_of_codes(backend, rng, layout, to, head_size):
    check_convert(backend, rng, layout, to, head_size=head_size, dtype=np.uint8)


@pytest.mark.parametrize("head_size", [8, 40, 120])
@pytest.mark.parametrize(("layout", "to"), list(product(("NHD", "HND"), repeat=2)))
def test_head_sizes_of_codes_that_fill_no_pack(backend, rng, layout, to, head_size):
    check_convert(backend, rng, layout, to, head_size=head_size, dtype=np.uint8)


@pytest.mark.parametrize("heads", [1, 16, 17])
@pytest.mark.parametrize(("layout", "to"), PAIRS)
def test_numbers_of_heads(backend, rng, layout, to, heads):
    """As many heads as slots among them: the two are told apart by name alone."""
    check_convert(backend, rng, layout, to, heads=heads, head_size=64)


@pytest.mark.parametrize("num_blocks", [0, 1, 5, 40])
@pytest.mark.parametrize(("layout", "to"), PAIRS)
def test_numbers_of_blocks(backend, rng, layout, to, num_blocks):
    if num_blocks:
        check_convert(backend, rng, layout, to, num_blocks=num_blocks, block_size=8, heads=1, head_size=8)
        return
    caches = [backend.put(cache) for cache in random_caches(rng, layout, 0, 8, 1, 8, np.float16)]
    for got, shape in zip(
        pagedkv.convert_layout(*caches, layout, to), cache_shapes(to, 0, 8, 1, 8, np.float16), strict=True
    ):
        assert got.shape == shape


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize(("layout", "to"), PAIRS)
def test_float8(host_backend, rng, layout, to, dtype):
    check_convert(host_backend, rng, layout, to, dtype=dtype)


@pytest.mark.parametrize("via", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back(backend, rng, layout, via):
    caches = random_caches(rng, layout, 3, 16, 2, 32, np.float16)
    there = pagedkv.convert_layout(*map(backend.put, caches), layout, via)
    for got, want in zip(pagedkv.convert_layout(*there, via, layout), caches, strict=True):
        assert_same_bits(backend.get(got), want)


def test_reads_see_no_difference(backend, rng):
    """A gather from each layout gives the same rows."""
    arguments = gathers.batch(rng, [37, 0, 50], [3, 0, 7])
    arguments |= {"num_tokens": 87}
    given = put_all(backend, arguments)
    expected = [backend.get(array) for array in pagedkv.gather_cache(**given)]
    for to in ("HND", "packed"):
        key_cache, value_cache = pagedkv.convert_layout(given["key_cache"], given["value_cache"], "NHD", to)
        rows = pagedkv.gather_cache(**given | {"key_cache": key_cache, "value_cache": value_cache, "layout": to})
        for got, want in zip(rows, expected, strict=True):
            assert_same_bits(backend.get(got), want)


# ---- strides and addresses ------------------------------------------------------------------------------------------


def halves(backend, key, value):
    """Both caches as halves of one buffer, ``[num_blocks, 2, ...]``."""
    both = backend.put(np.stack([cache.reshape(len(cache), -1) for cache in (key, value)], axis=1))
    return [both[:, 0].reshape(key.shape), both[:, 1].reshape(value.shape)]


@pytest.mark.sanitize
@pytest.mark.parametrize(("layout", "to"), PAIRS)
def test_halves_of_one_buffer(backend, rng, layout, to):
    """At both ends."""
    caches = random_caches(rng, layout, 3, 16, 2, 32, np.float16)
    expected = expected_caches(*caches, layout, to)
    sources = halves(backend, *caches)
    targets = halves(backend, *(gathers.poisoned(cache.shape, cache.dtype) for cache in expected))
    pagedkv.convert_layout(*sources, layout, to, key_out=targets[0], value_out=targets[1])
    for got, want in zip(targets, expected, strict=True):
        assert_same_bits(backend.get(got), want)


@pytest.mark.parametrize(("layout", "to"), PAIRS)
def test_some_heads_of_wider_caches(backend, rng, layout, to):
    """Strides of heads of its own for each of the four; what lies beside them stays as it was."""
    axis = {"NHD": 2, "HND": 1, "packed": 1}
    caches = random_caches(rng, layout, 3, 16, 2, 32, np.float16)
    expected = expected_caches(*caches, layout, to)
    sources = []
    for extra, cache in enumerate(caches, start=1):
        beside = gathers.poisoned((*cache.shape[: axis[layout]], extra, *cache.shape[axis[layout] + 1 :]), np.float16)
        wide = backend.put(np.concatenate([beside, cache], axis=axis[layout]))
        sources.append(wide[(slice(None),) * axis[layout] + (slice(extra, None),)])
    buffers = []
    for extra, cache in enumerate(expected, start=3):
        shape = (*cache.shape[: axis[to]], 2 + extra, *cache.shape[axis[to] + 1 :])
        buffers.append(backend.put(gathers.poisoned(shape, np.float16)))
    place = (slice(None),) * axis[to] + (slice(1, 3),)
    pagedkv.convert_layout(*sources, layout, to, key_out=buffers[0][place], value_out=buffers[1][place])
    for buffer, want in zip(buffers, expected, strict=True):
        whole = gathers.poisoned(buffer.shape, np.float16)
        whole[place] = want
        assert_same_bits(backend.get(buffer), whole)


@pytest.mark.parametrize("offset", [1, 4])
@pytest.mark.parametrize("misaligned", range(4))
@pytest.mark.parametrize(("layout", "to"), PAIRS)
def test_misaligned_bases(backend, rng, layout, to, misaligned, offset):
    caches = random_caches(rng, layout, 2, 8, 2, 32, np.float16)
    expected = expected_caches(*caches, layout, to)
    arrays = [*caches, *(gathers.poisoned(cache.shape, cache.dtype) for cache in expected)]
    given = [backend.put(array) for array in arrays]
    room = np.empty(arrays[misaligned].size + offset, np.float16)
    room[offset:] = arrays[misaligned].ravel()
    given[misaligned] = backend.put(room)[offset:].reshape(arrays[misaligned].shape)
    pagedkv.convert_layout(*given[:2], layout, to, key_out=given[2], value_out=given[3])
    for got, want in zip(given[2:], expected, strict=True):
        assert_same_bits(backend.get(got), want)


@pytest.mark.parametrize("far", ["source", "target"])
@pytest.mark.parametrize(("layout", "to"), [("NHD", "packed"), ("packed", "HND"), ("HND", "NHD"), ("packed", "packed")])
def test_offsets_past_two_and_four_gigabytes(backend, rng, layout, to, far):
    sizes = (4, 8, 2, 32)
    caches = random_caches(rng, layout, *sizes, np.uint8)
    expected = expected_caches(*caches, layout, to)
    shapes = cache_shapes(layout if far == "source" else to, *sizes, np.uint8)
    buffers = [sparse_bytes(backend, (sizes[0] - 1) * BLOCK_STRIDE + 4096) for _ in "kv"]
    spread = [blocks_far_apart(buffer, shape) for buffer, shape in zip(buffers, shapes, strict=True)]
    given = [backend.put(cache) for cache in caches]
    if far == "source":
        for cache, content in zip(spread, given, strict=True):
            for block in range(sizes[0]):
                cache[block] = content[block]
        results = pagedkv.convert_layout(*spread, layout, to)
    else:
        results = pagedkv.convert_layout(*given, layout, to, key_out=spread[0], value_out=spread[1])
    for got, want in zip(results, expected, strict=True):
        for block in range(sizes[0]):
            assert_same_bits(backend.get(got[block]), want[block])


@pytest.mark.parametrize("axis", [1, 2], ids=["tokens", "heads"])
@pytest.mark.parametrize("far", ["source", "target"])
def test_tokens_and_heads_far_apart(host_backend, rng, far, axis):
    """Inside a block, beyond 2^31 and 2^32."""
    caches = random_caches(rng, "NHD", 2, 4, 4, 16, np.uint8)
    rooms = [sparse_bytes(host_backend, 3 * BLOCK_STRIDE + 4096) for _ in "kv"]
    spread = [far_along(axis, room, caches[0].shape, np.uint8) for room in rooms]
    if far == "source":
        for place, cache in zip(spread, caches, strict=True):
            place[...] = cache
        results = pagedkv.convert_layout(*spread, "NHD", "NHD")
    else:
        results = pagedkv.convert_layout(*caches, "NHD", "NHD", key_out=spread[0], value_out=spread[1])
    for got, want in zip(results, caches, strict=True):
        assert_same_bits(got, want)


# ---- mistakes -------------------------------------------------------------------------------------------------------


def flash(block_size=16, head_size=32, dtype=np.float16):
    return {name: np.zeros((3, block_size, 2, head_size), dtype) for name in ("key_cache", "value_cache")}


HND_VALUES = np.full((3, 2, 16, 32), 7, np.float16)
MISTAKES = {
    "unknown layout": ({"layout": "nhd"}, ValueError, "layout: expected one of NHD, HND, packed"),
    "unknown target": ({"to": "NDH"}, ValueError, "to: expected one of NHD, HND, packed"),
    "caches of another layout": ({"layout": "packed"}, ValueError, "key_cache: expected \\[num_blocks"),
    "integers": (flash(dtype=np.int16), TypeError, "key_cache: expected float16 or"),
    "values of another dtype": ({"value_cache": np.zeros((3, 16, 2, 32), np.float32)}, TypeError, "value_cache: "),
    "values of another shape": ({"value_cache": np.zeros((3, 16, 2, 40), np.float16)}, ValueError, "value_cache: "),
    "heads that fill no pack": (
        flash(head_size=40, dtype=np.uint8) | {"to": "packed"},
        ValueError,
        "head_size: expected a multiple of x = 16 in the packed layout, got 40",
    ),
    "blocks that are no power of two": (
        flash(block_size=24) | {"to": "packed"},
        ValueError,
        "block_size: expected one of .* in the packed layout, got 24",
    ),
    "small blocks": (flash(block_size=4) | {"to": "packed"}, ValueError, "block_size: expected one of"),
    "large blocks": (flash(block_size=512) | {"to": "packed"}, ValueError, "block_size: expected one of"),
    "output of the old layout": (
        {"key_out": np.full((3, 16, 2, 32), 7, np.float16)},
        ValueError,
        "key_out: expected s",
    ),
    "output of another dtype": ({"value_out": HND_VALUES.astype(np.float32)}, TypeError, "value_out: expected float16"),
    "output of fewer blocks": ({"value_out": HND_VALUES[:2]}, ValueError, "value_out: expected shape"),
    "output with a strided last axis": (
        {"value_out": np.full((3, 2, 16, 64), 7, np.float16)[..., ::2]},
        ValueError,
        "value_out: expected last axis contiguous",
    ),
}


@pytest.mark.parametrize(("change", "error", "text"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(backend, change, error, text):
    given = {**flash(), "layout": "NHD", "to": "HND", "key_out": HND_VALUES.copy(), "value_out": HND_VALUES.copy()}
    given = put_all(backend, given)
    for name, value in change.items():
        is_strided = isinstance(value, np.ndarray) and not value.flags.c_contiguous
        given[name] = backend.put(value.base)[..., ::2] if is_strided else put_all(backend, {name: value})[name]
    with pytest.raises(error, match=f"^{text}"):
        pagedkv.convert_layout(**given)
    for name in ("key_out", "value_out"):
        assert (backend.get(given[name]) == 7).all()


def test_packed_outputs_with_strides_inside(backend, rng):
    """The inner axes of packed caches are contiguous, of targets as of sources."""
    caches = [backend.put(cache) for cache in random_caches(rng, "packed", 2, 8, 2, 32, np.float16)]
    wide = backend.put(np.zeros((2, 2, 32, 16), np.float16))
    with pytest.raises(ValueError, match=r"^value_out: expected axes from 2 on contiguous"):
        pagedkv.convert_layout(*caches, "packed", "packed", value_out=wide[..., :8])


@pytest.mark.parametrize("name", ["key_out", "value_out"])
def test_read_only_outputs(host_backend, rng, name):
    caches = random_caches(rng, "NHD", 2, 16, 2, 32, np.float16)
    outputs = {name: gathers.poisoned((2, 2, 16, 32), np.float16) for name in ("key_out", "value_out")}
    outputs[name].flags.writeable = False
    with pytest.raises(ValueError, match=rf"^{name}: expected a writable array"):
        pagedkv.convert_layout(*caches, "NHD", "HND", **outputs)
    assert all((output.view(np.uint8) == gathers.POISON).all() for output in outputs.values())


@pytest.mark.parametrize(
    ("target", "source"), list(product(("key_out", "value_out"), ("key_cache", "value_cache", "key_out")))
)
def test_targets_are_memory_of_their_own(backend, rng, target, source):
    """Also in a call like one that went well: where arrays lie is looked at every time."""
    given = dict(zip(("key_cache", "value_cache"), random_caches(rng, "NHD", 2, 16, 2, 32, np.float16), strict=True))
    given |= {name: np.zeros((2, 16, 2, 32), np.float16) for name in ("key_out", "value_out")}
    given = put_all(backend, given) | {"layout": "NHD", "to": "NHD"}
    pagedkv.convert_layout(**given)
    before = {name: backend.get(given[name]).copy() for name in ("key_cache", "value_cache")}
    if target == source:
        given["value_out"] = given["key_out"]
    else:
        given[target] = given[source]
    with pytest.raises(ValueError, match=r"^key_out and value_out: expected memory of their own"):
        pagedkv.convert_layout(**given)
    for name, content in before.items():
        assert_same_bits(backend.get(given[name]), content)


def test_no_blocks_share_no_memory(host_backend):
    room = np.zeros((2, 16, 2, 32), np.float16)[:0]
    pagedkv.convert_layout(room, room, "NHD", "NHD", key_out=room, value_out=room)


# ---- frameworks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_torch(rng, dtype):
    torch = pytest.importorskip("torch")
    caches = random_caches(rng, "NHD", 3, 16, 2, 32, dtype)
    results = pagedkv.convert_layout(*map(torch.from_numpy, caches), "NHD", "packed")
    for got, want in zip(results, expected_caches(*caches, "NHD", "packed"), strict=True):
        assert isinstance(got, torch.Tensor)
        assert_same_bits(got.numpy(), want)


def test_jax(rng):
    jax = pytest.importorskip("jax")
    caches = random_caches(rng, "packed", 3, 16, 2, 32, np.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        results = pagedkv.convert_layout(*map(jax.numpy.asarray, caches), "packed", "HND")
    for got, want in zip(results, expected_caches(*caches, "packed", "HND"), strict=True):
        assert isinstance(got, jax.Array)
        assert_same_bits(np.asarray(got), want)
