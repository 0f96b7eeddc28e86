"""Inputs that broke other decode kernels, each kind named after what went wrong."""

import itertools

import cases
import numpy as np
import pytest
from small_kernels import launch

from pagedkv import decode_plan, dtypes, indices, kernels, ptx_ops

SLOPES = np.array([1.0, 0.5, 0.11, 0.02], np.float32)
SINKS = np.array([0.5, -2.0, 3.0, 1.0], np.float32)
SUBSETS = [subset for n in range(1, 4) for subset in itertools.combinations(("alibi_slopes", "softcap", "sinks"), n)]
ORDERED_VALUES = np.array([[2**20] * 16, [1] + [0] * 15, [-(2**20)] * 16], np.float32)  # a row per block
HEAD_SIZES = [8, 40, 64, 72, 80, 96, 112, 120, 128, 192, 256]
BLOCK_SIZES = [8, 16, 32, 64, 128, 256]
QUOTIENTS = """
template <int UNUSED>
__global__ void kernel(int* quotients, const int* a, const int* b) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  quotients[i] = pagedkv::small_quotient(a[i], b[i]);
}
"""


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [np.float16, cases.FLOATS["bfloat16"]], ids=["float16", "bfloat16"])
def test_zero_times_nan(decode_backend, decode_op, rng, dtype, kv_cache_dtype):
    """A slot past the length gets weight 0, and 0 * NaN is NaN."""
    arguments = cases.decode(rng, [15, 16, 17, 31, 1], dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    clean = {name: cases.without_poison(arguments[name]) for name in ("key_cache", "value_cache")}
    poisoned = cases.check_decode(decode_backend, decode_op, arguments)
    for got, want in zip(poisoned, cases.call_decode(decode_backend, decode_op, arguments, **clean), strict=True):
        cases.assert_same_bits(got, want)


def test_infinities_in_unwritten_slots(decode_backend, decode_op, rng):
    arguments = cases.decode(rng, [15, 16, 17, 31, 1])
    expected = cases.check_decode(decode_backend, decode_op, arguments)
    for infinity in (np.inf, -np.inf):
        dirty = {
            name: np.where(np.isnan(arguments[name]), np.float16(infinity), arguments[name])
            for name in ("key_cache", "value_cache")
        }
        for got, want in zip(cases.call_decode(decode_backend, decode_op, arguments, **dirty), expected, strict=True):
            cases.assert_same_bits(got, want)


@pytest.mark.parametrize("infinity", [np.inf, -np.inf])
def test_infinities_in_seen_values(decode_backend, decode_op, rng, infinity):
    """One makes its feature infinite, for the heads that see it, and nothing else."""
    arguments = cases.decode(rng, [5, 70, 3])
    arguments["value_cache"][arguments["block_tables"][1, 0], 1, 7, 3] = infinity
    expected = np.zeros((3, 4, 64))
    expected[1, 2:, 7] = infinity
    for options in ({}, {"partition_size": 32}) if decode_op != "paged_attention_v1" else ({},):
        out, lse = cases.call_decode(decode_backend, decode_op, arguments, scale=0.01, **options)
        np.testing.assert_array_equal(np.where(np.isfinite(out), 0, out), expected)
        assert np.isfinite(lse).all()


@pytest.mark.parametrize("head_size", [40, 64])
def test_a_key_infinitely_far_away(decode_backend, decode_op, rng, head_size):
    """A logit of -inf has no weight; what is multiplied beside the last feature must not make it NaN."""
    arguments = cases.decode(rng, [5, 70, 3], head_size=head_size)
    arguments["query"][..., -1] = -1
    arguments["key_cache"][arguments["block_tables"][1, 0], :, -1, [3, 12], -1] = np.inf
    cases.check_decode(decode_backend, decode_op, arguments)


@pytest.mark.parametrize("exponent", [125, 126, 127])
def test_largest_queries_over_fp8(decode_backend, decode_op, rng, exponent):
    """bfloat16 holds what has no inverse in float32 that is not subnormal. Keys below 2 keep scores below infinity."""
    arguments = cases.decode(rng, [40, 5], dtype=cases.FLOATS["bfloat16"], kv_cache_dtype="fp8", k_scale=1.0)
    is_large = arguments["key_cache"] & 0x7F > 0x3E  # codes of sign, four bits of exponent, three of mantissa: 1.75
    is_poison = arguments["key_cache"] == cases.FP8_POISON
    arguments["key_cache"] = np.where(is_large & ~is_poison, np.uint8(0x38), arguments["key_cache"])
    arguments["query"][...] = 0
    arguments["query"][..., 5] = rng.choice([-1, 1], (2, 4)) * 2.0**exponent
    cases.check_decode(decode_backend, decode_op, arguments, scale=2.5 * 2.0**-exponent)


@pytest.mark.parametrize("garbage", [-1, 2**31 - 1, -(2**31), "num_blocks", "a block of another sequence"])
def test_garbage_in_table_tails(decode_backend, decode_op, rng, garbage):
    arguments = cases.decode(rng, [0, 15, 16, 17, 70])
    expected = cases.check_decode(decode_backend, decode_op, arguments)
    entry = {"num_blocks": len(arguments["key_cache"]), "a block of another sequence": arguments["block_tables"][4, 0]}
    block_tables = arguments["block_tables"].copy()
    for row, seq_len in zip(block_tables, arguments["seq_lens"], strict=True):
        row[-(-seq_len // 16) :] = entry.get(garbage, garbage)
    actual = cases.call_decode(decode_backend, decode_op, arguments, block_tables=block_tables)
    for got, want in zip(actual, expected, strict=True):
        cases.assert_same_bits(got, want)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["without_sinks", "with_sinks"])
@pytest.mark.parametrize("seq_lens", [[0, 5, 0], [0, 0, 0], [0], [0, 70, 0]], ids=str)
def test_empty_sequences(decode_backend, decode_op, rng, seq_lens, sinks):
    out, lse = cases.check_decode(decode_backend, decode_op, cases.decode(rng, seq_lens), sinks=sinks)
    empty = np.array(seq_lens) == 0
    assert not out[empty].any()
    np.testing.assert_array_equal(
        lse[:, empty].T, np.broadcast_to(-np.inf if sinks is None else sinks, (sum(empty), 4))
    )


def test_no_sequences(decode_backend, decode_op, rng):
    out, lse = cases.call_decode(decode_backend, decode_op, cases.decode(rng, []))
    assert out.shape == (0, 4, 64)
    assert lse.shape == (4, 0)


@pytest.mark.parametrize("partition_size", [32, 64])
def test_partition_edges(decode_backend, rng, partition_size):
    seq_lens = [1] + [n * partition_size + offset for n in (1, 2, 3) for offset in (-1, 0, 1)]
    arguments = cases.decode(rng, seq_lens)
    options = {"sinks": SINKS, "alibi_slopes": SLOPES / 8}
    cases.check_decode(decode_backend, "paged_attention_v2", arguments, partition_size=partition_size, **options)


@pytest.mark.ptx
def test_quotients_by_way_of_a_reciprocal():
    """Next to whole multiples, where an estimate is off by one, of divisors whose reciprocals round up and down."""
    b = np.concatenate([np.arange(1, 1000), [2**k + offset for k in range(12, 31) for offset in (-1, 0, 1)]])
    a = b[:, None, None] * np.array([1, 3, 511, 2**20 - 1])[:, None] + np.array([-1, 0, 1])
    a, b = (array.ravel().astype(np.int64) for array in np.broadcast_arrays(a, b[:, None, None]))
    is_meant = (a < 2**31) & (a // b < 2**20)
    count = is_meant.sum() // 32 * 32
    a, b = (array[is_meant][:count].astype(np.int32) for array in (a, b))
    quotients = np.full(count, -1, np.int32)
    launch(kernels.expanded_source("partition.cuh") + QUOTIENTS, quotients, a, b, grid=count // 32, threads=32)
    np.testing.assert_array_equal(quotients, a // b)


@pytest.mark.parametrize("num_seqs", [31, 32, 33, 70])
def test_more_sequences_than_lanes(decode_backend, rng, num_seqs):
    """A warp adds up the tiles of all sequences, a slice of them in each lane."""
    seq_lens = [int(n) for n in rng.integers(0, 70, num_seqs)]
    arguments = cases.decode(rng, seq_lens, num_heads=1, num_kv_heads=1, head_size=16)
    cases.check_decode(decode_backend, "paged_attention_v2", arguments)


@pytest.mark.parametrize("window_size", [(-1, -1), (50, 0)], ids=["all", "window"])
@pytest.mark.parametrize("partition_size", [1, 2])
def test_more_partitions_than_lanes(decode_backend, rng, partition_size, window_size):
    """A warp merges as many states at once as it has lanes, and the largest may be the first or the last of all."""
    arguments = cases.decode(rng, [31, 32, 33, 63, 64, 65, 75], num_heads=1, num_kv_heads=1, head_size=16)
    options = {"partition_size": partition_size, "window_size": window_size, "sinks": SINKS[:1]}
    for slope in (0.3, -0.3):
        slopes = np.array([slope], np.float32)
        cases.check_decode(decode_backend, "paged_attention_v2", arguments, **options, alibi_slopes=slopes)


@pytest.mark.ptx
@pytest.mark.parametrize("options", [{}, {"window_size": (9, 0)}], ids=["all", "window"])
@pytest.mark.parametrize("max_seq_len", [0, 16, 40])
def test_a_bound_that_sequences_exceed(ptx_backend, rng, monkeypatch, max_seq_len, options):
    """On a device nobody sees it. The results are right all the same, and counters are zero again for the next call."""
    monkeypatch.setattr(indices, "check_lengths", lambda problem, seq_lens: None)
    arguments = cases.decode(rng, [5, 0, 70, 33])
    options = options | {"max_seq_len": max_seq_len, "partition_size": 16}
    cases.check_decode(ptx_backend, "paged_attention_v2", arguments, **options)


@pytest.mark.ptx
@pytest.mark.parametrize("ctas", [1, 2, 5, 14, 40])
def test_shares_of_any_number_of_ctas(ptx_backend, rng, monkeypatch, ctas):
    """Without a partition size every CTA takes as many tiles: of several sequences, or one of many parts of a long one.

    Two units a sequence have 1, 1, 2, 7 and 1 tiles: of forty CTAs each finds one tile at most, and some none.
    """
    monkeypatch.setattr(decode_plan, "_num_shares", lambda *sizes: ctas)
    arguments = cases.decode(rng, [1, 0, 33, 200, 32])
    options = {"sinks": SINKS, "alibi_slopes": SLOPES / 8}
    cases.check_decode(ptx_backend, "paged_attention_v2", arguments, **options)
    cases.check_decode(ptx_backend, "paged_attention_v2", arguments, **options, window_size=(70, 0))


@pytest.mark.ptx
@pytest.mark.parametrize("ctas", [1, 3, 10, 40])
@pytest.mark.parametrize(
    ("units", "sizes"),
    [
        (2, {"num_heads": 4, "num_kv_heads": 2}),
        (4, {"num_heads": 8, "num_kv_heads": 8, "dtype": np.float32}),
        (4, {"num_heads": 8, "num_kv_heads": 4, "kv_cache_dtype": "fp8"}),
        (2, {"num_heads": 72, "num_kv_heads": 2, "kv_cache_dtype": "fp8"}),  # three parts of a group each
    ],
    ids=["two", "four", "four_of_fp8", "parts_of_groups"],
)
def test_teams_of_warps(ptx_backend, rng, monkeypatch, units, sizes, ctas):
    """A CTA takes several units of a sequence at once, each team of its warps one, with tiles and states of its own."""
    monkeypatch.setattr(decode_plan, "_units_per_bundle", lambda *sizes: units)
    monkeypatch.setattr(decode_plan, "_num_shares", lambda *sizes: ctas)
    arguments = cases.decode(rng, [1, 0, 150, 33], head_size=16, **sizes)
    num_heads = sizes["num_heads"]
    options = {"sinks": np.linspace(-1, 2, num_heads, dtype=np.float32), "window_size": (110, 0)}
    options["alibi_slopes"] = np.geomspace(0.1, 0.01, num_heads, dtype=np.float32)
    cases.check_decode(ptx_backend, "paged_attention_v2", arguments, **options)


def test_more_sequences_than_ctas(decode_backend, rng):
    """So many that a CTA takes several kv heads at once."""
    num_seqs = 10 if decode_backend.name == "ptx" else 240
    arguments = cases.decode(rng, [int(n) for n in rng.integers(0, 100, num_seqs)], num_heads=8, num_kv_heads=4)
    cases.check_decode(decode_backend, "paged_attention_v2", arguments)


@pytest.mark.ptx
def test_the_last_to_arrive_acquires_what_the_others_released():
    """The interpreter asks for the release alone, and one without the acquire would pass (``ptx/releases.py``)."""
    kernel = ptx_ops._kernel(decode_plan.decode_instance_for(dtypes.FLOAT16, dtypes.FLOAT16, 64, 16, 2))
    arrivals = [instruction.opcode for instruction in kernel.instructions if instruction.opcode[0] in ("atom", "red")]
    assert arrivals
    assert set(arrivals) == {("atom", "add", "acq_rel", "gpu", "global", "s32")}


@pytest.mark.parametrize("growth", [3.0, -3.0], ids=["last_dominates", "first_dominates"])
def test_partitions_of_very_different_weight(decode_backend, rng, growth):
    """Logits that change from block to block: partitions must be brought to one maximum, wherever it lies."""
    arguments = cases.decode(rng, [200, 150])
    arguments["query"] = np.abs(arguments["query"])
    for block_table, seq_len in zip(arguments["block_tables"], arguments["seq_lens"], strict=True):
        used = block_table[: -(-seq_len // 16)]
        arguments["key_cache"][used] += growth * np.arange(len(used), dtype=np.float16).reshape(-1, 1, 1, 1, 1)
    cases.check_decode(decode_backend, "paged_attention_v2", arguments, partition_size=16, scale=0.02)


def test_partitions_merge_in_order(decode_backend, rng):
    """Equal keys, and partitions whose values add up to 2^24, 1 and -2^24: in float32 their sum is 0 from left to right
    and 1 from right to left."""
    arguments = cases.decode(rng, [48], dtype=np.float32)
    arguments["query"][:] = 0
    arguments["value_cache"][arguments["block_tables"][0, :3]] = ORDERED_VALUES.reshape(3, 1, 1, 16)
    out, _ = cases.call_decode(decode_backend, "paged_attention_v2", arguments, partition_size=16)
    assert not out.any()


@pytest.mark.parametrize("partition_size", [None, 32])
@pytest.mark.parametrize("window", [1, 2, 16, 17, 40, 64, 300])
def test_windows(decode_backend, rng, window, partition_size):
    arguments = cases.decode(rng, [window - 1, window, window + 1, 129])
    options = {"window_size": (window - 1, 0), "sinks": SINKS}
    cases.check_decode(decode_backend, "paged_attention_v1", arguments, **options)
    cases.check_decode(decode_backend, "paged_attention_v2", arguments, **options, partition_size=partition_size)


def test_a_window_of_w_holds_w_tokens(decode_backend, decode_op, rng):
    """With a query of zeros every key weighs the same, and the LSE is the log of their number."""
    arguments = cases.decode(rng, [1, 6, 7, 8, 70])
    arguments["query"][:] = 0
    _, lse = cases.check_decode(decode_backend, decode_op, arguments, window_size=(6, 0))
    np.testing.assert_allclose(lse, np.broadcast_to(np.log([1, 6, 7, 7, 7]), (4, 5)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40])
def test_evicted_blocks_before_the_window_are_not_followed(decode_backend, decode_op, rng, window):
    arguments = cases.decode(rng, [16, 17, 64, 70, 130])
    options = {"window_size": (window - 1, 0)}
    expected = cases.call_decode(decode_backend, decode_op, arguments, **options)
    for block_table, seq_len in zip(arguments["block_tables"], arguments["seq_lens"], strict=True):
        num_evicted = max(seq_len - window, 0) // 16
        for cache in (arguments["key_cache"], arguments["value_cache"]):
            cache[block_table[:num_evicted]] = np.nan
        block_table[:num_evicted] = np.resize([-1, 2**31 - 1], num_evicted)
    actual = cases.check_decode(decode_backend, decode_op, arguments, **options)
    for got, want in zip(actual, expected, strict=True):
        cases.assert_same_bits(got, want)


@pytest.mark.parametrize("sign", [1, -1], ids=["near_plus_6e4", "near_minus_6e4"])
@pytest.mark.parametrize("dtype", cases.FLOATS.values(), ids=cases.FLOATS)
def test_magnitude_of_logits(decode_backend, decode_op, rng, dtype, sign):
    """Scores of 63 * 32 * 29.75 plus quarters: neither exp nor a sum of products may overflow.

    They are exact in float32, and the scale rounds them once, as the kernels do that keep logits in units of log 2.
    """
    arguments = cases.decode(rng, [1, 17, 70], dtype=dtype)
    arguments["query"][:] = sign * 32
    arguments["query"][:, :, 0] = 0.25
    live = ~np.isnan(arguments["key_cache"])
    arguments["key_cache"][live] = 29.75
    first = arguments["key_cache"][:, :, 0, :, 0]  # the first element of every key
    first[...] = np.where(np.isnan(first), first, rng.integers(0, 8, first.shape).astype(dtype))
    _, lse = cases.check_decode(decode_backend, decode_op, arguments, scale=1.1)
    assert np.all(np.abs(lse - sign * 59976 * 1.1) < 8)


def test_one_key_dominating(decode_backend, decode_op, rng):
    """The output is the value of the key whose logit stands alone, and the LSE is that logit."""
    arguments = cases.decode(rng, [70, 70, 70], num_heads=2, num_kv_heads=2)
    arguments["query"][:] = 4
    values = np.zeros((3, 2, 64), np.float16)
    for seq, position in enumerate([0, 33, 69]):
        block_id, offset = arguments["block_tables"][seq, position // 16], position % 16
        arguments["key_cache"][block_id, :, :, offset] = 8
        values[seq] = arguments["value_cache"][block_id, :, :, offset]
    out, lse = cases.check_decode(decode_backend, decode_op, arguments, scale=1.0)
    cases.assert_same_bits(out, values)
    np.testing.assert_array_equal(lse, np.full((2, 3), 64 * 4 * 8, np.float32))


def test_equal_keys_give_the_natural_log_of_their_number(decode_backend, decode_op, rng):
    arguments = cases.decode(rng, [1, 2, 16, 100])
    arguments["key_cache"][~np.isnan(arguments["key_cache"])] = 0
    _, lse = cases.check_decode(decode_backend, decode_op, arguments)
    np.testing.assert_allclose(lse, np.broadcast_to(np.log([1, 2, 16, 100]), (4, 4)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("subset", SUBSETS, ids="_".join)
def test_alibi_softcap_sinks_together(decode_backend, decode_op, rng, subset):
    options = {"alibi_slopes": SLOPES, "softcap": 30.0, "sinks": np.full(4, 0.5, np.float32)}
    options = {name: options[name] for name in subset} | {"scale": 2.0}
    partitions = {"partition_size": 16} if decode_op == "paged_attention_v2" else {}
    cases.check_decode(decode_backend, decode_op, cases.decode(rng, [1, 15, 17, 70]), **options, **partitions)


@pytest.mark.parametrize("magnitude", [1.0, 2.0**-30, 2.0**30])
@pytest.mark.parametrize("option", [{"softcap": 2.0}, {"alibi_slopes": SLOPES}], ids=["softcap", "alibi"])
def test_options_of_queries_that_float16_does_not_hold(decode_backend, decode_op, rng, option, magnitude):
    """Codes of fp8 are multiplied as float16, a bfloat16 query after division by a power of two."""
    arguments = cases.decode(rng, [1, 17, 70], dtype=cases.FLOATS["bfloat16"], kv_cache_dtype="fp8")
    arguments["query"] *= magnitude
    cases.check_decode(decode_backend, decode_op, arguments, scale=1 / magnitude, **option)


@pytest.mark.parametrize("dtype", cases.FLOATS.values(), ids=cases.FLOATS)
def test_several_tiles_of_a_warp(decode_backend, decode_op, rng, dtype):
    """Four warps take tiles of 32 tokens in turn; what a warp keeps in shared memory is written again."""
    arguments = cases.decode(rng, [300, 129], dtype=dtype, num_heads=2, num_kv_heads=1, head_size=16)
    cases.check_decode(decode_backend, decode_op, arguments)


@pytest.mark.parametrize("queries_per_kv", [1, 3, 5, 7, 8, 16, 71])
def test_group_sizes(decode_backend, decode_op, rng, queries_per_kv):
    """The KV heads weigh differently by scale too, so that a head of a wrong group shows."""
    num_kv_heads = 1 if queries_per_kv == 71 else 3
    arguments = cases.decode(
        rng,
        [1, 17, 40],
        num_heads=num_kv_heads * queries_per_kv,
        num_kv_heads=num_kv_heads,
        kv_cache_dtype="fp8",
        k_scale=np.linspace(0.02, 0.06, num_kv_heads, dtype=np.float32),
        v_scale=np.linspace(0.3, 0.1, num_kv_heads, dtype=np.float32),
    )
    cases.check_decode(decode_backend, decode_op, arguments)


@pytest.mark.parametrize(("head_size", "block_size"), list(zip(HEAD_SIZES, itertools.cycle(BLOCK_SIZES))))
def test_head_and_block_sizes(decode_backend, decode_op, rng, head_size, block_size):
    seq_lens = [block_size - 1, block_size, 2 * block_size + 1]
    arguments = cases.decode(rng, seq_lens, head_size=head_size, block_size=block_size)
    cases.check_decode(decode_backend, decode_op, arguments)


@pytest.mark.parametrize(("head_size", "block_size"), [(16, 8), (80, 16), (128, 32), (256, 256)])
def test_head_and_block_sizes_of_fp8(decode_backend, decode_op, rng, head_size, block_size):
    """A one-byte cache packs x = 16 elements, a two-byte one 8."""
    seq_lens = [block_size - 1, block_size, 2 * block_size + 1]
    arguments = cases.decode(rng, seq_lens, head_size=head_size, block_size=block_size, kv_cache_dtype="fp8")
    cases.check_decode(decode_backend, decode_op, arguments)


def test_long_v1(decode_backend, rng):
    """60,000 logits are 240 KB, more than a CTA's shared memory."""
    arguments = cases.decode(rng, [60_000, 1, 0], num_heads=2, num_kv_heads=1, head_size=16, block_size=256)
    cases.check_decode(decode_backend, "paged_attention_v1", arguments, scale=1.0)


def test_batch_invariance(decode_backend, decode_op, rng):
    """A sequence alone and among 64 (12 in the interpreter) has the same bits."""
    num_seqs = 12 if decode_backend.name == "ptx" else 64
    batch = cases.decode(rng, [int(n) for n in rng.integers(0, 150, num_seqs)], num_heads=6, num_kv_heads=2)
    options = {"max_seq_len": 150, "alibi_slopes": np.geomspace(1, 0.01, 6, dtype=np.float32)}
    options |= {} if decode_op == "paged_attention_v1" else {"partition_size": 32}
    out, lse = cases.call_decode(decode_backend, decode_op, batch, **options)
    for seq in (0, 1, num_seqs // 2, num_seqs - 2, num_seqs - 1):
        alone = {name: batch[name][seq : seq + 1] for name in ("query", "block_tables", "seq_lens")}
        out_alone, lse_alone = cases.call_decode(decode_backend, decode_op, batch, **alone, **options)
        cases.assert_same_bits(out_alone, out[seq : seq + 1])
        cases.assert_same_bits(lse_alone, lse[:, seq : seq + 1])


def test_two_calls_give_the_same_bits(decode_backend, decode_op, rng):
    arguments = cases.decode(rng, [1, 70, 200, 0, 33], kv_cache_dtype="fp8")
    first = cases.call_decode(decode_backend, decode_op, arguments, sinks=SINKS)
    for got, want in zip(cases.call_decode(decode_backend, decode_op, arguments, sinks=SINKS), first, strict=True):
        cases.assert_same_bits(got, want)
