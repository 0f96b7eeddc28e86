"""The dimensions of both cache writes, and which of their values exclude each other."""

import math

import numpy as np

from pagedkv.dtypes import BY_NAME

from .dimension import Dimension, Values
from .mistakes import WRITE_MISTAKES

FLASH, PACKED = "reshape_and_cache_flash", "reshape_and_cache"
PACKED_BLOCK_SIZES = (16, 8, 32, 64, 128, 256)
MOST_NEW_ELEMENTS = 160_000  # of keys: all head sizes at the most tokens; the interpreter needs about a second
MOST_CACHE_ELEMENTS = 1_000_000

# fp8 caches are uint8 and named by kv_cache_dtype, or arrays that carry their own format.
CACHES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2")
CACHE_FORMS = ("contiguous", "padded", "ragged", "halves", "swapped", "backwards", "own")

HEAD_SIZE = Dimension("head_size", (16, 8, 40, 64, 72, 80, 96, 112, 120, 128, 192, 256), decides_instance=True)
SIZES = (
    Dimension("tokens", (1, 0, 2, 3, 5, 8, 13, 17, 33, 64, 100, 513, 528)),
    Dimension("kv_heads", (1, 2, 3, 5, 8, 13, 16, 17, 33, 40, 65, 128)),
    HEAD_SIZE,
)
NUMBERS = (
    Dimension("dtype", tuple(BY_NAME), decides_instance=True),
    Dimension("cache", CACHES, 0.3, decides_instance=True),
    Dimension("scales", ("none", "number", "one", "scalar", "mixed", "head")),
    Dimension("content", ("normal", "wide", "bits", "ties")),
)
SLOTS = (
    Dimension("slots", ("scattered", "consecutive", "runs")),
    Dimension("negative", ("none", "some", "first", "last", "all"), 0.4),
    Dimension("slot_dtype", ("int64", "int32", "int16", "int8"), 0.3),
    Dimension("slot_stride", (1, 2, -1), 0.5),
    Dimension("padding", (0, 1, 5)),
    Dimension("spare_blocks", (0, 1, 3)),
)
ROWS = ("contiguous", "qkv", "padded", "ragged", "heads_first", "backwards", "repeated")
MEMORY = (
    Dimension("key", ROWS, 0.4),
    Dimension("value", ROWS, 0.4),
    Dimension("offset", (0, 1, 2, 3, 4, 7), 0.5),
    Dimension("value_offset", (0, 1, 2, 4), 0.7),
    Dimension("cache_offset", (0, 1, 2, 4), 0.7),
)
MISTAKE = (Dimension("mistake", ("none", *WRITE_MISTAKES), 0.85),)

DIMENSIONS = {
    PACKED: (
        *SIZES,
        Dimension("block_size", PACKED_BLOCK_SIZES, decides_instance=True),
        *NUMBERS,
        *SLOTS,
        *MEMORY,
        Dimension("caches", CACHE_FORMS, 0.3),
        *MISTAKE,
    ),
    FLASH: (
        *SIZES,
        Dimension("block_size", (16, 1, 2, 3, 8, 13, 17, 40, 64)),
        Dimension("layout", ("NHD", "HND")),
        *NUMBERS,
        *SLOTS,
        *MEMORY,
        Dimension("caches", (*CACHE_FORMS, "joined"), 0.3),
        *MISTAKE,
    ),
}


def num_blocks(values: Values) -> int:
    """Blocks of the caches: as many as the tokens fill, and the spare ones."""
    return -(-values["tokens"] // values["block_size"]) + values["spare_blocks"]


def cache_dtype(values: Values) -> np.dtype:
    """What the elements of the caches are, as far as their size goes."""
    return BY_NAME[values["dtype"]] if values["cache"] == "auto" else np.dtype(np.uint8)


def why_not_head_size(values: Values) -> str | None:
    """Why no op takes heads of this size."""
    return f"head_size: expected a multiple of 8, got {values['head_size']}" if values["head_size"] % 8 else None


def why_not(values: Values) -> str | None:
    """Why no write has these values together."""
    row = values["kv_heads"] * values["head_size"]
    num_slots = num_blocks(values) * values["block_size"]
    why = why_not_head_size(values)
    if why is not None:
        return why
    if values["slot_stride"] == 0:
        return "slot_stride: expected another number than 0"
    if num_slots > np.iinfo(values["slot_dtype"]).max:
        return f"slot_dtype: {values['slot_dtype']} cannot hold {num_slots} slots"
    if values["tokens"] * row > MOST_NEW_ELEMENTS or num_slots * row > MOST_CACHE_ELEMENTS:
        return f"{values['tokens']} tokens of {row} elements in {num_slots} slots are too many"
    return None


def why_not_packed_sizes(values: Values) -> str | None:
    """Why no packed cache has these sizes."""
    step = math.lcm(8, 16 // cache_dtype(values).itemsize)
    if values["block_size"] not in PACKED_BLOCK_SIZES:
        return f"block_size: expected one of {PACKED_BLOCK_SIZES}, got {values['block_size']}"
    if values["head_size"] % step:
        return f"head_size: expected a multiple of {step}, got {values['head_size']}"
    return None


def why_not_packed(values: Values) -> str | None:
    """Why no packed write has these values together."""
    return why_not_packed_sizes(values) or why_not(values)


WHY_NOT = {PACKED: why_not_packed, FLASH: why_not}
