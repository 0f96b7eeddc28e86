"""How varlen reads are launched: decided on the host from the problem alone, and tested here without a GPU."""

import cases
import numpy as np
import pytest
from cases import FLOATS
from test_decode_plan import aligned, off_by

import pagedkv
from pagedkv import decode_plan, ptx_ops, validate, varlen_plan
from pagedkv.params import DECODE_PARAMS, fast_divisor

NUM_SMS = 132
DECODE = {"max_seqlen_q": 1}
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
    return varlen_plan.plan_varlen(problem(arguments(**sizes), **options or {}), NUM_SMS)


def params_of(launch):
    struct = DECODE_PARAMS if launch.instance.kernel == "varlen_decode" else varlen_plan.VARLEN_PARAMS
    return launch.params.view(struct)[()]


# ---- instances ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, ("__half", "__half", 64, 64, 4, 1, "false", "true")),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"},
         ("__nv_bfloat16", "__nv_fp8_e5m2", 64, 32, 4, 1, "false", "true")),
        ({"head_size": 128}, ("__half", "__half", 128, 64, 4, 1, "false", "true")),
        ({"tokens": 97}, ("__half", "__half", 64, 64, 4, 2, "false", "true")),  # 33 queries of 2 heads on average
        ({"tokens": 97, "head_size": 136}, ("__half", "__half", 136, 32, 4, 1, "false", "true")),
        ({"tokens": 97, "dtype": "float32", "head_size": 40}, ("float", "float", 40, 32, 4, 1, "true", "true")),
        ({"kv_cache_dtype": "fp8", "head_size": 40},  # half a pack
         ("__half", "__nv_fp8_e4m3", 40, 32, 4, 1, "false", "false")),
    ],
    ids=str,
)  # fmt: skip
def test_instances_follow_dtypes_and_sizes(sizes, expected):
    instance = varlen_plan.varlen_instance(problem(arguments(**sizes)))
    assert (instance.kernel, instance.arguments) == ("varlen_attention", expected)


@pytest.mark.parametrize(
    ("options", "keys", "flag"),
    [
        ({"window_size": (3, 3)}, 64, "false"),
        ({"s_aux": np.zeros(4, np.float32)}, 64, "false"),
        ({"softcap": 5.0}, 32, "true"),
        ({"alibi_slopes": np.zeros(4, np.float32)}, 32, "true"),
    ],
    ids=["window", "sinks", "cap", "slopes"],
)
def test_scores_that_need_more_than_a_factor_have_an_instance(options, keys, flag):
    _, _, _, tile, _, _, has_options, _ = varlen_plan.varlen_instance(problem(arguments(), **options)).arguments
    assert (tile, has_options) == (keys, flag)


@pytest.mark.parametrize(("bound", "tiles"), [(32, 1), (33, 2), (40, 2)])
def test_tiles_are_as_large_as_the_longest_query_fills(bound, tiles):
    assert varlen_plan.varlen_instance(problem(arguments(), max_seqlen_q=bound)).arguments[5] == tiles


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


@pytest.mark.parametrize("options", [{}, DECODE], ids=["any", "decode"])
@pytest.mark.parametrize("head_size", [8, 40, 64, 128, 192, 256])
@pytest.mark.parametrize("formats", [("float16", "auto"), ("bfloat16", "fp8"), ("float32", "auto")], ids="-".join)
def test_shared_memory_fits_every_card(formats, head_size, options):
    """99 KB are what a CTA may have on sm_86, sm_89 and sm_120."""
    launch = planned(options, dtype=formats[0], kv_cache_dtype=formats[1], head_size=head_size).launch
    assert 0 < launch.shared_bytes <= 99 * 1024
    assert launch.threads in (64, 128)


# ---- which calls decode ---------------------------------------------------------------------------------------------


def kernel_of(options=None, **sizes):
    return varlen_plan.varlen_instance(problem(arguments(**sizes), **options or {})).kernel


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({"max_seqlen_q": 0}, "varlen_decode"),
        ({"max_seqlen_q": 1}, "varlen_decode"),
        ({"max_seqlen_q": 1, "num_splits": 0}, "varlen_decode"),
        ({"max_seqlen_q": 2}, "varlen_attention"),
        ({"max_seqlen_q": None}, "varlen_attention"),  # sequences may have any number of queries
        ({"max_seqlen_q": 1, "num_splits": 1}, "varlen_attention"),  # splits are as the caller says
        ({"max_seqlen_q": 1, "num_splits": 2}, "varlen_attention"),
    ],
    ids=str,
)
def test_calls_of_one_query_a_sequence_decode(options, kernel):
    assert kernel_of(options) == kernel
    assert planned(options).launch.instance.kernel == kernel


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_both_layouts_decode(layout):
    given = arguments()
    if layout == "HND":
        given |= {name: aligned((4, 2, 16, 64)) for name in "kv"}
    assert varlen_plan.varlen_instance(problem(given, layout=layout, **DECODE)).kernel == "varlen_decode"


