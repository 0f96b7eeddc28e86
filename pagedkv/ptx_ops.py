"""PTX backend: the kernels of ``cuda/`` on host arrays, compiled by NVRTC and run by the interpreter in ``ptx/``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from . import indices, nvrtc
from .arrays import ArrayView, view
from .decode_plan import decode_arrays, plan_decode
from .gather_plan import convert_arrays, gather_arrays, plan_convert, plan_gather
from .kernels import Instance, expanded_source
from .launch import Launch
from .merge_plan import merge_arrays, plan_merge
from .moves_plan import places_of, plan_groups, plan_move
from .problem import AdvanceDecode, Attention, BlockMove, CacheWrite, ConvertLayout, GatherCache, MergeStates
from .ptx.counters import Counters
from .ptx.machine import Machine
from .ptx.parse import Kernel, parse_kernel
from .read_plan import ReadLaunch
from .step_plan import advance_arrays, plan_advance
from .varlen_plan import merge_split_arrays, plan_varlen, varlen_arrays
from .write_plan import plan_flash_write, plan_packed_write, write_arrays

ARCH = "compute_90"  # virtual: PTX is what runs
NUM_SMS = 4  # of the card that this backend plans for: few, so that small sequences are cut as well
SEED = 0  # of the order in which CTAs run: not that of the grid
_profile: ContextVar["list[LaunchProfile] | None"] = ContextVar("profile", default=None)


def reshape_and_cache_flash(problem: CacheWrite) -> None:
    """One launch of the kernel of the same name."""
    _write(problem, plan_flash_write)


def reshape_and_cache(problem: CacheWrite) -> None:
    """One launch of the kernel of the same name."""
    _write(problem, plan_packed_write)


def _write(problem: CacheWrite, plan: Callable[[CacheWrite], Launch]) -> None:
    slots = _as(np.int64, problem.slot_mapping)
    indices.check_slots(problem, slots.numpy())
    indices.check_scales(problem.cache, ArrayView.numpy)
    if problem.num_tokens == 0:
        return
    problem = replace(problem, slot_mapping=slots)
    launch(plan(problem), write_arrays(problem))


def paged_attention_v1(problem: Attention) -> None:
    """One launch of ``paged_attention`` that cuts no sequence."""
    _decode(problem)


def paged_attention_v2(problem: Attention) -> None:
    """One launch of ``paged_attention`` that cuts sequences into partitions or shares."""
    _decode(problem)


def _decode(problem: Attention) -> None:
    indices.check_scales(problem.cache, ArrayView.numpy)
    indices.check_attention(problem, problem.block_table.numpy(), problem.seq_lens.numpy())
    if problem.num_seqs == 0:
        return
    tables, lens = (_as(np.int32, array) for array in (problem.block_table, problem.seq_lens))
    problem = replace(problem, block_table=tables, seq_lens=lens)
    _read(problem, plan_decode(problem, NUM_SMS), decode_arrays(problem))


def flash_attn_varlen_func(problem: Attention) -> None:
    """Launches of ``varlen_decode``, ``varlen_attention`` or both, and with several splits of ``merge_splits``."""
    arrays = (problem.block_table, problem.seq_lens, problem.query_start_loc)
    indices.check_scales(problem.cache, ArrayView.numpy)
    indices.check_attention(problem, *(array.numpy() for array in arrays))
    if problem.query.shape[0] == 0 or problem.num_seqs == 0:
        return
    table, lens, starts = (_as(np.int32, array) for array in arrays)
    problem = replace(problem, block_table=table, seq_lens=lens, query_start_loc=starts)
    _read(problem, plan_varlen(problem, NUM_SMS), varlen_arrays(problem))


def _read(problem: Attention, planned: ReadLaunch, arrays: list[ArrayView | None]) -> None:
    if planned.before is not None:
        _read(problem, planned.before, arrays)
    workspace, counters = _workspace(problem, planned.workspace_bytes), None
    if planned.num_counters:
        counters = view(np.zeros(planned.num_counters, np.int32), "counters")
    launch(planned.launch, [*arrays, workspace, *([] if planned.num_counters is None else [counters])])
    assert counters is None or not counters.numpy().any(), "counters are zero again"
    if planned.merge is not None:
        launch(planned.merge, merge_split_arrays(arrays, workspace))


def merge_attn_states(problem: MergeStates) -> None:
    """One launch of the kernel of the same name."""
    if problem.out.shape[0]:
        launch(plan_merge(problem), merge_arrays(problem))


def gather_cache(problem: GatherCache) -> None:
    """One launch of the kernel of the same name."""
    given = {name: getattr(problem, name) for name in ("block_table", "cu_seq_lens", "seq_starts")}
    indices.check_scales(problem.cache, ArrayView.numpy)
    indices.check_gather(problem, *(array and array.numpy() for array in given.values()))
    if problem.num_rows == 0 or problem.num_seqs == 0:
        return
    problem = replace(problem, **{name: array and _as(np.int32, array) for name, array in given.items()})
    launch(plan_gather(problem), gather_arrays(problem))


def convert_layout(problem: ConvertLayout) -> None:
    """One launch of the kernel of the same name."""
    if problem.source.shape.num_blocks:
        launch(plan_convert(problem), convert_arrays(problem))


def advance_decode(problem: AdvanceDecode) -> None:
    """One launch of the kernel of the same name."""
    indices.check_advance(problem, problem.block_table.numpy(), problem.seq_lens.numpy())
    launch(plan_advance(problem), advance_arrays(problem))


def copy_blocks(problem: BlockMove) -> None:
    """One launch of ``move_blocks`` for each form of blocks; what overlaps goes through a temporary."""
    _move_blocks(problem)


def swap_blocks(problem: BlockMove) -> None:
    """One launch of ``move_blocks`` for each form of blocks."""
    _move_blocks(problem)


def _move_blocks(problem: BlockMove) -> None:
    pairs, temporary = _as(np.int64, problem.mapping).numpy(), []
    indices.check_pairs(problem, pairs)

    def allocate(nbytes: int) -> int:
        temporary.append(view(aligned_garbage(nbytes), "temporary"))
        return temporary[-1].pointer

    groups = plan_groups(places_of(problem), problem.touches_host)
    for step in plan_move(problem, groups, pairs, allocate):
        mapping = view(np.ascontiguousarray(step.pairs), "mapping")
        for group in step.groups:
            addresses = view(group.addresses, "addresses")
            launch(group.launch(len(step.pairs)), [addresses, mapping], reached=[*problem.arrays, *temporary])


def warmup(launches: list[Launch], device: int | None) -> None:
    """Compiles the kernels of these launches."""
    if device is not None:
        raise ValueError(f"device: expected None, the interpreter runs on the host, got {device}")
    for planned in launches:
        _kernel(planned.instance)


def _as(dtype: type, array: ArrayView) -> ArrayView:
    return view(array.numpy().astype(dtype, copy=False), "indices")


def _workspace(problem: Attention, nbytes: int) -> ArrayView | None:
    """The caller's or a new one, which holds garbage on purpose: kernels read no more than they have written."""
    if problem.workspace is None and nbytes:
        return view(aligned_garbage(nbytes), "workspace")
    return problem.workspace


