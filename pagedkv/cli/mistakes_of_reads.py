"""Wrong calls of the ops that read; see ``mistakes.py``."""

from typing import Any

import numpy as np

from .mistakes import Arguments, Mistakes, cast, instead, like, read_only, without_last

# What decode and varlen call the same thing.
NAMES = {"lengths": ("seq_lens", "seqused_k"), "table": ("block_tables", "block_table"), "query": ("query", "q"),
         "keys": ("key_cache", "k"), "values": ("value_cache", "v"), "hint": ("max_seq_len", "max_seqlen_k"),
         "sinks": ("sinks", "s_aux")}  # fmt: skip


def _shared(varlen: bool) -> Mistakes:
    """The mistakes that both can make, in the words of one."""
    name = {meaning: names[varlen] for meaning, names in NAMES.items()}
    lengths, table, query, keys = name["lengths"], name["table"], name["query"], name["keys"]

    def other_length(length: int) -> Any:
        def change(arguments: Arguments) -> Arguments | None:
            wrong = _long(arguments[lengths])
            if wrong.size == 0:
                return None
            block_size = _block_size(arguments, keys)
            wrong[-1] = length if length < 0 else arguments[table].shape[1] * block_size + length
            return {lengths: like(arguments[lengths], wrong)}

        return change

    def foreign_blocks(arguments: Arguments) -> Arguments | None:
        if not _has_work(arguments, lengths):
            return None
        foreign = np.full(arguments[table].shape, arguments[keys].shape[0])
        return {table: like(arguments[table], foreign)}

    def short_hint(arguments: Arguments) -> Arguments | None:
        longest = int(_long(arguments[lengths]).max(initial=0))
        return {name["hint"]: longest - 1} if longest else None

    def heads_without_group(arguments: Arguments) -> Arguments | None:
        return None if _kv_heads(arguments, keys) == 1 else without_last(1, query)(arguments)

    return {
        "float_lengths": (cast(lengths, "float32"), TypeError),
        "unsigned_table": (cast(table, "uint32"), TypeError),
        "length_past_table": (other_length(1), IndexError),
        "negative_length": (other_length(-1), ValueError),
        "foreign_blocks": (foreign_blocks, IndexError),
        "short_hint": (short_hint, ValueError),
        "fewer_tables": (without_last(0, table), ValueError),
        "float64_query": (cast(query, "float64"), TypeError),
        "heads_without_group": (heads_without_group, ValueError),
        "head_size": (lambda arguments: {query: arguments[query][..., :-8]}, ValueError),
        "fewer_blocks_of_values": (without_last(0, name["values"]), ValueError),
        "float64_slopes": (instead(alibi_slopes=np.zeros(1)), TypeError),
        "sinks_of_one_head_more": (_one_head_more(query, name["sinks"]), ValueError),
        "half_a_window": (instead(window_size=(1,)), ValueError),
        "negative_softcap": (instead(softcap=-1.0), ValueError),
        "unknown_format": (instead(kv_cache_dtype="fp9"), ValueError),
        "output_of_other_shape": (lambda arguments: {"out": arguments[query][..., :-8].copy()}, ValueError),
        "lse_dtype": (lambda arguments: {"lse_out": like(arguments[query], [[0]], np.int32)}, TypeError),
        "read_only_output": (read_only(query, "out"), ValueError),
        "small_workspace": (lambda arguments: {"workspace": like(arguments[query], [0.0], np.float32)}, TypeError),
    }


def _long(indices: Any) -> np.ndarray:
    """A copy in host memory that holds any number."""
    return np.array(indices if isinstance(indices, np.ndarray) else indices.get(), np.int64)


def _block_size(arguments: Arguments, keys: str) -> int:
    shape = arguments[keys].shape
    return shape[3] if len(shape) == 5 else shape[1 if arguments["layout"] == "NHD" else 2]


def _kv_heads(arguments: Arguments, keys: str) -> int:
    shape = arguments[keys].shape
    return shape[1] if len(shape) == 5 else shape[2 if arguments["layout"] == "NHD" else 1]


def _has_work(arguments: Arguments, lengths: str) -> bool:
    """Whether some sequence has both keys and queries."""
    counts = np.diff(_long(arguments["cu_seqlens_q"])) if "cu_seqlens_q" in arguments else 1
    return bool((_long(arguments[lengths]) * counts > 0).any())


def _one_head_more(query: str, sinks: str) -> Any:
    return lambda arguments: {sinks: like(arguments[query], np.zeros(arguments[query].shape[1] + 1), np.float32)}


def _falling_starts(arguments: Arguments) -> Arguments | None:
    starts = _long(arguments["cu_seqlens_q"])
    return {"cu_seqlens_q": like(arguments["cu_seqlens_q"], starts[::-1])} if starts[-1] else None


DECODE_MISTAKES = {name: mistake for name, mistake in _shared(varlen=False).items() if name != "small_workspace"}
VARLEN_MISTAKES = _shared(varlen=True) | {
    "falling_starts": (_falling_starts, ValueError),
    "fewer_starts": (without_last(0, "cu_seqlens_q"), ValueError),
    "negative_splits": (instead(num_splits=-1), ValueError),
    "unknown_layout": (instead(layout="packed"), ValueError),
}
MERGE_MISTAKES: Mistakes = {
    "float64_lse": (cast("prefix_lse", "float64"), TypeError),
    "fewer_lse": (without_last(1, "suffix_lse"), ValueError),
    "fewer_heads": (without_last(1, "suffix_output"), ValueError),
    "float64_output": (cast("suffix_output", "float64"), TypeError),
    "output_of_other_shape": (lambda given: {"out": given["prefix_output"][..., :-8].copy()}, ValueError),
    "read_only_output": (read_only("prefix_output", "out"), ValueError),
}
