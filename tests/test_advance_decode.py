"""advance_decode: a decode step laid out where the arrays live."""

import numpy as np
import pytest
from cases import assert_same_bits
from graphs import captured

import pagedkv
from pagedkv import BlockPool, BlockTable, advance_decode, ptx_ops
from pagedkv.advance import validated_advance
from pagedkv.step_plan import advance_arrays, plan_advance

BLOCK_SIZE = 4
OUTPUTS = {"slot_mapping": np.int64, "positions": np.int64, "query_start_loc": np.int32}


def inputs(rng, num_seqs, max_blocks=5, live=0.7):
    """Random tables and lengths, some 0; entries that no new token needs are garbage."""
    lens = rng.integers(1, max_blocks * BLOCK_SIZE, num_seqs).astype(np.int32) * (rng.random(num_seqs) < live)
    table = rng.permutation(num_seqs * max_blocks).reshape(num_seqs, max_blocks).astype(np.int32)
    is_asked = np.arange(max_blocks) == (lens // BLOCK_SIZE)[:, None]
    table[~is_asked | (lens == 0)[:, None]] = rng.choice([-1, 2**31 - 1, -(2**31)])
    return table, lens.astype(np.int32)


def outputs(num_seqs):
    """Poisoned."""
    sizes = {"query_start_loc": num_seqs + 1}
    return {name: np.full(sizes.get(name, num_seqs), 0x55, dtype) for name, dtype in OUTPUTS.items()}


def expected(table, lens):
    """By a loop."""
    out, place = outputs(len(lens)), 0
    out["slot_mapping"][:], out["positions"][:] = -1, 0
    for i, length in enumerate(lens.tolist()):
        out["query_start_loc"][i] = place
        if length:
            out["slot_mapping"][place] = int(table[i, length // BLOCK_SIZE]) * BLOCK_SIZE + length % BLOCK_SIZE
            out["positions"][place] = length
            place += 1
    out["query_start_loc"][len(lens)] = place
    return out, lens + (lens > 0)


def advance(backend, table, lens, out, **options):
    """The outputs after a call, and the lengths."""
    given = {name: backend.put(array) for name, array in out.items()}
    table, lens = backend.put(table), backend.put(lens.copy())
    advance_decode(table, lens, **given, block_size=BLOCK_SIZE, **options)
    return {name: backend.get(array) for name, array in given.items()}, backend.get(lens)


@pytest.mark.sanitize
@pytest.mark.parametrize("live", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("num_seqs", [0, 1, 31, 32, 33, 1024, 1025, 2100])
def test_numbers_of_sequences(backend, rng, num_seqs, live):
    table, lens = inputs(rng, num_seqs, live=live)
    got, got_lens = advance(backend, table, lens, outputs(num_seqs))
    want, want_lens = expected(table, lens)
    for name in OUTPUTS:
        assert_same_bits(got[name], want[name])
    assert_same_bits(got_lens, want_lens.astype(np.int32))


def test_without_positions(backend, rng):
    table, lens = inputs(rng, 40)
    out = outputs(40)
    del out["positions"]
    got, _ = advance(backend, table, lens, out)
    assert_same_bits(got["slot_mapping"], expected(table, lens)[0]["slot_mapping"])


def test_a_table_of_any_strides(backend, rng):
    table, lens = inputs(rng, 40)
    want, _ = expected(table, lens)
    wide = np.full((80, 14), -7, np.int32)
    wide[1::2, 1:11:2] = table
    on_device = backend.put(wide)
    given = {name: backend.put(array) for name, array in outputs(40).items()}
    advance_decode(on_device[1::2, 1:11:2], backend.put(lens), **given, block_size=BLOCK_SIZE)
    assert_same_bits(backend.get(given["slot_mapping"]), want["slot_mapping"])


def test_slots_past_32_bits(backend):
    table, lens = np.array([[2**31 - 1]], np.int32), np.array([3], np.int32)
    got, _ = advance(backend, table, lens, outputs(1))
    assert got["slot_mapping"].tolist() == [(2**31 - 1) * BLOCK_SIZE + 3]


def test_steps_agree_with_the_table(backend):
    """What the device lays out from reserved blocks is what the host lays out."""
    table = BlockTable(6, 8, BLOCK_SIZE, BlockPool(40))
    rows = [table.add() for _ in range(6)]
    table.append(rows, [1, 5, 4, 9, 3, 7])
    table.reserve(rows, 10)
    lens = backend.put(table.seq_lens.astype(np.int32))
    ids, given = backend.put(table.block_table.copy()), {k: backend.put(v) for k, v in outputs(6).items()}
    for _ in range(10):
        advance_decode(ids, lens, **given, block_size=BLOCK_SIZE)
        step = table.step(rows, 1)
        for name in OUTPUTS:
            assert_same_bits(backend.get(given[name]), getattr(step, name))
        assert_same_bits(backend.get(lens), step.seq_lens)


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"seq_lens": np.zeros(3, np.int64)}, TypeError, "seq_lens: expected int32, got int64"),
        ({"block_table": np.zeros((3, 2), np.int64)}, TypeError, "block_table: expected int32"),
        ({"slot_mapping": np.zeros(3, np.int32)}, TypeError, "slot_mapping: expected int64"),
        ({"positions": np.zeros(3, np.int32)}, TypeError, "positions: expected int64"),
        ({"query_start_loc": np.zeros(4, np.int64)}, TypeError, "query_start_loc: expected int32"),
        ({"seq_lens": np.zeros((3, 1), np.int32)}, ValueError, "seq_lens: expected shape"),
        ({"block_table": np.zeros((2, 2), np.int32)}, ValueError, "block_table: expected shape"),
        ({"block_table": np.zeros(3, np.int32)}, ValueError, "block_table: expected shape"),
        ({"slot_mapping": np.zeros(4, np.int64)}, ValueError, "slot_mapping: expected shape"),
        ({"query_start_loc": np.zeros(3, np.int32)}, ValueError, "query_start_loc: expected shape"),
        ({"positions": np.zeros(2, np.int64)}, ValueError, "positions: expected shape"),
        ({"slot_mapping": np.zeros(6, np.int64)[::2]}, ValueError, "slot_mapping: expected last axis contiguous"),
        ({"block_size": 0}, ValueError, "block_size: expected at least 1"),
        ({"block_size": None}, TypeError, "block_size: expected an integer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes(change, error, text):
    given = {"block_table": np.zeros((3, 2), np.int32), "seq_lens": np.ones(3, np.int32), **outputs(3)}
    kept = given["seq_lens"]
    with pytest.raises(error, match=text):
        advance_decode(**given | {"block_size": BLOCK_SIZE} | change)
    assert kept.tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["seq_lens", *OUTPUTS])
def test_arrays_that_cannot_be_written(name):
    given = {"block_table": np.zeros((3, 2), np.int32), "seq_lens": np.ones(3, np.int32), **outputs(3)}
    given[name].flags.writeable = False
    with pytest.raises(ValueError, match=f"{name}: expected a writable array"):
        advance_decode(**given, block_size=BLOCK_SIZE)


@pytest.mark.parametrize(
    ("lens", "table", "error", "text"),
    [
        ([-1, 3], [[0, 1], [2, 3]], ValueError, "seq_lens: expected lengths of at least 0, got -1"),
        ([3, 8], [[0, 1], [2, 3]], IndexError, "seq_lens: expected less than 8 tokens, what a row holds, got 8"),
        ([3, 4], [[0, 1], [2, -1]], IndexError, "block_table: expected a block for token 4 of row 1, got -1"),
    ],
    ids=str,
)
def test_what_lengths_and_tables_may_not_hold(backend, lens, table, error, text):
    lens, table = np.array(lens, np.int32), np.array(table, np.int32)
    out = outputs(2)
    given, on_device = {k: backend.put(v) for k, v in out.items()}, backend.put(lens)
    with pagedkv.checked(), pytest.raises(error, match=text):
        advance_decode(backend.put(table), on_device, **given, block_size=BLOCK_SIZE)
    assert_same_bits(backend.get(on_device), lens)
    assert_same_bits(backend.get(given["slot_mapping"]), out["slot_mapping"])


def test_rows_of_more_tokens_than_int32_holds():
    given = {"block_table": np.zeros((3, 2), np.int32), "seq_lens": np.ones(3, np.int32), **outputs(3)}
    with pytest.raises(ValueError, match="block_size: expected rows of at most 2147483647 tokens"):
        advance_decode(**given, block_size=2**30)


# ---- on a device ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_token_without_a_block_is_not_written():
    import cupy

    lens, table = np.array([8, 4, 3], np.int32), np.array([[0, 1], [2, -1], [5, 6]], np.int32)
    lens, table = cupy.asarray(lens), cupy.asarray(table)
    given = {name: cupy.asarray(array) for name, array in outputs(3).items()}
    advance_decode(table, lens, **given, block_size=BLOCK_SIZE)
    assert given["slot_mapping"].get().tolist() == [-1, -1, 23]
    assert lens.get().tolist() == [8, 5, 4]


@pytest.mark.ptx
def test_the_kernel_on_tokens_without_a_block():
    """Without the checks that come before it on the host."""
    table, lens = np.array([[0, 1], [2, -1], [5, 6]], np.int32), np.array([8, 4, 3], np.int32)
    out = outputs(3)
    problem = validated_advance(table, lens, out["slot_mapping"], out["positions"], out["query_start_loc"], BLOCK_SIZE)
    ptx_ops.launch(plan_advance(problem), advance_arrays(problem))
    assert out["slot_mapping"].tolist() == [-1, -1, 23]
    assert lens.tolist() == [8, 5, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["block_table", *OUTPUTS])
def test_arrays_on_two_devices(name):
    import cupy

    given = {"block_table": np.zeros((3, 2), np.int32), "seq_lens": np.ones(3, np.int32), **outputs(3)}
    given = {key: array if key == name else cupy.asarray(array) for key, array in given.items()}
    with pytest.raises(TypeError, match=f"{name}: expected an array on cuda:0"):
        advance_decode(**given, block_size=BLOCK_SIZE)


@pytest.mark.gpu
def test_a_captured_decode_step(rng):
    """Replayed without the host: six tokens of three sequences, one row of padding between them."""
    import cupy

    kv_heads, heads, size, num_steps = 2, 4, 16, 6
    table = BlockTable(4, 6, BLOCK_SIZE, BlockPool(24))
    rows = [table.add() for _ in range(4)]
    table.append(rows, [3, 0, 8, 5])
    table.reserve([0, 2, 3], num_steps)
    shape = (24, BLOCK_SIZE, kv_heads, size)
    caches = [cupy.asarray(rng.standard_normal(shape, np.float32)) for _ in range(2)]
    start = [cache.copy() for cache in caches]
    new = [cupy.asarray(rng.standard_normal((num_steps, 4, kv_heads, size), np.float32)) for _ in range(2)]
    query = cupy.asarray(rng.standard_normal((4, heads, size), np.float32))
    ids, out = cupy.asarray(table.block_table), cupy.zeros_like(query)
    lens = cupy.asarray(table.seq_lens.astype(np.int32))
    slots, starts = cupy.zeros(4, np.int64), cupy.zeros(5, np.int32)
    row = [cupy.zeros((4, kv_heads, size), np.float32) for _ in range(2)]
    reads = {"cu_seqlens_q": starts, "seqused_k": lens, "block_table": ids, "max_seqlen_q": 1, "num_splits": 1}

    def step():
        advance_decode(ids, lens, slots, starts, block_size=BLOCK_SIZE)
        pagedkv.reshape_and_cache_flash(*row, *caches, slots)
        pagedkv.flash_attn_varlen_func(query, *caches, **reads, out=out)

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    graph = captured(cupy, stream, step)
    stream.synchronize()
    lens[...] = cupy.asarray(table.seq_lens.astype(np.int32))
    for cache, before in zip(caches, start, strict=True):
        cache[...] = before
    cupy.cuda.Device().synchronize()
    for i in range(num_steps):
        host = table.step([0, 2, 3], 1)
        for target, source in zip(row, new, strict=True):
            target[...] = source[i]
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert slots.get().tolist() == [*host.slot_mapping.tolist(), -1]
        assert starts.get().tolist() == [0, 1, 1, 2, 3]
        pagedkv.reshape_and_cache_flash(*(source[i] for source in new), *start, cupy.asarray(host.slot_mapping))
        eager = pagedkv.flash_attn_varlen_func(query, *start, **reads)
        for cache, same in zip(caches, start, strict=True):
            assert_same_bits(cache.get(), same.get())
        assert_same_bits(out.get()[:3], eager.get()[:3])
