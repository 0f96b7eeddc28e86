"""Counters on a device that kernels find at zero and leave at zero, so that no launch has to clear them first.

Calls on one stream run one after the other and share a buffer. A captured call may be replayed on any stream beside
them, so it gets counters of its own, for good.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import cupy

FEWEST = 1 << 12
PER_THREAD = 2  # the handle by which every thread calls a default stream of its own
RESERVE = 1 << 20  # for calls that will be captured; what remains of it is at least half as much after an eager call


@dataclass(slots=True)
class _Reserve:
    buffer: Any = None
    taken: int = RESERVE
    full: list[Any] = field(default_factory=list)  # kept for the graphs that use them


_by_stream: dict[tuple[int, int, int | None], Any] = {}
_reserves: dict[int, _Reserve] = {}


def counters_for(stream: Any, device: int, count: int) -> int:
    """The address of ``count`` int32 zeros for a call on this stream. RuntimeError under capture if none are left."""
    reserve = _reserves.setdefault(device, _Reserve())
    if cupy.cuda.runtime.streamIsCapturing(stream.ptr):
        if reserve.taken + count > RESERVE:
            raise RuntimeError("under graph capture: call the op or warmup before, so that there are counters")
        reserve.taken += count
        return reserve.buffer.data.ptr + 4 * (reserve.taken - count)
    if reserve.taken > RESERVE // 2:
        reserve.full.append(reserve.buffer)
        reserve.buffer, reserve.taken = _zeros(RESERVE, stream), 0
    key = (device, stream.ptr, threading.get_ident() if stream.ptr == PER_THREAD else None)
    buffer = _by_stream.get(key)
    if buffer is None or buffer.size < count:
        buffer = _by_stream[key] = _zeros(max(count, FEWEST), stream)
    return buffer.data.ptr


def _zeros(count: int, stream: Any) -> Any:
    with stream:
        zeros = cupy.zeros(count, cupy.int32)
    stream.synchronize()  # calls on other streams may be the first to use them
    return zeros
