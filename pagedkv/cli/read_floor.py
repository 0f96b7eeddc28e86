"""The floor of a decode step: launches of a kernel that only reads the same blocks through a table.

Which of them a card runs fastest is for it to say: a benchmark times all. Needs no CuPy.
"""

from pagedkv.kernels import Instance
from pagedkv.launch import Launch, as_bytes
from pagedkv.layout import PACK_BYTES
from pagedkv.params import BLOCK_READ_PARAMS

WARP = 32
NEVER = 0x7654321  # random packs hardly ever fold to this; a thread whose packs do stores one word
IN_FLIGHT = (2, 4, 8)
# Threads, CTAs per SM (0: a warp for each item, so that the card divides sequences of different lengths).
GRIDS = ((128, 4), (128, 8), (256, 4), (512, 2), (512, 4), (128, 0), (256, 0))
MOST_ITEMS = 2**31 - 1


def read_launches(
    num_seqs: int, max_blocks: int, num_kv_heads: int, block_size: int, head_nbytes: int, num_sms: int
) -> list[Launch]:
    """All launches to try. ``head_nbytes`` are those of the keys of one head in one block, and so of its values."""
    num_items = 2 * num_seqs * max_blocks * num_kv_heads
    if num_items > MOST_ITEMS:
        raise ValueError(f"tables: expected fewer sequences and blocks, got {num_seqs} x {max_blocks}")
    fields = (num_items, max_blocks, num_kv_heads, head_nbytes // PACK_BYTES, block_size, NEVER)
    return [
        Launch(
            Instance("ceilings.cu", "read_blocks", (in_flight,)),
            (_ctas(num_items, threads, per_sm * num_sms),),
            threads,
            as_bytes(fields, BLOCK_READ_PARAMS),
        )
        for in_flight in IN_FLIGHT
        for threads, per_sm in GRIDS
    ]


def _ctas(num_items: int, threads: int, at_most: int) -> int:
    """CTAs with a warp for each item, or as many as the card is to hold."""
    ctas = -(-num_items * WARP // threads)
    return min(ctas, at_most) if at_most else ctas
