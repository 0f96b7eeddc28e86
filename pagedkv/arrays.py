"""Arrays of any framework as light views: pointer, shape, strides, dtype, device, owner. Nothing is copied.

NumPy, CuPy and torch are read straight off the object, which costs about a microsecond; JAX and unknown frameworks go
through DLPack or ``__cuda_array_interface__`` and the stream protocol of those.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

HOST = -1  # the device of arrays in host memory; others count CUDA devices from 0


@dataclass(slots=True)
class ArrayView:
    """What a kernel needs to know of an array. Strides are in elements."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    device: int
    writable: bool
    framework: str
    owner: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def on_host(self) -> bool:
        return self.device == HOST

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # NumPy's protocol has no bfloat16 or float8: numpy() below sets the dtype.
        size = self.dtype.itemsize
        return {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": self.shape,
            "strides": tuple(stride * size for stride in self.strides),
            "data": (self.pointer, not self.writable),
        }

    def numpy(self) -> np.ndarray:
        """The same memory as a NumPy array (host arrays only)."""
        if isinstance(self.owner, np.ndarray):
            return self.owner
        return np.asarray(self).view(self.dtype)


def device_name(device: int) -> str:
    """``cpu`` or ``cuda:N``."""
    return "cpu" if device == HOST else f"cuda:{device}"


def view(array: Any, name: str) -> ArrayView:
    """A view of ``array``, which keeps it alive. TypeError if it is no array; ``name`` goes into the message."""
    return _reader(type(array))(array, name)


@cache
def _reader(kind: type) -> Callable[[Any, str], ArrayView]:
    # A subclass (torch.nn.Parameter, np.memmap) is read as its base.
    frameworks = [base.__module__.partition(".")[0] for base in kind.__mro__]
    for framework, reader in (("numpy", _view_numpy), ("cupy", _view_cupy), ("torch", _view_torch)):
        if framework in frameworks and hasattr(kind, "shape") and hasattr(kind, "dtype"):
            return reader
    if kind.__module__.partition(".")[0] in ("jax", "jaxlib"):
        return _view_jax
    return _view_protocol


def _element_strides(strides: tuple[int, ...], itemsize: int, name: str) -> tuple[int, ...]:
    if any(stride % itemsize for stride in strides):
        raise ValueError(f"{name}: expected strides in whole elements of {itemsize} bytes, got {strides} bytes")
    return tuple(stride // itemsize for stride in strides)


def _check_byte_order(dtype: np.dtype, name: str) -> None:
    if not dtype.isnative:
        raise TypeError(f"{name}: expected the machine's own byte order, got {dtype.str}")


def _view_numpy(array: np.ndarray, name: str) -> ArrayView:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name}: expected an array, got {type(array).__name__}")
    if type(array) is not np.ndarray:
        array = array.view(np.ndarray)  # the memory alone: a masked array would apply its mask
    _check_byte_order(array.dtype, name)
    strides = _element_strides(array.strides, array.itemsize or 1, name)
    return ArrayView(array.ctypes.data, array.shape, strides, array.dtype, HOST, array.flags.writeable, "numpy", array)


def _view_cupy(array: Any, name: str) -> ArrayView:
    dtype = array.dtype
    _check_byte_order(dtype, name)
    strides = _element_strides(array.strides, dtype.itemsize, name)
    return ArrayView(array.data.ptr, array.shape, strides, dtype, array.device.id, True, "cupy", array)


@cache
def _torch_dtypes() -> dict[Any, np.dtype]:
    import torch

    names = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
    dtypes = {getattr(torch, name): np.dtype(name) for name in names}
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        dtypes[getattr(torch, name)] = np.dtype(getattr(ml_dtypes, name))
    return dtypes


def _view_torch(tensor: Any, name: str) -> ArrayView:
    dtype = _torch_dtypes().get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"{name}: expected a float, fp8 or integer dtype, got {tensor.dtype}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{name}: expected a cpu or cuda tensor, got {tensor.device}")
    if str(tensor.layout) != "torch.strided" or tensor.is_neg():
        raise TypeError(f"{name}: expected a strided tensor without pending negation, got {_described(tensor)}")
    device = HOST if tensor.device.type == "cpu" else tensor.device.index
    return ArrayView(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype, device, True, "torch", tensor)


def _described(tensor: Any) -> str:
    return "one with pending negation (resolve_neg() copies it)" if tensor.is_neg() else f"layout {tensor.layout}"


def _view_jax(array: Any, name: str) -> ArrayView:
    import jax

    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        raise TypeError(f"{name}: expected a concrete JAX array outside jit, got {type(array).__name__}")
    on_host = next(iter(array.devices())).platform == "cpu"
    shared = _view_numpy(np.asarray(array), name) if on_host else _view_cupy(_cupy_from_dlpack(array), name)
    # JAX arrays are immutable; the shared array owns what the view points at.
    shared.framework, shared.writable = "jax", False
    return shared


def _cupy_from_dlpack(array: Any) -> Any:
    import cupy

    return cupy.from_dlpack(array)


def _view_protocol(array: Any, name: str) -> ArrayView:
    if hasattr(array, "__cuda_array_interface__"):
        import cupy

        shared = _view_cupy(cupy.asarray(array), name)
    elif hasattr(array, "__dlpack__"):
        on_host = array.__dlpack_device__()[0] == 1  # kDLCPU
        shared = _view_numpy(np.from_dlpack(array), name) if on_host else _view_cupy(_cupy_from_dlpack(array), name)
    else:
        raise TypeError(f"{name}: expected an array, got {type(array).__name__}")
    shared.framework = "other"
    return shared


def empty(like: ArrayView, shape: tuple[int, ...], dtype: np.dtype) -> ArrayView:
    """A new array where ``like`` lives and, if its framework has writable arrays, of that framework."""
    if like.framework == "torch":
        import torch

        kind = next(kind for kind, same in _torch_dtypes().items() if same == dtype)
        return _view_torch(torch.empty(shape, dtype=kind, device=device_name(like.device)), "out")
    if like.on_host:
        return _view_numpy(np.empty(shape, dtype), "out")
    import cupy

    with cupy.cuda.Device(like.device):
        return _view_cupy(cupy.empty(shape, dtype), "out")


def deliver(result: ArrayView, like: ArrayView) -> Any:
    """The array of ``result`` as the caller of ``like`` expects it: JAX queries get JAX arrays back."""
    if like.framework != "jax" or result.framework == "jax":
        return result.owner
    import jax

    return jax.numpy.asarray(result.owner) if result.on_host else jax.dlpack.from_dlpack(result.owner)
