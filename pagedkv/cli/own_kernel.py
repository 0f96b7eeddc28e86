"""``pagedkv profile FILE.cu``: a kernel of one's own, and the arguments it is given."""

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
from pagedkv.ptx.faults import Fault, SourceLine
from pagedkv.ptx.machine import Machine
from pagedkv.ptx.parse import Kernel, parse_kernel

from .errors import Mistake
from .profile_record import Record, launch_record, text_of_line

ARGUMENT = r"(?P<dtype>\w+)(?:\[(?P<shape>\d+(?:,\d+)*)\])?(?:=(?P<value>.+))?"
NAMES = ("kernel", "grid", "block", "shared", "arch", "args")


def options(command: Any) -> Any:
    """The options of a kernel of one's own."""
    for option in reversed(
        [
            click.option("--kernel", metavar="NAME", help="Of FILE.cu: the kernel, with its template arguments."),
            click.option("--grid", metavar="X[,Y[,Z]]", help="CTAs.  [default: 1]"),
            click.option("--block", metavar="X[,Y[,Z]]", help="Threads of a CTA.  [default: 128]"),
            click.option("--shared", type=click.IntRange(min=0), metavar="BYTES", help="Dynamic shared memory."),
            click.option("--arch", metavar="NAME", help="Virtual architecture.  [default: compute_90]"),
            click.option(
                "--arg",
                "args",
                multiple=True,
                metavar="DTYPE[SHAPE][=VALUE]",
                help="Repeatable, in order: an array, random, of one value or =arange; a scalar without a shape.",
            ),
        ]
    ):
        command = option(command)
    return command


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
    arrays = [view(value, text) for value, text in zip(arguments, args, strict=True) if value.ndim]
    params = _parameters(parsed, arguments)
    try:
        Machine(parsed, ctas, threads, params, arrays, dynamic_shared=shared or 0, counters=counters).run()
    except Fault as fault:
        raise click.ClickException(str(fault)) from fault
    return launch_record(kernel, ctas, int(np.prod(threads)), counters, _source_beside(path))


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
    if value == "arange":
        return np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    if value is not None:
        return np.full(shape, float(value) if "." in value or "e" in value else int(value, 0)).astype(dtype)
    random = np.random.default_rng(0)
    if dtype.kind in "iu":
        return random.integers(0, 100, shape).astype(dtype)
    return random.standard_normal(shape, np.float32).astype(dtype)


def _dtype(name: str) -> np.dtype | None:
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        return None


def _parameters(kernel: Kernel, arguments: list[np.ndarray]) -> bytes:
    """The parameter block: pointers to arrays, scalars by value."""
    if len(arguments) != len(kernel.params):
        raise Mistake(f"--arg: the kernel has {len(kernel.params)} parameters, got {len(arguments)}")
    block = bytearray(kernel.param_bytes)
    ends = [*kernel.params.values(), kernel.param_bytes][1:]
    for (name, offset), end, value in zip(kernel.params.items(), ends, arguments, strict=True):
        content = value.tobytes() if value.ndim == 0 else value.ctypes.data.to_bytes(8, "little")
        if len(content) > end - offset:
            raise Mistake(f"--arg: parameter {name} has at most {end - offset} bytes, got {len(content)}")
        block[offset : offset + len(content)] = content
    return bytes(block)