def aligned_garbage(nbytes: int) -> np.ndarray:
    """Bytes that begin at a multiple of 16, as an allocation on a device does."""
    garbage = np.full(nbytes + 16, 0xFF, np.uint8)
    start = -garbage.ctypes.data % 16
    return garbage[start : start + nbytes]


def launch(planned: Launch, arrays: list[ArrayView | None], reached: Sequence[ArrayView] = ()) -> None:
    """Runs one launch. A kernel's parameters are its arrays, None for a null pointer, and then its struct.

    reached: arrays whose addresses the kernel finds in another.
    """
    kernel = _kernel(planned.instance)
    *offsets, struct_offset = kernel.params.values()
    pointers = [0 if array is None else array.pointer for array in arrays]
    params = bytearray(kernel.param_bytes)
    for offset, pointer in zip(offsets, pointers, strict=True):
        params[offset : offset + 8] = pointer.to_bytes(8, "little")
    params[struct_offset:] = planned.params.tobytes()
    given = [array for array in (*arrays, *reached) if array is not None]
    counters = None if _profile.get() is None else Counters(kernel)
    shared = planned.shared_bytes
    Machine(kernel, planned.grid, planned.threads, bytes(params), given, SEED, shared, counters).run()
    if counters is not None:
        _profile.get().append(LaunchProfile(planned, counters))


@dataclass(frozen=True, slots=True)
class LaunchProfile:
    """What one launch was, and what it asked of the hardware."""

    planned: Launch
    counters: Counters


@contextmanager
def profiled() -> Iterator[list[LaunchProfile]]:
    """Counts inside the block; the list gains an entry for each launch."""
    token = _profile.set([])
    try:
        yield _profile.get()
    finally:
        _profile.reset(token)


@cache
def _kernel(instance: Instance) -> Kernel:
    source = expanded_source(instance.file)
    return parse_kernel(*nvrtc.compile_ptx(source, instance.file, instance.expression, ARCH))
