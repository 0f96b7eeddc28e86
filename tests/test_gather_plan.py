"""How gathers are planned, and what their kernels do with plans that nothing has checked."""

import numpy as np
import pytest
from gathers import LAYOUTS, POISON, assert_same_bits, batch, expected_rows, poisoned

import pagedkv
from pagedkv import ptx_ops, validate_gather
from pagedkv.arrays import view
from pagedkv.gather_plan import MOST_ROWS, THREADS, gather_arrays, plan_gather
from pagedkv.launch import LARGEST_GRID
from pagedkv.params import GATHER_PARAMS


def problem_of(arguments, key_out, value_out):
    """The problem of a gather whose indices have not been checked."""
    names = ("key_cache", "value_cache", "block_table", "cu_seq_lens", "seq_starts", "k_scale", "v_scale")
    options = {"kv_cache_dtype": arguments.get("kv_cache_dtype", "auto"), "layout": arguments["layout"]}
    given = [arguments.get(name) for name in names]
    return validate_gather.gather_cache(*given, key_out, value_out, num_tokens=None, dtype=None, **options)


def output_of(num_rows, heads=1):
    """More rows than any memory has: all are one."""
    return np.lib.stride_tricks.as_strided(np.zeros(heads * 8, np.float16), (num_rows, heads, 8), (0, 16, 2))


@pytest.mark.parametrize("heads", [1, 3])
def test_more_tokens_than_a_grid_holds(rng, heads):
    arguments = batch(rng, [1], heads=heads, head_size=8)
    plan = plan_gather(problem_of(arguments, *2 * [output_of(2 * THREADS, heads)]))
    most = LARGEST_GRID * (2 * THREADS // plan.grid[0])
    assert plan_gather(problem_of(arguments, *2 * [output_of(most, heads)])).grid[0] == LARGEST_GRID
    with pytest.raises(ValueError, match=r"^key_out: expected fewer tokens in one call"):
        plan_gather(problem_of(arguments, *2 * [output_of(most + 1, heads)]))


@pytest.mark.parametrize("num_rows", [MOST_ROWS, MOST_ROWS + 1, 2**32 + 5])
def test_outputs_of_more_rows_than_starts_can_name(rng, num_rows):
    plan = plan_gather(problem_of(batch(rng, [1], heads=1, head_size=8), *2 * [output_of(num_rows)]))
    assert plan.params.view(GATHER_PARAMS)["num_rows"] == MOST_ROWS


@pytest.mark.parametrize("name", ["block_table", "cu_seq_lens", "seq_starts", "k_scale"])
def test_inputs_between_elements(rng, name):
    scales = {"k_scale": np.ones(2, np.float32), "v_scale": np.ones(2, np.float32)}
    arguments = batch(rng, [20, 9], [3, 0], kv_cache_dtype="fp8", **scales)
    array = arguments[name]
    memory = np.zeros(array.nbytes + 8, np.uint8)
    arguments[name] = np.ndarray(array.shape, array.dtype, memory, (1 - memory.ctypes.data) % 4)
    with pytest.raises(ValueError, match=f"^{name}: expected an address that is a multiple of 4"):
        plan_gather(problem_of(arguments, *(poisoned((29, 2, 32), np.float16) for _ in "kv")))


@pytest.mark.ptx
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_past_the_output_are_not_written(rng, layout):
    """Starts promise more rows than there is room for. What lies behind may be written here, which would be seen."""
    arguments = batch(rng, [20, 30], layout=layout)
    rooms = [poisoned((50, 2, 32), np.float16) for _ in "kv"]
    expected = expected_rows(arguments, *rooms)
    problem = problem_of(arguments, *(room[:20] for room in rooms))
    ptx_ops.launch(plan_gather(problem), [*gather_arrays(problem)[:-2], *(view(room, "room") for room in rooms)])
    for room, want in zip(rooms, expected, strict=True):
        assert_same_bits(room[:20], want[:20])
        assert (room[20:].view(np.uint8) == POISON).all()


@pytest.mark.parametrize("head_size", [40, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.ptx
def test_every_number_is_stored_once(ptx_backend, rng, layout, head_size):
    """Also where lanes are left over: 5 packs of 2 heads do not divide a CTA."""
    with ptx_ops.profiled() as profiles:
        key, value = pagedkv.gather_cache(**batch(rng, [40, 9], layout=layout, head_size=head_size))
    tallies = profiles[0].counters.tallies.values()
    assert sum(tally.traffic["global store"].nbytes for tally in tallies) == key.nbytes + value.nbytes
