"""What the plans of decode and of varlen reads share: what they plan, checks of addresses, fields of parameters."""

from dataclasses import dataclass

from .arrays import ArrayView
from .dtypes import is_fp8
from .launch import Launch, element_of
from .layout import PACK_BYTES
from .problem import Attention, PagedCache, Scale


@dataclass(frozen=True, slots=True)
class ReadLaunch:
    """A launch, what merges its states if that is another kernel, and what goes before if it leaves sequences to that.

    The kernel's pointers are the problem's arrays, the workspace and, unless ``num_counters`` is None, as many
    counters, zero before and after.
    """

    launch: Launch
    workspace_bytes: int
    num_counters: int | None = None
    merge: Launch | None = None
    before: "ReadLaunch | None" = None


def check_addresses(problem: Attention, named: dict[str, ArrayView | None]) -> None:
    """ValueError for an array that does not begin with an element, or a workspace that does not with a pack.

    ``named``: the arrays whose names are the op's own; the others are named here.
    """
    named = named | {"out": problem.out, "lse_out": problem.lse_out, "alibi_slopes": problem.options.alibi_slopes}
    named |= {scale.name: scale.array for scale in (problem.cache.k_scale, problem.cache.v_scale)}
    for name, array in named.items():
        if array is not None:
            element_of(array, name)
    if problem.workspace is not None and problem.workspace.pointer % PACK_BYTES:
        expected = f"an address that is a multiple of {PACK_BYTES}"
        raise ValueError(f"workspace: expected {expected}, got {problem.workspace.pointer}")


def are_aligned(problem: Attention, cache_axes: int) -> bool:
    """Whether every pack of 16 bytes begins at a multiple of 16: addresses, and strides of the cache's outer axes."""
    arrays = [(array, 2) for array in (problem.query, problem.out)]
    arrays += [(side, cache_axes) for side in (problem.cache.key, problem.cache.value)]
    return all(
        array.pointer % PACK_BYTES == 0
        and all(stride * array.dtype.itemsize % PACK_BYTES == 0 for stride in array.strides[:axes])
        for array, axes in arrays
    )


def scale_arrays(cache: PagedCache) -> list[ArrayView | None]:
    """Those of K and V that the kernel reads. What is not quantised has no scale."""
    return [cache.k_scale.array, cache.v_scale.array] if is_fp8(cache.format) else [None, None]


def result_fields(problem: Attention) -> tuple[int, ...]:
    """Strides of output and LSE, of slopes and sinks; 0 where there are none."""
    options = problem.options
    return (
        *problem.out.strides[:2],
        *((0, 0) if problem.lse_out is None else problem.lse_out.strides),
        *(0 if array is None else array.strides[0] for array in (options.alibi_slopes, options.sinks)),
    )


def score_fields(problem: Attention) -> tuple[float, ...]:
    """The factor of scores and their cap, then the values of K's and V's scales and their strides between heads."""
    sides = (problem.cache.k_scale, problem.cache.v_scale)
    values, strides = zip(*(_scale(scale, problem.cache) for scale in sides), strict=True)
    return (problem.options.scale, problem.options.softcap, *values, *strides)


def _scale(scale: Scale, cache: PagedCache) -> tuple[float, int]:
    if not is_fp8(cache.format):
        return 1.0, 0
    return scale.value, scale.array.strides[0] if scale.per_head else 0
