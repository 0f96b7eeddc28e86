"""Varlen reads whose caller says that no sequence has more than one query: a kernel of their own decodes them."""

import itertools

import cases
import numpy as np
import pytest

from pagedkv import decode_plan, dtypes, ptx_ops, varlen_plan

SLOPES = np.array([1.0, 0.5, 0.11, 0.02], np.float32)
SINKS = np.array([0.5, -2.0, 3.0, 1.0], np.float32)
FORMATS = [
    ("float16", "auto"),
    ("bfloat16", "auto"),
    ("float16", "fp8_e4m3"),
    ("float16", "fp8_e5m2"),
    ("bfloat16", "fp8_e4m3"),
    ("bfloat16", "fp8_e5m2"),
]
LAYOUTS = ["NHD", "HND"]
HEAD_SIZES = [8, 40, 64, 72, 80, 96, 112, 120, 128, 192, 256]
FP8_HEAD_SIZES = [16, 48, 64, 80, 128, 256]
BLOCK_SIZES = [1, 8, 16, 17, 32, 64]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The kernels that the interpreter runs: one alone, unless a test has looked at others and forgotten them."""
    names = []
    launch = ptx_ops.launch

    def record(planned, arrays):
        names.append(planned.instance.kernel)
        launch(planned, arrays)

    monkeypatch.setattr(ptx_ops, "launch", record)
    yield names
    assert set(names) <= {"varlen_decode"}


def one_query_each(rng, seq_lens, **sizes):
    return cases.varlen(rng, [1] * len(seq_lens), seq_lens, **sizes)


def call(backend, arguments, **options):
    return cases.call_varlen(backend, arguments, max_seqlen_q=1, **options)


def check(backend, arguments, **options):
    return cases.check_varlen(backend, arguments, max_seqlen_q=1, **options)


def assert_states_equal(actual, expected):
    for got, want in zip(actual, expected, strict=True):
        cases.assert_same_bits(got, want)


def of_formats(dtype, kv_cache_dtype):
    return {"dtype": cases.FLOATS[dtype], "kv_cache_dtype": kv_cache_dtype}


# ---- which kernel ---------------------------------------------------------------------------------------------------


@pytest.mark.ptx
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_seqlen_q": 1}, ["varlen_decode"]),
        ({"max_seqlen_q": 1, "num_splits": 0}, ["varlen_decode"]),
        ({}, ["varlen_decode", "varlen_attention"]),
        ({"max_seqlen_q": 1, "num_splits": 1}, ["varlen_attention"]),
        ({"max_seqlen_q": 1, "num_splits": 2}, ["varlen_attention", "merge_splits"]),
    ],
    ids=str,
)
def test_the_kernel_that_runs(ptx_backend, rng, kernels, options, expected):
    cases.check_varlen(ptx_backend, one_query_each(rng, [40, 0, 5]), **options)
    assert kernels == expected
    kernels.clear()


@pytest.mark.ptx
@pytest.mark.parametrize("options", [{}, {"window_size": (50, 0), "s_aux": SINKS, "alibi_slopes": SLOPES}], ids=str)
def test_both_kernels_agree(ptx_backend, rng, kernels, options):
    """Each is as near to the oracle as it promises; the one that decodes need not be near the other by more."""
    arguments = one_query_each(rng, [1, 33, 0, 100, 64])
    decoded = check(ptx_backend, arguments, **options)
    assert kernels == ["varlen_decode"]
    one_split = check(ptx_backend, arguments, **options, num_splits=1)
    kernels.clear()
    np.testing.assert_allclose(decoded[0].astype(np.float32), one_split[0].astype(np.float32), atol=2e-3)
    np.testing.assert_allclose(decoded[1], one_split[1], rtol=1e-5, atol=1e-5)


@pytest.mark.ptx
def test_no_queries_but_padding(ptx_backend, rng):
    """max_seqlen_q of 0 says that no sequence has a query."""
    arguments = cases.varlen(rng, [0, 0, 0], [5, 0, 40])
    padding = np.full((2, 4, 64), np.nan, np.float16)
    out, lse = np.full((2, 4, 64), 7, np.float16), np.full((4, 2), 7, np.float32)
    cases.call_varlen(ptx_backend, arguments, q=padding, out=out, lse_out=lse, max_seqlen_q=0)
    assert np.all(out == 7) and np.all(lse == 7)


# ---- formats and sizes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_formats_and_layouts(read_backend, rng, formats, layout):
    arguments = one_query_each(rng, [40, 1, 70, 32], layout=layout, **of_formats(*formats))
    check(read_backend, arguments)


@pytest.mark.parametrize(("head_size", "block_size"), list(zip(HEAD_SIZES, itertools.cycle(BLOCK_SIZES))))
def test_head_and_block_sizes(read_backend, rng, head_size, block_size):
    sizes = {"head_size": head_size, "block_size": block_size, "layout": LAYOUTS[head_size // 8 % 2]}
    seq_lens = [2 * block_size + 1, 33, max(block_size - 1, 1), block_size]
    check(read_backend, one_query_each(rng, seq_lens, **sizes))


@pytest.mark.parametrize(("head_size", "block_size"), list(zip(FP8_HEAD_SIZES, itertools.cycle(BLOCK_SIZES[::-1]))))
def test_head_and_block_sizes_of_fp8(read_backend, rng, head_size, block_size):
    sizes = {"head_size": head_size, "block_size": block_size, "layout": LAYOUTS[head_size // 16 % 2]}
    seq_lens = [2 * block_size + 1, 33, max(block_size - 1, 1), block_size]
    check(read_backend, one_query_each(rng, seq_lens, kv_cache_dtype="fp8", **sizes))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_block_sizes(read_backend, rng, block_size, layout):
    """Lengths around tiles of 32 tokens and around blocks."""
    seq_lens = sorted({n + offset for n in (block_size, 32, 64) for offset in (-1, 0, 1)} - {0})
    sizes = {"num_heads": 2, "num_kv_heads": 2, "head_size": 16, "block_size": block_size, "layout": layout}
    check(read_backend, one_query_each(rng, seq_lens, **sizes))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("queries_per_kv", [1, 3, 5, 8, 16, 71])
def test_group_sizes(read_backend, rng, queries_per_kv, kv_cache_dtype):
    """The KV heads weigh differently by scale too, so that a head of a wrong group shows."""
    num_kv_heads = 1 if queries_per_kv == 71 else 3
    arguments = one_query_each(
        rng,
        [1, 17, 40],
        num_heads=num_kv_heads * queries_per_kv,
        num_kv_heads=num_kv_heads,
        head_size=16,
        kv_cache_dtype=kv_cache_dtype,
        k_descale=np.linspace(0.02, 0.06, num_kv_heads, dtype=np.float32),
        v_descale=np.linspace(0.3, 0.1, num_kv_heads, dtype=np.float32),
    )
    check(read_backend, arguments)


@pytest.mark.parametrize("kv_heads", [2, 7, 8, 9, 11, 16])
def test_numbers_of_kv_heads(read_backend, rng, kv_heads):
    """As many as are read side by side, more and fewer of them, and numbers that cannot be divided."""
    sizes = {"num_heads": kv_heads, "num_kv_heads": kv_heads, "head_size": 16}
    check(read_backend, one_query_each(rng, [40, 1, 70], **sizes), layout="NHD")


# ---- sequences without a query, padding, empty ones -----------------------------------------------------------------


@pytest.mark.parametrize("seq_lens", [[0, 5, 0], [0, 0, 0], [0, 70, 0]], ids=str)
@pytest.mark.parametrize("s_aux", [None, SINKS], ids=["without_sinks", "with_sinks"])
def test_empty_sequences(read_backend, rng, seq_lens, s_aux):
    out, lse = check(read_backend, one_query_each(rng, seq_lens), s_aux=s_aux)
    empty = np.array(seq_lens) == 0
    assert not out[empty].any()
    wanted = np.full(4, -np.inf, np.float32) if s_aux is None else s_aux
    np.testing.assert_array_equal(lse[:, empty], np.repeat(wanted[:, None], sum(empty), axis=1))


@pytest.mark.parametrize("padding_rows", [0, 3])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([0, 1, 0, 0, 1, 1, 0], [40, 33, 0, 5, 0, 70, 33]),
        ([1, 0, 1], [70, 300, 5]),
        ([0, 0, 1], [1, 1, 1]),
        ([1, 0, 0], [40, 0, 100]),
    ],
    ids=str,
)
def test_sequences_without_a_query_and_padding_rows(read_backend, rng, query_lens, seq_lens, padding_rows):
    """Their keys are nobody's; rows behind the last start, which may be NaN, keep what they held."""
    arguments = cases.varlen(rng, query_lens, seq_lens)
    num_tokens = sum(query_lens)
    expected = check(read_backend, arguments, s_aux=SINKS)
    rows = num_tokens + padding_rows
    out = read_backend.put(np.full((rows, 4, 64), 7, np.float16))
    lse = read_backend.put(np.full((4, rows), 7, np.float32))
    padded = np.concatenate([arguments["q"], np.full((padding_rows, 4, 64), np.nan, np.float16)])
    out, lse = call(read_backend, arguments, s_aux=SINKS, q=padded, out=out, lse_out=lse)
    assert_states_equal((out[:num_tokens], lse[:, :num_tokens]), expected)
    assert np.all(out[num_tokens:] == 7)
    assert np.all(lse[:, num_tokens:] == 7)


