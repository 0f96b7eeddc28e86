"""BlockPool and PrefixHashes: who owns a block, which is reused next, and what is known to be in it."""

import numpy as np
import pytest

from pagedkv import BlockPool, OutOfBlocks, PrefixHashes


def state(pool):
    blank = pool._blank[: pool._num_blank].tolist()
    return blank, list(pool._reusable), dict(pool._hashes), pool.ref_counts.tolist(), pool.num_free


def prefix(*tokens, **keys):
    return PrefixHashes(tokens, block_size=2, **keys)


def pool_that_knows(num_blocks, *prefixes):
    """Every prefix in blocks of its own, all of them free: the blocks, in order."""
    pool = BlockPool(num_blocks)
    blocks = [pool.allocate(len(known.hashes)) for known in prefixes]
    for block_ids, known in zip(blocks, prefixes, strict=True):
        pool.register(block_ids, known.hashes)
        pool.free(block_ids)
    return pool, blocks


# ---- owners ---------------------------------------------------------------------------------------------------------


def test_blocks_come_in_order_once_each():
    pool = BlockPool(5)
    assert pool.allocate() == 0
    assert pool.allocate(3).tolist() == [1, 2, 3]
    assert (pool.num_free, pool.num_used, pool.usage, len(pool)) == (1, 4, 0.8, 5)
    assert pool.ref_counts.tolist() == [1, 1, 1, 1, 0]
    assert pool.allocate(0).tolist() == []
    assert pool.allocate(1).dtype == np.int32


def test_an_order_of_ones_own():
    pool = BlockPool(4, order=[2, 0, 3, 1])
    assert pool.allocate(4).tolist() == [2, 0, 3, 1]
    for order in ([0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4]):
        with pytest.raises(ValueError, match="order: expected each number below 4 once"):
            BlockPool(4, order=order)


def test_a_pool_of_no_blocks():
    pool = BlockPool(0)
    assert (pool.num_free, pool.usage) == (0, 0.0)
    with pytest.raises(OutOfBlocks):
        pool.allocate()


@pytest.mark.parametrize("ref_count", [1, 2])
def test_double_free_free_of_a_shared_block_free_of_a_list_with_a_repeat(ref_count):
    pool = BlockPool(3)
    block = pool.allocate()
    for _ in range(ref_count - 1):
        pool.touch(block)
    before = state(pool)
    with pytest.raises(ValueError, match=rf"block_ids: expected block 0 at most {ref_count} times, .*{ref_count + 1}"):
        pool.free([block] * (ref_count + 1))
    assert state(pool) == before
    pool.free([block] * ref_count)
    assert (pool.num_free, pool.ref_counts.tolist()) == (3, [0, 0, 0])
    before = state(pool)
    with pytest.raises(ValueError, match="block_ids"):
        pool.free(block)
    assert state(pool) == before
    assert sorted(pool.allocate(3).tolist()) == [0, 1, 2]


def test_a_shared_block_is_free_after_its_last_owner():
    pool = BlockPool(2)
    shared, own = pool.allocate(2).tolist()
    pool.touch([shared])
    pool.free([shared, own])
    assert (pool.num_free, pool.ref_counts.tolist()) == (1, [1, 0])
    pool.free([shared])
    assert pool.num_free == 2


def test_a_list_that_fails_frees_nothing():
    pool = BlockPool(4)
    pool.allocate(2)
    before = state(pool)
    with pytest.raises(ValueError, match="block 2"):
        pool.free([0, 2, 1])
    assert state(pool) == before


def test_failure_inside_a_multi_block_call():
    pool, _ = pool_that_knows(5, prefix(1, 2, 3, 4))
    pool.allocate(2)
    before = state(pool)
    with pytest.raises(OutOfBlocks, match="expected at most 3 blocks, which are free, got a request for 5") as error:
        pool.allocate(5)
    assert (error.value.wanted, error.value.free) == (5, 3)
    assert state(pool) == before


@pytest.mark.parametrize("block_ids", [-1, 4, [0, 4], [-1]], ids=str)
@pytest.mark.parametrize("method", ["free", "touch", "forget"])
def test_numbers_outside_the_pool(method, block_ids):
    pool = BlockPool(4)
    pool.allocate(4)
    before = state(pool)
    with pytest.raises(IndexError, match="block_ids: expected numbers from 0 to 3"):
        getattr(pool, method)(block_ids)
    assert state(pool) == before


