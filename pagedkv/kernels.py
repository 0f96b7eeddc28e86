"""From ``cuda/*.cu`` to a kernel: one source string per file, one template instance per module.

CuPy's disk cache keys on the source string and the options, not on included files, so quoted includes are expanded
into the string; ``#line`` keeps the compiler's messages on the project's files.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .params import static_asserts

NAMESPACE = "pagedkv"
# CuPy adds -ftz=true to what it compiles; so does everything else here, so that all compile the same code.
OPTIONS = ("-std=c++17",)
FLUSH_SUBNORMALS = "-ftz=true"
# Compute capabilities whose full instruction set (on Hopper wgmma and setmaxnreg) has an architecture of its own.
ARCH_SPECIFIC = ("90",)


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of a kernel template: file in ``cuda/``, kernel, template arguments in C++."""

    file: str
    kernel: str
    arguments: tuple[str | int, ...]

    @property
    def expression(self) -> str:
        """The name expression that NVRTC instantiates."""
        return f"{NAMESPACE}::{self.kernel}<{', '.join(map(str, self.arguments))}>"

    def __str__(self) -> str:
        return self.expression.removeprefix(f"{NAMESPACE}::")


def source_folder() -> Path:
    """The folder of the CUDA sources: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "cuda", here.parent / "cuda"):
        if (folder / "params.cuh").is_file():
            return folder
    raise FileNotFoundError(f"no CUDA sources in {here / 'cuda'} or {here.parent / 'cuda'}: reinstall pagedkv")


def expanded_source(file: str, folder: Path | None = None) -> str:
    """The text of a ``.cu`` file with its quoted includes in place, and the asserts on parameter structs behind it."""
    folder = source_folder() if folder is None else folder
    return f"{_expand(folder, file, seen=set())}\n{static_asserts()}"


def _expand(folder: Path, file: str, seen: set[str]) -> str:
    seen.add(file)  # every header has #pragma once
    lines = [f'#line 1 "cuda/{file}"']
    for number, line in enumerate((folder / file).read_text(encoding="utf-8").splitlines(), start=1):
        include = re.match(r'\s*#include "([^"]+)"', line)
        if include and include[1] not in seen:
            lines.append(_expand(folder, include[1], seen))
        if include or line.strip() == "#pragma once":
            lines.append(f'#line {number + 1} "cuda/{file}"')
        else:
            lines.append(line)
    return "\n".join(lines)


def arch_options(capability: str) -> tuple[str, ...]:
    """NVRTC options that select the architecture-specific instruction set where the device has one."""
    return (f"-arch=sm_{capability}a",) if capability in ARCH_SPECIFIC else ()


@cache
def load(instance: Instance, device: int, shared_bytes: int = 0) -> Any:
    """The kernel as a CuPy function on a device, compiled on first use (from CuPy's disk cache after that).

    ``shared_bytes`` of dynamic shared memory are what its launches may ask for.
    """
    import cupy

    with cupy.cuda.Device(device) as current:
        module = cupy.RawModule(
            code=expanded_source(instance.file),
            options=OPTIONS + arch_options(current.compute_capability),
            name_expressions=(instance.expression,),
        )
        # The function itself: a launch then costs no look-up of the device's module.
        function = module.get_function(instance.expression)
        if shared_bytes:
            function.max_dynamic_shared_size_bytes = shared_bytes
        return function.kernel
