"""copy_blocks, copies with overlap: every byte of whole buffers, against a plain loop."""

import ml_dtypes
import numpy as np
import pytest
from block_moves import MAPPINGS, NUM_BLOCKS, VIEWS, assert_same_bytes, moved, random_buffer, random_mapping
from far_blocks import BLOCK_STRIDE, blocks_far_apart, sparse_bytes

import pagedkv
from pagedkv.arrays import view

OVERLAPPING = [(0, 1), (1, 2), (5, 6), (8, 9), (5, 7), (3, 3)]
DTYPES = ["uint8", "int8", "bool", "float16", "bfloat16", "float32", "float64", "complex128"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]


def copy_and_check(backend, buffers, views_of, mapping, given_mapping=None):
    """Copies in the caches that ``views_of`` makes of all buffers, and compares the buffers."""
    expected = [buffer.copy() for buffer in buffers]
    for cache in views_of(*expected):
        moved(cache, cache, mapping)
    on_backend = [backend.put(buffer.copy()) for buffer in buffers]
    given = mapping if given_mapping is None else given_mapping
    assert pagedkv.copy_blocks(views_of(*on_backend), given) is None
    for got, want in zip(on_backend, expected, strict=True):
        assert_same_bytes(backend.get(got), want.view(np.uint8) if want.dtype.name in FLOAT8 else want)


def as_list(*buffers):
    return list(buffers)


# ---- which blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.parametrize("name", MAPPINGS)
def test_copies_with_overlap(backend, rng, name):
    buffers = [random_buffer(rng, (NUM_BLOCKS, 4, 2, 8)) for _ in range(2)]
    copy_and_check(backend, buffers, as_list, MAPPINGS[name])


@pytest.mark.parametrize("num_pairs", [1, 3, 8, 20])
@pytest.mark.parametrize("trial", range(4))
def test_random_mappings(backend, rng, num_pairs, trial):
    """Chains, cycles and fan-outs as they come, over caches of several forms."""
    buffers = [random_buffer(rng, (20, 2, 4, 3, 8)), random_buffer(rng, (20, 4, 3, 16), np.uint8)]
    mapping = random_mapping(rng, 20, 20, num_pairs)
    copy_and_check(backend, buffers, lambda a, b: [a[:, 0], a[:, 1], b[..., :5], b[..., 5:]], mapping)


@pytest.mark.parametrize("permutation", range(3))
def test_permutations_of_all_blocks(backend, rng, permutation):
    mapping = np.stack([np.arange(16), rng.permutation(16)], axis=1)
    copy_and_check(backend, [random_buffer(rng, (16, 3, 5))], as_list, rng.permutation(mapping))


def test_many_pairs(backend, rng):
    """More than the CTAs that one CTA's worth of rounds would hide."""
    mapping = random_mapping(rng, 300, 300, 250)
    copy_and_check(backend, [random_buffer(rng, (300, 2, 8))], as_list, mapping)


@pytest.mark.parametrize("empty", [[], (), np.empty((0, 2), np.int32), np.empty((0, 2), np.int64)], ids=repr)
def test_an_empty_mapping(backend, rng, empty):
    given = backend.put(empty) if isinstance(empty, np.ndarray) else empty
    copy_and_check(backend, [random_buffer(rng, (4, 3))], as_list, [], given)


# ---- how a mapping is given -----------------------------------------------------------------------------------------


def strided(mapping):
    wide = np.full((2 * len(mapping), 5), -1, mapping.dtype)
    wide[::2, 1::3] = mapping
    return wide, lambda wide: wide[::2, 1::3]


FORMS = {
    "int8": lambda m: (m.astype(np.int8), lambda a: a),
    "int16": lambda m: (m.astype(np.int16), lambda a: a),
    "int32": lambda m: (m.astype(np.int32), lambda a: a),
    "int64": lambda m: (m, lambda a: a),
    "transposed": lambda m: (np.ascontiguousarray(m.T), lambda a: a.T),
    "strided": strided,
    "reversed": lambda m: (np.ascontiguousarray(m[::-1]), lambda a: a[::-1]),
    "sides reversed": lambda m: (np.ascontiguousarray(m[:, ::-1]), lambda a: a[:, ::-1]),
}


