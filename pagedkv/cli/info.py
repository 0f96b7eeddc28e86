"""``pagedkv info``: what is here, what is missing, and the one command that installs it."""

import json
import platform
from dataclasses import asdict
from typing import Any

import click
import numpy as np

import pagedkv

from . import machine

GIB = 2**30


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(as_json: bool) -> None:
    """What is here, what is missing, and the command that installs it."""
    found = gather()
    click.echo(json.dumps(found, indent=2) if as_json else describe(found))


def gather() -> dict[str, Any]:
    """All that ``info`` says, in JSON's types."""
    driver, cupy = machine.driver(), machine.cupy_package()
    missing, install = advice()
    return {
        "pagedkv": pagedkv.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "numpy": np.__version__,
        "cupy": None if cupy is None else {"package": cupy[0], "version": cupy[1]},
        "driver": None if driver is None else {"cuda": driver.cuda_version},
        "gpus": [] if driver is None else [asdict(gpu) for gpu in driver.gpus],
        "nvrtc": machine.nvrtc_version(),
        "cuda_headers": machine.has_headers(),
        "backends": {
            "numpy": "ready",
            "cuda": "ready" if machine.why_no_cuda() is None else f"not here: {machine.why_no_cuda()}",
            "ptx": "ready" if can_compile() else "not here: needs NVRTC and the CUDA headers",
        },
        "missing": missing,
        "install": install,
    }


def can_compile() -> bool:
    """Whether kernels can be compiled here, which is all that running them on the CPU needs."""
    return machine.nvrtc_version() is not None and machine.has_headers()


def advice() -> tuple[str | None, str | None]:
    """What this machine could have and has not, and the one command that brings it."""
    driver = machine.driver()
    if driver is not None and driver.gpus and machine.why_no_cuda() is not None:
        return _advice_for_gpu(driver)
    if not can_compile():
        return "NVRTC and the CUDA headers, to compile the kernels (no GPU needed)", "pip install 'pagedkv[ptx]'"
    return None, None


def _advice_for_gpu(driver: machine.Driver) -> tuple[str, str | None]:
    major, cupy = driver.cuda // 1000, machine.cupy_package()
    if major < 12:
        return f"a driver for CUDA 12 or newer (this one runs CUDA {driver.cuda_version}): see nvidia.com/drivers", None
    extra = "cuda13" if major >= 13 else "cuda12"
    install = f"pip install 'pagedkv[{extra}]'"
    if cupy is not None and cupy[0] != f"cupy-{extra}x":  # two CuPy packages would overwrite each other's files
        return f"a CuPy for this driver instead of {cupy[0]}", f"pip uninstall -y {cupy[0]} && {install}"
    return "CuPy with NVRTC and the CUDA headers, to run the kernels on this GPU", install


def describe(found: dict[str, Any]) -> str:
    """The same for people."""
    lines = [f"pagedkv {found['pagedkv']}", ""]
    lines += [f"{name:<13} {text}" for name, text in _facts(found)]
    lines += ["", "Backends"]
    lines += [f"  {name:<11} {state}" for name, state in found["backends"].items()]
    if found["missing"] is None:
        rest = "" if found["gpus"] else " for a machine without a GPU"
        lines += ["", f"Nothing is missing{rest}. Next: pagedkv run"]
    else:
        lines += ["", f"Missing: {found['missing']}."]
        lines += [f"  {found['install']}"] if found["install"] else []
    return "\n".join(lines)


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    cupy, driver = found["cupy"], found["driver"]
    return [
        ("Python", found["python"]),
        ("NumPy", found["numpy"]),
        ("CuPy", f"{cupy['version']} ({cupy['package']})" if cupy else "none"),
        ("NVIDIA driver", f"runs CUDA up to {driver['cuda']}" if driver else "none"),
        *((f"GPU {i}", _gpu(gpu)) for i, gpu in enumerate(found["gpus"])),
        ("NVRTC", found["nvrtc"] or "none"),
        ("CUDA headers", "found" if found["cuda_headers"] else "none"),
    ]


def _gpu(gpu: dict[str, Any]) -> str:
    memory = gpu["memory_bytes"] / GIB
    return f"{gpu['name']}, {memory:.0f} GiB, compute capability {gpu['compute_capability']}"
