"""``pagedkv compile``: every kernel instance of the list, what it takes of a multiprocessor, and whether it spills."""

import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import click

from pagedkv import kernels, nvrtc
from pagedkv.instances import INSTANCES, is_hot
from pagedkv.kernels import Instance

from . import machine
from .errors import Mistake
from .table import Column, Table

DEFAULT_ARCH = "sm_90a"  # without a GPU
SHORT_NAMES = {", ": ",", "__nv_bfloat16": "bf16", "__half": "half", "__nv_fp8_e4m3": "e4m3", "__nv_fp8_e5m2": "e5m2"}

TABLE = Table(
    (
        Column("kernel instance", 54),
        Column("arch", 7),
        Column("regs", 4, right=True),
        Column("shared", 7, right=True),
        Column("spill", 5, right=True),
        Column("time", 5, right=True),
        Column("", 6),
    )
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One instance on one architecture: what the compiler said, or why it failed."""

    instance: Instance
    arch: str
    seconds: float
    compiled: nvrtc.Compiled | None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.compiled is not None and not (self.compiled.spill_bytes and is_hot(self.instance))

    @property
    def verdict(self) -> str:
        return "ok" if self.ok else "FAILED" if self.compiled is None else "SPILLS"


def _architectures(ctx: click.Context, param: click.Parameter, archs: tuple[str, ...]) -> tuple[str, ...]:
    for arch in archs:
        if not re.fullmatch(r"sm_\d+[af]?", arch):
            raise Mistake(f"--arch {arch}: expected sm_ and a compute capability, as in sm_80 or sm_90a")
    return archs


@click.command("compile")
@click.option("--arch", "archs", multiple=True, callback=_architectures, metavar="sm_XX",
              help="Architecture; may be repeated.  [default: the GPU's own, else sm_90a]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def compile_command(ctx: click.Context, archs: tuple[str, ...], as_json: bool) -> None:
    """Compile every kernel instance of the list; needs no GPU.

    Prints registers per thread, bytes of shared memory per CTA and bytes spilled, each as the compiler reports it. On a
    machine with a GPU it also fills CuPy's kernel cache. The exit code is 1 if an instance does not compile, or
    one for a 16-bit or fp8 cache with heads of 64 or 128 spills.
    """
    if machine.nvrtc_version() is None:
        raise ImportError(nvrtc.MISSING)
    start, outcomes = time.perf_counter(), []
    for outcome in _compile_all(archs or (own_arch() or DEFAULT_ARCH,)):
        outcomes.append(outcome)
        if not as_json:
            click.echo((_heading() if len(outcomes) == 1 else "") + _line(outcome))
    seconds, warmed = time.perf_counter() - start, _warm()
    if as_json:
        click.echo(json.dumps([_record(outcome) for outcome in outcomes], indent=2))
    else:
        click.echo(_end(outcomes, seconds, warmed))
    ctx.exit(0 if all(outcome.ok for outcome in outcomes) else 1)


def _compile_all(archs: tuple[str, ...]) -> Iterator[Outcome]:
    """In the order of the list, a thread for each core: NVRTC works without Python's lock."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield from pool.map(compile_one, INSTANCES * len(archs), [arch for arch in archs for _ in INSTANCES])
    finally:
        pool.shutdown(cancel_futures=True)  # after an error nothing more is begun


def own_arch() -> str | None:
    """The architecture that kernels are compiled for on this machine's first GPU."""
    if machine.why_no_cuda() is not None:
        return None
    capability = machine.driver().gpus[0].compute_capability.replace(".", "")
    chosen = kernels.arch_options(capability)
    return chosen[0].removeprefix("-arch=") if chosen else f"sm_{capability}"


def compile_one(instance: Instance, arch: str) -> Outcome:
    """Compiles an instance. An architecture that NVRTC does not know is the caller's mistake and raises."""
    start = time.perf_counter()
    try:
        compiled = nvrtc.compile_instance(instance, arch)
    except nvrtc.CompileError as error:
        if "--gpu-architecture" in str(error):
            raise Mistake(f"--arch {arch}: NVRTC {machine.nvrtc_version()} does not compile for it") from error
        return Outcome(instance, arch, time.perf_counter() - start, None, str(error))
    return Outcome(instance, arch, time.perf_counter() - start, compiled)


def _warm() -> str | None:
    """Loads every instance on the first GPU, so that none compiles again when it is first used."""
    if machine.why_no_cuda() is not None:
        return None
    for instance in INSTANCES:
        kernels.load(instance, 0)
    return machine.driver().gpus[0].name


def short_name(instance: Instance) -> str:
    """The instance with the dtypes' short names and no spaces."""
    return re.sub("|".join(SHORT_NAMES), lambda name: SHORT_NAMES[name[0]], str(instance))


def _heading() -> str:
    return f"NVRTC {machine.nvrtc_version()}, {len(INSTANCES)} instances\n\n{TABLE.header()}\n"


def _line(outcome: Outcome) -> str:
    compiled = outcome.compiled
    figures = ("-",) * 3
    if compiled is not None:
        figures = (compiled.registers, f"{compiled.shared_bytes} B", f"{compiled.spill_bytes} B")
    row = (short_name(outcome.instance), outcome.arch, *figures, f"{outcome.seconds:.1f} s", outcome.verdict)
    log = "".join(f"\n    {line}" for line in (outcome.error or "").splitlines()[1:])
    return TABLE.row(row) + log


def _end(outcomes: list[Outcome], seconds: float, warmed: str | None) -> str:
    failed, spilling = (sum(o.verdict == verdict for o in outcomes) for verdict in ("FAILED", "SPILLS"))
    lines = ["", f"{len(outcomes)} compiled in {seconds:.1f} s"]
    if failed or spilling:
        lines[-1] = f"{failed} of {len(outcomes)} failed to compile, {spilling} spill where none may"
    if warmed:
        lines.append(f"CuPy's kernel cache is warm for {warmed}")
    return "\n".join(lines)


def _record(outcome: Outcome) -> dict[str, Any]:
    compiled = outcome.compiled
    figures = ("registers", "shared_bytes", "stack_bytes", "spill_bytes")
    return {
        "instance": str(outcome.instance),
        "file": outcome.instance.file,
        "arch": outcome.arch,
        **{name: None if compiled is None else getattr(compiled, name) for name in figures},
        "seconds": round(outcome.seconds, 3),
        "hot": is_hot(outcome.instance),
        "ok": outcome.ok,
        "error": outcome.error,
    }
