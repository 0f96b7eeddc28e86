"""What the CUDA backend does around the launches of a move, with a stand-in for CuPy over host memory. The launches
themselves run on the interpreter."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from block_moves import MAPPINGS, VIEWS, assert_same_bytes, moved, random_buffer
from stand_ins import CURRENT, SIDE, DeviceArray, Stream, note_streams, stand_in

import pagedkv
from pagedkv import kernels
from pagedkv.arrays import view
from pagedkv.launch import Launch

pytestmark = pytest.mark.ptx

EXCHANGE, CHAIN, DISJOINT = MAPPINGS["exchange"], MAPPINGS["chain beside disjoint pairs"], MAPPINGS["disjoint"]


class MoveCard:
    """Adds to a card uploads, streams and host memory of kinds, and runs what is launched."""

    def __init__(self, card):
        self.card, self.caches, self.uploaded, self.pageable = card, [], [], []
        self.streams, self.side = [], Stream(SIDE)
        card.asarray = self.upload
        card.cuda.Stream = lambda non_blocking: self.side
        card.cuda.Stream.from_external = lambda stream: Stream(stream.__cuda_stream__()[1])
        card.cuda.Stream.null = Stream(0)
        runtime = card.cuda.runtime
        runtime.memoryTypeHost, runtime.memoryTypeManaged = 1, 3
        runtime.pointerGetAttributes = self.attributes

    def upload(self, array):
        copy = DeviceArray(array.copy())
        self.uploaded.append(copy)
        return copy

    def attributes(self, pointer):
        is_pageable = any(array.ctypes.data <= pointer < array.ctypes.data + array.nbytes for array in self.pageable)
        return SimpleNamespace(type=0 if is_pageable else 1)

    def load(self, instance, device, shared_bytes=0):
        self.card.loaded.append((instance, device, shared_bytes))
        return lambda *arguments: self.launch(instance, *arguments)

    def launch(self, instance, grid, threads, arguments, shared_bytes, stream):
        from pagedkv import ptx_ops

        *pointers, params = arguments
        self.card.launched.append(grid)
        self.streams.append(stream.ptr)
        given = [view(np.empty(0), "pointer") for _ in pointers]
        for array, pointer in zip(given, pointers, strict=True):
            array.pointer = pointer
        memory = [array.host for array in (*self.uploaded, *self.card.allocated)] + self.caches
        reached = [view(array, "memory") for array in memory]
        ptx_ops.launch(Launch(instance, grid, *threads, params, shared_bytes), given, reached)

    def put(self, array, device=0):
        self.caches.append(array)
        return DeviceArray(array, device)


@pytest.fixture
def card(monkeypatch):
    for card in stand_in(monkeypatch):
        moves = MoveCard(card)
        monkeypatch.setattr(kernels, "load", moves.load)
        yield moves


@pytest.fixture
def notes(card):
    """What happens on which stream and device, in order."""
    return note_streams(card.card, card)


def check_copy(card, buffers, mapping, views_of=lambda *b: list(b), given=None):
    expected = [buffer.copy() for buffer in buffers]
    for cache in views_of(*expected):
        moved(cache, cache, mapping)
    pagedkv.copy_blocks([card.put(cache) for cache in views_of(*buffers)], mapping if given is None else given)
    for got, want in zip(buffers, expected, strict=True):
        assert_same_bytes(got, want)


@pytest.mark.parametrize("name", MAPPINGS)
def test_mappings(card, rng, name):
    check_copy(card, [random_buffer(rng, (10, 4, 2, 8)) for _ in range(2)], MAPPINGS[name])


@pytest.mark.parametrize("mapping", [DISJOINT, CHAIN], ids=["disjoint", "overlap"])
@pytest.mark.parametrize("name", VIEWS)
def test_strides(card, rng, name, mapping):
    shape, views_of = VIEWS[name]
    check_copy(card, [random_buffer(rng, shape)], mapping, views_of)


def test_caches_of_several_forms_at_once(card, rng):
    buffers = [random_buffer(rng, shape, np.uint8) for shape in ((10, 48), (10, 3, 7), (10, 4, 3, 16), (10, 48))]
    check_copy(card, buffers, CHAIN, lambda a, b, c, d: [a, b, c[..., :8], c[..., 8:], d])


@pytest.mark.parametrize(
    ("mapping", "launches"), [(DISJOINT, 1), (EXCHANGE, 2), (CHAIN, 3), ([(4, 4)], 0), ([], 0)], ids=str
)
def test_launches(card, rng, mapping, launches):
    """One for all dense caches of as many bytes, whatever their shapes and dtypes; what overlaps takes two more."""
    check_copy(card, [random_buffer(rng, (10, 4, 8)), random_buffer(rng, (10, 64), np.uint8)], mapping)
    assert len(card.card.launched) == launches
    assert len(card.card.allocated) == (launches > 1)
    assert len(card.uploaded) == 1 + (launches > 0)  # the addresses for captured calls, and what this one needs
    assert {*card.streams} <= {card.card.stream.ptr}


def test_the_temporary_holds_only_what_is_overwritten(card, rng):
    """Of (0, 1), (1, 2), (5, 6), (8, 9), (5, 7) block 1 alone."""
    check_copy(card, [random_buffer(rng, (10, 4, 8)) for _ in range(3)], CHAIN)
    assert [array.host.nbytes for array in card.card.allocated] == [3 * 64]


def test_mapping_on_the_device(card, rng):
    for dtype in (np.int32, np.int64):
        check_copy(card, [random_buffer(rng, (10, 4, 8))], CHAIN, given=DeviceArray(np.array(CHAIN, dtype)))
    cache = random_buffer(rng, (10, 4, 8))
    before = cache.copy()
    with pytest.raises(IndexError, match=r"^mapping: expected sources from 0 to 9, got 10"):
        pagedkv.copy_blocks(card.put(cache), DeviceArray(np.array([(0, 1), (10, 2)])))
    assert_same_bytes(cache, before)


def test_an_empty_mapping_on_the_device_is_not_read(card, rng):
    mapping = DeviceArray(np.empty((0, 2), np.int32))
    mapping.get = None
    pagedkv.copy_blocks(card.put(random_buffer(rng, (10, 8))), mapping)


def test_caches_of_several_forms_share_a_temporary(card, rng):
    """As large as the largest of them need it: 2 blocks of 64 bytes."""
    buffers = [random_buffer(rng, shape, np.uint8) for shape in ((10, 7), (10, 64), (10, 48))]
    check_copy(card, buffers, EXCHANGE)
    assert [array.host.nbytes for array in card.card.allocated] == [2 * 64]
    assert len(card.card.launched) == 3 * 2


# ---- streams and devices --------------------------------------------------------------------------------------------


class CudaStream:
    def __cuda_stream__(self):
        return 0, 5


KEPT = [("upload", SIDE, 0), ("wait", SIDE, 0)]  # addresses, which a captured call may read on any stream


def test_temporaries_are_of_the_stream_that_uses_them(card, notes, rng):
    """Memory of another stream could be given away, or not be there yet, while the copy runs."""
    pagedkv.copy_blocks(card.put(random_buffer(rng, (10, 4, 8))), CHAIN)
    assert notes.events == [*KEPT, ("allocate", CURRENT, 0), ("upload", CURRENT, 0), *3 * [("launch", CURRENT, 0)]]


def test_pairs_of_a_swap_are_uploaded_on_its_stream(card, notes, rng):
    src, dst = (card.put(random_buffer(rng, (10, 4, 8))) for _ in range(2))
    pagedkv.swap_blocks(src, dst, DISJOINT, CudaStream())
    assert notes.events == [*KEPT, ("upload", 5, 0), ("launch", 5, 0)]


@pytest.mark.parametrize("stream", [None, CudaStream(), SimpleNamespace(ptr=0)], ids=["current", "given", "null"])
def test_moves_run_on_the_device_of_the_arrays(card, notes, rng, stream):
    """Whichever device is current, and if another one's stream had the same address."""
    for device in (1, 0, 2):
        notes.events.clear()
        src, dst = (card.put(random_buffer(rng, (10, 4, 8)), device) for _ in range(2))
        pagedkv.swap_blocks(src, dst, DISJOINT, stream)
        assert {place for _, _, place in notes.events} == {device}
        assert notes.device == 0


