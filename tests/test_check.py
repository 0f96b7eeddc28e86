"""`pagedkv check`: right ops pass, every case has a text that stands for it, and what is printed is what happened."""

import re
from itertools import cycle, islice

import numpy as np
import pytest
from click.testing import CliRunner

from pagedkv.cli.check import TRIALS
from pagedkv.cli.dimensions import DIMENSIONS, Spec, draw, parse
from pagedkv.cli.guarded import GUARD_BYTES, Form, guarded, holding
from pagedkv.cli.inputs import POISON_BYTE
from pagedkv.cli.main import main
from pagedkv.cli.mistakes import WRITE_MISTAKES
from pagedkv.cli.trial import Failure, Memory, run_trial

OPS = list(DIMENSIONS)
WRITES = ["reshape_and_cache", "reshape_and_cache_flash"]


def call(*arguments):
    return CliRunner().invoke(main, ["check", *arguments])


def drawn(op, count, seed=0):
    return list(islice(draw(op, np.random.default_rng(seed)), count))


def simplest(op, **values):
    return parse(op, ",".join(f"{name}={value}" for name, value in values.items()))


# ---- right ops pass -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_right_ops_pass(op):
    result = call(op, "--backend", "numpy", "--cases", "100", "--seed", "3")
    assert result.exit_code == 0, result.output
    assert re.search(r"^100 cases, all right, \d+ s, backend numpy, seed 3$", result.output, re.MULTILINE)
    assert max(map(len, result.output.splitlines())) <= 100


@pytest.mark.ptx
def test_right_kernels_pass():
    result = call(*WRITES, "--backend", "ptx", "--cases", "30")
    assert result.exit_code == 0, result.output
    assert "op: reshape_and_cache 15, reshape_and_cache_flash 15\n" in result.output


@pytest.mark.gpu
def test_right_kernels_pass_on_cuda():
    result = call(*WRITES, "--backend", "cuda", "--cases", "200")
    assert result.exit_code == 0, result.output


def test_without_a_name_all_ops_of_the_backend_run():
    assert f"op: {' 2, '.join(OPS)} 2" in " ".join(call("--backend", "numpy", "--cases", "12").output.split())


def test_time_limits_the_cases():
    result = call("merge_attn_states", "--backend", "numpy", "--minutes", "0.005")
    assert result.exit_code == 0
    assert re.search(r"cases, all right, 0 s", result.output)


# ---- texts of cases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_a_case_is_its_text(op):
    for spec in drawn(op, 50):
        assert parse(op, str(spec)) == spec


@pytest.mark.parametrize("op", OPS)
def test_a_text_always_stands_for_the_same_bytes(op):
    for spec in drawn(op, 5):
        one, other = TRIALS[op](spec), TRIALS[op](parse(op, str(spec)))
        places = [(a, other.arguments[name]) for name, a in one.arguments.items() if hasattr(a, "buffer")]
        assert places
        assert all(np.array_equal(a.buffer, b.buffer) and a.strides == b.strides for a, b in places)


