"""How writes are launched, and when a launch is repeated: decided on the host, and tested here without a GPU."""

import numpy as np
import pytest

from pagedkv import repeats, validate, write_plan
from pagedkv.context import checked, chosen_backend, is_checked, use_backend
from pagedkv.params import fast_divisor


def aligned(shape, dtype=np.float16, elements=0):
    """Zeros that begin some elements after a 16-byte boundary."""
    dtype = np.dtype(dtype)
    room = np.zeros(int(np.prod(shape)) * dtype.itemsize + 64, np.uint8)
    start = -room.ctypes.data % 16 + elements * dtype.itemsize
    return room[start : start + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)


def flash_problem(num_tokens=20, heads=3, head_size=64, key=0, value=0, key_cache=0, value_cache=0, **options):
    shape, cache = (num_tokens, heads, head_size), (4, 16, heads, head_size)
    dtype = np.uint8 if options.get("kv_cache_dtype", "auto") != "auto" else np.float16
    arrays = [aligned(shape, elements=key), aligned(shape, elements=value)]
    arrays += [aligned(cache, dtype, key_cache), aligned(cache, dtype, value_cache)]
    options = {"kv_cache_dtype": "auto", **options}
    return validate.cache_write(*arrays, np.arange(num_tokens) % 64, packed=False, layout="NHD", **options)