@pytest.mark.parametrize(
    ("sizes", "kernel"),
    [
        ({"dtype": "float32"}, "varlen_attention"),
        ({"head_size": 8}, "varlen_decode"),
        ({"head_size": 40}, "varlen_decode"),
        ({"kv_cache_dtype": "fp8", "head_size": 48}, "varlen_decode"),
        ({"kv_cache_dtype": "fp8", "head_size": 8}, "varlen_attention"),  # half a pack
        ({"kv_cache_dtype": "fp8_e5m2", "head_size": 40}, "varlen_attention"),
    ],
    ids=str,
)
def test_16_bit_queries_on_rows_of_whole_packs_decode(sizes, kernel):
    assert kernel_of(DECODE, **sizes) == kernel


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize(("elements", "kernel"), [(0, "decode"), (1, "attention"), (4, "attention"), (8, "decode")])
def test_only_aligned_arrays_decode(name, elements, kernel):
    assert kernel_of(DECODE, **{name: elements}) == f"varlen_{kernel}"


@pytest.mark.parametrize(
    ("name", "axis"), [("q", 0), ("q", 1), ("k", 0), ("k", 1), ("k", 2), ("v", 0), ("v", 1), ("v", 2)]
)
def test_only_aligned_strides_decode(name, axis):
    given = arguments()
    array = given[name]
    for elements, kernel in ((4, "varlen_attention"), (8, "varlen_decode")):
        strides = list(array.strides)
        strides[axis] += 2 * elements
        given[name] = np.lib.stride_tricks.as_strided(aligned((1 << 16,)), array.shape, strides)
        assert varlen_plan.varlen_instance(problem(given, **DECODE)).kernel == kernel


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, ("__half", "__half", 64, 8, 4, 2)),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"}, ("__nv_bfloat16", "__nv_fp8_e5m2", 64, 8, 4, 2)),
        ({"head_size": 128}, ("__half", "__half", 128, 8, 4, 1)),
        ({"head_size": 128, "heads": 16}, ("__half", "__half", 128, 8, 4, 1)),
        ({"head_size": 128, "heads": 18}, ("__half", "__half", 128, 16, 4, 1)),
        ({"head_size": 128, "heads": 142}, ("__half", "__half", 128, 16, 4, 1)),
        ({"head_size": 256}, ("__half", "__half", 256, 8, 2, 1)),
        ({"head_size": 128, "kv_cache_dtype": "fp8"}, ("__half", "__nv_fp8_e4m3", 128, 8, 4, 2)),
        ({"head_size": 128, "kv_cache_dtype": "fp8", "heads": 18}, ("__half", "__nv_fp8_e4m3", 128, 16, 4, 1)),
    ],
    ids=str,
)
def test_instances_that_decode_follow_dtypes_and_sizes(sizes, expected):
    """Heads of a warp, warps and tiles ahead: as for the packed layout, whatever the size of blocks."""
    for block_size in (1, 16, 17):
        instance = varlen_plan.varlen_instance(problem(arguments(**sizes, block_size=block_size), **DECODE))
        assert (instance.file, instance.kernel, instance.arguments) == ("varlen_decode.cu", "varlen_decode", expected)


