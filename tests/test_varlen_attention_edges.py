"""Inputs that broke other varlen kernels, each kind named after what went wrong."""

import itertools

import cases
import numpy as np
import pytest

SLOPES = np.array([1.0, 0.5, 0.11, 0.02], np.float32)
SINKS = np.array([0.5, -2.0, 3.0, 1.0], np.float32)
SUBSETS = [subset for n in range(1, 4) for subset in itertools.combinations(("alibi_slopes", "softcap", "s_aux"), n)]
ORDERED_VALUES = np.array([[2**16] * 256, [1] + [0] * 255, [-(2**16)] * 256], np.float32)  # a row per split
HEAD_SIZES = [8, 40, 64, 72, 80, 96, 112, 120, 128, 192, 256]
BLOCK_SIZES = [1, 8, 16, 17, 32, 64, 128, 256]


def assert_states_equal(actual, expected):
    for got, want in zip(actual, expected, strict=True):
        cases.assert_same_bits(got, want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [("float16", "auto"), ("float16", "fp8_e4m3"), ("bfloat16", "fp8_e5m2"), ("float32", "auto")],
)
def test_zero_times_nan(read_backend, rng, dtype, kv_cache_dtype, layout):
    """A slot past the length gets weight 0, and 0 * NaN is NaN. So is all of block 0, which no sequence has."""
    formats = {"dtype": cases.FLOATS[dtype], "kv_cache_dtype": kv_cache_dtype}
    arguments = cases.varlen(rng, [3, 16, 1, 20], [15, 16, 17, 31], layout=layout, **formats)
    for name in "kv":
        poison = cases.poisoned((1, *arguments[name].shape[1:]), arguments[name].dtype)
        arguments[name] = np.concatenate([poison, arguments[name]])
    arguments["block_table"] += (arguments["block_table"] >= 0) & (arguments["block_table"] < 2**31 - 1)
    clean = {name: cases.without_poison(arguments[name]) for name in ("k", "v")}
    poisoned = cases.call_varlen(read_backend, arguments)
    assert all(np.isfinite(array.astype(np.float32)).all() for array in poisoned)
    assert_states_equal(poisoned, cases.call_varlen(read_backend, arguments, **clean))


