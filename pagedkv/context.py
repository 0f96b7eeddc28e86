"""Which backend runs, and whether device-side indices are read and checked: context managers on contextvars."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

BACKENDS = ("numpy", "ptx", "cuda")

_backend: ContextVar[str | None] = ContextVar("pagedkv_backend", default=None)
_checked: ContextVar[bool] = ContextVar("pagedkv_checked", default=False)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the ops called inside on one backend instead of the one their arrays live on.

    name: ``"numpy"``, ``"cuda"`` or ``"ptx"`` (the kernels on host arrays, by interpreting their PTX). ValueError for
    another name; an op whose arrays the backend cannot reach raises a TypeError.

    >>> with pagedkv.use_backend("numpy"):
    ...     out = pagedkv.paged_attention_v1(query, key_cache, value_cache, block_tables, seq_lens)
    """
    if name not in BACKENDS:
        raise ValueError(f"use_backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    token = _backend.set(name)
    try:
        yield
    finally:
        _backend.reset(token)


@contextmanager
def checked() -> Iterator[None]:
    """Read slots, block ids and lengths back from the device and check them before every launch inside.

    It synchronises, so it is for debugging; under graph capture the ops raise. The NumPy and PTX backends always check.

    >>> with pagedkv.checked():
    ...     pagedkv.reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping)
    """
    token = _checked.set(True)
    try:
        yield
    finally:
        _checked.reset(token)


def chosen_backend() -> str | None:
    """The name given to the innermost ``use_backend``, or None."""
    return _backend.get()


def is_checked() -> bool:
    """Whether ``checked()`` is in force."""
    return _checked.get()
