"""Random histories of pool and table beside plain lists: order of blocks, and calls that a cache does not make."""

import numpy as np
import pytest
from test_block_pool import state as pool_state
from test_block_table import BLOCK_SIZE, make, state

from pagedkv import BlockPool, OutOfBlocks


class PlainPool:
    """What BlockPool promises, in lists: owners, a stack of blank blocks, a queue of free known ones."""

    def __init__(self, num_blocks):
        self.owners, self.known = [0] * num_blocks, {}
        self.blank, self.queue = list(range(num_blocks))[::-1], []

    def allocate(self, count):
        taken = []
        for _ in range(count):
            block = self.blank.pop() if self.blank else self.queue.pop(0)
            self.known.pop(block, None)
            self.owners[block] = 1
            taken.append(block)
        return taken

    def free(self, blocks):
        for block in blocks:
            self.owners[block] -= 1
        for block in reversed(list(dict.fromkeys(blocks))):
            if self.owners[block] == 0:
                (self.queue if block in self.known else self.blank).append(block)

    def touch(self, blocks):
        for block in blocks:
            self.owners[block] += 1
            if block in self.queue:
                self.queue.remove(block)

    def register(self, blocks, hashes):
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block not in self.known and block_hash not in self.known.values():
                self.known[block] = block_hash

    def forget(self, blocks):
        for block in blocks:
            self.known.pop(block, None)
            if block in self.queue:
                self.queue.remove(block)
                self.blank.append(block)

    def reset_prefix_cache(self):
        self.blank += self.queue[::-1]
        self.known, self.queue = {}, []


def random_pool_call(rng, plain, num_free):
    """The name of a method and its arguments, such that it succeeds."""
    num_blocks = len(plain.owners)
    owned = [block for block, owners in enumerate(plain.owners) for _ in range(owners)]
    some = rng.permutation(owned)[: rng.integers(0, len(owned) + 1)].astype(int).tolist()
    alive = [block for block in range(num_blocks) if plain.owners[block] or block in plain.known]
    any_of = rng.permutation(alive * 2)[: rng.integers(0, 2 * len(alive) + 1)].astype(int).tolist()
    hashes = [bytes([number]) for number in rng.integers(0, 2 * num_blocks, len(some))]
    calls = [
        ("allocate", (int(rng.integers(0, num_free + 1)),)),
        ("free", (some,)),
        ("touch", (any_of,)),
        ("register", (some, hashes)),
        ("forget", (any_of[:2],)),
        ("reset_prefix_cache", ()),
    ]
    return calls[rng.choice(6, p=[0.3, 0.3, 0.15, 0.15, 0.08, 0.02])]


@pytest.mark.parametrize("seed", range(6))
def test_pools_beside_lists(seed):
    """Blocks come in the very order of plain lists, also when the queue has gone round many times."""
    rng = np.random.default_rng(seed)
    num_blocks = int(rng.integers(1, 12))
    pool, plain = BlockPool(num_blocks), PlainPool(num_blocks)
    for _ in range(600):
        name, arguments = random_pool_call(rng, plain, pool.num_free)
        result, expected = (getattr(one, name)(*arguments) for one in (pool, plain))
        assert (None if result is None else result.tolist()) == expected
        blank, queue, known, ref_counts, num_free = pool_state(pool)
        assert (blank, queue, known, ref_counts) == (plain.blank, plain.queue, plain.known, plain.owners)
        assert num_free == len(blank) + len(queue)
        shared = [b for b, owners in enumerate(plain.owners) if owners > 1 and b not in plain.known]
        assert pool.has_writable_shared == bool(shared)
        by_hash = {block_hash: block for block, block_hash in plain.known.items()}
        hits = pool.longest_prefix([*by_hash, b"unknown"])
        assert hits.tolist() == list(by_hash.values())