# ---- grid, workspace ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "options", "tiles"),
    [
        ({}, {}, 1 + 3),  # 80 rows are one tile of 64 and something, and each of three sequences may end in a part
        ({"heads": 2}, {}, 0 + 3),
        ({"dtype": "float32"}, {}, 2 + 3),  # tiles of 32
        ({"tokens": 1000}, {}, 15 + 3),
        ({"tokens": 1000}, {"max_seqlen_q": 32}, 3),  # no sequence has more than a tile
        ({"tokens": 1000}, {"max_seqlen_q": np.int64(65)}, 3 * 2),
        ({"tokens": 1000}, {"max_seqlen_q": 1000}, 15 + 3),
        ({"tokens": 3}, {"max_seqlen_q": 1, "num_splits": 1}, 3),
        ({"heads": 142, "tokens": 3}, {"max_seqlen_q": 1, "num_splits": 1}, 3),  # groups of 71
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
        varlen_plan.plan_varlen(problem(given, num_splits=2**16), NUM_SMS)


@pytest.mark.parametrize(
    ("sizes", "options", "splits"),
    [
        ({"tokens": 8, "seqs": 1}, {}, 10),  # a tile of two kv heads: of 132 times 2 CTAs each may have 132
        ({"tokens": 8, "seqs": 1}, {"max_seqlen_k": 1000}, 4),  # 16 tiles of 64 keys, four of them a split
        ({"tokens": 8, "seqs": 1, "kv_cache_dtype": "fp8"}, {"max_seqlen_k": 1000}, 8),  # tiles of 32 keys
        ({"tokens": 8, "seqs": 1}, {"max_seqlen_k": 100}, 1),
        ({"tokens": 8, "seqs": 1}, {"num_splits": 1}, 1),
        ({"tokens": 4096, "seqs": 1}, {}, 2),  # 64 tiles of two kv heads
        ({"tokens": 9000, "seqs": 1}, {}, 1),
        ({"tokens": 800, "seqs": 100, "kv_heads": 4}, {"max_seqlen_q": 8}, 1),
    ],
    ids=str,
)
def test_few_ctas_split_long_sequences(sizes, options, splits):
    """num_splits=0 gives every SM its CTAs; each split has some tiles of keys."""
    plan = planned(options, columns=160, **sizes)
    assert params_of(plan.launch)["num_splits"]["divisor"] == splits
    assert (plan.merge is None) == (splits == 1)
    assert plan.workspace_bytes <= pagedkv.workspace_nbytes(
        "flash_attn_varlen_func", num_tokens=sizes["tokens"], num_heads=4, head_size=64, max_seq_len=2560
    )


@pytest.mark.parametrize(
    ("sizes", "options", "is_left"),
    [
        ({"tokens": 130, "seqs": 40}, {"max_seqlen_q": 90}, True),
        ({"tokens": 130, "seqs": 40}, {}, True),
        ({"tokens": 130, "seqs": 40}, {"max_seqlen_q": 4}, False),  # nearly all have as many
        ({"tokens": 130, "seqs": 1}, {}, False),
        ({"tokens": 130, "seqs": 40}, {"max_seqlen_q": 90, "num_splits": 1}, False),
        ({"tokens": 130, "seqs": 40, "dtype": "float32"}, {"max_seqlen_q": 90}, False),
        ({"tokens": 130, "seqs": 40, "q": 4}, {"max_seqlen_q": 90}, False),  # not aligned
    ],
    ids=str,
)
def test_sequences_with_one_query_among_longer_ones_are_left_to_decode(sizes, options, is_left):
    plan = planned(options, **sizes)
    assert params_of(plan.launch)["least_queries"] == (2 if is_left else 0)
    assert (plan.before is not None) == is_left
    if is_left:
        assert plan.before.launch.instance.kernel == "varlen_decode"
        assert plan.before.num_counters == sizes["seqs"] * 2
        assert plan.before.workspace_bytes > 0 == plan.workspace_bytes


@pytest.mark.parametrize(
    ("sizes", "at_once", "together", "groups"),
    [
        ({"seqs": 3}, 1, 2, 1),
        ({"seqs": 3, "kv_heads": 8, "heads": 64}, 1, 8, 1),
        ({"seqs": 300, "kv_heads": 8, "heads": 64}, 4, 2, 1),
        ({"seqs": 3, "kv_heads": 40, "heads": 40}, 1, 8, 5),
        ({"seqs": 3, "kv_heads": 11, "heads": 11}, 1, 1, 11),
        ({"seqs": 3, "heads": 142}, 1, 5, 2),  # five parts of each group
    ],
    ids=str,
)
def test_decode_shares_tiles_out_evenly(sizes, at_once, together, groups):
    """A CTA for each share and bundle of a group, and for each CTA two states of every head that it takes."""
    plan = planned(DECODE, tokens=sizes["seqs"], columns=640, **sizes)
    instance, params = plan.launch.instance, params_of(plan.launch)
    *_, heads, warps, _ = instance.arguments
    taken = (params["units_per_bundle"], params["ctas_per_share"], params["groups_per_sequence"])
    assert taken == (at_once, together, groups)
    assert params["team_warps"] * at_once == warps
    (ctas,) = plan.launch.grid
    tiles = 640 * 16 // 32
    many_tiles = decode_plan.MANY_TILES
    shares = decode_plan._num_shares(sizes["seqs"] * groups, tiles, together, NUM_SMS, many_tiles)
    assert ctas == shares * together
    assert params["num_states"] == 2 * ctas * at_once * heads
    assert plan.workspace_bytes == params["num_states"] * (64 + 2) * 4
    assert plan.num_counters == sizes["seqs"] * at_once * together * groups
    assert plan.merge is None


@pytest.mark.parametrize("options", [{}, {"max_seqlen_k": 70}], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"heads": 68, "kv_heads": 4}, {"heads": 40, "kv_heads": 40}], ids=str)
@pytest.mark.parametrize("seqs", [1, 3, 4000])
@pytest.mark.parametrize("num_sms", [1, 132, 10_000])
def test_what_workspace_nbytes_says_is_enough_for_decode(options, sizes, seqs, num_sms):
    asked = problem(arguments(tokens=seqs, seqs=seqs, **sizes), **DECODE, **options)
    plan = varlen_plan.plan_varlen(asked, num_sms)
    query = {"num_tokens": seqs, "num_heads": sizes.get("heads", 4), "head_size": 64}
    needed = pagedkv.workspace_nbytes("flash_attn_varlen_func", **query, max_seq_len=80)
    assert 0 < plan.workspace_bytes <= needed
    assert needed == pagedkv.workspace_nbytes("paged_attention_v2", **query, max_seq_len=80)


