"""CUDA backend: launches the kernels in ``cuda/`` on the arrays' device and the framework's current stream."""

import sys
from dataclasses import replace
from functools import cache
from typing import Any

import cupy
import numpy as np

from . import indices, kernels
from .arrays import ArrayView, view
from .context import is_checked
from .dtypes import INT64
from .problem import CacheWrite
from .write_plan import Launch, plan_flash_write, plan_packed_write


def reshape_and_cache_flash(problem: CacheWrite) -> None:
    """One launch of the kernel of the same name."""
    _write(problem, plan_flash_write)


def reshape_and_cache(problem: CacheWrite) -> None:
    """One launch of the kernel of the same name."""
    _write(problem, plan_packed_write)


def _write(problem: CacheWrite, plan: Any) -> None:
    if problem.num_tokens == 0:
        return
    stream = _stream(problem.key)
    with _on_device(problem.key.device):
        slots = _as_int64(problem.slot_mapping, "slot_mapping", stream)
        problem = replace(problem, slot_mapping=slots)
        if is_checked():
            indices.check_slots(problem, _on_host(slots, "slot_mapping", stream))
        launch: Launch = plan(problem)
        storage = problem.cache
        arrays = (problem.key, problem.value, storage.key, storage.value, slots)
        scales = (0 if scale.array is None else scale.array.pointer for scale in (storage.k_scale, storage.v_scale))
        kernel = kernels.load(launch.instance, problem.key.device)
        arguments = (*(array.pointer for array in arrays), *scales, launch.params)
        kernel(launch.grid, (launch.threads,), arguments, stream=stream)


# ---- devices and streams --------------------------------------------------------------------------------------------


class _ForeignStream:
    """Another framework's stream by its pointer, in the CUDA stream protocol."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@cache
def _foreign_stream(pointer: int) -> Any:
    return cupy.cuda.Stream.from_external(_ForeignStream(pointer)) if pointer else cupy.cuda.Stream.null


def _stream(array: ArrayView) -> Any:
    """The stream on which the array's framework works now, on the array's device."""
    if array.framework == "torch":
        return _foreign_stream(sys.modules["torch"].cuda.current_stream(array.device).cuda_stream)
    return cupy.cuda.get_current_stream(array.device)


class _on_device:  # noqa: N801 - reads as a statement
    """Makes a device current; free where it already is, which CuPy's own context manager is not."""

    def __init__(self, device: int) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.previous = cupy.cuda.runtime.getDevice()
        if self.previous != self.device:
            cupy.cuda.runtime.setDevice(self.device)

    def __exit__(self, *exception: object) -> None:
        if self.previous != self.device:
            cupy.cuda.runtime.setDevice(self.previous)


def _as_cupy(array: ArrayView) -> Any:
    size = array.dtype.itemsize
    span = sum((extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)) + 1
    memory = cupy.cuda.UnownedMemory(array.pointer, span * size, array.owner, array.device)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(array.shape, array.dtype, pointer, tuple(stride * size for stride in array.strides))


def _as_int64(array: ArrayView, name: str, stream: Any) -> ArrayView:
    if array.dtype == INT64:
        return array
    if cupy.cuda.runtime.streamIsCapturing(stream.ptr):
        raise TypeError(f"{name}: expected int64 under graph capture, got {array.dtype.name}")
    with stream:
        return view(_as_cupy(array).astype(INT64), name)


def _on_host(array: ArrayView, name: str, stream: Any) -> np.ndarray:
    if cupy.cuda.runtime.streamIsCapturing(stream.ptr):
        raise RuntimeError(f"{name}: checked() reads the device, which graph capture does not allow")
    with stream:
        return _as_cupy(array).get()
