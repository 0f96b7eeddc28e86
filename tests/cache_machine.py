"""Random histories of a paged cache against a shadow model that keeps tokens alone.

What a token's keys and values hold is a tag of all tokens up to it, so a block that is shared, found again, copied or
overwritten wrongly shows as a wrong tag. After every step all contents are read back, and pool and table are held to
what follows from each other.
"""

import hashlib
from collections import Counter
from typing import ClassVar

import numpy as np
from conftest import make_backend
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pagedkv

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE = 2, 10, 8, 2, 8
NUM_HEADS, MAX_SEQS, MAX_SEQ_LEN, SCALE = 4, 5, 40, 0.001
WINDOW = 11
# Beginnings of three rows, two of which begin alike, so that prefixes are often the same; and others.
ROWS = [[0] * 40, [0] * 8 + [1] * 32, [1] * 40]
TOKENS = st.one_of(
    st.builds(lambda row, length: row[:length], st.sampled_from(ROWS), st.integers(0, 30)),
    st.lists(st.integers(0, 1), max_size=10),
)
PICKS = st.integers(0, MAX_SEQS - 1)  # one of the sequences that there are


def tag(before, token):
    """[HEAD_SIZE] small numbers, exact in every dtype, that a token gives after what came before it."""
    return np.frombuffer(hashlib.md5(before.tobytes() + bytes([token])).digest()[:HEAD_SIZE], np.uint8)


def tags_of(tokens, salt):
    tags, before = [], np.frombuffer(salt.encode(), np.uint8)
    for token in tokens:
        before = tag(before, token)
        tags.append(before)
    return np.array(tags, np.uint8).reshape(-1, HEAD_SIZE)


def contents(tags, layer):
    """Keys and values of tokens with these tags in one layer: [num_tokens, NUM_KV_HEADS, HEAD_SIZE] each."""
    heads = np.stack([tags + 256.0 * head + 512.0 * layer for head in range(NUM_KV_HEADS)], axis=1)
    return heads, heads[..., ::-1] + 1


class Shadow:
    """One sequence: all its tokens, how many are in the cache, and how many of the first were given back."""

    def __init__(self, tokens, salt, is_known):
        self.tokens, self.salt, self.is_known = list(tokens), salt, is_known
        self.in_cache = self.num_dropped = 0

    @property
    def tags(self):
        return tags_of(self.tokens, self.salt)


has_sequences = precondition(lambda self: self.seqs)


