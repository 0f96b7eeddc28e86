"""The batches that ``pagedkv bench prefill`` measures, and how fast each is to be.

A target is a rate, for 16-bit caches with heads of 128 and blocks of 16 on an H200: about that of the fastest peer
there whose kernel also runs on every card since sm_80.
"""

from dataclasses import dataclass

from .bench_shape import is_plain, shape_name
from .markdown import Record


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """All ``length`` tokens of each of ``num_seqs`` sequences at once, each seeing those before it."""

    num_seqs: int
    length: int
    num_heads: int
    num_kv_heads: int
    target: float | None = None  # TFLOP/s

    @property
    def name(self) -> str:
        heads = (self.num_heads, self.num_kv_heads)
        return f"{self.num_seqs}x{self.length}" + ("" if heads == HEADS else f"-{heads[0]}/{heads[1]}")

    def flops(self, head_size: int) -> int:
        """Of both products: half of a square of scores is seen."""
        return 4 * self.num_seqs * self.num_heads * self.length**2 * head_size // 2


HEADS = (32, 8)
ROWS = (
    PrefillRow(16, 1024, *HEADS, 270),
    PrefillRow(8, 2048, *HEADS, 310),
    PrefillRow(4, 4096, *HEADS, 330),
    PrefillRow(2, 8192, *HEADS, 335),
    PrefillRow(1, 16384, *HEADS, 345),
)
ROWS_BY_NAME = {row.name: row for row in ROWS}


def target_tflops(name: str, shape: Record) -> float | None:
    """The rate that a row should reach, or None where nothing was set."""
    row = ROWS_BY_NAME.get(name)
    return row.target if row is not None and is_plain(shape) else None


def record_name(shape: Record) -> str:
    """``prefill``, and of another shape what sets it apart."""
    return shape_name("prefill", shape, layout="NHD")
