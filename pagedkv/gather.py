"""Paged keys and values as dense arrays, and whole caches from one layout to another."""

from collections.abc import Sequence
from typing import Any

from . import validate_gather
from .arrays import ArrayView, deliver
from .dispatch import run_on_backend
from .repeats import MISS, Call


def gather_cache(
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    cu_seq_lens: Any,
    *,
    seq_starts: Any = None,
    num_tokens: int | None = None,
    dtype: Any = None,
    kv_cache_dtype: str = "auto",
    k_scale: Any = None,
    v_scale: Any = None,
    layout: str = "NHD",
    key_out: Any = None,
    value_out: Any = None,
) -> tuple[Any, Any]:
    """Keys and values of ranges of sequences, one range after the other; returns ``(key, value)``.

    key_cache, value_cache: as written by ``reshape_and_cache_flash`` with the same ``layout`` or, packed, by
        ``reshape_and_cache``.
    block_table: ``[num_seqs, max_blocks]``, signed integers; entries outside the ranges may be anything.
    cu_seq_lens: ``[num_seqs + 1]``, signed integers; the row of the output where each sequence's range starts, and the
        end of the last one.
    seq_starts: ``[num_seqs]``, signed integers; the token that each range begins with. None: the first one.
    num_tokens: rows of the output, at least ``cu_seq_lens[-1]``; those past it are not written. None: as many as
        ``key_out`` or ``value_out`` has, or else ``cu_seq_lens[-1]``, which must then be on the host.
    dtype: of the output for an fp8 cache: float16, bfloat16 or float32, a dtype of NumPy, torch or JAX or its name.
        None: that of ``key_out`` or ``value_out``, or else bfloat16, which no code and scale overflow. Other caches
        give the bits they hold.
    kv_cache_dtype, k_scale, v_scale: as in ``reshape_and_cache``. An fp8 number is ``code * scale`` in float32, rounded
        once to ``dtype``; a NaN code gives some NaN.
    layout: ``"NHD"``, ``"HND"`` or ``"packed"``.
    key_out, value_out: where results go: ``[num_tokens, num_kv_heads, head_size]``, last axis contiguous.

    Row i of sequence s is token ``seq_starts[s] + i - cu_seq_lens[s]`` of that sequence.

    Raises, before anything is written, ValueError (shape, value, read-only target, on a device no ``num_tokens`` and no
    output), TypeError (dtype, kind, mixed devices, JAX target; on cuda indices that are not int32 under graph capture)
    or NotImplementedError (legal, not built: another ``dtype`` than an unquantised cache's). On the host and inside
    ``checked()`` also IndexError for a block outside the cache or a token past its row of the table, and ValueError for
    ``cu_seq_lens`` that do not rise from 0 to at most the rows of the output and for a negative start. Not checked:
    whether arrays overlap. The op is vLLM's ``gather_cache``, for keys and values at once.

    >>> cu_seq_lens = numpy.array([0, 100, 356], numpy.int32)
    >>> key, value = gather_cache(key_cache, value_cache, block_table, cu_seq_lens)
    >>> gather_cache(key_cache, value_cache, block_table, cu_seq_lens, key_out=key, value_out=value)
    """
    arrays = (key_cache, value_cache, block_table, cu_seq_lens, seq_starts, k_scale, v_scale, key_out, value_out)
    options = {"num_tokens": num_tokens, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "layout": layout}
    call = Call("gather_cache", arrays, tuple(options.values()))
    results, like = call.replay(), None
    if results is MISS:
        gather = validate_gather.gather_cache(*arrays, **options)
        call.remember(run_on_backend("gather_cache", gather, gather.cache.key))
        results, like = (gather.key_out, gather.value_out), gather.cache.key
    return _delivered(results, (key_out, value_out), like)


def convert_layout(
    key_cache: Any,
    value_cache: Any,
    layout: str,
    to: str,
    *,
    key_out: Any = None,
    value_out: Any = None,
) -> tuple[Any, Any]:
    """Whole caches in another layout, bit for bit; returns ``(key_cache, value_cache)``.

    key_cache, value_cache: in ``layout``, float16, bfloat16, float32, uint8 or float8, any strides that reads take.
    layout, to: ``"NHD"``, ``"HND"`` or ``"packed"``; of the same name twice it is a plain copy.
    key_out, value_out: where results go: caches in the layout ``to``, of the same sizes and dtype, any strides that
        reads take. They must not overlap the sources or each other, of which only the same address is noticed.

    Raises, before anything is written, ValueError (shape, value, read-only target, a target that begins where a source
        or the other target does, sizes that the packed layout has not: ``head_size`` that ``16 // itemsize`` does not
        divide, ``block_size`` other than a power of two from 8 to 256) or TypeError (dtype, mixed devices, JAX target).

    >>> packed_key_cache, packed_value_cache = convert_layout(key_cache, value_cache, "NHD", "packed")
    >>> convert_layout(packed_key_cache, packed_value_cache, "packed", "HND", key_out=key_hnd, value_out=value_hnd)
    """
    arrays = (key_cache, value_cache, key_out, value_out)
    call = Call("convert_layout", arrays, (layout, to))
    # Which arrays share memory is not part of their forms.
    results, like = MISS if validate_gather.share_memory(call.pointers) else call.replay(), None
    if results is MISS:
        conversion = validate_gather.convert_layout(*arrays, layout=layout, to=to)
        call.remember(run_on_backend("convert_layout", conversion, conversion.source.key))
        results, like = (conversion.target.key, conversion.target.value), conversion.source.key
    return _delivered(results, (key_out, value_out), like)


def _delivered(results: Sequence[Any], given: Sequence[Any], like: ArrayView | None) -> tuple[Any, Any]:
    """The two results as the caller of ``like`` expects them; an array that the caller passed goes back as it is."""
    key, value = (
        deliver(result, like or result) if array is None else array
        for result, array in zip(results, given, strict=True)
    )
    return key, value
