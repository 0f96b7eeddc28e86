"""Calls that repeat: same op, same options, arrays of the same form at other addresses. They are planned once.

What validation and planning read of an array is its form: type, shape, strides, dtype, device and alignment. A later
call with equal forms would pass the same checks and make the same launch with other pointers, so it goes straight
there. That is most of what an eager call costs on the host.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from .context import chosen_backend, is_checked

Pointers = list[int]
Replay = Callable[[Pointers], Any]
MISS = object()  # no call like this one has been made

NOTHING = (0, None)  # an array that is not given
ALIGNMENT = 16  # bytes; instances differ by alignment up to the widest access
LIMIT = 4096  # forms remembered; a caller whose shapes never repeat starts over instead of growing without bound

_replays: dict[tuple, Replay] = {}


class Call:
    """One call, as far as it decides the launch, and the addresses that it does not decide."""

    __slots__ = ("key", "pointers")

    def __init__(self, op: str, arrays: tuple[Any, ...], options: tuple[Any, ...]) -> None:
        """arrays: of one op in order; None and numbers among them are part of the key, with pointer 0."""
        self.key: tuple | None = None
        self.pointers: Pointers = []
        if is_checked() or chosen_backend() not in (None, "cuda"):
            return
        described = [NOTHING if array is None else _describer(type(array))(array) for array in arrays]
        if None in described:
            return
        self.pointers, forms = map(list, zip(*described, strict=True))
        self.key = (op, options, *forms)

    def replay(self) -> Any:
        """Launches what an equal call launched and returns what that returns; MISS if there was none."""
        try:
            replay = _replays.get(self.key)
        except TypeError:  # an option that cannot be hashed: validation says what is wrong with it
            self.key = replay = None
        return MISS if replay is None else replay(self.pointers)

    def remember(self, replay: Replay | None) -> None:
        """Keeps a launch for later calls of the same key; None is a call that does not repeat."""
        if self.key is None or replay is None:
            return
        if len(_replays) >= LIMIT:
            _replays.clear()
        _replays[self.key] = replay


@cache
def _describer(kind: type) -> Callable[[Any], tuple[int, Any] | None]:
    framework = kind.__module__.partition(".")[0]
    if framework == "cupy" and kind.__name__ == "ndarray":
        return _describe_cupy
    if framework == "torch" and kind.__name__ == "Tensor":
        return _describe_torch
    if kind in (float, int):
        return lambda value: (0, (kind, value))
    return lambda array: None


def _describe_cupy(array: Any) -> tuple[int, Any] | None:
    if not array.dtype.isnative:  # has the number of the native dtype
        return None
    memory = array.data
    pointer = memory.ptr
    form = ("cupy", array.shape, array.strides, array.dtype.num, memory.device_id, pointer % ALIGNMENT)
    return pointer, form


def _describe_torch(tensor: Any) -> tuple[int, Any] | None:
    if not tensor.is_cuda or tensor.is_neg() or tensor.is_sparse:
        return None
    pointer = tensor.data_ptr()
    form = ("torch", tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), pointer % ALIGNMENT)
    return pointer, form
