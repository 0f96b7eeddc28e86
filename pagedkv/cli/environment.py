"""Where and of what a record was made: card, driver, versions, commit and date."""

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import pagedkv

from . import machine


def environment() -> dict[str, Any]:
    """The first fields of a record."""
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    runtime = cupy.cuda.runtime.runtimeGetVersion()
    return {
        "card": properties["name"].decode(),
        "driver": _driver_release(),
        "versions": {
            "pagedkv": pagedkv.__version__,
            "cupy": cupy.__version__,
            "numpy": np.__version__,
            "cuda_runtime": f"{runtime // 1000}.{runtime % 1000 // 10}",
            "cuda_driver": machine.driver().cuda_version,
        },
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _driver_release() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return next((word for word in text.split() if word.count(".") == 2 and word[0].isdigit()), "unknown")


def _commit() -> str:
    """The commit that is measured; ``PAGEDKV_COMMIT`` says it where the tree is a copy without its history."""
    if "PAGEDKV_COMMIT" in os.environ:
        return os.environ["PAGEDKV_COMMIT"]
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