def packed_problem(num_tokens=20, heads=3, head_size=64, key=0, value=0, key_cache=0, value_cache=0):
    shape = (num_tokens, heads, head_size)
    arrays = [aligned(shape, elements=key), aligned(shape, elements=value)]
    arrays += [aligned((4, heads, head_size // 8, 16, 8), elements=key_cache)]
    arrays += [aligned((4, heads, head_size, 16), elements=value_cache)]
    return validate.cache_write(*arrays, np.arange(num_tokens) % 64, kv_cache_dtype="auto", packed=True)


def vec_of(instance):
    return instance.arguments[4]  # both kernels: dtypes, a flag or head size, a size, VEC


@pytest.mark.parametrize("name", ["key", "value", "key_cache", "value_cache"])
@pytest.mark.parametrize(("elements", "vec"), [(0, 8), (1, 1), (2, 2), (4, 4), (6, 2)])
def test_each_array_limits_the_width_of_accesses(name, elements, vec):
    """On its own in the packed layout; in flash layouts by its distance from the array it is copied to or from."""
    assert vec_of(write_plan.packed_write_instance(packed_problem(**{name: elements}))) == vec
    assert vec_of(write_plan.flash_write_instance(flash_problem(**{name: elements}))) == vec


def test_equal_misalignment_keeps_flash_accesses_wide():
    """Prefix and tail go one by one; the packs between are aligned on both sides."""
    problem = flash_problem(key=3, key_cache=3, value=5, value_cache=5)
    assert vec_of(write_plan.flash_write_instance(problem)) == 8


@pytest.mark.parametrize("which", range(4), ids=["key", "value", "key_cache", "value_cache"])
def test_each_stride_limits_the_width_of_accesses(which):
    arrays = [np.zeros((5, 2, 16), np.float16)] * 2 + [np.zeros((4, 16, 2, 16), np.float16)] * 2
    padded = np.zeros((*arrays[which].shape[:-1], 20), np.float16)
    arrays[which] = padded[..., :16]
    problem = validate.cache_write(*arrays, np.arange(5), kv_cache_dtype="auto", packed=False, layout="NHD")
    assert vec_of(write_plan.flash_write_instance(problem)) <= 4


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 63, 64, 512, 513, 4000])
@pytest.mark.parametrize(("heads", "head_size"), [(1, 8), (3, 64), (8, 128), (13, 40)])
def test_every_token_has_threads(num_tokens, heads, head_size):
    flash = write_plan.plan_flash_write(flash_problem(num_tokens, heads, head_size))
    lanes = 1 << int(params_of(flash)["lanes_per_token_log2"])
    assert flash.threads % lanes == 0
    assert flash.grid[0] * flash.threads // lanes >= num_tokens > (flash.grid[0] - 1) * flash.threads // lanes
    packed = write_plan.plan_packed_write(packed_problem(num_tokens, heads, head_size))
    tile_tokens, threads = packed.instance.arguments[-2:]
    tiles = -(-num_tokens // tile_tokens)
    assert threads == packed.threads
    assert packed.grid[0] * threads // 32 >= tiles * heads > (packed.grid[0] - 1) * threads // 32
    assert flash.grid[1] == packed.grid[1] == 2  # K and V


def params_of(launch):
    return launch.params.view(write_plan.CACHE_WRITE_PARAMS)[()]


def test_parameters_of_both_sides():
    """Strides of K and of V, each from its own arrays, scales from theirs."""
    key = np.zeros((5, 2, 32), np.float16)[:, :, :16]
    value = np.zeros((5, 6, 16), np.float16)[:, :2]
    key_cache = np.zeros((4, 2, 16, 16), np.uint8).swapaxes(1, 2)
    value_cache = np.zeros((4, 16, 2, 48), np.uint8)[..., :16]
    k_scale, v_scale = np.ones(4, np.float32)[::2], np.ones(6, np.float32)[::3]
    options = {"kv_cache_dtype": "fp8", "packed": False, "layout": "NHD"}
    slots = np.zeros((5, 3), np.int64)[:, 1]
    problem = validate.cache_write(key, value, key_cache, value_cache, slots, k_scale, v_scale, **options)
    params = params_of(write_plan.plan_flash_write(problem))
    assert params["sides"][0].tolist() == (64, 32, 512, 16, 256, 1.0, 2)
    assert params["sides"][1].tolist() == (96, 16, 1536, 96, 48, 1.0, 3)
    assert params["slot_stride"] == 3
    assert params["block_size"].tolist() == fast_divisor(16)
    assert params["num_kv_heads"].tolist() == fast_divisor(2)
    assert params["num_tokens"] == 5


def test_scales_that_are_numbers_travel_in_the_struct():
    options = {"kv_cache_dtype": "fp8_e5m2", "k_scale": 0.5, "v_scale": 2.0}
    params = params_of(write_plan.plan_flash_write(flash_problem(**options)))
    assert params["sides"]["scale"].tolist() == [0.5, 2.0]
    assert params["sides"]["scale_stride"].tolist() == [0, 0]


def test_instances_follow_dtype_format_and_scales():
    per_head = np.ones(3, np.float32)
    instance = write_plan.flash_write_instance(flash_problem(kv_cache_dtype="fp8", k_scale=per_head, v_scale=per_head))
    assert instance.arguments[:4] == ("__half", "__nv_fp8_e4m3", "true", 64)
    plain = write_plan.flash_write_instance(flash_problem(k_scale=per_head, v_scale=per_head))
    assert plain.arguments[:4] == ("__half", "__half", "false", 64)  # an unquantised cache ignores scales
    few, many = (write_plan.packed_write_instance(packed_problem(n)) for n in (512, 513))
    assert few.arguments[-2:] == write_plan.FEW_PACKED
    assert many.arguments[-2:] == write_plan.MANY_PACKED


def test_slots_and_scales_off_their_alignment():
    bytes_of_slots = np.zeros(5 * 8 + 4, np.uint8)[4:].view(np.int64)
    arrays = [np.zeros((5, 2, 16), np.float16)] * 2 + [np.zeros((4, 16, 2, 16), np.float16)] * 2
    problem = validate.cache_write(*arrays, bytes_of_slots, kv_cache_dtype="auto", packed=False, layout="NHD")
    with pytest.raises(ValueError, match="slot_mapping: expected an address that is a multiple of 8"):
        write_plan.plan_flash_write(problem)


# ---- repeats --------------------------------------------------------------------------------------------------------


class Memory:
    def __init__(self, ptr, device_id=0):
        self.ptr, self.device_id = ptr, device_id


def device_array(pointer=4096, shape=(2, 3), dtype=np.float16, device=0, strides=None):
    """What ``repeats`` reads of a CuPy array, in a class of that name."""
    like = np.empty(shape, dtype)
    fields = {"data": Memory(pointer, device), "shape": shape, "strides": strides or like.strides, "dtype": like.dtype}
    return DeviceArray(**fields)


class DeviceArray:
    def __init__(self, **fields):
        self.__dict__.update(fields)


DeviceArray.__module__, DeviceArray.__name__ = "cupy", "ndarray"


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(repeats, "_replays", {})


def test_a_call_of_the_same_form_repeats_with_its_own_pointers():
    first = repeats.Call("op", (device_array(4096), None, 0.5), ("auto",))
    assert first.replay() is repeats.MISS
    first.remember(lambda pointers: ("launched", pointers))
    again = repeats.Call("op", (device_array(8192), None, 0.5), ("auto",))
    assert again.replay() == ("launched", [8192, 0, 0])


def test_a_launch_that_returns_nothing_is_no_miss():
    repeats.Call("op", (device_array(),), ()).remember(lambda pointers: None)
    assert repeats.Call("op", (device_array(),), ()).replay() is None


@pytest.mark.parametrize(
    "other",
    [
        ("op2", (device_array(), None, 0.5), ("auto",)),
        ("op", (device_array(), None, 0.5), ("fp8",)),
        ("op", (device_array(pointer=4098), None, 0.5), ("auto",)),
        ("op", (device_array(pointer=4104), None, 0.5), ("auto",)),
        ("op", (device_array(shape=(3, 2)), None, 0.5), ("auto",)),
        ("op", (device_array(strides=(2, 4)), None, 0.5), ("auto",)),
        ("op", (device_array(dtype=np.int16), None, 0.5), ("auto",)),
        ("op", (device_array(device=1), None, 0.5), ("auto",)),
        ("op", (device_array(), None, 0.25), ("auto",)),
        ("op", (device_array(), 1, 0.5), ("auto",)),
        ("op", (device_array(), None, None), ("auto",)),
    ],
)
def test_a_call_of_another_form_does_not(other):
    repeats.Call("op", (device_array(), None, 0.5), ("auto",)).remember(lambda pointers: None)
    assert repeats.Call(*other).replay() is repeats.MISS


def test_one_and_true_and_one_point_zero_are_told_apart():
    repeats.Call("op", (device_array(), 1), ()).remember(lambda pointers: None)
    assert repeats.Call("op", (device_array(), 1.0), ()).replay() is repeats.MISS
    assert repeats.Call("op", (device_array(), True), ()).key is None


def test_what_is_never_repeated():
    assert repeats.Call("op", (device_array(), np.zeros(3)), ()).key is None
    assert repeats.Call("op", (device_array(dtype=">f2"),), ()).key is None
    assert repeats.Call("op", (device_array(),), (["auto"],)).replay() is repeats.MISS
    with checked():
        assert repeats.Call("op", (device_array(),), ()).key is None
    with use_backend("numpy"):
        assert repeats.Call("op", (device_array(),), ()).key is None
    with use_backend("cuda"):
        assert repeats.Call("op", (device_array(),), ()).key is not None


def test_memory_of_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(repeats, "LIMIT", 3)
    for size in range(10):
        repeats.Call("op", (device_array(shape=(size,)),), ()).remember(lambda pointers: None)
    assert len(repeats._replays) <= 3


def test_contexts_nest():
    with use_backend("numpy"), checked():
        with use_backend("cuda"), checked():
            assert (chosen_backend(), is_checked()) == ("cuda", True)
        assert (chosen_backend(), is_checked()) == ("numpy", True)
    assert (chosen_backend(), is_checked()) == (None, False)
