"""How varlen reads are launched: decided on the host from the problem alone, and tested here without a GPU."""

import cases
import numpy as np
import pytest
from cases import FLOATS
from test_decode_plan import aligned, off_by

import pagedkv
from pagedkv import ptx_ops, validate, varlen_plan

SIZES = {"tokens": 40, "seqs": 3, "heads": 4, "kv_heads": 2, "head_size": 64, "block_size": 16, "columns": 5}


def arguments(dtype="float16", kv_cache_dtype="auto", **given):
    """Those of a call. Given are sizes, and for an array how many elements after a boundary it begins."""
    tokens, seqs, heads, kv_heads, head_size, block_size, columns = (given.get(name, n) for name, n in SIZES.items())
    cache_dtype = np.dtype(FLOATS[dtype] if kv_cache_dtype == "auto" else np.uint8)
    cache = ((4, block_size, kv_heads, head_size), cache_dtype)
    arrays = {
        "q": ((tokens, heads, head_size), FLOATS[dtype]),
        "k": cache,
        "v": cache,
        "block_table": ((seqs, columns), np.int32),
        "seqused_k": ((seqs,), np.int32),
        "cu_seqlens_q": ((seqs + 1,), np.int32),
        "out": ((tokens, heads, head_size), FLOATS[dtype]),
    }
    made = {name: aligned(*array, given.get(name, 0)) for name, array in arrays.items()}
    return made | {"kv_cache_dtype": kv_cache_dtype}


def problem(given, **options):
    names = ("max_seqlen_q", "max_seqlen_k", "softmax_scale", "alibi_slopes", "s_aux", "k_descale", "v_descale")
    plain = dict.fromkeys((*names, "lse_out", "workspace"))
    plain |= {"causal": False, "window_size": (-1, -1), "softcap": 0.0, "num_splits": 0, "layout": "NHD"}
    return validate.varlen_attention(**plain | {"return_softmax_lse": False} | given | options)


def planned(options=None, **sizes):
    return varlen_plan.plan_varlen(problem(arguments(**sizes), **options or {}))


def params_of(launch):
    return launch.params.view(varlen_plan.VARLEN_PARAMS)[()]


# ---- instances ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, ("__half", "__half", 64, 64, 4, "true")),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"}, ("__nv_bfloat16", "__nv_fp8_e5m2", 64, 64, 4, "true")),
        ({"head_size": 128}, ("__half", "__half", 128, 64, 4, "true")),
        ({"head_size": 136}, ("__half", "__half", 136, 32, 4, "true")),
        ({"dtype": "float32", "head_size": 40}, ("float", "float", 40, 32, 4, "true")),
        ({"kv_cache_dtype": "fp8", "head_size": 40}, ("__half", "__nv_fp8_e4m3", 40, 64, 4, "false")),  # half a pack
    ],
    ids=str,
)
def test_instances_follow_dtypes_and_sizes(sizes, expected):
    instance = varlen_plan.varlen_instance(problem(arguments(**sizes)))
    assert (instance.kernel, instance.arguments) == ("varlen_attention", expected)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize(("elements", "flag"), [(0, "true"), (1, "false"), (4, "false"), (8, "true")])
def test_each_array_that_moves_in_packs_must_be_aligned(name, elements, flag):
    assert varlen_plan.varlen_instance(problem(arguments(**{name: elements}))).arguments[-1] == flag


@pytest.mark.parametrize(
    ("name", "axis"), [("q", 0), ("q", 1), ("k", 0), ("k", 1), ("k", 2), ("v", 0), ("v", 1), ("v", 2)]
)
def test_each_stride_between_packs_must_be_aligned(name, axis):
    given = arguments()
    array = given[name]
    strides = list(array.strides)
    strides[axis] += 8
    given[name] = np.lib.stride_tricks.as_strided(aligned((1 << 16,)), array.shape, strides)
    assert varlen_plan.varlen_instance(problem(given)).arguments[-1] == "false"


def test_rows_that_end_inside_a_pack_are_not_aligned_wherever_they_begin():
    """What follows them may be anything."""
    given = arguments(kv_cache_dtype="fp8", head_size=40)
    for name in "kv":
        given[name] = aligned((4, 16, 2, 48), np.uint8)[..., :40]
    assert varlen_plan.varlen_instance(problem(given)).arguments[-1] == "false"


@pytest.mark.parametrize("head_size", [8, 40, 64, 128, 192, 256])
@pytest.mark.parametrize("formats", [("float16", "auto"), ("bfloat16", "fp8"), ("float32", "auto")], ids="-".join)
def test_shared_memory_fits_every_card(formats, head_size):
    """99 KB are what a CTA may have on sm_86, sm_89 and sm_120."""
    launch = planned(dtype=formats[0], kv_cache_dtype=formats[1], head_size=head_size).launch
    assert 0 < launch.shared_bytes <= 99 * 1024
    assert launch.threads == 128