def test_streams_of_torch_are_of_the_device_asked_for(card, notes, monkeypatch):
    torch = SimpleNamespace(_C=SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 9))
    monkeypatch.setitem(sys.modules, "torch", torch)
    streams = [pagedkv.cuda_streams.stream_of("torch", device) for device in (1, 0, 1)]
    assert [(stream.ptr, stream.device) for stream in streams] == [(9, 1), (9, 0), (9, 1)]
    assert streams[0] is streams[2]


def test_capture_is_asked_of_the_stream_that_the_move_runs_on(card, notes, rng):
    src, dst = (card.put(random_buffer(rng, (10, 4, 8))) for _ in range(2))
    card.card.cuda.runtime.streamIsCapturing = lambda ptr: ptr == 5
    with pytest.raises(TypeError, match=r"^mapping: expected int64 on cuda:0 under graph capture, got one on the host"):
        pagedkv.swap_blocks(src, dst, DISJOINT, CudaStream())
    pagedkv.swap_blocks(src, dst, DISJOINT)
    assert notes.events[-1] == ("launch", CURRENT, 0)


def test_a_mapping_is_not_read_back_on_a_stream_that_is_captured(card, notes, rng):
    """CuPy's current one, though the move runs on another; nothing has happened that would end the capture."""
    src, dst = (card.put(random_buffer(rng, (10, 4, 8))) for _ in range(2))
    card.card.cuda.runtime.streamIsCapturing = lambda ptr: ptr == CURRENT
    with pytest.raises(RuntimeError, match=r"^mapping: one on a device is read back, which graph capture does not"):
        pagedkv.swap_blocks(src, dst, DeviceArray(np.array(DISJOINT)), CudaStream())
    assert notes.events == []


