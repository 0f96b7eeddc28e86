"""From a validated problem to the backend that its arrays, or ``use_backend``, call for."""

from types import ModuleType
from typing import Any

from . import numpy_ops
from .arrays import ArrayView, device_name
from .context import chosen_backend


def run_on_backend(op: str, problem: Any, reference: ArrayView) -> Any:
    """Hands the problem to the function of the op's name in the backend of ``reference``; returns what that returns, a
    ``Replay`` where the call can be repeated."""
    backend = _backend(reference)
    implementation = getattr(backend, op, None)
    if implementation is None:
        raise NotImplementedError(f'{op}: no kernel yet; use_backend("numpy") serves host arrays')
    return implementation(problem)


def _backend(reference: ArrayView) -> ModuleType:
    chosen = chosen_backend() or ("numpy" if reference.on_host else "cuda")
    if (chosen != "cuda") != reference.on_host:
        where = "on a CUDA device" if chosen == "cuda" else "in host memory"
        raise TypeError(f"use_backend({chosen!r}): expected arrays {where}, got {device_name(reference.device)}")
    return backend_module(chosen)


def backend_module(name: str) -> ModuleType:
    """The module behind a backend's name, imported on use: kernels need what not every machine has, CuPy or NVRTC."""
    if name == "cuda":
        from . import cuda_ops

        return cuda_ops
    if name == "ptx":
        from . import ptx_ops

        return ptx_ops
    return numpy_ops
