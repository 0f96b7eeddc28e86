"""Runs one case on one backend: the call, its check, its time."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from inspect import signature
from statistics import median
from typing import Any

import numpy as np

import pagedkv
from pagedkv import (
    decode_plan,
    gather_plan,
    merge_plan,
    moves_plan,
    nvrtc,
    validate,
    validate_gather,
    validate_moves,
    varlen_plan,
    write_plan,
)
from pagedkv.kernels import Instance

from . import machine
from .cases import Case
from .compare import Comparison

REPEATS = 5
SECONDS = 1.0  # that repeats may take together

# Of each op that has kernels: what chooses the instance, and what makes of arguments the problem that it is chosen for.
INSTANCES: dict[str, tuple[Callable[[Any], Instance], Callable[..., Any]]] = {
    "reshape_and_cache": (write_plan.packed_write_instance, partial(validate.cache_write, packed=True)),
    "reshape_and_cache_flash": (write_plan.flash_write_instance, partial(validate.cache_write, packed=False)),
    "paged_attention_v1": (decode_plan.decode_instance, partial(validate.paged_attention, single_pass=True)),
    "paged_attention_v2": (decode_plan.decode_instance, partial(validate.paged_attention, single_pass=False)),
    "flash_attn_varlen_func": (varlen_plan.varlen_instance, validate.varlen_attention),
    "merge_attn_states": (merge_plan.merge_instance, validate.merge_states),
    "gather_cache": (gather_plan.gather_instance, validate_gather.gather_cache),
    "convert_layout": (gather_plan.convert_instance, validate_gather.convert_layout),
    "copy_blocks": (moves_plan.move_instance, validate_moves.block_copy),
    "swap_blocks": (moves_plan.move_instance, validate_moves.block_swap),
}


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a case. A result that is wrong has no time."""

    case: Case
    backend: str
    comparisons: list[Comparison]
    microseconds: float | None
    instance: str | None

    @property
    def ok(self) -> bool:
        return all(comparison.ok for comparison in self.comparisons)

    @property
    def worst(self) -> Comparison:
        """The first comparison that fails, or the first of all."""
        return next((comparison for comparison in self.comparisons if not comparison.ok), self.comparisons[0])


def default_backend() -> str:
    """Where ops run unless told otherwise."""
    return "cuda" if machine.why_no_cuda() is None else "numpy"


def check_backend(backend: str) -> None:
    """ValueError where the machine has not what a backend needs."""
    if backend == "cuda" and machine.why_no_cuda() is not None:
        raise ValueError(f"--backend cuda: {machine.why_no_cuda()}; see pagedkv info, or use --backend numpy")
    if backend == "ptx" and machine.nvrtc_version() is None:
        raise ValueError(f"--backend ptx: {nvrtc.MISSING}")


def has_kernel(op: str, backend: str) -> bool:
    """Whether a backend has this op."""
    return hasattr(import_module(f"pagedkv.{backend}_ops"), op)


def run_case(case: Case, backend: str) -> Result:
    """Calls the op, checks all that it wrote and, if that is right, times it."""
    arguments = {name: _put(value, backend) for name, value in case.arguments.items()}

    def launch() -> None:
        getattr(pagedkv, case.op)(**arguments)

    with pagedkv.use_backend(backend):
        launch()
        comparisons = case.check({name: _get(arguments[name], backend) for name in case.outputs})
        right = all(comparison.ok for comparison in comparisons)
        microseconds = _microseconds(launch, backend) if right else None
    return Result(case, backend, comparisons, microseconds, kernel_instance(case.op, arguments, backend))


def _put(value: Any, backend: str) -> Any:
    if backend != "cuda" or not isinstance(value, np.ndarray):
        return value
    import cupy

    return cupy.asarray(value)


def _get(array: Any, backend: str) -> np.ndarray:
    return array.get() if backend == "cuda" else array


def kernel_instance(op: str, arguments: dict[str, Any], backend: str) -> str | None:
    """The kernel instance that the op chose for these arrays; None where no kernel ran."""
    if backend == "numpy" or op not in INSTANCES:
        return None
    choose, validated = INSTANCES[op]
    bound = signature(getattr(pagedkv, op)).bind(**arguments)
    bound.apply_defaults()
    return str(choose(validated(**bound.arguments)))


def _microseconds(launch: Callable[[], None], backend: str) -> float:
    if backend == "cuda":
        return _stopwatch().microseconds(launch)
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < SECONDS:
        start = time.perf_counter()
        launch()
        times.append(time.perf_counter() - start)
    return median(times) * 1e6


@cache
def _stopwatch() -> Any:
    from .timing import Stopwatch

    return Stopwatch()
