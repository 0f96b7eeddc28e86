"""How a merge of two attention states is launched: kernel instance, grid and parameters, from the validated problem.

Needs no CuPy: the backends that run kernels and the list of instances that CI compiles share it.
"""

import numpy as np

from .arrays import ArrayView
from .dtypes import CUDA_NAMES
from .kernels import Instance
from .launch import LARGEST_GRID, Launch, as_bytes, common_vec, element_of
from .params import MERGE_PARAMS, fast_divisor
from .problem import MergeStates

THREADS = 128


def plan_merge(problem: MergeStates) -> Launch:
    """A thread for each pack of features."""
    instance = merge_instance(problem)
    num_tokens, num_heads, head_size = problem.out.shape
    packs_per_row = head_size // instance.arguments[1]
    num_packs = num_tokens * num_heads * packs_per_row
    ctas = -(-num_packs // THREADS)
    if ctas > LARGEST_GRID:
        raise ValueError(f"prefix_output: expected fewer numbers in one call, got {num_packs} packs")
    sides = [
        _side(problem.prefix_output, problem.prefix_lse),
        _side(problem.suffix_output, problem.suffix_lse),
        _side(problem.out, problem.lse_out),
    ]
    fields = (*sides, fast_divisor(packs_per_row), fast_divisor(num_heads), num_packs)
    return Launch(instance, (ctas,), THREADS, as_bytes(fields, MERGE_PARAMS))


def merge_instance(problem: MergeStates) -> Instance:
    """The instance for a problem's dtype and the alignment of its outputs."""
    outputs = {"prefix_output": problem.prefix_output, "suffix_output": problem.suffix_output, "out": problem.out}
    elements = [element_of(array, name) for name, array in outputs.items()]
    lses = {"prefix_lse": problem.prefix_lse, "suffix_lse": problem.suffix_lse, "lse_out": problem.lse_out}
    for name, array in lses.items():
        element_of(array, name)
    elements.append(problem.out.shape[2])
    return merge_instance_for(problem.out.dtype, common_vec(list(outputs.values()), elements))


def merge_instance_for(dtype: np.dtype, vec: int) -> Instance:
    """The kernel that moves ``vec`` elements at once."""
    return Instance("merge.cu", "merge_attn_states", (CUDA_NAMES[dtype], vec))


def merge_arrays(problem: MergeStates) -> list[ArrayView]:
    """The kernel's pointer parameters in order."""
    inputs = [problem.prefix_output, problem.prefix_lse, problem.suffix_output, problem.suffix_lse]
    return [*inputs, problem.out, problem.lse_out]


def _side(output: ArrayView, lse: ArrayView) -> tuple[int, ...]:
    return (*output.strides[:2], *lse.strides)
