"""`pagedkv run` must notice a faulty op: each fault here changes the verdict, and the exit code with it."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import pagedkv
from pagedkv.cli.cases import OPS
from pagedkv.cli.execute import kernel_instance
from pagedkv.cli.inputs import Sizes
from pagedkv.cli.main import main

SMALL = ["--seqs", "2", "--context", "33", "--heads", "4", "--kv-heads", "2", "--head-size", "16"]
WRITES = ["reshape_and_cache", "reshape_and_cache_flash"]
READS = ["paged_attention_v1", "paged_attention_v2", "flash_attn_varlen_func"]


def run_one(op, *arguments):
    return CliRunner().invoke(main, ["run", op, *SMALL, "--backend", "numpy", *arguments])


def faulty(monkeypatch, op, fault):
    """The op with its arguments handed to `fault` before it runs, and after."""
    right = getattr(pagedkv, op)

    def wrong(**arguments):
        undo = fault(arguments)
        right(**arguments)
        if undo:
            undo()

    monkeypatch.setattr(pagedkv, op, wrong)


def check_caught(op, said, *arguments):
    result = run_one(op, *arguments)
    assert result.exit_code == 1
    assert "WRONG" in result.output
    assert said in result.output
    assert "1 of 1 result wrong" in result.output
    (row,) = json.loads(run_one(op, "--json", *arguments).output)
    assert not row["ok"]
    assert row["microseconds"] is None


# ---- writes ---------------------------------------------------------------------------------------------------------


def last_token_is_forgotten(arguments):
    slots = arguments["slot_mapping"] = arguments["slot_mapping"].copy()
    slots[-2] = -1


def two_slots_are_swapped(arguments):
    slots = arguments["slot_mapping"] = arguments["slot_mapping"].copy()
    slots[[0, 1]] = slots[[1, 0]]


def value_is_written_as_key(arguments):
    arguments["key"] = arguments["value"]


def one_bit_is_wrong(arguments):
    key = arguments["key"] = arguments["key"].copy()
    key.view(np.uint16)[3, 1, 5] ^= 1


def padding_is_written(arguments):
    slots = arguments["slot_mapping"] = arguments["slot_mapping"].copy()
    live = set(slots.tolist())
    slots[-1] = next(slot for slot in range(len(slots)) if slot not in live)


WRITE_FAULTS = [last_token_is_forgotten, two_slots_are_swapped, value_is_written_as_key, one_bit_is_wrong]


@pytest.mark.parametrize("op", WRITES)
@pytest.mark.parametrize("fault", WRITE_FAULTS)
def test_a_wrong_write_is_caught(monkeypatch, op, fault):
    faulty(monkeypatch, op, fault)
    check_caught(op, "values wrong (first in token")


@pytest.mark.parametrize("op", WRITES)
def test_a_write_into_a_slot_of_no_token_is_caught(monkeypatch, op):
    faulty(monkeypatch, op, padding_is_written)
    check_caught(op, "32 values changed that belong to no token")


@pytest.mark.parametrize("op", WRITES)
def test_scales_taken_for_each_other_are_caught(monkeypatch, op):
    def swap(arguments):
        arguments["k_scale"], arguments["v_scale"] = arguments["v_scale"], arguments["k_scale"]

    faulty(monkeypatch, op, swap)
    check_caught(op, "values wrong", "--kv-cache-dtype", "fp8")


def test_a_missing_saturation_is_caught(monkeypatch):
    def overflow(arguments):
        def to_nan():
            codes = arguments["key_cache"]
            codes[codes == 0x7E] = 0x7F  # the largest e4m3 code, and the NaN that a cast makes of an overflow

        return to_nan

    faulty(monkeypatch, "reshape_and_cache_flash", overflow)
    check_caught("reshape_and_cache_flash", "values wrong", "--kv-cache-dtype", "fp8", "--context", "500")


# ---- reads ----------------------------------------------------------------------------------------------------------


def scores_are_a_tenth_too_large(arguments):
    name = "softmax_scale" if "q" in arguments else "scale"
    arguments[name] = 1.1 * 16**-0.5


def first_token_is_out_of_sight(arguments):
    arguments["window_size"] = (31, 0)


def a_sequence_is_cut_short(arguments):
    name = "seqused_k" if "q" in arguments else "seq_lens"
    arguments[name] = arguments[name].copy()
    arguments[name][1] -= 1


def one_row_is_one_percent_off(arguments):
    def scale():
        arguments["out"][1, 2] *= 1.01

    return scale


def lse_is_in_base_two(arguments):
    def scale():
        arguments["lse_out"][...] /= np.log(2)

    return scale


def a_row_is_not_written(arguments):
    def forget():
        arguments["out"][-1, -1] = np.nan

    return forget


READ_FAULTS = [
    scores_are_a_tenth_too_large,
    first_token_is_out_of_sight,
    a_sequence_is_cut_short,
    one_row_is_one_percent_off,
    lse_is_in_base_two,
    a_row_is_not_written,
]


@pytest.mark.parametrize("op", READS)
@pytest.mark.parametrize("fault", READ_FAULTS)
def test_a_wrong_read_is_caught(monkeypatch, op, fault):
    faulty(monkeypatch, op, fault)
    check_caught(op, "relative error")


def test_a_row_that_is_one_percent_off_shows_in_bfloat16(monkeypatch):
    faulty(monkeypatch, "paged_attention_v1", one_row_is_one_percent_off)
    check_caught("paged_attention_v1", "relative error", "--dtype", "bfloat16")


def test_keys_after_the_query_are_caught(monkeypatch):
    faulty(monkeypatch, "flash_attn_varlen_func", lambda arguments: arguments.update(causal=False))
    check_caught("flash_attn_varlen_func", "relative error")


@pytest.mark.parametrize("fault", [one_row_is_one_percent_off, lse_is_in_base_two, a_row_is_not_written])
def test_a_wrong_merge_is_caught(monkeypatch, fault):
    faulty(monkeypatch, "merge_attn_states", fault)
    check_caught("merge_attn_states", "relative error")


# ---- what is shown --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", WRITES)
def test_the_kernel_instance_is_that_of_the_arrays(op):
    sizes = Sizes(1, 20, 4, 2, 64, 16, np.dtype(np.float16), "fp8", "HND", 0)
    arguments = OPS[op](op, sizes).arguments
    assert kernel_instance(op, arguments, "numpy") is None
    assert kernel_instance(op, arguments, "cuda").startswith(f"{op}<__half, __nv_fp8_e4m3, ")


@pytest.mark.parametrize("op", ["paged_attention_v1", "paged_attention_v2"])
def test_the_kernel_instance_of_a_decode_step(op):
    arguments = OPS[op](op, Sizes(1, 20, 24, 2, 64, 32, np.dtype(np.float16), "fp8", "NHD", 0)).arguments
    assert kernel_instance(op, arguments, "numpy") is None
    assert kernel_instance(op, arguments, "cuda").startswith("paged_attention<__half, __nv_fp8_e4m3, 64, 32, 16, ")


def test_a_wrong_result_among_right_ones(monkeypatch):
    faulty(monkeypatch, "reshape_and_cache", one_bit_is_wrong)
    result = CliRunner().invoke(main, ["run", *SMALL, "--backend", "numpy"])
    assert result.exit_code == 1
    assert f"1 of {len(OPS)} results wrong" in result.output
    assert result.output.count(" ok") == len(OPS) - 1
