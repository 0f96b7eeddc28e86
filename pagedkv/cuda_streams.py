"""Streams of any framework as CuPy's, and reads of device arrays that wait for them."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import cupy
import numpy as np

from .arrays import ArrayView, view
from .checks import wrong


class _ForeignStream:
    """Another framework's stream by its pointer, in the CUDA stream protocol."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@cache
def _foreign_stream(pointer: int, device: int) -> Any:
    # Never let go: a stream of CuPy destroys what it holds when it goes, and this one's owner is another framework.
    if pointer == 0:
        return cupy.cuda.Stream.null
    with cupy.cuda.Device(device):  # which CuPy takes for the stream's own, and asks for wherever it becomes current
        return cupy.cuda.Stream.from_external(_ForeignStream(pointer))


@cache
def _torch_stream() -> Callable[[int], int]:
    """What tells the address of torch's current stream. Its public function makes an object first, which takes as long
    as reading five tensors."""
    torch = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)


def stream_of(framework: str, device: int) -> Any:
    """The stream on which a framework works now on a device."""
    if framework == "torch":
        return _foreign_stream(_torch_stream()(device), device)
    return cupy.cuda.get_current_stream(device)


def given_stream(stream: Any, device: int) -> Any:
    """A device's stream of any framework as one of CuPy."""
    if hasattr(stream, "__cuda_stream__"):
        return _foreign_stream(stream.__cuda_stream__()[1], device)
    for name in ("ptr", "cuda_stream"):
        if isinstance(getattr(stream, name, None), int):
            return _foreign_stream(getattr(stream, name), device)
    raise TypeError(wrong("stream", "a CUDA stream or None", type(stream).__name__))


def as_cupy(array: ArrayView) -> Any:
    """The same memory as an array of CuPy."""
    if isinstance(array.owner, cupy.ndarray):
        return array.owner
    size = array.dtype.itemsize
    span = sum((extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)) + 1
    memory = cupy.cuda.UnownedMemory(array.pointer, span * size, array.owner, array.device)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(array.shape, array.dtype, pointer, tuple(stride * size for stride in array.strides))


def as_dtype(dtype: np.dtype, array: ArrayView, name: str, stream: Any) -> ArrayView:
    """Indices in the dtype that kernels take, which may be new memory; TypeError where capture forbids that."""
    if array.dtype == dtype:
        return array
    if cupy.cuda.runtime.streamIsCapturing(stream.ptr):
        raise TypeError(f"{name}: expected {dtype.name} under graph capture, got {array.dtype.name}")
    with stream:
        return view(as_cupy(array).astype(dtype), name)


def on_host(array: ArrayView, name: str, stream: Any, reason: str = "checked() reads the device") -> np.ndarray:
    """A copy on the host, which waits for the stream; RuntimeError, with the reason for the copy, under capture."""
    if cupy.cuda.runtime.streamIsCapturing(stream.ptr):
        raise RuntimeError(f"{name}: {reason}, which graph capture does not allow")
    with stream:
        return as_cupy(array).get()
