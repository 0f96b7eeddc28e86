"""How moves of blocks are launched: which caches go together, kernel instance, grid and parameters.

Needs no CuPy: the backends that run kernels and the list of instances that CI compiles share it. What lies in a cache
does not matter here, so that all sizes and strides are in bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from .arrays import ArrayView
from .dtypes import INT64
from .kernels import Instance
from .launch import LARGEST_GRID, Launch, as_bytes
from .layout import PACK_BYTES
from .params import BLOCK_ADDRESSES, BLOCK_MOVE_PARAMS, fast_divisor
from .problem import BlockMove

PACKS_IN_FLIGHT = 4  # of a thread
THREADS = 128  # of a CTA, at most
WARP = 32
# In all CTAs of a launch that reads or writes host memory: what fills a link and leaves the card to other kernels.
HOST_THREADS = 1 << 14

Axis = tuple[int, int, int]  # extent, and bytes between neighbours in source and target
End = tuple[int, tuple[int, ...], tuple[int, ...]]  # address, shape and strides (in elements) of source or target
Place = tuple[End, End, int]  # of a cache, and its itemsize


@dataclass(frozen=True, slots=True)
class BlockForm:
    """What blocks are: ``num_rows`` rows, each of adjoining bytes, some bytes apart in source and target."""

    num_rows: int
    row_bytes: int
    source_row_stride: int = 0
    target_row_stride: int = 0

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class MoveGroup:
    """Caches, or equal parts of their blocks, of one form: they go into one launch."""

    form: BlockForm
    addresses: np.ndarray  # [num_caches] BLOCK_ADDRESSES
    touches_host: bool
    instance: Instance

    def launch(self, num_pairs: int, strides: tuple[int, ...] = (2, 1)) -> Launch:
        """A CTA for each part of a block, or as many as fill a link. ``strides``: those of the mapping."""
        instance, form = self.instance, self.form
        row_packs = form.row_bytes // instance.arguments[0]
        block_packs = form.num_rows * row_packs
        warps = min(-(-block_packs // (WARP * PACKS_IN_FLIGHT)), THREADS // WARP)
        parts = -(-block_packs // (WARP * PACKS_IN_FLIGHT * warps))
        num_items = self.addresses.size * num_pairs * parts
        ctas = min(num_items, HOST_THREADS // (WARP * warps) if self.touches_host else LARGEST_GRID)
        divisors = map(fast_divisor, (row_packs, parts, num_pairs))
        fields = (form.source_row_stride, form.target_row_stride, *strides, block_packs, num_items, *divisors)
        return Launch(instance, (ctas,), WARP * warps, as_bytes(fields, BLOCK_MOVE_PARAMS))


def _group(form: BlockForm, addresses: np.ndarray, touches_host: bool) -> MoveGroup:
    """With the kernel that moves as many bytes at once as all addresses, strides and sizes allow."""
    sizes = (PACK_BYTES, form.row_bytes, form.source_row_stride, form.target_row_stride)
    pack_bytes = np.gcd.reduce([*sizes, *addresses.view(INT64).tolist()])
    return MoveGroup(form, addresses, touches_host, move_instance_for(int(pack_bytes)))


@dataclass(frozen=True, slots=True)
class MoveStep:
    """Launches that may run in any order: one for each group, all with the same pairs."""

    groups: Sequence[MoveGroup]
    pairs: np.ndarray  # [num_pairs, 2] int64


def move_instance(move: BlockMove) -> Instance:
    """The kernel of the first launch of a move."""
    return plan_groups(places_of(move), move.touches_host)[0].instance


def move_instance_for(pack_bytes: int) -> Instance:
    """The kernel that moves ``pack_bytes`` at once."""
    return Instance("moves.cu", "move_blocks", (pack_bytes, PACKS_IN_FLIGHT, THREADS))


# ---- which blocks ---------------------------------------------------------------------------------------------------


def plan_move(
    move: BlockMove, groups: Sequence[MoveGroup], pairs: np.ndarray, allocate: Callable[[int], int]
) -> list[MoveStep]:
    """Steps, one after the other, that leave what reading every source before writing would leave.

    ``allocate`` makes a temporary of so many bytes and returns its address, a multiple of 16.
    """
    if not groups:
        return []
    steps = _copy(groups, pairs, allocate) if move.is_copy else [MoveStep(groups, pairs)]
    return [step for step in steps if len(step.pairs)]


def _copy(groups: Sequence[MoveGroup], pairs: np.ndarray, allocate: Callable[[int], int]) -> list[MoveStep]:
    """A source that another pair writes goes through a temporary, once for all its destinations."""
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    endangered = np.isin(pairs[:, 0], pairs[:, 1])
    if not endangered.any():
        return [MoveStep(groups, pairs)]
    sources, staged = np.unique(pairs[endangered, 0], return_inverse=True)
    temporary = allocate(len(sources) * max(group.addresses.size * group.form.nbytes for group in groups))
    pairs_into = np.stack([sources, np.arange(len(sources))], axis=1)
    pairs_out_of = np.stack([staged.reshape(-1), pairs[endangered, 1]], axis=1)
    steps = []
    for group in groups:  # one after the other, for they share the temporary
        into, out_of = _staged(group, temporary, len(sources))
        steps += [MoveStep([into], pairs_into), MoveStep([group], pairs[~endangered]), MoveStep([out_of], pairs_out_of)]
    return steps


def _staged(group: MoveGroup, temporary: int, num_staged: int) -> tuple[MoveGroup, MoveGroup]:
    """The group with a temporary as its target, and as its source: dense blocks, ``num_staged`` for each cache."""
    form, ends = group.form, {"source": group.addresses.copy(), "target": group.addresses.copy()}
    for end, addresses in ends.items():
        addresses[end] = temporary + np.arange(addresses.size) * (num_staged * form.nbytes)
        addresses[f"{end}_block_stride"] = form.nbytes
    dense = {end: replace(form, **{f"{end}_row_stride": form.row_bytes}) for end in ends}
    into = _group(dense["target"], ends["target"], touches_host=False)
    return into, _group(dense["source"], ends["source"], touches_host=False)


# ---- where they lie -------------------------------------------------------------------------------------------------


def places_of(move: BlockMove) -> tuple[Place, ...]:
    """All that the groups of a move depend on."""
    return tuple((_end(source), _end(target), source.dtype.itemsize) for source, target in move.sides)


def _end(array: ArrayView) -> End:
    return array.pointer, array.shape, array.strides


@lru_cache(maxsize=256)
def plan_groups(places: tuple[Place, ...], touches_host: bool) -> tuple[MoveGroup, ...]:
    """Caches sorted by the form of their blocks. One whose blocks have further strides goes in as several parts."""
    parts: dict[BlockForm, list[tuple[int, ...]]] = {}
    for (source, shape, source_strides), (target, target_shape, target_strides), size in places:
        form, offsets = _form(shape[1:], source_strides[1:], target_strides[1:], size)
        # A single block may have any stride to the next.
        block_strides = (
            size * source_strides[0] if shape[0] > 1 else 0,
            size * target_strides[0] if target_shape[0] > 1 else 0,
        )
        of_form = parts.setdefault(form, [])
        of_form += [(source + of_source, target + of_target, *block_strides) for of_source, of_target in offsets]
    return tuple(
        _group(form, np.array(addresses, BLOCK_ADDRESSES), touches_host)
        for form, addresses in parts.items()
        if addresses and form.nbytes
    )


@lru_cache(maxsize=256)
def _form(
    shape: tuple[int, ...], source_strides: tuple[int, ...], target_strides: tuple[int, ...], size: int
) -> tuple[BlockForm, list[tuple[int, int]]]:
    """The form of blocks of this shape and strides in elements, and where its parts begin in source and target."""
    if 0 in shape:
        return BlockForm(0, 0), []
    axes = zip(shape, source_strides, target_strides, strict=True)
    row_bytes, outer = _merged([(extent, size * source, size * target) for extent, source, target in axes], size)
    # The kernel goes over one axis around a row; each index of the others makes a part of its own.
    outer.sort()
    num_rows, *row_strides = outer.pop() if outer else (1, 0, 0)
    offsets = np.zeros((1, 2), np.int64)
    for extent, *strides in outer:
        offsets = (offsets + np.outer(np.arange(extent), strides)[:, None]).reshape(-1, 2)
    return BlockForm(num_rows, row_bytes, *row_strides), [tuple(offset) for offset in offsets.tolist()]


def _merged(axes: list[Axis], size: int) -> tuple[int, list[Axis]]:
    """Bytes that adjoin in both source and target, and the axes around them, of which those that continue another are
    one with it."""
    row_bytes, outer = size, []
    for extent, source, target in sorted(axes, key=lambda axis: (abs(axis[2]), abs(axis[1]))):
        if extent == 1:
            continue
        if source == target == row_bytes:
            row_bytes *= extent
        elif outer and (source, target) == (outer[-1][0] * outer[-1][1], outer[-1][0] * outer[-1][2]):
            outer[-1] = (outer[-1][0] * extent, *outer[-1][1:])
        else:
            outer.append((extent, source, target))
    return row_bytes, outer
