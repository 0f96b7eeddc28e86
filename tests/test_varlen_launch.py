"""What the CUDA backend does around the launches of a varlen read and of a merge, with stand-ins for CuPy and kernels:
no GPU is needed."""

import cases
import numpy as np
import pytest
from stand_ins import PARAMETERS, DeviceArray, pointers, put, stand_in
from test_merge_states import states

import pagedkv
from pagedkv import repeats

QUERY_LENS, SEQ_LENS = [5, 0, 20], [5, 9, 60]
NUM_TOKENS = sum(QUERY_LENS)
OPTIONAL = {
    "alibi_slopes": np.zeros(4, np.float32),
    "s_aux": np.zeros(4, np.float32),
    "k_descale": np.full(2, 0.5, np.float32),
    "v_descale": np.full(2, 0.25, np.float32),
}
OUTPUTS = {"out": np.empty((NUM_TOKENS, 4, 64), np.float16), "lse_out": np.empty((4, NUM_TOKENS), np.float32)}
MERGED = {"out": np.empty((7, 3, 40), np.float16), "lse_out": np.empty((3, 7), np.float32)}


@pytest.fixture
def card(monkeypatch):
    yield from stand_in(monkeypatch)


def on_card(rng, **given):
    """Arguments of a call over three sequences, NumPy arrays among those given put on the card."""
    return put(cases.varlen(rng, QUERY_LENS, SEQ_LENS) | given)


def workspace(num_splits):
    sizes = {"num_tokens": NUM_TOKENS, "num_heads": 4, "head_size": 64, "max_seq_len": 96}
    return np.empty(pagedkv.workspace_nbytes("flash_attn_varlen_func", **sizes, num_splits=num_splits), np.uint8)


def call(card, op, arguments, **options):
    """What the op returns, the launches that it made, and the workspaces that it allocated."""
    launches, allocations = len(card.launched), len(card.allocated)
    result = getattr(pagedkv, op)(**arguments, **options)
    return result, card.launched[launches:], [a for a in card.allocated[allocations:] if a.dtype == np.uint8]


def read(card, arguments, **options):
    return call(card, "flash_attn_varlen_func", arguments, **options)


def merge(card, arguments):
    result, (launch,), _ = call(card, "merge_attn_states", arguments)
    return result, launch


# ---- reads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_splits", "kernels"), [(1, ["varlen_attention"]), (3, ["varlen_attention", "merge_splits"])]
)
def test_every_pointer_is_in_its_place_at_first_and_again(card, rng, num_splits, kernels):
    """Three calls of one form, each with arrays of its own: planned once, and nothing is allocated."""
    for _ in range(3):
        fp8 = cases.varlen(rng, QUERY_LENS, SEQ_LENS, kv_cache_dtype="fp8")
        arguments = on_card(rng, **{**fp8, **OPTIONAL, **OUTPUTS, "workspace": workspace(num_splits)})
        out, launches, _ = read(card, arguments, num_splits=num_splits)
        assert [launch["kernel"] for launch in launches] == kernels
        given = pointers(arguments)
        for launch in launches:
            assert {name: launch[name] for name in PARAMETERS[launch["kernel"]]} == {
                name: given[name] for name in PARAMETERS[launch["kernel"]]
            }
        assert out is arguments["out"]
        assert card.allocated == []
    assert [instance.kernel for instance, _, _ in card.loaded] == kernels
    assert card.loaded[0][2] == launches[0]["shared_bytes"] > 0


def test_every_pointer_of_a_decode_step_is_in_its_place(card, rng):
    """One query per sequence: another kernel, with counters of its stream."""
    for _ in range(3):
        fp8 = cases.varlen(rng, [1, 1, 1], SEQ_LENS, kv_cache_dtype="fp8")
        outputs = {"out": np.empty((3, 4, 64), np.float16), "lse_out": np.empty((4, 3), np.float32)}
        arguments = on_card(rng, **{**fp8, **OPTIONAL, **outputs, "workspace": workspace(0)})
        out, (launch,), _ = read(card, arguments, max_seqlen_q=1)
        assert launch["kernel"] == "varlen_decode"
        assert {name: launch[name] for name in pointers(arguments)} == pointers(arguments)
        assert launch["counters"] != 0
        assert out is arguments["out"]
    assert len(card.loaded) == 1


