"""What this machine has: driver and GPUs, asked of the driver itself; CuPy; NVRTC. Needs none of them to be there."""

import ctypes
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from .errors import first_line

CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # of CUdevice_attribute


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver describes it."""

    name: str
    memory_bytes: int
    compute_capability: str


@dataclass(frozen=True, slots=True)
class Driver:
    """The newest CUDA that the driver runs, 13.0 as 13000, and its GPUs."""

    cuda: int
    gpus: list[Gpu]

    @property
    def cuda_version(self) -> str:
        return f"{self.cuda // 1000}.{self.cuda % 1000 // 10}"


@cache
def driver() -> Driver | None:
    """The NVIDIA driver, or None where there is none."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int(0)
    if library.cuInit(0) == 0:
        library.cuDeviceGetCount(ctypes.byref(count))
    version = ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(version))
    return Driver(version.value, [_gpu(library, device) for device in range(count.value)])


def _gpu(library: ctypes.CDLL, device: int) -> Gpu:
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t(0)
    library.cuDeviceGetName(name, len(name), device)
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    capability = []
    for attribute in (CAPABILITY_MAJOR, CAPABILITY_MINOR):
        number = ctypes.c_int(0)
        library.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        capability.append(number.value)
    return Gpu(name.value.decode(), memory.value, f"{capability[0]}.{capability[1]}")


@cache
def cupy_package() -> tuple[str, str] | None:
    """Name and version of the CuPy distribution that is installed."""
    for name in CUPY_PACKAGES:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


@cache
def why_no_cuda() -> str | None:
    """Why kernels cannot run on a GPU here, or None where they can."""
    if driver() is None:
        return "no NVIDIA driver"
    if not driver().gpus:
        return "the NVIDIA driver shows no GPU"
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.nvrtc.getVersion()
    except ImportError as error:
        return "CuPy is not installed" if cupy_package() is None else f"CuPy does not import: {first_line(error)}"
    except Exception as error:  # CuPy's own kinds, which cannot be named where it is broken
        return f"CuPy cannot use the driver or NVRTC: {first_line(error)}"
    return None if has_headers() else "the CUDA headers that kernels include are missing"


@cache
def nvrtc_version() -> str | None:
    """The NVRTC that ``pagedkv compile`` would use, or None where it is missing."""
    from pagedkv import nvrtc

    try:
        return nvrtc.version()
    except (ImportError, RuntimeError):  # no binding; a binding without its library
        return None


@cache
def has_headers() -> bool:
    """Whether the CUDA headers that the kernels include are where CuPy and NVRTC look for them."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        return find_nvidia_header_directory("cudart") is not None
    except (ImportError, RuntimeError, ValueError):  # no pathfinder; an old one
        return False
