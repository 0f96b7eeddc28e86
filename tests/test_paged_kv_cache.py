"""PagedKVCache: sequences, steps, writes and reads over pool, table and storage."""

import numpy as np
import oracle
import pytest
from cases import assert_same_bits
from conftest import BACKENDS, make_backend

import pagedkv
from pagedkv import OutOfBlocks, PagedKVCache
from pagedkv import cache as cache_module

NUM_LAYERS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, NUM_HEADS = 2, 8, 2, 16, 4
SIZES = (BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)


def make(num_blocks=12, layout="NHD", dtype="float32", device="cpu", **options):
    return PagedKVCache(NUM_LAYERS, num_blocks, *SIZES, dtype, layout=layout, device=device, **options)


@pytest.fixture(params=BACKENDS)
def place(request):
    with pagedkv.use_backend(request.param):
        backend = make_backend(request.param)
        backend.device = "cuda" if request.param == "cuda" else "cpu"
        yield backend


def rows_for(rng, cache, num_tokens, num_heads=NUM_KV_HEADS):
    return rng.standard_normal((num_tokens, num_heads, HEAD_SIZE), np.float32).astype(cache.dtype)


def written(rng, place, cache, batch):
    """Random keys and values in every layer of a batch: [layer][side], as the host has them."""
    sides = [[rows_for(rng, cache, batch.host.num_tokens) for _ in range(2)] for _ in range(NUM_LAYERS)]
    for layer, (key, value) in enumerate(sides):
        cache.write(layer, place.put(key), place.put(value), batch)
    return sides


def add_written(rng, place, cache, token_ids):
    seq = cache.add(token_ids)
    return seq, written(rng, place, cache, cache.step([seq]))


# ---- steps, writes and reads ----------------------------------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_prefill_and_decode_of_several_sequences(place, rng, layout, kv_cache_dtype):
    """Against the oracle, which reads storage and table of the cache itself, and the tokens gathered again."""
    options = {"k_scale": 0.5, "v_scale": 2.0} if kv_cache_dtype == "fp8" else {}
    cache = make(layout=layout, dtype="bfloat16", device=place.device, kv_cache_dtype=kv_cache_dtype, **options)
    for side in cache[0] + cache[1]:
        side.view(np.uint8)[...] = 0xFF
    seqs = [cache.add() for _ in range(3)]
    wrote = {seq: [] for seq in seqs}
    for counts in ([5, 17, 1], [1, 1, 1], [4, 0, 9]):
        batch = cache.step(seqs, counts)
        sides = written(rng, place, cache, batch)
        starts = np.cumsum([0, *counts])
        for seq, start, end in zip(seqs, starts, starts[1:], strict=False):
            wrote[seq].append(sides[1][0][start:end])
        query = rows_for(rng, cache, sum(counts), NUM_HEADS)
        out, lse = cache.attend(1, place.put(query), batch, return_lse=True, softcap=20.0)
        k, v = (place.get(side) for side in cache[1])
        exact, exact_lse = oracle.varlen_attention(
            query,
            k,
            v,
            cu_seqlens_q=batch.host.query_start_loc,
            seqused_k=batch.host.seq_lens,
            block_table=cache.table.block_table[seqs],
            causal=True,
            softcap=20.0,
            layout=layout,
            kv_cache_dtype=kv_cache_dtype,
            k_descale=options.get("k_scale"),
            v_descale=options.get("v_scale"),
        )
        np.testing.assert_allclose(place.get(out).astype(np.float64), exact, rtol=0.02, atol=0.02)
        np.testing.assert_allclose(place.get(lse), exact_lse, rtol=1e-4, atol=1e-4)
    for seq in seqs:
        key, _ = cache.gather(1, seq)
        tokens = np.concatenate(wrote[seq])
        assert place.get(key).dtype.name == "bfloat16"
        if kv_cache_dtype == "auto":
            assert_same_bits(place.get(key), tokens)
        else:
            np.testing.assert_allclose(place.get(key).astype(float), tokens.astype(float), rtol=0.07, atol=0.01)


@pytest.mark.parametrize("num_splits", [0, 1])
def test_decode_in_the_packed_layout(place, rng, num_splits):
    cache = make(layout="packed", device=place.device)
    seqs = [cache.add(), cache.add()]
    written(rng, place, cache, cache.step(seqs, [11, 3]))
    batch = cache.step(seqs, 1)
    written(rng, place, cache, batch)
    query = rows_for(rng, cache, 2, NUM_HEADS)
    out = place.get(cache.attend(0, place.put(query), batch, num_splits=num_splits, sinks=np_on(place, [0.5] * 4)))
    caches = [place.get(side) for side in cache[0]]
    expected, _ = oracle.paged_attention(
        query, *caches, cache.table.block_table[seqs], batch.host.seq_lens, sinks=np.full(4, 0.5)
    )
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def np_on(place, values):
    return place.put(np.array(values, np.float32))


