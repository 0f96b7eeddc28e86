"""pagedkv: a CuPy raw-kernel toolkit for the paged KV cache of LLM inference."""

from .advance import advance_decode
from .blocks import BlockPool, OutOfBlocks
from .cache import PagedKVCache
from .cascade import cascade_attention
from .context import checked, use_backend
from .gather import convert_layout, gather_cache
from .moves import copy_blocks, swap_blocks
from .ops import (
    flash_attn_varlen_func,
    merge_attn_states,
    paged_attention,
    paged_attention_v1,
    paged_attention_v2,
    reshape_and_cache,
    reshape_and_cache_flash,
)
from .prefix import PrefixHashes
from .step import block_table_to_csr, csr_to_block_table
from .table import BlockTable
from .warmup import warmup
from .workspace import workspace_nbytes

__version__ = "0.1.0"

__all__ = [
    "BlockPool",
    "BlockTable",
    "OutOfBlocks",
    "PagedKVCache",
    "PrefixHashes",
    "advance_decode",
    "block_table_to_csr",
    "cascade_attention",
    "checked",
    "convert_layout",
    "copy_blocks",
    "csr_to_block_table",
    "flash_attn_varlen_func",
    "gather_cache",
    "merge_attn_states",
    "paged_attention",
    "paged_attention_v1",
    "paged_attention_v2",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
    "use_backend",
    "warmup",
    "workspace_nbytes",
]