# ---- capture --------------------------------------------------------------------------------------------------------


def capture(card, caches, mapping):
    card.card.is_capturing = True
    try:
        pagedkv.copy_blocks(caches, mapping)
    finally:
        card.card.is_capturing = False


@pytest.mark.parametrize("view_of", [lambda m: m, lambda m: np.ascontiguousarray(m.T).T], ids=["rows", "columns"])
def test_captured(card, rng, view_of):
    """Nothing is allocated, uploaded or loaded; a first call with no pairs will do."""
    buffers = [random_buffer(rng, shape) for shape in ((10, 4, 8), (10, 32), (10, 7))]
    expected = [buffer.copy() for buffer in buffers]
    caches, mapping = [card.put(buffer) for buffer in buffers], view_of(np.array([(0, 7), (3, 1), (0, 4)]))
    card.caches.append(mapping)
    pagedkv.copy_blocks(caches, [])
    loaded = {*card.card.loaded}
    uploads, allocations = len(card.uploaded), len(card.card.allocated)
    assert loaded and card.card.launched == []
    capture(card, caches, DeviceArray(mapping))
    assert (len(card.uploaded), len(card.card.allocated)) == (uploads, allocations)
    assert {*card.card.loaded} == loaded
    assert len(card.card.launched) == 2
    for got, want in zip(buffers, expected, strict=True):
        moved(want, want, mapping)
        assert_same_bytes(got, want)


def test_capture_needs_a_call_before(card, rng):
    cache = random_buffer(rng, (10, 4, 8))
    before, mapping = cache.copy(), DeviceArray(np.array(DISJOINT))
    with pytest.raises(RuntimeError, match="under graph capture: make one call with the same caches before"):
        capture(card, card.put(cache), mapping)
    pagedkv.copy_blocks(card.put(cache), [])
    with pytest.raises(RuntimeError, match="under graph capture"):
        capture(card, card.put(cache[:, :2]), mapping)
    assert_same_bytes(cache, before)


