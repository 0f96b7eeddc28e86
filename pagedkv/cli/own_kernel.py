"""``pagedkv profile FILE.cu``: a kernel of one's own, and the arguments it is given."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np

from pagedkv import nvrtc
from pagedkv.arrays import view
from pagedkv.ptx.counters import Counters
from pagedkv.ptx.faults import SourceLine
from pagedkv.ptx.machine import Machine
from pagedkv.ptx.parse import Kernel, parse_kernel

from .errors import Mistake
from .inputs import aligned
from .options import all_of
from .profile_record import Record, launch_record, text_of_line

ARGUMENT = r"(?P<dtype>\w+)(?:\[(?P<shape>\d+(?:,\d+)*)\])?(?:=(?P<value>.+))?"
INTEGER = r"[+-]?(0[xX][0-9a-fA-F]+|\d+)"
KINDS = "biuf"  # of the dtypes that a kernel has, besides those of ml_dtypes
MOST_THREADS = 1024  # of a CTA
SHARED_BYTES = click.IntRange(0, 227 << 10)  # that a CTA may have
NAMES = ("kernel", "grid", "block", "shared", "arch", "args")


options = all_of(
    click.option("--kernel", metavar="NAME", help="Of FILE.cu: the kernel, with its template arguments."),
    click.option("--grid", metavar="X[,Y[,Z]]", help="CTAs.  [default: 1]"),
    click.option("--block", metavar="X[,Y[,Z]]", help="Threads of a CTA, a multiple of 32.  [default: 128]"),
    click.option("--shared", type=SHARED_BYTES, metavar="BYTES", help="Dynamic shared memory."),
    click.option("--arch", metavar="NAME", help="Virtual architecture.  [default: compute_90]"),
    click.option(
        "--arg",
        "args",
        multiple=True,
        metavar="DTYPE[SHAPE][=VALUE]",
        help="Repeatable, in order: an array, random, of one value or =arange; a scalar without a shape.",
    ),
)


def taken(given: dict[str, Any]) -> dict[str, Any]:
    """Takes these options out of all that were given."""
    return {name: given.pop(name) for name in NAMES}


def reject(own: dict[str, Any], target: str) -> None:
    """Mistake if one was given beside an op."""
    for name, value in own.items():
        if value:
            raise Mistake(f"--{name.removesuffix('s')} is for a file of your own, not for {target}")


def profile(
    path: Path,
    kernel: str | None,
    grid: str | None,
    block: str | None,
    shared: int | None,
    arch: str | None,
    args: tuple[str, ...],
) -> Record:
    """Compiles, runs and counts one launch."""
    if not path.is_file():
        raise Mistake(f"no file {path}")
    if kernel is None:
        raise Mistake("--kernel: say which kernel of the file to run")
    try:
        ptx, name = nvrtc.compile_ptx(
            path.read_text(encoding="utf-8"), str(path), kernel, arch or "compute_90", f"-I{path.parent}"
        )
    except nvrtc.CompileError as error:
        raise click.ClickException(str(error)) from error
    parsed = parse_kernel(ptx, name)
    arguments = [_argument(text) for text in args]
    counters, ctas, threads = Counters(parsed), _extents(grid or "1", "--grid"), _extents(block or "128", "--block")
    num_threads = math.prod(threads)
    if num_threads % 32 or num_threads > MOST_THREADS:
        raise Mistake(f"--block: expected a multiple of 32 threads, at most {MOST_THREADS:,}, got {num_threads:,}")
    arrays = [view(value, text) for value, text in zip(arguments, args, strict=True) if value.ndim]
    params = _parameters(parsed, arguments)
    Machine(parsed, ctas, threads, params, arrays, dynamic_shared=shared or 0, counters=counters).run()
    return launch_record(kernel, ctas, num_threads, counters, _source_beside(path))


def _source_beside(path: Path) -> Callable[[SourceLine], str]:
    return lambda line: text_of_line(path if line.file == str(path) else path.parent / line.file, line.number)


def _extents(text: str, option: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*){0,2}", text):
        raise Mistake(f"{option}: expected one to three positive numbers such as 4,2, got {text!r}")
    return tuple(map(int, text.split(",")))


def _argument(text: str) -> np.ndarray:
    """An array, or a scalar as an array without axes."""
    match = re.fullmatch(ARGUMENT, text.replace(" ", ""))
    dtype = match and _dtype(match["dtype"])
    if dtype is None:
        raise Mistake(f"--arg: expected one like float32[64,128], int32[8]=arange or float32=0.5, got {text!r}")
    shape = tuple(map(int, match["shape"].split(","))) if match["shape"] else ()
    value = match["value"]
    if value is None and not shape:
        raise Mistake(f"--arg: a scalar has a value, as in {text}=1")
    if value is None:
        return aligned(_random(shape, dtype))
    if value == "arange":
        return aligned(np.arange(math.prod(shape)).astype(dtype).reshape(shape))
    return aligned(np.full(shape, _number(value, dtype, text)))


def _random(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    rng = np.random.default_rng(0)
    if dtype.kind in "biu":
        return rng.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
    return rng.standard_normal(shape, np.float32).astype(dtype)


def _number(value: str, dtype: np.dtype, text: str) -> np.ndarray:
    """One value of a dtype that holds it."""
    integer = dtype.kind in "biu"
    try:
        number = int(value, 16 if "x" in value.lower() else 10) if re.fullmatch(INTEGER, value) else float(value)
        if integer and not isinstance(number, int):
            raise ValueError(f"{value} is no integer")
        return np.array(number, dtype) if integer else np.array(number).astype(dtype)
    except (ValueError, OverflowError) as error:
        raise Mistake(f"--arg: expected a value of {dtype.name}, got {text!r}") from error


def _dtype(name: str) -> np.dtype | None:
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        return None
    return dtype if dtype.kind in KINDS or hasattr(ml_dtypes, name) else None


def _parameters(kernel: Kernel, arguments: list[np.ndarray]) -> bytes:
    """The parameter block: pointers to arrays, scalars by value."""
    if len(arguments) != len(kernel.params):
        raise Mistake(f"--arg: the kernel has {len(kernel.params)} parameters, got {len(arguments)}")
    block = bytearray(kernel.param_bytes)
    for number, (offset, size, value) in enumerate(
        zip(kernel.params.values(), kernel.param_sizes, arguments, strict=True), 1
    ):
        content = value.ctypes.data.to_bytes(8, "little") if value.ndim else value.tobytes()
        if len(content) != size:
            given = "a pointer" if value.ndim else str(value.dtype)
            raise Mistake(f"--arg: parameter {number} has {size} bytes, {given} has {len(content)}")
        block[offset : offset + size] = content
    return bytes(block)
