"""Launches that can be made again: planned once, then only pointers differ."""

from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from . import kernels
from .arrays import ArrayView, empty
from .counters import counters_for
from .cuda_streams import stream_of
from .dtypes import is_fp8
from .launch import Launch
from .problem import Attention
from .read_plan import ReadLaunch
from .repeats import Pointers
from .varlen_plan import merge_split_arrays


class LaunchReplay:
    """Makes one launch again on other addresses, on the stream that is then current."""

    __slots__ = ("device", "framework", "grid", "kernel", "params", "shared_bytes", "threads")

    def __init__(self, launch: Launch, framework: str, device: int) -> None:
        self.kernel, self.shared_bytes = kernels.load(launch.instance, device, launch.shared_bytes), launch.shared_bytes
        self.grid, self.threads, self.params = launch.grid, (launch.threads,), launch.params
        self.framework, self.device = framework, device

    def __call__(self, pointers: Pointers, stream: Any = None) -> None:
        if cupy.cuda.runtime.getDevice() != self.device:
            with cupy.cuda.Device(self.device):
                self(pointers, stream)
            return
        # None is CuPy's own current stream, which the launch finds faster than we do.
        if stream is None and self.framework != "cupy":
            stream = stream_of(self.framework, self.device)
        self.kernel(self.grid, self.threads, (*pointers, self.params), self.shared_bytes, stream)


class ReadReplay:
    """Makes the launches of one read again. Outputs and workspace whose addresses are 0 are allocated, and the outputs
    returned."""

    __slots__ = ("before", "has_scales", "launch", "lse", "merge", "num_counters", "out", "workspace_bytes")

    def __init__(self, planned: ReadLaunch, problem: Attention) -> None:
        framework, device = problem.query.framework, problem.query.device
        self.launch = LaunchReplay(planned.launch, framework, device)
        self.merge = planned.merge and LaunchReplay(planned.merge, framework, device)
        self.before = planned.before and ReadReplay(planned.before, problem)
        self.workspace_bytes, self.num_counters = planned.workspace_bytes, planned.num_counters
        self.has_scales = is_fp8(problem.cache.format)
        self.out, self.lse = _form(problem.out), problem.lse_out and _form(problem.lse_out)

    def __call__(self, pointers: Pointers, stream: Any = None) -> tuple[ArrayView | None, ArrayView | None]:
        launch = self.launch
        if cupy.cuda.runtime.getDevice() != launch.device:
            with cupy.cuda.Device(launch.device):
                return self(pointers, stream)
        if stream is None and (self.workspace_bytes or launch.framework != "cupy"):
            stream = stream_of(launch.framework, launch.device)  # asked for once: torch takes its time
        *inputs, out, lse, workspace = pointers
        if not self.has_scales:
            inputs[-2:] = 0, 0  # the caller's would be ignored
        counters = [] if self.num_counters is None else [0]
        if self.num_counters:
            counters = [counters_for(stream, launch.device, self.num_counters)]
        if self.workspace_bytes and workspace == 0:
            with stream:
                memory = cupy.empty(self.workspace_bytes, np.uint8)
            workspace = memory.data.ptr
        out, new_out = _given_or_new(out, self.out)
        lse, new_lse = _given_or_new(lse, self.lse)
        arrays = [*inputs, out, lse]
        if self.before is not None:
            self.before([*arrays, pointers[-1]], stream)
        launch([*arrays, workspace, *counters], stream)
        if self.merge is not None:
            self.merge(merge_split_arrays(arrays, workspace), stream)
        return new_out, new_lse


class PairReplay:
    """Makes one launch again whose last two arrays are its outputs. Those whose addresses are 0 are allocated, and
    returned."""

    __slots__ = ("first", "launch", "second")

    def __init__(self, planned: Launch, like: ArrayView, first: ArrayView, second: ArrayView) -> None:
        self.launch = LaunchReplay(planned, like.framework, like.device)
        self.first, self.second = _form(first), _form(second)

    def __call__(self, pointers: Pointers) -> tuple[ArrayView | None, ArrayView | None]:
        *inputs, first, second = pointers
        first, new_first = _given_or_new(first, self.first)
        second, new_second = _given_or_new(second, self.second)
        self.launch([*inputs, first, second])
        return new_first, new_second


def _given_or_new(pointer: int, form: ArrayView | None) -> tuple[int, ArrayView | None]:
    """The address of an output, allocated where 0, and what was allocated; without a form nobody wants it."""
    if pointer or form is None:
        return pointer, None
    new = empty(form, form.shape, form.dtype)
    return new.pointer, new


def _form(array: ArrayView) -> ArrayView:
    """The array without its memory."""
    return replace(array, pointer=0, owner=None)
