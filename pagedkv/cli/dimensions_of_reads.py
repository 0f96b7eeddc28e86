"""The dimensions of the ops that read: decode over packed caches, varlen over NHD and HND, merges of states."""

from dataclasses import replace

from pagedkv.dtypes import BY_NAME

from .dimension import Dimension, Values
from .dimensions_of_writes import HEAD_SIZE, PACKED_BLOCK_SIZES, why_not_head_size, why_not_packed_sizes
from .inputs import SPARE_COLUMNS
from .mistakes_of_reads import DECODE_MISTAKES, MERGE_MISTAKES, VARLEN_MISTAKES

V1, V2, VARLEN, MERGE = "paged_attention_v1", "paged_attention_v2", "flash_attn_varlen_func", "merge_attn_states"
MOST_SCORES = 300_000
MOST_PRODUCTS = 20_000_000  # of a feature of a query and one of a key
MOST_CACHE_ELEMENTS = 600_000
MOST_PARTITIONS = 2000  # of a v2 call: each is a CTA, and the interpreter holds the registers of all at once
HEADS_OF_A_CTA = 8  # at least, where there are as many

BATCH = (
    Dimension("seqs", (1, 0, 2, 3, 5)),
    Dimension("context", (8, 1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 100, 257)),
    Dimension("lengths", ("all", "mixed", "some_empty", "all_empty"), 0.2),
)
HEADS = (
    Dimension("group", (1, 2, 3, 5, 7, 8, 16, 71), decides_instance=True),
    Dimension("kv_heads", (1, 2, 3, 8)),
    HEAD_SIZE,
)
NUMBERS = (
    Dimension("dtype", tuple(BY_NAME), decides_instance=True),
    Dimension("cache", ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"), 0.4, decides_instance=True),
    Dimension("scales", ("none", "number", "one", "head")),
    Dimension("content", ("normal", "large", "one_key", "equal_keys"), 0.5),
)
SCORES = (
    Dimension("scale", ("default", "small", "negative"), 0.7),
    Dimension("softcap", ("none", "weak", "strong"), 0.5),
    Dimension("alibi", ("no", "yes")),
    Dimension("left", (-1, 0, 1, 7, 15, 16, 300), 0.3),
    Dimension("right", (-1, 0, 1, 5), 0.5),
    Dimension("sinks", ("none", "float32", "query_dtype"), 0.3),
)
MEMORY = (
    Dimension("query", ("contiguous", "qkv", "ragged", "backwards"), 0.4),
    Dimension("offset", (0, 1, 2, 4), 0.6),
    Dimension("caches", ("contiguous", "padded", "ragged", "halves", "swapped", "backwards", "own"), 0.3),
    Dimension("cache_offset", (0, 1, 2, 4), 0.6),
    Dimension("tables", ("int32", "int64", "int16", "strided")),
    Dimension("evicted", ("no", "yes")),
    Dimension("results", ("returned", "given", "strided")),
    Dimension("hints", ("none", "exact", "large")),
)
WORKSPACE = Dimension("workspace", ("none", "given"))


def _mistake(mistakes: dict) -> Dimension:
    return Dimension("mistake", ("none", *mistakes), 0.85)


BLOCK_SIZES = Dimension("block_size", PACKED_BLOCK_SIZES, decides_instance=True)
DECODE = (*BATCH, *HEADS, BLOCK_SIZES, *NUMBERS, *SCORES, *MEMORY)
FLASH = (
    *BATCH,
    Dimension("queries", ("one", "ragged", "all", "more_than_keys", "none")),
    *HEADS,
    Dimension("block_size", (16, 1, 3, 8, 17, 32)),
    Dimension("layout", ("NHD", "HND")),
    *NUMBERS,
    Dimension("causal", ("no", "yes")),
    *SCORES,
    *MEMORY,
    Dimension("padding", (0, 1, 3)),
    WORKSPACE,
    Dimension("splits", (0, 1, 2, 3, 7, 40), 0.3),
)
DIMENSIONS = {
    V1: (*DECODE, _mistake(DECODE_MISTAKES)),
    V2: (*DECODE, WORKSPACE, Dimension("partition", (0, 1, 8, 16, 33, 64), 0.2), _mistake(DECODE_MISTAKES)),
    VARLEN: (*FLASH, _mistake(VARLEN_MISTAKES)),
    MERGE: (
        Dimension("tokens", (1, 0, 2, 3, 17, 64)),
        Dimension("heads", (1, 2, 3, 8, 40)),
        Dimension("head_size", (16, 8, 40, 64, 128, 256), decides_instance=True),
        Dimension("dtype", tuple(BY_NAME), decides_instance=True),
        Dimension("lse", ("normal", "large", "apart")),
        Dimension("empty", ("none", "some", "prefix", "suffix", "both"), 0.3),
        Dimension("infinity", ("minus", "plus")),
        Dimension("lse_axes", ("usual", "swapped", "backwards")),
        *(replace(dimension, name="outputs") for dimension in MEMORY if dimension.name == "query"),
        Dimension("offset", (0, 1, 2, 4), 0.6),
        Dimension("results", ("returned", "given", "strided")),
        _mistake(MERGE_MISTAKES),
    ),
}


def _why_not_read(values: Values) -> str | None:
    tokens, row = values["seqs"] * values["context"], values["kv_heads"] * values["head_size"]
    why = why_not_head_size(values)
    if why is not None:
        return why
    if values["cache"] != "auto" and values["dtype"] == "float32":
        return "cache: an fp8 cache takes queries of 16 bits"
    if tokens * row * values["group"] > MOST_PRODUCTS or tokens * row > MOST_CACHE_ELEMENTS:
        return f"{values['seqs']} sequences of {values['context']} tokens are too many for these heads"
    return None


def _why_not_decode(values: Values) -> str | None:
    return why_not_packed_sizes(values) or _why_not_read(values)


def _why_not_v2(values: Values) -> str | None:
    columns = -(-values["context"] // values["block_size"]) + SPARE_COLUMNS
    units = values["seqs"] * values["kv_heads"] * -(-values["group"] // HEADS_OF_A_CTA)
    if values["partition"] and units * columns * values["block_size"] // values["partition"] > MOST_PARTITIONS:
        return f"partition: {values['partition']} tokens are too few for these heads and blocks"
    return _why_not_decode(values)


def _why_not_varlen(values: Values) -> str | None:
    queries = {"all": values["context"], "more_than_keys": values["context"] + 3, "ragged": values["context"]}
    most = queries.get(values["queries"], 1) * values["seqs"] * values["context"] * values["group"] * values["kv_heads"]
    if most > MOST_SCORES:
        return f"queries: {values['queries']} of {values['context']} tokens are too many for these heads"
    return _why_not_read(values)


WHY_NOT = {V1: _why_not_decode, V2: _why_not_v2, VARLEN: _why_not_varlen, MERGE: why_not_head_size}
