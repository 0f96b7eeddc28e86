"""Arrays in the middle of poisoned memory: any strides, any first address, and no byte around them unwatched.

A strided view is where kernels go astray: the gaps between its rows, and what lies before and after it, belong to
others. Each array here is a view of a buffer of bytes that reaches further on both sides, all poison where the array is
not, so that comparing buffers before and after a call shows every stray byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .inputs import POISON_BYTE, poisoned_bytes

GUARD_BYTES = 128  # on both sides: more than a warp writes past an end by one pack too many
GAP = 8  # elements: keeps rows aligned for packs of 16-bit numbers
RAGGED_GAP = 3  # leaves no alignment


@dataclass(frozen=True, slots=True)
class Guarded:
    """One array: the buffer it lies in, which two arrays may share, and where its first element is in there."""

    buffer: np.ndarray  # uint8
    start: int  # bytes
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: np.dtype

    @property
    def array(self) -> np.ndarray:
        """The array itself."""
        return self.within(self.buffer)

    def within(self, buffer: Any) -> Any:
        """The same place in a copy of the buffer, in host memory or in CuPy's."""
        if isinstance(buffer, np.ndarray):
            return np.ndarray(self.shape, self.dtype, buffer, self.start, self.strides)
        import cupy

        # CuPy has no float8, which travels as uint8.
        dtype = np.dtype(np.uint8) if self.dtype.name.startswith("float8") else self.dtype
        return cupy.ndarray(self.shape, dtype, buffer.data + self.start, self.strides)


@dataclass(frozen=True, slots=True)
class Form:
    """How an array lies in memory.

    order: its axes, the outermost in memory first; None for the usual order.
    gaps: elements left free after each step of the next inner axis, by axis: ``{0: 8}`` lengthens the rows of a matrix.
    backwards: axes that run from high addresses to low ones.
    repeated: axes whose steps all find the same elements.
    """

    order: tuple[int, ...] | None = None
    gaps: tuple[tuple[int, int], ...] = ()
    backwards: tuple[int, ...] = ()
    repeated: tuple[int, ...] = ()

    def strides(self, shape: Sequence[int]) -> tuple[list[int], int]:
        """Elements between neighbours along each axis, without signs, and all that the array spans."""
        strides, step = [0] * len(shape), 1
        gaps = dict(self.gaps)
        for axis in reversed(self.order or range(len(shape))):
            step += gaps.get(axis, 0)
            if axis not in self.repeated:
                strides[axis] = step
                step *= max(shape[axis], 1)
        return strides, step


def row_form(name: str, shape: Sequence[int]) -> Form:
    """A way for rows ``[num_tokens, num_heads, head_size]`` to lie."""
    return {
        "contiguous": Form(),
        "qkv": Form(gaps=((0, 2 * shape[1] * shape[2]),)),  # a third of one tensor
        "padded": Form(gaps=((1, GAP),)),
        "ragged": Form(gaps=((1, RAGGED_GAP),)),
        "heads_first": Form(order=(1, 0, 2)),
        "backwards": Form(backwards=(0, 1)),
        "repeated": Form(repeated=(0,)),
    }[name]


def strided(stride: int) -> Form:
    """One axis with gaps, or backwards."""
    return Form(gaps=((0, abs(stride) - 1),), backwards=(0,) if stride < 0 else ())


def guarded(
    shape: Sequence[int], dtype: np.dtype, form: Form = Form(), offset: int = 0, neighbour: int | None = None
) -> list[Guarded]:
    """An array of poison, ``offset`` elements behind an aligned address; two in one buffer, ``neighbour`` elements
    apart, where that is given."""
    strides, span = form.strides(shape)
    distances = [0] if neighbour is None else [0, neighbour]
    buffer = poisoned_bytes(2 * GUARD_BYTES + (offset + distances[-1] + span) * dtype.itemsize)
    first = offset
    for axis in form.backwards:
        first += strides[axis] * max(shape[axis] - 1, 0)
        strides[axis] = -strides[axis]
    byte_strides = tuple(stride * dtype.itemsize for stride in strides)
    return [
        Guarded(buffer, GUARD_BYTES + (first + distance) * dtype.itemsize, tuple(shape), byte_strides, dtype)
        for distance in distances
    ]


def holding(values: np.ndarray, form: Form = Form(), offset: int = 0) -> Guarded:
    """A guarded array with these values. Of a repeated axis the last step's stay."""
    (place,) = guarded(values.shape, values.dtype, form, offset)
    place.array[...] = values
    return place


def guarded_results(how: str, shape: tuple[int, ...], dtype: np.dtype, offset: int = 0) -> dict[str, Guarded]:
    """Where an output ``[tokens, heads, head_size]`` and its LSE go: with gaps between rows and axes in other order if
    ``how`` is strided."""
    forms = (Form(gaps=((1, RAGGED_GAP),)), Form(order=(1, 0))) if how == "strided" else (Form(), Form())
    (out,) = guarded(shape, dtype, forms[0], offset)
    (lse,) = guarded(shape[1::-1], np.dtype(np.float32), forms[1])
    return {"out": out, "lse_out": lse}


def make_poison(array: np.ndarray) -> None:
    """Fills an array of any strides with poison."""
    unsigned = np.dtype(f"u{array.itemsize}")
    array.view(unsigned)[...] = np.iinfo(unsigned).max // 0xFF * POISON_BYTE
