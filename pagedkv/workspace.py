"""Workspaces: where partial softmax states wait to be merged. Sizes are a function of shapes alone."""

from .checks import check_choice, check_count, check_size

FLOAT_BYTES = 4
DEFAULT_PARTITION_SIZE = 512  # keys; v2's in NumPy when the caller leaves it open
MOST_CTAS = 512  # of a v2 that divides all keys into equal shares
MOST_ROWS = 32  # query heads that one of them takes at once
OPS = ("paged_attention_v2", "flash_attn_varlen_func")


def partials_nbytes(num_tokens: int, num_heads: int, head_size: int, num_partials: int) -> int:
    """Bytes of ``tmp_out`` ``[num_tokens, num_heads, num_partials, head_size]`` and of ``max_logits`` and ``exp_sums``
    ``[num_tokens, num_heads, num_partials]``, all float32, in this order."""
    return num_tokens * num_heads * num_partials * (2 + head_size) * FLOAT_BYTES


def shares_nbytes(head_size: int) -> int:
    """Bytes of the two states of ``MOST_ROWS`` query heads that each CTA may leave."""
    return partials_nbytes(2 * MOST_CTAS, MOST_ROWS, head_size, 1)


def workspace_nbytes(
    op: str,
    *,
    num_tokens: int,
    num_heads: int,
    head_size: int,
    max_seq_len: int,
    partition_size: int | None = None,
    num_splits: int = 0,
) -> int:
    """Bytes that an op's ``workspace=`` must have at least; 0 where the op needs none.

    op: ``"paged_attention_v2"`` or ``"flash_attn_varlen_func"``.
    num_tokens, num_heads, head_size: the shape of the query.
    max_seq_len: keys, the ``max_seq_len`` hint or ``max_blocks * block_size`` without one.
    partition_size, num_splits: as given to the op.

    ValueError for another op or a negative size, TypeError for one that is no integer. The workspace may hold anything
    before the call; two calls in flight never share one.

    >>> nbytes = workspace_nbytes("paged_attention_v2", num_tokens=8, num_heads=32, head_size=128, max_seq_len=4096)
    >>> workspace = numpy.empty(nbytes, numpy.uint8)
    """
    check_choice(op, "op", OPS)
    sizes = {"num_tokens": num_tokens, "num_heads": num_heads, "head_size": head_size, "max_seq_len": max_seq_len}
    for name, size in sizes.items():
        sizes[name] = check_size(size, name, minimum=0)
    *query_shape, max_seq_len = sizes.values()
    num_splits = check_count(num_splits, "num_splits", minimum=0, none=0)
    if op == "flash_attn_varlen_func" and num_splits > 0:
        return partials_nbytes(*query_shape, num_splits if num_splits > 1 else 0)
    if op == "flash_attn_varlen_func" or partition_size is None:
        return shares_nbytes(sizes["head_size"])
    partition_size = check_count(partition_size, "partition_size", minimum=1, none=None)
    return partials_nbytes(*query_shape, -(-max_seq_len // partition_size))
