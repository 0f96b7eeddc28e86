"""CUDA backend: launches the kernels in ``cuda/`` on the arrays' device and the framework's current stream."""

import sys
from collections.abc import Callable
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
from .repeats import Pointers, Replay
from .write_plan import Launch, plan_flash_write, plan_packed_write, write_arrays


def reshape_and_cache_flash(problem: CacheWrite) -> Replay | None:
    """One launch of the kernel of the same name; returns how to repeat it."""
    return _write(problem, plan_flash_write)


def reshape_and_cache(problem: CacheWrite) -> Replay | None:
    """One launch of the kernel of the same name; returns how to repeat it."""
    return _write(problem, plan_packed_write)


def _write(problem: CacheWrite, plan: Callable[[CacheWrite], Launch]) -> Replay | None:
    if problem.num_tokens == 0:
        return None
    device = problem.key.device
    stream = _stream(problem.key.framework, device)
    with cupy.cuda.Device(device):
        slots = _as_int64(problem.slot_mapping, "slot_mapping", stream)
        if is_checked():
            indices.check_slots(problem, _on_host(slots, "slot_mapping", stream))
            indices.check_scales(problem.cache, lambda scale: _on_host(scale, "k_scale and v_scale", stream))
        converted = replace(problem, slot_mapping=slots)
        launch = plan(converted)
    replay = LaunchReplay(launch, problem.key.framework, device)
    replay([0 if array is None else array.pointer for array in write_arrays(converted)])
    # Slots that had to be converted are new memory at every call.
    return replay if slots is problem.slot_mapping else None


class LaunchReplay:
    """Makes one launch again on other addresses, on the stream that is then current."""

    __slots__ = ("device", "framework", "grid", "kernel", "params", "threads")

    def __init__(self, launch: Launch, framework: str, device: int) -> None:
        self.kernel = kernels.load(launch.instance, device)
        self.grid, self.threads, self.params = launch.grid, (launch.threads,), launch.params
        self.framework, self.device = framework, device

    def __call__(self, pointers: Pointers) -> None:
        if cupy.cuda.runtime.getDevice() != self.device:
            with cupy.cuda.Device(self.device):
                return self(pointers)
        # None is CuPy's own current stream, which the launch finds faster than we do.
        stream = None if self.framework == "cupy" else _stream(self.framework, self.device)
        self.kernel(self.grid, self.threads, (*pointers, self.params), stream=stream)
        return None


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


def _stream(framework: str, device: int) -> Any:
    """The stream on which a framework works now on a device."""
    if framework == "torch":
        return _foreign_stream(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    return cupy.cuda.get_current_stream(device)


def _as_cupy(array: ArrayView) -> Any:
    if isinstance(array.owner, cupy.ndarray):
        return array.owner
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