def test_keys_of_a_sequence_without_a_query_are_nobodys(read_backend, rng):
    """None of them is visible: entries of its table may be anything, and so may what would be its blocks."""
    arguments = cases.varlen(rng, [1, 0, 1, 0], [40, 70, 5, 33])
    expected = check(read_backend, arguments)
    block_table = arguments["block_table"].copy()
    block_table[1], block_table[3] = -1, 2**31 - 1
    assert_states_equal(call(read_backend, arguments, block_table=block_table), expected)


@pytest.mark.parametrize("num_seqs", [31, 32, 33, 65])
def test_more_sequences_than_lanes(read_backend, rng, num_seqs):
    """A warp adds up the tiles of all sequences, a slice of them in each lane. Some have no query, others no key."""
    query_lens = [int(n) for n in rng.integers(0, 4, num_seqs).clip(max=1)]
    seq_lens = [int(n) for n in rng.integers(-20, 70, num_seqs).clip(min=0)]
    arguments = cases.varlen(rng, query_lens, seq_lens, num_heads=1, num_kv_heads=1, head_size=16)
    check(read_backend, arguments)


# ---- what is not seen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("formats", "layout"), list(zip(FORMATS, itertools.cycle(LAYOUTS))), ids=str)
def test_zero_times_nan(read_backend, rng, formats, layout):
    """A slot past the length gets weight 0, and 0 * NaN is NaN. So is all of block 0, which no sequence has."""
    arguments = one_query_each(rng, [15, 16, 17, 31, 33], layout=layout, **of_formats(*formats))
    for name in "kv":
        poison = cases.poisoned((1, *arguments[name].shape[1:]), arguments[name].dtype)
        arguments[name] = np.concatenate([poison, arguments[name]])
    arguments["block_table"] += (arguments["block_table"] >= 0) & (arguments["block_table"] < 2**31 - 1)
    clean = {name: cases.without_poison(arguments[name]) for name in ("k", "v")}
    for options in ({}, {"window_size": (9, 0)}):
        poisoned = check(read_backend, arguments, **options)
        assert_states_equal(poisoned, call(read_backend, arguments, **options, **clean))


