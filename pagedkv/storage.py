"""The arrays of a paged cache: a key and a value cache for every layer, on the host or on a device."""

from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from .arrays import HOST
from .checks import check_number, check_size, wrong
from .layout import cache_shapes

AUTO = "auto"


class Layer(NamedTuple):
    """The caches of one layer, plain arrays of NumPy or CuPy."""

    k: Any
    v: Any


def find_device(device: Any) -> int:
    """A device by what a caller may say: None (CUDA where it is usable, else the host), ``"cpu"``, ``"cuda"``,
    ``"cuda:1"`` or a number. ValueError for something else, RuntimeError where there is no such device."""
    if device == "cpu":
        return HOST
    if device is None and not _has_cuda():
        return HOST
    name, _, number = str("cuda" if device is None else device).partition(":")
    if isinstance(device, int | np.integer) and not isinstance(device, bool):
        name, number = "cuda", str(device)
    if name != "cuda" or not (number.isdecimal() or number == ""):
        raise ValueError(wrong("device", "'cpu', 'cuda', 'cuda:N' or a number", repr(device)))
    if not _has_cuda():
        raise RuntimeError("device: expected a CUDA device that CuPy can use, got none; device='cpu' takes the host")
    return int(number) if number else import_module("cupy").cuda.runtime.getDevice()


def _has_cuda() -> bool:
    try:
        return import_module("cupy").cuda.runtime.getDeviceCount() > 0
    except Exception:  # no CuPy, no driver or no device, each with an error of its own
        return False


def find_num_blocks(num_blocks: Any, block_bytes: int, device: int, memory_fraction: float) -> int:
    """``num_blocks`` as a number; ``"auto"``: as many as fit into a share of what is free on the device."""
    if num_blocks != AUTO:
        if isinstance(num_blocks, str):
            raise ValueError(wrong("num_blocks", "a number or 'auto'", repr(num_blocks)))
        return check_size(num_blocks, "num_blocks", minimum=1)
    if device == HOST:
        raise ValueError(wrong("num_blocks", "a number with device='cpu', since 'auto' asks a GPU", "'auto'"))
    share = check_number(memory_fraction, "memory_fraction", "a share from 0 to 1", minimum=0.0)
    if share > 1:
        raise ValueError(wrong("memory_fraction", "a share from 0 to 1", memory_fraction))
    cupy = import_module("cupy")
    with cupy.cuda.Device(device):
        free, _ = cupy.cuda.runtime.memGetInfo()
        free += cupy.get_default_memory_pool().free_bytes()  # which CuPy holds and nobody uses
    fitting = int(free * share) // block_bytes
    if fitting < 1:
        raise ValueError(wrong("num_blocks", f"{block_bytes} free bytes for one block", f"{int(free * share)}"))
    return fitting


def allocate_layers(
    num_layers: int,
    layout: str,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: np.dtype,
    device: int,
) -> list[Layer]:
    """The caches of all layers; what they hold at first may be anything."""
    shapes = cache_shapes(layout, num_blocks, block_size, num_kv_heads, head_size, dtype)
    if device == HOST:
        return [Layer(*(np.zeros(shape, dtype) for shape in shapes)) for _ in range(num_layers)]
    cupy = import_module("cupy")
    with cupy.cuda.Device(device):
        return [Layer(*(cupy.empty(shape, dtype) for shape in shapes)) for _ in range(num_layers)]


def to_device(arrays: list[np.ndarray], device: int) -> list[Any]:
    """The same arrays on a device, by one copy on CuPy's current stream; on the host they themselves."""
    if device == HOST:
        return arrays
    cupy = import_module("cupy")
    ends = np.cumsum([-(-array.nbytes // 16) * 16 for array in arrays])
    starts = [0, *ends[:-1].tolist()]
    packed = np.empty(int(ends[-1]), np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    with cupy.cuda.Device(device):
        memory = cupy.asarray(packed).data
        return [cupy.ndarray(a.shape, a.dtype, memory + start) for start, a in zip(starts, arrays, strict=True)]


def scale_on(scale: Any, device: int) -> Any:
    """A scale as the ops on this device take it: numbers and device arrays as they are, host arrays moved."""
    if device == HOST or not isinstance(scale, np.ndarray):
        return scale
    cupy = import_module("cupy")
    with cupy.cuda.Device(device):
        return cupy.asarray(scale)