@pytest.mark.parametrize("block_ids", [1.0, [True], [[0]], "a"], ids=str)
def test_what_is_no_number(block_ids):
    with pytest.raises(TypeError, match="block_ids: expected signed integers"):
        BlockPool(4).free(block_ids)


@pytest.mark.parametrize(("count", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_counts_that_are_none(count, error):
    with pytest.raises(error, match="count"):
        BlockPool(4).allocate(count)


def test_touching_a_free_block_that_holds_nothing():
    pool = BlockPool(3)
    block = pool.allocate()
    before = state(pool)
    with pytest.raises(ValueError, match="expected blocks with owners or a known prefix, got free block 1"):
        pool.touch([block, 1])
    assert state(pool) == before


def test_ref_counts_are_not_to_be_written():
    with pytest.raises(ValueError, match="read-only"):
        BlockPool(3).ref_counts[0] = 1


def test_repr_tells_usage():
    pool, _ = pool_that_knows(9, prefix(1, 2, 3, 4))
    pool.allocate(3)
    assert repr(pool) == "<BlockPool: 3 of 9 blocks used, 2 hold a known prefix>"


# ---- eviction -------------------------------------------------------------------------------------------------------


def test_eviction_order():
    """What holds nothing known first, then the longest free; of a sequence its tail before its head."""
    pool, (first, second) = pool_that_knows(6, prefix(1, 2, 3, 4), prefix(5, 6, 7, 8))
    blank = [4, 5]
    assert pool.allocate(6).tolist() == [*blank, *first[::-1], *second[::-1]]
    assert pool.num_cached == 0


def test_a_block_used_again_is_the_youngest():
    pool, (first, second) = pool_that_knows(4, prefix(1, 2, 3, 4), prefix(5, 6, 7, 8))
    pool.touch(first)
    pool.free(first)
    assert pool.allocate(4).tolist() == [*second[::-1], *first[::-1]]


def test_a_block_in_use_is_not_evicted():
    pool, (first, second) = pool_that_knows(4, prefix(1, 2, 3, 4), prefix(5, 6, 7, 8))
    pool.touch(first[:1])
    assert pool.allocate(3).tolist() == [first[1], *second[::-1]]
    assert pool.longest_prefix(prefix(1, 2, 3, 4).hashes).tolist() == [first[0]]
    with pytest.raises(OutOfBlocks):
        pool.allocate()


def test_what_is_evicted_is_no_longer_known():
    pool, (blocks,) = pool_that_knows(2, prefix(1, 2, 3, 4))
    assert pool.allocate() == blocks[1]
    assert pool.longest_prefix(prefix(1, 2, 3, 4).hashes).tolist() == [blocks[0]]
    assert pool.num_cached == 1
    pool.free(blocks[1])
    assert pool.longest_prefix(prefix(1, 2, 3, 4).hashes).tolist() == [blocks[0]]


# ---- known prefixes -------------------------------------------------------------------------------------------------


def test_the_longest_prefix_ends_at_the_first_unknown_block():
    pool, (blocks,) = pool_that_knows(8, prefix(1, 2, 3, 4, 5, 6))
    assert pool.longest_prefix(prefix(1, 2, 3, 4, 5, 6, 7, 8).hashes).tolist() == blocks.tolist()
    assert pool.longest_prefix(prefix(1, 2, 9, 4, 5, 6).hashes).tolist() == blocks[:1].tolist()
    assert pool.longest_prefix(prefix(9, 2, 3, 4).hashes).tolist() == []
    assert pool.longest_prefix([]).dtype == np.int32
    pool.forget(blocks[1])
    assert pool.longest_prefix(prefix(1, 2, 3, 4, 5, 6).hashes).tolist() == blocks[:1].tolist()


def test_prefix_hash():
    """No false hit: the same tokens after another parent, under another salt or other keys, in another order."""
    same = prefix(1, 2, 3, 4)
    assert prefix(1, 2, 3, 4).hashes == same.hashes
    others = [
        prefix(2, 1, 3, 4),
        prefix(3, 4, 1, 2),
        prefix(9, 9, 3, 4),
        prefix(1, 2, 4, 3),
        prefix(1, 2, 3, 4, salt="a"),
        prefix(1, 2, 3, 4, salt=b"a"),
        prefix(1, 2, 3, 4, salt=""),
        prefix(1, 2, 3, 4, extra_keys=["a"]),
        prefix(1, 2, 3, 4, extra_keys=["a", "b"]),
        prefix(1, 2, 3, 4, extra_keys=["ab"]),
        prefix(1, 2, 3, 4, extra_keys=["b", "a"]),
        prefix(1, 2, 3, 4, extra_keys=[1]),
        prefix(1, 2, 3, 4, extra_keys=["1"]),
    ]
    last = [same.hashes[1], *(other.hashes[1] for other in others)]
    assert len(set(last)) == len(last)
    assert all(len(block_hash) == 32 for block_hash in last)


def test_hashes_are_the_same_in_every_process():
    """Python's own hash of a str differs from process to process."""
    assert prefix(1, 2, salt="salt", extra_keys=("x", 3)).hashes[0].hex() == (
        "fc588f4744868215dfa40c18a3957a463f7f11ab4325e82b87de9194ced58e79"
    )


def test_hashes_kept_as_tokens_come():
    """Only new blocks are hashed."""
    whole, grown = prefix(1, 2, 3, 4, 5), prefix(1)
    grown.extend([2, 3])
    first = grown.hashes[0]
    grown.extend(np.array([4, 5], np.int32))
    grown.extend([])
    assert grown.hashes[0] is first
    assert grown.hashes == whole.hashes
    assert grown.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert len(grown) == 5


def test_hashes_after_truncation_are_those_of_the_new_tokens():
    known = prefix(1, 2, 3, 4)
    known.truncate(3)
    assert (len(known), len(known.hashes)) == (3, 1)
    known.extend([5])
    assert known.hashes == prefix(1, 2, 3, 5).hashes
    known.truncate(0)
    known.extend([7, 8])
    assert known.hashes == prefix(7, 8).hashes


def test_copies_go_on_apart():
    one = prefix(1, 2, 3, salt="s", extra_keys=["k"])
    other = one.copy()
    one.extend([4])
    other.extend([5])
    assert one.hashes == prefix(1, 2, 3, 4, salt="s", extra_keys=["k"]).hashes
    assert other.hashes == prefix(1, 2, 3, 5, salt="s", extra_keys=["k"]).hashes


@pytest.mark.parametrize(("num_tokens", "num_reusable"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2)])
def test_whole_prompt_cached_leaves_the_last_block_out(num_tokens, num_reusable):
    known = prefix(*range(num_tokens))
    assert known.reusable == known.hashes[:num_reusable]


def test_a_hash_belongs_to_the_block_that_had_it_first():
    pool = BlockPool(4)
    one, other = pool.allocate(2).tolist()
    pool.register([one], prefix(1, 2).hashes)
    pool.register([other], prefix(1, 2).hashes)
    pool.register([one], prefix(3, 4).hashes)
    assert pool.longest_prefix(prefix(1, 2).hashes).tolist() == [one]
    assert pool.longest_prefix(prefix(3, 4).hashes).tolist() == []
    assert pool.num_cached == 1


def test_what_cannot_be_registered():
    pool = BlockPool(4)
    block = pool.allocate()
    before = state(pool)
    with pytest.raises(ValueError, match="hashes: expected 1, one of each block, got 2"):
        pool.register([block], prefix(1, 2, 3, 4).hashes)
    with pytest.raises(ValueError, match="expected blocks with owners, got free block 1"):
        pool.register([block, 1], prefix(1, 2, 3, 4).hashes)
    assert state(pool) == before


def test_reset_prefix_cache():
    pool, (blocks,) = pool_that_knows(4, prefix(1, 2, 3, 4))
    pool.touch(blocks[:1])
    pool.reset_prefix_cache()
    assert pool.longest_prefix(prefix(1, 2, 3, 4).hashes).tolist() == []
    assert (pool.num_cached, pool.num_free, pool.ref_counts.tolist()) == (0, 3, [1, 0, 0, 0])
    pool.free(blocks[:1])
    assert sorted(pool.allocate(4).tolist()) == [0, 1, 2, 3]


def test_forgetting_a_free_block_keeps_it_free():
    pool, (blocks,) = pool_that_knows(2, prefix(1, 2, 3, 4))
    pool.forget(blocks)
    pool.forget(blocks)
    assert (pool.num_cached, pool.num_free) == (0, 2)
    assert sorted(pool.allocate(2).tolist()) == [0, 1]


@pytest.mark.parametrize("token_ids", [[1.0], [[1]], ["a"], [True]], ids=str)
def test_tokens_that_are_none(token_ids):
    with pytest.raises(TypeError, match="token_ids: expected signed integers in one row"):
        prefix().extend(token_ids)


@pytest.mark.parametrize("keys", [{"salt": 1.0}, {"salt": True}, {"extra_keys": [None]}], ids=str)
def test_keys_that_are_none(keys):
    with pytest.raises(TypeError, match="salt and extra_keys: expected str, bytes or int"):
        prefix(1, 2, **keys)


def test_what_allocate_gave_stays_as_it_was():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.free([0, 2])
    assert blocks.tolist() == [0, 1, 2]


def test_tokens_past_32_bits():
    known = prefix(1 << 40, (1 << 40) + 1)
    assert known.token_ids.tolist() == [1 << 40, (1 << 40) + 1]
    assert known.hashes != prefix(0, 1).hashes


def test_copies_go_on_apart_from_before_the_first_full_block():
    """Salt and keys are still to be hashed, and the one's array has room for the other's tokens."""
    one = prefix(1, salt="s", extra_keys=["k"])
    assert one.copy().copy().hashes == []
    other = one.copy()
    other.extend([2])
    assert other.hashes == prefix(1, 2, salt="s", extra_keys=["k"]).hashes
    one = prefix(1)
    one.extend([2])
    one.extend([3])  # room for four
    other = one.copy()
    one.extend([4])
    other.extend([5])
    assert (one.token_ids.tolist(), other.token_ids.tolist()) == ([1, 2, 3, 4], [1, 2, 3, 5])


def test_a_truncation_past_the_end_takes_nothing_back():
    known = prefix(1, 2, 3)
    known.truncate(5)
    assert (len(known), known.token_ids.tolist()) == (3, [1, 2, 3])


def test_one_token_at_a_time():
    """Whether by `extend` or by `append`."""
    extended, appended = prefix(), prefix()
    for token in range(7):
        extended.extend([token])
        appended.append(token)
    assert extended.hashes == appended.hashes == prefix(*range(7)).hashes
    assert appended.token_ids.tolist() == list(range(7))
    assert appended.between(2, 5) == [2, 3, 4]


@pytest.mark.parametrize("num_tokens", [-1, 1.5, None])
def test_truncations_to_what_is_no_length(num_tokens):
    known = prefix(1, 2, 3)
    with pytest.raises((ValueError, TypeError), match="num_tokens: expected"):
        known.truncate(num_tokens)
    assert len(known) == 3


def test_unsigned_tokens():
    """Those past int64 would have the hashes of negative ones."""
    for token_ids in (np.array([2**63], np.uint64), np.array([1], np.uint8), [2**63]):
        with pytest.raises(TypeError, match="token_ids: expected signed integers"):
            prefix().extend(token_ids)


@pytest.mark.parametrize("keys", ["ab", b"ab"])
def test_a_string_is_no_list_of_keys(keys):
    with pytest.raises(TypeError, match="extra_keys: expected a sequence of keys"):
        prefix(1, 2, extra_keys=keys)


def test_kinds_of_strings():
    assert prefix(1, 2, salt=np.str_("a")).hashes == prefix(1, 2, salt="a").hashes


@pytest.mark.parametrize("hashes", [b"x", "x", [1], ["x"]], ids=str)
def test_hashes_that_are_none(hashes):
    pool = BlockPool(2)
    block = pool.allocate(1)
    before = state(pool)
    with pytest.raises(TypeError, match="hashes: expected a sequence of bytes"):
        pool.register(block, hashes)
    assert state(pool) == before


def test_a_block_forgotten_twice_at_once():
    pool, (blocks,) = pool_that_knows(2, prefix(1, 2, 3, 4))
    pool.forget([blocks[0], blocks[0]])
    assert (pool.num_cached, pool.num_free) == (1, 2)


def test_asking_for_shared_blocks_takes_no_time():
    """Each is looked at once, however many forks there have been."""
    pool = BlockPool(50_000)
    blocks = pool.allocate(50_000)
    pool.touch(blocks)
    assert pool.has_writable_shared
    pool.free(blocks[1:])
    pool.register(blocks[:1], [b"x"])
    assert not pool.has_writable_shared
    assert not pool._shared


def test_ragged_numbers():
    with pytest.raises(ValueError, match="block_ids: expected integers in one row, got a ragged sequence"):
        BlockPool(4).free([[0], [1, 2]])


@pytest.mark.parametrize("hashes", [[1, 2], ["a"], [None]], ids=str)
def test_looking_for_what_is_no_hash(hashes):
    with pytest.raises(TypeError, match="hashes: expected bytes"):
        BlockPool(4).longest_prefix(hashes)


def test_repr_of_prefix_hashes():
    assert repr(prefix(1, 2, 3)) == "<PrefixHashes: 3 tokens, 1 full blocks of 2>"
