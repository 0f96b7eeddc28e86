"""Moves of whole blocks on a device: what is uploaded, allocated and launched, eagerly and under capture."""

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from . import indices
from .arrays import ArrayView, device_name
from .checks import wrong
from .context import is_checked
from .cuda_replay import LaunchReplay
from .cuda_streams import on_host, stream_of
from .dtypes import INT64
from .launch import element_of
from .move_tables import Key, captured_table, keep_table
from .moves_plan import MoveGroup, MoveStep, places_of, plan_groups, plan_move
from .problem import BlockMove


def move_blocks(problem: BlockMove, stream: Any) -> None:
    """Checks the pairs, uploads what the kernels read, and launches; under capture it launches alone."""
    device, places = problem.reference.device, places_of(problem)
    groups = plan_groups(places, problem.touches_host)
    with cupy.cuda.Device(device):
        if cupy.cuda.runtime.streamIsCapturing(stream.ptr):
            _capture_move(problem, stream, groups, (device, places))
            return
        pairs, temporary = _pairs_on_host(problem.mapping), []
        indices.check_pairs(problem, pairs)
        keep_table((device, places), groups)

        def allocate(nbytes: int) -> int:
            with stream:
                temporary.append(cupy.empty(nbytes, np.uint8))
            return temporary[-1].data.ptr

        _launch_steps(plan_move(problem, groups, pairs, allocate), device, stream)


def _pairs_on_host(mapping: ArrayView) -> np.ndarray:
    if mapping.on_host:
        return mapping.numpy().astype(np.int64, copy=False)
    if mapping.shape[0] == 0:
        return np.empty((0, 2), np.int64)
    stream = stream_of(mapping.framework, mapping.device)
    return on_host(mapping, "mapping", stream, "one on a device is read back").astype(np.int64)


def _launch_steps(steps: list[MoveStep], device: int, stream: Any) -> None:
    """Uploads the pairs of all steps and the addresses of all groups in one piece, and launches."""
    numbers = [array for step in steps for array in (step.pairs, *(group.addresses for group in step.groups))]
    if not numbers:
        return
    with stream:
        uploaded = cupy.asarray(
            np.concatenate([np.ascontiguousarray(array).view(np.int64).ravel() for array in numbers])
        )
    starts = np.cumsum([uploaded.data.ptr, *(array.nbytes for array in numbers)]).tolist()
    addresses = iter(starts)
    for step in steps:
        mapping = next(addresses)
        for group in step.groups:
            LaunchReplay(group.launch(len(step.pairs)), "cupy", device)([next(addresses), mapping], stream)


def _capture_move(problem: BlockMove, stream: Any, groups: Sequence[MoveGroup], key: Key) -> None:
    mapping, expected = problem.mapping, f"int64 on {device_name(key[0])} under graph capture"
    if mapping.on_host or mapping.dtype != INT64:
        raise TypeError(wrong("mapping", expected, "one on the host" if mapping.on_host else mapping.dtype.name))
    if is_checked():
        on_host(mapping, "mapping", stream)  # raises
    element_of(mapping, "mapping")
    if mapping.shape[0] == 0:
        return
    for group, table in zip(groups, captured_table(key, groups), strict=True):
        launch = group.launch(mapping.shape[0], mapping.strides)
        LaunchReplay(launch, "cupy", key[0])([table, mapping.pointer], stream)


def check_reachable(array: ArrayView, name: str) -> None:
    """ValueError for host memory of which a device cannot address the first or the last byte."""
    if not array.on_host or 0 in array.shape:
        return
    reach = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
    runtime, size = cupy.cuda.runtime, array.dtype.itemsize
    first = array.pointer + size * sum(step for step in reach if step < 0)
    last = array.pointer + size * sum(step for step in reach if step > 0) + size - 1
    for address in (first, last):
        if runtime.pointerGetAttributes(address).type not in (runtime.memoryTypeHost, runtime.memoryTypeManaged):
            expected = "pinned host memory (cupyx.empty_pinned, or torch's pin_memory)"
            raise ValueError(wrong(name, expected, "host memory that is not pinned"))
