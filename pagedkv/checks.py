"""The checks that validation is made of. Each raises ``name: expected ..., got ...``."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .arrays import ArrayView, device_name, view
from .dtypes import BY_NAME, INT64, is_signed_integer
from .layout import is_contiguous

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)  # of the normal numbers, which kernels do not take for 0


def wrong(name: str, expected: Any, got: Any) -> str:
    """The text of every validation error."""
    return f"{name}: expected {expected}, got {got}"


def check_shape(array: ArrayView, name: str, shape: Sequence[int | None]) -> None:
    """ValueError unless the shape is this one; None stands for any size."""
    sizes = tuple("any" if size is None else size for size in shape)
    same = len(array.shape) == len(shape) and all(
        size is None or size == got for size, got in zip(shape, array.shape, strict=True)
    )
    if not same:
        raise ValueError(wrong(name, f"shape ({', '.join(map(str, sizes))})", array.shape))


def check_ndim(array: ArrayView, name: str, axes: str) -> None:
    """ValueError unless there is one axis per word of ``axes``."""
    if array.ndim != len(axes.split()):
        raise ValueError(wrong(name, f"[{', '.join(axes.split())}]", f"shape {array.shape}"))


def check_dtype(array: ArrayView, name: str, dtypes: Sequence[np.dtype]) -> None:
    """TypeError unless the dtype is one of these."""
    if array.dtype not in dtypes:
        raise TypeError(wrong(name, " or ".join(dtype.name for dtype in dtypes), array.dtype.name))


def check_contiguous(array: ArrayView, name: str, first_axis: int = -1) -> None:
    """ValueError unless the axes from ``first_axis`` on (the last one alone, by default) are contiguous."""
    if not is_contiguous(array, first_axis):
        axes = "last axis" if first_axis == -1 else f"axes from {first_axis} on"
        raise ValueError(wrong(name, f"{axes} contiguous", f"strides {array.strides} of shape {array.shape}"))


def check_writable(array: ArrayView, name: str) -> None:
    """TypeError for a JAX array, ValueError for another read-only one."""
    if array.framework == "jax":
        raise TypeError(
            f"{name}: expected an array that can be written, got an immutable JAX array; "
            "keep the cache in CuPy (or NumPy on the host)"
        )
    if not array.writable:
        raise ValueError(wrong(name, "a writable array", "a read-only one"))


def check_same_device(arrays: dict[str, ArrayView | None]) -> None:
    """TypeError unless all arrays live on the device of the first."""
    (first, reference), *others = arrays.items()
    for name, array in others:
        if array is not None and array.device != reference.device:
            raise TypeError(
                wrong(name, f"an array on {device_name(reference.device)} like {first}", device_name(array.device))
            )


def index_view(array: Any, name: str, axes: str) -> ArrayView:
    """A view of slots, ids, lengths or starts: any signed integers, any strides."""
    indices = view(array, name)
    if not is_signed_integer(indices.dtype):
        raise TypeError(wrong(name, "signed integers", indices.dtype.name))
    check_ndim(indices, name, axes)
    return indices


def integer_row(values: Any, name: str) -> np.ndarray:
    """Signed integers on the host, one or several in a row, as int64 ``[count]``; TypeError for anything else."""
    try:
        row = np.asarray(values)
    except ValueError:
        raise ValueError(wrong(name, "integers in one row", "a ragged sequence")) from None
    if row.size == 0:
        return np.empty(0, INT64)
    if row.dtype.kind != "i" or row.ndim > 1:
        raise TypeError(wrong(name, "signed integers in one row", f"{row.dtype.name} of shape {row.shape}"))
    return row.astype(INT64, copy=False).reshape(-1)


def check_number(value: Any, name: str, expected: str, *, minimum: float = -LARGEST) -> float:
    """``value`` as a float; TypeError unless it is a real number, ValueError outside float32's range."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(wrong(name, expected, repr(value)))
    # Compared before it is converted: an integer may be larger than any float. A NaN fails every comparison.
    if not minimum <= value <= LARGEST:
        raise ValueError(wrong(name, expected, value))
    return float(value)


def check_count(value: Any, name: str, *, minimum: int, none: int | None, maximum: int | None = None) -> int | None:
    """``value`` as an int between the bounds; None becomes ``none``."""
    if value is None:
        return none
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(wrong(name, "an integer or None", repr(value)))
    if value < minimum:
        raise ValueError(wrong(name, f"at least {minimum}", value))
    if maximum is not None and value > maximum:
        raise ValueError(wrong(name, f"at most {maximum}", value))
    return int(value)


def check_size(value: Any, name: str, *, minimum: int) -> int:
    """``value`` as an int that is there; TypeError for None too."""
    if value is None:
        raise TypeError(wrong(name, "an integer", None))
    return check_count(value, name, minimum=minimum, none=None)


def float_dtype(given: Any, name: str) -> np.dtype:
    """The float dtype that an object of NumPy, torch or JAX, or a string, names; TypeError for any other."""
    kind = getattr(given, "__name__", None) or str(given).rpartition(".")[2]
    if kind not in BY_NAME:
        raise TypeError(wrong(name, f"one of {', '.join(BY_NAME)}", repr(given)))
    return BY_NAME[kind]


def check_choice(value: Any, name: str, choices: Sequence[str]) -> None:
    """ValueError unless ``value`` is one of the strings."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(wrong(name, f"one of {', '.join(choices)}", repr(value)))
