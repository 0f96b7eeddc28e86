"""How ``advance_decode`` is launched: kernel instance and parameters, from the validated problem. Needs no CuPy."""

from .arrays import ArrayView
from .kernels import Instance
from .launch import Launch, as_bytes, element_of
from .params import ADVANCE_PARAMS, fast_divisor
from .problem import AdvanceDecode

THREADS = 1024


def plan_advance(problem: AdvanceDecode) -> Launch:
    """One CTA: a prefix sum over thousands of sequences takes it a few rounds."""
    names = ("block_table", "seq_lens", "slot_mapping", "query_start_loc", "positions")
    for name in names:
        if (array := getattr(problem, name)) is not None:
            element_of(array, name)
    divisor = fast_divisor(problem.block_size)
    fields = (*problem.block_table.strides, divisor, problem.num_seqs, problem.max_blocks)
    return Launch(advance_instance(), (1,), THREADS, as_bytes(fields, ADVANCE_PARAMS))


def advance_instance() -> Instance:
    """The only one."""
    return Instance("step.cu", "advance_decode", (THREADS,))


def advance_arrays(problem: AdvanceDecode) -> list[ArrayView | None]:
    """The kernel's pointer parameters in order, None for a null pointer."""
    return [problem.block_table, problem.seq_lens, problem.slot_mapping, problem.positions, problem.query_start_loc]
