"""Fixtures every test file shares: where the arrays live, and a generator of each test's own numbers."""

import functools
import zlib

import numpy as np
import pytest

import pagedkv

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
PTX = pytest.param("ptx", marks=pytest.mark.ptx)
HOST_BACKENDS = ["numpy", PTX]
BACKENDS = [*HOST_BACKENDS, CUDA]
DECODE_OPS = ["paged_attention_v1", "paged_attention_v2", "paged_attention"]


class HostBackend:
    """Arrays stay NumPy's own, so that a test sees what a caller without a GPU sees."""

    def __init__(self, name):
        self.name = name

    def put(self, array):
        return array

    def get(self, array):
        return array


class CudaBackend:
    """Arrays live in CuPy on the current device. CuPy has no float8, which travels as uint8."""

    name = "cuda"

    def put(self, array):
        import cupy

        is_float8 = array.dtype.name.startswith("float8")
        return cupy.asarray(array.view(np.uint8) if is_float8 else array)

    def get(self, array):
        import cupy

        return cupy.asnumpy(array)


def make_backend(name):
    return CudaBackend() if name == "cuda" else HostBackend(name)


@functools.cache
def why_no_gpu():
    """The reason why GPU tests cannot run here, or None where they can."""
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "CuPy finds no GPU"
    except ImportError:
        return "CuPy is not installed"
    except (
        Exception
    ) as error:  # without a driver CuPy raises its own runtime error, whose type needs a driver to import
        return f"CuPy finds no usable driver: {error}"


@functools.cache
def why_no_ptx():
    """The reason why kernels cannot run on the interpreter here, or None where they can."""
    try:
        from pagedkv import nvrtc

        nvrtc.version()
    except ImportError as error:
        return str(error)
    return None


def is_a_detour(item):
    """``paged_attention`` calls one of the other two before any backend is asked; the interpreter is slow."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return (params.get("decode_backend"), params.get("decode_op")) == ("ptx", "paged_attention")


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if not is_a_detour(item)]
    ptx_items = [item for item in items if item.get_closest_marker("ptx")]
    if ptx_items and why_no_ptx():
        for item in ptx_items:
            item.add_marker(pytest.mark.skip(reason=why_no_ptx()))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and why_no_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=why_no_gpu()))


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Each backend in turn: `.name`, `.put(numpy_array)` and `.get(array)`."""
    with pagedkv.use_backend(request.param):
        yield make_backend(request.param)


@pytest.fixture(params=BACKENDS)
def read_backend(request):
    """`backend`, for the varlen reads and merges."""
    with pagedkv.use_backend(request.param):
        yield make_backend(request.param)


@pytest.fixture(params=BACKENDS)
def decode_backend(request):
    """`backend`, for the decode ops."""
    with pagedkv.use_backend(request.param):
        yield make_backend(request.param)


@pytest.fixture(params=HOST_BACKENDS)
def host_backend(request):
    """`backend`, for what only arrays on the host have."""
    with pagedkv.use_backend(request.param):
        yield make_backend(request.param)


@pytest.fixture
def ptx_backend():
    """The interpreter alone, for what no other backend has; the test has the marker ``ptx``."""
    with pagedkv.use_backend("ptx"):
        yield make_backend("ptx")


@pytest.fixture(params=DECODE_OPS)
def decode_op(request):
    """The name of each op that decodes over the packed layout: all of them promise the same result."""
    return request.param


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture
def queue_slow_work(cupy):
    """To be called: keeps the current stream busy for some milliseconds."""

    def queue():
        numbers = cupy.ones(1 << 26, np.float32)
        for _ in range(50):
            numbers *= 1.0001

    return queue


@pytest.fixture
def rng(request):
    """A generator seeded by the test's own name: fresh numbers for every case, the same ones in every run."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))
