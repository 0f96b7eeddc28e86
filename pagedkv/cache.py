"""A paged cache as an engine uses it: storage of all layers, the pool of its blocks, and the table of its sequences."""

from collections.abc import Iterable
from functools import partial
from operator import index
from typing import Any

import numpy as np

from .arrays import device_name
from .blocks import BlockPool
from .checks import check_choice, check_size, float_dtype, wrong
from .dtypes import FLOAT32, KV_CACHE_DTYPES, storage_dtype
from .gather import gather_cache
from .layout import LAYOUTS
from .moves import copy_blocks
from .ops import (
    flash_attn_varlen_func,
    paged_attention,
    paged_attention_v1,
    reshape_and_cache,
    reshape_and_cache_flash,
)
from .sequences import SERIALS, Batch, Sequences, new_tokens
from .storage import Layer, allocate_layers, find_device, find_num_blocks, scale_on, to_device
from .table import BlockTable
from .validate import check_window
from .validate_cache import check_block_form, check_scale_pair

UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1}
LONGEST = 131_072  # tokens, unless the caller says: the table has a row as long for every sequence


class PagedKVCache(Sequences):
    """Keys and values of many sequences in blocks of a common pool, layer by layer.

    num_layers: layers, each with a key and a value cache.
    num_blocks: blocks of the pool, or ``"auto"``: as many as fit into ``memory_fraction`` of a device's free memory.
    block_size: tokens of a block.
    num_kv_heads, head_size: of keys and values.
    dtype: float16, bfloat16 or float32, of keys and queries: a dtype of NumPy, torch or JAX or its name.
    kv_cache_dtype: ``"auto"`` or an fp8 format, of what is stored (see ``reshape_and_cache``).
    layout: ``"NHD"``, ``"HND"`` or ``"packed"``, which is for decode alone.
    device: ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or a number; None: CUDA where it is usable.
    k_scale, v_scale: of an fp8 cache: None, numbers, or float32 ``[1]`` or ``[num_kv_heads]``.
    max_seqs: sequences at a time.
    max_seq_len: tokens of the longest one; None: what the pool holds, but at most 131,072.
    block_order: the order in which blocks are first handed out; None: that of their numbers.

    Sequences are called by the numbers that ``add`` and ``fork`` return, each its own until ``free``. A step::

        batch = cache.step(seqs)
        for layer in range(len(cache)):
            ...
            cache.write(layer, key, value, batch)
            out = cache.attend(layer, query, batch)

    Where a step fails for want of blocks, OutOfBlocks is raised and nothing has changed. On a device all work is on
    CuPy's current stream, but for ``write`` and ``attend``, which follow the framework of their arrays. As a context
    manager the cache gives its memory back at the end.

    Raises ValueError (value, shape), TypeError (kind, dtype) or NotImplementedError (legal, not built).

    >>> with PagedKVCache(30, 1024, 16, 3, 64, "float32", device="cpu") as cache:
    ...     seq = cache.add(token_ids)
    ...     batch = cache.step([seq])
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int | str,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: Any = "float16",
        kv_cache_dtype: str = "auto",
        layout: str = "NHD",
        device: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        *,
        max_seqs: int = 256,
        max_seq_len: int | None = None,
        memory_fraction: float = 0.9,
        block_order: Iterable[int] | None = None,
    ) -> None:
        check_choice(layout, "layout", LAYOUTS)
        check_choice(kv_cache_dtype, "kv_cache_dtype", tuple(KV_CACHE_DTYPES))
        self.dtype = float_dtype(dtype, "dtype")
        if self.dtype == FLOAT32 and kv_cache_dtype != "auto":
            raise NotImplementedError(wrong("dtype", "float16 or bfloat16 with an fp8 cache", "float32"))
        self.num_layers = check_size(num_layers, "num_layers", minimum=1)
        self.layout, self.kv_cache_dtype = layout, kv_cache_dtype
        storage = storage_dtype(self.dtype, kv_cache_dtype)
        sizes = (block_size, num_kv_heads, head_size)
        names = ("block_size", "num_kv_heads", "head_size")
        sizes = [check_size(size, name, minimum=1) for size, name in zip(sizes, names, strict=True)]
        check_block_form(layout, *sizes, storage)
        check_scale_pair(k_scale, v_scale, ("k_scale", "v_scale"), sizes[1])
        self._device = find_device(device)
        block_bytes = 2 * self.num_layers * int(np.prod(sizes)) * storage.itemsize
        count = find_num_blocks(num_blocks, block_bytes, self._device, memory_fraction)
        pool = BlockPool(count, order=block_order)
        _, self.num_kv_heads, self.head_size = sizes
        longest = min(count * sizes[0], LONGEST) if max_seq_len is None else max_seq_len
        width = -(-check_size(longest, "max_seq_len", minimum=1) // sizes[0])
        super().__init__(pool, BlockTable(max_seqs, width, sizes[0], pool))
        self._scales = {"k_scale": scale_on(k_scale, self._device), "v_scale": scale_on(v_scale, self._device)}
        self._block_bytes = block_bytes
        self._layers: list[Layer] = allocate_layers(self.num_layers, layout, count, *sizes, storage, self._device)

    # ---- what it is -------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.pool.num_blocks

    @property
    def shape(self) -> tuple[int, ...]:
        """``(num_layers, num_blocks, block_size, num_kv_heads, head_size)``, whatever the layout."""
        return (self.num_layers, self.num_blocks, self.block_size, self.num_kv_heads, self.head_size)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' keys and values."""
        return self.num_blocks * self._block_bytes

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:N"``."""
        return device_name(self._device)

    def __len__(self) -> int:
        return self.num_layers

    def __getitem__(self, layer: int) -> Layer:
        """The caches of a layer, ``.k`` and ``.v``: plain arrays."""
        if not self._layers:
            raise ValueError("the cache is closed")
        if not -self.num_layers <= index(layer) < self.num_layers:
            raise IndexError(wrong("layer", f"from 0 to {self.num_layers - 1}", layer))
        return self._layers[layer]

    def __repr__(self) -> str:
        stored = self.dtype.name if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        form = f"{self.num_layers} layers x {self.num_blocks} {self.layout} blocks x {self.block_size} tokens"
        heads = f"{self.num_kv_heads} heads x {self.head_size}, {stored}, {_bytes(self.nbytes)} on {self.device}"
        used = f"{len(self.table)} sequences in {self.pool.num_used} blocks ({self.pool.usage:.0%})"
        return f"<PagedKVCache: {form}, {heads}; {used}>"

    def __enter__(self) -> "PagedKVCache":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Gives back the memory of all layers. Later steps, writes and reads raise ValueError."""
        self._layers = []

    # ---- a step -----------------------------------------------------------------------------------------------------

    def step(
        self, seqs: Any, num_new: Any = None, *, pad_seqs: int | None = None, pad_tokens: int | None = None
    ) -> Batch:
        """Makes room for new tokens, copies blocks that are no longer to be shared, and lays out what kernels need.

        seqs: sequences, each once. num_new: tokens, an int for all or one for each; None: all that are pending, and for
            sequences without token ids that is an error. pad_seqs, pad_tokens: see ``BlockTable.step``.

        Every layer of a batch is to be written before the next step of its sequences; from then on their full blocks
        are known to later ``add`` calls. ValueError for more tokens than are pending, and for a sequence whose last
        step is not written: ``truncate`` or ``free`` undoes that.
        """
        caches = [cache for layer in range(self.num_layers) for cache in self[layer]]
        seqs = self.table.check_rows(seqs, "seqs").copy()  # the caller may use the array again
        self._check_written(seqs)
        states = [self._prefixes.get(seq) for seq in seqs.tolist()]
        counts = self._counts(seqs, states, num_new)
        lens, copy = self.table.seq_lens[seqs], partial(copy_blocks, caches)
        step = self.table.step(seqs, counts, pad_seqs=pad_seqs, pad_tokens=pad_tokens, copy=copy)
        serial = next(SERIALS)
        self._serials[seqs], self._is_open[seqs], self._written_lens[seqs] = serial, True, lens
        arrays = [step.slot_mapping, step.query_start_loc, step.seq_lens, step.block_table]
        token_ids = new_tokens(states, lens, counts)
        unwritten = set(range(self.num_layers))
        return Batch(seqs, step, token_ids, *to_device(arrays, self._device), states, serial, unwritten)

    def write(self, layer: int, key: Any, value: Any, batch: Batch) -> None:
        """Writes the keys and values of a batch's new tokens into one layer.

        key, value: ``[num_tokens or more, num_kv_heads, head_size]``, see ``reshape_and_cache``.

        ValueError for a batch that has been written in all layers, or is of the past (see ``Batch``).
        """
        self._check_current(batch)
        if not batch._unwritten:  # by now its blocks may be shared
            raise ValueError(wrong("batch", "one that is to be written", "one written in all layers"))
        caches, kinds = self[layer], {"kv_cache_dtype": self.kv_cache_dtype, **self._scales}
        for name, rows in (("key", key), ("value", value)):
            self._check_rows(name, rows, batch)
        if self.layout == "packed":
            reshape_and_cache(key, value, *caches, batch.slot_mapping, **kinds)
        else:
            reshape_and_cache_flash(key, value, *caches, batch.slot_mapping, layout=self.layout, **kinds)
        batch._unwritten.discard(index(layer) % self.num_layers)
        if not batch._unwritten:
            self._is_open[batch.seqs] = False
            self._make_known(batch)

    def attend(
        self,
        layer: int,
        query: Any,
        batch: Batch,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        sinks: Any = None,
        num_splits: int = 0,
        out: Any = None,
        lse_out: Any = None,
        workspace: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """Attention of a batch's new tokens to all tokens of their sequences up to themselves, in one layer.

        query: ``[num_tokens or more, num_heads, head_size]``. Options as in ``paged_attention_v1``.
        num_splits: see ``flash_attn_varlen_func``; with 1 a sequence's result does not depend on the batch. A packed
            cache knows 0 and 1.

        NotImplementedError for other than one new token of each sequence in the packed layout. ValueError for a batch
        of the past or not yet written in this layer, and for a window that would see what ``drop_outside_window`` has
        given back.
        """
        self._check_current(batch)
        self._check_window(batch, window_size)
        self._check_rows("query", query, batch)
        caches = self[layer]
        if index(layer) % self.num_layers in batch._unwritten:
            raise ValueError(wrong("batch", f"one that is written in layer {layer}", "one that is not yet"))
        options = {"window_size": window_size, "softcap": softcap, "alibi_slopes": alibi_slopes, "out": out}
        options |= {"lse_out": lse_out, "kv_cache_dtype": self.kv_cache_dtype}
        if self.layout == "packed":
            options |= {"scale": scale, "sinks": sinks, "return_lse": return_lse, **self._scales}
            return self._decode_packed(query, caches, batch, num_splits, workspace, options)
        return flash_attn_varlen_func(
            query,
            *caches,
            cu_seqlens_q=batch.query_start_loc,
            seqused_k=batch.seq_lens,
            block_table=batch.block_table,
            max_seqlen_q=batch.host.max_query_len,
            softmax_scale=scale,
            causal=True,
            s_aux=sinks,
            num_splits=num_splits,
            workspace=workspace,
            return_softmax_lse=return_lse,
            layout=self.layout,
            k_descale=self._scales["k_scale"],
            v_descale=self._scales["v_scale"],
            **options,
        )

    def gather(self, layer: int, seq: int) -> tuple[Any, Any]:
        """The keys and values of a sequence in one layer, contiguous and of the cache's dtype, each
        ``[num_tokens, num_kv_heads, head_size]`` (see ``gather_cache``).

        ValueError for a sequence that has lost blocks to its window.
        """
        seq = self.table.check_row(seq, "seq")
        count = self.num_tokens(seq)
        row = self.table.block_table[[seq], : -(-count // self.block_size)]
        if (row < 0).any():  # which a kernel would follow
            raise ValueError(wrong("seq", "a sequence with all its blocks", f"sequence {seq}, cut by its window"))
        table, starts = to_device([row, np.array([0, count], np.int32)], self._device)
        kinds = {"kv_cache_dtype": self.kv_cache_dtype, "layout": self.layout, **self._scales}
        dtype = None if self.kv_cache_dtype == "auto" else self.dtype
        return gather_cache(*self[layer], table, starts, num_tokens=count, dtype=dtype, **kinds)

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _check_window(self, batch: Batch, window_size: tuple[int, int]) -> None:
        """A kernel would follow the ids of blocks that were given back."""
        dropped = self.table.tokens_dropped(batch.seqs)
        if not dropped.any():
            return
        left, _ = check_window(window_size)
        first_seen = np.maximum(self._written_lens[batch.seqs] - left, 0) if left >= 0 else np.zeros_like(dropped)
        if (first_seen < dropped).any():
            seq = batch.seqs[np.argmax(first_seen < dropped)]
            raise ValueError(wrong("window_size", f"one that sees what is left of sequence {seq}", window_size))

    def _check_rows(self, name: str, rows: Any, batch: Batch) -> None:
        """What the ops say of these would be of arguments that the caller of a cache does not know."""
        shape, dtype = getattr(rows, "shape", None), getattr(rows, "dtype", None)
        if shape is None or dtype is None:
            raise TypeError(wrong(name, "an array", type(rows).__name__))
        if float_dtype(dtype, name) != self.dtype:
            raise TypeError(wrong(name, f"{self.dtype.name}, the cache's dtype", dtype))
        if len(shape) != 3 or shape[0] < batch.host.num_tokens:
            expected = f"[{batch.host.num_tokens} tokens or more, heads, {self.head_size}]"
            raise ValueError(wrong(name, expected, f"shape {tuple(shape)}"))

    def _decode_packed(
        self, query: Any, caches: Layer, batch: Batch, num_splits: int, workspace: Any, options: dict[str, Any]
    ) -> Any:
        most = batch.host.max_query_len
        if most > 1 or batch.host.num_tokens != batch.host.num_seqs:
            raise NotImplementedError(
                wrong("layout", "'NHD' or 'HND' for other than one new token a sequence", f"'packed' and {most} tokens")
            )
        if num_splits not in (0, 1):
            raise ValueError(wrong("num_splits", "0 or 1 in the packed layout", num_splits))
        arrays = (query, *caches, batch.block_table, batch.seq_lens)
        if num_splits == 1:
            return paged_attention_v1(*arrays, **options)
        return paged_attention(*arrays, workspace=workspace, **options)


def _bytes(count: int) -> str:
    """In the largest unit of which there is one."""
    unit = next((unit for unit in ("GB", "MB", "kB") if count >= UNITS[unit]), "B")
    return f"{count / UNITS[unit]:.3g} {unit}"
