"""Wrong calls: what may be wrong with the arguments of an op, and the error that it must raise before it writes.

Each mistake takes a right call's arguments and returns those to be changed, or None where this call cannot have it. It
is made on arrays of the backend itself, NumPy's or CuPy's.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments | None]
Mistakes = dict[str, tuple[Change, type[Exception]]]


def like(array: Any, values: Any, dtype: Any = None) -> Any:
    """An array of the same framework with these values."""
    if isinstance(array, np.ndarray):
        return np.array(values, dtype)
    import cupy

    return cupy.array(values, dtype)


def cast(name: str, dtype: str) -> Change:
    """An array of another dtype."""
    return lambda arguments: {name: arguments[name].astype(dtype)}


def without_last(axis: int, *names: str) -> Change:
    """Arrays that lack the last element of an axis."""
    cut = (slice(None),) * axis + (slice(-1),)
    return lambda arguments: {name: arguments[name][cut] for name in names} if arguments[names[0]].shape[axis] else None


def instead(**values: Any) -> Change:
    """Other values, the same for every call."""
    return lambda arguments: values


def read_only(source: str, name: str | None = None) -> Change:
    """An array that cannot be written, in its own place or in another's."""

    def change(arguments: Arguments) -> Arguments | None:
        if not isinstance(arguments[source], np.ndarray):
            return None  # only NumPy has them
        array = arguments[source].view()
        array.flags.writeable = False
        return {name or source: array}

    return change


# ---- writes ---------------------------------------------------------------------------------------------------------


def _slots(*slots: int) -> Change:
    """These slots; -1 counts from the first one past the cache, as the last of a list does."""

    def change(arguments: Arguments) -> Arguments | None:
        num_tokens, *row = arguments["key"].shape
        num_slots = arguments["value_cache"].size // int(np.prod(row))
        if num_tokens < len(slots) or num_slots == 0:
            return None
        chosen = [num_slots if slot < 0 else slot for slot in slots]
        return {"slot_mapping": like(arguments["slot_mapping"], chosen, np.int64)}

    return change


def _too_many_slots(arguments: Arguments) -> Arguments:
    return {"slot_mapping": like(arguments["slot_mapping"], [-1] * (arguments["key"].shape[0] + 1), np.int64)}


def _other_dtype(arguments: Arguments) -> Arguments:
    other = "float16" if arguments["value"].itemsize == 4 else "float32"
    return {"value": like(arguments["value"], np.zeros(arguments["value"].shape), other)}


def _integer_cache(arguments: Arguments) -> Arguments:
    return {"key_cache": arguments["key_cache"].view(f"i{arguments['key_cache'].itemsize}")}


def _one_side_per_head(arguments: Arguments) -> Arguments | None:
    num_kv_heads = arguments["key"].shape[1]
    if num_kv_heads == 1:
        return None
    return {"k_scale": like(arguments["key"], [0.5] * num_kv_heads, np.float32), "v_scale": 0.5}


def _last_axis_apart(arguments: Arguments) -> Arguments | None:
    if 0 in arguments["key"].shape or arguments["key"].shape[1] == 1:
        return None
    return {"key": arguments["key"].swapaxes(1, 2).copy().swapaxes(1, 2)}


WRITE_MISTAKES: Mistakes = {
    "float_slots": (cast("slot_mapping", "float32"), TypeError),
    "bool_slots": (cast("slot_mapping", "bool"), TypeError),
    "unsigned_slots": (cast("slot_mapping", "uint32"), TypeError),
    "slot_past_cache": (_slots(-1), IndexError),
    "slot_twice": (_slots(0, 0), ValueError),
    "too_many_slots": (_too_many_slots, ValueError),
    "head_size": (lambda given: {name: given[name][..., :-8] for name in ("key", "value")}, ValueError),
    "kv_heads": (without_last(1, "key", "value"), ValueError),
    "fewer_values": (without_last(0, "value"), ValueError),
    "value_dtype": (_other_dtype, TypeError),
    "integer_cache": (_integer_cache, TypeError),
    "fewer_blocks_of_values": (without_last(0, "value_cache"), ValueError),
    "one_side_per_head": (_one_side_per_head, ValueError),
    "scale_of_0": (instead(k_scale=0.0), ValueError),
    "scale_of_nan": (instead(v_scale=float("nan")), ValueError),
    "scale_of_text": (instead(v_scale="1"), TypeError),
    "unknown_format": (instead(kv_cache_dtype="fp9"), ValueError),
    "last_axis_apart": (_last_axis_apart, ValueError),
    "read_only_keys": (read_only("key_cache"), ValueError),
    "read_only_values": (read_only("value_cache"), ValueError),
    "no_array": (instead(key=[[[0.0]]]), TypeError),
}
