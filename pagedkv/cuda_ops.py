"""CUDA backend: launches the kernels in ``cuda/`` on the arrays' device and the framework's current stream."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import cupy
import numpy as np

from . import indices, kernels
from .arrays import ArrayView, device_name, empty, view
from .checks import wrong
from .context import is_checked
from .counters import counters_for
from .decode_plan import decode_arrays, plan_decode
from .dtypes import INT32, INT64, is_fp8
from .gather_plan import convert_arrays, gather_arrays, plan_convert, plan_gather
from .launch import Launch, element_of
from .merge_plan import merge_arrays, plan_merge
from .move_tables import captured_table, keep_table
from .moves_plan import MoveGroup, MoveStep, places_of, plan_groups, plan_move
from .problem import AdvanceDecode, Attention, BlockMove, CacheWrite, ConvertLayout, GatherCache, MergeStates
from .read_plan import ReadLaunch
from .repeats import Pointers, Replay
from .step_plan import advance_arrays, plan_advance
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
        replay = PairReplay(plan_merge(problem), problem.prefix_output, problem.out, problem.lse_out)
    replay([array.pointer for array in merge_arrays(problem)])
    return replay


class PairReplay:
    """Makes one launch again whose last two arrays are its outputs. Those whose addresses are 0 are allocated, and
    returned."""

    __slots__ = ("first", "launch", "second")

    def __init__(self, planned: Launch, like: ArrayView, first: ArrayView, second: ArrayView) -> None:
        self.launch = LaunchReplay(planned, like.framework, like.device)
        self.first, self.second = _form(first), _form(second)

    def __call__(self, pointers: Pointers) -> tuple[ArrayView | None, ArrayView | None]:
        *inputs, first, second = pointers
        first, new_first = _given_or_new(first, self.first)
        second, new_second = _given_or_new(second, self.second)
        self.launch([*inputs, first, second])
        return new_first, new_second


# ---- gathers --------------------------------------------------------------------------------------------------------


def gather_cache(problem: GatherCache) -> Replay | None:
    """One launch of the kernel of the same name; returns how to repeat it."""
    if problem.num_seqs == 0:
        return None
    like, device = problem.cache.key, problem.cache.key.device
    stream = _stream(like.framework, device)
    with cupy.cuda.Device(device):
        given = {name: getattr(problem, name) for name in ("block_table", "cu_seq_lens", "seq_starts")}
        indices_as = {name: array and _as(INT32, array, name, stream) for name, array in given.items()}
        if is_checked():
            on_host = [array and _on_host(array, name, stream) for name, array in indices_as.items()]
            indices.check_scales(problem.cache, lambda scale: _on_host(scale, "k_scale and v_scale", stream))
            indices.check_gather(problem, *on_host)
        if problem.num_rows == 0:
            return None
        converted = replace(problem, **indices_as)
        replay = PairReplay(plan_gather(converted), like, problem.key_out, problem.value_out)
    replay([0 if array is None else array.pointer for array in gather_arrays(converted)])
    # Indices that had to be converted are new memory at every call.
    return replay if all(indices_as[name] is array for name, array in given.items()) else None


def convert_layout(problem: ConvertLayout) -> Replay | None:
    """One launch of the kernel of the same name; returns how to repeat it."""
    like = problem.source.key
    if problem.source.shape.num_blocks == 0:
        return None
    with cupy.cuda.Device(like.device):
        replay = PairReplay(plan_convert(problem), like, problem.target.key, problem.target.value)
    replay([array.pointer for array in convert_arrays(problem)])
    return replay


# ---- a decode step --------------------------------------------------------------------------------------------------


def advance_decode(problem: AdvanceDecode) -> Replay:
    """One launch of the kernel of the same name; returns how to repeat it."""
    framework, device = problem.seq_lens.framework, problem.seq_lens.device
    with cupy.cuda.Device(device):
        if is_checked():
            stream = _stream(framework, device)
            held = {"block_table": problem.block_table, "seq_lens": problem.seq_lens}
            indices.check_advance(problem, *(_on_host(array, name, stream) for name, array in held.items()))
        replay = LaunchReplay(plan_advance(problem), framework, device)
    replay([0 if array is None else array.pointer for array in advance_arrays(problem)])
    return replay


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


# ---- moves ----------------------------------------------------------------------------------------------------------


def copy_blocks(problem: BlockMove) -> None:
    """One launch of ``move_blocks`` for each form of blocks; what overlaps goes through a temporary."""
    _move_blocks(problem, _stream(problem.reference.framework, problem.reference.device))


def swap_blocks(problem: BlockMove) -> None:
    """One launch of ``move_blocks`` for each form of blocks, on the caller's stream."""
    for name, array in (*problem.sources.items(), *problem.targets.items()):
        _check_reachable(array, name)
    reference = problem.reference
    given = problem.stream is not None
    _move_blocks(problem, _given_stream(problem.stream) if given else _stream(reference.framework, reference.device))


