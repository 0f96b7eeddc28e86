"""Arrays of any length of which only the touched pages exist.

``SparseBuffer`` is one that a kernel can be given in place of an array: a cache of terabytes costs what is written.
"""

import math
from typing import Any

import numpy as np

from ..arrays import HOST, ArrayView

PAGE = 4096  # elements
GUARD = 1 << 32  # bytes between two buffers that belong to neither


class Pages:
    """An array that holds ``fill`` wherever nothing was stored. An index is ``[rows, count]``; no row leaves a page."""

    def __init__(self, dtype: np.dtype | type, fill: int) -> None:
        self.fill = fill
        self.data = np.full((1, PAGE), fill, dtype)  # the first stands for all pages that do not exist
        self.places: dict[int, int] = {}  # of the others, by page number

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        if not self.places:
            return np.full(index.shape, self.fill, self.data.dtype)
        return self.data[self._places(index), index % PAGE]

    def __setitem__(self, index: np.ndarray, values: np.ndarray) -> None:
        for number in np.unique(index[:, 0] // PAGE).tolist():
            self.places.setdefault(number, len(self.places) + 1)
        while len(self.data) <= len(self.places):
            self.data = np.concatenate([self.data, np.full_like(self.data, self.fill)])
        self.data[self._places(index), index % PAGE] = values

    def _places(self, index: np.ndarray) -> np.ndarray:
        numbers, which = np.unique(index[:, 0] // PAGE, return_inverse=True)
        return np.array([self.places.get(number, 0) for number in numbers.tolist()])[which][:, None]


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
