"""Wrong calls of the ops that read; see ``mistakes.py``."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .inputs import on_host
from .mistakes import Arguments, Change, Mistakes, cast, instead, like, read_only, without_last


@dataclass(frozen=True, slots=True)
class Names:
    """What an op calls its arguments."""

    query: str
    keys: str
    values: str
    table: str
    lengths: str
    hint: str
    sinks: str


OF_DECODE = Names("query", "key_cache", "value_cache", "block_tables", "seq_lens", "max_seq_len", "sinks")
OF_VARLEN = Names("q", "k", "v", "block_table", "seqused_k", "max_seqlen_k", "s_aux")


def _shared(names: Names) -> Mistakes:
    """The mistakes that decode and varlen can make, in the words of one."""
    query, table = names.query, names.table
    return {
        "float_lengths": (cast(names.lengths, "float32"), TypeError),
        "unsigned_table": (cast(table, "uint32"), TypeError),
        "length_past_table": (_other_length(names, 1), IndexError),
        "negative_length": (_other_length(names, -1), ValueError),
        "foreign_blocks": (_foreign_blocks(names), IndexError),
        "short_hint": (_short_hint(names), ValueError),
        "fewer_tables": (without_last(0, table), ValueError),
        "float64_query": (cast(query, "float64"), TypeError),
        "heads_without_group": (_heads_without_group(names), ValueError),
        "head_size": (lambda arguments: {query: arguments[query][..., :-8]}, ValueError),
        "fewer_blocks_of_values": (without_last(0, names.values), ValueError),
        "float64_slopes": (lambda arguments: {"alibi_slopes": like(arguments[query], [0.5], np.float64)}, TypeError),
        "sinks_of_one_head_more": (_one_head_more(names), ValueError),
        "half_a_window": (instead(window_size=(1,)), ValueError),
        "negative_softcap": (instead(softcap=-1.0), ValueError),
        "unknown_format": (instead(kv_cache_dtype="fp9"), ValueError),
        "output_of_other_shape": (lambda arguments: {"out": arguments[query][..., :-8].copy()}, ValueError),
        "lse_dtype": (lambda arguments: {"lse_out": like(arguments[query], [[0]], np.int32)}, TypeError),
        "read_only_output": (read_only(query, "out"), ValueError),
    }


def _other_length(names: Names, length: int) -> Change:
    """A last sequence of a negative length, or so much longer than a row of the table holds."""

    def change(arguments: Arguments) -> Arguments | None:
        lengths = _in_host_memory(arguments[names.lengths])
        if lengths.size == 0:
            return None
        capacity = arguments[names.table].shape[1] * _cache_axes(arguments, names)[0]
        lengths[-1] = length if length < 0 else capacity + length
        return {names.lengths: like(arguments[names.lengths], lengths)}

    return change


def _foreign_blocks(names: Names) -> Change:
    """A table of ids that the cache does not have."""

    def change(arguments: Arguments) -> Arguments | None:
        if not _has_work(arguments, names):
            return None
        foreign = np.full(arguments[names.table].shape, arguments[names.keys].shape[0])
        return {names.table: like(arguments[names.table], foreign)}

    return change


def _short_hint(names: Names) -> Change:
    def change(arguments: Arguments) -> Arguments | None:
        longest = int(_in_host_memory(arguments[names.lengths]).max(initial=0))
        return {names.hint: longest - 1} if longest else None

    return change


def _heads_without_group(names: Names) -> Change:
    def change(arguments: Arguments) -> Arguments | None:
        has_groups = _cache_axes(arguments, names)[1] > 1
        return without_last(1, names.query)(arguments) if has_groups else None

    return change


def _one_head_more(names: Names) -> Change:
    def change(arguments: Arguments) -> Arguments:
        num_heads = arguments[names.query].shape[1]
        return {names.sinks: like(arguments[names.query], np.zeros(num_heads + 1), np.float32)}

    return change


def _cache_axes(arguments: Arguments, names: Names) -> tuple[int, int]:
    """Block size and kv heads."""
    _, *axes = arguments[names.keys].shape
    if len(axes) == 4:  # packed
        return axes[2], axes[0]
    return (axes[0], axes[1]) if arguments["layout"] == "NHD" else (axes[1], axes[0])


def _has_work(arguments: Arguments, names: Names) -> bool:
    """Whether some sequence has both keys and queries."""
    counts = np.diff(_in_host_memory(arguments["cu_seqlens_q"])) if "cu_seqlens_q" in arguments else 1
    return bool((_in_host_memory(arguments[names.lengths]) * counts > 0).any())


def _falling_starts(arguments: Arguments) -> Arguments | None:
    starts = _in_host_memory(arguments["cu_seqlens_q"])
    return {"cu_seqlens_q": like(arguments["cu_seqlens_q"], starts[::-1])} if starts[-1] else None


def _in_host_memory(indices: Any) -> np.ndarray:
    """A copy that can hold any number."""
    return np.array(on_host(indices), np.int64)


def _float_workspace(arguments: Arguments) -> Arguments:
    return {"workspace": like(arguments["seqused_k"], [0.0], np.float32)}


DECODE_MISTAKES = _shared(OF_DECODE)
VARLEN_MISTAKES = _shared(OF_VARLEN) | {
    "float_workspace": (_float_workspace, TypeError),
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
