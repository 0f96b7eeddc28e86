"""`pagedkv profile`: the table, the comparison and JSON of an op, a kernel of one's own, and mistakes."""

import json

import pytest
from click.testing import CliRunner

from pagedkv.cli.main import main

pytestmark = pytest.mark.ptx

SMALL = ("--seqs", "2", "--context", "17", "--kv-heads", "2", "--head-size", "64")
SCALE = """
template <class T>
__global__ void scale(T* out, const T* in, T factor, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = in[STRIDE * i] * factor;
}
"""


def call(*arguments):
    return CliRunner().invoke(main, ["profile", *map(str, arguments)])


def profiled(*arguments):
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def own_kernel(tmp_path, stride=1):
    path = tmp_path / "mine.cu"
    path.write_text(SCALE.replace("STRIDE", str(stride)), encoding="utf-8")
    return path


ARGS = ["--arg", "float32[256]", "--arg", "float32[512]", "--arg", "float32=2", "--arg", "int32=200"]


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_lines_of_a_write(layout):
    output = profiled("write", "--layout", layout, *SMALL)
    assert output.startswith("reshape_and_cache<" if layout == "packed" else "reshape_and_cache_flash<")
    assert "cuda/copy.cuh:" in output and "__ldg" in output
    assert "global store" in output and ("shared store" in output) == (layout == "packed")
    assert max(map(len, output.splitlines())) <= 140


def test_json_holds_every_line_and_adds_up():
    (launch,) = json.loads(profiled("reshape_and_cache_flash", *SMALL, "--json"))
    assert launch["warp_instructions"] == sum(line["warp_instructions"] for line in launch["lines"])
    assert launch["warp_instructions"] == sum(launch["mix"].values())
    stores = [line["traffic"]["global store"] for line in launch["lines"] if "global store" in line["traffic"]]
    assert sum(store["bytes"] for store in stores) % (2 * 2 * 64 * 2) == 0  # K and V, heads, features, bytes
    assert sum(store["sectors"] for store in stores) == launch["traffic"]["global store"]["sectors"]


@pytest.mark.parametrize(("short", "op"), [("v1", "paged_attention_v1"), ("v2", "paged_attention_v2")])
def test_lines_of_a_decode(short, op):
    output = profiled(short, *SMALL, "--heads", "4")
    assert output == profiled(op, *SMALL, "--heads", "4")
    assert output.startswith("paged_attention<__half, __half, 64, 16, ")
    assert short == "v2" or ", grid 4 of " in output  # a CTA per sequence and kv head
    assert "ldmatrix" in output and "global copy" in output


def test_keys_and_values_of_a_decode_are_copied_once():
    (launch,) = json.loads(profiled("v1", *SMALL, "--heads", "4", "--json"))
    blocks = 3  # of 17 tokens two, of the other sequence's, which are fewer, one
    copied = blocks * 2 * 16 * 2 * 64 * 2  # K and V, slots, kv heads, features, bytes
    assert launch["traffic"]["global copy"]["bytes"] == copied


def test_comparison_tells_two_layouts_apart_in_one_screen():
    output = profiled("write", "--compare", "layout=NHD,HND")
    lines = output.splitlines()
    assert len(lines) < 25
    assert lines[0].startswith("NHD and HND: reshape_and_cache_flash<")
    (store,) = [line for line in lines if line.startswith("cuda/") and "global store" in line]
    assert "run 512 B" in store and "run 256 B" in store
    assert "33 of 34 lines do the same" in output


def test_comparison_of_different_kernels_keeps_to_accesses():
    output = profiled("write", *SMALL, "--compare", "layout=NHD,packed")
    assert "NHD: reshape_and_cache_flash<" in output and "packed: reshape_and_cache<" in output
    assert "shared load" in output
    rows = [line for line in output.splitlines() if line.startswith("cuda/")]
    assert rows and all(("load" in row) or ("store" in row) for row in rows)


def test_comparison_as_json():
    both = json.loads(profiled("write", *SMALL, "--compare", "kv-cache-dtype=auto,fp8", "--json"))
    assert list(both) == ["auto", "fp8"]
    before, after = (both[name][0]["traffic"]["global store"] for name in both)
    assert before["bytes"] == 2 * after["bytes"]


