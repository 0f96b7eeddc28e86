"""By-value kernel parameters: NumPy mirrors of the structs in ``cuda/params.cuh``, confirmed at every compile.

A struct travels as an aligned structured array of one element; ``static_asserts`` states sizes and order, so that a
field added, moved or resized on one side alone does not compile.
"""

from collections.abc import Iterator
from itertools import count

import numpy as np

from .dtypes import FLOAT32, INT32, INT64, UINT32, UINT64


def _struct(**fields: np.dtype) -> np.dtype:
    return np.dtype(list(fields.items()), align=True)


FAST_DIVISOR = _struct(multiplier=UINT64, divisor=UINT32, shift=UINT32)

CACHE_WRITE_SIDE = _struct(
    token_stride=INT64,
    head_stride=INT64,
    cache_block_stride=INT64,
    cache_token_stride=INT64,
    cache_head_stride=INT64,
    scale=FLOAT32,
    scale_stride=INT32,
)

CACHE_WRITE_PARAMS = _struct(
    sides=np.dtype((CACHE_WRITE_SIDE, 2)),
    slot_stride=INT64,
    block_size=FAST_DIVISOR,
    num_kv_heads=FAST_DIVISOR,
    num_tokens=INT32,
    lanes_per_token_log2=INT32,
)

DECODE_PARAMS = _struct(
    query_token_stride=INT64,
    query_head_stride=INT64,
    key_block_stride=INT64,
    key_token_stride=INT64,
    key_head_stride=INT64,
    value_block_stride=INT64,
    value_token_stride=INT64,
    value_head_stride=INT64,
    table_stride=INT64,
    table_step=INT64,
    seq_len_stride=INT64,
    query_start_stride=INT64,
    out_token_stride=INT64,
    out_head_stride=INT64,
    lse_head_stride=INT64,
    lse_token_stride=INT64,
    slope_stride=INT64,
    sink_stride=INT64,
    num_states=INT64,
    block_size=FAST_DIVISOR,
    scale=FLOAT32,
    softcap=FLOAT32,
    k_scale=FLOAT32,
    v_scale=FLOAT32,
    k_scale_stride=INT32,
    v_scale_stride=INT32,
    num_seqs=INT32,
    queries_per_kv=INT32,
    units_per_kv_head=INT32,
    units_per_sequence=INT32,
    units_per_bundle=INT32,
    ctas_per_share=INT32,
    groups_per_sequence=INT32,
    team_warps=INT32,
    window_left=INT32,
    partition_size=INT32,
    num_partitions=INT32,
    num_heads=INT32,
    sinks_are_float32=INT32,
)

VARLEN_PARAMS = _struct(
    query_token_stride=INT64,
    query_head_stride=INT64,
    key_block_stride=INT64,
    key_token_stride=INT64,
    key_head_stride=INT64,
    value_block_stride=INT64,
    value_token_stride=INT64,
    value_head_stride=INT64,
    table_stride=INT64,
    table_step=INT64,
    seq_len_stride=INT64,
    query_start_stride=INT64,
    out_token_stride=INT64,
    out_head_stride=INT64,
    lse_head_stride=INT64,
    lse_token_stride=INT64,
    slope_stride=INT64,
    sink_stride=INT64,
    num_states=INT64,
    block_size=FAST_DIVISOR,
    queries_per_kv=FAST_DIVISOR,
    num_kv_heads=FAST_DIVISOR,
    num_splits=FAST_DIVISOR,
    num_heads=FAST_DIVISOR,
    scale=FLOAT32,
    softcap=FLOAT32,
    k_scale=FLOAT32,
    v_scale=FLOAT32,
    k_scale_stride=INT32,
    v_scale_stride=INT32,
    num_seqs=INT32,
    least_queries=INT32,
    window_left=INT32,
    window_right=INT32,
    sinks_are_float32=INT32,
)

MERGE_SIDE = _struct(token_stride=INT64, head_stride=INT64, lse_head_stride=INT64, lse_token_stride=INT64)

MERGE_PARAMS = _struct(
    prefix=MERGE_SIDE,
    suffix=MERGE_SIDE,
    merged=MERGE_SIDE,
    packs_per_row=FAST_DIVISOR,
    num_heads=FAST_DIVISOR,
    num_packs=INT64,
)

COPY_END = _struct(block_stride=INT64, token_stride=INT64, head_stride=INT64, pack_stride=INT64)

COPY_TILE = _struct(
    packs_per_head=FAST_DIVISOR,
    packs_per_step=FAST_DIVISOR,
    tokens_per_step=UINT32,
    num_heads=UINT32,
    num_tokens=INT32,
)

GATHER_SIDE = _struct(cache=COPY_END, out=COPY_END, scale=FLOAT32, scale_stride=INT32)

