"""A decode step laid out where the arrays live, for steps that run without the host, in a CUDA graph."""

from typing import Any

from . import checks
from .arrays import ArrayView, view
from .dispatch import run_on_backend
from .dtypes import INT32, INT64, LARGEST_INT32
from .problem import AdvanceDecode
from .repeats import MISS, Call


def advance_decode(
    block_table: Any,
    seq_lens: Any,
    slot_mapping: Any,
    query_start_loc: Any,
    *,
    block_size: int,
    positions: Any = None,
) -> None:
    """Gives every sequence of a batch one more token: new lengths, slots and starts of queries, in place.

    block_table: int32 ``[num_seqs, max_blocks]``; it must already name the blocks of the new tokens
        (``BlockTable.reserve``).
    seq_lens: int32 ``[num_seqs]``, contiguous; each gains 1, but for those of 0, which are padding and stay.
    slot_mapping: int64 ``[num_seqs]``, contiguous; the slots of the new tokens, in order, and then -1.
    query_start_loc: int32 ``[num_seqs + 1]``, contiguous; a query for each sequence but padding.
    block_size: tokens of a block.
    positions: int64 ``[num_seqs]``, contiguous; where the new tokens stand, in order, and then 0. None: not wanted.

    So a write with these slots, a read with these lengths and starts and this call before them are a decode step that
    can be captured once and replayed. Raises ValueError (shape, strides, read-only arrays) or TypeError (dtype, mixed
    devices, JAX arrays); on the host and inside ``checked()`` also IndexError for a sequence whose row is full or has
    no block for the new token. On a device such a token gets the slot -1, and a full row keeps its length.

    >>> table.reserve(table.rows, 10)
    >>> block_table, seq_lens = cupy.asarray(table.block_table), cupy.asarray(table.seq_lens, numpy.int32)
    >>> advance_decode(block_table, seq_lens, slot_mapping, query_start_loc, block_size=16)  # in a graph, ten times
    >>> table.append(table.rows, 10)  # what the device has done meanwhile
    """
    arrays = (block_table, seq_lens, slot_mapping, positions, query_start_loc)
    call = Call("advance_decode", arrays, (block_size,))
    if call.replay() is MISS:
        problem = validated_advance(*arrays, block_size)
        call.remember(run_on_backend("advance_decode", problem, problem.seq_lens))


def validated_advance(
    block_table: Any, seq_lens: Any, slot_mapping: Any, positions: Any, query_start_loc: Any, block_size: int
) -> AdvanceDecode:
    """The problem of ``advance_decode``."""
    table = view(block_table, "block_table")
    checks.check_dtype(table, "block_table", (INT32,))
    lens = _vector(seq_lens, "seq_lens", INT32, None)
    num_seqs = lens.shape[0]
    checks.check_shape(table, "block_table", (num_seqs, None))
    slots = _vector(slot_mapping, "slot_mapping", INT64, num_seqs)
    starts = _vector(query_start_loc, "query_start_loc", INT32, num_seqs + 1)
    at = None if positions is None else _vector(positions, "positions", INT64, num_seqs)
    arrays = {"seq_lens": lens, "block_table": table, "slot_mapping": slots, "query_start_loc": starts, "positions": at}
    checks.check_same_device(arrays)
    size = checks.check_size(block_size, "block_size", minimum=1)
    if size * max(1, table.shape[1]) > LARGEST_INT32:
        raise ValueError(checks.wrong("block_size", f"rows of at most {LARGEST_INT32} tokens", f"blocks of {size}"))
    return AdvanceDecode(table, lens, slots, starts, at, size)


def _vector(array: Any, name: str, dtype: Any, size: int | None) -> ArrayView:
    vector = view(array, name)
    checks.check_dtype(vector, name, (dtype,))
    checks.check_shape(vector, name, (size,))
    checks.check_contiguous(vector, name)
    checks.check_writable(vector, name)
    return vector
