"""What only a device shows of moves: graph capture and replay, streams, pinned memory, torch's tensors."""

import numpy as np
import pytest
from block_moves import MAPPINGS, VIEWS, assert_same_bytes, moved, random_buffer, random_mapping
from graphs import captured

import pagedkv

pytestmark = pytest.mark.gpu

SHAPE = (64, 16, 4, 32)
DISJOINT = [(0, 7), (3, 1), (9, 4), (3, 60)]


@pytest.fixture
def stream(cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    yield stream
    stream.synchronize()


def pools(cupy, rng, count=2, shape=SHAPE):
    buffers = [random_buffer(rng, shape) for _ in range(count)]
    arrays = [cupy.asarray(buffer) for buffer in buffers]
    cupy.cuda.Device().synchronize()
    return buffers, arrays


def pinned(array):
    import cupyx

    copy = cupyx.empty_pinned(array.shape, array.dtype)
    copy[...] = array
    return copy


# ---- capture --------------------------------------------------------------------------------------------------------


def test_replays_read_the_mapping_anew(cupy, rng, stream):
    """Captured once; replayed after caches and mapping in the same buffers have changed."""
    buffers, caches = pools(cupy, rng)
    with stream:
        mapping = cupy.asarray(np.array([(i, i + 32) for i in range(20)]))
        stream.synchronize()
        graph = captured(cupy, stream, lambda: pagedkv.copy_blocks(caches, mapping))
        for _ in range(3):
            sides = rng.permutation(64)
            pairs = np.stack([rng.choice(sides[:20], 20), sides[20:40]], axis=1)
            mapping.set(pairs)
            for buffer, cache in zip(buffers, caches, strict=True):
                buffer[...] = random_buffer(rng, SHAPE)
                cache.set(buffer)
                moved(buffer, buffer, pairs)
            graph.launch(stream)
            stream.synchronize()
            for want, got in zip(buffers, caches, strict=True):
                assert_same_bytes(got.get(), want)


@pytest.mark.parametrize("name", VIEWS)
def test_captured_strides(cupy, rng, stream, name):
    shape, views_of = VIEWS[name]
    (buffer,), (array,) = pools(cupy, rng, 1, shape)
    pairs = np.array(MAPPINGS["disjoint"] + [(5, 5)])
    with stream:
        wide = cupy.asarray(np.ascontiguousarray(pairs.T))
        pagedkv.copy_blocks(views_of(array), [])
        stream.begin_capture()
        pagedkv.copy_blocks(views_of(array), wide.T)
        graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    for cache in views_of(buffer):
        moved(cache, cache, pairs)
    assert_same_bytes(array.get(), buffer)


def test_capture_allocates_nothing(cupy, rng, stream):
    _, caches = pools(cupy, rng)
    with stream:
        mapping = cupy.asarray(np.array(DISJOINT))
        pagedkv.copy_blocks(caches, mapping)
        stream.synchronize()
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            stream.begin_capture()
            pagedkv.copy_blocks(caches, mapping)
            stream.end_capture()
    assert pool.total_bytes() == 0


def test_what_capture_refuses(cupy, rng, stream):
    buffers, caches = pools(cupy, rng, shape=(61, 5, 3))  # not those of another test, whose addresses may come again
    with stream:
        mapping = cupy.asarray(np.array(DISJOINT))
        narrow = mapping.astype(np.int32)
        stream.synchronize()
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="make one call with the same caches before"):
                pagedkv.copy_blocks(caches, mapping)
            for given in (DISJOINT, np.array(DISJOINT), narrow):
                with pytest.raises(TypeError, match=r"^mapping: expected int64 on cuda:0 under graph capture"):
                    pagedkv.copy_blocks(caches, given)
            with pagedkv.checked(), pytest.raises(RuntimeError, match="graph capture"):
                pagedkv.copy_blocks(caches, mapping)
        finally:
            stream.end_capture()
    for want, got in zip(buffers, caches, strict=True):
        assert_same_bytes(got.get(), want)


def test_a_captured_swap(cupy, rng, stream):
    (buffer,), (cache,) = pools(cupy, rng, 1)
    host = pinned(random_buffer(rng, SHAPE))
    expected = host.copy()
    with stream:
        mapping = cupy.asarray(np.array(DISJOINT))
        graph = captured(cupy, stream, lambda: pagedkv.swap_blocks(cache, host, mapping))
        buffer[...] = random_buffer(rng, SHAPE)
        cache.set(buffer)
    graph.launch(stream)
    stream.synchronize()
    moved(buffer, expected, DISJOINT)
    assert_same_bytes(host, expected)


# ---- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapping", [DISJOINT, MAPPINGS["rotation of all"]], ids=["disjoint", "overlap"])
def test_copies_follow_the_current_stream(cupy, rng, stream, queue_slow_work, mapping):
    """A copy queued behind slow work sees what that leaves, its temporary too, and the host does not wait."""
    _, caches = pools(cupy, rng)
    fresh, contents = pools(cupy, rng)
    with stream:
        pagedkv.copy_blocks(caches, mapping)  # memory, kernels and addresses are there afterwards
        stream.synchronize()
        queue_slow_work()
        for cache, content in zip(caches, contents, strict=True):
            cache[...] = content
        pagedkv.copy_blocks(caches, mapping)
        assert not stream.done
    stream.synchronize()
    for want, got in zip(fresh, caches, strict=True):
        moved(want, want, mapping)
        assert_same_bytes(got.get(), want)