GATHER_PARAMS = _struct(
    sides=np.dtype((GATHER_SIDE, 2)),
    table_stride=INT64,
    table_step=INT64,
    row_start_stride=INT64,
    seq_start_stride=INT64,
    block_size=FAST_DIVISOR,
    tile=COPY_TILE,
    num_seqs=INT32,
    num_rows=INT32,
)

CONVERT_SIDE = _struct(source=COPY_END, target=COPY_END)

CONVERT_PARAMS = _struct(sides=np.dtype((CONVERT_SIDE, 2)), block_size=FAST_DIVISOR, tile=COPY_TILE, num_slots=INT64)

ADVANCE_PARAMS = _struct(
    table_stride=INT64, table_step=INT64, block_size=FAST_DIVISOR, num_seqs=INT32, max_blocks=INT32
)

BLOCK_ADDRESSES = _struct(source=INT64, target=INT64, source_block_stride=INT64, target_block_stride=INT64)

BLOCK_MOVE_PARAMS = _struct(
    source_row_stride=INT64,
    target_row_stride=INT64,
    pair_stride=INT64,
    side_stride=INT64,
    block_packs=INT64,
    num_items=INT64,
    row_packs=FAST_DIVISOR,
    parts_per_block=FAST_DIVISOR,
    num_pairs=FAST_DIVISOR,
)

STREAM_PARAMS = _struct(num_packs=INT64, never=UINT32)

BLOCK_READ_PARAMS = _struct(
    num_items=UINT32, max_blocks=UINT32, num_kv_heads=UINT32, packs_per_head=UINT32, block_size=INT32, never=UINT32
)

STRUCTS = {
    "FastDivisor": FAST_DIVISOR,
    "CacheWriteSide": CACHE_WRITE_SIDE,
    "CacheWriteParams": CACHE_WRITE_PARAMS,
    "DecodeParams": DECODE_PARAMS,
    "VarlenParams": VARLEN_PARAMS,
    "MergeSide": MERGE_SIDE,
    "MergeParams": MERGE_PARAMS,
    "CopyEnd": COPY_END,
    "CopyTile": COPY_TILE,
    "GatherSide": GATHER_SIDE,
    "GatherParams": GATHER_PARAMS,
    "ConvertSide": CONVERT_SIDE,
    "ConvertParams": CONVERT_PARAMS,
    "AdvanceParams": ADVANCE_PARAMS,
    "BlockAddresses": BLOCK_ADDRESSES,
    "BlockMoveParams": BLOCK_MOVE_PARAMS,
    "StreamParams": STREAM_PARAMS,
    "BlockReadParams": BLOCK_READ_PARAMS,
}


def fast_divisor(divisor: int) -> tuple[int, int, int]:
    """The fields of a ``FastDivisor``: ``(high(x * multiplier) + x) >> shift`` is ``x // divisor`` for x below 2^63."""
    shift = (divisor - 1).bit_length()
    return (2**64 * (2**shift - divisor)) // divisor + 1, divisor, shift


def static_asserts() -> str:
    """C++ that compiles only if the device's structs are laid out like their mirrors here.

    NVRTC before 13.5 has no offsetof. Sizes and order say as much: a struct filled with 0, 1, 2 ... in declaration
    order must hold field i's number under field i's name, and natural alignment does the rest.
    """
    lines = ['#line 1 "static_asserts generated by pagedkv/params.py"']
    for name, struct in STRUCTS.items():
        lines.append(f'static_assert(sizeof(pagedkv::{name}) == {struct.itemsize}, "size of {name}");')
        numbered = f"pagedkv::{name}{_numbered(struct, count())}"
        for number, (path, field) in enumerate(_leaves(struct)):
            lines.append(f'static_assert({numbered}.{path} == {number}, "order of {name}::{path}");')
            lines.append(f'static_assert(sizeof({numbered}.{path}) == {field.itemsize}, "size of {name}::{path}");')
    return "\n".join(lines) + "\n"


def _leaves(struct: np.dtype, path: str = "") -> Iterator[tuple[str, np.dtype]]:
    for name, field in _parts(struct):
        if field.fields or field.shape:
            yield from _leaves(field, path + name)
        else:
            yield (path + name).removeprefix("."), field


def _parts(struct: np.dtype) -> list[tuple[str, np.dtype]]:
    """Fields of a struct, or elements of an array of them."""
    if struct.shape:
        return [(f"[{i}]", struct.base) for i in range(struct.shape[0])]
    return [(f".{name}", field) for name, (field, *_) in struct.fields.items()]


def _numbered(struct: np.dtype, numbers: Iterator[int]) -> str:
    """An initialiser that fills the struct's leaves with consecutive numbers."""
    parts = (field for _, field in _parts(struct))
    leaf = (_numbered(part, numbers) if part.fields or part.shape else str(next(numbers)) for part in parts)
    return "{" + ", ".join(leaf) + "}"
