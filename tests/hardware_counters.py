"""What the hardware counts for the write kernels, recorded for the tests of the interpreter's counters.

`python -m tests.hardware_counters FILE` runs each case under `ncu` on a GPU and writes FILE, which
`tests/test_ptx_counters.py` holds the interpreter to.
"""

import csv
import io
import json
import subprocess
import sys

import numpy as np

import pagedkv
from pagedkv import ptx_ops
from pagedkv.cli.cases import OPS
from pagedkv.cli.inputs import Sizes, aligned
from pagedkv.dtypes import BY_NAME

WRITES = {"NHD": "reshape_and_cache_flash", "HND": "reshape_and_cache_flash", "packed": "reshape_and_cache"}
# layout, dtype, kv_cache_dtype, sequences, tokens of the longest
CASES = [
    ("NHD", "bfloat16", "auto", 3, 40),
    ("NHD", "float16", "fp8", 3, 40),
    ("HND", "float32", "auto", 3, 40),
    ("HND", "bfloat16", "fp8_e5m2", 12, 64),
    ("packed", "bfloat16", "auto", 3, 40),
    ("packed", "float16", "auto", 12, 64),
    ("packed", "float16", "fp8", 12, 64),
    ("packed", "float32", "auto", 3, 40),
]
METRICS = {
    "global load requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "global load sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "global store requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "global store sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "shared load requests": "smsp__inst_executed_op_shared_ld.sum",
    "shared load wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared store requests": "smsp__inst_executed_op_shared_st.sum",
    "shared store wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
}


def case_of(layout, dtype, kv_cache_dtype, seqs, context):
    sizes = Sizes(seqs, context, 8, 8, 128, 16, np.dtype(BY_NAME[dtype]), kv_cache_dtype, layout, seed=0)
    return OPS[WRITES[layout]](WRITES[layout], sizes)


def interpreted(case):
    """The figures of METRICS as the interpreter counts them."""
    arguments = {name: aligned(v) if isinstance(v, np.ndarray) else v for name, v in case.arguments.items()}
    with pagedkv.use_backend("ptx"), ptx_ops.profiled() as (launches):
        getattr(pagedkv, case.op)(**arguments)
    traffic = launches[0].counters.total().traffic
    figures = {}
    for kind in ("global load", "global store", "shared load", "shared store"):
        figures[f"{kind} requests"] = traffic[kind].requests
        figures[f"{kind} {'sectors' if kind.startswith('global') else 'wavefronts'}"] = traffic[kind].units
    return figures


def launch_on_gpu(index):
    import cupy

    case = case_of(*CASES[index])
    arguments = {name: cupy.asarray(v) if isinstance(v, np.ndarray) else v for name, v in case.arguments.items()}
    getattr(pagedkv, case.op)(**arguments)
    cupy.cuda.Device().synchronize()


def measured(index):
    """The figures of METRICS as ncu reads them."""
    command = ["ncu", "--csv", "--clock-control", "none", "--kernel-name", "regex:reshape_and_cache"]
    command += ["--metrics", ",".join(METRICS.values()), sys.executable, "-m", "tests.hardware_counters", f"--{index}"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = csv.DictReader(io.StringIO(output[output.index('"ID"') :]))
    values = {row["Metric Name"]: int(row["Metric Value"].replace(",", "")) for row in rows}
    return {figure: values[metric] for figure, metric in METRICS.items()}


def main(argument):
    if argument.startswith("--"):
        launch_on_gpu(int(argument[2:]))
        return
    records = [{"case": case, "figures": measured(index)} for index, case in enumerate(CASES)]
    with open(argument, "w", encoding="utf-8") as file:
        json.dump(records, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1])