class PlainTable:
    """Of each row its length, the blocks dropped before its window, its least length, and all its blocks."""

    def __init__(self, rng):
        self.rng, self.rows = rng, {}
        self.table = make(num_blocks=14, max_seqs=4, max_blocks=6)

    def picked(self, count=1):
        return [int(row) for row in self.rng.permutation(sorted(self.rows))[:count]]

    def add(self):
        if len(self.rows) < 4:
            self.rows[self.table.add()] = [0, 0, 0, 0]

    def fork(self):
        if len(self.rows) < 4:
            (row,) = self.picked()
            length, dropped, least, _ = self.rows[row]
            self.rows[self.table.fork(row)] = [length, dropped, least, -(-length // BLOCK_SIZE)]

    def step(self):
        some = self.picked(int(self.rng.integers(1, 5)))
        counts = self.rng.integers(0, 5, len(some)).tolist()
        before = {row: self.table.blocks(row).tolist() for row in self.rows}
        copies = self.table.step(some, counts).copies.tolist()
        for row, count in zip(some, counts, strict=True):
            length, now, then = self.rows[row][0], self.table.blocks(row).tolist(), before[row]
            column = length // BLOCK_SIZE
            if count and length % BLOCK_SIZE:
                assert self.table.pool.ref_counts[now[column]] == 1
                if now[column] != then[column]:
                    assert [then[column], now[column]] in copies
                then[column] = now[column]
            assert now[: len(then)] == then
            self.rows[row][0] += count
            self.rows[row][3] = max(self.rows[row][3], -(-self.rows[row][0] // BLOCK_SIZE))

    def reserve(self):
        (row,), count = self.picked(), int(self.rng.integers(0, 9))
        self.table.reserve([row], count)
        self.rows[row][3] = max(self.rows[row][3], -(-(self.rows[row][0] + count) // BLOCK_SIZE))

    def truncate(self):
        (row,) = self.picked()
        length = int(self.rng.integers(self.rows[row][2], self.rows[row][0] + 1))
        self.table.truncate(row, length)
        self.rows[row][0], self.rows[row][3] = length, -(-length // BLOCK_SIZE)

    def drop_outside_window(self):
        (row,), window = self.picked(), int(self.rng.integers(1, 12))
        end = max(0, self.rows[row][0] - window + 1) // BLOCK_SIZE
        assert self.table.drop_outside_window(row, window) == max(0, end - self.rows[row][1])
        if end > self.rows[row][1]:
            self.rows[row][1:3] = end, end * BLOCK_SIZE + window - 1

    def free(self):
        some = self.picked(int(self.rng.integers(1, 3)))
        self.table.free(some)
        for row in some:
            del self.rows[row]

    def move(self):
        if len(self.rows) < 4:
            (row,), to = self.picked(), int(self.rng.choice(sorted(set(range(4)) - set(self.rows))))
            self.table.move(row, to)
            self.rows[to] = self.rows.pop(row)

    def swap(self):
        row, other = self.picked()[0], self.picked()[0]
        self.table.swap(row, other)
        self.rows[row], self.rows[other] = self.rows[other], self.rows[row]

    def check(self):
        table = self.table
        assert table.rows.tolist() == sorted(self.rows)
        for row in range(4):
            length, dropped, least, num_blocks = self.rows.get(row, (0, 0, 0, 0))
            columns = np.arange(6)
            np.testing.assert_array_equal(table.block_table[row] >= 0, (columns >= dropped) & (columns < num_blocks))
            assert table.seq_lens[row] == length
            if row in self.rows:
                assert table.tokens_dropped(row).tolist() == [dropped * BLOCK_SIZE]
            if least:
                before = state(table)
                with pytest.raises(ValueError, match=f"num_tokens: expected from {least} to {length}"):
                    table.truncate(row, least - 1)
                assert state(table) == before
        named = table.block_table[table.block_table >= 0]
        np.testing.assert_array_equal(np.bincount(named, minlength=14), table.pool.ref_counts)
        free = sorted(set(range(4)) - set(self.rows))
        assert (sorted(table._free_rows), table._free_rows[:1]) == (free, free[:1])


CALLS = ["add", "fork", "step", "step", "reserve", "truncate", "drop_outside_window", "free", "move", "swap"]


@pytest.mark.parametrize("seed", range(6))
def test_tables_beside_lists(seed):
    """All calls, reserved blocks and moved rows included; every block is named as often as it is owned."""
    rng = np.random.default_rng(seed)
    plain = PlainTable(rng)
    for _ in range(500):
        name = CALLS[rng.integers(0, len(CALLS))] if plain.rows else "add"
        before = state(plain.table)
        try:
            getattr(plain, name)()
        except OutOfBlocks:
            assert state(plain.table) == before
        except ValueError as error:
            assert "what a row holds" in str(error)
            assert state(plain.table) == before
        plain.check()