@pytest.mark.parametrize("num_splits", [1, 3])
def test_what_is_not_there_is_null(card, rng, num_splits):
    for _ in range(2):
        _, launches, _ = read(card, on_card(rng), num_splits=num_splits)
        absent = {"alibi_slopes", "s_aux", "k_descale", "v_descale", "lse_out"}
        absent |= {"workspace"} if num_splits == 1 else set()
        for launch in launches:
            names = PARAMETERS[launch["kernel"]]
            assert {name for name in names if launch[name] == 0} == absent & set(names)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_scales_of_a_cache_that_is_not_fp8_reach_no_kernel(card, rng, num_splits):
    """Whether the caller gives arrays or numbers: kernels take any pointer for a scale to multiply by."""
    for descales in ({name: OPTIONAL[name] for name in ("k_descale", "v_descale")}, {"k_descale": 3.0}):
        for _ in range(3):
            _, launches, _ = read(card, on_card(rng, **descales), num_splits=num_splits)
            for launch in launches:
                assert {launch[name] for name in ("k_descale", "v_descale") if name in launch} == {0}


@pytest.mark.parametrize("num_splits", [1, 3])
def test_outputs_that_are_not_given_are_new_at_every_call(card, rng, num_splits):
    arguments, results = on_card(rng), []
    for _ in range(3):
        (out, lse), launches, _ = read(card, arguments, num_splits=num_splits, return_softmax_lse=True)
        assert (out.shape, out.dtype) == ((NUM_TOKENS, 4, 64), np.float16)
        assert (lse.shape, lse.dtype) == ((4, NUM_TOKENS), np.float32)
        for launch in launches:
            assert (out.data.ptr, lse.data.ptr) == (launch["out"], launch["lse_out"])
        results += [out, lse]
    assert len({array.data.ptr for array in results}) == 6


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("given", ["out", "lse_out"])
def test_one_output_given_and_one_not(card, rng, given, num_splits):
    arguments = on_card(rng, **{given: OUTPUTS[given]})
    for _ in range(2):
        (out, lse), launches, _ = read(card, arguments, num_splits=num_splits, return_softmax_lse=True)
        assert {"out": out, "lse_out": lse}[given] is arguments[given]
        for launch in launches:
            assert (out.data.ptr, lse.data.ptr) == (launch["out"], launch["lse_out"])


@pytest.mark.parametrize("num_splits", [2, 3])
def test_a_workspace_is_allocated_where_none_is_given(card, rng, num_splits):
    """The merge reads the states where the read left them."""
    for _ in range(2):
        _, launches, (memory,) = read(card, on_card(rng), num_splits=num_splits)
        assert [launch["workspace"] for launch in launches] == [memory.data.ptr] * 2
        assert memory.size == workspace(num_splits).size


def test_other_options_are_other_launches(card, rng):
    """Equal arrays, in turn with each option: what one planned is not repeated for another."""
    arguments = on_card(rng)
    changes = [{"num_splits": 2}, {"num_splits": 3}, {"causal": True}, {"softmax_scale": 0.5}, {"max_seqlen_q": 20}]
    seen = []
    for _ in range(2):
        launches = [read(card, arguments, **change)[1] for change in changes]
        seen.append([[(launch["grid"], launch["params"].tobytes()) for launch in each] for each in launches])
    assert seen[0] == seen[1]
    assert len({str(each) for each in seen[0]}) == len(changes)


@pytest.mark.parametrize("name", ["block_table", "seqused_k", "cu_seqlens_q"])
def test_indices_of_another_width_are_converted_at_every_call(card, rng, name):
    arguments = on_card(rng)
    arguments[name] = arguments[name].astype(np.int64)
    for _ in range(2):
        _, launches, _ = read(card, arguments, num_splits=2)
        assert arguments[name].data.ptr not in (launch.get(name) for launch in launches)
        assert len({launch[name] for launch in launches if name in launch}) == 1
        assert repeats._replays == {}
    card.is_capturing = True
    with pytest.raises(TypeError, match=f"^{name}: expected int32 under graph capture, got int64"):
        pagedkv.flash_attn_varlen_func(**arguments)