class CacheMachine(RuleBasedStateMachine):
    """Each rule is a call, or a few that belong together. ``backend_name`` is set by subclasses."""

    backend_name = "numpy"
    num_steps: ClassVar[Counter] = Counter()

    @initialize(layout=st.sampled_from(["NHD", "HND", "packed"]), dtype=st.sampled_from(["float32", "float16"]))
    def start(self, layout, dtype):
        self.backend = make_backend(self.backend_name)
        device = "cuda" if self.backend_name == "cuda" else "cpu"
        sizes = (NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
        kinds = {"dtype": dtype, "layout": layout, "device": device}
        self.cache = pagedkv.PagedKVCache(*sizes, **kinds, max_seqs=MAX_SEQS, max_seq_len=MAX_SEQ_LEN)
        for layer in self.cache:
            for side in layer:
                side[...] = np.nan
        self.seqs, self.tags_by_hash, self.num_anonymous = {}, {}, 0

    # ---- rules ------------------------------------------------------------------------------------------------------

    @rule(tokens=TOKENS, salt=st.sampled_from(["", "", "salt"]))
    def add(self, tokens, salt):
        if len(self.seqs) == MAX_SEQS:
            self.unchanged(ValueError, self.cache.add, tokens)
            return
        seq = self.cache.add(tokens, salt=salt or None)
        shadow = self.seqs[seq] = Shadow(tokens, salt, True)
        shadow.in_cache = self.cache.num_tokens(seq)
        assert shadow.in_cache <= max(0, len(tokens) - 1)
        assert shadow.in_cache % BLOCK_SIZE == 0
        assert shadow.in_cache >= self.surely_known(shadow)

    @precondition(lambda self: len(self.seqs) < MAX_SEQS)
    @rule()
    def add_unknown(self):
        self.num_anonymous += 1
        self.seqs[self.cache.add()] = Shadow([], f"nobody else's {self.num_anonymous}", False)

    @has_sequences
    @rule(pick=PICKS, tokens=TOKENS)
    def extend(self, pick, tokens):
        name = self.picked(pick)
        tokens = tokens[: MAX_SEQ_LEN - len(self.seqs[name].tokens)]
        if self.seqs[name].is_known:
            self.cache.extend(name, tokens)
            self.seqs[name].tokens += tokens
        else:
            self.unchanged(ValueError, self.cache.extend, name, tokens)

    @has_sequences
    @rule(
        left_out=st.sets(PICKS), most=st.sampled_from([1, 3, 8, 9, 40]), attends=st.booleans(), backwards=st.booleans()
    )
    def step(self, left_out, most, attends, backwards):
        names = [name for name in sorted(self.seqs, reverse=backwards) if name not in left_out]
        counts = [self.take(self.seqs[name], most) for name in names]
        batch = self.try_step(names, counts)
        if batch is None:
            return
        self.write(batch, range(NUM_LAYERS))
        if names:
            self.unchanged(ValueError, self.write, batch, [0])
        for name, count in zip(names, counts, strict=True):
            self.seqs[name].in_cache += count
        self.attend(batch, names, counts, attends)

    @has_sequences
    @rule(pick=PICKS, most=st.integers(1, 20), num_written=st.integers(0, NUM_LAYERS - 1), is_freed=st.booleans())
    def abandon(self, pick, most, num_written, is_freed):
        """A step that is not written in every layer, and undone."""
        name = self.picked(pick)
        shadow = self.seqs[name]
        count = self.take(shadow, most)
        batch = self.try_step([name], [count])
        if batch is None:
            return
        self.write(batch, range(num_written))
        for call in (self.cache.step, self.cache.fork):
            self.unchanged(ValueError, call, name)
        if is_freed:
            self.cache.free(name)
            del self.seqs[name]
        else:
            self.cache.truncate(name, shadow.in_cache)
            del shadow.tokens[shadow.in_cache :]
        for layer in range(NUM_LAYERS):
            self.unchanged(ValueError, self.write, batch, [layer])

    @has_sequences
    @rule(pick=PICKS)
    def fork(self, pick):
        name = self.picked(pick)
        if len(self.seqs) == MAX_SEQS:
            self.unchanged(ValueError, self.cache.fork, name)
            return
        parent = self.seqs[name]
        child = self.seqs[self.cache.fork(name)] = Shadow(parent.tokens, parent.salt, parent.is_known)
        child.in_cache, child.num_dropped = parent.in_cache, parent.num_dropped

    @has_sequences
    @rule(pick=PICKS, taken=st.integers(0, 12))
    def truncate(self, pick, taken):
        name = self.picked(pick)
        shadow = self.seqs[name]
        least = shadow.num_dropped and shadow.num_dropped + WINDOW - 1
        most = max(len(shadow.tokens), shadow.in_cache)
        num_tokens = max(0, most - taken)
        if min(num_tokens, shadow.in_cache) < least:
            self.unchanged(ValueError, self.cache.truncate, name, num_tokens)
            return
        self.cache.truncate(name, num_tokens)
        del shadow.tokens[num_tokens:]
        shadow.in_cache = min(shadow.in_cache, num_tokens)

    @has_sequences
    @rule(pick=PICKS)
    def free(self, pick):
        name = self.picked(pick)
        self.cache.free(name)
        del self.seqs[name]
        self.unchanged(ValueError, self.cache.free, name)

    @has_sequences
    @rule(pick=PICKS)
    def drop_outside_window(self, pick):
        name = self.picked(pick)
        shadow = self.seqs[name]
        self.cache.drop_outside_window(name, WINDOW)
        first_seen = max(0, shadow.in_cache - (WINDOW - 1))
        shadow.num_dropped = max(shadow.num_dropped, first_seen // BLOCK_SIZE * BLOCK_SIZE)

    @rule(chance=st.integers(0, 4))
    def reset_prefix_cache(self, chance):
        if chance:  # seldom, or nothing is ever known
            return
        self.cache.pool.reset_prefix_cache()
        assert self.cache.pool.num_cached == 0

    # ---- parts ------------------------------------------------------------------------------------------------------

    def picked(self, pick):
        return sorted(self.seqs)[pick % len(self.seqs)]

    def take(self, shadow, most):
        """New tokens of a step; a sequence of unknown tokens gets as many as are asked for."""
        if not shadow.is_known:
            shadow.tokens += [0] * min(most, MAX_SEQ_LEN - len(shadow.tokens))
        return min(most, len(shadow.tokens) - shadow.in_cache)

    def try_step(self, names, counts):
        needed = self.blocks_needed(names, counts)
        if needed <= self.cache.pool.num_free:
            return self.cache.step(names, counts)
        self.unchanged(pagedkv.OutOfBlocks, self.cache.step, names, counts)
        for name in names:
            if not self.seqs[name].is_known:
                del self.seqs[name].tokens[self.seqs[name].in_cache :]
        return None

    def blocks_needed(self, names, counts):
        """New ones, and copies: of the owners of a block that is written into all but one need one."""
        needed, writers = 0, Counter()
        for name, count in zip(names, counts, strict=True):
            length = self.seqs[name].in_cache
            needed += -(-(length + count) // BLOCK_SIZE) - -(-length // BLOCK_SIZE)
            if count and length % BLOCK_SIZE:
                writers[int(self.cache.table.block_table[name, length // BLOCK_SIZE])] += 1
        owners = Counter(self.cache.table.block_table[self.cache.table.block_table >= 0].tolist())
        return needed + sum(min(count, owners[block] - 1) for block, count in writers.items())

    def write(self, batch, layers):
        tags = [
            self.seqs[name].tags[end - count : end] if name in self.seqs else np.zeros((count, HEAD_SIZE), np.uint8)
            for name, end, count in zip(
                batch.seqs.tolist(), batch.host.seq_lens, np.diff(batch.host.query_start_loc), strict=True
            )
        ]
        tags = np.concatenate([np.empty((0, HEAD_SIZE), np.uint8), *tags])
        for layer in layers:
            key, value = (self.backend.put(side.astype(self.cache.dtype)) for side in contents(tags, layer))
            self.cache.write(layer, key, value, batch)

    def attend(self, batch, names, counts, attends):
        if not attends or (self.cache.layout == "packed" and set(counts) != {1}):
            return
        dropped = any(self.seqs[name].num_dropped for name in names)
        window_size = (WINDOW - 1, 0) if dropped else (-1, -1)
        rng = np.random.default_rng(sum(counts))
        query = rng.standard_normal((sum(counts), NUM_HEADS, HEAD_SIZE)).astype(self.cache.dtype)
        options = {"scale": SCALE, "window_size": window_size, "num_splits": 1}
        out = self.backend.get(self.cache.attend(1, self.backend.put(query), batch, **options)).astype(np.float64)
        start = 0
        for name, count in zip(names, counts, strict=True):
            end = self.seqs[name].in_cache
            first_seen = WINDOW - 1 if dropped else end
            key, value = contents(self.seqs[name].tags[:end], 1)
            for position in range(end - count, end):
                seen = slice(max(0, position - first_seen), position + 1)
                expected = dense(query[start], key[seen], value[seen])
                np.testing.assert_allclose(out[start], expected, rtol=4e-3)
                start += 1

    def surely_known(self, shadow):
        """Tokens at the beginning that some sequence of known tokens still has in the cache, in whole blocks."""
        longest = 0
        for other in self.seqs.values():
            if other is shadow or not other.is_known or other.salt != shadow.salt or other.num_dropped:
                continue
            same = 0
            for mine, its in zip(shadow.tokens[:-1], other.tokens[: other.in_cache], strict=False):
                if mine != its:
                    break
                same += 1
            longest = max(longest, same // BLOCK_SIZE * BLOCK_SIZE if self.are_known(other, same) else 0)
        return longest

    def are_known(self, other, num_tokens):
        """Unless they have been unlearned, by a reset or a truncation."""
        hashes = pagedkv.PrefixHashes(other.tokens, block_size=BLOCK_SIZE, salt=other.salt or None).hashes
        return all(h in self.cache.pool._blocks for h in hashes[: num_tokens // BLOCK_SIZE])

    def unchanged(self, error, call, *arguments):
        """The call raises, and nothing is different after it."""
        before = self.state()
        try:
            call(*arguments)
        except error:
            pass
        else:
            raise AssertionError(f"{call.__name__} did not raise {error.__name__}")
        assert self.state() == before

    def state(self):
        pool, table = self.cache.pool, self.cache.table
        blank = pool._blank[: pool._num_blank].tolist()
        queue = (blank, list(pool._reusable), dict(pool._hashes), pool.ref_counts.tolist())
        return (*queue, table.block_table.tolist(), table.seq_lens.tolist(), table.rows.tolist())

    # ---- what must hold after every step ----------------------------------------------------------------------------

    @invariant()
    def every_content_is_right(self):
        self.num_steps[self.backend_name] += 1
        sides = [[self.by_token(side) for side in layer] for layer in self.cache]
        for name, shadow in self.seqs.items():
            positions = np.arange(shadow.num_dropped, shadow.in_cache)
            blocks = self.cache.table.block_table[name, positions // BLOCK_SIZE]
            self.compare(sides, blocks, positions % BLOCK_SIZE, shadow.tags[positions])
            if shadow.is_known:
                hashes = pagedkv.PrefixHashes(shadow.tokens, block_size=BLOCK_SIZE, salt=shadow.salt or None).hashes
                for i, block_hash in enumerate(hashes):
                    self.tags_by_hash[block_hash] = shadow.tags[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
        for block_id, block_hash in self.cache.pool._hashes.items():
            slots = np.arange(BLOCK_SIZE)
            self.compare(sides, np.full(BLOCK_SIZE, block_id), slots, self.tags_by_hash[block_hash])

    def by_token(self, side):
        """A cache as [num_blocks, block_size, num_kv_heads, head_size]."""
        side = self.backend.get(side)
        if self.cache.layout == "packed":
            shape = (NUM_BLOCKS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE)
            side = side.swapaxes(3, 4).reshape(shape) if side.ndim == 5 else side
            return side.transpose(0, 3, 1, 2)
        return side if self.cache.layout == "NHD" else side.swapaxes(1, 2)

    def compare(self, sides, blocks, slots, tags):
        for layer in range(NUM_LAYERS):
            for side, expected in zip(sides[layer], contents(tags, layer), strict=True):
                np.testing.assert_array_equal(side[blocks, slots], expected)

    @invariant()
    def table_and_pool_agree(self):
        pool, table = self.cache.pool, self.cache.table
        assert table.rows.tolist() == sorted(self.seqs)
        named = table.block_table[table.block_table >= 0]
        np.testing.assert_array_equal(np.bincount(named, minlength=NUM_BLOCKS), pool.ref_counts)
        for row in range(MAX_SEQS):
            shadow = self.seqs.get(row)
            first, end = (shadow.num_dropped, shadow.in_cache) if shadow else (0, 0)
            has_block = table.block_table[row] >= 0
            columns = np.arange(has_block.size) * BLOCK_SIZE
            np.testing.assert_array_equal(has_block, (columns >= first) & (columns < end))
            assert table.seq_lens[row] == end
        free = [*pool._blank[: pool._num_blank].tolist(), *pool._reusable]
        assert sorted(free) == np.flatnonzero(pool.ref_counts == 0).tolist()
        assert pool.num_free == len(free) == NUM_BLOCKS - pool.num_used
        assert set(pool._reusable) == {block for block in pool._hashes if pool.ref_counts[block] == 0}
        assert {h: b for b, h in pool._hashes.items()} == pool._blocks
        assert np.flatnonzero(pool._is_known).tolist() == sorted(pool._hashes)


def dense(query, key, value):
    """Of one query [NUM_HEADS, HEAD_SIZE] over keys and values of numbers that are exact."""
    out = np.empty(query.shape)
    for head in range(NUM_HEADS):
        kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
        scores = key[:, kv_head] @ query[head].astype(np.float64) * SCALE
        weights = np.exp(scores - scores.max())
        out[head] = weights @ value[:, kv_head] / weights.sum()
    return out