@pytest.mark.parametrize("place", ["host", "where the caches are"])
@pytest.mark.parametrize("form", FORMS)
def test_mapping_arrays(backend, rng, form, place):
    memory, view_of = FORMS[form](np.array(OVERLAPPING))
    given = memory.copy() if place == "host" else backend.put(memory.copy())
    copy_and_check(backend, [random_buffer(rng, (10, 4, 3))], as_list, OVERLAPPING, view_of(given))
    after = given if place == "host" else backend.get(given)
    np.testing.assert_array_equal(after, memory)


@pytest.mark.parametrize("kind", [list, tuple])
def test_mapping_sequences(backend, rng, kind):
    copy_and_check(backend, [random_buffer(rng, (10, 4, 3))], as_list, OVERLAPPING, kind(map(kind, OVERLAPPING)))


def test_narrow_block_ids_do_not_wrap(backend, rng):
    mapping = [(126, 3), (3, 127), (100, 126)]
    copy_and_check(backend, [random_buffer(rng, (128, 5, 7))], as_list, mapping, np.array(mapping, np.int8))


# ---- what blocks are ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapping", ["disjoint", "chain beside disjoint pairs", "rotation of all"])
@pytest.mark.parametrize("name", VIEWS)
def test_strides(backend, rng, name, mapping):
    shape, views_of = VIEWS[name]
    copy_and_check(backend, [random_buffer(rng, shape)], views_of, MAPPINGS[mapping])


@pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT8])
def test_dtypes(backend, rng, dtype):
    buffer = random_buffer(rng, (10, 3, 5, 7), np.dtype(getattr(ml_dtypes, dtype, dtype)))
    if dtype == "bool":
        buffer = buffer.view(np.uint8) % 2 == 1
    copy_and_check(backend, [buffer], as_list, OVERLAPPING)


# Around a pack, a warp's packs and what a CTA takes at once: 8,192 bytes, or 512 where it moves single ones.
BLOCK_BYTES = [1, 2, 3, 4, 8, 12, 15, 16, 17, 48, 511, 512, 513, 1000, 2048, 2064, 8176, 8192, 8208, 24576, 24592]


@pytest.mark.sanitize
@pytest.mark.parametrize("nbytes", BLOCK_BYTES)
def test_sizes_of_blocks(backend, rng, nbytes):
    copy_and_check(backend, [random_buffer(rng, (6, nbytes), np.uint8)], as_list, [(0, 4), (1, 2), (2, 3)])


@pytest.mark.parametrize("offset", range(1, 17))
def test_unaligned_addresses(backend, rng, offset):
    """One cache of two begins anywhere: all widths of access, down to single bytes."""
    buffers = [random_buffer(rng, (10 * 96 + offset,), np.uint8), random_buffer(rng, (10, 96), np.uint8)]
    copy_and_check(backend, buffers, lambda a, b: [a[offset:].reshape(10, 4, 3, 8), b], OVERLAPPING)


@pytest.mark.parametrize("spare", [1, 2, 3, 4, 8])
def test_unaligned_strides(backend, rng, spare):
    """Aligned addresses, blocks that fill whole packs, and a distance between them that is no whole number of packs."""
    buffer = random_buffer(rng, (10, 64 + spare), np.uint8)
    copy_and_check(backend, [buffer], lambda b: [b[:, :64]], OVERLAPPING)


@pytest.mark.parametrize("width", [24, 40, 17])
def test_unaligned_rows(backend, rng, width):
    """Aligned addresses and blocks; rows that are not."""
    buffer = random_buffer(rng, (10, 4, 16 * 4), np.uint8)
    copy_and_check(backend, [buffer], lambda b: [b[:, :, :width]], OVERLAPPING)


def test_blocks_far_apart(backend, rng):
    """Offsets beyond 2^31 and 2^32."""
    shape = (4, 2, 3, 8)
    buffer = sparse_bytes(backend, 3 * BLOCK_STRIDE + 48)
    cache = blocks_far_apart(buffer, shape)
    before = random_buffer(rng, shape, np.uint8)
    for block in range(4):
        cache[block] = backend.put(before[block].copy())
    after = before.copy()
    mapping = [(3, 0), (0, 2), (1, 3)]
    moved(after, after, mapping)
    pagedkv.copy_blocks(cache, mapping)
    for block in range(4):
        assert_same_bytes(backend.get(cache[block]), after[block])


# ---- several caches -------------------------------------------------------------------------------------------------


