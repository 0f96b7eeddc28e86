"""Arrays of any length of which only the touched pages exist.

``SparseBuffer`` is one that a kernel can be given in place of an array: a cache of terabytes costs what is written.
"""

import math
from typing import Any

import numpy as np

from ..arrays import HOST, ArrayView

PAGE = 4096  # elements
GUARD = 1 << 32  # bytes between two buffers that belong to neither


class PageTable:
    """Which pages of an array of any length exist, and where: place 0 stands for all that do not."""

    def __init__(self) -> None:
        self.places: dict[int, int] = {}  # by page number
        self.num_places = 1

    def locate(self, index: np.ndarray, *, create: bool) -> tuple[np.ndarray, np.ndarray]:
        """Place and element of each index ``[rows, count]``, of which no row leaves a page."""
        numbers, which = np.unique(index[:, 0] // PAGE, return_inverse=True)
        for number in numbers.tolist():
            if create and number not in self.places:
                self.places[number] = self.num_places
                self.num_places += 1
        return np.array([self.places.get(number, 0) for number in numbers.tolist()])[which][:, None], index % PAGE

    def grown(self, pages: np.ndarray, fill: int) -> np.ndarray:
        """Pages ``[places, PAGE]`` with as many more as it takes, and some to spare."""
        missing = self.num_places - len(pages)
        if missing <= 0:
            return pages
        return np.concatenate([pages, np.full((max(missing, len(pages)), PAGE), fill, pages.dtype)])

    def refine(self, factor: int) -> None:
        """Takes each element for so many smaller ones, and each page for as many pages, as ``refined`` does."""
        old, self.places = self.places, {}
        for number, place in old.items():
            self.places |= {number * factor + i: place * factor + i for i in range(factor)}
        self.num_places *= factor


def refined(pages: np.ndarray, factor: int) -> np.ndarray:
    """Each element so many times."""
    return np.repeat(pages, factor, axis=1).reshape(-1, PAGE)


class Pages:
    """An array that holds ``fill`` wherever nothing was stored. An index is ``[rows, count]``; no row leaves a page."""

    def __init__(self, dtype: np.dtype | type, fill: int) -> None:
        self.table, self.fill = PageTable(), fill
        self.data = np.full((1, PAGE), fill, dtype)

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        return self.data[self.table.locate(index, create=False)]

    def __setitem__(self, index: np.ndarray, values: np.ndarray) -> None:
        here = self.table.locate(index, create=True)
        self.data = self.table.grown(self.data, self.fill)
        self.data[here] = values


class SparseBuffer:
    """A global buffer of any shape and strides (in elements) that holds only what is stored in it.

    It lies at addresses of its own, far from every other buffer and from all memory of the host. ``buffer[i, j]`` is a
    copy of the elements that these first indices leave, ``buffer[i, j] = values`` stores them. All bytes that nothing
    was stored to are ``fill``.
    """

    next_pointer = 1 << 59

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype | type,
        strides: tuple[int, ...] | None = None,
        fill: int = 0xFF,
    ) -> None:
        self.shape, self.dtype, self.pages = shape, np.dtype(dtype), Pages(np.uint8, fill)
        self.strides = strides or tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        if min(shape) < 1 or min(self.strides) < 0:
            raise ValueError(f"shape, strides: expected elements, none before the first, got {shape}, {self.strides}")
        reach = sum((extent - 1) * stride for extent, stride in zip(shape, self.strides, strict=True)) + 1
        self.nbytes = reach * self.dtype.itemsize
        self.pointer = SparseBuffer.next_pointer
        SparseBuffer.next_pointer += -(-self.nbytes // GUARD) * GUARD + GUARD

    def view(self) -> ArrayView:
        """As kernels take it."""
        return ArrayView(self.pointer, self.shape, self.strides, self.dtype, HOST, True, "other", self)

    @property
    def num_stored(self) -> int:
        """Bytes that are not ``fill``."""
        return int((self.pages.data != self.pages.fill).sum())

    def __getitem__(self, index: int | tuple[int, ...]) -> np.ndarray:
        offsets = self._offsets(index)
        data = self.pages[offsets.reshape(-1, self.dtype.itemsize)]
        return data.view(self.dtype).reshape(offsets.shape[:-1])

    def __setitem__(self, index: int | tuple[int, ...], values: Any) -> None:
        offsets = self._offsets(index)
        data = np.ascontiguousarray(np.broadcast_to(np.asarray(values, self.dtype), offsets.shape[:-1]))
        self.pages[offsets.reshape(-1, self.dtype.itemsize)] = data.reshape(-1, 1).view(np.uint8)

    def _offsets(self, index: int | tuple[int, ...]) -> np.ndarray:
        """The bytes of each chosen element, on a last axis."""
        first = np.atleast_1d(index).tolist()
        if any(not 0 <= i < extent for i, extent in zip(first, self.shape, strict=False)):
            raise IndexError(f"index: expected one inside {self.shape}, got {index}")
        elements = np.dot(first, self.strides[: len(first)])
        for axis in range(len(first), len(self.shape)):
            elements = np.add.outer(elements, self.strides[axis] * np.arange(self.shape[axis]))
        return np.asarray(elements)[..., None] * self.dtype.itemsize + np.arange(self.dtype.itemsize)