class Protocol:
    def __init__(self, stream):
        self.stream = stream

    def __cuda_stream__(self):
        return 0, self.stream.ptr


@pytest.mark.parametrize("wrap", [lambda stream: stream, Protocol, None], ids=["CuPy's", "protocol", "current"])
def test_swaps_run_on_the_given_stream(cupy, rng, stream, queue_slow_work, wrap):
    """Asynchronously: the call returns while work before it is still going on, and nothing has been copied."""
    (buffer,), (cache,) = pools(cupy, rng, 1)
    before = random_buffer(rng, SHAPE)
    host, back = pinned(before), cupy.zeros(SHAPE, np.float16)
    cupy.cuda.Device().synchronize()
    with stream:
        for given in ((cache, host), (host, back)):  # memory, kernels and addresses are there afterwards
            pagedkv.swap_blocks(*given, DISJOINT)
        back.fill(0)
        stream.synchronize()
        host[...] = before
        queue_slow_work()
    if wrap is None:
        with stream:
            pagedkv.swap_blocks(cache, host, DISJOINT)
            pagedkv.swap_blocks(host, back, DISJOINT)
    else:
        pagedkv.swap_blocks(cache, host, DISJOINT, wrap(stream))
        pagedkv.swap_blocks(host, back, DISJOINT, stream=wrap(stream))
    assert not stream.done
    assert_same_bytes(host, before)
    stream.synchronize()
    expected_back = np.zeros(SHAPE, np.float16)
    moved(buffer, before, DISJOINT)
    moved(before, expected_back, DISJOINT)
    assert_same_bytes(host, before)
    assert_same_bytes(back.get(), expected_back)


def test_torch(cupy, rng):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    buffers = [random_buffer(rng, SHAPE, np.int16) for _ in range(2)]
    caches = [torch.from_numpy(buffer).cuda() for buffer in buffers]
    host = torch.from_numpy(random_buffer(rng, SHAPE, np.int16)).pin_memory()
    expected = host.numpy().copy()
    overlapping = MAPPINGS["rotation of all"]
    torch_stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch_stream):
        pagedkv.copy_blocks(caches, torch.tensor(overlapping, device="cuda"))
    pagedkv.swap_blocks(caches[0], host, DISJOINT, torch_stream)
    torch_stream.synchronize()
    for buffer, cache in zip(buffers, caches, strict=True):
        moved(buffer, buffer, overlapping)
        assert_same_bytes(cache.cpu().numpy(), buffer)
    moved(buffers[0], expected, DISJOINT)
    assert_same_bytes(host.numpy(), expected)


# ---- host memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["src", "dst"])
def test_pageable_memory(cupy, rng, name):
    (buffer,), (cache,) = pools(cupy, rng, 1)
    host = random_buffer(rng, SHAPE)
    before = host.copy()
    given = {"src": cache, "dst": cache, name: host}
    with pytest.raises(ValueError, match=rf"^{name}: expected pinned host memory"):
        pagedkv.swap_blocks(**given, mapping=DISJOINT)
    cupy.cuda.Device().synchronize()
    assert_same_bytes(host, before)
    assert_same_bytes(cache.get(), buffer)


def test_many_layers_there_and_back(cupy, rng):
    """Out to the host in one order, back in another."""
    buffers, caches = pools(cupy, rng, 8)
    hosts = [pinned(np.zeros((40, *SHAPE[1:]), np.float16)) for _ in buffers]
    out = random_mapping(rng, 64, 40, 40)
    back = np.stack([out[:, 1], rng.permutation(64)[:40]], axis=1)
    pagedkv.swap_blocks(caches, hosts, out)
    pagedkv.swap_blocks(hosts, caches, back)
    cupy.cuda.Device().synchronize()
    for buffer, cache, host in zip(buffers, caches, hosts, strict=True):
        expected = np.zeros_like(host)
        moved(buffer, expected, out)
        assert_same_bytes(host, expected)
        moved(expected, buffer, back)
        assert_same_bytes(cache.get(), buffer)


def test_arrays_on_two_devices(cupy, rng):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one device")
    first = cupy.asarray(random_buffer(rng, SHAPE))
    with cupy.cuda.Device(1):
        second = cupy.zeros(SHAPE, np.float16)
        pagedkv.copy_blocks(first, [(0, 1)])  # on the device of the caches, whichever is current
    assert_same_bytes(first[1].get(), first[0].get())
    with pytest.raises(TypeError, match=r"^dst: expected an array on cuda:0 like src, got cuda:1"):
        pagedkv.swap_blocks(first, second, [(0, 1)])
    with pytest.raises(TypeError, match=r"^caches\[1\]: expected an array on cuda:0"):
        pagedkv.copy_blocks([first, second], [(0, 1)])
