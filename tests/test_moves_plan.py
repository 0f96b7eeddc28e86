"""How moves of blocks are planned: widths of access, caches that go together, what a temporary holds."""

import numpy as np
import pytest
from block_moves import MAPPINGS, random_buffer, random_mapping

from pagedkv import moves_plan, validate_moves
from pagedkv.launch import LARGEST_GRID
from pagedkv.params import BLOCK_MOVE_PARAMS


def groups_of(caches):
    move = validate_moves.block_copy(caches, [])
    return moves_plan.plan_groups(moves_plan.places_of(move), move.touches_host)


def aligned_bytes(nbytes, offset=0):
    room = np.zeros(nbytes + 32, np.uint8)
    start = -room.ctypes.data % 16 + offset
    return room[start : start + nbytes]


def pack_bytes(caches):
    return [group.instance.arguments[0] for group in groups_of(caches)]


def params_of(launch):
    return launch.params.view(BLOCK_MOVE_PARAMS)


TEMPORARY = 2**20
WIDTHS = {16: (0, 16), 8: (8, 24), 4: (4, 20), 2: (2, 6), 1: (1, 3)}  # an address and a size that allow no more


@pytest.mark.parametrize("width", WIDTHS)
def test_width_of_access(width):
    offset, odd = WIDTHS[width]
    aligned = aligned_bytes(10 * 96).reshape(10, 96)
    assert pack_bytes(aligned) == [16]
    assert pack_bytes(aligned_bytes(10 * 96, offset).reshape(10, 96)) == [width]
    assert pack_bytes([aligned, aligned_bytes(10 * 96, offset).reshape(10, 96)]) == [width]
    assert pack_bytes(aligned_bytes(10 * odd).reshape(10, odd)) == [width]
    assert pack_bytes(aligned_bytes(10 * (64 + odd)).reshape(10, 64 + odd)[:, :64]) == [width]  # distance of blocks
    rows = aligned_bytes(160 * (32 + odd)).reshape(10, 16, 32 + odd)
    assert pack_bytes(rows[:, :, :32]) == [width]  # distance of rows, and of blocks that are 16 of them
    assert pack_bytes(rows[:, :, :odd]) == [width]


def test_a_single_block_has_no_distance_to_the_next():
    cache = np.lib.stride_tricks.as_strided(aligned_bytes(64), (1, 64), (3, 1))
    assert pack_bytes(cache) == [16]


def test_dense_blocks_of_as_many_bytes_go_together(rng):
    pair = random_buffer(rng, (6, 2, 4, 8))  # K and V in turn
    caches = [
        random_buffer(rng, (6, 4, 8)),
        random_buffer(rng, (6, 64), np.uint8),
        random_buffer(rng, (6, 16), np.float32),
    ]
    (group,) = groups_of([*caches, pair[:, 0], pair[:, 1], random_buffer(rng, (6, 8, 4)).swapaxes(1, 2)])
    assert group.form == moves_plan.BlockForm(1, 64)
    assert group.addresses["source"].tolist() == group.addresses["target"].tolist()
    assert group.addresses["source_block_stride"].tolist() == [64, 64, 64, 128, 128, 64]


def test_other_sizes_and_rows_do_not(rng):
    rows = random_buffer(rng, (6, 4, 16))
    groups = groups_of([random_buffer(rng, (6, 4, 8)), random_buffer(rng, (6, 4, 9)), rows[:, :, :8], rows[:, :, 8:]])
    assert [group.form for group in groups] == [
        moves_plan.BlockForm(1, 64),
        moves_plan.BlockForm(1, 72),
        moves_plan.BlockForm(4, 16, 32, 32),
    ]
    assert [group.addresses.size for group in groups] == [1, 1, 2]


def test_axes_that_continue_one_another_are_one(rng):
    """Heads around tokens, each a row of its own: one axis. Some tokens of some heads: two, the kernel has one."""
    hnd = random_buffer(rng, (6, 3, 4, 16))
    (group,) = groups_of(hnd[..., :8].swapaxes(1, 2))
    assert group.form == moves_plan.BlockForm(12, 16, 32, 32)
    (group,) = groups_of(random_buffer(rng, (6, 9, 5, 16))[:, :7, :3, :8])
    assert group.form == moves_plan.BlockForm(7, 16, 160, 160)
    assert np.diff(group.addresses["source"]).tolist() == [32, 32]


def form_of(cache):
    """The form of a cache's blocks, and how many parts of them make one."""
    (group,) = groups_of(cache)
    return group.form, group.addresses.size


def test_axes_of_one_element_have_no_stride():
    cache = np.lib.stride_tricks.as_strided(aligned_bytes(6 * 64), (6, 1, 4, 1, 16), (64, 3, 16, 5, 1))
    assert form_of(cache) == (moves_plan.BlockForm(1, 64), 1)


def test_the_longest_axis_is_that_of_rows(rng):
    buffer = random_buffer(rng, (6, 9, 9, 16))
    assert form_of(buffer[:, :7, :3, :8]) == (moves_plan.BlockForm(7, 16, 288, 288), 3)
    assert form_of(buffer[:, :3, :7, :8]) == (moves_plan.BlockForm(7, 16, 32, 32), 3)


def test_reversed_axes_that_continue_one_another_are_one(rng):
    buffer = random_buffer(rng, (6, 4, 3, 8))
    assert form_of(buffer[:, ::-1, ::-1]) == (moves_plan.BlockForm(12, 16, -16, -16), 1)


