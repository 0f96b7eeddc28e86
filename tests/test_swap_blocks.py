"""swap_blocks: whole blocks from one pool to another, every byte of both, against a plain loop."""

import numpy as np
import pytest
from block_moves import VIEWS, assert_same_bytes, moved, random_buffer, random_mapping
from conftest import CUDA, HOST_BACKENDS, make_backend
from far_blocks import BLOCK_STRIDE, sparse_bytes

import pagedkv
from pagedkv.arrays import view

DIRECTIONS = ["to host", "from host", "on the device"]
MAPPING = [(0, 1), (1, 2), (5, 0), (5, 7), (3, 3)]
FEW = [(7, 2), (0, 0)]


class Side:
    """Where one of the two pools lies: on the backend, or in pinned memory beside it."""

    def __init__(self, backend, is_pinned):
        self.backend, self.is_pinned = backend, is_pinned

    def put(self, array):
        if not self.is_pinned:
            return self.backend.put(array.copy())
        if array.size == 0:
            return array.copy()
        import cupyx

        pinned = cupyx.empty_pinned(array.shape, array.dtype)
        pinned[...] = array
        return pinned

    def get(self, array):
        return array if self.is_pinned else self.backend.get(array)


@pytest.fixture(params=[*HOST_BACKENDS, *(pytest.param(("cuda", d), marks=CUDA.marks, id=d) for d in DIRECTIONS)])
def sides(request):
    """Source and destination of each backend, on cuda in each direction."""
    if isinstance(request.param, str):
        with pagedkv.use_backend(request.param):
            yield (Side(make_backend(request.param), is_pinned=False),) * 2
    else:
        _, direction = request.param
        backend = make_backend("cuda")
        yield Side(backend, direction == "from host"), Side(backend, direction == "to host")


def synchronize():
    import cupy

    cupy.cuda.Device().synchronize()


def swap_and_check(sides, sources, targets, mapping, views_of=lambda *buffers: list(buffers), given_mapping=None):
    """Moves between the arrays that ``views_of`` makes of the buffers of either side, and compares all of both."""
    expected = [buffer.copy() for buffer in targets]
    for source, target in zip(views_of(*sources), views_of(*expected), strict=True):
        moved(source, target, mapping)
    src, dst = ([side.put(b) for b in buffers] for side, buffers in zip(sides, (sources, targets), strict=True))
    given = mapping if given_mapping is None else given_mapping
    assert pagedkv.swap_blocks(views_of(*src), views_of(*dst), given) is None
    if sides[0].backend.name == "cuda":
        synchronize()
    for got, want in zip(dst, expected, strict=True):
        assert_same_bytes(sides[1].get(got), want)
    for got, before in zip(src, sources, strict=True):
        assert_same_bytes(sides[0].get(got), before)


def buffers_of(rng, shape, dtype=np.float16, count=1):
    return [[random_buffer(rng, shape, dtype) for _ in range(count)] for _ in range(2)]


# ---- what is moved --------------------------------------------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.parametrize(
    "mapping", [[(2, 2)], [(0, 5)], [(5, 0)], MAPPING, [(i, 7 - i) for i in range(8)], []], ids=str
)
def test_mappings(sides, rng, mapping):
    """Of two pools nothing overlaps: block numbers of one say nothing of the other's."""
    swap_and_check(sides, *buffers_of(rng, (8, 4, 2, 8)), mapping)


@pytest.mark.parametrize("trial", range(4))
def test_random_mappings(sides, rng, trial):
    sources = [random_buffer(rng, (20, 2, 4, 3, 8)), random_buffer(rng, (20, 7, 3), np.uint8)]
    targets = [random_buffer(rng, (31, 2, 4, 3, 8)), random_buffer(rng, (31, 7, 3), np.uint8)]
    mapping = random_mapping(rng, 20, 31, 17)
    swap_and_check(sides, sources, targets, mapping, lambda a, b: [a[:, 0], a[:, 1], b])


@pytest.mark.parametrize(("num_sources", "num_targets"), [(2, 9), (9, 2), (1, 1), (1, 9), (9, 1)])
def test_pools_of_other_sizes(sides, rng, num_sources, num_targets):
    sources, targets = ([random_buffer(rng, (n, 4, 3, 8))] for n in (num_sources, num_targets))
    swap_and_check(sides, sources, targets, [(num_sources - 1, num_targets - 1)])


def test_more_blocks_than_run_at_once(sides, rng):
    """Where CTAs go round: each of them takes several parts."""
    mapping = random_mapping(rng, 700, 700, 600)
    swap_and_check(sides, *buffers_of(rng, (700, 24), np.uint8), mapping)