def test_prefill_in_the_packed_layout_says_which_layout_to_take(rng):
    cache = make(layout="packed")
    seq = cache.add()
    for count in (2, 0):
        batch = cache.step([seq], count)
        written(rng, make_backend("numpy"), cache, batch)
        query = rows_for(rng, cache, count, NUM_HEADS)
        with pytest.raises(NotImplementedError, match="layout: expected 'NHD' or 'HND' for other than one new token"):
            cache.attend(0, query, batch)
    with pytest.raises(ValueError, match="num_splits: expected 0 or 1 in the packed layout, got 2"):
        cache.attend(0, rows_for(rng, cache, 1, NUM_HEADS), decoded(rng, cache, seq), num_splits=2)


def decoded(rng, cache, seq):
    batch = cache.step([seq], 1)
    written(rng, make_backend("numpy"), cache, batch)
    return batch


def test_a_padded_batch(place, rng):
    """Padding of tokens and sequences writes and reads nothing."""
    cache = make(device=place.device)
    for side in cache[0] + cache[1]:
        side[...] = np.nan
    seq = cache.add()
    batch = cache.step([seq], 3, pad_seqs=4, pad_tokens=7)
    assert (batch.host.slot_mapping.size, batch.host.seq_lens.size) == (7, 4)
    key, value = (rows_for(rng, cache, 7) for _ in range(2))
    cache.write(0, place.put(key), place.put(value), batch)
    assert np.isfinite(place.get(cache[0].k)).sum() == 3 * NUM_KV_HEADS * HEAD_SIZE
    query = rows_for(rng, cache, 7, NUM_HEADS)
    out = place.get(cache.attend(0, place.put(query), batch, out=place.put(np.full_like(query, 7))))
    np.testing.assert_array_equal(out[3:], 7)
    np.testing.assert_allclose(out[0], np.repeat(value[0], NUM_HEADS // NUM_KV_HEADS, axis=0), rtol=1e-6)


def test_result_of_a_sequence_does_not_depend_on_the_batch(place, rng):
    cache = make(num_blocks=40, device=place.device)
    seqs = [cache.add() for _ in range(4)]
    written(rng, place, cache, cache.step(seqs, [20, 3, 40, 9]))
    batch = cache.step(seqs, 1)
    written(rng, place, cache, batch)
    query = rows_for(rng, cache, 4, NUM_HEADS)
    together = place.get(cache.attend(0, place.put(query), batch, num_splits=1))
    for i, seq in enumerate(seqs):
        cache.truncate(seq, int(cache.num_tokens(seq)) - 1)
        alone = cache.step([seq], 1)
        for layer in range(NUM_LAYERS):  # the same numbers again
            rows = [place.get(side) for side in (cache[layer].k, cache[layer].v)]
            slot = int(alone.host.slot_mapping[0])
            same = [place.put(side.reshape(-1, NUM_KV_HEADS, HEAD_SIZE)[[slot]]) for side in rows]
            cache.write(layer, *same, alone)
        result = cache.attend(0, place.put(query[[i]]), alone, num_splits=1)
        assert_same_bits(place.get(result)[0], together[i])


# ---- sharing --------------------------------------------------------------------------------------------------------


def test_fork_and_copy_on_write(place, rng):
    cache = make(device=place.device)
    seq, _ = add_written(rng, place, cache, range(11))
    child = cache.fork(seq)
    assert cache.pool.num_used == 2
    for one in (seq, child):
        cache.extend(one, [100 + one])
    before = [place.get(cache.gather(layer, seq)[side]) for layer in range(NUM_LAYERS) for side in (0, 1)]
    batch = cache.step([child])
    assert batch.host.copies.shape == (1, 2)
    sides = written(rng, place, cache, batch)
    after = [place.get(cache.gather(layer, seq)[side]) for layer in range(NUM_LAYERS) for side in (0, 1)]
    of_child = [place.get(cache.gather(layer, child)[side]) for layer in range(NUM_LAYERS) for side in (0, 1)]
    new = [sides[layer][side] for layer in range(NUM_LAYERS) for side in (0, 1)]
    for old, same, forked, last in zip(before, after, of_child, new, strict=True):
        assert_same_bits(same, old)
        assert_same_bits(forked, np.concatenate([old, last]))
    assert cache.step([seq]).host.copies.size == 0
    assert (cache.token_ids(seq)[-1], cache.token_ids(child)[-1]) == (100 + seq, 100 + child)


def test_whole_prompt_cached(place, rng):
    """Of 16 tokens that are all known the last block is computed again, into a block of its own."""
    cache = make(device=place.device)
    first, _ = add_written(rng, place, cache, range(16))
    blocks = cache.table.blocks(first)
    key = place.get(cache[1].k).copy()
    cache.free(first)
    again = cache.add(range(16))
    assert (cache.num_tokens(again), cache.num_pending(again)) == (8, 8)
    batch = cache.step([again])
    assert batch.token_ids.tolist() == list(range(8, 16))
    assert cache.table.blocks(again)[0] == blocks[0]
    assert cache.table.blocks(again)[1] not in blocks
    written(rng, place, cache, batch)
    np.testing.assert_array_equal(place.get(cache[1].k)[blocks], key[blocks])
    longer = cache.add(range(17))
    assert cache.num_tokens(longer) == 16
    assert cache.table.blocks(longer).tolist() == blocks.tolist()


def test_what_is_not_written_in_every_layer_is_not_known(rng):
    place = make_backend("numpy")
    cache = make()
    seq = cache.add(range(16))
    batch = cache.step([seq])
    cache.write(0, *(rows_for(rng, cache, 16) for _ in range(2)), batch)
    assert cache.num_tokens(cache.add(range(17))) == 0
    cache.write(-1, *(rows_for(rng, cache, 16) for _ in range(2)), batch)
    assert cache.num_tokens(cache.add(range(17))) == 16
    assert cache.num_tokens(cache.add(range(17), salt="other")) == 0
    assert cache.num_tokens(cache.add(range(17), extra_keys=["adapter"])) == 0
    assert cache.num_tokens(cache.add([1, *range(1, 17)])) == 0
    cache.pool.reset_prefix_cache()
    assert cache.num_tokens(cache.add(range(17))) == 0
    add_written(rng, place, cache, range(16))
    assert cache.num_tokens(cache.add(range(17))) == 16


def test_generated_tokens_are_known_as_well(rng):
    place, cache = make_backend("numpy"), make()
    seq, _ = add_written(rng, place, cache, range(6))
    for token in (6, 7, 8):
        cache.extend(seq, [token])
        written(rng, place, cache, cache.step([seq]))
    assert cache.num_tokens(cache.add(range(20))) == 8


def test_chunks_of_a_long_prompt(rng):
    place, cache = make_backend("numpy"), make()
    seq = cache.add(range(30))
    for expected in (range(12), range(12, 24), range(24, 30)):
        batch = cache.step([seq], min(12, cache.num_pending(seq)))
        assert batch.token_ids.tolist() == batch.positions.tolist() == list(expected)
        assert batch.last_tokens.tolist() == [len(expected) - 1]
        written(rng, place, cache, batch)
    assert cache.num_pending(seq) == 0
    assert cache.num_tokens(cache.add(range(30))) == 24


def test_rejected_tokens_are_taken_back(rng):
    """Of four tokens that a draft proposed two are wrong: what follows is computed and known for the right ones."""
    place, cache = make_backend("numpy"), make()
    seq, _ = add_written(rng, place, cache, range(6))
    cache.extend(seq, [6, 7, 90, 91])
    written(rng, place, cache, cache.step([seq]))
    cache.truncate(seq, 8)
    cache.extend(seq, [8])
    assert cache.step([seq]).positions.tolist() == [8]
    assert cache.token_ids(seq).tolist() == list(range(9))
    cache.truncate(seq, 8)
    assert cache.num_tokens(cache.add([*range(8), 90, 91])) == 8
    cache.truncate(seq, 7)
    assert cache.num_tokens(cache.add([*range(8), 90, 91])) == 0


def test_a_window_gives_blocks_back(rng):
    place, cache = make_backend("numpy"), make()
    seq, _ = add_written(rng, place, cache, range(30))
    assert cache.drop_outside_window(seq, 10) == 2
    assert cache.pool.num_used == 2
    cache[0].k[cache.table.block_table[seq][:2]] = np.nan
    cache.extend(seq, [30])
    batch = cache.step([seq])
    sides = written(rng, place, cache, batch)
    out = cache.attend(0, rows_for(rng, cache, 1, NUM_HEADS), batch, window_size=(9, 0))
    assert np.isfinite(out).all()
    assert sides[0][0].shape[0] == 1


# ---- what must not happen -------------------------------------------------------------------------------------------


def test_a_step_that_the_pool_cannot_serve(rng):
    place, cache = make_backend("numpy"), make(num_blocks=4)
    seq, _ = add_written(rng, place, cache, range(11))
    other = cache.fork(seq)
    for one in (seq, other):
        cache.extend(one, range(20, 27))
    before = (cache.table.block_table.tolist(), cache.table.seq_lens.tolist(), cache.pool.ref_counts.tolist())
    key = cache[0].k.copy()
    with pytest.raises(OutOfBlocks):
        cache.step([seq, other])
    assert before == (cache.table.block_table.tolist(), cache.table.seq_lens.tolist(), cache.pool.ref_counts.tolist())
    np.testing.assert_array_equal(cache[0].k, key)
    cache.free(other)
    assert cache.step([seq]).token_ids.tolist() == list(range(20, 27))


def test_the_last_step_comes_before_the_next(rng):
    cache = make()
    seq = cache.add(range(9))
    batch = cache.step([seq], 4)
    cache.write(0, *(rows_for(rng, cache, 4) for _ in range(2)), batch)
    for call in (lambda: cache.step([seq], 1), lambda: cache.fork(seq), lambda: cache.drop_outside_window(seq, 1)):
        with pytest.raises(
            ValueError, match="seqs: expected sequences whose last step is written, got sequence 0: write it"
        ):
            call()
    cache.truncate(seq, 2)  # not all of the step
    with pytest.raises(ValueError, match="whose last step is written"):
        cache.step([seq], 1)
    cache.truncate(seq, 0)
    cache.extend(seq, [5])
    assert cache.step([seq]).token_ids.tolist() == [5]


@pytest.mark.parametrize("change", ["truncate", "free", "reuse", "go on", "window"])
def test_a_batch_of_the_past(rng, change):
    """Its slots may belong to others by now."""
    place, cache = make_backend("numpy"), make()
    seq = cache.add(range(20))
    batch = cache.step([seq], 12)
    sides = written(rng, place, cache, batch)
    if change == "truncate":
        cache.truncate(seq, 3)
    elif change == "window":
        assert cache.drop_outside_window(seq, 2) == 1
    elif change == "go on":
        written(rng, place, cache, cache.step([seq]))
    else:
        cache.free(seq)
        if change == "reuse":
            written(rng, place, cache, cache.step([cache.add(range(50, 60))]))
    key = cache[0].k.copy()
    with pytest.raises(ValueError, match="batch: expected the last step of its sequences"):
        cache.write(0, *sides[0], batch)
    with pytest.raises(ValueError, match="batch: expected the last step of its sequences"):
        cache.attend(0, rows_for(rng, cache, 12, NUM_HEADS), batch, window_size=(1, 0))
    np.testing.assert_array_equal(cache[0].k, key)


def test_a_batch_that_has_been_written():
    """Its blocks may be shared by now."""
    rng, place, cache = np.random.default_rng(0), make_backend("numpy"), make()
    seq = cache.add(range(9))
    batch = cache.step([seq])
    sides = written(rng, place, cache, batch)
    cache.fork(seq)
    with pytest.raises(ValueError, match="batch: expected one that is to be written, got one written in all layers"):
        cache.write(0, *sides[0], batch)
    cache.attend(0, rows_for(rng, cache, 9, NUM_HEADS), batch)


def test_a_batch_of_another_cache(rng):
    """Such as that of a draft model beside its target."""
    place, one, other = make_backend("numpy"), make(), make(block_order=range(11, -1, -1))
    batches = [cache.step([cache.add(range(9))]) for cache in (one, other)]
    with pytest.raises(ValueError, match="batch: expected the last step of its sequences"):
        written(rng, place, one, batches[1])
    assert one.num_tokens(one.add(range(9))) == 0
    written(rng, place, one, batches[0])


def test_an_array_of_sequences_that_is_used_again(rng):
    place, cache = make_backend("numpy"), make()
    numbers = np.array([cache.add([1] * 8), cache.add([2] * 8)])
    batch = cache.step(numbers)
    numbers[:] = numbers[::-1].copy()
    written(rng, place, cache, batch)
    hits = [cache.table.blocks(cache.add([token] * 9))[0] for token in (1, 2)]
    assert hits == [cache.table.blocks(seq)[0] for seq in (0, 1)]


def test_a_copy_that_fails_changes_nothing(rng, monkeypatch):
    place, cache = make_backend("numpy"), make()
    seq, _ = add_written(rng, place, cache, range(11))
    child = cache.fork(seq)
    cache.extend(child, [50])
    before = (cache.table.block_table.tolist(), cache.table.seq_lens.tolist(), cache.pool.ref_counts.tolist())

    def fail(caches, mapping):
        assert len(caches) == 2 * NUM_LAYERS
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("pagedkv.cache.copy_blocks", fail)
        with pytest.raises(MemoryError, match="no room"):
            cache.step([child])
    assert before == (cache.table.block_table.tolist(), cache.table.seq_lens.tolist(), cache.pool.ref_counts.tolist())
    assert cache.step([child]).host.copies.tolist() == [[1, 2]]


def test_what_a_window_has_given_back_is_not_read(rng):
    """A kernel would follow the table's -1."""
    place, cache = make_backend("numpy"), make()
    seq, _ = add_written(rng, place, cache, range(30))
    other, _ = add_written(rng, place, cache, range(50, 53))
    cache.drop_outside_window(seq, 10)
    for one in (seq, other):
        cache.extend(one, [7])
    with pytest.raises(ValueError, match="seq: expected a sequence with all its blocks, got sequence 0"):
        cache.gather(0, seq)
    batch = cache.step([other, seq])
    written(rng, place, cache, batch)
    query = rows_for(rng, cache, 2, NUM_HEADS)
    for window_size in ((-1, -1), (15, 0)):
        with pytest.raises(ValueError, match="window_size: expected one that sees what is left of sequence 0, got"):
            cache.attend(0, query, batch, window_size=window_size)
    for window_size in ((14, 0), (9, 0)):  # tokens 16 to 30 are left
        assert np.isfinite(cache.attend(0, query, batch, window_size=window_size)).all()


@pytest.mark.parametrize(
    ("name", "change", "error", "text"),
    [
        (
            "key",
            lambda rows: rows[:4],
            ValueError,
            r"key: expected \[5 tokens or more, heads, 16\], got shape \(4, 2, 16\)",
        ),
        ("value", lambda rows: rows.reshape(5, -1), ValueError, r"value: expected \[5 tokens or more"),
        (
            "key",
            lambda rows: rows.astype(np.float16),
            TypeError,
            "key: expected float32, the cache's dtype, got float16",
        ),
        (
            "query",
            lambda rows: rows.astype(np.float16),
            TypeError,
            "query: expected float32, the cache's dtype, got float16",
        ),
        ("query", lambda rows: rows.reshape(5, -1), ValueError, r"query: expected \[5 tokens or more"),
        ("query", lambda rows: rows[:4], ValueError, r"query: expected \[5 tokens or more"),
        ("query", lambda rows: rows.astype(int), TypeError, "query: expected one of float16"),
        ("value", lambda rows: rows.tolist(), TypeError, "value: expected an array, got list"),
    ],
    ids=str,
)
def test_rows_that_do_not_fit_the_cache(rng, name, change, error, text):
    """The errors name what the caller of a cache has passed."""
    cache = make()
    batch = cache.step([cache.add()], 5)
    rows = {"key": rows_for(rng, cache, 5), "value": rows_for(rng, cache, 5)}
    if name == "query":
        written(rng, make_backend("numpy"), cache, batch)
        with pytest.raises(error, match=text):
            cache.attend(0, change(rows_for(rng, cache, 5, NUM_HEADS)), batch)
        return
    before = cache[0].k.copy()
    with pytest.raises(error, match=text):
        cache.write(0, **rows | {name: change(rows[name])}, batch=batch)
    np.testing.assert_array_equal(cache[0].k, before)


def test_a_layer_is_written_before_it_is_read(rng):
    cache = make()
    batch = cache.step([cache.add()], 5)
    cache.write(0, rows_for(rng, cache, 5), rows_for(rng, cache, 5), batch)
    query = rows_for(rng, cache, 5, NUM_HEADS)
    assert np.isfinite(cache.attend(0, query, batch)).all()
    for layer in (1, -1):
        with pytest.raises(
            ValueError, match=f"batch: expected one that is written in layer {layer}, got one that is not"
        ):
            cache.attend(layer, query, batch)


def test_what_is_no_batch(rng):
    cache = make()
    batch = cache.step([cache.add()], 5)
    with pytest.raises(TypeError, match=r"batch: expected what step\(\) returned, got Step"):
        cache.attend(0, rows_for(rng, cache, 5, NUM_HEADS), batch.host)
    assert repr(batch) == "<Batch: 5 new tokens of 1 sequences>"


@pytest.mark.parametrize(
    ("nbytes", "text"), [(999, "999 B"), (49_152, "49.2 kB"), (2 * 10**6, "2 MB"), (12 * 10**9, "12 GB")]
)
def test_units_of_sizes(nbytes, text):
    assert cache_module._bytes(nbytes) == text


@pytest.mark.parametrize("layer", [2, -3, slice(0, 1), 0.0], ids=str)
def test_layers_that_there_are_not(rng, layer):
    cache = make()
    batch = cache.step([cache.add()], 1)
    with pytest.raises((IndexError, TypeError), match=r"layer: expected from 0 to 1|cannot be interpreted"):
        cache.write(layer, *(rows_for(rng, cache, 1) for _ in range(2)), batch)
    written(rng, make_backend("numpy"), cache, batch)


def test_one_token_for_each(rng):
    place, cache = make_backend("numpy"), make(max_seq_len=16)
    seqs = [add_written(rng, place, cache, tokens)[0] for tokens in (range(7), [], range(15))]
    cache.extend_each(seqs[::-1], [30, 31, 32])
    assert [cache.token_ids(seq)[-1] for seq in seqs] == [32, 31, 30]
    batch = cache.step(seqs)
    assert batch.token_ids.tolist() == [32, 31, 30]
    written(rng, place, cache, batch)
    assert cache.num_tokens(cache.add([*range(7), 32, 0])) == 8
    for rows, tokens, error in (
        (seqs, [1, 2], "token_ids: expected 3, one for each sequence, got 2"),
        (seqs, [1, 2, 3], "token_ids: expected at most 16 tokens in a sequence, got 17"),
        ([seqs[0], cache.add()], [1, 2], "seq: expected a sequence with token ids"),
    ):
        with pytest.raises(ValueError, match=error):
            cache.extend_each(rows, tokens)
    with pytest.raises(TypeError, match="token_ids: expected signed integers"):
        cache.extend_each(seqs, [1.0, 2.0, 3.0])
    assert [cache.num_pending(seq) for seq in seqs] == [0, 0, 0]


def test_more_tokens_than_are_pending():
    cache = make()
    seq, unknown = cache.add(range(5)), cache.add()
    with pytest.raises(ValueError, match="num_new: expected at most 5, the pending tokens of 0, got 6"):
        cache.step([unknown, seq], 6)
    with pytest.raises(ValueError, match="num_new: expected a number, since sequence 1 has no token ids"):
        cache.step([seq, unknown])
    assert cache.pool.num_used == 0
    assert cache.step([seq, unknown], [5, 9]).token_ids is None


@pytest.mark.parametrize("method", ["extend", "token_ids", "num_pending"])
def test_sequences_without_token_ids(method):
    cache = make()
    seq = cache.add()
    arguments = ([1],) if method == "extend" else ()
    with pytest.raises(ValueError, match="seq: expected a sequence with token ids, got sequence 0, added without"):
        getattr(cache, method)(seq, *arguments)


@pytest.mark.parametrize("method", ["extend", "token_ids", "num_tokens", "num_pending", "fork", "truncate", "free"])
def test_sequences_that_there_are_not(method):
    cache = make()
    cache.free(cache.add())
    arguments = {"extend": ([1],), "truncate": (0,)}.get(method, ())
    with pytest.raises(ValueError, match=r"seqs?: expected a sequence that was added and not freed, got 0"):
        getattr(cache, method)(0, *arguments)


def test_more_tokens_than_a_row_holds():
    cache = make(max_seq_len=16)
    with pytest.raises(ValueError, match="token_ids: expected at most 16 tokens in a sequence, got 17"):
        cache.add(range(17))
    assert len(cache.table) == 0
    seq = cache.add(range(10))
    with pytest.raises(ValueError, match="token_ids: expected at most 16 tokens in a sequence, got 17"):
        cache.extend(seq, range(7))
    assert cache.num_pending(seq) == 10


def test_pending_tokens_are_taken_back_while_a_step_is_written(rng):
    place, cache = make_backend("numpy"), make()
    seq = cache.add(range(12))
    batch = cache.step([seq], 8)
    cache.truncate(seq, 9)
    written(rng, place, cache, batch)
    assert cache.num_tokens(cache.add(range(12))) == 8
    assert cache.num_pending(seq) == 1


def test_truncation_to_more_than_there_is():
    cache = make()
    seq = cache.add(range(5))
    with pytest.raises(ValueError, match="num_tokens: expected at most 5, got 6"):
        cache.truncate(seq, 6)
    cache.truncate(seq, 2)
    assert cache.token_ids(seq).tolist() == [0, 1]


def test_a_batch_of_which_one_sequence_has_gone_on(rng):
    cache = make()
    first, second, third = cache.add(range(9)), cache.add(range(20, 29)), cache.add(range(3))
    batch = cache.step([first, second])
    cache.truncate(second, 0)
    key = cache[0].k.copy()
    with pytest.raises(ValueError, match=r"batch: expected the last step of its sequences, got one that 1 has left"):
        cache.write(0, *(rows_for(rng, cache, 18) for _ in range(2)), batch)
    np.testing.assert_array_equal(cache[0].k, key)
    with pytest.raises(ValueError, match="whose last step is written, got sequence 0: write it"):
        cache.step([third, first], 0)


def test_a_step_of_no_tokens_that_is_undone(rng):
    place, cache = make_backend("numpy"), make()
    seq, _ = add_written(rng, place, cache, range(5))
    batch = cache.step([seq], 0)
    cache.truncate(seq, 5)
    with pytest.raises(ValueError, match="batch: expected the last step of its sequences"):
        cache.write(0, *(rows_for(rng, cache, 0) for _ in range(2)), batch)
    assert cache.step([seq], 0).token_ids.tolist() == []


def test_a_number_that_is_given_again_knows_nothing_of_before():
    cache = make()
    seq = cache.add(range(9))
    cache.step([seq])
    cache.free(seq)
    again = cache.add()
    assert again == seq
    with pytest.raises(ValueError, match="added without"):
        cache.num_pending(again)
    assert cache.step([again], 2).host.num_tokens == 2


def test_no_sequences_at_all():
    batch = make().step([])
    assert (batch.token_ids.tolist(), batch.last_tokens.tolist()) == ([], [])


def test_last_tokens_of_a_padded_batch():
    cache = make()
    batch = cache.step([cache.add(), cache.add()], [3, 2], pad_seqs=4, pad_tokens=8)
    assert batch.last_tokens.tolist() == [2, 4]


OPTIONS = {
    "scale": 0.7,
    "window_size": (5, 0),
    "softcap": 3.0,
    "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4], np.float32),
    "sinks": np.array([0.5, 0.1, 1.0, 2.0], np.float32),
}


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_options_of_a_read(rng, layout):
    """All at once as the op itself takes them; and each of them, left out, is missed."""
    place, cache = make_backend("numpy"), make(layout=layout)
    seqs = [cache.add(), cache.add()]
    written(rng, place, cache, cache.step(seqs, [11, 3]))
    batch = cache.step(seqs, 1)
    written(rng, place, cache, batch)
    query = rows_for(rng, cache, 2, NUM_HEADS)
    table, lens = cache.table.block_table[seqs], batch.host.seq_lens
    if layout == "packed":
        expected, expected_lse = oracle.paged_attention(query, *cache[1], table, lens, **OPTIONS)
    else:
        names = {"scale": "softmax_scale", "sinks": "s_aux"}
        options = {names.get(name, name): value for name, value in OPTIONS.items()}
        options |= {"cu_seqlens_q": batch.host.query_start_loc, "causal": True, "layout": layout}
        expected, expected_lse = oracle.varlen_attention(query, *cache[1], seqused_k=lens, block_table=table, **options)
    out, lse_out = np.empty_like(query), np.empty((NUM_HEADS, 2), np.float32)
    got, lse = cache.attend(1, query, batch, **OPTIONS, out=out, lse_out=lse_out, return_lse=True)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse_out, expected_lse, rtol=1e-5, atol=1e-5)
    assert got is out or np.shares_memory(got, out)
    assert np.shares_memory(lse, lse_out)
    for name in OPTIONS:
        others = {other: value for other, value in OPTIONS.items() if other != name}
        assert not np.allclose(cache.attend(1, query, batch, **others), expected, rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize("layout", ["NHD", "packed"])
def test_workspace_and_splits_reach_the_op(rng, layout, monkeypatch):
    cache = make(layout=layout)
    seqs = [cache.add(), cache.add()]
    batch = cache.step(seqs, 1)
    written(rng, make_backend("numpy"), cache, batch)
    given, workspace = {}, np.empty(8, np.uint8)
    name = "paged_attention" if layout == "packed" else "flash_attn_varlen_func"
    monkeypatch.setattr(f"pagedkv.cache.{name}", lambda *arrays, **options: given.update(options))
    cache.attend(0, rows_for(rng, cache, 2, NUM_HEADS), batch, workspace=workspace)
    assert given["workspace"] is workspace
    if layout == "packed":
        monkeypatch.setattr("pagedkv.cache.paged_attention_v1", lambda *arrays, **options: given.update(op="v1"))
        cache.attend(0, rows_for(rng, cache, 2, NUM_HEADS), batch, num_splits=1)
        assert given["op"] == "v1"
    else:
        assert given["max_seqlen_q"] == 1
        cache.attend(0, rows_for(rng, cache, 2, NUM_HEADS), batch, num_splits=3)
        assert given["num_splits"] == 3


def test_as_many_new_tokens_as_sequences_but_not_one_each(rng):
    """Of two sequences the one takes two, the other none: no decode step."""
    cache = make(layout="packed")
    batch = cache.step([cache.add(), cache.add()], [2, 0])
    written(rng, make_backend("numpy"), cache, batch)
    with pytest.raises(NotImplementedError, match="layout: expected 'NHD' or 'HND'"):
        cache.attend(0, rows_for(rng, cache, 2, NUM_HEADS), batch)
    batch = cache.step([0, 1], [1, 0])
    written(rng, make_backend("numpy"), cache, batch)
    with pytest.raises(NotImplementedError, match="layout: expected 'NHD' or 'HND'"):
        cache.attend(0, rows_for(rng, cache, 1, NUM_HEADS), batch)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_gathered_from_fp8_have_their_own_scale(rng, dtype):
    place = make_backend("numpy")
    cache = make(dtype=dtype, kv_cache_dtype="fp8", k_scale=0.5, v_scale=2.0)
    seq = cache.add()
    sides = written(rng, place, cache, cache.step([seq], 9))
    for got, wrote in zip(cache.gather(1, seq), sides[1], strict=True):
        assert got.dtype.name == dtype
        np.testing.assert_allclose(got.astype(float), wrote.astype(float), rtol=0.07, atol=0.02)


# ---- what it is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
@pytest.mark.parametrize(
    "kinds", [("float16", "auto", 2), ("float32", "auto", 4), ("bfloat16", "fp8_e5m2", 1)], ids=str
)
def test_shapes_and_sizes(layout, kinds):
    dtype, kv_cache_dtype, itemsize = kinds
    cache = make(layout=layout, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    assert cache.shape == (NUM_LAYERS, 12, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    assert (len(cache), cache.num_blocks, cache.device, cache.dtype.name) == (2, 12, "cpu", dtype)
    sides = [side for layer in cache for side in layer]
    assert len(sides) == 4
    assert cache.nbytes == sum(side.nbytes for side in sides) == 2 * 2 * 12 * 8 * 2 * 16 * itemsize
    assert (
        cache[1].k.shape
        == {
            "NHD": (12, 8, 2, 16),
            "HND": (12, 2, 8, 16),
            "packed": (12, 2, 16 * itemsize // 16, 8, 16 // itemsize),
        }[layout]
    )
    assert cache[-1].v is cache[1].v
    with pytest.raises(IndexError):
        cache[2]


def test_repr_tells_usage():
    cache = make()
    cache.step([cache.add()], 20)
    assert repr(cache) == (
        "<PagedKVCache: 2 layers x 12 NHD blocks x 8 tokens, 2 heads x 16, float32, 49.2 kB on cpu; "
        "1 sequences in 3 blocks (25%)>"
    )


def test_a_context_that_gives_its_memory_back():
    with make() as cache:
        seq = cache.add()
        assert cache[0].k.size
    for call in (lambda: cache[0], lambda: cache.step([seq], 1), lambda: cache.gather(0, seq)):
        with pytest.raises(ValueError, match="the cache is closed"):
            call()


def test_rows_of_the_table():
    """As long as the pool, unless that is longer than any sequence."""
    assert make(num_blocks=12).table.max_blocks == 12
    assert make(num_blocks=12, max_seq_len=17).table.max_blocks == 3
    assert make(num_blocks=20_000, max_seqs=2).table.max_blocks == 131_072 // BLOCK_SIZE


def test_an_order_of_blocks():
    cache = make(num_blocks=3, block_order=[2, 0, 1])
    cache.step([cache.add()], 17)
    assert cache.table.blocks(0).tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"layout": "NDH"}, ValueError, "layout: expected one of NHD, HND, packed"),
        ({"dtype": "float64"}, TypeError, "dtype: expected one of"),
        ({"dtype": "float32", "kv_cache_dtype": "fp8"}, NotImplementedError, "dtype: expected float16 or bfloat16"),
        ({"kv_cache_dtype": "fp4"}, ValueError, "kv_cache_dtype: expected one of"),
        ({"num_layers": 0}, ValueError, "num_layers: expected at least 1"),
        ({"num_blocks": 0}, ValueError, "num_blocks: expected at least 1"),
        ({"num_blocks": "all"}, ValueError, "num_blocks: expected a number or 'auto'"),
        (
            {"num_blocks": "auto"},
            ValueError,
            "num_blocks: expected a number with device='cpu', since 'auto' asks a GPU",
        ),
        ({"num_blocks": 1.5}, TypeError, "num_blocks"),
        ({"head_size": 12}, ValueError, "head_size: expected a multiple of 8"),
        ({"head_size": 264}, NotImplementedError, "head_size: expected at most 256"),
        ({"layout": "packed", "block_size": 12}, ValueError, "block_size: expected one of"),
        (
            {"layout": "packed", "head_size": 8, "kv_cache_dtype": "fp8"},
            ValueError,
            "head_size: expected a multiple of x",
        ),
        ({"block_size": 0}, ValueError, "block_size: expected at least 1"),
        ({"device": "tpu"}, ValueError, "device: expected 'cpu', 'cuda', 'cuda:N' or a number, got 'tpu'"),
        ({"device": True}, ValueError, "device: expected"),
        ({"k_scale": -1.0}, ValueError, "k_scale: expected a positive number"),
        ({"v_scale": np.ones(3, np.float32)}, ValueError, "v_scale: expected a number or shape"),
        ({"k_scale": np.ones(2, np.float32)}, ValueError, "v_scale: expected a scale per head like k_scale"),
        ({"k_scale": np.ones(1)}, TypeError, "k_scale: expected float32"),
        ({"max_seqs": 0}, ValueError, "max_seqs: expected at least 1"),
        ({"max_seq_len": 0}, ValueError, "max_seq_len: expected at least 1"),
        ({"block_order": [0]}, ValueError, "order: expected each number below 12 once"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_no_cache(change, error, text):
    given = {"num_layers": 2, "num_blocks": 12, "block_size": 8, "num_kv_heads": 2, "head_size": 16, "device": "cpu"}
    with pytest.raises(error, match=text):
        PagedKVCache(**given | {"dtype": "float16"} | change)


# ---- on a device ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_auto_takes_a_share_of_free_memory(monkeypatch):
    """What is free is made up, since others may be using the card."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    held = cupy.get_default_memory_pool().free_bytes()
    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", lambda: (4096 * 1000 - held, 1 << 40))
    with make(num_blocks="auto", device="cuda", memory_fraction=0.25) as cache:
        assert cache.num_blocks == 250
        assert cache.nbytes == 4096 * 250
    for fraction, error in ((-0.1, ValueError), (1.5, ValueError), ("half", TypeError)):
        with pytest.raises(error, match="memory_fraction"):
            make(num_blocks="auto", device="cuda", memory_fraction=fraction)
    with pytest.raises(ValueError, match="num_blocks: expected 4096 free bytes for one block, got 0"):
        make(num_blocks="auto", device="cuda", memory_fraction=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("device", [None, "cuda", "cuda:0", 0])
def test_names_of_a_device(device):
    import cupy

    cache = make(device=device, k_scale=np.ones(1, np.float32), kv_cache_dtype="fp8", dtype="float16")
    assert cache.device == "cuda:0"
    assert isinstance(cache[0].k, cupy.ndarray)
    assert isinstance(cache._scales["k_scale"], cupy.ndarray)
    batch = cache.step([cache.add()], 3)
    for name in ("slot_mapping", "query_start_loc", "seq_lens", "block_table"):
        array = getattr(batch, name)
        assert_same_bits(array.get(), np.ascontiguousarray(getattr(batch.host, name)))
        assert array.data.ptr % 16 == 0


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr("pagedkv.storage._has_cuda", lambda: False)
    assert make(device=None).device == "cpu"
    with pytest.raises(RuntimeError, match="device: expected a CUDA device that CuPy can use, got none"):
        make(device="cuda")
