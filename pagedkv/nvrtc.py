"""NVRTC without a GPU, a driver or CuPy: for ``pagedkv compile``, CI and the PTX backend. From the extra ``ptx``."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .kernels import FLUSH_SUBNORMALS, OPTIONS, Instance, expanded_source

LAMBDAS_ON_DEVICE = "-default-device"  # before NVRTC 13.5 a lambda in a kernel is a host function without it
MISSING = "compiling without a GPU needs NVRTC and the CUDA headers: pip install 'pagedkv[ptx]'"


class CompileError(RuntimeError):
    """NVRTC's log, which names files and lines of ``cuda/``."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """An instance compiled for one architecture, and what ptxas said of it. Memory is in bytes."""

    instance: Instance
    arch: str
    cubin: bytes
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def compile_instance(instance: Instance, arch: str) -> Compiled:
    """Compiles for ``arch`` (``sm_90a``). CompileError with the compiler's log; ImportError where NVRTC is missing."""
    source = expanded_source(instance.file)
    options = (f"-arch={arch}", "--ptxas-options=-v")
    with _program(source, instance.file, instance.expression, *options) as (program, log):
        cubin = _output(program, "CUBIN")
    return Compiled(
        instance,
        arch,
        cubin,
        registers=_figure(r"Used (\d+) registers", log),
        shared_bytes=_figure(r"(\d+) bytes smem", log),
        stack_bytes=_figure(r"(\d+) bytes stack frame", log),
        spill_bytes=_figure(r"(\d+) bytes spill stores", log) + _figure(r"(\d+) bytes spill loads", log),
    )


def compile_ptx(source: str, file: str, expression: str, arch: str, *options: str) -> tuple[str, str]:
    """PTX with source lines for a virtual ``arch`` (``compute_90``), and the kernel's name in it."""
    with _program(source, file, expression, f"-arch={arch}", "-lineinfo", *options) as (program, _):
        _, name = _nvrtc().nvrtcGetLoweredName(program, expression.encode())
        return _output(program, "PTX").rstrip(b"\0").decode(), name.decode()


def version() -> str:
    """NVRTC's version."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def _nvrtc() -> ModuleType:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # no binding, or a binding without its library
        raise ImportError(MISSING) from error
    return nvrtc


def _headers() -> str:
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    if folder is None:
        raise ImportError(MISSING)
    return folder


@contextmanager
def _program(source: str, file: str, expression: str, *options: str) -> Iterator[tuple[Any, str]]:
    """A compiled program and the compiler's log; the program is gone afterwards, whatever happens."""
    nvrtc, options = _nvrtc(), (*OPTIONS, FLUSH_SUBNORMALS, LAMBDAS_ON_DEVICE, f"-I{_headers()}", *options)
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), 0, [], [])
    try:
        nvrtc.nvrtcAddNameExpression(program, expression.encode())
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _output(program, "ProgramLog").rstrip(b"\0").decode()
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{expression}: {nvrtc.nvrtcGetErrorString(result)[1].decode()}\n{log}")
        yield program, log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _output(program: Any, what: str) -> bytes:
    nvrtc = _nvrtc()
    _, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    output = bytearray(size)
    getattr(nvrtc, f"nvrtcGet{what}")(program, output)
    return bytes(output)


def _figure(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    return int(found[1]) if found else 0
