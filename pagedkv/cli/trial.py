"""One random case, run: the op called on one backend, all that it may write compared, all else found untouched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import pagedkv

from .compare import Comparison
from .errors import first_line
from .guarded import Guarded
from .inputs import on_host, poisoned_bytes
from .mistakes import Change

Outputs = dict[str, np.ndarray]
FORMATS = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}  # what an array's dtype says, as an argument
NO_CHANGE = "bytes changed that the op may not write"


@dataclass(frozen=True, slots=True)
class Trial:
    """A call of one op.

    arguments: by name; arrays as ``Guarded``.
    outputs: the names of those that it writes.
    check: compares the outputs, and makes poison again of all in them that the op may write.
    mistake: what to get wrong first, and the error to be raised.
    """

    op: str
    arguments: dict[str, Any]
    outputs: tuple[str, ...]
    check: Callable[[Outputs], list[Comparison]]
    mistake: tuple[Change, type[Exception]] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong. Two failures of one kind are taken for the same one."""

    kind: str
    text: str

    @property
    def repeats(self) -> bool:
        """Whether the process can run more cases: a device on which a kernel went astray serves it no more."""
        return self.kind not in ("CUDARuntimeError", "CUDADriverError")


class Memory:
    """The buffers of a trial's arrays, on one backend."""

    def __init__(self, arguments: dict[str, Any], backend: str) -> None:
        self.places = {name: value for name, value in arguments.items() if isinstance(value, Guarded)}
        self.before = {id(place.buffer): place.buffer for place in self.places.values()}
        self.buffers = {key: _put(buffer, backend) for key, buffer in self.before.items()}
        arrays = {name: place.within(self.buffers[id(place.buffer)]) for name, place in self.places.items()}
        self.arguments = arguments | arrays
        if backend == "cuda":
            self.arguments |= self._named_format()

    def _named_format(self) -> dict[str, str]:
        """CuPy's uint8 does not carry the format that a float8 cache has."""
        formats = [FORMATS[place.dtype.name] for place in self.places.values() if place.dtype.name in FORMATS]
        return {"kv_cache_dtype": formats[0]} if formats else {}

    def after(self) -> dict[int, np.ndarray]:
        """What the buffers hold now, in host memory, as copies."""
        return {key: on_host(buffer).copy() for key, buffer in self.buffers.items()}

    def stray(self, after: dict[int, np.ndarray]) -> str | None:
        """Which bytes differ from those before the call."""
        for name, place in self.places.items():
            differing = np.flatnonzero(after[id(place.buffer)] != self.before[id(place.buffer)])
            if differing.size:
                distance = int(differing[0]) - place.start
                return f"{name}: {differing.size} {NO_CHANGE}, the first {distance:+d} from its first element"
        return None


def _put(buffer: np.ndarray, backend: str) -> Any:
    if backend != "cuda":
        copy = poisoned_bytes(buffer.size)
        copy[...] = buffer
        return copy
    import cupy

    return cupy.asarray(buffer)


def run_trial(trial: Trial, backend: str) -> Failure | None:
    """Makes the mistake, where there is one, and then the right call. None if both went as they must."""
    memory = Memory(trial.arguments, backend)
    with pagedkv.use_backend(backend):
        return _make_mistake(trial, memory) or _call(trial, memory)


def _make_mistake(trial: Trial, memory: Memory) -> Failure | None:
    changes, expected = None, None
    if trial.mistake is not None:
        change, expected = trial.mistake
        changes = change(memory.arguments)
    if changes is None:
        return None
    wrong = f"a wrong {' and '.join(changes)}"
    try:
        with pagedkv.checked():
            getattr(pagedkv, trial.op)(**memory.arguments | changes)
    except Exception as error:
        if type(error) is not expected:
            text = f"{type(error).__name__}: {first_line(error)}"
            return Failure("another error", f"{wrong} raised, instead of {expected.__name__}, {text}")
    else:
        return Failure("no error", f"{wrong} raised no {expected.__name__}")
    stray = memory.stray(memory.after())
    return Failure("written before an error", f"{wrong}: {stray}") if stray else None


def _call(trial: Trial, memory: Memory) -> Failure | None:
    try:
        returned = getattr(pagedkv, trial.op)(**memory.arguments)
        after = memory.after()  # where a device tells what went wrong in a kernel
    except Exception as error:  # whatever it is, a right call must not raise it
        return Failure(type(error).__name__, f"{type(error).__name__}: {first_line(error)}")
    for comparison in trial.check(_outputs(trial, memory, after, returned)):
        if not comparison.ok:
            return Failure("values", f"{comparison.name}: {comparison.detail}")
    stray = memory.stray(after)
    return Failure("stray bytes", stray) if stray else None


def _outputs(trial: Trial, memory: Memory, after: dict[int, np.ndarray], returned: Any) -> Outputs:
    """Each output in host memory: as it was passed, or as it was returned."""
    results = returned if isinstance(returned, tuple) else (returned,)
    given = {name: place.within(after[id(place.buffer)]) for name, place in memory.places.items()}
    missing = [name for name in trial.outputs if name not in given]
    new = [on_host(result) for result in results[: len(missing)]]
    return given | dict(zip(missing, new, strict=True))
