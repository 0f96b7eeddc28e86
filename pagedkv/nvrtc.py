"""NVRTC without a GPU, a driver or CuPy: what ``pagedkv compile`` and CI use. From the extra ``ptx``."""

import re
from dataclasses import dataclass

from .kernels import FLUSH_SUBNORMALS, OPTIONS, Instance, expanded_source

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
    options = (*OPTIONS, FLUSH_SUBNORMALS, f"-arch={arch}", f"-I{_headers()}", "--ptxas-options=-v")
    cubin, log = _compile(source, instance, options)
    return Compiled(
        instance,
        arch,
        cubin,
        registers=_figure(r"Used (\d+) registers", log),
        shared_bytes=_figure(r"(\d+) bytes smem", log),
        stack_bytes=_figure(r"(\d+) bytes stack frame", log),
        spill_bytes=_figure(r"(\d+) bytes spill stores", log) + _figure(r"(\d+) bytes spill loads", log),
    )


def version() -> str:
    """NVRTC's version."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def _nvrtc():
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


def _compile(source: str, instance: Instance, options: tuple[str, ...]) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), instance.file.encode(), 0, [], [])
    nvrtc.nvrtcAddNameExpression(program, instance.expression.encode())
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.rstrip(b"\0").decode()
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{instance}: {nvrtc.nvrtcGetErrorString(result)[1].decode()}\n{text}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = bytearray(size)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin), text


def _figure(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    return int(found[1]) if found else 0