def test_a_kernel_of_ones_own(tmp_path):
    path = own_kernel(tmp_path, stride=2)
    output = profiled(path, "--kernel", "scale<float>", "--grid", 2, *ARGS)
    assert "scale<float>, grid 2 of 128 threads" in output
    assert "if (i < count) out[i] = in[2 * i] * factor"[:30] in output
    assert "8.0 (4.0) sectors" not in output  # 200 elements: the last warp has 8 lanes
    launch = json.loads(profiled(path, "--kernel", "scale<float>", "--grid", 2, *ARGS, "--json"))[0]
    assert launch["traffic"]["global load"]["requests"] == 7
    assert launch["traffic"]["global load"]["bytes"] == launch["traffic"]["global store"]["bytes"] == 800


def test_arrays_of_ones_own_begin_as_on_a_device(tmp_path):
    path = own_kernel(tmp_path, stride=1)
    sizes = ["--arg", "float32[128]", "--arg", "float32[128]", "--arg", "float32=0x10", "--arg", "int32=128"]
    (launch,) = json.loads(profiled(path, "--kernel", "scale<float>", *sizes, "--json"))
    assert launch["traffic"]["global load"]["sectors"] == launch["traffic"]["global load"]["ideal_sectors"] == 16


def test_a_fault_of_ones_own_is_told_by_line(tmp_path):
    path = own_kernel(tmp_path, stride=8)
    result = call(path, "--kernel", "scale<float>", "--grid", 2, *ARGS)
    assert result.exit_code == 1
    assert f"global load outside every array at {path}:5, CTA 0, thread 64" in result.output


def test_a_kernel_that_does_not_compile_shows_the_compilers_words(tmp_path):
    path = tmp_path / "broken.cu"
    path.write_text("__global__ void f() { return 1; }", encoding="utf-8")
    result = call(path, "--kernel", "f")
    assert result.exit_code == 1
    assert "broken.cu(1): error" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wirte"], "no op 'wirte': did you mean write?"),
        (["flash_attn_varlen_func"], "flash_attn_varlen_func has no kernel yet"),
        (["write", "--compare", "layout=NHD"], "--compare: expected layout=A,B"),
        (["write", "--compare", "colour=a,b"], "no option 'colour'"),
        (["write", "--compare", "kv_cache_dtype=auto"], "--compare: expected kv-cache-dtype=A,B"),
        (["v1", "--layout", "HND"], "--layout: paged_attention_v1 has packed, got HND"),
        (["reshape_and_cache_flash", "--compare", "layout=NHD,packed"], "has NHD and HND, got packed"),
        (["write", "--compare", "layout=NHD,XYZ"], "'XYZ' is not one of"),
        (["write", "--grid", "3"], "--grid is for a file of your own"),
        (["missing.cu", "--kernel", "f"], "no file missing.cu"),
        (["write", "--layout", "packed", "--head-size", "20"], "--head-size: expected a multiple of 8"),
    ],
)
def test_mistakes(monkeypatch, arguments, message):
    if "no kernel yet" in message:
        monkeypatch.delattr("pagedkv.ptx_ops.flash_attn_varlen_func")
    result = call(*arguments)
    assert result.exit_code != 0
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def wrong_third(argument):
    return [*ARGS[:4], "--arg", argument, *ARGS[6:]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--kernel: say which kernel"),
        (["--kernel", "scale<float>"], "--arg: the kernel has 4 parameters, got 0"),
        (["--kernel", "scale<float>", "--arg", "flaot32[4]"], "--arg: expected one like"),
        (["--kernel", "scale<float>", "--arg", "float32"], "--arg: a scalar has a value"),
        (["--kernel", "scale<float>", "--grid", "0"], "--grid: expected one to three positive numbers"),
        (["--kernel", "scale<float>", "--block", "100"], "--block: expected a multiple of 32 threads"),
        (["--kernel", "scale<float>", "--block", "64,32"], "at most 1,024, got 2,048"),
        (["--kernel", "scale<float>", "--shared", "300000"], "300000 is not in the range"),
        (["--kernel", "scale<float>", "--arg", "object[4]"], "--arg: expected one like"),
        (["--kernel", "scale<float>", "--arg", "int32=3.5"], "--arg: expected a value of int32"),
        (["--kernel", "scale<float>", "--arg", "int8=300"], "--arg: expected a value of int8"),
        (["--kernel", "scale<float>", "--arg", "float32=two"], "--arg: expected a value of float32"),
        (["--kernel", "scale<float>", *wrong_third("int64=200")], "--arg: parameter 3 has 4 bytes, int64 has 8"),
        (["--kernel", "scale<float>", *wrong_third("float32[1]")], "--arg: parameter 3 has 4 bytes, a pointer has 8"),
    ],
)
def test_mistakes_of_ones_own(tmp_path, arguments, message):
    result = call(own_kernel(tmp_path), *arguments)
    assert result.exit_code != 0
    assert message in result.output
