"""Moves of blocks in tests: memory full of random bytes, caches as views of it, a plain loop that says what is right.

Whole buffers are compared, so that a byte between the blocks of a strided cache counts like one inside.
"""

import numpy as np

MAPPINGS = {
    "one pair": [(2, 5)],
    "disjoint": [(0, 7), (3, 1), (9, 4)],
    "fan out": [(6, 2), (6, 3), (6, 9)],
    "chain": [(0, 1), (1, 2)],
    "chain the other way round": [(1, 2), (0, 1)],
    "long chain": [(i, i + 1) for i in range(9)],
    "exchange": [(0, 1), (1, 0)],
    "cycle": [(4, 7), (7, 2), (2, 4)],
    "rotation of all": [(i, (i + 3) % 10) for i in range(10)],
    "fan out of a block that is written": [(5, 0), (0, 1), (0, 2), (8, 9)],
    "onto itself": [(3, 3), (3, 4), (5, 3 + 5)],
    "nothing but itself": [(3, 3), (9, 9)],
    "chain beside disjoint pairs": [(0, 1), (1, 2), (5, 6), (8, 9), (5, 7)],
}
NUM_BLOCKS = 10


def random_mapping(rng, num_sources, num_targets, num_pairs):
    """Any sources, destinations that differ."""
    return np.stack([rng.integers(0, num_sources, num_pairs), rng.permutation(num_targets)[:num_pairs]], axis=1)


def random_buffer(rng, shape, dtype=np.float16):
    """Random bytes, NaNs of all kinds among them."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rng.integers(0, 256, nbytes, dtype=np.uint8).view(dtype).reshape(shape)


def moved(source, target, mapping):
    """Writes into ``target`` what a move must leave: sources as they were before, one block after the other."""
    before = source.copy()
    for from_block, to_block in np.asarray(mapping).reshape(-1, 2).tolist():
        target[to_block] = before[from_block]


def as_bytes(array):
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def assert_same_bytes(got, want):
    assert got.shape == want.shape
    np.testing.assert_array_equal(as_bytes(got), as_bytes(want))


# Of each a buffer, and the caches that are views of it: [num_blocks, ...] with strides of all kinds.
VIEWS = {
    "NHD": ((10, 4, 3, 8), lambda b: [b]),
    "HND as NHD": ((10, 3, 4, 8), lambda b: [b.swapaxes(1, 2)]),
    "packed keys": ((10, 3, 2, 4, 8), lambda b: [b]),
    "K and V in turn": ((10, 2, 4, 3, 8), lambda b: [b[:, 0], b[:, 1]]),
    "V of K and V in turn": ((10, 2, 4, 3, 8), lambda b: [b[:, 1]]),
    "K before V": ((2, 10, 4, 3, 8), lambda b: [b[0], b[1]]),
    "K and V in one row": ((10, 4, 3, 16), lambda b: [b[..., :8], b[..., 8:]]),
    "K and V in one row, unequal": ((10, 4, 3, 24), lambda b: [b[..., :16], b[..., 16:]]),
    "K and V in one row, HND as NHD": (
        (10, 3, 4, 16),
        lambda b: [b[..., :8].swapaxes(1, 2), b[..., 8:].swapaxes(1, 2)],
    ),
    "some heads": ((10, 4, 5, 8), lambda b: [b[:, :, 1:4]]),
    "some tokens, heads and features": ((10, 6, 5, 24), lambda b: [b[:, 1:5, 2:5, 8:16]]),
    "rows of odd numbers": ((10, 4, 3, 11), lambda b: [b[..., 2:9]]),
    "every other feature": ((10, 4, 3, 16), lambda b: [b[..., 1::2]]),
    "features reversed": ((10, 4, 3, 8), lambda b: [b[..., ::-1]]),
    "tokens reversed": ((10, 4, 3, 8), lambda b: [b[:, ::-1]]),
    "blocks reversed": ((10, 4, 3, 8), lambda b: [b[::-1]]),
    "every other block": ((20, 4, 3, 8), lambda b: [b[1::2]]),
    "blocks inside tokens": ((4, 10, 3, 8), lambda b: [b.swapaxes(0, 1)]),
    "a number for each block": ((10,), lambda b: [b]),
    "no bytes": ((10, 4, 0, 8), lambda b: [b]),
}
