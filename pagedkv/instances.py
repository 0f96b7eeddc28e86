"""The kernel instances that CI compiles and ``pagedkv compile`` lists: the most used of each kernel.

At most MAX_INSTANCES in all; any other instance compiles when it is first asked for.
"""

import numpy as np

from .decode_plan import decode_instance_for, varlen_decode_instance_for
from .dtypes import BFLOAT16, CUDA_NAMES, E4M3, E5M2, FLOAT16, FLOAT32, FLOATS
from .gather_plan import convert_instance_for, gather_instance_for
from .kernels import Instance
from .launch import widest_vec
from .merge_plan import merge_instance_for
from .moves_plan import move_instance_for
from .step_plan import advance_instance
from .varlen_plan import merge_splits_instance_for, varlen_instance_for
from .write_plan import flash_write_instance_for, packed_write_instance_for

MAX_INSTANCES = 90
BLOCK_SIZE = 16
HOT_HEAD_SIZES = (64, 128)

WRITES = (  # key dtype, cache format, head size
    (FLOAT16, FLOAT16, 128),
    (FLOAT16, E4M3, 128),
    (FLOAT16, E5M2, 128),
    (BFLOAT16, BFLOAT16, 128),
    (BFLOAT16, E4M3, 128),
    (BFLOAT16, E5M2, 128),
    (FLOAT32, FLOAT32, 128),
    (BFLOAT16, BFLOAT16, 64),
    (BFLOAT16, E4M3, 64),
)
PLAIN, QUANTISED = WRITES[3], WRITES[4]  # of which there are variants
FORMATS = tuple((dtype, kv_format) for dtype in (FLOAT16, BFLOAT16) for kv_format in (dtype, E4M3, E5M2))  # of decode


def _flash(dtype: np.dtype, kv_format: np.dtype, head_size: int, vec: int | None = None, **variant: bool) -> Instance:
    return flash_write_instance_for(dtype, kv_format, head_size, vec or widest_vec(dtype), **variant)


def _packed(dtype: np.dtype, kv_format: np.dtype, head_size: int, vec: int | None = None, **variant: bool) -> Instance:
    return packed_write_instance_for(dtype, kv_format, head_size, BLOCK_SIZE, vec or widest_vec(dtype), **variant)


def _decode(
    dtype: np.dtype, kv_format: np.dtype, head_size: int, block_size: int = BLOCK_SIZE, group: int = 8, **variant: bool
) -> Instance:
    return decode_instance_for(dtype, kv_format, head_size, block_size, group, **variant)


FLASH_WRITES = [
    *(_flash(*write) for write in WRITES),
    _flash(*PLAIN, vec=1),
    *(_flash(*write, few=True) for write in (PLAIN, QUANTISED)),
    _flash(*QUANTISED, scale_per_head=True),
]
PACKED_WRITES = [
    *(_packed(*write) for write in WRITES),
    _packed(*PLAIN, vec=1),
    *(_packed(*write, few=True) for write in (PLAIN, QUANTISED)),
]
DECODES = [  # a group of 8 query heads and less, and one of more
    *(_decode(dtype, kv_format, head_size) for dtype, kv_format in FORMATS for head_size in HOT_HEAD_SIZES),
    *(_decode(dtype, kv_format, 128, group=16) for dtype, kv_format in FORMATS),
    *(_decode(BFLOAT16, kv_format, 256) for kv_format in (BFLOAT16, E4M3)),
    *(_decode(BFLOAT16, kv_format, 128, block_size) for kv_format in (BFLOAT16, E4M3) for block_size in (8, 32, 128)),
    *(_decode(BFLOAT16, kv_format, 128, is_aligned=False) for kv_format in (BFLOAT16, E4M3)),
    _decode(FLOAT32, FLOAT32, 128),
]
MERGES = [*(merge_instance_for(dtype, widest_vec(dtype)) for dtype in FLOATS), merge_instance_for(BFLOAT16, vec=1)]
VARLEN_DECODES = [
    *(varlen_decode_instance_for(dtype, kv, 128, group=8) for dtype in (FLOAT16, BFLOAT16) for kv in (dtype, E4M3)),
    *(varlen_decode_instance_for(BFLOAT16, kv_format, 64, group=8) for kv_format in (BFLOAT16, E4M3)),
    varlen_decode_instance_for(BFLOAT16, BFLOAT16, 128, group=16),
]
VARLENS = [  # tiles of 64 rows, and of 128
    *(varlen_instance_for(dtype, dtype, 128, 64, tiles) for dtype in (FLOAT16, BFLOAT16) for tiles in (1, 2)),
    *(varlen_instance_for(BFLOAT16, E4M3, 128, 32, tiles) for tiles in (1, 2)),
    varlen_instance_for(BFLOAT16, BFLOAT16, 128, 32, 2, has_options=True),
    varlen_instance_for(BFLOAT16, BFLOAT16, 64, 64, 2),
    varlen_instance_for(BFLOAT16, BFLOAT16, 256, 32, 1),
    varlen_instance_for(FLOAT32, FLOAT32, 128, 32, 1),
    merge_splits_instance_for(BFLOAT16, 128),
]
MOVES = [move_instance_for(pack_bytes) for pack_bytes in (16, 1)]
GATHERS = [
    *(gather_instance_for(BFLOAT16, kv_format, 8, is_packed=False) for kv_format in (BFLOAT16, E4M3)),
    gather_instance_for(BFLOAT16, E4M3, 8, is_packed=True),
    *(convert_instance_for(BFLOAT16, 8, from_packed=packed, to_packed=not packed) for packed in (False, True)),
]
STEPS = [advance_instance()]
# One of each kernel that measures what the card allows; the others differ in how many loads they unroll.
CEILINGS = [
    Instance("ceilings.cu", "read_packs", (8,)),
    Instance("ceilings.cu", "copy_packs", (8,)),
    Instance("ceilings.cu", "read_blocks", (8,)),
    Instance("ceilings.cu", "empty_kernel", (0,)),
]

READS = [*DECODES, *MERGES, *VARLEN_DECODES, *VARLENS]
INSTANCES = [*FLASH_WRITES, *PACKED_WRITES, *READS, *MOVES, *GATHERS, *STEPS, *CEILINGS]


def is_hot(instance: Instance) -> bool:
    """Whether spilling registers would be a fault: a 16-bit or fp8 cache with heads of 64 or 128."""
    dtypes = [argument for argument in instance.arguments if argument in CUDA_NAMES.values()]
    sizes = [argument for argument in instance.arguments if type(argument) is int]  # a flag is no size
    return bool(dtypes) and dtypes[-1] != CUDA_NAMES[FLOAT32] and sizes[0] in HOT_HEAD_SIZES