def test_checked_reads_what_indices_and_scales_hold(card, rng):
    fp8 = cases.varlen(rng, QUERY_LENS, SEQ_LENS, kv_cache_dtype="fp8")
    arguments = on_card(rng, **{**fp8, **OPTIONAL})
    wrong = {
        "block_table": (np.full_like(fp8["block_table"], 99), IndexError),
        "seqused_k": (np.array([5, -1, 60], np.int32), ValueError),
        "cu_seqlens_q": (np.array([0, 6, 5, 25], np.int32), ValueError),
        "k_descale": (np.array([0.5, -1], np.float32), ValueError),
    }
    with pagedkv.checked():
        read(card, arguments)
        launches = len(card.launched)
        for name, (array, error) in wrong.items():
            with pytest.raises(error, match=f"^{name}: "):
                pagedkv.flash_attn_varlen_func(**arguments | {name: DeviceArray(array)})
        card.is_capturing = True
        with pytest.raises(RuntimeError, match="checked\\(\\) reads the device"):
            pagedkv.flash_attn_varlen_func(**arguments)
        assert len(card.launched) == launches


@pytest.mark.parametrize("name", ["block_table", "seqused_k", "cu_seqlens_q"])
def test_checked_sees_wide_indices_as_they_are(card, rng, name):
    """Cut to int32 they would be legal."""
    arguments = on_card(rng)
    arguments[name] = arguments[name].astype(np.int64)
    arguments[name].host[-1] += 2**32
    with pagedkv.checked(), pytest.raises((IndexError, ValueError), match=f"^{name}: "):
        pagedkv.flash_attn_varlen_func(**arguments)
    assert card.launched == []


@pytest.mark.parametrize("query_lens", [[], [0, 0]], ids=["no sequences", "no queries"])
def test_no_tokens_no_launch(card, rng, query_lens):
    arguments = put(cases.varlen(rng, query_lens, [9] * len(query_lens)))
    for num_splits in (0, 3):
        (out, lse), launches, _ = read(card, arguments, num_splits=num_splits, return_softmax_lse=True)
        assert (out.shape, lse.shape) == ((0, 4, 64), (4, 0))
        assert launches == []


def test_after_warmup_first_calls_can_be_captured(card, rng):
    """Nothing is loaded then that was not: the same kernels with the same shared memory."""
    pagedkv.warmup("float16", 4, 2, 64, 16, layout="NHD")
    warm = set(card.loaded)
    card.is_capturing = True
    for num_splits in (0, 1, 3):
        arguments = on_card(rng, **OUTPUTS, workspace=workspace(num_splits))
        for hint in (None, 20):
            read(card, arguments, num_splits=num_splits, max_seqlen_q=hint)
        steps = put(cases.varlen(rng, [1] * 25, [9] * 25) | OUTPUTS | {"workspace": workspace(num_splits)})
        read(card, steps, num_splits=num_splits, max_seqlen_q=1)
    merge(card, put(states(rng, num_heads=4, head_size=64)))
    assert set(card.loaded) == warm


# ---- merges ---------------------------------------------------------------------------------------------------------


def test_every_pointer_of_a_merge_is_in_its_place(card, rng):
    for _ in range(3):
        arguments = put(states(rng) | MERGED)
        (out, lse), launch = merge(card, arguments)
        assert {name: launch[name] for name in PARAMETERS["merge_attn_states"]} == pointers(arguments)
        assert (out is arguments["out"], lse is arguments["lse_out"]) == (True, True)
        assert card.allocated == []
    assert len(card.loaded) == 1


@pytest.mark.parametrize("given", [(), ("out",), ("lse_out",)], ids=["none given", "out given", "lse_out given"])
def test_outputs_of_a_merge_that_are_not_given_are_new_at_every_call(card, rng, given):
    arguments, results = put(states(rng) | {name: MERGED[name] for name in given}), []
    for _ in range(3):
        (out, lse), launch = merge(card, arguments)
        assert (out.data.ptr, lse.data.ptr) == (launch["out"], launch["lse_out"])
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((7, 3, 40), np.float16, (3, 7), np.float32)
        results += [array for name, array in (("out", out), ("lse_out", lse)) if name not in given]
    assert len({array.data.ptr for array in results}) == 3 * (2 - len(given))


def test_no_tokens_no_merge(card, rng):
    result, launches, _ = call(card, "merge_attn_states", put(states(rng, num_tokens=0)))
    assert [array.shape for array in result] == [(0, 3, 40), (3, 0)]
    assert launches == []
