"""How decode steps are launched: decided on the host from the problem alone, and tested here without a GPU."""

import numpy as np
import pytest
from cases import FLOATS

import pagedkv
from pagedkv import decode_plan, validate
from pagedkv.instances import DECODES, is_hot
from pagedkv.params import fast_divisor
from pagedkv.workspace import MOST_CTAS

NAMES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "fp8": "__nv_fp8_e4m3"}
NAMES |= {"fp8_e4m3": "__nv_fp8_e4m3", "fp8_e5m2": "__nv_fp8_e5m2"}
NUM_SMS = 6


def aligned(shape, dtype=np.float16, elements=0):
    """Zeros that begin some elements after a 16-byte boundary."""
    dtype = np.dtype(dtype)
    room = np.zeros(int(np.prod(shape)) * dtype.itemsize + 64, np.uint8)
    start = -room.ctypes.data % 16 + elements * dtype.itemsize
    return room[start : start + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)


SIZES = {"seqs": 3, "heads": 4, "kv_heads": 2, "head_size": 64, "block_size": 16, "columns": 5}


def arguments(dtype="float16", kv_cache_dtype="auto", **given):
    """Those of a call. Given are sizes, and for an array how many elements after a boundary it begins."""
    seqs, heads, kv_heads, head_size, block_size, columns = (given.get(name, size) for name, size in SIZES.items())
    cache_dtype = np.dtype(FLOATS[dtype] if kv_cache_dtype == "auto" else np.uint8)
    x = 16 // cache_dtype.itemsize
    arrays = {
        "query": ((seqs, heads, head_size), FLOATS[dtype]),
        "key_cache": ((4, kv_heads, head_size // x, block_size, x), cache_dtype),
        "value_cache": ((4, kv_heads, head_size, block_size), cache_dtype),
        "block_tables": ((seqs, columns), np.int32),
        "seq_lens": ((seqs,), np.int32),
        "out": ((seqs, heads, head_size), FLOATS[dtype]),
    }
    made = {name: aligned(*array, given.get(name, 0)) for name, array in arrays.items()}
    return made | {"kv_cache_dtype": kv_cache_dtype}


def problem(given, *, single_pass=True, **options):
    """The validated problem of a call with these arguments."""
    names = ("scale", "max_seq_len", "alibi_slopes", "sinks", "k_scale", "v_scale", "lse_out")
    plain = dict.fromkeys(names) | {"window_size": (-1, -1), "softcap": 0.0, "return_lse": False}
    return validate.paged_attention(**plain | given | options, single_pass=single_pass)


def instance_of(**sizes):
    return decode_plan.decode_instance(problem(arguments(**sizes)))


# ---- instances ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_instances_follow_dtypes_and_sizes(dtype, kv_cache_dtype):
    instance = instance_of(dtype=dtype, kv_cache_dtype=kv_cache_dtype, head_size=96, block_size=32)
    cache = NAMES[dtype if kv_cache_dtype == "auto" else kv_cache_dtype]
    assert instance.kernel == "paged_attention"
    assert instance.arguments[:4] == (NAMES[dtype], cache, 96, 32)


@pytest.mark.parametrize(("group", "heads"), [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 16), (71, 16)])
def test_large_groups_take_wide_ctas(group, heads):
    """But for float32, whose scan keeps each head's accumulators in the registers of every lane."""
    assert instance_of(heads=2 * group).arguments[4] == heads
    assert instance_of(heads=2 * group, dtype="float32").arguments[4] == 8


@pytest.mark.parametrize("head_size", [16, 64, 128, 192, 256])
@pytest.mark.parametrize("group", [8, 16])
@pytest.mark.parametrize("formats", [("float16", "auto"), ("bfloat16", "fp8"), ("float32", "auto")], ids="-".join)
def test_as_many_tiles_are_on_their_way_as_shared_memory_holds(formats, group, head_size):
    """By hand: rings of 2 * ahead + 1 stages of 32 tokens, and accumulators that no stage holds; in float32 those
    of 8 heads, their queries and weights."""
    sizes = {"dtype": formats[0], "kv_cache_dtype": formats[1], "heads": 2 * group, "head_size": head_size}
    launch = decode_plan.plan_decode(problem(arguments(**sizes)), NUM_SMS).launch
    *_, warps, ahead, _ = launch.instance.arguments
    tile = 32 * head_size * (1 if formats[1] == "fp8" else 2)
    rest = 16 * head_size * 4 if formats[1] == "fp8" and group == 16 else 0
    if formats[0] == "float32":
        assert launch.shared_bytes == warps * 8 * (head_size + head_size + 32) * 4
    else:
        assert launch.shared_bytes == warps * ((2 * ahead + 1) * tile + rest)
        fits_one_more = warps * ((2 * ahead + 3) * tile + rest) <= decode_plan.SHARED_BYTES
        assert ahead == decode_plan.MOST_TILES_AHEAD or not fits_one_more
        assert warps == 4 or 2 * warps * (3 * tile + rest) > decode_plan.SHARED_BYTES
    assert launch.shared_bytes <= decode_plan.SHARED_BYTES
    assert launch.threads == 32 * warps


@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache", "out"])
@pytest.mark.parametrize(("elements", "flag"), [(0, "true"), (1, "false"), (4, "false"), (8, "true")])
def test_each_array_that_moves_in_packs_must_be_aligned(name, elements, flag):
    assert instance_of(**{name: elements}).arguments[-1] == flag


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache"])
def test_each_stride_between_packs_must_be_aligned(name, axis):
    """A stride of four more elements than the axes within."""
    given = arguments()
    array = given[name]
    strides = list(array.strides)
    strides[axis] += 8
    strides[0] += 16 * array.shape[1] * axis  # no overlap
    given[name] = np.lib.stride_tricks.as_strided(aligned((1 << 16,)), array.shape, strides)
    assert decode_plan.decode_instance(problem(given)).arguments[-1] == "false"


def test_the_list_of_instances_has_all_kinds():
    kinds = {(instance.arguments[0], instance.arguments[1]) for instance in DECODES}
    sixteen = {"__half", "__nv_bfloat16"}
    fp8 = {"__nv_fp8_e4m3", "__nv_fp8_e5m2"}
    assert kinds == {(d, c) for d in sixteen for c in fp8 | {d}} | {("float", "float")}
    for place, wanted in ((2, {64, 128, 256}), (3, {8, 16, 32, 128}), (4, {8, 16}), (7, {"true", "false"})):
        assert {instance.arguments[place] for instance in DECODES} == wanted
    cold = [instance for instance in DECODES if not is_hot(instance)]
    assert all(instance.arguments[2] == 256 or instance.arguments[1] == "float" for instance in cold)


# ---- grid, workspace, counters --------------------------------------------------------------------------------------


def planned(single_pass=False, num_sms=NUM_SMS, **options):
    options = dict(options)
    sizes = {name: options.pop(name) for name in (*SIZES, "kv_cache_dtype") if name in options}
    return decode_plan.plan_decode(problem(arguments(**sizes), single_pass=single_pass, **options), num_sms)


def params_of(plan):
    return plan.launch.params.view(decode_plan.DECODE_PARAMS)[()]


@pytest.mark.parametrize(("heads", "kv_heads", "units"), [(4, 2, 2), (8, 1, 1), (18, 2, 2), (34, 2, 4), (71, 1, 5)])
def test_a_cta_per_sequence_and_part_of_a_group_in_v1(heads, kv_heads, units):
    plan = planned(single_pass=True, seqs=5, heads=heads, kv_heads=kv_heads)
    assert plan.launch.grid == (5 * units,)
    assert (plan.workspace_bytes, plan.num_counters) == (0, 0)
    params = params_of(plan)
    assert params["units_per_kv_head"] == units // kv_heads
    assert params["units_per_sequence"] == units
    assert (params["num_partitions"], params["num_states"]) == (1, 0)
    assert params["partition_size"] >= 2**31 - 1  # longer than any sequence


@pytest.mark.parametrize(
    ("partition_size", "max_seq_len", "partitions"),
    [(16, None, 5), (32, None, 3), (80, None, 1), (512, None, 1), (16, 33, 3), (16, 32, 2), (16, 1000, 5)],
)
def test_a_cta_per_partition(partition_size, max_seq_len, partitions):
    """Of what the table holds, 5 blocks of 16, or of the hint, where that is less."""
    plan = planned(partition_size=partition_size, max_seq_len=max_seq_len, seqs=3, heads=34, kv_heads=2)
    assert plan.launch.grid == (3 * 4 * partitions,)
    assert plan.num_counters == 3 * 4
    assert plan.workspace_bytes == 3 * 34 * partitions * (64 + 2) * 4
    params = params_of(plan)
    assert params["partition_size"] == partition_size
    assert params["num_partitions"] == partitions
    assert params["num_states"] == 3 * 34 * partitions


@pytest.mark.parametrize(
    ("groups", "tiles", "together", "shares"),
    [
        (1, 1, 1, 1),  # one tile
        (8, 32, 1, 64),  # four tiles, one for each warp
        (8, 128, 1, 128),  # no more than one for each SM, 16 for each unit
        (64, 128, 1, 128),
        (8, 4096, 1, 264),  # two for each SM
        (256, 128, 1, 256),  # one for each unit rather than 264
        (2048, 32, 1, 256),  # eight units each
        (2048, 4, 1, 256),  # short ones
        (3, 2, 1, 3),
        (200, 128, 1, 264),  # 200 or 400 would be too few or too many
        (1, 1, 8, 1),  # one tile of each of eight bundles
        (1, 32, 8, 8),  # as many CTAs as for eight groups of one bundle
        (1, 128, 8, 16),
        (1, 4096, 8, 33),
        (2, 4096, 8, 32),  # one for each 1/16 of a group rather than 33
        (32, 128, 8, 32),
        (5, 2, 7, 5),
        (100, 4096, 7, 34),  # 37 of seven CTAs are the most; with 34 no share has more than three groups
    ],
)
def test_shares(groups, tiles, together, shares):
    """Tiles of each group, and CTAs of each share: of all groups' bundles as many as there may be CTAs."""
    assert decode_plan._num_shares(groups, tiles, together, 132, many_tiles=64) == shares


@pytest.mark.parametrize(("together", "shares"), [(1, MOST_CTAS), (7, MOST_CTAS // 7), (8, MOST_CTAS // 8)])
def test_shares_are_no_more_than_a_workspace_holds(together, shares):
    assert decode_plan._num_shares(1, 10**6, together, 10_000, many_tiles=64) == shares


def test_a_share_has_a_cta_for_each_bundle_even_on_a_small_card():
    assert decode_plan._num_shares(4, 1000, 8, 3, many_tiles=64) == 1


@pytest.mark.parametrize(
    ("bundles", "together"), [(1, 1), (2, 2), (3, 3), (7, 7), (8, 8), (9, 3), (11, 1), (16, 8), (40, 8)]
)
def test_bundles_that_are_taken_side_by_side(bundles, together):
    assert decode_plan._ctas_per_share(bundles) == together


@pytest.mark.parametrize(
    ("sizes", "at_once", "together", "groups"),
    [
        ({"kv_heads": 8}, 1, 8, 1),
        ({"kv_heads": 8, "seqs": 400}, 4, 2, 1),
        ({"kv_heads": 32, "seqs": 100}, 4, 8, 1),
        ({"kv_heads": 32}, 1, 8, 4),
        ({"kv_heads": 9}, 1, 3, 3),
        ({"kv_heads": 11}, 1, 1, 11),
        ({"kv_heads": 2, "heads": 142}, 1, 5, 2),  # five parts of each of two groups
        ({"kv_heads": 1}, 1, 1, 1),
    ],
    ids=str,
)
def test_a_share_is_done_by_a_cta_for_each_bundle_of_a_group(sizes, at_once, together, groups):
    sizes = {"heads": sizes["kv_heads"], "seqs": 7, "columns": 900} | sizes
    plan = planned(num_sms=132, **sizes)
    params = params_of(plan)
    assert (params["units_per_bundle"], params["ctas_per_share"], params["groups_per_sequence"]) == (
        at_once,
        together,
        groups,
    )
    assert params["units_per_sequence"] == at_once * together * groups
    (ctas,) = plan.launch.grid
    tiles = -(-900 * 16 // 32)
    assert ctas == together * decode_plan._num_shares(sizes["seqs"] * groups, tiles, together, 132, many_tiles=64)
    assert 120 < ctas <= 264
    assert params["num_states"] == 2 * ctas * at_once * plan.launch.instance.arguments[4]


@pytest.mark.parametrize(("heads", "width", "at_once"), [(4, 8, 1), (34, 16, 2)])
def test_two_states_of_each_head_for_each_share(heads, width, at_once):
    plan = planned(num_sms=6, seqs=7, columns=900, heads=heads)
    (ctas,) = plan.launch.grid
    assert 1 < ctas <= 12
    assert plan.workspace_bytes == 2 * ctas * at_once * width * (64 + 2) * 4
    assert plan.num_counters == 7 * -(-heads // 2 // width) * 2
    params = params_of(plan)
    assert params["partition_size"] == 0
    assert params["num_states"] == 2 * ctas * at_once * width
    assert params["units_per_bundle"] == at_once


@pytest.mark.parametrize(
    ("sizes", "at_once"),
    [
        ({"seqs": 32}, 1),  # 256 units, one for each CTA
        ({"seqs": 64}, 2),
        ({"seqs": 111}, 2),  # four of them at once would leave 222 for 264 CTAs
        ({"seqs": 113}, 4),
        ({"seqs": 10_000}, 4),
        ({"seqs": 10_000, "heads": 4, "kv_heads": 1}, 1),  # a sequence has one unit
        ({"seqs": 10_000, "heads": 6, "kv_heads": 6}, 2),
        ({"seqs": 10_000, "heads": 5, "kv_heads": 5}, 1),
        ({"seqs": 10_000, "heads": 68, "kv_heads": 2}, 2),  # units of 16 heads, of which a workspace holds two
        ({"seqs": 10_000, "head_size": 256}, 2),  # a CTA of two warps
    ],
    ids=str,
)
def test_units_that_a_cta_takes_at_once(sizes, at_once):
    plan = planned(num_sms=132, **{"heads": 32, "kv_heads": 8, "columns": 64} | sizes)
    params = params_of(plan)
    assert params["units_per_bundle"] == at_once
    assert params["groups_per_sequence"] * params["ctas_per_share"] * at_once == params["units_per_sequence"]
    assert params["team_warps"] * at_once * 32 == plan.launch.threads


def test_partitions_are_taken_by_all_warps():
    for options in ({"partition_size": 16}, {"single_pass": True}):
        params = params_of(planned(seqs=100, **options))
        assert (params["units_per_bundle"], params["ctas_per_share"], params["team_warps"]) == (1, 1, 4)
        assert params["groups_per_sequence"] == params["units_per_sequence"] == 2


def test_fewer_tiles_fill_a_card_if_they_are_of_fp8():
    plain, fp8 = (
        planned(num_sms=6, seqs=1, columns=384, heads=4, kv_cache_dtype=kind).launch.grid
        for kind in ("auto", "fp8_e4m3")
    )
    assert plain == (6,) and fp8 == (12,)


def test_more_tiles_than_can_be_counted_are_not_shared():
    given = arguments()
    given["block_tables"] = np.broadcast_to(np.zeros(1, np.int32), (3, 2**30))
    plan = decode_plan.plan_decode(problem(given, single_pass=False), NUM_SMS)
    assert (plan.launch.grid, plan.workspace_bytes, plan.num_counters) == ((6,), 0, 0)
    assert params_of(plan)["partition_size"] == 2**31 - 1


@pytest.mark.parametrize("options", [{}, {"partition_size": 16}, {"partition_size": 32, "max_seq_len": 70}], ids=str)
@pytest.mark.parametrize("heads", [4, 16, 68])
@pytest.mark.parametrize("seqs", [3, 4000])
def test_what_workspace_nbytes_says_is_enough(options, heads, seqs):
    plan = planned(num_sms=10_000, seqs=seqs, heads=heads, kv_heads=4, **options)
    sizes = {"num_tokens": seqs, "num_heads": heads, "head_size": 64, "max_seq_len": 80} | options
    assert plan.workspace_bytes <= pagedkv.workspace_nbytes("paged_attention_v2", **sizes)


def test_more_partitions_than_a_grid_has():
    given = arguments()
    given["block_tables"] = np.broadcast_to(np.zeros(1, np.int32), (3, 2**26))
    asked = problem(given, single_pass=False, partition_size=1)
    with pytest.raises(ValueError, match="query: expected fewer sequences and partitions in one call"):
        decode_plan.plan_decode(asked, NUM_SMS)


# ---- parameters -----------------------------------------------------------------------------------------------------


def test_parameters_of_every_array():
    """Each stride from its own array, all different."""
    given = {
        "query": np.zeros((3, 7, 80), np.float16)[:, :6, :64],
        "key_cache": np.zeros((4, 3, 4, 16, 16), np.uint8)[:, :2],
        "value_cache": np.zeros((8, 2, 80, 16), np.uint8)[::2, :, :64],
        "block_tables": np.zeros((3, 10), np.int32)[:, ::2],
        "seq_lens": np.zeros((3, 4), np.int32)[:, 1],
        "out": np.zeros((3, 9, 96), np.float16)[:, :6, :64],
        "lse_out": np.zeros((6, 11), np.float32)[:, :9:3],
        "alibi_slopes": np.zeros(30, np.float32)[::5],
        "sinks": np.zeros(42, np.float32)[::7],
        "k_scale": np.ones(8, np.float32)[::4],
        "v_scale": np.ones(12, np.float32)[::6],
    }
    options = {"scale": 0.25, "softcap": 30.0, "window_size": (12, 0), "kv_cache_dtype": "fp8"}
    plan = decode_plan.plan_decode(problem(given, **options), NUM_SMS)
    params = params_of(plan)
    expected = {
        "query_token_stride": 560, "query_head_stride": 80,
        "key_block_stride": 3072, "key_head_stride": 1024, "value_block_stride": 5120, "value_head_stride": 1280,
        "key_token_stride": 0, "value_token_stride": 0, "query_start_stride": 0, "block_size": fast_divisor(16),
        "table_stride": 10, "table_step": 2, "seq_len_stride": 4,
        "out_token_stride": 864, "out_head_stride": 96,
        "lse_head_stride": 11, "lse_token_stride": 3, "slope_stride": 5, "sink_stride": 7,
        "scale": 0.25, "softcap": 30.0, "k_scale": 1.0, "v_scale": 1.0, "k_scale_stride": 4, "v_scale_stride": 6,
        "num_seqs": 3, "num_heads": 6, "queries_per_kv": 3, "units_per_kv_head": 1, "units_per_sequence": 2,
        "units_per_bundle": 1, "ctas_per_share": 1, "groups_per_sequence": 2, "team_warps": 4,
        "window_left": 12, "partition_size": 2**31 - 1, "num_partitions": 1, "num_states": 0, "sinks_are_float32": 1,
    }  # fmt: skip
    assert {name: params[name].item() for name in params.dtype.names} == expected


def test_what_is_left_out_has_strides_of_zero():
    params = params_of(planned(single_pass=True))
    names = ("lse_head_stride", "lse_token_stride", "slope_stride", "sink_stride", "k_scale_stride", "v_scale_stride")
    assert not any(params[name] for name in names)
    assert (params["window_left"], params["softcap"], params["scale"]) == (-1, 0, np.float32(64**-0.5))


def test_scales_that_are_numbers_travel_in_the_struct():
    given = arguments(kv_cache_dtype="fp8_e5m2")
    asked = problem(given, k_scale=0.5, v_scale=2.0)
    params = params_of(decode_plan.plan_decode(asked, NUM_SMS))
    assert (params["k_scale"], params["v_scale"]) == (0.5, 2.0)
    assert (params["k_scale_stride"], params["v_scale_stride"]) == (0, 0)
    one = np.ones(1, np.float32)
    params = params_of(decode_plan.plan_decode(problem(given, k_scale=one, v_scale=one), NUM_SMS))
    assert (params["k_scale_stride"], params["v_scale_stride"]) == (0, 0)


def test_scales_of_a_cache_that_is_not_fp8_do_not_reach_the_kernel():
    asked = problem(arguments(), k_scale=np.full(2, 3, np.float32), v_scale=np.full(2, 5, np.float32))
    params = params_of(decode_plan.plan_decode(asked, NUM_SMS))
    assert (params["k_scale"], params["v_scale"], params["k_scale_stride"], params["v_scale_stride"]) == (1, 1, 0, 0)
    assert decode_plan.decode_arrays(asked)[7:9] == [None, None]
    params = params_of(decode_plan.plan_decode(problem(arguments(), k_scale=3.0, v_scale=5.0), NUM_SMS))
    assert (params["k_scale"], params["v_scale"]) == (1, 1)


@pytest.mark.parametrize(("dtype", "flag"), [(np.float32, 1), (np.float16, 0)])
def test_the_dtype_of_sinks_is_told(dtype, flag):
    asked = problem(arguments(), sinks=np.zeros(4, dtype))
    assert params_of(decode_plan.plan_decode(asked, NUM_SMS))["sinks_are_float32"] == flag


def test_arrays_come_in_the_order_of_the_parameters():
    optional = {"alibi_slopes": np.zeros(4, np.float32), "sinks": np.zeros(4, np.float32)}
    optional |= {"k_scale": np.ones(2, np.float32), "v_scale": np.ones(2, np.float32)}
    given = arguments(kv_cache_dtype="fp8") | optional | {"lse_out": np.zeros((4, 3), np.float32)}
    order = ["query", "key_cache", "value_cache", "block_tables", "seq_lens"]
    order += ["alibi_slopes", "sinks", "k_scale", "v_scale", "out", "lse_out"]
    for name, array in zip(order, decode_plan.decode_arrays(problem(given)), strict=True):
        assert array.owner is given[name]


# ---- addresses ------------------------------------------------------------------------------------------------------


def off_by(nbytes, array):
    """The same contents at an address so many bytes after a multiple of 16."""
    room = np.zeros(array.nbytes + 32, np.uint8)
    start = -room.ctypes.data % 16 + nbytes
    moved = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


OPTIONAL = {
    "alibi_slopes": np.zeros(4, np.float32),
    "sinks": np.zeros(4, np.float32),
    "k_scale": np.ones(2, np.float32),
    "v_scale": np.ones(2, np.float32),
    "lse_out": np.zeros((4, 3), np.float32),
}


@pytest.mark.parametrize("name", ["query", "block_tables", "seq_lens", "out", *OPTIONAL])
def test_arrays_off_their_elements(name):
    given = arguments(kv_cache_dtype="fp8") | OPTIONAL
    decode_plan.plan_decode(problem(given | {name: off_by(4, given[name])}), NUM_SMS)
    with pytest.raises(ValueError, match=f"{name}: expected an address that is a multiple of "):
        decode_plan.plan_decode(problem(given | {name: off_by(1, given[name])}), NUM_SMS)


@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_caches_off_their_elements(name):
    given = arguments()
    with pytest.raises(ValueError, match=f"{name}: expected an address that is a multiple of 2, got "):
        decode_plan.plan_decode(problem(given | {name: off_by(1, given[name])}), NUM_SMS)


@pytest.mark.parametrize("options", [{}, {"partition_size": 16}], ids=str)
def test_a_workspace_off_its_packs(options):
    sizes = {"num_tokens": 3, "num_heads": 4, "head_size": 64, "max_seq_len": 80} | options
    memory = np.zeros(pagedkv.workspace_nbytes("paged_attention_v2", **sizes), np.uint8)
    for nbytes in (0, 4, 8):
        asked = problem(arguments(), single_pass=False, workspace=off_by(nbytes, memory), **options)
        if nbytes == 0:
            decode_plan.plan_decode(asked, NUM_SMS)
            continue
        with pytest.raises(ValueError, match="workspace: expected an address that is a multiple of 16, got "):
            decode_plan.plan_decode(asked, NUM_SMS)
