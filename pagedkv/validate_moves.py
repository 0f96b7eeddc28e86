"""Validation of moves of whole blocks. Which blocks a mapping names is checked in ``indices.py``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from . import checks
from .arrays import HOST, ArrayView, device_name, view
from .checks import wrong
from .dtypes import is_signed_integer
from .problem import BlockMove


def block_copy(caches: Any, mapping: Any) -> BlockMove:
    """The problem of ``copy_blocks``."""
    views = _views(caches, "caches")
    checks.check_same_device(views or {"caches": None})
    for name, cache in views.items():
        checks.check_writable(cache, name)
    distinct = _distinct(views)
    return BlockMove(distinct, distinct, _pairs(mapping, views))


def _distinct(views: dict[str, ArrayView]) -> dict[str, ArrayView]:
    """Without what is another name of one before: copied twice, blocks that are exchanged would be back in place."""
    places = {}
    for name, array in views.items():
        places.setdefault((array.pointer, array.shape, array.strides, array.dtype), (name, array))
    return dict(places.values())


def block_swap(src: Any, dst: Any, mapping: Any, stream: Any) -> BlockMove:
    """The problem of ``swap_blocks``."""
    sources, targets = _views(src, "src"), _views(dst, "dst")
    if [name.removeprefix("src") for name in sources] != [name.removeprefix("dst") for name in targets]:
        raise ValueError(wrong("dst", f"{_described(src, sources)} like src", _described(dst, targets)))
    source_names = {source.pointer: name for name, source in sources.items() if 0 not in source.shape}
    for source, (target_name, target) in zip(sources.values(), targets.items(), strict=True):
        checks.check_dtype(target, target_name, (source.dtype,))
        checks.check_shape(target, target_name, (None, *source.shape[1:]))
        checks.check_writable(target, target_name)
        name = None if 0 in target.shape else source_names.get(target.pointer)
        if name is not None:
            raise ValueError(wrong(target_name, f"other memory than {name}", "the same; copy_blocks copies inside one"))
    both = {**sources, **targets}
    on_devices = {name: array for name, array in both.items() if not array.on_host}
    checks.check_same_device(on_devices or {"src": None})
    for views in (sources, targets):
        checks.check_same_device(views or {"src": None})
    return BlockMove(sources, targets, _pairs(mapping, on_devices or both), stream)


def _views(given: Any, name: str) -> dict[str, ArrayView]:
    """An array, or those in a sequence or mapping, of which some may be such again, by the names that errors give
    them."""
    views = {one: view(array, one) for one, array in _named(given, name)}
    num_blocks = None
    for one, array in views.items():
        if array.ndim == 0:
            raise ValueError(wrong(one, "[num_blocks, ...]", f"shape {array.shape}"))
        if array.dtype.hasobject:
            raise TypeError(wrong(one, "a dtype without Python objects", array.dtype.name))
        num_blocks = array.shape[0] if num_blocks is None else num_blocks
        if array.shape[0] != num_blocks:
            raise ValueError(wrong(one, f"{num_blocks} blocks like {next(iter(views))}", array.shape[0]))
    return views


def _named(given: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(given, Mapping):
        for key, item in given.items():
            yield from _named(item, f"{name}[{key!r}]")
    elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
        for i, item in enumerate(given):
            yield from _named(item, f"{name}[{i}]")
    else:
        yield name, given


def _described(given: Any, views: dict[str, ArrayView]) -> str:
    if isinstance(given, Mapping):
        return f"arrays {list(given)}"
    return f"{len(views)} arrays" if isinstance(given, Sequence) else "one array"


def _pairs(mapping: Any, arrays: dict[str, ArrayView]) -> ArrayView:
    """The mapping as an array ``[num_pairs, 2]``, on the host or where the arrays are."""
    if isinstance(mapping, Sequence):
        mapping = _array_of(mapping)
    pairs = view(mapping, "mapping")
    if not is_signed_integer(pairs.dtype):
        raise TypeError(wrong("mapping", "signed integers", pairs.dtype.name))
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(wrong("mapping", "[num_pairs, 2]", f"shape {pairs.shape}"))
    device = next(iter(arrays.values())).device if arrays else pairs.device
    if pairs.device not in (HOST, device):
        places = " or ".join(dict.fromkeys((device_name(HOST), device_name(device))))
        raise TypeError(wrong("mapping", f"an array on {places}", device_name(pairs.device)))
    return pairs


def _array_of(pairs: Sequence[Any]) -> np.ndarray:
    if not pairs:
        return np.empty((0, 2), np.int64)
    try:
        return np.array(pairs)
    except ValueError:  # of different lengths
        raise ValueError(wrong("mapping", "pairs (source, destination)", "a sequence of others")) from None
