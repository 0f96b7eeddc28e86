"""BlockTable: rows of block ids, what a step has to know of them, and that a call that fails changes nothing."""

import numpy as np
import pytest

from pagedkv import BlockPool, BlockTable, OutOfBlocks, block_table_to_csr, csr_to_block_table

BLOCK_SIZE = 4


def make(num_blocks=20, max_seqs=4, max_blocks=6):
    return BlockTable(max_seqs, max_blocks, BLOCK_SIZE, BlockPool(num_blocks))


def state(table):
    pool = table.pool
    free = (pool._blank[: pool._num_blank].tolist(), list(pool._reusable), pool.ref_counts.tolist())
    return (*free, table.block_table.tolist(), table.seq_lens.tolist(), table.rows.tolist(), sorted(table._free_rows))


def table_with(*lengths, **sizes):
    table = make(**sizes)
    rows = [table.add() for _ in lengths]
    table.append(rows, list(lengths))
    return table


def assert_step(step, table, rows, counts):
    """What a loop over sequences and tokens makes of the table as it is after the step."""
    slots, positions, starts = [], [], [0]
    for row, count in zip(rows, counts, strict=True):
        end = int(table.seq_lens[row])
        for position in range(end - count, end):
            slots.append(int(table.block_table[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE)
            positions.append(position)
        starts.append(len(slots))
    lens = table.seq_lens[list(rows)].tolist()
    width = max((-(-length // BLOCK_SIZE) for length in lens), default=0)
    assert (step.num_tokens, step.num_seqs) == (len(slots), len(lens))
    assert step.max_query_len == max(counts, default=0)
    assert step.max_seq_len == max(lens, default=0)
    pad_tokens, pad_seqs = len(step.slot_mapping) - len(slots), len(step.seq_lens) - len(lens)
    assert step.slot_mapping.tolist() == slots + [-1] * pad_tokens
    assert step.positions.tolist() == positions + [0] * pad_tokens
    assert step.query_start_loc.tolist() == starts + [len(slots)] * pad_seqs
    assert step.seq_lens.tolist() == lens + [0] * pad_seqs
    np.testing.assert_array_equal(step.block_table[: len(lens), :width], table.block_table[list(rows), :width])
    assert (step.block_table[len(lens) :] == -1).all()
    kinds = (step.slot_mapping, step.positions, step.query_start_loc, step.seq_lens, step.block_table)
    assert [array.dtype.name for array in kinds] == ["int64", "int64", "int32", "int32", "int32"]


# ---- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0, 1], [1, 2], [2], []], ids=str)
@pytest.mark.parametrize("counts", [1, 0, 5, "ragged"])
def test_a_step(rows, counts):
    table = table_with(7, 8, 1)
    counts = [3, 0, 9][: len(rows)] if counts == "ragged" else [counts] * len(rows)
    assert_step(table.step(rows, counts), table, rows, counts)
    step = table.step(rows, 1)
    assert_step(step, table, rows, [1] * len(rows))


def test_many_random_steps():
    rng = np.random.default_rng(0)
    table = make(num_blocks=900, max_seqs=30, max_blocks=30)
    rows = [table.add() for _ in range(30)]
    for _ in range(40):
        some = rng.permutation(rows)[: rng.integers(0, 31)].tolist()
        counts = rng.integers(0, 4, len(some)).tolist()
        assert_step(table.step(some, counts), table, some, counts)
    assert sorted(table.block_table[table.block_table >= 0].tolist()) == np.flatnonzero(table.pool.ref_counts).tolist()


def test_padding_to_the_sizes_of_a_graph():
    table = table_with(7, 3)
    step = table.step([1, 0], [1, 2], pad_seqs=4, pad_tokens=6)
    assert_step(step, table, [1, 0], [1, 2])
    assert (step.slot_mapping.size, step.seq_lens.size, step.query_start_loc.size) == (6, 4, 5)
    assert step.block_table.shape == (4, 3)


@pytest.mark.parametrize(("sizes", "name"), [({"pad_seqs": 1}, "pad_seqs"), ({"pad_tokens": 3}, "pad_tokens")])
def test_padding_that_is_too_small(sizes, name):
    table = table_with(7, 3)
    before = state(table)
    with pytest.raises(ValueError, match=f"{name}: expected at least"):
        table.step([0, 1], 2, **sizes)
    assert state(table) == before


def test_a_step_of_adjoining_rows_shares_the_table():
    table = table_with(7, 3, 9)
    assert np.shares_memory(table.step([1, 2], 1).block_table, table.block_table)
    assert not np.shares_memory(table.step([2, 1], 1).block_table, table.block_table)
    with pytest.raises(ValueError, match="read-only"):
        table.step([1, 2], 1).block_table[0, 0] = 0


def test_blocks_are_taken_as_tokens_need_them():
    table = make()
    row = table.add()
    for length in range(1, 10):
        table.append([row], 1)
        assert table.blocks(row).size == -(-length // BLOCK_SIZE)
        assert table.pool.num_used == -(-length // BLOCK_SIZE)


def test_reserved_blocks_are_used_first():
    table = table_with(3)
    table.reserve([0], 6)
    reserved = table.blocks(0).tolist()
    assert len(reserved) == 3
    assert table.seq_lens[0] == 3
    table.append([0], 6)
    assert table.blocks(0).tolist() == reserved
    child = table.fork(0)
    table.reserve([0], 8)
    assert table.blocks(child).tolist() == reserved


# ---- sharing --------------------------------------------------------------------------------------------------------


def test_a_fork_shares_blocks_until_one_writes():
    table = table_with(6)
    child = table.fork(0)
    assert table.blocks(child).tolist() == table.blocks(0).tolist() == [0, 1]
    assert table.pool.ref_counts[:3].tolist() == [2, 2, 0]
    copies = table.append([child], 1)
    assert copies.tolist() == [[1, 2]]
    assert (table.blocks(0).tolist(), table.blocks(child).tolist()) == ([0, 1], [0, 2])
    assert table.pool.ref_counts[:4].tolist() == [2, 1, 1, 0]
    assert table.append([0], 1).tolist() == []


def test_a_fork_at_the_end_of_a_block_copies_nothing():
    table = table_with(8)
    child = table.fork(0)
    assert table.append([0, child], 1).tolist() == []
    assert table.blocks(0).tolist()[:2] == table.blocks(child).tolist()[:2]
    assert table.blocks(0)[2] != table.blocks(child)[2]


@pytest.mark.parametrize(("writers", "num_copies"), [([0], 1), ([0, 1], 2), ([2, 0, 1], 2)], ids=str)
def test_the_last_owner_of_a_block_may_write_into_it(writers, num_copies):
    table = table_with(6)
    table.fork(0), table.fork(0)
    copies = table.append(writers, 1)
    assert copies[:, 0].tolist() == [1] * num_copies
    assert len({int(table.blocks(row)[1]) for row in range(3)}) == min(3, len(writers) + 1)
    assert table.pool.ref_counts[1] == 3 - num_copies


def test_any_other_owner_makes_a_copy():
    """Also one that is no row."""
    table = table_with(6)
    table.pool.touch(1)
    assert table.append([0], 1).tolist() == [[1, 2]]
    table.pool.free(1)
    assert table.append([0], 1).tolist() == []


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_shared_block_that_is_known_no_more(is_reset):
    """Full, shared and known; then cut short, when both write into it."""
    table = table_with(8)
    table.pool.register([0, 1], [b"first", b"second"])
    other = table.add([0, 1])
    if is_reset:
        table.pool.reset_prefix_cache()
    table.truncate(other, 6)
    assert table.append([other], 1).tolist() == [[1, 2]]
    table.truncate(other, 0)
    table.truncate(0, 6)
    assert table.append([0], 1).tolist() == []


def test_no_tokens_copy_nothing():
    table = table_with(6)
    child = table.fork(0)
    assert table.append([child], 0).tolist() == []
    assert table.blocks(child).tolist() == [0, 1]


def test_a_prefix_is_shared():
    table = table_with(8)
    row = table.add(table.blocks(0))
    assert table.seq_lens[row] == 8
    assert table.pool.ref_counts[:2].tolist() == [2, 2]
    assert table.append([row], 1).tolist() == []


# ---- taking back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (10, 3), (11, 3)])
def test_truncation(num_tokens, num_blocks):
    table = table_with(11)
    table.truncate(0, num_tokens)
    assert table.blocks(0).tolist() == list(range(num_blocks))
    assert table.pool.num_used == num_blocks
    assert table.seq_lens[0] == num_tokens
    assert (table.block_table[0, num_blocks:] == -1).all()


def test_truncation_takes_back_what_was_reserved():
    table = table_with(3)
    table.reserve([0], 6)
    table.truncate(0, 3)
    assert table.blocks(0).tolist() == [0]
    assert table.pool.num_used == 1


def test_a_truncated_block_is_no_longer_known():
    """Its end is written anew, and others must not find what was there."""
    table = table_with(8)
    table.pool.register([0, 1], [b"first", b"second"])
    table.truncate(0, 8)
    assert table.pool.longest_prefix([b"first", b"second"]).tolist() == [0, 1]
    table.truncate(0, 7)
    assert table.pool.longest_prefix([b"first", b"second"]).tolist() == [0]
    table.truncate(0, 4)
    assert table.pool.longest_prefix([b"first"]).tolist() == [0]


@pytest.mark.parametrize("num_tokens", [-1, 12])
def test_truncation_to_what_there_is_not(num_tokens):
    table = table_with(11)
    before = state(table)
    with pytest.raises(ValueError, match="num_tokens"):
        table.truncate(0, num_tokens)
    assert state(table) == before


def test_row_reuse():
    """A long row freed, a short one placed there: no old id is readable."""
    table = table_with(24)
    table.free(0)
    assert (table.block_table == -1).all()
    row = table.add()
    step = table.step([row], 2, pad_seqs=2, pad_tokens=3)
    assert row == 0
    assert (table.block_table[0, 1:] == -1).all()
    assert step.slot_mapping[2] == -1
    assert (step.block_table[:, 1:] == -1).all()


def test_freed_rows_are_filled_from_the_top():
    table = table_with(1, 1, 1, 1)
    table.free([2, 0])
    assert (table.rows.tolist(), table.num_free_rows, len(table)) == ([1, 3], 2, 2)
    assert [table.add(), table.add()] == [0, 2]


@pytest.mark.parametrize(
    ("length", "window_size", "dropped"),
    [(11, 4, 2), (11, 5, 1), (11, 8, 1), (11, 9, 0), (11, 1, 2), (12, 1, 3), (11, 100, 0), (0, 3, 0)],
)
def test_blocks_before_the_window_are_given_back(length, window_size, dropped):
    """The next token stands at `length` and sees `window_size` tokens, itself included."""
    table = table_with(length)
    held = table.blocks(0).tolist()
    assert table.drop_outside_window(0, window_size) == dropped
    assert table.blocks(0).tolist() == [-1] * dropped + held[dropped:]
    assert table.pool.num_used == len(held) - dropped
    assert table.drop_outside_window(0, window_size) == 0
    first_seen = length - (window_size - 1)
    assert dropped * BLOCK_SIZE <= max(0, first_seen) < dropped * BLOCK_SIZE + BLOCK_SIZE


def test_what_a_window_still_needs_is_not_taken_back():
    table = table_with(11)
    table.drop_outside_window(0, 5)  # tokens 0 to 3 are gone: from 8 on a token sees none of them
    with pytest.raises(ValueError, match="num_tokens: expected from 8 to 11, got 7"):
        table.truncate(0, 7)
    table.truncate(0, 8)
    child = table.fork(0)
    with pytest.raises(ValueError, match="num_tokens: expected from 8 to 8"):
        table.truncate(child, 7)
    table.append([0, child], 3)
    table.free([0, child])
    assert table.pool.num_used == 0


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_moves_and_swaps_of_rows():
    table = table_with(9, 3)
    first, second = table.blocks(0).tolist(), table.blocks(1).tolist()
    table.drop_outside_window(0, 2)
    table.swap(0, 1)
    assert (table.blocks(0).tolist(), table.blocks(1).tolist()) == (second, [-1, -1, first[2]])
    assert table.seq_lens.tolist() == [3, 9, 0, 0]
    table.move(1, 3)
    assert (table.rows.tolist(), table.seq_lens.tolist()) == ([0, 3], [3, 0, 0, 9])
    assert (table.block_table[1] == -1).all()
    assert table.add() == 1
    with pytest.raises(ValueError, match="num_tokens"):
        table.truncate(3, 5)
    table.free(3)
    assert [table.add(), table.add()] == [2, 3]


def test_a_move_onto_a_sequence():
    table = table_with(9, 3)
    before = state(table)
    with pytest.raises(ValueError, match="to: expected a row without a sequence, got row 1"):
        table.move(0, 1)
    assert state(table) == before


# ---- errors ---------------------------------------------------------------------------------------------------------

WRONG_ROWS = [([4], IndexError), ([-1], IndexError), ([2], ValueError), ([0, 0], ValueError), ([0.0], TypeError)]


@pytest.mark.parametrize(("rows", "error"), WRONG_ROWS, ids=str)
@pytest.mark.parametrize("method", ["append", "step", "reserve", "free", "drop_outside_window", "csr"])
def test_rows_that_are_none(method, rows, error):
    table = table_with(3, 5)
    before = state(table)
    arguments = {"free": (), "csr": ()}.get(method, (1,))
    with pytest.raises(error, match="rows: expected"):
        getattr(table, method)(rows, *arguments)
    assert state(table) == before


@pytest.mark.parametrize(
    ("counts", "error"), [(-1, ValueError), ([1, -1], ValueError), ([1], ValueError), (1.0, TypeError)], ids=str
)
def test_counts_that_are_none(counts, error):
    table = table_with(3, 5)
    before = state(table)
    with pytest.raises(error, match="num_new"):
        table.step([0, 1], counts)
    assert state(table) == before


def test_a_sequence_that_outgrows_its_row():
    table = table_with(23, 1)
    before = state(table)
    for method in (table.step, table.append, table.reserve):
        with pytest.raises(ValueError, match="num_new: expected at most 24 tokens, what a row holds, got 25"):
            method([1, 0], 2)
    assert state(table) == before


def test_a_pool_that_has_too_few_blocks_for_one_of_them():
    """Neither those that would fit nor copies are made."""
    table = table_with(6, 4, num_blocks=6)
    table.fork(0)
    before = state(table)
    for method in (table.step, table.append):
        with pytest.raises(OutOfBlocks):
            method([0, 1, 2], [3, 5, 1])  # two new blocks, two more, and one copy
    with pytest.raises(OutOfBlocks):
        table.reserve([0, 1], 8)
    assert state(table) == before


def test_no_free_row():
    table = table_with(1, 1, max_seqs=2)
    before = state(table)
    for add in (table.add, lambda: table.fork(0)):
        with pytest.raises(ValueError, match="max_seqs: expected a free row of 2, got none"):
            add()
    assert state(table) == before


@pytest.mark.parametrize(("prefix", "error"), [([0], ValueError), ([20], IndexError), ([0] * 7, ValueError)], ids=str)
def test_a_prefix_of_blocks_that_hold_nothing(prefix, error):
    table = make()
    before = state(table)
    with pytest.raises(error):
        table.add(prefix)
    assert state(table) == before


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (None, 1, 1), (1.0, 1, 1)], ids=str)
def test_sizes_that_are_none(sizes):
    with pytest.raises((ValueError, TypeError), match=r"max_seqs|max_blocks|block_size"):
        BlockTable(*sizes, BlockPool(1))


def test_views_are_not_to_be_written():
    table = table_with(5)
    for array in (table.block_table, table.seq_lens):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_repr_tells_rows_and_tokens():
    assert repr(table_with(5, 7)) == "<BlockTable: 2 of 4 rows used, 12 tokens>"


# ---- CSR ------------------------------------------------------------------------------------------------------------


def test_csr_out_and_in():
    table = table_with(6, 0, 8, 1)
    indptr, indices, last_page_len = table.csr([2, 1, 0, 3])
    assert indptr.tolist() == [0, 2, 2, 4, 5]
    assert indices.tolist() == [2, 3, 0, 1, 4]
    assert last_page_len.tolist() == [4, 0, 2, 1]
    assert {array.dtype.name for array in (indptr, indices, last_page_len)} == {"int32"}
    block_table, seq_lens = csr_to_block_table(indptr, indices, last_page_len, BLOCK_SIZE)
    assert block_table.tolist() == [[2, 3], [-1, -1], [0, 1], [4, -1]]
    assert seq_lens.tolist() == [8, 0, 6, 1]
    wide, _ = csr_to_block_table(indptr, indices, last_page_len, BLOCK_SIZE, max_blocks=3)
    assert wide.tolist() == [[2, 3, -1], [-1, -1, -1], [0, 1, -1], [4, -1, -1]]


def test_csr_of_a_table_with_garbage_behind_the_lengths():
    table = np.array([[5, 7, 1 << 30], [9, -3, -3]], np.int64)
    indptr, indices, last_page_len = block_table_to_csr(table, np.array([8, 3]), BLOCK_SIZE)
    assert (indptr.tolist(), indices.tolist(), last_page_len.tolist()) == ([0, 2, 3], [5, 7, 9], [4, 3])


def test_csr_of_no_sequences():
    arrays = block_table_to_csr(np.empty((0, 3), np.int32), np.empty(0, np.int32), BLOCK_SIZE)
    assert [array.tolist() for array in arrays] == [[0], [], []]
    table, lens = csr_to_block_table(*arrays, BLOCK_SIZE)
    assert (table.shape, lens.shape) == ((0, 0), (0,))


@pytest.mark.parametrize(
    ("table", "lens", "name"),
    [
        ([[0, 1]], [9], "seq_lens"),
        ([[0, 1]], [-1], "seq_lens"),
        ([[0, 1]], [1, 2], "seq_lens"),
        ([0], [1], "block_table"),
    ],
    ids=str,
)
def test_tables_that_are_no_csr(table, lens, name):
    with pytest.raises(ValueError, match=f"{name}: expected"):
        block_table_to_csr(np.array(table), np.array(lens), BLOCK_SIZE)


@pytest.mark.parametrize(
    ("indptr", "indices", "last", "name"),
    [
        ([1, 2], [0, 1], [1], "indptr"),
        ([0, 2, 1], [0, 1], [1, 1], "indptr"),
        ([0, 3], [0, 1], [1], "indptr"),
        ([], [], [], "indptr"),
        ([0, 1], [0], [1, 1], "last_page_len"),
        ([0, 1], [0], [0], "last_page_len"),
        ([0, 1], [0], [5], "last_page_len"),
    ],
    ids=str,
)
def test_csr_arrays_that_do_not_belong_together(indptr, indices, last, name):
    with pytest.raises(ValueError, match=f"{name}: expected"):
        csr_to_block_table(np.array(indptr, int), np.array(indices, int), np.array(last, int), BLOCK_SIZE)


def test_a_csr_row_that_is_too_long_for_the_table():
    with pytest.raises(ValueError, match="max_blocks: expected at least 2, got 1"):
        csr_to_block_table([0, 2], [0, 1], [1], BLOCK_SIZE, max_blocks=1)


# ---- more of the same: found by faults ------------------------------------------------------------------------------


def test_a_prefix_as_long_as_a_row():
    table = table_with(24)
    row = table.add(table.blocks(0))
    assert table.seq_lens[row] == 24


def test_reserved_blocks_are_not_forked():
    table = table_with(3)
    table.reserve([0], 6)
    child = table.fork(0)
    assert table.blocks(child).tolist() == table.blocks(0).tolist()[:1]
    assert table.pool.ref_counts[:4].tolist() == [2, 1, 1, 0]


def test_a_swap_of_a_short_row_with_a_long_one():
    table = table_with(3, 20)
    short, long = table.blocks(0).tolist(), table.blocks(1).tolist()
    table.swap(0, 1)
    assert (table.blocks(0).tolist(), table.blocks(1).tolist()) == (long, short)
    assert (table.block_table[1, 1:] == -1).all()


def test_freed_rows_are_filled_from_the_top_after_moves():
    table = table_with(*[1] * 6, max_seqs=6)
    table.free([0, 2, 3, 4])
    table.move(5, 0)
    assert [table.add() for _ in range(4)] == [2, 3, 4, 5]


def test_a_step_where_some_take_one_token_and_others_none():
    table = table_with(7, 8, 1)
    assert_step(table.step([0, 1, 2], [1, 0, 1]), table, [0, 1, 2], [1, 0, 1])


def test_more_repeats_than_there_are_rows():
    table = table_with(3, 5)
    before = state(table)
    with pytest.raises(ValueError, match="rows: expected each once, got 0 twice"):
        table.append([0] * 5, 1)
    assert state(table) == before


def test_a_row_forgets_what_its_last_sequence_was():
    """Reserved blocks come back too; windows do not stay."""
    table = table_with(24)
    table.drop_outside_window(0, 3)
    table.free(0)
    row = table.add()
    table.append([row], 20)
    table.reserve([row], 4)
    assert table.drop_outside_window(row, 5) == 4
    table.truncate(row, 20)
    table.reserve([row], 4)
    table.free(row)
    assert table.pool.num_used == 0
    assert (table.block_table == -1).all()
    table.append([table.add()], 9)
    table.truncate(0, 1)
    assert table.pool.num_used == 1


def test_csr_of_a_full_row_and_of_indices_with_more_behind():
    arrays = block_table_to_csr(np.array([[5, 7]]), np.array([8]), BLOCK_SIZE)
    assert [array.tolist() for array in arrays] == [[0, 2], [5, 7], [4]]
    table, lens = csr_to_block_table([0, 2], [5, 7, -1, 9], [4], BLOCK_SIZE)
    assert (table.tolist(), lens.tolist()) == ([[5, 7]], [8])


@pytest.mark.parametrize("count", [2**63 - 1, 2**40])
def test_counts_that_would_wrap(count):
    table = table_with(5)
    before = state(table)
    for method in (table.append, table.step, table.reserve):
        with pytest.raises(ValueError, match="num_new: expected at most 24 tokens, what a row holds"):
            method([0], count)
    for count in (2**63, np.array([2**63], np.uint64)):
        with pytest.raises(TypeError, match="num_new: expected signed integers"):
            table.append([0], count)
    assert state(table) == before


@pytest.mark.parametrize("shared", [True, False])
def test_a_copy_that_fails(shared):
    """Nothing has changed, and the next call copies."""
    table = table_with(6, 4)
    if shared:
        table.fork(0)
    before, asked = state(table), []

    def copy(copies):
        asked.append(copies.tolist())
        raise MemoryError("no room")

    if shared:
        for method in (table.append, table.step):
            with pytest.raises(MemoryError, match="no room"):
                method([0, 1], [3, 1], copy=copy)
            assert state(table) == before
        assert asked == [[[1, 3]], [[1, 3]]]
    assert table.append([0, 1], [3, 1], copy=asked.append).tolist() == ([[1, 3]] if shared else [])
    assert len(asked) == (3 if shared else 0)


@pytest.mark.parametrize("sizes", [{"pad_seqs": 5}, {"pad_tokens": 81}], ids=str)
def test_padding_past_all_that_there_is(sizes):
    table = table_with(3)
    before = state(table)
    with pytest.raises(ValueError, match=f"{next(iter(sizes))}: expected at most"):
        table.step([0], 1, **sizes)
    assert state(table) == before


@pytest.mark.parametrize("prefix", [[0.7], [True], [2**40], ["a"]], ids=str)
def test_prefixes_that_are_no_blocks(prefix):
    table = table_with(8)
    before = state(table)
    with pytest.raises((TypeError, IndexError), match="block_ids: expected"):
        table.add(prefix)
    assert state(table) == before


@pytest.mark.parametrize("to", [4, -1, 1.0, [2]], ids=str)
def test_moves_to_what_is_no_row(to):
    table = table_with(3)
    before = state(table)
    with pytest.raises((ValueError, TypeError), match="to: expected"):
        table.move(0, to)
    assert state(table) == before


def test_rows_of_more_tokens_than_int32_holds():
    with pytest.raises(ValueError, match="max_blocks: expected rows of at most 2147483647 tokens"):
        BlockTable(2, 4, 2**30, BlockPool(4))


def test_many_rows_at_once():
    table = table_with(9, 5, 7, 2)
    table.drop_outside_window([0, 2], 2)
    child_blocks = table.pool.num_used
    assert child_blocks == 3 + 2 + 2 + 1 - 2 - 1
    table.free([3, 0, 2])
    assert (table.rows.tolist(), table.pool.num_used) == ([1], 2)
    assert (table.block_table[[0, 2, 3]] == -1).all()
    assert [table.add() for _ in range(3)] == [0, 2, 3]


@pytest.mark.parametrize(
    ("table", "lens", "block_size", "error"),
    [
        ([[0.0]], [1], 4, TypeError),
        ([[True]], [1], 4, TypeError),
        ([[0]], [1.0], 4, TypeError),
        ([[2**40]], [1], 4, ValueError),
        ([[-1]], [1], 4, ValueError),
        ([[0]], [1], 2.5, TypeError),
        ([[0]], [1], 0, ValueError),
    ],
    ids=str,
)
def test_tables_of_other_kinds(table, lens, block_size, error):
    with pytest.raises(error, match=r"(block_table|seq_lens|block_size): expected"):
        block_table_to_csr(np.array(table), np.array(lens), block_size)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"indptr": np.array([0.0, 1.0])}, TypeError),
        ({"indptr": np.array([0, 2, 1], np.uint64)}, TypeError),
        ({"indices": np.array([[0]])}, TypeError),
        ({"indices": np.array([2**40])}, ValueError),
        ({"indices": np.array([-1])}, ValueError),
        ({"last_page_len": np.array([True])}, TypeError),
        ({"block_size": 4.5}, TypeError),
        ({"indptr": np.array([0, 2]), "indices": np.array([0, 1]), "block_size": 2**31 - 1}, ValueError),
    ],
    ids=str,
)
def test_csr_arrays_of_other_kinds(change, error):
    given = {"indptr": np.array([0, 1]), "indices": np.array([0]), "last_page_len": np.array([1]), "block_size": 4}
    with pytest.raises(error, match=r"(indptr|indices|last_page_len|block_size): expected"):
        csr_to_block_table(**given | change)


def test_a_pool_that_is_none():
    with pytest.raises(TypeError, match="pool: expected a BlockPool, got int"):
        BlockTable(4, 8, 4, 8)