# ---- grid, workspace ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "options", "tiles"),
    [
        ({}, {}, 1 + 3),  # 80 rows are one tile of 64 and something, and each of three sequences may end in a part
        ({"heads": 2}, {}, 0 + 3),
        ({"dtype": "float32"}, {}, 2 + 3),  # tiles of 32
        ({"tokens": 1000}, {}, 31 + 3),
        ({"tokens": 1000}, {"max_seqlen_q": 32}, 3),  # no sequence has more than a tile
        ({"tokens": 1000}, {"max_seqlen_q": np.int64(33)}, 3 * 2),
        ({"tokens": 1000}, {"max_seqlen_q": 1000}, 31 + 3),
        ({"tokens": 3}, {"max_seqlen_q": 1}, 3),
        ({"heads": 142, "tokens": 3}, {"max_seqlen_q": 1}, 3 * 2),  # groups of 71
    ],
    ids=str,
)
def test_a_cta_for_each_tile_that_there_may_be(sizes, options, tiles):
    plan = planned(options, **sizes)
    assert plan.launch.grid == (tiles * 2,)
    assert (plan.workspace_bytes, plan.merge) == (0, None)


@pytest.mark.parametrize("splits", [2, 7])
def test_splits_have_ctas_states_and_a_merge(splits):
    plan = planned({"num_splits": splits})
    assert plan.launch.grid == (4 * 2 * splits,)
    assert plan.workspace_bytes == 40 * 4 * splits * (64 + 2) * 4
    assert params_of(plan.launch)["num_states"] == 40 * 4 * splits
    assert plan.merge.instance.arguments == ("__half", 64, "true")
    assert plan.merge.grid == (40 * 4 * 32 // 128,)
    sizes = {"num_tokens": 40, "num_heads": 4, "head_size": 64, "max_seq_len": 80, "num_splits": splits}
    assert plan.workspace_bytes == pagedkv.workspace_nbytes("flash_attn_varlen_func", **sizes)


def test_more_splits_than_a_grid_has():
    """2^15 tiles of 64 rows, 2 kv heads and 2^16 splits."""
    given = arguments()
    for name in ("q", "out"):
        given[name] = np.lib.stride_tricks.as_strided(given[name], (2**20, 4, 64), (0, 128, 2))
    with pytest.raises(ValueError, match="q: expected fewer query tokens and splits in one call"):
        varlen_plan.plan_varlen(problem(given, num_splits=2**16))


# ---- parameters -----------------------------------------------------------------------------------------------------


def test_parameters_of_every_array():
    """Each stride from its own array, all different."""
    given = {
        "q": np.zeros((5, 7, 80), np.float16)[:, :6, :64],
        "k": np.zeros((4, 16, 3, 80), np.uint8)[:, :, :2, :64],
        "v": np.zeros((4, 20, 5, 64), np.uint8)[:, :16, :2],
        "block_table": np.zeros((3, 10), np.int32)[:, ::2],
        "seqused_k": np.zeros((3, 4), np.int32)[:, 1],
        "cu_seqlens_q": np.zeros((4, 6), np.int32)[:, 2],
        "out": np.zeros((5, 9, 96), np.float16)[:, :6, :64],
        "lse_out": np.zeros((6, 15), np.float32)[:, ::3],
        "alibi_slopes": np.zeros(30, np.float32)[::5],
        "s_aux": np.zeros(42, np.float32)[::7],
        "k_descale": np.ones(8, np.float32)[::4],
        "v_descale": np.ones(12, np.float32)[::6],
    }
    options = {"softmax_scale": 0.25, "softcap": 30.0, "window_size": (12, 3), "kv_cache_dtype": "fp8", "num_splits": 5}
    params = params_of(varlen_plan.plan_varlen(problem(given, **options)).launch)
    expected = {
        "query_token_stride": 560, "query_head_stride": 80,
        "key_block_stride": 3840, "key_token_stride": 240, "key_head_stride": 80,
        "value_block_stride": 6400, "value_token_stride": 320, "value_head_stride": 64,
        "table_stride": 10, "table_step": 2, "seq_len_stride": 4, "query_start_stride": 6,
        "out_token_stride": 864, "out_head_stride": 96, "lse_head_stride": 15, "lse_token_stride": 3,
        "slope_stride": 5, "sink_stride": 7, "num_states": 5 * 6 * 5,
        "scale": 0.25, "softcap": 30.0, "k_scale": 1.0, "v_scale": 1.0, "k_scale_stride": 4, "v_scale_stride": 6,
        "num_seqs": 3, "window_left": 12, "window_right": 3, "sinks_are_float32": 1,
    }  # fmt: skip
    divisors = {"block_size": 16, "queries_per_kv": 3, "num_kv_heads": 2, "num_splits": 5, "num_heads": 6}
    assert {name: params[name].item() for name in expected} == expected
    assert {name: params[name]["divisor"].item() for name in divisors} == divisors
    assert set(params.dtype.names) == {*expected, *divisors}


def test_arrays_come_in_the_order_of_the_parameters():
    given = arguments(kv_cache_dtype="fp8") | {"lse_out": np.zeros((4, 40), np.float32)}
    given |= {"alibi_slopes": np.zeros(4, np.float32), "s_aux": np.zeros(4, np.float32)}
    given |= {"k_descale": np.ones(2, np.float32), "v_descale": np.ones(2, np.float32)}
    order = ["q", "k", "v", "block_table", "seqused_k", "cu_seqlens_q", "alibi_slopes", "s_aux"]
    order += ["k_descale", "v_descale", "out", "lse_out"]
    asked = problem(given)
    for name, array in zip(order, varlen_plan.varlen_arrays(asked), strict=True):
        assert array.owner is given[name]
    merged = varlen_plan.merge_split_arrays(varlen_plan.varlen_arrays(asked), None)
    names = ["cu_seqlens_q", "s_aux", "v_descale", "out", "lse_out"]
    assert [array.owner for array in merged[1:]] == [given[name] for name in names]


def test_scales_of_a_cache_that_is_not_fp8_do_not_reach_the_kernel():
    asked = problem(arguments(), k_descale=np.full(2, 3, np.float32), v_descale=np.full(2, 5, np.float32))
    assert varlen_plan.varlen_arrays(asked)[8:10] == [None, None]
    params = params_of(varlen_plan.plan_varlen(problem(arguments(), k_descale=3.0, v_descale=5.0)).launch)
    assert (params["k_scale"], params["v_scale"], params["k_scale_stride"], params["v_scale_stride"]) == (1, 1, 0, 0)


# ---- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v", "block_table", "seqused_k", "cu_seqlens_q", "out"])
def test_arrays_off_their_elements(name):
    given = arguments()
    varlen_plan.plan_varlen(problem(given | {name: off_by(4, given[name])}))
    with pytest.raises(ValueError, match=f"^{name}: expected an address that is a multiple of "):
        varlen_plan.plan_varlen(problem(given | {name: off_by(1, given[name])}))


def test_a_workspace_off_its_packs():
    memory = np.zeros(40 * 4 * 2 * (64 + 2) * 4, np.uint8)
    varlen_plan.plan_varlen(problem(arguments(), num_splits=2, workspace=off_by(0, memory)))
    with pytest.raises(ValueError, match="workspace: expected an address that is a multiple of 16, got "):
        varlen_plan.plan_varlen(problem(arguments(), num_splits=2, workspace=off_by(8, memory)))


@pytest.mark.ptx
def test_fewer_ctas_than_bounds_allow_do_the_same(ptx_backend, rng):
    """max_seqlen_q sizes the launch and never changes a result."""
    given = cases.varlen(rng, [33, 1, 0, 17], [70, 5, 3, 40])
    expected = cases.call_varlen(ptx_backend, given)
    for got, want in zip(cases.call_varlen(ptx_backend, given, max_seqlen_q=33), expected, strict=True):
        cases.assert_same_bits(got, want)


@pytest.mark.ptx
@pytest.mark.parametrize(
    ("head_size", "kv_cache_dtype"),
    [(32, "auto"), (40, "auto"), (64, "auto"), (112, "auto"), (128, "auto"), (32, "fp8"), (96, "fp8"), (128, "fp8")],
)
def test_tiles_move_through_shared_memory_without_bank_conflicts(ptx_backend, rng, head_size, kv_cache_dtype):
    """Copies, the matrices of both products, and the accumulators that are left."""
    given = cases.varlen(rng, [20], [70], head_size=head_size, kv_cache_dtype=kv_cache_dtype)
    with ptx_ops.profiled() as profiles:
        cases.call_varlen(ptx_backend, given)
    (profile,) = profiles
    moved = {"cp": "shared copy", "ldmatrix": "shared load", "st": "shared store"}
    seen = set()
    for (_, opcode), tally in profile.counters.tallies.items():
        kind = moved.get(opcode[0])
        if kind in tally.traffic:
            seen.add(opcode[0])
            assert tally.traffic[kind].units == tally.traffic[kind].ideal_units, opcode
    assert seen >= {"ldmatrix", "st"}
