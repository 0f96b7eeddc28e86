"""The command line, as someone types it: output, JSON, exit codes, and one line for every mistake."""

import json
from importlib.util import find_spec

import pytest
from click.testing import CliRunner

from pagedkv.cli import machine
from pagedkv.cli.main import COMMANDS, main

SMALL = ["--seqs", "3", "--context", "40", "--heads", "4", "--kv-heads", "2", "--head-size", "16"]
OPS = [
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "paged_attention_v1",
    "paged_attention_v2",
    "flash_attn_varlen_func",
    "merge_attn_states",
    "gather_cache",
    "convert_layout",
    "copy_blocks",
    "swap_blocks",
]
KERNELS = (
    {op: op for op in OPS[:2]}
    | dict.fromkeys(OPS[2:4], "paged_attention")
    | {OPS[4]: "varlen_attention", **{op: op for op in OPS[5:8]}}
    | dict.fromkeys(OPS[8:], "move_blocks")
)


def call(*arguments):
    return CliRunner().invoke(main, arguments)


def call_run(*arguments):
    return call("run", *SMALL, "--backend", "numpy", *arguments)


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine without a driver, whatever this one has."""
    monkeypatch.setattr(machine, "driver", lambda: None)
    monkeypatch.setattr(machine, "why_no_cuda", lambda: "no NVIDIA driver")


# ---- the group ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_lists_every_command(arguments):
    result = call(*arguments)
    assert result.exit_code == 0
    assert all(f"\n  {name} " in result.output for name in COMMANDS)


def test_a_group_without_a_command_prints_its_help():
    result = call("bench")
    assert result.output.startswith("Usage: main bench")
    assert "Error" not in result.output


@pytest.mark.parametrize("command", ["info", "run", "compile"])
def test_help_of_a_command(command):
    result = call(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.output


MISTAKES = {
    "rnu": "no command 'rnu': did you mean run?",
    "--bad": "No such option",
    "info --bad": "No such option",
    "run reshape_and_cach": "no op 'reshape_and_cach': did you mean reshape_and_cache",
    "run nothing": "expected one of reshape_and_cache, ",
    "run --heads 8 --kv-heads 3": "--heads 8 is no multiple of --kv-heads 3: each kv head serves a group",
    "run --seqs 0": "--seqs",
    "run --dtype int8": "--dtype",
    "run --backend ptx flash_attn_varlen_func": "has no kernel yet: use --backend numpy",
    "run --backend numpy --head-size 12": "--head-size: expected a multiple of 8 in the packed layout, got 12",
    "run --backend numpy reshape_and_cache_flash --head-size 12 --context 9": "head_size: expected a multiple of 8",
    "run --backend numpy --block-size 17 --context 9": "block_size: expected one of (8, 16, ",
    "run --backend numpy paged_attention_v1 --dtype float32 --kv-cache-dtype fp8 --context 9": "for an fp8 cache",
    "run --backend numpy --seqs 1000000000000000": "try fewer --seqs",
    "compile --arch hopper": "expected sm_ and a compute capability",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_gets_one_line(monkeypatch, line):
    if "no kernel yet" in MISTAKES[line]:
        monkeypatch.delattr("pagedkv.ptx_ops.flash_attn_varlen_func")
    result = call(*line.split())
    assert result.exit_code in (1, 2)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert MISTAKES[line] in result.stderr
    assert result.stderr.count("\n") == 1


def test_cuda_without_a_gpu_says_why(no_gpu):
    result = call("run", "--backend", "cuda")
    assert result.exit_code == 1
    assert "no NVIDIA driver" in result.stderr
    assert "pagedkv info" in result.stderr


# ---- info -----------------------------------------------------------------------------------------------------------


def test_info_as_json():
    found = json.loads(call("info", "--json").output)
    assert found["backends"]["numpy"] == "ready"
    assert {"python", "numpy", "cupy", "driver", "gpus", "nvrtc", "missing", "install"} <= found.keys()


def machine_with(monkeypatch, *, cuda=None, cupy=None, nvrtc=None, headers=False, why="CuPy is not installed"):
    gpu = machine.Gpu("NVIDIA H200", 150 * 10**9, "9.0")
    driver = None if cuda is None else machine.Driver(cuda, [gpu])
    monkeypatch.setattr(machine, "driver", lambda: driver)
    monkeypatch.setattr(machine, "cupy_package", lambda: cupy)
    monkeypatch.setattr(machine, "nvrtc_version", lambda: nvrtc)
    monkeypatch.setattr(machine, "has_headers", lambda: headers)
    monkeypatch.setattr(machine, "why_no_cuda", lambda: why)


CUPY12 = ("cupy-cuda12x", "14.2.0")
CUPY13 = ("cupy-cuda13x", "14.2.0")
MACHINES = {
    "nothing": ({}, "pip install 'pagedkv[ptx]'"),
    "NVRTC without a GPU": ({"nvrtc": "13.0", "headers": True}, None),
    "driver for CUDA 13": ({"cuda": 13000}, "pip install 'pagedkv[cuda13]'"),
    "driver for CUDA 12": ({"cuda": 12080}, "pip install 'pagedkv[cuda12]'"),
    "CuPy too new for the driver": (
        {"cuda": 12080, "cupy": CUPY13, "why": "insufficient driver"},
        "pip uninstall -y cupy-cuda13x && pip install 'pagedkv[cuda12]'",
    ),
    "CuPy without headers": ({"cuda": 12080, "cupy": CUPY12, "why": "no headers"}, "pip install 'pagedkv[cuda12]'"),
    "driver too old": ({"cuda": 11080}, None),
    "GPU, all there": ({"cuda": 13000, "cupy": CUPY13, "nvrtc": "13.0", "headers": True, "why": None}, None),
    "GPU, no binding": (
        {"cuda": 13000, "cupy": CUPY13, "headers": True, "why": None},
        "pip install 'pagedkv[ptx]'",
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_info_names_the_one_command(monkeypatch, name):
    has, install = MACHINES[name]
    machine_with(monkeypatch, **has)
    assert json.loads(call("info", "--json").output)["install"] == install
    text = call("info").output
    assert ("Nothing is missing" in text) == (install is None and name != "driver too old")
    assert install is None or f"\n  {install}\n" in text
    assert max(map(len, text.splitlines())) <= 100


# ---- run ------------------------------------------------------------------------------------------------------------


def test_run_prints_a_row_per_op():
    result = call_run()
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines() if "numpy" in line]
    assert [row[0] for row in rows] == OPS
    assert all(row[-1] == "ok" for row in rows)
    assert f"{len(OPS)} results, all right" in result.output
    assert max(map(len, result.output.splitlines())) <= 100


def test_run_as_json():
    rows = json.loads(call_run("--json").output)
    assert [row["op"] for row in rows] == OPS
    for row in rows:
        assert row["ok"]
        assert row["microseconds"] > 0
        assert row["bytes"] > 0
        assert len(row["outputs"]) == 2
        assert row["sizes"]["head_size"] == 16
        assert row["instance"] is None


FORMATS = [("float16", "auto"), ("bfloat16", "fp8_e4m3"), ("float16", "fp8_e5m2"), ("float32", "auto")]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), FORMATS)
def test_run_in_every_format(dtype, kv_cache_dtype, layout):
    result = call_run("--dtype", dtype, "--kv-cache-dtype", kv_cache_dtype, "--layout", layout, "--seed", "7")
    assert result.exit_code == 0, result.output


def test_flash_ops_take_any_block_size():
    assert call_run("--block-size", "17", "reshape_and_cache_flash", "flash_attn_varlen_func").exit_code == 0


def test_the_seed_decides_the_inputs():
    errors = [
        json.loads(call_run("paged_attention_v1", "--json", "--seed", seed).output)[0]["outputs"][0]["error"]
        for seed in ("1", "1", "2")
    ]
    assert errors[0] == errors[1] != errors[2]


def test_verbose_says_what_ran():
    assert "kernel: none, NumPy" in call_run("--verbose", "reshape_and_cache").output


# ---- compile --------------------------------------------------------------------------------------------------------

needs_nvrtc = pytest.mark.skipif(
    not find_spec("cuda") or not find_spec("cuda.bindings") or machine.nvrtc_version() is None,
    reason="NVRTC is not installed: pip install 'pagedkv[ptx]'",
)


@pytest.fixture
def one_instance(monkeypatch, no_gpu):
    from pagedkv.cli import compile as command

    monkeypatch.setattr(command, "INSTANCES", command.INSTANCES[:1])
    return command


@needs_nvrtc
def test_compile_one_instance(one_instance):
    result = call("compile", "--arch", "sm_80", "--arch", "sm_90a", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    assert [row["arch"] for row in rows] == ["sm_80", "sm_90a"]
    assert all(row["registers"] > 0 and row["spill_bytes"] == 0 and row["hot"] for row in rows)


@needs_nvrtc
def test_compile_table(one_instance):
    result = call("compile")
    assert result.exit_code == 0, result.output
    assert "sm_90a" in result.output
    assert max(map(len, result.output.splitlines())) <= 100


@needs_nvrtc
def test_compile_for_an_architecture_that_nvrtc_does_not_know(one_instance):
    result = call("compile", "--arch", "sm_12")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: --arch sm_12: ")


@pytest.mark.parametrize(("spill_bytes", "hot", "exit_code"), [(0, True, 0), (8, True, 1), (8, False, 0)])
def test_a_hot_instance_must_not_spill(monkeypatch, one_instance, spill_bytes, hot, exit_code):
    def compiled(instance, arch):
        return one_instance.nvrtc.Compiled(instance, arch, b"", 32, 0, 0, spill_bytes)

    monkeypatch.setattr(one_instance.nvrtc, "compile_instance", compiled)
    monkeypatch.setattr(machine, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(one_instance, "is_hot", lambda instance: hot)
    result = call("compile")
    assert result.exit_code == exit_code
    assert ("SPILLS" in result.output) == bool(exit_code)


def test_an_instance_that_does_not_compile(monkeypatch, one_instance):
    def failing(instance, arch):
        raise one_instance.nvrtc.CompileError(f"{instance}: NVRTC_ERROR_COMPILATION\ncuda/x.cu(7): error: no")

    monkeypatch.setattr(one_instance.nvrtc, "compile_instance", failing)
    monkeypatch.setattr(machine, "nvrtc_version", lambda: "13.0")
    result = call("compile")
    assert result.exit_code == 1
    assert "FAILED" in result.output
    assert "cuda/x.cu(7): error: no" in result.output


def test_compile_without_nvrtc_says_what_to_install(monkeypatch):
    monkeypatch.setattr(machine, "nvrtc_version", lambda: None)
    result = call("compile")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "pip install 'pagedkv[ptx]'" in result.stderr


# ---- on a card ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_run_on_cuda(kv_cache_dtype):
    result = call("run", *SMALL, "--backend", "cuda", "--json", "--kv-cache-dtype", kv_cache_dtype)
    assert result.exit_code == 0, result.output
    rows = {row["op"]: row for row in json.loads(result.output)}
    assert list(rows) == OPS
    for op, kernel in KERNELS.items():
        assert rows[op]["backend"] == "cuda"
        assert rows[op]["instance"].startswith(f"{kernel}<")
        assert rows[op]["microseconds"] > 0


@pytest.mark.ptx
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_run_on_ptx(kv_cache_dtype):
    result = call("run", *SMALL, "--backend", "ptx", "--json", "--kv-cache-dtype", kv_cache_dtype)
    assert result.exit_code == 0, result.output
    for row in json.loads(result.output):
        kernel = KERNELS.get(row["op"])
        assert row["backend"] == ("numpy" if kernel is None else "ptx")
        assert row["instance"] is None if kernel is None else row["instance"].startswith(f"{kernel}<")


def test_an_op_without_a_kernel_asked_for_on_cuda(monkeypatch):
    from pagedkv.cli import run as command

    monkeypatch.setattr(command, "check_backend", lambda backend: None)
    monkeypatch.setattr(command, "has_kernel", lambda op, backend: False)
    result = call("run", "paged_attention_v1", "--backend", "cuda")
    assert result.exit_code == 1
    assert result.stderr == "Error: paged_attention_v1 has no kernel yet: use --backend numpy\n"


@pytest.mark.gpu
def test_info_sees_the_gpu():
    found = json.loads(call("info", "--json").output)
    assert found["backends"]["cuda"] == "ready"
    assert found["gpus"][0]["memory_bytes"] > 2**30