@pytest.mark.parametrize("garbage", [-1, 2**31 - 1, -(2**31), "num_blocks", "a block of another sequence"])
def test_garbage_in_table_tails(read_backend, rng, garbage):
    arguments = cases.varlen(rng, [2, 5, 1, 3, 40], [0, 15, 16, 17, 70])
    expected = cases.check_varlen(read_backend, arguments)
    entry = {"num_blocks": len(arguments["k"]), "a block of another sequence": arguments["block_table"][4, 0]}
    block_table = arguments["block_table"].copy()
    for row, seq_len in zip(block_table, arguments["seqused_k"], strict=True):
        row[-(-seq_len // 16) :] = entry.get(garbage, garbage)
    assert_states_equal(cases.call_varlen(read_backend, arguments, block_table=block_table), expected)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("s_aux", [None, SINKS], ids=["without_sinks", "with_sinks"])
@pytest.mark.parametrize("seq_lens", [[0, 5, 0], [0, 0, 0], [0, 70, 0]], ids=str)
def test_empty_sequences(read_backend, rng, seq_lens, s_aux, num_splits):
    arguments = cases.varlen(rng, [2, 4, 3], seq_lens)
    out, lse = cases.check_varlen(read_backend, arguments, s_aux=s_aux, num_splits=num_splits)
    empty = np.repeat(np.array(seq_lens) == 0, [2, 4, 3])
    assert not out[empty].any()
    wanted = np.full(4, -np.inf, np.float32) if s_aux is None else s_aux
    np.testing.assert_array_equal(lse[:, empty], np.repeat(wanted[:, None], sum(empty), axis=1))


@pytest.mark.parametrize(("query_lens", "seq_lens"), [([], []), ([0, 0], [0, 9]), ([0, 3, 0], [5, 9, 0])], ids=str)
def test_no_queries(read_backend, rng, query_lens, seq_lens):
    out, lse = cases.check_varlen(read_backend, cases.varlen(rng, query_lens, seq_lens), causal=True)
    assert out.shape == (sum(query_lens), 4, 64)
    assert lse.shape == (4, sum(query_lens))


@pytest.mark.parametrize("s_aux", [None, SINKS], ids=["without_sinks", "with_sinks"])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_more_queries_than_keys_causal(read_backend, rng, num_splits, s_aux):
    """Query i of 8 over 3 keys stands at i - 5: the first five see nothing."""
    arguments = cases.varlen(rng, [8, 2, 40], [3, 2, 17])
    out, lse = cases.check_varlen(read_backend, arguments, causal=True, num_splits=num_splits, s_aux=s_aux)
    blind = [*range(5), *range(10, 33)]
    assert not out[blind].any()
    wanted = np.full(4, -np.inf, np.float32) if s_aux is None else s_aux
    np.testing.assert_array_equal(lse[:, blind], np.repeat(wanted[:, None], len(blind), axis=1))


@pytest.mark.parametrize("window_size", [(4, 0), (2, 3), (0, 0)])
def test_more_queries_than_keys_in_a_window(read_backend, rng, window_size):
    """Early queries stand before the first key; without `causal` those near it see some keys on their right."""
    cases.check_varlen(read_backend, cases.varlen(rng, [8, 2, 40], [3, 2, 17]), window_size=window_size)


@pytest.mark.parametrize("num_splits", [1, 2, 5, 64])
def test_split_edges(read_backend, rng, num_splits):
    """Lengths around every tile size that a backend may have, and more splits than there are tiles."""
    seq_lens = [1] + [n + offset for n in (16, 32, 64, 128, 256) for offset in (-1, 0, 1)]
    arguments = cases.varlen(rng, [1] * len(seq_lens), seq_lens)
    options = {"s_aux": SINKS, "alibi_slopes": SLOPES / 8}
    cases.check_varlen(read_backend, arguments, num_splits=num_splits, **options)


@pytest.mark.parametrize("num_splits", [1, 3, 16])
def test_ragged_query_counts_with_forced_splits(read_backend, rng, num_splits):
    arguments = cases.varlen(rng, [1, 7, 33, 0, 2, 70, 16], [130, 7, 65, 9, 1, 90, 64])
    cases.check_varlen(read_backend, arguments, causal=True, num_splits=num_splits, s_aux=SINKS)


@pytest.mark.parametrize("growth", [1.0, -1.0], ids=["last_dominates", "first_dominates"])
def test_splits_of_very_different_weight(read_backend, rng, growth):
    """Logits that change from block to block: splits must be brought to one maximum, wherever it lies."""
    arguments = cases.varlen(rng, [2, 3], [260, 300])
    arguments["q"] = np.abs(arguments["q"])
    for block_table, seq_len in zip(arguments["block_table"], arguments["seqused_k"], strict=True):
        used = block_table[: -(-seq_len // 16)]
        arguments["k"][used] += growth * np.arange(len(used), dtype=np.float16).reshape(-1, 1, 1, 1)
    cases.check_varlen(read_backend, arguments, num_splits=4, softmax_scale=0.02)


def test_splits_merge_in_order(read_backend, rng):
    """Equal keys, and splits whose values add up to 2^24, 1 and -2^24: in float32 their sum is 0 from left to right
    and 1 from right to left."""
    arguments = cases.varlen(rng, [1], [768], dtype=np.float32, block_size=256)
    arguments["q"][:] = 0
    arguments["v"][arguments["block_table"][0, :3]] = ORDERED_VALUES.reshape(3, 256, 1, 1)
    out, _ = cases.call_varlen(read_backend, arguments, num_splits=3)
    assert not out.any()


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window", [1, 2, 16, 17, 64, 300])
def test_windows(read_backend, rng, window, num_splits):
    arguments = cases.varlen(rng, [1, 1, 3, 1, 40, 20], [max(window - 1, 1), window, window + 1, 1, 70, 129])
    for window_size in ((window - 1, 0), (window - 1, window - 1), (-1, window - 1), (window - 1, -1)):
        cases.check_varlen(read_backend, arguments, window_size=window_size, num_splits=num_splits)


@pytest.mark.parametrize(("window_size", "counts"), [((6, 0), [7, 7, 7, 7, 7, 7]), ((2, 3), [6, 6, 6, 5, 4, 3])])
def test_a_window_of_w_holds_w_tokens(read_backend, rng, window_size, counts):
    """Both bounds are inclusive. With queries of zeros every key weighs the same, and the LSE counts them."""
    arguments = cases.varlen(rng, [6], [40])
    arguments["q"][:] = 0
    _, lse = cases.check_varlen(read_backend, arguments, window_size=window_size)
    np.testing.assert_allclose(lse, np.broadcast_to(np.log(counts), (4, 6)), rtol=1e-6)


@pytest.mark.parametrize("evicted_id", [-1, 2**31 - 1])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 40])
def test_evicted_blocks_before_the_window_are_not_followed(read_backend, rng, window, evicted_id):
    """What the first query of a sequence no longer sees is gone for all of them."""
    query_lens, seq_lens = [1, 1, 20, 33, 5], [16, 17, 64, 70, 130]
    arguments = cases.varlen(rng, query_lens, seq_lens)
    options = {"window_size": (window - 1, 0), "num_splits": 2}
    expected = cases.call_varlen(read_backend, arguments, **options)
    for block_table, query_len, seq_len in zip(arguments["block_table"], query_lens, seq_lens, strict=True):
        num_evicted = max(seq_len - query_len - (window - 1), 0) // 16
        for cache in (arguments["k"], arguments["v"]):
            cache[block_table[:num_evicted]] = np.nan
        block_table[:num_evicted] = evicted_id
    assert_states_equal(cases.check_varlen(read_backend, arguments, **options), expected)


@pytest.mark.parametrize("sign", [1, -1], ids=["near_plus_6e4", "near_minus_6e4"])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("dtype", cases.FLOATS.values(), ids=cases.FLOATS)
def test_magnitude_of_logits(read_backend, rng, dtype, num_splits, sign):
    """Logits of 63 * 32 * 29.75 plus quarters, all exact in float32: neither exp nor a sum of products may overflow."""
    arguments = cases.varlen(rng, [1, 5, 9], [1, 17, 70], dtype=dtype)
    arguments["q"][:] = sign * 32
    arguments["q"][:, :, 0] = 0.25
    arguments["k"][~np.isnan(arguments["k"])] = 29.75
    first = arguments["k"][..., 0]
    first[...] = np.where(np.isnan(first), first, rng.integers(0, 8, first.shape).astype(dtype))
    _, lse = cases.check_varlen(read_backend, arguments, softmax_scale=1.0, num_splits=num_splits)
    assert np.all(np.abs(lse - sign * 59976) < 8)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_logits_near_plus_and_minus_6e4_in_one_row(read_backend, rng, num_splits):
    arguments = cases.varlen(rng, [2, 2], [70, 90])
    arguments["q"][:] = 32
    signs = np.where(np.arange(16) % 2, 1, -1).astype(np.float16).reshape(1, 16, 1, 1)
    arguments["k"] = np.where(np.isnan(arguments["k"]), arguments["k"], signs * 29.25).astype(np.float16)
    cases.check_varlen(read_backend, arguments, softmax_scale=1.0, num_splits=num_splits)


def test_equal_keys_give_the_natural_log_of_their_number(read_backend, rng):
    arguments = cases.varlen(rng, [1, 1, 3], [1, 16, 100])
    arguments["k"][~np.isnan(arguments["k"])] = 0
    _, lse = cases.check_varlen(read_backend, arguments, causal=True)
    np.testing.assert_allclose(lse, np.broadcast_to(np.log([1, 16, 98, 99, 100]), (4, 5)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_splits", [1, 5])
@pytest.mark.parametrize("subset", SUBSETS, ids="_".join)
def test_alibi_softcap_sinks_together(read_backend, rng, subset, num_splits):
    options = {"alibi_slopes": SLOPES, "softcap": 30.0, "s_aux": np.full(4, 0.5, np.float32)}
    options = {name: options[name] for name in subset} | {"softmax_scale": 2.0, "num_splits": num_splits}
    cases.check_varlen(read_backend, cases.varlen(rng, [1, 9, 20], [300, 9, 50]), **options)


@pytest.mark.parametrize("queries_per_kv", [1, 3, 5, 7, 8, 16, 71])
def test_group_sizes(read_backend, rng, queries_per_kv):
    """The KV heads weigh differently by scale too, so that a head of a wrong group shows."""
    num_kv_heads = 1 if queries_per_kv == 71 else 3
    arguments = cases.varlen(
        rng,
        [1, 5, 9],
        [30, 17, 9],
        num_heads=num_kv_heads * queries_per_kv,
        num_kv_heads=num_kv_heads,
        kv_cache_dtype="fp8",
        k_descale=np.linspace(0.02, 0.06, num_kv_heads, dtype=np.float32),
        v_descale=np.linspace(0.3, 0.1, num_kv_heads, dtype=np.float32),
    )
    cases.check_varlen(read_backend, arguments, causal=True)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("head_size", "block_size"), list(zip(HEAD_SIZES, itertools.cycle(BLOCK_SIZES))))
def test_head_and_block_sizes(read_backend, rng, head_size, block_size, layout):
    arguments = cases.varlen(
        rng,
        [1, 4, 9],
        [2 * block_size + 3, block_size + 1, 9],
        head_size=head_size,
        block_size=block_size,
        layout=layout,
    )
    cases.check_varlen(read_backend, arguments, causal=True)


@pytest.mark.parametrize(("head_size", "block_size"), [(8, 17), (40, 1), (72, 16), (256, 64)])
def test_head_and_block_sizes_of_fp8(read_backend, rng, head_size, block_size):
    """The flash layouts pack nothing: a head of fp8 need not be a multiple of 16 bytes."""
    arguments = cases.varlen(
        rng, [1, 4, 9], [40, 20, 9], head_size=head_size, block_size=block_size, kv_cache_dtype="fp8"
    )
    cases.check_varlen(read_backend, arguments, causal=True)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_batch_invariance(read_backend, rng, num_splits):
    """A sequence alone and among 64 has the same bits."""
    query_lens, seq_lens = rng.integers(0, 12, 64), rng.integers(1, 150, 64)
    batch = cases.varlen(rng, query_lens.tolist(), seq_lens.tolist(), num_heads=6, num_kv_heads=2)
    options = {"num_splits": num_splits, "max_seqlen_q": 12, "max_seqlen_k": 150, "causal": True}
    out, lse = cases.call_varlen(read_backend, batch, **options)
    for seq in (0, 1, 31, 62, 63):
        tokens = slice(*batch["cu_seqlens_q"][seq : seq + 2])
        alone = {name: batch[name][seq : seq + 1] for name in ("block_table", "seqused_k")}
        starts = np.array([0, query_lens[seq]], np.int32)
        result = cases.call_varlen(read_backend, batch, **alone, q=batch["q"][tokens], cu_seqlens_q=starts, **options)
        assert_states_equal(result, (out[tokens], lse[:, tokens]))


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_two_calls_give_the_same_bits(read_backend, rng, num_splits):
    arguments = cases.varlen(rng, [1, 20, 3, 0], [200, 70, 0, 33], kv_cache_dtype="fp8")
    first = cases.call_varlen(read_backend, arguments, num_splits=num_splits, s_aux=SINKS)
    assert_states_equal(cases.call_varlen(read_backend, arguments, num_splits=num_splits, s_aux=SINKS), first)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_rows_past_the_last_start_are_not_written(read_backend, rng, num_splits):
    """Padding rows of q may be NaN; their rows of out and columns of lse_out keep what they held."""
    arguments = cases.varlen(rng, [3, 5], [20, 40])
    num_tokens = 8
    padding = np.full((4, 4, 64), np.nan, np.float16)
    expected = cases.check_varlen(read_backend, arguments, num_splits=num_splits)
    buffers = read_backend.put(np.full((12, 4, 64), 7, np.float16)), read_backend.put(np.full((4, 12), 7, np.float32))
    out, lse = cases.call_varlen(
        read_backend,
        arguments,
        q=np.concatenate([arguments["q"], padding]),
        out=buffers[0],
        lse_out=buffers[1],
        num_splits=num_splits,
    )
    assert_states_equal((out[:num_tokens], lse[:, :num_tokens]), expected)
    assert np.all(out[num_tokens:] == 7)
    assert np.all(lse[:, num_tokens:] == 7)