@pytest.mark.sanitize
@pytest.mark.parametrize("nbytes", [1, 2, 7, 16, 48, 100, 2048, 8192, 8208, 24592])
def test_sizes_of_blocks(sides, rng, nbytes):
    swap_and_check(sides, *buffers_of(rng, (6, nbytes), np.uint8), [(0, 4), (1, 2), (5, 3)])


@pytest.mark.parametrize("name", VIEWS)
def test_strides(sides, rng, name):
    shape, views_of = VIEWS[name]
    swap_and_check(sides, *buffers_of(rng, shape), MAPPING, views_of)


STRIDED = {
    "HND and NHD": ((8, 3, 4, 8), lambda b: b.swapaxes(1, 2), (8, 4, 3, 8), lambda b: b),
    "K and V in turn, and apart": ((8, 2, 4, 3, 8), lambda b: b[:, 1], (8, 4, 3, 8), lambda b: b),
    "a row of both, and of one": ((8, 4, 3, 16), lambda b: b[..., 8:], (8, 4, 3, 8), lambda b: b),
    "rows of other distances": ((8, 4, 3, 16), lambda b: b[..., 8:], (8, 4, 3, 24), lambda b: b[..., 8:16]),
    "tokens and heads apart": ((8, 6, 5, 8), lambda b: b[:, 1:5, 2:5], (8, 4, 4, 8), lambda b: b[:, :, :3]),
    "a row of both, and some heads of both": (
        (8, 4, 3, 16),
        lambda b: b[..., :8],
        (8, 4, 5, 16),
        lambda b: b[:, :, :3, 8:],
    ),
    "rows at aligned distances, and not": ((8, 4, 16), lambda b: b[..., :8], (8, 4, 12), lambda b: b[..., :8]),
    "features reversed": ((8, 4, 3, 8), lambda b: b[..., ::-1], (8, 4, 3, 8), lambda b: b),
    "blocks reversed": ((8, 4, 3, 8), lambda b: b[::-1], (8, 4, 3, 8), lambda b: b),
    "every other block": ((16, 4, 3, 8), lambda b: b[::2], (8, 4, 3, 8), lambda b: b),
    "addresses apart": ((8 * 96 + 3,), lambda b: b[3:].reshape(8, 4, 3, 8), (8, 4, 3, 8), lambda b: b),
    "distances apart": ((8, 100), lambda b: b[:, :96], (8, 96), lambda b: b),
}


@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
@pytest.mark.parametrize("name", STRIDED)
def test_sides_of_other_strides(sides, rng, name, turned):
    """What adjoins on one side need not on the other."""
    forms = STRIDED[name]
    forms = (forms[2:], forms[:2]) if turned else (forms[:2], forms[2:])
    buffers = [random_buffer(rng, shape) for shape, _ in forms]
    on_sides = [side.put(buffer) for side, buffer in zip(sides, buffers, strict=True)]
    (_, source_of), (_, target_of) = forms
    pagedkv.swap_blocks(source_of(on_sides[0]), target_of(on_sides[1]), MAPPING)
    if sides[0].backend.name == "cuda":
        synchronize()
    moved(source_of(buffers[0]).copy(), target_of(buffers[1]), MAPPING)
    for side, got, want in zip(sides, on_sides, buffers, strict=True):
        assert_same_bytes(side.get(got), want)


@pytest.mark.parametrize("offsets", [(1, 0), (0, 2), (4, 4), (8, 12), (5, 3)])
def test_unaligned_addresses(sides, rng, offsets):
    sources, targets = ([random_buffer(rng, (8 * 96 + offset,), np.uint8)] for offset in offsets)
    expected = targets[0].copy()
    moved(sources[0][offsets[0] :].reshape(8, 96), expected[offsets[1] :].reshape(8, 96), MAPPING)
    src, dst = sides[0].put(sources[0]), sides[1].put(targets[0])
    pagedkv.swap_blocks(src[offsets[0] :].reshape(8, 96), dst[offsets[1] :].reshape(8, 96), MAPPING)
    if sides[0].backend.name == "cuda":
        synchronize()
    assert_same_bytes(sides[1].get(dst), expected)