@pytest.mark.sanitize
def test_caches_of_different_shapes_dtypes_and_strides(backend, rng):
    shapes = [((10, 4, 2, 8), np.float16), ((10, 4, 2, 8), np.uint8), ((10, 128), np.uint8), ((10, 16, 2), np.float32)]
    buffers = [random_buffer(rng, shape, dtype) for shape, dtype in [*shapes, ((10, 2, 4, 3), np.float16)]]

    def views_of(*buffers):
        return [*buffers[:4], buffers[4][:, 0], buffers[4][:, 1], buffers[2][:, :0]]

    copy_and_check(backend, buffers, views_of, OVERLAPPING)


@pytest.mark.parametrize("num_caches", [1, 2, 7, 64])
def test_numbers_of_caches(backend, rng, num_caches):
    buffers = [random_buffer(rng, (6, 3, 8)) for _ in range(num_caches)]
    copy_and_check(backend, buffers, as_list, [(0, 4), (1, 2), (2, 1)])


@pytest.mark.parametrize(
    "views_of", [lambda a, b: [a, b, a[:], b, a], lambda a, b: {"k": a, "v": b, "k again": a}], ids=["list", "dict"]
)
def test_a_cache_named_twice_is_copied_once(backend, rng, views_of):
    """Twice, blocks that are exchanged would be back in place."""
    buffers = [random_buffer(rng, (6, 3, 8)) for _ in range(2)]
    given = [backend.put(buffer.copy()) for buffer in buffers]
    pagedkv.copy_blocks(views_of(*given), [(0, 1), (1, 0)])
    for got, want in zip(given, buffers, strict=True):
        assert_same_bytes(backend.get(got), want[[1, 0, 2, 3, 4, 5]])


BEGIN_TOGETHER = {
    "other shapes": lambda b: [b[:6, :1], b[:6]],
    "other strides": lambda b: [b[:6, :2], b[::2, :2]],
    "other dtypes": lambda b: [b[:6, :4], b.view(np.uint16)[::2, :4]],
}


@pytest.mark.parametrize("views_of", BEGIN_TOGETHER.values(), ids=BEGIN_TOGETHER)
def test_caches_that_only_begin_in_one_place_are_all_copied(host_backend, rng, views_of):
    copy_and_check(host_backend, [random_buffer(rng, (12, 16), np.uint8)], views_of, [(0, 1)])


CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "dict": lambda caches: {f"layer {i}": cache for i, cache in enumerate(caches)},
    "one array": lambda caches: caches[0],
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_containers(backend, rng, container):
    put = CONTAINERS[container]
    buffers = [random_buffer(rng, (6, 3, 8)) for _ in range(1 if container == "one array" else 3)]
    expected, given = [buffer.copy() for buffer in buffers], [backend.put(buffer.copy()) for buffer in buffers]
    for cache in expected:
        moved(cache, cache, [(0, 1), (1, 0)])
    pagedkv.copy_blocks(put(given), [(0, 1), (1, 0)])
    for got, want in zip(given, expected, strict=True):
        assert_same_bytes(backend.get(got), want)


@pytest.mark.parametrize("none", [[], (), {}], ids=repr)
def test_no_caches(backend, none):
    assert pagedkv.copy_blocks(none, [(0, 1)]) is None
    with pytest.raises(TypeError, match=r"^mapping: expected signed integers, got float64"):
        pagedkv.copy_blocks(none, [(0.5, 1)])


def test_calls_that_repeat_see_what_changed(backend, rng):
    """The same caches with other mappings, and other caches with the same mapping."""
    for _ in range(2):
        for mapping in ([(0, 1)], [(1, 0), (0, 1)], [(2, 3), (3, 4)]):
            for shape in ((6, 3, 8), (6, 8, 3), (6, 7)):
                copy_and_check(backend, [random_buffer(rng, shape)], as_list, mapping)


# ---- mistakes -------------------------------------------------------------------------------------------------------