@pytest.mark.parametrize(
    ("mapping", "got"),
    [
        ([(0, 1)], "one on the host"),
        (np.array([(0, 1)]), "one on the host"),
        (DeviceArray(np.array([(0, 1)], np.int32)), "int32"),
    ],
    ids=["list", "NumPy", "int32"],
)
def test_capture_takes_int64_on_the_device(card, rng, mapping, got):
    cache = random_buffer(rng, (10, 4, 8))
    before = cache.copy()
    pagedkv.copy_blocks(card.put(cache), [])
    with pytest.raises(TypeError, match=rf"^mapping: expected int64 on cuda:0 under graph capture, got {got}"):
        capture(card, card.put(cache), mapping)
    assert_same_bytes(cache, before)


def test_checked_refuses_capture(card, rng):
    cache = card.put(random_buffer(rng, (10, 4, 8)))
    pagedkv.copy_blocks(cache, [])
    with pagedkv.checked(), pytest.raises(RuntimeError, match="graph capture"):
        capture(card, cache, DeviceArray(np.array(DISJOINT)))
    assert card.card.launched == []


def test_captured_addresses_stay(card, rng, monkeypatch):
    """Other caches push out addresses that no graph uses, and no others."""
    monkeypatch.setattr(pagedkv.move_tables, "LIMIT", 3)
    mapping = DeviceArray(np.array(DISJOINT))
    card.caches.append(mapping.host)
    captured, forgotten = (card.put(random_buffer(rng, (10, 4, 8))) for _ in range(2))
    pagedkv.copy_blocks(captured, [])
    capture(card, captured, mapping)
    pagedkv.copy_blocks(forgotten, [])
    for _ in range(4):
        pagedkv.copy_blocks(card.put(random_buffer(rng, (10, 4, 8))), [])
    capture(card, captured, mapping)
    with pytest.raises(RuntimeError, match="under graph capture"):
        capture(card, forgotten, mapping)


def test_addresses_are_uploaded_once(card, rng):
    cache, mapping = card.put(random_buffer(rng, (10, 4, 8))), DeviceArray(np.array(DISJOINT))
    card.caches.append(mapping.host)
    for _ in range(2):
        pagedkv.copy_blocks(cache, [])
        assert len(card.uploaded) == 1
    capture(card, cache, mapping)
    pagedkv.copy_blocks(cache, [])
    assert len(card.uploaded) == 1


def test_a_captured_mapping_of_no_pairs(card, rng):
    capture(card, card.put(random_buffer(rng, (10, 4, 8))), DeviceArray(np.empty((0, 2), np.int64)))
    assert card.card.launched == []


def test_a_mapping_between_elements_is_not_captured(card, rng):
    cache = card.put(random_buffer(rng, (10, 4, 8)))
    pagedkv.copy_blocks(cache, [])
    memory = np.zeros(24, np.uint8)
    mapping = DeviceArray(np.ndarray((1, 2), np.int64, memory, (1 - memory.ctypes.data) % 8))
    with pytest.raises(ValueError, match=r"^mapping: expected an address that is a multiple of 8"):
        capture(card, cache, mapping)


# ---- swaps ----------------------------------------------------------------------------------------------------------