@pytest.mark.parametrize("far", ["source", "target"])
def test_rows_far_apart(host_backend, rng, far):
    """Offsets inside a block beyond 2^31 and 2^32."""
    near, room = random_buffer(rng, (2, 4, 16), np.uint8), sparse_bytes(host_backend, 3 * BLOCK_STRIDE + 64)
    spread = np.lib.stride_tricks.as_strided(room, near.shape, (16, BLOCK_STRIDE, 1))
    if far == "source":
        spread[...] = near
    src, dst = (spread, np.zeros_like(near)) if far == "source" else (near, spread)
    pagedkv.swap_blocks(src, dst, [(1, 0)])
    assert_same_bytes(dst[0], near[1])
    assert not dst[1].any()


@pytest.mark.parametrize("kind", [list, tuple, lambda arrays: dict(enumerate(arrays))], ids=["list", "tuple", "dict"])
def test_layers(sides, rng, kind):
    """Several arrays on each side, of shapes and dtypes of their own; each goes to that in its place."""
    shapes = [((8, 4, 8), np.float16), ((8, 4, 8), np.float16), ((8, 64), np.uint8), ((8, 5), np.float32)]
    sources, targets = ([random_buffer(rng, *shape) for shape in shapes] for _ in range(2))
    src, dst = ([side.put(b) for b in buffers] for side, buffers in zip(sides, (sources, targets), strict=True))
    pagedkv.swap_blocks(kind(src), kind(dst), MAPPING)
    if sides[0].backend.name == "cuda":
        synchronize()
    for source, got, want in zip(sources, dst, targets, strict=True):
        moved(source, want, MAPPING)
        assert_same_bytes(sides[1].get(got), want)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_numbers_of_layers(sides, rng, layers):
    swap_and_check(sides, *buffers_of(rng, (8, 4, 8), count=layers), MAPPING)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_mapping_arrays(sides, rng, dtype):
    """On the host, and where the device is."""
    for put in (np.copy, sides[0].backend.put):
        given = put(np.array(MAPPING, dtype))
        swap_and_check(sides, *buffers_of(rng, (8, 4, 8)), MAPPING, given_mapping=given)


# ---- mistakes -------------------------------------------------------------------------------------------------------

MISTAKES = {
    "destination twice": ({"mapping": [(0, 1), (2, 1)]}, ValueError, "mapping: expected each destination at most once"),
    "source outside": ({"mapping": [(0, 1), (6, 2)]}, IndexError, "mapping: expected sources from 0 to 5, got 6"),
    "destination outside": ({"mapping": [(0, 4)]}, IndexError, "mapping: expected destinations from 0 to 3, got 4"),
    "negative": ({"mapping": [(0, 1), (-1, 2)]}, IndexError, "mapping: expected sources from 0 to 5, got -1"),
    "triples": ({"mapping": [(0, 1, 2)]}, ValueError, r"mapping: expected \[num_pairs, 2\]"),
    "floats": ({"mapping": [(0.0, 1.0)]}, TypeError, "mapping: expected signed integers"),
    "the same array": (
        {"dst": lambda src, dst: src},
        ValueError,
        "dst: expected other memory than src, got the same; cop",
    ),
    "the same memory": ({"dst": lambda src, dst: src[:4]}, ValueError, "dst: expected other memory than src"),
    "another dtype": ({"src": lambda src, dst: src.view(np.uint16)}, TypeError, "dst: expected uint16, got float16"),
    "another shape": (
        {"src": lambda src, dst: src[:, :2]},
        ValueError,
        r"dst: expected shape \(any, 2, 8\), got \(4, 3, 8\)",
    ),
    "other axes": ({"src": lambda src, dst: src[0]}, ValueError, r"dst: expected shape \(any, 8\), got \(4, 3, 8\)"),
    "more layers": ({"dst": lambda src, dst: [dst]}, ValueError, "dst: expected one array like src, got 1 arrays"),
    "fewer layers": (
        {"src": lambda src, dst: [src, src], "dst": lambda src, dst: [dst]},
        ValueError,
        "dst: expected 2 arrays like src, got 1 arrays",
    ),
    "other keys": (
        {"src": lambda src, dst: {"k": src}, "dst": lambda src, dst: {"v": dst}},
        ValueError,
        r"dst: expected arrays \['k'\] like src, got arrays \['v'\]",
    ),
    "layers of other sizes": (
        {"src": lambda src, dst: [src, src[:5]], "dst": lambda src, dst: [dst, dst]},
        ValueError,
        r"src\[1\]: expected 6 blocks like src\[0\], got 5",
    ),
    "no array": ({"src": None}, TypeError, "src: expected an array, got NoneType"),
}


