"""pagedkv: a CuPy raw-kernel toolkit for the paged KV cache of LLM inference."""

from .cascade import cascade_attention
from .context import checked, use_backend
from .ops import (
    flash_attn_varlen_func,
    merge_attn_states,
    paged_attention,
    paged_attention_v1,
    paged_attention_v2,
    reshape_and_cache,
    reshape_and_cache_flash,
)
from .warmup import warmup
from .workspace import workspace_nbytes

__version__ = "0.1.0"

__all__ = [
    "cascade_attention",
    "checked",
    "flash_attn_varlen_func",
    "merge_attn_states",
    "paged_attention",
    "paged_attention_v1",
    "paged_attention_v2",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "use_backend",
    "warmup",
    "workspace_nbytes",
]