def test_sequences_too_long_to_count_their_tiles_are_not_shared():
    given = arguments(tokens=3)
    given["block_table"] = np.broadcast_to(np.zeros(1, np.int32), (3, 2**30))
    plan = varlen_plan.plan_varlen(problem(given, **DECODE), NUM_SMS)
    assert (plan.launch.grid, plan.workspace_bytes, plan.num_counters) == ((6,), 0, 0)
    assert params_of(plan.launch)["partition_size"] == 2**31 - 1


# ---- parameters -----------------------------------------------------------------------------------------------------


def strided():
    """The arrays of one axis or of indices that a call may have, each with strides of its own."""
    return {
        "block_table": np.zeros((3, 10), np.int32)[:, ::2],
        "seqused_k": np.zeros((3, 4), np.int32)[:, 1],
        "cu_seqlens_q": np.zeros((4, 6), np.int32)[:, 2],
        "lse_out": np.zeros((6, 15), np.float32)[:, ::3],
        "alibi_slopes": np.zeros(30, np.float32)[::5],
        "s_aux": np.zeros(42, np.float32)[::7],
        "k_descale": np.ones(8, np.float32)[::4],
        "v_descale": np.ones(12, np.float32)[::6],
    }


def test_parameters_of_every_array():
    """Each stride from its own array, all different."""
    given = strided() | {
        "q": np.zeros((5, 7, 80), np.float16)[:, :6, :64],
        "k": np.zeros((4, 16, 3, 80), np.uint8)[:, :, :2, :64],
        "v": np.zeros((4, 20, 5, 64), np.uint8)[:, :16, :2],
        "out": np.zeros((5, 9, 96), np.float16)[:, :6, :64],
    }
    options = {"softmax_scale": 0.25, "softcap": 30.0, "window_size": (12, 3), "kv_cache_dtype": "fp8", "num_splits": 5}
    params = params_of(varlen_plan.plan_varlen(problem(given, **options), NUM_SMS).launch)
    expected = {
        "query_token_stride": 560, "query_head_stride": 80,
        "key_block_stride": 3840, "key_token_stride": 240, "key_head_stride": 80,
        "value_block_stride": 6400, "value_token_stride": 320, "value_head_stride": 64,
        "table_stride": 10, "table_step": 2, "seq_len_stride": 4, "query_start_stride": 6,
        "out_token_stride": 864, "out_head_stride": 96, "lse_head_stride": 15, "lse_token_stride": 3,
        "slope_stride": 5, "sink_stride": 7, "num_states": 5 * 6 * 5,
        "scale": 0.25, "softcap": 30.0, "k_scale": 1.0, "v_scale": 1.0, "k_scale_stride": 4, "v_scale_stride": 6,
        "num_seqs": 3, "least_queries": 0, "window_left": 12, "window_right": 3, "sinks_are_float32": 1,
    }  # fmt: skip
    divisors = {"block_size": 16, "queries_per_kv": 3, "num_kv_heads": 2, "num_splits": 5, "num_heads": 6}
    assert {name: params[name].item() for name in expected} == expected
    assert {name: params[name]["divisor"].item() for name in divisors} == divisors
    assert set(params.dtype.names) == {*expected, *divisors}