def test_the_seed_decides_the_cases():
    texts = [[str(spec) for spec in drawn("reshape_and_cache", 5, seed)] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("op", OPS)
def test_every_value_is_drawn_at_some_time(op):
    specs = drawn(op, 3000)
    for dimension in DIMENSIONS[op]:
        assert {spec.values[dimension.name] for spec in specs} == set(dimension.values), dimension.name


def test_numbers_between_those_drawn_are_cases_too():
    assert simplest("reshape_and_cache_flash", tokens=7, kv_heads=6, seed=2).values["tokens"] == 7


MISTAKES = {
    "--case tokens=3": "--case: expected the one OP",
    "reshape_and_cache --case tokens": "--case: expected name=value, got 'tokens'",
    "reshape_and_cache --case toks=3": "--case: no dimension 'toks': did you mean tokens?",
    "reshape_and_cache --case tokens=x": "--case: tokens: expected a number from 0 to 528, got 'x'",
    "reshape_and_cache --case tokens=999": "--case: tokens: expected a number from 0 to 528, got '999'",
    "reshape_and_cache --case dtype=int": "--case: no dtype 'int': expected one of float16, bfloat16, float32",
    "reshape_and_cache --case seed=-1": "--case: seed: expected a number",
    "reshape_and_cache --case head_size=20": "--case: head_size: expected a multiple of 8, got 20",
    "reshape_and_cache --case block_size=9": "--case: block_size: expected one of (16, 8, ",
    "paged_attention_v2 --case seqs=3,kv_heads=3,block_size=256,partition=1": "--case: partition: 1 tokens are",
    "reshape_and_cach": "no op 'reshape_and_cach'",
    "--minutes 1 --cases 2": "--minutes and --cases: expected one of them",
    "--minutes 0": "--minutes",
    "--backend ptx flash_attn_varlen_func": "flash_attn_varlen_func has no kernel yet",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_gets_one_line(monkeypatch, line):
    if "ptx" in line:
        pytest.importorskip("cuda.bindings", reason="the extra ptx is not installed")
    if "no kernel yet" in MISTAKES[line]:
        monkeypatch.delattr("pagedkv.ptx_ops.flash_attn_varlen_func")
    result = call(*line.split())
    assert result.exit_code in (1, 2)
    assert result.stdout == ""
    assert MISTAKES[line] in result.stderr
    assert result.stderr.count("\n") == 1


# ---- coverage -------------------------------------------------------------------------------------------------------


def test_coverage_counts_what_was_run(monkeypatch):
    specs = [simplest("merge_attn_states", **values) for values in ({"tokens": 3}, {"tokens": 3}, {"dtype": "float32"})]
    monkeypatch.setattr("pagedkv.cli.check.draw", lambda op, rng: cycle(specs))
    output = call("merge_attn_states", "--backend", "numpy", "--cases", "3").output
    assert "\ntokens: 1 1, 3 2\n" in output
    assert "\ndtype: float16 2, float32 1\n" in output
    assert "not seen: tokens 0, 2, 17, 64; " in output
    assert "dtype bfloat16; " in " ".join(output.split())


# ---- guarded memory -------------------------------------------------------------------------------------------------

FORMS = [Form(), Form(order=(1, 0, 2)), Form(gaps=((0, 5), (1, 3))), Form(backwards=(0, 1)), Form(repeated=(0,))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(4, 3, 8), (1, 1, 8), (0, 3, 8)])
def test_an_array_is_all_that_is_no_poison(form, shape):
    place = holding(np.ones(shape, np.float16), form, offset=3)
    elements = place.buffer[: place.buffer.size // 2 * 2].view(np.float16)
    steps = 1 if form.repeated and shape[0] else shape[0]
    assert np.count_nonzero(elements == 1) == steps * shape[1] * shape[2]
    assert (place.buffer[:GUARD_BYTES] == POISON_BYTE).all()
    assert (place.buffer[-GUARD_BYTES:] == POISON_BYTE).all()


def test_an_offset_decides_the_alignment():
    for offset in (0, 1, 4):
        (place,) = guarded((2, 8), np.dtype(np.float16), offset=offset)
        assert place.array.ctypes.data % 16 == 2 * offset


def test_neighbours_share_a_buffer_and_no_byte():
    first, second = guarded((3, 2, 8), np.dtype(np.float16), Form(gaps=((0, 16),)), neighbour=16)
    first.array[...], second.array[...] = 1, 2
    assert first.buffer is second.buffer
    assert (first.array == 1).all() and (second.array == 2).all()


# ---- mistakes -------------------------------------------------------------------------------------------------------


def rich(op):
    """A case that every mistake can be made with."""
    sizes = {"tokens": 3, "kv_heads": 3} if op in WRITES else {}
    if op == "merge_attn_states":
        return {"tokens": 3, "heads": 3}
    return sizes or {"seqs": 3, "kv_heads": 3, "group": 2}


@pytest.mark.parametrize("op", OPS)
def test_every_mistake_can_be_made_and_raises_its_error(op):
    names = next(dimension for dimension in DIMENSIONS[op] if dimension.name == "mistake").values[1:]
    for name in names:
        trial = TRIALS[op](simplest(op, mistake=name, **rich(op)))
        arrays = {key: value.array if hasattr(value, "array") else value for key, value in trial.arguments.items()}
        assert trial.mistake[0](arrays), name
        assert run_trial(trial, "numpy") is None, name


def test_mistakes_are_dimensions():
    spec = Spec("reshape_and_cache", simplest("reshape_and_cache").values | {"mistake": "no_array"}, 0)
    assert str(spec) == "mistake=no_array,seed=0"
    assert TRIALS[spec.op](spec).mistake is WRITE_MISTAKES["no_array"]


# ---- devices --------------------------------------------------------------------------------------------------------


def test_a_device_that_is_lost_ends_the_run(monkeypatch):
    runs = []

    def lost(trial, backend):
        runs.append(trial)
        return Failure("CUDARuntimeError", "CUDARuntimeError: cudaErrorIllegalAddress")

    monkeypatch.setattr("pagedkv.cli.check.run_trial", lost)
    result = call("merge_attn_states", "--backend", "numpy", "--cases", "5")
    assert result.exit_code == 1
    assert "FAILED  merge_attn_states: CUDARuntimeError: cudaErrorIllegalAddress" in result.output
    assert len(runs) == 1


def test_float8_caches_name_their_format_where_arrays_do_not(monkeypatch):
    monkeypatch.setattr("pagedkv.cli.trial._put", lambda buffer, backend: buffer)
    for cache, name in (("float8_e5m2", "fp8_e5m2"), ("fp8_e4m3", "fp8_e4m3"), ("auto", "auto")):
        trial = TRIALS["reshape_and_cache"](simplest("reshape_and_cache", cache=cache))
        assert Memory(trial.arguments, "cuda").arguments["kv_cache_dtype"] == name
