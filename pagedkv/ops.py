"""The public ops. Each builds a validated problem and hands it to the backend of its arrays.

Arrays may come from NumPy, CuPy, torch, JAX or anything with DLPack or ``__cuda_array_interface__``; the first argument
decides device, stream and the framework of what is returned. Errors come before anything is written. What slots, block
ids and lengths hold is checked on the host and inside ``checked()``; elsewhere reading it would synchronise.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

from . import validate
from .arrays import ArrayView, deliver
from .dispatch import run_on_backend
from .problem import Attention
from .repeats import MISS, Call


@dataclass(frozen=True)
class ReadForm:
    """The arguments of a read by their names: arrays in the order in which a backend gets their addresses, all others,
    and of those the one that asks for an LSE."""

    arrays: tuple[str, ...]
    options: tuple[str, ...]
    return_lse: str


DECODE = ReadForm(
    (
        *("query", "key_cache", "value_cache", "block_tables", "seq_lens"),
        *("alibi_slopes", "sinks", "k_scale", "v_scale", "out", "lse_out", "workspace"),
    ),
    ("scale", "max_seq_len", "window_size", "softcap", "kv_cache_dtype", "return_lse", "partition_size"),
    "return_lse",
)
VARLEN = ReadForm(
    (
        *("q", "k", "v", "block_table", "seqused_k", "cu_seqlens_q"),
        *("alibi_slopes", "s_aux", "k_descale", "v_descale", "out", "lse_out", "workspace"),
    ),
    (
        *("max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal", "window_size", "softcap"),
        *("kv_cache_dtype", "num_splits", "return_softmax_lse", "layout"),
    ),
    "return_softmax_lse",
)
# Where ``paged_attention`` is v1.
SHORT_TOKENS, FEW_KV_HEADS = 256, 128


def reshape_and_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str = "auto",
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """Writes new keys and values into a packed cache, the layout that ``paged_attention_v1`` and ``v2`` read.

    key, value: ``[num_tokens or more, num_kv_heads, head_size]``, float16, bfloat16 or float32, last axis contiguous.
    key_cache: ``[num_blocks, num_kv_heads, head_size / x, block_size, x]``, ``x = 16 // itemsize``, of the key's dtype
        or uint8 / float8; written. The three inner axes are contiguous, as are the two of the values.
    value_cache: ``[num_blocks, num_kv_heads, head_size, block_size]``, same dtype; written.
    slot_mapping: ``[num_tokens]``, signed integers; block ``slot // block_size``, offset ``slot % block_size``,
        negative for none. It may be shorter than key: rows past it are padding.
    kv_cache_dtype: ``"auto"`` (the cache has the key's dtype), ``"fp8"`` = ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
    k_scale, v_scale: None (1), a positive number, or float32 ``[1]`` or ``[num_kv_heads]``, both per head or neither;
        an fp8 cache holds ``saturate(x / scale)``, others ignore them.

    Raises, before anything is written, ValueError (shape, value, read-only target), TypeError (dtype, kind, mixed
    devices, JAX target; on cuda slots that are not int64 under graph capture) or NotImplementedError (legal, not
    built). On the host and inside ``checked()`` also IndexError for a slot past the cache and ValueError for one named
    twice, which elsewhere is undefined. Not checked: whether arrays overlap. Layout and op are those of vLLM's removed
    ``cache_kernels``.

    >>> key_cache = numpy.zeros((num_blocks, 8, 128 // 8, 16, 8), numpy.float16)
    >>> value_cache = numpy.zeros((num_blocks, 8, 128, 16), numpy.float16)
    >>> reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
    """
    arrays = (key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    _write("reshape_and_cache", arrays, kv_cache_dtype=kv_cache_dtype, packed=True)


def reshape_and_cache_flash(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str = "auto",
    k_scale: Any = None,
    v_scale: Any = None,
    *,
    layout: str = "NHD",
) -> None:
    """Writes new keys and values into an NHD or HND cache, the layouts that ``flash_attn_varlen_func`` reads.

    key, value: ``[num_tokens or more, num_kv_heads, head_size]``, float16, bfloat16 or float32, last axis contiguous.
    key_cache, value_cache: ``[num_blocks, block_size, num_kv_heads, head_size]`` (``layout="NHD"``) or
        ``[num_blocks, num_kv_heads, block_size, head_size]`` (``"HND"``), of the key's dtype or uint8 / float8;
        written. Any strides whose last axis is contiguous, each cache its own.
    layout: ``"NHD"`` or ``"HND"``, the order of the two middle axes of both caches.
    slot_mapping, kv_cache_dtype, k_scale, v_scale: as in ``reshape_and_cache``, which also says what is raised.

    The op is vLLM's ``reshape_and_cache_flash``.

    >>> cache = numpy.zeros((2, num_blocks, 16, 8, 128), numpy.float16)
    >>> slot_mapping = block_table[positions // 16] * 16 + positions % 16
    >>> reshape_and_cache_flash(key, value, cache[0], cache[1], slot_mapping)
    """
    arrays = (key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    _write("reshape_and_cache_flash", arrays, kv_cache_dtype=kv_cache_dtype, packed=False, layout=layout)


def paged_attention_v1(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    *,
    scale: float | None = None,
    max_seq_len: int | None = None,
    alibi_slopes: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Any = None,
    kv_cache_dtype: str = "auto",
    k_scale: Any = None,
    v_scale: Any = None,
    out: Any = None,
    lse_out: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attention of one query token per sequence over a packed cache, in a single pass over each sequence.

    query: ``[num_seqs, num_heads, head_size]``, float16, bfloat16 or float32; ``num_kv_heads`` divides ``num_heads``.
    key_cache, value_cache: packed, as written by ``reshape_and_cache``.
    block_tables: ``[num_seqs, max_blocks]``, signed integers; entries beyond what is visible may be anything.
    seq_lens: ``[num_seqs]``, signed integers; tokens of each sequence in the cache, the query's own included.
    scale: factor of ``q . k``; None for ``head_size ** -0.5``.
    max_seq_len: tokens; a bound on ``seq_lens`` that sizes buffers and never changes a result.
    alibi_slopes: float32 ``[num_heads]``; ``-slope * |query_pos - key_pos|`` is added to the score.
    window_size: ``(left, right)`` tokens around the query, inclusive, -1 for no bound.
    softcap: ``cap * tanh(score / cap)``; 0 for none.
    sinks: float32 or the query's dtype, ``[num_heads]``; one logit per head that enters the denominator only.
    kv_cache_dtype, k_scale, v_scale: as in ``reshape_and_cache``; reading multiplies by the scale.
    out, lse_out: where results go: the query's shape and dtype, and float32 ``[num_heads, num_seqs]``.
    return_lse: also return the natural logarithm of the softmax denominator, ``[num_heads, num_seqs]``.

    A sequence without visible keys gives 0 and an LSE of -inf (of the sink, where there is one). Raises, before
    anything is written, ValueError (shape, value, read-only target), TypeError (dtype, kind, mixed devices, JAX target)
    or NotImplementedError (legal, not built: a float32 query on an fp8 cache); on the host and inside ``checked()``
    IndexError for a visible block id or a length outside the cache or the table. After Kwon et al., "Efficient Memory
    Management for Large Language Model Serving with PagedAttention" (2023).

    >>> out = paged_attention_v1(query, key_cache, value_cache, block_tables, seq_lens)
    >>> out, lse = paged_attention_v1(query, key_cache, value_cache, block_tables, seq_lens, return_lse=True)
    """
    return _read("paged_attention_v1", locals(), DECODE, partial(validate.paged_attention, single_pass=True))


def paged_attention_v2(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    *,
    scale: float | None = None,
    max_seq_len: int | None = None,
    alibi_slopes: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Any = None,
    kv_cache_dtype: str = "auto",
    k_scale: Any = None,
    v_scale: Any = None,
    out: Any = None,
    lse_out: Any = None,
    return_lse: bool = False,
    partition_size: int | None = None,
    workspace: Any = None,
) -> Any:
    """Attention of one query token per sequence over a packed cache, by partitions that a reduce step merges.

    All that ``paged_attention_v1`` takes, and

    partition_size: tokens a partition; None leaves it to the op. With one ``partition_size`` and ``max_seq_len`` a
        sequence's result has the same bits whatever else is in the batch.
    workspace: flat uint8 of at least ``workspace_nbytes("paged_attention_v2", ...)`` bytes, of any content; allocated
        where None. ValueError if it is too small.

    Partition and reduce are those of vLLM's removed ``attention_kernels``; the merge is the one of Flash-Decoding.

    >>> out = paged_attention_v2(query, key_cache, value_cache, block_tables, seq_lens, partition_size=256)
    """
    return _read("paged_attention_v2", locals(), DECODE, partial(validate.paged_attention, single_pass=False))


def paged_attention(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    **options: Any,
) -> Any:
    """``paged_attention_v1`` for few short sequences, ``paged_attention_v2`` for all others.

    query, key_cache, value_cache, block_tables, seq_lens: as in ``paged_attention_v1``, which also says what is raised.

    Keyword arguments are those of ``paged_attention_v2``, and so is what is returned.

    >>> out = paged_attention(query, key_cache, value_cache, block_tables, seq_lens, softcap=30.0)
    """
    cuts = options.get("partition_size") is not None or options.get("workspace") is not None
    if cuts or not _are_few_and_short(query, value_cache, block_tables, options.get("max_seq_len")):
        return paged_attention_v2(query, key_cache, value_cache, block_tables, seq_lens, **options)
    options = {name: option for name, option in options.items() if name not in ("partition_size", "workspace")}
    return paged_attention_v1(query, key_cache, value_cache, block_tables, seq_lens, **options)


def _are_few_and_short(query: Any, value_cache: Any, block_tables: Any, max_seq_len: Any) -> bool:
    """Whether a call takes less time uncut: by `pagedkv bench decode --crossover`, whose record is in ``results``.

    Short sequences take v1 2 to 12 % less time, while their kv heads are no more than the SMs of a card. Of long ones
    v2 takes at most 2 % longer, where all have one length and fill a card, and elsewhere less, down to a seventh.
    """
    shapes = [getattr(array, "shape", ()) for array in (query, value_cache, block_tables)]
    if [len(shape) for shape in shapes] != [3, 4, 2]:
        return False  # an error, for the op to tell
    (num_seqs, _, _), (_, num_kv_heads, _, block_size), (_, max_blocks) = shapes
    longest = max_seq_len if isinstance(max_seq_len, Integral) else max_blocks * block_size
    return longest <= SHORT_TOKENS and num_seqs * num_kv_heads <= FEW_KV_HEADS


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any,
    seqused_k: Any,
    block_table: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    s_aux: Any = None,
    kv_cache_dtype: str = "auto",
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int = 0,
    out: Any = None,
    lse_out: Any = None,
    workspace: Any = None,
    return_softmax_lse: bool = False,
    layout: str = "NHD",
) -> Any:
    """Attention of packed queries of any lengths over an NHD or HND cache: prefill, decode and mixed batches.

    q: ``[num_tokens, num_heads, head_size]``, float16, bfloat16 or float32; rows past ``cu_seqlens_q[-1]`` are padding,
        whose output is not written.
    k, v: caches as written by ``reshape_and_cache_flash`` with the same ``layout``.
    cu_seqlens_q: ``[num_seqs + 1]``, signed integers; where each sequence's queries start, and the last one's end.
    seqused_k: ``[num_seqs]``, signed integers; tokens of each sequence in the cache. Query i of n of a sequence stands
        at position ``i + seqused_k - n``: the queries are its last tokens.
    block_table: ``[num_seqs, max_blocks]``, signed integers; entries outside what is visible may be anything.
    max_seqlen_q, max_seqlen_k: tokens; bounds that size launches and never change a result by more than rounding. With
        ``max_seqlen_q=1`` a decode step runs as fast as ``paged_attention_v2``.
    softmax_scale: factor of ``q . k``; None for ``head_size ** -0.5``.
    causal: keys up to the query's own position; the same as a right window bound of 0.
    window_size, softcap, alibi_slopes: as in ``paged_attention_v1``.
    s_aux: the sinks of ``paged_attention_v1``.
    kv_cache_dtype, k_descale, v_descale: the ``kv_cache_dtype``, ``k_scale`` and ``v_scale`` of the write.
    num_splits: parts a sequence's keys are split into. With one above 0 and the same ``max_seqlen_*`` a sequence's
        result has the same bits whatever else is in the batch; 0 leaves it to the op, which then divides the work by
        the whole batch and the card.
    out, lse_out: where results go: the query's shape and dtype, and float32 ``[num_heads, num_tokens]``.
    workspace: flat uint8 of at least ``workspace_nbytes("flash_attn_varlen_func", ...)`` bytes, of any content.
    return_softmax_lse: also return the natural logarithm of the softmax denominator.
    layout: ``"NHD"`` or ``"HND"``, the order of the two middle axes of both caches.

    Raises what ``paged_attention_v1`` raises. Name and arguments are FlashAttention's; after Dao et al.,
    "FlashAttention" (2022).

    >>> out = flash_attn_varlen_func(
    ...     q, k_cache, v_cache, cu_seqlens_q=starts, seqused_k=lens, block_table=table, causal=True
    ... )
    """
    return _read("flash_attn_varlen_func", locals(), VARLEN, validate.varlen_attention)


def merge_attn_states(
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    *,
    out: Any = None,
    lse_out: Any = None,
) -> tuple[Any, Any]:
    """Merges attention over two disjoint sets of keys into attention over both; returns ``(out, lse)``.

    prefix_output, suffix_output: ``[num_tokens, num_heads, head_size]``, float16, bfloat16 or float32.
    prefix_lse, suffix_lse: float32 ``[num_heads, num_tokens]``, natural logarithm, any strides. -inf or +inf: that side
        saw nothing, and its output is not looked at.
    out, lse_out: where results go, in the shapes and dtypes of the prefix.

    Two empty sides give 0 and -inf. Raises ValueError (shape, read-only target) or TypeError (dtype, mixed devices,
    JAX target). After section 2.2 of Ye et al., "Cascade Inference"
    (2024), and vLLM's ``merge_attn_states``.

    >>> out, lse = merge_attn_states(prefix_output, prefix_lse, suffix_output, suffix_lse)
    """
    arrays = (prefix_output, prefix_lse, suffix_output, suffix_lse, out, lse_out)
    call = Call("merge_attn_states", arrays, ())
    results, like = call.replay(), None
    if results is MISS:
        merge = validate.merge_states(*arrays)
        call.remember(run_on_backend("merge_attn_states", merge, merge.prefix_output))
        results, like = (merge.out, merge.lse_out), merge.prefix_output
    out, lse = _returned(results, (out, lse_out), like)
    return out, lse


def _write(op: str, arrays: tuple[Any, ...], **options: Any) -> None:
    call = Call(op, arrays, tuple(options.values()))
    if call.replay() is MISS:
        write = validate.cache_write(*arrays, **options)
        call.remember(run_on_backend(op, write, write.key))


def _read(op: str, given: dict[str, Any], form: ReadForm, validated: Callable[..., Attention]) -> Any:
    call = Call(op, tuple(map(given.get, form.arrays)), tuple(map(given.get, form.options)))
    results, like = call.replay(), None
    if results is MISS:
        read = validated(**given)
        call.remember(run_on_backend(op, read, read.query))
        results, like = (read.out, read.lse_out), read.query
    out, lse = _returned(results, (given["out"], given["lse_out"]), like)
    return (out, lse) if given[form.return_lse] else out


def _returned(results: Sequence[Any], given: Sequence[Any], like: ArrayView | None) -> Iterator[Any]:
    """The results as the caller of ``like`` expects them; an array that the caller passed goes back as it is."""
    for result, array in zip(results, given, strict=True):
        yield array if array is not None or result is None else deliver(result, like or result)