STREAMS = {
    "protocol": (CudaStream(), 5),
    "CuPy's": (SimpleNamespace(ptr=6), 6),
    "torch's": (SimpleNamespace(cuda_stream=7), 7),
    "default": (SimpleNamespace(ptr=0), 0),
    "none": (None, 1),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("direction", ["to host", "from host", "on the device"])
def test_swaps(card, rng, direction, name):
    """On the stream that is given, or the current one; host memory is read and written by the kernel itself."""
    stream, pointer = STREAMS[name]
    src, dst = random_buffer(rng, (9, 4, 8)), random_buffer(rng, (7, 4, 8))
    expected, mapping = dst.copy(), [(0, 1), (1, 2), (8, 6)]
    moved(src, expected, mapping)
    given = [card.put(src), card.put(dst)]
    if direction != "on the device":
        host = direction == "to host"
        given[host] = (src, dst)[host]
    pagedkv.swap_blocks(*given, mapping, stream)
    assert_same_bytes(dst, expected)
    assert card.streams == [pointer]
    assert card.card.allocated == []


def test_few_ctas_reach_through_a_link(card, rng):
    """Host memory is read by as many threads as fill a link; on the device each part has its own CTA."""
    src, dst = random_buffer(rng, (600, 24), np.uint8), random_buffer(rng, (600, 24), np.uint8)
    mapping = np.stack([np.arange(600), np.arange(600)], axis=1)
    on_card = card.put(src), card.put(dst)
    pagedkv.swap_blocks(on_card[0], dst, mapping)
    assert_same_bytes(dst, src)
    pagedkv.swap_blocks(*on_card, mapping)
    assert card.card.launched == [(512,), (600,)]


@pytest.mark.parametrize("name", ["src", "dst", "end of dst"])
def test_pageable_memory(card, rng, name):
    src, dst = random_buffer(rng, (4, 8)), random_buffer(rng, (4, 8))
    before = dst.copy()
    host = src if name == "src" else dst
    card.pageable.append(host if name != "end of dst" else dst.reshape(-1)[-1:])
    given = [array if array is host else card.put(array) for array in (src, dst)]
    with pytest.raises(ValueError, match=rf"^{name[-3:]}: expected pinned host memory \(cupyx.empty_pinned"):
        pagedkv.swap_blocks(*given, [(0, 1)])
    assert_same_bytes(dst, before)
    assert card.card.launched == []


@pytest.mark.parametrize("view_of", [lambda a: a[::-1], lambda a: a[::2]], ids=["reversed", "strided"])
def test_pageable_memory_at_the_lowest_address(card, rng, view_of):
    host = random_buffer(rng, (8, 8))
    card.pageable.append(host[:1])
    with pytest.raises(ValueError, match=r"^dst: expected pinned host memory"):
        pagedkv.swap_blocks(card.put(random_buffer(rng, (4, 8))), view_of(host), [(0, 1)])


def test_managed_memory_will_do_and_for_no_bytes_any(card, rng):
    src, dst = random_buffer(rng, (4, 8)), random_buffer(rng, (4, 8))
    card.caches.append(dst)
    runtime = card.card.cuda.runtime
    runtime.pointerGetAttributes = lambda pointer: SimpleNamespace(type=runtime.memoryTypeManaged)
    pagedkv.swap_blocks(card.put(src), dst, [(0, 1)])
    assert_same_bytes(dst[1], src[0])
    card.pageable.append(dst)
    runtime.pointerGetAttributes = card.attributes
    pagedkv.swap_blocks(card.put(src[:, :0]), dst[:, :0], [(0, 1)])


@pytest.mark.parametrize("turned", [False, True], ids=["to host", "from host"])
def test_the_mapping_of_a_swap_may_be_where_the_device_is(card, rng, turned):
    src, dst = random_buffer(rng, (10, 8)), random_buffer(rng, (10, 8))
    expected = dst.copy()
    moved(src, expected, DISJOINT)
    card.caches += [src, dst]
    pagedkv.swap_blocks(*((src, card.put(dst)) if turned else (card.put(src), dst)), DeviceArray(np.array(DISJOINT)))
    assert_same_bytes(dst, expected)


@pytest.mark.parametrize("stream", [3, "stream", object()], ids=["number", "string", "object"])
def test_what_is_no_stream(card, rng, stream):
    src, dst = (card.put(random_buffer(rng, (4, 8))) for _ in range(2))
    with pytest.raises(TypeError, match=r"^stream: expected a CUDA stream or None, got "):
        pagedkv.swap_blocks(src, dst, [(0, 1)], stream)
    assert card.card.launched == []


def test_a_backend_for_the_host_does_not_swap_with_a_device(card, rng):
    src, dst = card.put(random_buffer(rng, (4, 8))), random_buffer(rng, (4, 8))
    for given in ((src, dst), (dst, src)):
        with pagedkv.use_backend("numpy"), pytest.raises(TypeError, match=r"^use_backend\('numpy'\): "):
            pagedkv.swap_blocks(*given, [(0, 1)])