@pytest.mark.parametrize("infinity", [np.inf, -np.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_infinities_in_seen_values(read_backend, rng, infinity, layout):
    """One makes its feature infinite, for the heads that see it, and nothing else."""
    arguments = one_query_each(rng, [5, 70, 3], layout=layout)
    where = (3, 1) if layout == "NHD" else (1, 3)
    arguments["v"][(arguments["block_table"][1, 0], *where, 7)] = infinity
    expected = np.zeros((3, 4, 64))
    expected[1, 2:, 7] = infinity
    out, lse = call(read_backend, arguments, softmax_scale=0.01)
    np.testing.assert_array_equal(np.where(np.isfinite(out), 0, out), expected)
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("head_size", [40, 64])
def test_a_key_infinitely_far_away(read_backend, rng, head_size):
    """A logit of -inf has no weight; what is multiplied beside the last feature must not make it NaN."""
    arguments = one_query_each(rng, [5, 70, 3], head_size=head_size)
    arguments["q"][..., -1] = -1
    arguments["k"][arguments["block_table"][1, 0], [3, 12], :, -1] = np.inf
    check(read_backend, arguments)


@pytest.mark.parametrize("garbage", [-1, 2**31 - 1, -(2**31), "num_blocks", "a block of another sequence"])
def test_garbage_in_table_tails(read_backend, rng, garbage):
    arguments = one_query_each(rng, [0, 15, 16, 17, 70])
    expected = check(read_backend, arguments)
    entry = {"num_blocks": len(arguments["k"]), "a block of another sequence": arguments["block_table"][4, 0]}
    block_table = arguments["block_table"].copy()
    for row, seq_len in zip(block_table, arguments["seqused_k"], strict=True):
        row[-(-seq_len // 16) :] = entry.get(garbage, garbage)
    assert_states_equal(call(read_backend, arguments, block_table=block_table), expected)


@pytest.mark.parametrize("window", [1, 15, 17, 40, 64])
def test_evicted_blocks_before_the_window_are_not_followed(read_backend, rng, window):
    arguments = one_query_each(rng, [16, 17, 64, 70, 130])
    options = {"window_size": (window - 1, 0)}
    expected = call(read_backend, arguments, **options)
    for block_table, seq_len in zip(arguments["block_table"], arguments["seqused_k"], strict=True):
        num_evicted = max(seq_len - window, 0) // 16
        for cache in (arguments["k"], arguments["v"]):
            cache[block_table[:num_evicted]] = np.nan
        block_table[:num_evicted] = np.resize([-1, 2**31 - 1], num_evicted)
    assert_states_equal(check(read_backend, arguments, **options), expected)


def test_a_window_of_w_holds_w_tokens(read_backend, rng):
    """With a query of zeros every key weighs the same, and the LSE is the log of their number."""
    arguments = one_query_each(rng, [1, 6, 7, 8, 70])
    arguments["q"][:] = 0
    for options in ({"window_size": (6, 0)}, {"window_size": (6, 3)}, {"window_size": (6, -1), "causal": True}):
        _, lse = check(read_backend, arguments, **options)
        np.testing.assert_allclose(lse, np.broadcast_to(np.log([1, 6, 7, 7, 7]), (4, 5)), rtol=1e-6, atol=1e-6)


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_options_together(read_backend, rng, kv_cache_dtype, layout):
    options = {"alibi_slopes": SLOPES, "softcap": 30.0, "s_aux": SINKS, "window_size": (45, 0), "softmax_scale": 0.3}
    arguments = one_query_each(rng, [1, 15, 47, 80], layout=layout, kv_cache_dtype=kv_cache_dtype)
    check(read_backend, arguments, **options)
    check(read_backend, arguments, **options | {"s_aux": SINKS.astype(np.float16)})


@pytest.mark.parametrize("sign", [1, -1], ids=["near_plus_6e4", "near_minus_6e4"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_magnitude_of_logits(read_backend, rng, dtype, sign):
    """Logits of 63 * 32 * 29.75 plus quarters, all exact in float32: neither exp nor a sum of products may overflow."""
    arguments = one_query_each(rng, [1, 17, 70], dtype=cases.FLOATS[dtype])
    arguments["q"][:] = sign * 32
    arguments["q"][:, :, 0] = 0.25
    arguments["k"][~np.isnan(arguments["k"])] = 29.75
    first = arguments["k"][..., 0]
    first[...] = np.where(np.isnan(first), first, rng.integers(0, 8, first.shape).astype(first.dtype))
    _, lse = check(read_backend, arguments, softmax_scale=1.0)
    assert np.all(np.abs(lse - sign * 59976) < 8)


# ---- strides --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_different_strides_of_keys_and_values(read_backend, rng, layout):
    """Keys with the strides of the other layout, values every second block of a longer pool, tables with spare
    columns and index arrays of every third element."""
    arguments = one_query_each(rng, [40, 1, 70], layout=layout, block_size=17)
    expected = check(read_backend, arguments)
    k = read_backend.put(cases.to_hnd(arguments["k"])).swapaxes(1, 2)
    long = np.repeat(arguments["v"], 2, axis=0)
    long[1::2] = np.nan
    views = {"k": k, "v": read_backend.put(long)[::2]}
    for name in ("block_table", "seqused_k", "cu_seqlens_q"):
        wide = np.repeat(arguments[name], 3, axis=-1)
        wide[..., 1::3] = wide[..., 2::3] = -1
        views[name] = read_backend.put(wide)[..., ::3]
    result = call(read_backend, cases.put_all(read_backend, arguments) | views)
    assert_states_equal(result, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_queries_results_and_one_pool(read_backend, rng, layout):
    """Queries of a qkv tensor, keys and values in one row of [.., 2 * head_size], outputs with room between heads."""
    arguments = one_query_each(rng, [40, 1, 70], layout=layout)
    expected = check(read_backend, arguments)
    qkv = np.full((3, 8, 64), np.nan, np.float16)
    qkv[:, :4] = arguments["q"]
    pool = read_backend.put(np.concatenate([arguments["k"], arguments["v"]], axis=-1))
    wide = read_backend.put(np.full((3, 7, 64), 7, np.float16))
    lse = read_backend.put(np.full((3, 4), 7, np.float32))
    views = {"q": read_backend.put(qkv)[:, :4], "k": pool[..., :64], "v": pool[..., 64:]}
    outputs = {"out": wide[:, :4], "lse_out": lse.T}
    assert_states_equal(call(read_backend, cases.put_all(read_backend, arguments) | views | outputs), expected)
    assert np.all(read_backend.get(wide)[:, 4:] == 7)


# ---- shares ---------------------------------------------------------------------------------------------------------

SHARED = {
    "two": (1, 2, {"num_heads": 4, "num_kv_heads": 2}),
    "one_by_one": (1, 1, {"num_heads": 4, "num_kv_heads": 2}),
    "three_side_by_side": (1, 3, {"num_heads": 6, "num_kv_heads": 6}),
    "two_teams": (2, 1, {"num_heads": 4, "num_kv_heads": 4}),
    "four_teams_side_by_side": (4, 2, {"num_heads": 16, "num_kv_heads": 16, "kv_cache_dtype": "fp8"}),
    "parts_of_groups": (2, 3, {"num_heads": 72, "num_kv_heads": 2}),
}


@pytest.mark.ptx
@pytest.mark.parametrize("shares", [1, 5, 40])
@pytest.mark.parametrize("kind", SHARED)
def test_shares_of_any_size(ptx_backend, rng, monkeypatch, kind, shares):
    """Shares that cut sequences into many parts or hold many of them, done by teams and by CTAs side by side; of forty
    shares each is one tile at most, and some are nothing."""
    at_once, together, sizes = SHARED[kind]
    monkeypatch.setattr(decode_plan, "_units_per_bundle", lambda *sizes: at_once)
    monkeypatch.setattr(decode_plan, "_ctas_per_share", lambda bundles: together)
    monkeypatch.setattr(decode_plan, "_num_shares", lambda *sizes: shares)
    arguments = cases.varlen(rng, [1, 1, 0, 1, 1], [1, 0, 33, 150, 32], head_size=16, **sizes)
    num_heads = sizes["num_heads"]
    options = {"s_aux": np.linspace(-1, 2, num_heads, dtype=np.float32)}
    options["alibi_slopes"] = np.geomspace(0.1, 0.01, num_heads, dtype=np.float32)
    check(ptx_backend, arguments, **options, window_size=(110, 0) if shares == 40 else (-1, -1))


@pytest.mark.ptx
def test_shares_that_are_merged_from_the_last_and_the_first(ptx_backend, rng, monkeypatch):
    """Logits that grow or fall along a sequence: its parts must be brought to one maximum, wherever it lies."""
    monkeypatch.setattr(decode_plan, "_num_shares", lambda *sizes: 5)
    for growth in (3.0, -3.0):
        arguments = one_query_each(rng, [200, 150])
        arguments["q"] = np.abs(arguments["q"])
        for block_table, seq_len in zip(arguments["block_table"], arguments["seqused_k"], strict=True):
            used = block_table[: -(-seq_len // 16)]
            arguments["k"][used] += growth * np.arange(len(used), dtype=np.float16).reshape(-1, 1, 1, 1)
        check(ptx_backend, arguments, softmax_scale=0.02)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_several_tiles_of_a_warp(read_backend, rng, kv_cache_dtype):
    """Four warps take tiles of 32 tokens in turn; what a warp keeps in shared memory is written again."""
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_size": 16, "kv_cache_dtype": kv_cache_dtype}
    check(read_backend, one_query_each(rng, [400, 129], **sizes))


def test_more_sequences_than_ctas(read_backend, rng):
    """So many that a CTA takes several kv heads at once."""
    num_seqs = 10 if read_backend.name == "ptx" else 240
    sizes = {"num_heads": 8, "num_kv_heads": 4, "head_size": 16}
    check(read_backend, one_query_each(rng, [int(n) for n in rng.integers(0, 100, num_seqs)], **sizes))


def test_two_calls_give_the_same_bits(read_backend, rng):
    arguments = one_query_each(rng, [1, 70, 200, 0, 33], kv_cache_dtype="fp8")
    first = call(read_backend, arguments, s_aux=SINKS)
    assert_states_equal(call(read_backend, arguments, s_aux=SINKS), first)


@pytest.mark.ptx
def test_a_bound_that_sequences_exceed(ptx_backend, rng, monkeypatch):
    """On a device nobody sees it. The results are right all the same, and counters are zero again for the next call."""
    monkeypatch.setattr(ptx_ops.indices, "check_attention", lambda *arrays: None)
    check(ptx_backend, one_query_each(rng, [5, 0, 70, 33]), max_seqlen_k=16)


@pytest.mark.ptx
@pytest.mark.parametrize(
    ("head_size", "kv_cache_dtype", "moved"),
    [
        (16, "auto", {"cp", "ldmatrix"}),
        (48, "auto", {"ldmatrix"}),  # rows of six packs, which four lanes copy in two steps
        (64, "auto", {"cp", "ldmatrix"}),
        (64, "fp8", {"cp", "ldmatrix"}),
        (96, "auto", {"ldmatrix"}),
        (128, "fp8", {"cp", "ldmatrix"}),
    ],
)
def test_tiles_move_through_shared_memory_without_bank_conflicts(ptx_backend, rng, head_size, kv_cache_dtype, moved):
    """Copies, and the matrices of both products."""
    arguments = one_query_each(rng, [70], head_size=head_size, kv_cache_dtype=kv_cache_dtype)
    with ptx_ops.profiled() as profiles:
        call(ptx_backend, arguments)
    (profile,) = profiles
    kinds = {"cp": "shared copy", "ldmatrix": "shared load"}
    seen = set()
    for (_, opcode), tally in profile.counters.tallies.items():
        kind = kinds.get(opcode[0])
        if opcode[0] in moved and kind in tally.traffic:
            seen.add(opcode[0])
            assert tally.traffic[kind].units == tally.traffic[kind].ideal_units, opcode
    assert seen == moved


@pytest.mark.ptx
def test_the_last_to_arrive_acquires_what_the_others_released():
    """The interpreter asks for the release alone, and one without the acquire would pass (``ptx/releases.py``)."""
    kernel = ptx_ops._kernel(varlen_plan.varlen_decode_instance_for(dtypes.FLOAT16, dtypes.FLOAT16, 64, 2))
    arrivals = [instruction.opcode for instruction in kernel.instructions if instruction.opcode[0] in ("atom", "red")]
    assert arrivals
    assert set(arrivals) == {("atom", "add", "acq_rel", "gpu", "global", "s32")}
