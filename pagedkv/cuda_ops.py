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
from .decode_plan import decode_arrays, plan_decode
from .dtypes import INT32, INT64, is_fp8
from .launch import Launch
from .merge_plan import merge_arrays, plan_merge
from .problem import Attention, CacheWrite, MergeStates
from .read_plan import ReadLaunch
from .repeats import Pointers, Replay
from .varlen_plan import merge_split_arrays, plan_varlen, varlen_arrays
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

    def __call__(self, pointers: Pointers, stream: Any = None) -> None:
        if cupy.cuda.runtime.getDevice() != self.device:
            with cupy.cuda.Device(self.device):
                return self(pointers, stream)
        # None is CuPy's own current stream, which the launch finds faster than we do.
        if stream is None and self.framework != "cupy":
            stream = _stream(self.framework, self.device)
        self.kernel(self.grid, self.threads, (*pointers, self.params), self.shared_bytes, stream)
        return None


# ---- reads ----------------------------------------------------------------------------------------------------------


def paged_attention_v1(problem: Attention) -> Replay | None:
    """One launch of ``paged_attention`` that cuts no sequence; returns how to repeat it."""
    return _decode(problem)


def paged_attention_v2(problem: Attention) -> Replay | None:
    """One launch of ``paged_attention`` that cuts sequences into partitions or shares; returns how to repeat it."""
    return _decode(problem)


def _decode(problem: Attention) -> Replay | None:
    if problem.num_seqs == 0:
        return None
    names = {"block_table": "block_tables", "seq_lens": "seq_lens"}
    return _read(problem, names, plan_decode, decode_arrays)


def flash_attn_varlen_func(problem: Attention) -> Replay | None:
    """Launches of ``varlen_decode``, ``varlen_attention`` or both, and with several splits of ``merge_splits``; returns
    how to repeat them."""
    if problem.query.shape[0] == 0 or problem.num_seqs == 0:
        return None
    names = {"block_table": "block_table", "seq_lens": "seqused_k", "query_start_loc": "cu_seqlens_q"}
    return _read(problem, names, plan_varlen, varlen_arrays)


def _read(
    problem: Attention,
    names: dict[str, str],
    plan: Callable[[Attention, int], ReadLaunch],
    arrays_of: Callable[[Attention], list[ArrayView | None]],
) -> Replay | None:
    """``names``: what the op calls the fields that hold indices, the starts of queries last if it has them."""
    device = problem.query.device
    stream = _stream(problem.query.framework, device)
    with cupy.cuda.Device(device):
        given = {field: getattr(problem, field) for field in names}
        indices_as = {field: _as(INT32, array, names[field], stream) for field, array in given.items()}
        if is_checked():
            on_host = [_on_host(array, names[field], stream) for field, array in indices_as.items()]
            indices.check_scales(problem.cache, lambda scale: _on_host(scale, "k_scale and v_scale", stream))
            indices.check_attention(problem, *on_host)
        converted = replace(problem, **indices_as)
        replay = ReadReplay(plan(converted, _num_sms(device)), converted)
    arrays = [*arrays_of(converted), converted.workspace]
    replay([0 if array is None else array.pointer for array in arrays])
    # Indices that had to be converted are new memory at every call.
    return replay if all(indices_as[field] is array for field, array in given.items()) else None


class ReadReplay:
    """Makes the launches of one read again. Outputs and workspace whose addresses are 0 are allocated, and the outputs
    returned."""

    __slots__ = ("before", "has_scales", "launch", "lse", "merge", "num_counters", "out", "workspace_bytes")

    def __init__(self, planned: ReadLaunch, problem: Attention) -> None:
        framework, device = problem.query.framework, problem.query.device
        self.launch = LaunchReplay(planned.launch, framework, device)
        self.merge = planned.merge and LaunchReplay(planned.merge, framework, device)
        self.before = planned.before and ReadReplay(planned.before, problem)
        self.workspace_bytes, self.num_counters = planned.workspace_bytes, planned.num_counters
        self.has_scales = is_fp8(problem.cache.format)
        self.out, self.lse = _form(problem.out), problem.lse_out and _form(problem.lse_out)

    def __call__(self, pointers: Pointers, stream: Any = None) -> tuple[ArrayView | None, ArrayView | None]:
        launch = self.launch
        if cupy.cuda.runtime.getDevice() != launch.device:
            with cupy.cuda.Device(launch.device):
                return self(pointers, stream)
        if stream is None and (self.workspace_bytes or launch.framework != "cupy"):
            stream = _stream(launch.framework, launch.device)  # asked for once: torch takes its time
        *inputs, out, lse, workspace = pointers
        if not self.has_scales:
            inputs[-2:] = 0, 0  # the caller's would be ignored
        counters = [] if self.num_counters is None else [0]
        if self.num_counters:
            counters = [counters_for(stream, launch.device, self.num_counters)]
        if self.workspace_bytes and workspace == 0:
            with stream:
                memory = cupy.empty(self.workspace_bytes, np.uint8)
            workspace = memory.data.ptr
        out, new_out = _given_or_new(out, self.out)
        lse, new_lse = _given_or_new(lse, self.lse)
        arrays = [*inputs, out, lse]
        if self.before is not None:
            self.before([*arrays, pointers[-1]], stream)
        launch([*arrays, workspace, *counters], stream)
        if self.merge is not None:
            self.merge(merge_split_arrays(arrays, workspace), stream)
        return new_out, new_lse


def merge_attn_states(problem: MergeStates) -> Replay | None:
    """One launch of the kernel of the same name; returns how to repeat it."""
    if problem.out.shape[0] == 0:
        return None
    device = problem.out.device
    with cupy.cuda.Device(device):
        replay = MergeReplay(plan_merge(problem), problem)
    replay([array.pointer for array in merge_arrays(problem)])
    return replay


class MergeReplay:
    """Makes one merge again. Outputs whose addresses are 0 are allocated, and returned."""

    __slots__ = ("launch", "lse", "out")

    def __init__(self, planned: Launch, problem: MergeStates) -> None:
        self.launch = LaunchReplay(planned, problem.prefix_output.framework, problem.out.device)
        self.out, self.lse = _form(problem.out), _form(problem.lse_out)

    def __call__(self, pointers: Pointers) -> tuple[ArrayView | None, ArrayView | None]:
        *inputs, out, lse = pointers
        out, new_out = _given_or_new(out, self.out)
        lse, new_lse = _given_or_new(lse, self.lse)
        self.launch([*inputs, out, lse])
        return new_out, new_lse


def _given_or_new(pointer: int, form: ArrayView | None) -> tuple[int, ArrayView | None]:
    """The address of an output, allocated where 0, and what was allocated; without a form nobody wants it."""
    if pointer or form is None:
        return pointer, None
    new = empty(form, form.shape, form.dtype)
    return new.pointer, new


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