def test_sides_crossed(host_backend, rng):
    """Neither pool may be read and written, whichever goes to which."""
    buffers = [random_buffer(rng, (4, 8)) for _ in range(2)]
    first, second = (buffer.copy() for buffer in buffers)
    with pytest.raises(ValueError, match=r"^dst\[0\]: expected other memory than src\[1\], got the same"):
        pagedkv.swap_blocks([first, second], [second, first], [(0, 1)])
    for got, want in zip((first, second), buffers, strict=True):
        assert_same_bytes(got, want)


def test_pools_without_bytes_share_no_memory(host_backend):
    pool = np.zeros((4, 3))
    pagedkv.swap_blocks(pool[:, :0], pool[:, :0], [(0, 1)])
    pagedkv.swap_blocks(pool, pool[:0], [])
    pagedkv.swap_blocks(pool[:0], pool, [])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(sides, rng, mistake):
    changes, error, message = MISTAKES[mistake]
    buffers = random_buffer(rng, (6, 3, 8)), random_buffer(rng, (4, 3, 8))
    src, dst = (side.put(buffer) for side, buffer in zip(sides, buffers, strict=True))
    arguments = {"src": src, "dst": dst, "mapping": [(0, 1)]}
    arguments |= {name: change(src, dst) if callable(change) else change for name, change in changes.items()}
    with pytest.raises(error, match=rf"^{message}"):
        pagedkv.swap_blocks(**arguments)
    for side, got, want in zip(sides, (src, dst), buffers, strict=True):
        assert_same_bytes(side.get(got), want)


def test_read_only_destination(host_backend, rng):
    src, dst = random_buffer(rng, (4, 8)), random_buffer(rng, (4, 8))
    dst.flags.writeable = False
    before = dst.copy()
    with pytest.raises(ValueError, match=r"^dst: expected a writable array"):
        pagedkv.swap_blocks(src, dst, FEW)
    assert_same_bytes(dst, before)
    pagedkv.swap_blocks(dst, src, [(0, 1)])  # reading it is all right
    assert_same_bytes(src[1], dst[0])


def test_a_stream_on_the_host_is_not_looked_at(host_backend, rng):
    src, dst = random_buffer(rng, (8, 8)), random_buffer(rng, (8, 8))
    pagedkv.swap_blocks(src, dst, [(3, 1)], stream=object())
    assert_same_bytes(dst[1], src[3])


def test_torch_on_the_host(host_backend, rng):
    torch = pytest.importorskip("torch")
    src, dst = random_buffer(rng, (8, 8), np.int16), random_buffer(rng, (8, 8), np.int16)
    expected = dst.copy()
    moved(src, expected, FEW)
    pagedkv.swap_blocks(torch.from_numpy(src), torch.from_numpy(dst), torch.tensor(FEW))
    assert_same_bytes(dst, expected)


def test_jax(host_backend, rng):
    jax = pytest.importorskip("jax")
    src, dst = jax.numpy.arange(12.0).reshape(4, 3), np.zeros((4, 3), np.float32)
    pagedkv.swap_blocks(src, dst, [(3, 1)])
    np.testing.assert_array_equal(dst, [[0] * 3, [9, 10, 11], [0] * 3, [0] * 3])
    with pytest.raises(TypeError, match=r"^dst: expected an array that can be written, got an immutable JAX array"):
        pagedkv.swap_blocks(dst, src, [(3, 1)])


PLACES = {  # devices of src[0], src[1], dst[0] and dst[1]; what is wrong
    "of sources": ((-1, 0, 1, 1), r"dst\[0\]: expected an array on cuda:0 like src\[1\], got cuda:1"),
    "a source on the host": ((0, -1, 0, 0), r"src\[1\]: expected an array on cuda:0 like src\[0\], got cpu"),
    "a destination on the host": ((0, 0, 0, -1), r"dst\[1\]: expected an array on cuda:0 like dst\[0\], got cpu"),
    "two devices": ((0, 0, 1, 1), r"dst\[0\]: expected an array on cuda:0 like src\[0\], got cuda:1"),
}


@pytest.mark.parametrize("name", PLACES)
def test_arrays_on_several_devices(monkeypatch, rng, name):
    devices, message = PLACES[name]
    arrays = [view(random_buffer(rng, (4, 3)), "array") for _ in devices]
    for array, device in zip(arrays, devices, strict=True):
        array.device = device
    monkeypatch.setattr("pagedkv.validate_moves.view", lambda number, name: arrays[number])
    with pytest.raises(TypeError, match=rf"^{message}"):
        pagedkv.swap_blocks([0, 1], [2, 3], [(0, 1)])
