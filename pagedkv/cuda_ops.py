"""CUDA backend: launches the kernels in ``cuda/`` on the arrays' device and the framework's current stream."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import cupy
import numpy as np

from . import indices, kernels
from .arrays import ArrayView, empty, view
from .context import is_checked
from .counters import counters_for
from .decode_plan import DecodeLaunch, decode_arrays, plan_decode
from .dtypes import INT32, INT64
from .launch import Launch
from .problem import Attention, CacheWrite
from .repeats import Pointers, Replay
from .write_plan import plan_flash_write, plan_packed_write, write_arrays


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
        slots = _as(INT64, problem.slot_mapping, "slot_mapping", stream)
        if is_checked():
            indices.check_slots(problem, _on_host(slots, "slot_mapping", stream))
            indices.check_scales(problem.cache, lambda scale: _on_host(scale, "k_scale and v_scale", stream))
        converted = replace(problem, slot_mapping=slots)
        launch = plan(converted)
    replay = LaunchReplay(launch, problem.key.framework, device)
    replay([0 if array is None else array.pointer for array in write_arrays(converted)])
    # Slots that had to be converted are new memory at every call.
    return replay if slots is problem.slot_mapping else None


def warmup(launches: list[Launch], device: int | None) -> None:
    """Loads the kernels of these launches, and allocates what captured calls count with."""
    device = cupy.cuda.runtime.getDevice() if device is None else device
    with cupy.cuda.Device(device):
        counters_for(_stream("cupy", device), device, count=0)
        for launch in launches:
            kernels.load(launch.instance, device, launch.shared_bytes)


class LaunchReplay:
    """Makes one launch again on other addresses, on the stream that is then current."""

    __slots__ = ("device", "framework", "grid", "kernel", "params", "shared_bytes", "threads")

    def __init__(self, launch: Launch, framework: str, device: int) -> None:
        self.kernel, self.shared_bytes = kernels.load(launch.instance, device, launch.shared_bytes), launch.shared_bytes
        self.grid, self.threads, self.params = launch.grid, (launch.threads,), launch.params
        self.framework, self.device = framework, device

    def __call__(self, pointers: Pointers) -> None:
        if cupy.cuda.runtime.getDevice() != self.device:
            with cupy.cuda.Device(self.device):
                return self(pointers)
        # None is CuPy's own current stream, which the launch finds faster than we do.
        stream = None if self.framework == "cupy" else _stream(self.framework, self.device)
        self.kernel(self.grid, self.threads, (*pointers, self.params), self.shared_bytes, stream)
        return None


# ---- decode ---------------------------------------------------------------------------------------------------------


def paged_attention_v1(problem: Attention) -> Replay | None:
    """One launch of ``paged_attention`` that cuts no sequence; returns how to repeat it."""
    return _decode(problem)


def paged_attention_v2(problem: Attention) -> Replay | None:
    """One launch of ``paged_attention`` that cuts sequences into partitions or shares; returns how to repeat it."""
    return _decode(problem)


def _decode(problem: Attention) -> Replay | None:
    if problem.num_seqs == 0:
        return None
    device = problem.query.device
    stream = _stream(problem.query.framework, device)
    with cupy.cuda.Device(device):
        tables = _as(INT32, problem.block_table, "block_tables", stream)
        lens = _as(INT32, problem.seq_lens, "seq_lens", stream)
        if is_checked():
            on_host = (_on_host(array, name, stream) for array, name in ((tables, "block_tables"), (lens, "seq_lens")))
            indices.check_scales(problem.cache, lambda scale: _on_host(scale, "k_scale and v_scale", stream))
            indices.check_attention(problem, *on_host, None)
        converted = replace(problem, block_table=tables, seq_lens=lens)
        replay = DecodeReplay(plan_decode(converted, _num_sms(device)), converted)
    arrays = [*decode_arrays(converted), converted.workspace]
    replay([0 if array is None else array.pointer for array in arrays])
    return replay if tables is problem.block_table and lens is problem.seq_lens else None


class DecodeReplay:
    """Makes one decode launch again. Outputs and workspace whose addresses are 0 are allocated, and the outputs
    returned."""

    __slots__ = ("launch", "lse", "num_counters", "out", "workspace_bytes")

    def __init__(self, planned: DecodeLaunch, problem: Attention) -> None:
        self.launch = LaunchReplay(planned.launch, problem.query.framework, problem.query.device)
        self.workspace_bytes, self.num_counters = planned.workspace_bytes, planned.num_counters
        self.out, self.lse = _form(problem.out), problem.lse_out and _form(problem.lse_out)

    def __call__(self, pointers: Pointers) -> Any:
        launch = self.launch
        if cupy.cuda.runtime.getDevice() != launch.device:
            with cupy.cuda.Device(launch.device):
                return self(pointers)
        *inputs, out, lse, workspace = pointers
        counters, new_out, new_lse = 0, None, None
        if self.num_counters:
            stream = _stream(launch.framework, launch.device)
            counters = counters_for(stream, launch.device, self.num_counters)
            if workspace == 0:
                with stream:
                    memory = cupy.empty(self.workspace_bytes, np.uint8)
                workspace = memory.data.ptr
        if out == 0:
            new_out = _new(self.out)
            out = new_out.pointer
        if lse == 0 and self.lse is not None:
            new_lse = _new(self.lse)
            lse = new_lse.pointer
        launch([*inputs, out, lse, workspace, counters])
        return new_out, new_lse


def _new(form: ArrayView) -> ArrayView:
    return empty(form, form.shape, form.dtype)


def _form(array: ArrayView) -> ArrayView:
    """The array without its memory."""
    return replace(array, pointer=0, owner=None)


@cache
def _num_sms(device: int) -> int:
    return cupy.cuda.Device(device).attributes["MultiProcessorCount"]


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


def _as(dtype: np.dtype, array: ArrayView, name: str, stream: Any) -> ArrayView:
    if array.dtype == dtype:
        return array
    if cupy.cuda.runtime.streamIsCapturing(stream.ptr):
        raise TypeError(f"{name}: expected {dtype.name} under graph capture, got {array.dtype.name}")
    with stream:
        return view(_as_cupy(array).astype(dtype), name)


def _on_host(array: ArrayView, name: str, stream: Any) -> np.ndarray:
    if cupy.cuda.runtime.streamIsCapturing(stream.ptr):
        raise RuntimeError(f"{name}: checked() reads the device, which graph capture does not allow")
    with stream:
        return _as_cupy(array).get()