def _check_reachable(array: ArrayView, name: str) -> None:
    """ValueError for host memory that a device cannot address, wherever in the array it is."""
    if not array.on_host or 0 in array.shape:
        return
    reach = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
    runtime, size = cupy.cuda.runtime, array.dtype.itemsize
    first = array.pointer + size * sum(step for step in reach if step < 0)
    last = array.pointer + size * sum(step for step in reach if step > 0) + size - 1
    for address in (first, last):
        if runtime.pointerGetAttributes(address).type not in (runtime.memoryTypeHost, runtime.memoryTypeManaged):
            expected = "pinned host memory (cupyx.empty_pinned, or torch's pin_memory)"
            raise ValueError(wrong(name, expected, "host memory that is not pinned"))


def _move_blocks(problem: BlockMove, stream: Any) -> None:
    device, places = problem.reference.device, places_of(problem)
    groups = plan_groups(places, problem.touches_host)
    with cupy.cuda.Device(device):
        if cupy.cuda.runtime.streamIsCapturing(stream.ptr):
            return _capture_move(problem, stream, groups, (device, places))
        keep_table((device, places), groups)
        pairs, temporary = _pairs_on_host(problem.mapping), []
        indices.check_pairs(problem, pairs)

        def allocate(nbytes: int) -> int:
            with stream:
                temporary.append(cupy.empty(nbytes, np.uint8))
            return temporary[-1].data.ptr

        _launch_steps(plan_move(problem, groups, pairs, allocate), device, stream)
    return None


def _pairs_on_host(mapping: ArrayView) -> np.ndarray:
    if mapping.on_host:
        return mapping.numpy().astype(np.int64, copy=False)
    if mapping.shape[0] == 0:
        return np.empty((0, 2), np.int64)
    return _on_host(mapping, "mapping", _stream(mapping.framework, mapping.device)).astype(np.int64)


def _launch_steps(steps: list[MoveStep], device: int, stream: Any) -> None:
    """Uploads the pairs of all steps and the addresses of all groups in one piece, and launches."""
    numbers = [array for step in steps for array in (step.pairs, *(group.addresses for group in step.groups))]
    if not numbers:
        return
    with stream:
        uploaded = cupy.asarray(
            np.concatenate([np.ascontiguousarray(array).view(np.int64).ravel() for array in numbers])
        )
    starts = np.cumsum([uploaded.data.ptr, *(array.nbytes for array in numbers)]).tolist()
    addresses = iter(starts)
    for step in steps:
        mapping = next(addresses)
        for group in step.groups:
            LaunchReplay(group.launch(len(step.pairs)), "cupy", device)([next(addresses), mapping], stream)


def _capture_move(
    problem: BlockMove, stream: Any, groups: Sequence[MoveGroup], key: tuple[int, tuple[Any, ...]]
) -> None:
    mapping, expected = problem.mapping, f"int64 on {device_name(key[0])} under graph capture"
    if mapping.on_host or mapping.dtype != INT64:
        raise TypeError(wrong("mapping", expected, "one on the host" if mapping.on_host else mapping.dtype.name))
    if is_checked():
        _on_host(mapping, "mapping", stream)  # raises
    element_of(mapping, "mapping")
    if mapping.shape[0] == 0:
        return
    for group, table in zip(groups, captured_table(key, groups), strict=True):
        launch = group.launch(mapping.shape[0], mapping.strides)
        LaunchReplay(launch, "cupy", key[0])([table, mapping.pointer], stream)


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


@cache
def _torch_stream() -> Callable[[int], int]:
    """What tells the address of torch's current stream. Its public function makes an object first, which takes as long
    as reading five tensors."""
    torch = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)


def _stream(framework: str, device: int) -> Any:
    """The stream on which a framework works now on a device."""
    if framework == "torch":
        return _foreign_stream(_torch_stream()(device))
    return cupy.cuda.get_current_stream(device)


def _given_stream(stream: Any) -> Any:
    """A stream of any framework as one of CuPy."""
    if hasattr(stream, "__cuda_stream__"):
        return _foreign_stream(stream.__cuda_stream__()[1])
    for name in ("ptr", "cuda_stream"):
        if isinstance(getattr(stream, name, None), int):
            return _foreign_stream(getattr(stream, name))
    raise TypeError(wrong("stream", "a CUDA stream or None", type(stream).__name__))


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
