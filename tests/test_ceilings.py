"""What benches compare with, on the interpreter: the floor of a decode step reads what decode has to read."""

import numpy as np
import pytest

from pagedkv.arrays import view
from pagedkv.cli import read_floor
from pagedkv.launch import as_bytes
from pagedkv.params import BLOCK_READ_PARAMS

pytestmark = pytest.mark.ptx

HEADS, BLOCK_SIZE, HEAD_NBYTES = 3, 16, 640  # 40 packs: more than a warp's
LENS = np.array([33, 0, 16, 1], np.int32)
TABLES = np.array([[5, 1, 6, -1], [-1, -1, -1, -1], [0, 2**31 - 1, 9, 9], [3, 4, 4, 4]], np.int32)
LIVE = [5, 1, 6, 0, 3]
DIRTY = 1 << 31
ALL = 2 ** (2 * len(LIVE) * HEADS) - 1


def caches():
    """A bit for each head of each live block, and for whether it is a key or a value; the others have DIRTY's."""
    words = np.full((2, 8, HEADS, HEAD_NBYTES // 16, 4), 0, np.uint32)
    words[..., 0] = DIRTY
    for i, block in enumerate(LIVE):
        words[:, block, :, :, 0] = (1 << (i * HEADS + np.arange(HEADS)))[:, None]
    words[1, LIVE, :, :, 0] <<= len(LIVE) * HEADS
    return words


def run(launch, words):
    """What the kernel stored, and the sectors of caches that it asked for."""
    from pagedkv import ptx_ops

    stored = np.zeros(1, np.uint32)
    aligned = np.zeros(words.nbytes + 32, np.uint8)
    start = -aligned.ctypes.data % 32
    memory = aligned[start : start + words.nbytes].view(np.uint32).reshape(words.shape)
    memory[...] = words
    with ptx_ops.profiled() as profiles:
        ptx_ops.launch(launch, [view(array, "array") for array in (memory[0], memory[1], TABLES, LENS, stored)])
    loads = [
        tally.traffic["global load"]
        for (_, opcode), tally in profiles[0].counters.tallies.items()
        if "v4" in opcode and "ld" in opcode
    ]
    return int(stored[0]), sum(load.units for load in loads)


def launches(num_sms=2):
    return read_floor.read_launches(*TABLES.shape, HEADS, BLOCK_SIZE, HEAD_NBYTES, num_sms)


def test_launches_differ_and_fit():
    found = {(launch.instance, launch.grid, launch.threads) for launch in launches()}
    assert len(found) > 10
    for _, (ctas,), threads in found:
        assert ctas * threads >= 32 * 2 * TABLES.size * HEADS or ctas <= 2 * 8


def test_tables_that_are_too_large_are_refused():
    with pytest.raises(ValueError, match=r"^tables: expected fewer sequences and blocks, got 65536 x 16384"):
        read_floor.read_launches(65536, 16384, 8, 16, 4096, 132)


@pytest.mark.parametrize("i", range(len(read_floor.IN_FLIGHT) * len(read_floor.GRIDS)))
def test_every_launch_reads_every_live_block_once(i):
    stored, sectors = run(launches()[i], caches())
    assert stored == 0
    assert sectors == 2 * len(LIVE) * HEADS * HEAD_NBYTES // 32


def test_one_warp_sees_all_that_is_live_and_nothing_else():
    """It folds the bits of all blocks, and stores them only because they are all there and no other is."""
    fields = (2 * TABLES.size * HEADS, TABLES.shape[1], HEADS, HEAD_NBYTES // 16, BLOCK_SIZE, ALL)
    launch = launches()[0]
    alone = type(launch)(launch.instance, (1,), 32, as_bytes(fields, BLOCK_READ_PARAMS))
    assert run(alone, caches())[0] == ALL
