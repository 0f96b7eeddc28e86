"""Moves of whole blocks: inside caches, as copy-on-write and defragmentation need them, and between two pools."""

from typing import Any

from . import validate_moves
from .dispatch import run_on_backend


def copy_blocks(caches: Any, mapping: Any) -> None:
    """Copies blocks inside each of some caches, all by the same mapping, as if every source were read before a write.

    caches: arrays ``[num_blocks, ...]``, in a sequence or a mapping, of pairs if you like, or a single one: key and
        value caches of all layers; written. Any dtypes, layouts and strides, each its own; alike in ``num_blocks`` and
        device.
    mapping: ``[num_pairs, 2]``, signed integers: pairs (source, destination), in a list or an array on the host or the
        caches' device. A source may have several destinations; (a, a) changes nothing.

    Runs on the current stream of the first cache's framework. Sources that another pair writes go through a temporary,
    one kind of blocks after the other: it has room for these sources in all caches whose blocks are alike.

    Raises, before anything is written, ValueError (shape, a destination named twice, read-only cache), IndexError (a
    block outside the caches), TypeError (dtype, mixed devices, JAX cache) or MemoryError (the temporary). A mapping on
    a device is read back, which synchronises. Under graph capture it is taken on trust instead: it must be int64 on the
    device (TypeError) and is read at every replay, no destination may be the source of another pair, and a call outside
    capture, be it with an empty mapping, must have had the same caches (RuntimeError). A cache that is named twice is
    copied once; not checked: whether caches overlap otherwise, each other or within themselves. The op is vLLM's
    removed ``copy_blocks``.

    >>> copy_blocks([key_cache, value_cache], [(7, 12), (3, 13)])
    >>> copy_blocks({"layer_0": caches_0, "layer_1": caches_1}, numpy.array([(1, 2), (2, 1)]))  # exchanged
    >>> copy_blocks(pool, new_blocks)
    """
    move = validate_moves.block_copy(caches, mapping)
    if move.targets:
        run_on_backend("copy_blocks", move, move.reference)


def swap_blocks(src: Any, dst: Any, mapping: Any, stream: Any = None) -> None:
    """Copies blocks of one pool to another: from a device to pinned host memory, back, or between two on one device.

    src, dst: an array ``[num_blocks, ...]`` each, or as many in a sequence each (layers); ``dst`` is written. Pairwise
        of one dtype and of one shape past the first axis, any strides; within ``src`` and within ``dst`` alike in
        ``num_blocks``. On the host: NumPy arrays or torch tensors in pinned memory (``cupyx.empty_pinned``).
    mapping: ``[num_pairs, 2]``, signed integers: pairs (block of ``src``, block of ``dst``), as in ``copy_blocks``.
    stream: where the copy runs: a stream of CuPy, torch or anything with ``__cuda_stream__``; None for the current one
        of the device array's framework. The NumPy and PTX backends have none and ignore it.

    Returns without waiting for the copy. What is still being made on another stream must be waited for by the caller.
    Until the stream has done the copy, the caller keeps both sides alive and changes neither; the host sees what was
    copied once it has synchronised with the stream. A kernel reads and writes host memory through the link, so that
    many small blocks go as fast as few large ones.

    Raises what ``copy_blocks`` raises, under capture too, and ValueError for sides of the same memory and for host
    memory that is not pinned. A mapping on a device is read back, in the current stream of its framework. Not checked:
    whether the two sides overlap otherwise. The op is vLLM's ``swap_blocks``, of all layers in one call.

    >>> host = cupyx.empty_pinned((num_host_blocks, *key_cache.shape[1:]), key_cache.dtype)
    >>> swap_blocks(key_cache, host, [(5, 0), (9, 1)], stream)
    >>> stream.synchronize()
    """
    move = validate_moves.block_swap(src, dst, mapping, stream)
    if move.targets:
        run_on_backend("swap_blocks", move, move.reference)
