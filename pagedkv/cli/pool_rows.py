"""What ``pagedkv bench pool`` measures, and how fast that is to be: a pool's bookkeeping and moves of blocks."""

from dataclasses import asdict, dataclass

from pagedkv.dtypes import BFLOAT16

from .markdown import Record

BLOCK_SIZE = 16
SHARE = 0.9  # of a plain copy of the same bytes, that a move is to reach
TO_HOST, TO_DEVICE = "to host", "to device"


@dataclass(frozen=True, slots=True)
class StepRow:
    """A decode step: a token more for each sequence, and what kernels have to know of it."""

    num_seqs: int
    target_us: float
    least_context: int = 1000
    most_context: int = 4000

    @property
    def name(self) -> str:
        return f"step-{self.num_seqs}"

    @property
    def what(self) -> str:
        return f"`BlockTable.step`, a token for each of {self.num_seqs:,} sequences"


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """A request whose tokens are all known: the blocks that hold them are found, taken and given back."""

    num_tokens: int = 1 << 17
    target_us: float = 3000

    name = "prefix"

    @property
    def num_blocks(self) -> int:
        return self.num_tokens // BLOCK_SIZE

    @property
    def what(self) -> str:
        return f"`longest_prefix`, `touch` and `free` of {self.num_blocks:,} blocks, hashes given"

    @property
    def what_hashing(self) -> str:
        return f"`PrefixHashes` of {self.num_tokens:,} tokens"


@dataclass(frozen=True, slots=True)
class CopyRow:
    """Blocks copied inside the caches of all layers, no block both read and written."""

    num_pairs: int

    @property
    def name(self) -> str:
        return f"copy-{self.num_pairs}"

    @property
    def what(self) -> str:
        return "`copy_blocks`"


@dataclass(frozen=True, slots=True)
class SwapRow:
    """Blocks of the caches of all layers copied to pinned host memory, or back."""

    direction: str
    num_pairs: int = 256

    @property
    def name(self) -> str:
        return f"swap-{self.direction.replace(' ', '-')}"

    @property
    def what(self) -> str:
        return f"`swap_blocks`, {self.direction}"


@dataclass(frozen=True, slots=True)
class CacheForm:
    """The NHD caches, keys and values of all layers, whose blocks are moved."""

    num_layers: int = 32
    block_size: int = BLOCK_SIZE
    num_kv_heads: int = 8
    head_size: int = 128

    dtype = BFLOAT16

    @property
    def num_caches(self) -> int:
        return 2 * self.num_layers

    @property
    def block_shape(self) -> tuple[int, int, int]:
        return (self.block_size, self.num_kv_heads, self.head_size)

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def shape(self) -> Record:
        """As a record says it."""
        return {"dtype": self.dtype.name, "layout": "NHD", **asdict(self)}


HostRow = StepRow | PrefixRow
MoveRow = CopyRow | SwapRow
# The prefix first: in a heap that loops over lists have been through, hashes take twice as long.
HOST_ROWS: tuple[HostRow, ...] = (PrefixRow(), StepRow(1024, 100), StepRow(8192, 1000))
MOVE_ROWS: tuple[MoveRow, ...] = (CopyRow(256), CopyRow(2048), SwapRow(TO_HOST), SwapRow(TO_DEVICE))
HOST_BY_NAME: dict[str, HostRow] = {row.name: row for row in HOST_ROWS}
MOVES_BY_NAME: dict[str, MoveRow] = {row.name: row for row in MOVE_ROWS}
