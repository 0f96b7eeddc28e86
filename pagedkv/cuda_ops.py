"""CUDA backend: launches the kernels in ``cuda/`` on the arrays' device and the framework's current stream."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import cupy

from . import indices, kernels
from .arrays import ArrayView
from .context import is_checked
from .counters import counters_for
from .cuda_moves import check_reachable, move_blocks
from .cuda_replay import LaunchReplay, PairReplay, ReadReplay
from .cuda_streams import as_dtype, given_stream, on_host, stream_of
from .decode_plan import decode_arrays, plan_decode
from .dtypes import INT32, INT64
from .gather_plan import convert_arrays, gather_arrays, plan_convert, plan_gather
from .launch import Launch
from .merge_plan import merge_arrays, plan_merge
from .problem import AdvanceDecode, Attention, BlockMove, CacheWrite, ConvertLayout, GatherCache, MergeStates
from .read_plan import ReadLaunch
from .repeats import Pointers, Replay
from .step_plan import advance_arrays, plan_advance
from .varlen_plan import plan_varlen, varlen_arrays
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
    stream = stream_of(problem.key.framework, device)
    with cupy.cuda.Device(device):
        slots = as_dtype(INT64, problem.slot_mapping, "slot_mapping", stream)
        if is_checked():
            indices.check_slots(problem, on_host(slots, "slot_mapping", stream))
            indices.check_scales(problem.cache, lambda scale: on_host(scale, "k_scale and v_scale", stream))
        converted = replace(problem, slot_mapping=slots)
        launch = plan(converted)
    replay = LaunchReplay(launch, problem.key.framework, device)
    replay(_pointers(write_arrays(converted)))
    # Slots that had to be converted are new memory at every call.
    return replay if slots is problem.slot_mapping else None


def warmup(launches: list[Launch], device: int | None) -> None:
    """Loads the kernels of these launches, and allocates what captured calls count with."""
    device = cupy.cuda.runtime.getDevice() if device is None else device
    with cupy.cuda.Device(device):
        counters_for(stream_of("cupy", device), device, count=0)
        for launch in launches:
            kernels.load(launch.instance, device, launch.shared_bytes)


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
    stream = stream_of(problem.query.framework, device)
    with cupy.cuda.Device(device):
        given = {field: getattr(problem, field) for field in names}
        if is_checked():  # before wide indices are cut to what might be legal
            held = [on_host(array, names[field], stream) for field, array in given.items()]
            indices.check_scales(problem.cache, lambda scale: on_host(scale, "k_scale and v_scale", stream))
            indices.check_attention(problem, *held)
        indices_as = {field: as_dtype(INT32, array, names[field], stream) for field, array in given.items()}
        converted = replace(problem, **indices_as)
        replay = ReadReplay(plan(converted, _num_sms(device)), converted)
    arrays = [*arrays_of(converted), converted.workspace]
    replay(_pointers(arrays))
    # Indices that had to be converted are new memory at every call.
    return replay if all(indices_as[field] is array for field, array in given.items()) else None


def merge_attn_states(problem: MergeStates) -> Replay | None:
    """One launch of the kernel of the same name; returns how to repeat it."""
    if problem.out.shape[0] == 0:
        return None
    device = problem.out.device
    with cupy.cuda.Device(device):
        replay = PairReplay(plan_merge(problem), problem.prefix_output, problem.out, problem.lse_out)
    replay([array.pointer for array in merge_arrays(problem)])
    return replay


# ---- gathers --------------------------------------------------------------------------------------------------------


def gather_cache(problem: GatherCache) -> Replay | None:
    """One launch of the kernel of the same name; returns how to repeat it."""
    like, device = problem.cache.key, problem.cache.key.device
    stream = stream_of(like.framework, device)
    with cupy.cuda.Device(device):
        given = {name: getattr(problem, name) for name in ("block_table", "cu_seq_lens", "seq_starts")}
        if is_checked():  # before wide indices are cut to what might be legal
            held = [array and on_host(array, name, stream) for name, array in given.items()]
            indices.check_scales(problem.cache, lambda scale: on_host(scale, "k_scale and v_scale", stream))
            indices.check_gather(problem, *held)
        if problem.num_rows == 0 or problem.num_seqs == 0:
            return None
        indices_as = {name: array and as_dtype(INT32, array, name, stream) for name, array in given.items()}
        converted = replace(problem, **indices_as)
        replay = PairReplay(plan_gather(converted), like, problem.key_out, problem.value_out)
    replay(_pointers(gather_arrays(converted)))
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
            stream = stream_of(framework, device)
            held = {"block_table": problem.block_table, "seq_lens": problem.seq_lens}
            indices.check_advance(problem, *(on_host(array, name, stream) for name, array in held.items()))
        replay = LaunchReplay(plan_advance(problem), framework, device)
    replay(_pointers(advance_arrays(problem)))
    return replay


def _pointers(arrays: Iterable[ArrayView | None]) -> Pointers:
    return [0 if array is None else array.pointer for array in arrays]


@cache
def _num_sms(device: int) -> int:
    return cupy.cuda.Device(device).attributes["MultiProcessorCount"]


# ---- moves ----------------------------------------------------------------------------------------------------------


def copy_blocks(problem: BlockMove) -> None:
    """One launch of ``move_blocks`` for each form of blocks; what overlaps goes through a temporary."""
    move_blocks(problem, stream_of(problem.reference.framework, problem.reference.device))


def swap_blocks(problem: BlockMove) -> None:
    """One launch of ``move_blocks`` for each form of blocks, on the caller's stream."""
    for name, array in (*problem.sources.items(), *problem.targets.items()):
        check_reachable(array, name)
    framework, device = problem.reference.framework, problem.reference.device
    stream = stream_of(framework, device) if problem.stream is None else given_stream(problem.stream, device)
    move_blocks(problem, stream)
