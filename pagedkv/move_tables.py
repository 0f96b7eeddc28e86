"""Addresses of caches on a device, as captured calls need them: they may upload nothing.

A call outside capture uploads its addresses with its mapping, and leaves them here as well. A captured call takes them
for good, for the graph reads them at every replay.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import cupy
import numpy as np

from . import kernels
from .moves_plan import MoveGroup, Place
from .params import BLOCK_ADDRESSES

LIMIT = 1024  # tables that no graph uses; a caller whose caches never repeat starts over instead of growing

Key = tuple[int, tuple[Place, ...]]  # device and caches

_tables: dict[Key, Any] = {}
_captured: dict[Key, Any] = {}


def keep_table(key: Key, groups: Sequence[MoveGroup]) -> None:
    """Makes a later captured call with the same caches possible: uploads their addresses and loads the kernels."""
    if not groups or key in _tables or key in _captured:
        return
    if len(_tables) >= LIMIT:
        _tables.clear()
    device, _ = key
    for group in groups:
        kernels.load(group.instance, device, 0)  # with the arguments of a launch, by which it is found again
    # A stream of its own: other streams may be the first to read the table, and the caller's is not waited for.
    with _upload_stream(device) as stream:
        _tables[key] = cupy.asarray(np.concatenate([group.addresses for group in groups]).view(np.int64))
        stream.synchronize()


def captured_table(key: Key, groups: Sequence[MoveGroup]) -> list[int]:
    """The address of each group's table. RuntimeError if no call outside capture has had these caches."""
    if not groups:
        return []
    table = _captured.get(key)
    if table is None:
        table = _tables.pop(key, None)
        if table is None:
            raise RuntimeError(
                "under graph capture: make one call with the same caches before, to upload their addresses"
            )
        _captured[key] = table
    counts = np.cumsum([0, *(group.addresses.size for group in groups[:-1])])
    return (table.data.ptr + counts * BLOCK_ADDRESSES.itemsize).tolist()


@cache
def _upload_stream(device: int) -> Any:
    """Of the current device, which this is."""
    return cupy.cuda.Stream(non_blocking=True)