@pytest.mark.parametrize(
    ("nbytes", "threads", "ctas"), [(16, 32, 6), (2048, 32, 6), (2064, 64, 6), (8192, 128, 6), (8208, 128, 12)]
)
def test_grid(nbytes, threads, ctas):
    """Of 2 caches and 3 pairs."""
    (group,) = groups_of([aligned_bytes(5 * nbytes).reshape(5, nbytes) for _ in range(2)])
    launch = group.launch(3)
    assert (launch.threads, launch.grid) == (threads, (ctas,))
    assert params_of(launch)["num_items"] == ctas
    assert params_of(launch)["block_packs"] == nbytes // 16


def test_items_are_counted_in_64_bits():
    """A grid has fewer CTAs, each of which takes several."""
    (group,) = groups_of([aligned_bytes(16).reshape(1, 16) for _ in range(64)])
    launch = group.launch(2**26)
    assert params_of(launch)["num_items"] == 2**32
    assert launch.grid == (LARGEST_GRID,)


@pytest.mark.parametrize("form", [(256, np.uint8), (4096, np.uint8), (32768, np.uint8), (7, np.uint8)])
def test_threads_that_reach_through_a_link(form):
    nbytes, dtype = form
    src, dst = (aligned_bytes(900 * nbytes).view(dtype).reshape(900, nbytes) for _ in range(2))
    move = validate_moves.block_swap(src, dst, [], None)
    (group,) = moves_plan.plan_groups(moves_plan.places_of(move), move.touches_host)
    launch = group.launch(900)
    assert launch.grid[0] * launch.threads <= moves_plan.HOST_THREADS
    assert (
        launch.grid[0] * launch.threads > moves_plan.HOST_THREADS - 128
        or launch.grid[0] == params_of(launch)["num_items"]
    )
    assert params_of(launch)["num_items"] >= 900


# ---- steps ----------------------------------------------------------------------------------------------------------


def steps_of(caches, mapping):
    """The steps, and the sizes of temporaries, which begin at address TEMPORARY."""
    sizes, move = [], validate_moves.block_copy(caches, mapping)

    def allocate(nbytes):
        sizes.append(nbytes)
        return TEMPORARY

    groups = moves_plan.plan_groups(moves_plan.places_of(move), move.touches_host)
    return moves_plan.plan_move(move, groups, move.mapping.numpy(), allocate), sizes


def sequential(mapping, steps, num_blocks):
    """Which block's contents each block has in the end, steps one after the other, and in each step any order."""
    holds = list(range(num_blocks))
    if len(steps) == 1:
        for source, target in steps[0].pairs.tolist():
            holds[target] = holds[source]
        return holds
    into, *direct, out_of = [step.pairs.tolist() for step in steps]
    staged = {place: holds[source] for source, place in into}
    for source, target in direct[0] if direct else ():
        holds[target] = holds[source]
    for place, target in out_of:
        holds[target] = staged[place]
    return holds


@pytest.mark.parametrize("trial", range(30))
def test_steps(rng, trial):
    """What is left, and that no order inside a step matters: what a step writes no other of its pairs reads."""
    mapping = random_mapping(rng, 12, 12, int(rng.integers(1, 13)))
    steps, _ = steps_of(random_buffer(rng, (12, 8)), mapping)
    expected = list(range(12))
    for source, target in mapping.tolist():
        expected[target] = source
    assert sequential(mapping, steps, 12) == expected
    for step in steps if len(steps) == 1 else steps[1:-1]:
        assert not set(step.pairs[:, 0].tolist()) & set(step.pairs[:, 1].tolist())


def test_disjoint_pairs_need_no_temporary(rng):
    for name in ("one pair", "disjoint", "fan out", "onto itself"):
        steps, sizes = steps_of(random_buffer(rng, (10, 8)), MAPPINGS[name])
        assert (len(steps), sizes) == (1, [])
    assert steps_of(random_buffer(rng, (10, 8)), MAPPINGS["nothing but itself"]) == ([], [])


def test_a_temporary_holds_each_overwritten_block_once(rng):
    """Of one cache beside those of another with blocks alike; those of other blocks follow in the same place."""
    caches = [
        random_buffer(rng, (10, 7), np.uint8),
        random_buffer(rng, (10, 7), np.uint8),
        random_buffer(rng, (10, 32)),
    ]
    steps, sizes = steps_of(caches, MAPPINGS["fan out of a block that is written"])
    assert sizes == [64]
    for (into, direct, out_of), offsets in zip((steps[:3], steps[3:]), ([0, 7], [0]), strict=True):
        assert into.pairs.tolist() == [[0, 0]]
        assert sorted(out_of.pairs.tolist()) == [[0, 1], [0, 2]]
        assert sorted(direct.pairs.tolist()) == [[5, 0], [8, 9]]
        (into,), (direct,), (out_of,) = into.groups, direct.groups, out_of.groups
        assert into.addresses["source"].tolist() == direct.addresses["source"].tolist()
        assert out_of.addresses["target"].tolist() == direct.addresses["target"].tolist()
        assert (into.addresses["target"] - TEMPORARY).tolist() == offsets
        assert (out_of.addresses["source"] - TEMPORARY).tolist() == offsets


def test_rows_are_dense_in_a_temporary(rng):
    (into, _, out_of), sizes = steps_of(random_buffer(rng, (10, 4, 16))[..., :8], MAPPINGS["chain"] + [(5, 6)])
    assert [group.form for group in into.groups] == [moves_plan.BlockForm(4, 16, 32, 16)]
    assert [group.form for group in out_of.groups] == [moves_plan.BlockForm(4, 16, 16, 32)]
    assert sizes == [64]