def test_parameters_of_every_array_of_decode():
    """Each stride from its own array, all different."""
    given = strided() | {
        "q": aligned((5, 7, 80))[:, :6, :64],
        "k": aligned((4, 17, 3, 80), np.uint8)[:, :, :2, :64],
        "v": aligned((4, 20, 5, 64), np.uint8)[:, :17, :2],
        "out": aligned((5, 9, 96))[:, :6, :64],
    }
    options = {"softmax_scale": 0.25, "softcap": 30.0, "window_size": (12, 3), "kv_cache_dtype": "fp8", **DECODE}
    plan = varlen_plan.plan_varlen(problem(given, **options), NUM_SMS)
    params = params_of(plan.launch)
    expected = {
        "query_token_stride": 560, "query_head_stride": 80,
        "key_block_stride": 4080, "key_token_stride": 240, "key_head_stride": 80,
        "value_block_stride": 6400, "value_token_stride": 320, "value_head_stride": 64,
        "table_stride": 10, "table_step": 2, "seq_len_stride": 4, "query_start_stride": 6,
        "out_token_stride": 864, "out_head_stride": 96, "lse_head_stride": 15, "lse_token_stride": 3,
        "slope_stride": 5, "sink_stride": 7, "block_size": fast_divisor(17),
        "scale": 0.25, "softcap": 30.0, "k_scale": 1.0, "v_scale": 1.0, "k_scale_stride": 4, "v_scale_stride": 6,
        "num_seqs": 3, "num_heads": 6, "queries_per_kv": 3, "units_per_kv_head": 1, "units_per_sequence": 2,
        "units_per_bundle": 1, "ctas_per_share": 2, "groups_per_sequence": 1, "team_warps": 4,
        "window_left": 12, "partition_size": 0, "num_partitions": 1, "sinks_are_float32": 1,
        "num_states": 2 * plan.launch.grid[0] * 8,
    }  # fmt: skip
    assert {name: params[name].item() for name in params.dtype.names} == expected


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
    params = params_of(varlen_plan.plan_varlen(problem(arguments(), k_descale=3.0, v_descale=5.0), NUM_SMS).launch)
    assert (params["k_scale"], params["v_scale"], params["k_scale_stride"], params["v_scale_stride"]) == (1, 1, 0, 0)


# ---- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, DECODE], ids=["any", "decode"])
@pytest.mark.parametrize("name", ["q", "k", "v", "block_table", "seqused_k", "cu_seqlens_q", "out"])
def test_arrays_off_their_elements(name, options):
    given = arguments()
    varlen_plan.plan_varlen(problem(given | {name: off_by(4, given[name])}, **options), NUM_SMS)
    with pytest.raises(ValueError, match=f"^{name}: expected an address that is a multiple of "):
        varlen_plan.plan_varlen(problem(given | {name: off_by(1, given[name])}, **options), NUM_SMS)


@pytest.mark.parametrize("options", [{"num_splits": 2}, DECODE], ids=["splits", "decode"])
def test_a_workspace_off_its_packs(options):
    sizes = {"num_tokens": 40, "num_heads": 4, "head_size": 64, "max_seq_len": 80}
    nbytes = pagedkv.workspace_nbytes("flash_attn_varlen_func", **sizes, num_splits=options.get("num_splits", 0))
    memory = np.zeros(nbytes, np.uint8)
    varlen_plan.plan_varlen(problem(arguments(), workspace=off_by(0, memory), **options), NUM_SMS)
    with pytest.raises(ValueError, match="workspace: expected an address that is a multiple of 16, got "):
        varlen_plan.plan_varlen(problem(arguments(), workspace=off_by(8, memory), **options), NUM_SMS)


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
    """Copies, the matrices of both products, the accumulators that are left. Eight lanes copy whole lines; rows that
    end inside one take up to twice as long to copy."""
    given = cases.varlen(rng, [20], [70], head_size=head_size, kv_cache_dtype=kv_cache_dtype)
    with ptx_ops.profiled() as profiles:
        cases.call_varlen(ptx_backend, given)
    (profile,) = profiles
    is_whole = head_size * (1 if kv_cache_dtype == "fp8" else 2) % 128 == 0
    moved = {"cp": "shared copy", "ldmatrix": "shared load", "st": "shared store"}
    seen = set()
    for (_, opcode), tally in profile.counters.tallies.items():
        kind = moved.get(opcode[0])
        if kind in tally.traffic:
            seen.add(opcode[0])
            most = 2 if opcode[0] == "cp" and not is_whole else 1
            assert tally.traffic[kind].units <= most * tally.traffic[kind].ideal_units, opcode
    assert seen >= {"ldmatrix", "st"}