MISTAKES = {
    "destination twice": ({"mapping": [(0, 1), (2, 1)]}, ValueError, "mapping: expected each destination at most once"),
    "destination twice, once its own": (
        {"mapping": [(1, 1), (2, 1)]},
        ValueError,
        "mapping: expected each destination",
    ),
    "destination twice, not in a row": (
        {"mapping": [(0, 1), (2, 3), (4, 1)]},
        ValueError,
        "mapping: expected each destination at most once, got block 1 twice",
    ),
    "the same pair twice": ({"mapping": [(0, 1), (0, 1)]}, ValueError, "mapping: .*, got block 1 twice"),
    "source past the pool": ({"mapping": [(0, 1), (6, 2)]}, IndexError, "mapping: expected sources from 0 to 5, got 6"),
    "destination past the pool": (
        {"mapping": [(1, 6)]},
        IndexError,
        "mapping: expected destinations from 0 to 5, got 6",
    ),
    "negative source": ({"mapping": [(0, 1), (-1, 2)]}, IndexError, "mapping: expected sources from 0 to 5, got -1"),
    "negative destination": ({"mapping": [(0, -6)]}, IndexError, "mapping: expected destinations from 0 to 5, got -6"),
    "outside onto itself": ({"mapping": [(6, 6)]}, IndexError, "mapping: expected sources"),
    "triples": ({"mapping": [(0, 1, 2)]}, ValueError, r"mapping: expected \[num_pairs, 2\], got shape \(1, 3\)"),
    "a flat list": ({"mapping": [0, 1]}, ValueError, r"mapping: expected \[num_pairs, 2\], got shape \(2,\)"),
    "ragged": ({"mapping": [(0, 1), (2,)]}, ValueError, "mapping: expected pairs"),
    "floats": ({"mapping": [(0.0, 1.0)]}, TypeError, "mapping: expected signed integers, got float64"),
    "bools": ({"mapping": [(False, True)]}, TypeError, "mapping: expected signed integers, got bool"),
    "unsigned": (
        {"mapping": np.array([(0, 1)], np.uint32)},
        TypeError,
        "mapping: expected signed integers, got uint32",
    ),
    "no mapping": ({"mapping": None}, TypeError, "mapping: expected an array, got NoneType"),
    "a number": ({"caches": 3}, TypeError, "caches: expected an array, got int"),
    "a number among caches": ({"caches": lambda c: [c, 3]}, TypeError, r"caches\[1\]: expected an array, got int"),
    "other blocks": (
        {"caches": lambda c: [c, c[:5]]},
        ValueError,
        r"caches\[1\]: expected 6 blocks like caches\[0\], got 5",
    ),
    "other blocks beside a cache named twice": (
        {"caches": lambda c: [c, c, c[:5]]},
        ValueError,
        r"caches\[2\]: expected 6 blocks like caches\[0\], got 5",
    ),
    "other blocks in a dict": (
        {"caches": lambda c: {"k": c, "v": c[:5]}},
        ValueError,
        r"caches\['v'\]: expected 6 blocks like caches\['k'\], got 5",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(backend, rng, mistake):
    """Each raises, and not a byte has changed: not even by pairs before the wrong one."""
    changes, error, message = MISTAKES[mistake]
    buffer = random_buffer(rng, (6, 3, 8), np.int16)
    cache = backend.put(buffer.copy())
    arguments = {"caches": cache, "mapping": [(0, 1)]}
    for name, change in changes.items():
        arguments[name] = change(cache) if callable(change) else change
    with pytest.raises(error, match=rf"^{message}"):
        pagedkv.copy_blocks(**arguments)
    assert_same_bytes(backend.get(cache), buffer)


@pytest.mark.parametrize(
    ("mapping", "error"), [([(0, 1), (2, 1)], ValueError), ([(0, 1), (6, 2)], IndexError), ([(0, -1)], IndexError)]
)
def test_mistakes_in_a_mapping_where_the_caches_are(backend, rng, mapping, error):
    buffer = random_buffer(rng, (6, 3, 8))
    cache = backend.put(buffer.copy())
    with pytest.raises(error, match=r"^mapping: "):
        pagedkv.copy_blocks(cache, backend.put(np.array(mapping)))
    assert_same_bytes(backend.get(cache), buffer)


def test_numbers_without_bytes(host_backend):
    assert pagedkv.copy_blocks(np.zeros((4, 3), "V0"), [(0, 1), (1, 2)]) is None


def test_a_cache_without_axes(backend):
    with pytest.raises(ValueError, match=r"^caches: expected \[num_blocks, ...\], got shape \(\)"):
        pagedkv.copy_blocks(backend.put(np.zeros((), np.int16)), [])


def test_a_mistake_in_the_last_cache_leaves_the_first_alone(backend, rng):
    buffer = random_buffer(rng, (6, 3, 8))
    first, last = backend.put(buffer.copy()), backend.put(buffer[:4].copy())
    with pytest.raises(ValueError, match=r"^caches\[1\]: "):
        pagedkv.copy_blocks([first, last], [(0, 1)])
    assert_same_bytes(backend.get(first), buffer)


def test_read_only_caches(host_backend, rng):
    buffer = random_buffer(rng, (6, 3, 8))
    locked = buffer.copy()
    locked.flags.writeable = False
    open_one = buffer.copy()
    with pytest.raises(ValueError, match=r"^caches\[1\]: expected a writable array"):
        pagedkv.copy_blocks([open_one, locked], [(0, 1)])
    assert_same_bytes(open_one, buffer)


def test_python_objects(host_backend):
    with pytest.raises(TypeError, match=r"^caches: expected a dtype without Python objects, got object"):
        pagedkv.copy_blocks(np.full((4, 3), None), [(0, 1)])


def test_jax_caches(host_backend):
    jax = pytest.importorskip("jax")
    cache = jax.numpy.zeros((4, 3))
    with pytest.raises(TypeError, match=r"^caches: expected an array that can be written, got an immutable JAX array"):
        pagedkv.copy_blocks(cache, [(0, 1)])


def test_jax_mapping(host_backend, rng):
    jax = pytest.importorskip("jax")
    mapping = jax.numpy.asarray(OVERLAPPING, dtype=jax.numpy.int32)
    copy_and_check(host_backend, [random_buffer(rng, (10, 3))], as_list, OVERLAPPING, mapping)


def test_torch_on_the_host(host_backend, rng):
    torch = pytest.importorskip("torch")
    buffers = [random_buffer(rng, (10, 2, 3, 4), np.int16) for _ in range(2)]
    expected = [buffer.copy() for buffer in buffers]
    for buffer in expected:
        moved(buffer[:, 1], buffer[:, 1], OVERLAPPING)
    given = [torch.from_numpy(buffer) for buffer in buffers]
    pagedkv.copy_blocks([tensor[:, 1] for tensor in given], torch.tensor(OVERLAPPING))
    for got, want in zip(given, expected, strict=True):
        assert_same_bytes(got.numpy(), want)


@pytest.mark.parametrize("backend_name", ["numpy", pytest.param("ptx", marks=pytest.mark.ptx)])
def test_a_mapping_on_a_device_with_caches_on_the_host(monkeypatch, backend_name, rng):
    mapping = view(np.array([(0, 1)]), "mapping")
    mapping.device = 0
    monkeypatch.setattr("pagedkv.validate_moves.view", lambda a, name: mapping if name == "mapping" else view(a, name))
    cache = random_buffer(rng, (4, 3))
    before = cache.copy()
    with (
        pagedkv.use_backend(backend_name),
        pytest.raises(TypeError, match=r"^mapping: expected an array on cpu, got cuda:0"),
    ):
        pagedkv.copy_blocks(cache, [(0, 1)])
    assert_same_bytes(cache, before)


def test_caches_on_two_devices(monkeypatch, rng):
    caches = [view(random_buffer(rng, (4, 3)), "cache") for _ in range(2)]
    caches[1].device = 1
    monkeypatch.setattr("pagedkv.validate_moves.view", lambda a, name: caches[a])
    with pytest.raises(TypeError, match=r"^caches\[1\]: expected an array on cpu like caches\[0\], got cuda:1"):
        pagedkv.copy_blocks([0, 1], [(0, 1)])


def test_pairs_of_caches(backend, rng):
    """As a `PagedKVCache` has them, layer by layer; errors name the one that is wrong."""
    buffers = [random_buffer(rng, (6, 3, 8)) for _ in range(4)]
    a, b, c, d = on_backend = [backend.put(buffer.copy()) for buffer in buffers]
    pagedkv.copy_blocks([(a, b), (c, d)], [(0, 1), (1, 2)])
    for got, buffer in zip(on_backend, buffers, strict=True):
        moved(buffer, buffer, [(0, 1), (1, 2)])
        assert_same_bytes(backend.get(got), buffer)
    with pytest.raises(ValueError, match=r"^caches\[1\]\[0\]: expected 6 blocks like caches\[0\], got 5"):
        pagedkv.copy_blocks([a, (b[:5],)], [(0, 1)])
