"""What the CUDA backend does around the launches of gather_cache and convert_layout, with stand-ins for CuPy and
kernels: no GPU is needed."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from gathers import batch, outputs_for, random_caches
from stand_ins import PARAMETERS, DeviceArray, note_streams, pointers, put, stand_in

import pagedkv
from pagedkv import repeats, validate_gather

LENS, STARTS = [37, 0, 5], [3, 7, 16]
SCALES = {"k_scale": np.full(2, 0.5, np.float32), "v_scale": np.full(2, 0.25, np.float32)}


@pytest.fixture
def card(monkeypatch):
    yield from stand_in(monkeypatch)


def ranges(rng, *, spare_rows=0, **options):
    """Arguments of a gather with all that it may be given, on the card."""
    arguments = batch(rng, LENS, STARTS, **options)
    return put(arguments | dict(zip(("key_out", "value_out"), outputs_for(arguments, None, spare_rows), strict=True)))


def caches(rng, layout="NHD"):
    return put(
        dict(zip(("key_cache", "value_cache"), random_caches(rng, layout, 3, 16, 2, 32, np.float16), strict=True))
    )


def without(arguments, *names):
    return {name: argument for name, argument in arguments.items() if name not in names}


# ---- gathers --------------------------------------------------------------------------------------------------------


def test_every_pointer_is_in_its_place(card, rng):
    for _ in range(3):
        arguments = ranges(rng, kv_cache_dtype="fp8", **SCALES)
        key, value = pagedkv.gather_cache(**arguments)
        launch = card.launched[-1]
        assert {name: launch[name] for name in PARAMETERS["gather_cache"]} == pointers(arguments)
        assert (key is arguments["key_out"], value is arguments["value_out"]) == (True, True)
    assert card.allocated == []
    assert len(card.loaded) == 1
    assert len(repeats._replays) == 1


def test_what_is_not_given_is_a_null_pointer(card, rng):
    arguments = without(ranges(rng), "seq_starts")
    for _ in range(2):
        pagedkv.gather_cache(**arguments)
        launch = card.launched[-1]
        assert [launch[name] for name in ("seq_starts", "k_scale", "v_scale")] == [0, 0, 0]


@pytest.mark.parametrize("given", [(), ("key_out",), ("value_out",)], ids=["none", "keys", "values"])
def test_outputs_that_are_not_given_are_new_at_every_call(card, rng, given):
    missing = [name for name in ("key_out", "value_out") if name not in given]
    arguments, results = without(ranges(rng), *missing) | {"num_tokens": sum(LENS)}, []
    for _ in range(3):
        key, value = pagedkv.gather_cache(**arguments)
        launch = card.launched[-1]
        assert (key.data.ptr, value.data.ptr) == (launch["key_out"], launch["value_out"])
        assert key.shape == value.shape == (sum(LENS), 2, 32)
        results += [array.data.ptr for name, array in (("key_out", key), ("value_out", value)) if name in missing]
    assert len(set(results)) == 3 * len(missing)


def test_the_number_of_rows_must_be_known(card, rng):
    """Reading the starts would synchronise."""
    arguments = without(ranges(rng), "key_out", "value_out")
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"^num_tokens: expected a number or outputs, since cu_seq_lens is on a dev"
        ):
            pagedkv.gather_cache(**arguments)
    assert card.launched == card.allocated == []


@pytest.mark.parametrize("name", ["block_table", "cu_seq_lens", "seq_starts"])
def test_converted_indices_are_converted_at_every_call(card, rng, name):
    arguments = ranges(rng)
    arguments[name] = arguments[name].astype(np.int64)
    seen = []
    for _ in range(2):
        pagedkv.gather_cache(**arguments)
        seen.append(card.launched[-1][name])
    assert arguments[name].data.ptr not in seen
    assert len(repeats._replays) == 0
    card.is_capturing = True
    with pytest.raises(TypeError, match=f"^{name}: expected int32 under graph capture, got int64"):
        pagedkv.gather_cache(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"cu_seq_lens": [0, 37, 37, 60]}, ValueError, "cu_seq_lens: expected at most 42"),
        ({"seq_starts": [3, -7, -1]}, ValueError, "seq_starts: expected starts of at least 0, got -1"),
        ({"seq_starts": [999, 0, 0]}, IndexError, "cu_seq_lens: expected ranges that end by token"),
        ({"block_table": [[-1] * 4] * 3}, IndexError, "block_table: expected visible ids"),
    ],
)
def test_checked_reads_what_indices_hold(card, rng, change, error, text):
    arguments = ranges(rng) | put({name: np.array(value, np.int32) for name, value in change.items()})
    with pagedkv.checked(), pytest.raises(error, match=f"^{text}"):
        pagedkv.gather_cache(**arguments)
    assert card.launched == []
    pagedkv.gather_cache(**arguments)  # elsewhere taken on trust
    card.is_capturing = True
    with pagedkv.checked(), pytest.raises(RuntimeError, match="graph capture"):
        pagedkv.gather_cache(**arguments)


@pytest.mark.parametrize("name", ["block_table", "cu_seq_lens", "seq_starts"])
def test_checked_sees_wide_indices_as_they_are(card, rng, name):
    """Cut to int32 they would be legal."""
    arguments = ranges(rng)
    arguments[name] = arguments[name].astype(np.int64)
    arguments[name].host[-1] += 2**32
    with pagedkv.checked(), pytest.raises((IndexError, ValueError), match=r"^(block_table|cu_seq_lens): "):
        pagedkv.gather_cache(**arguments)
    assert card.launched == []


def test_checked_sees_the_starts_of_no_sequences(card, rng):
    arguments = put(batch(rng, []) | {"cu_seq_lens": np.array([5], np.int32)})
    with pagedkv.checked(), pytest.raises(ValueError, match=r"^cu_seq_lens: expected starts that rise from 0"):
        pagedkv.gather_cache(**arguments, num_tokens=9)


def test_indices_are_converted_on_the_stream_of_the_caches(card, monkeypatch, rng):
    """torch's, for its caches, which CuPy's does not wait for."""
    torch = SimpleNamespace(_C=SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 9))
    monkeypatch.setitem(sys.modules, "torch", torch)
    notes, arguments = note_streams(card, card), ranges(rng)
    arguments["cu_seq_lens"] = arguments["cu_seq_lens"].astype(np.int64)
    names = ("key_cache", "value_cache", "block_table", "cu_seq_lens", "seq_starts")
    given = [arguments[name] for name in names] + [None, None, arguments["key_out"], arguments["value_out"]]
    problem = validate_gather.gather_cache(*given, num_tokens=None, dtype=None, kv_cache_dtype="auto", layout="NHD")
    problem.cache.key.framework = "torch"
    pagedkv.cuda_ops.gather_cache(problem)
    assert notes.entered == [9]
    assert notes.events == [("launch", 9, 0)]


@pytest.mark.parametrize("name", ["block_table", "cu_seq_lens", "seq_starts", "key_out", "value_out"])
def test_arrays_on_other_devices(card, rng, name):
    arguments = ranges(rng)
    arguments[name] = arguments[name].host
    with pytest.raises(TypeError, match=f"^{name}: expected an array on cuda:0 like key_cache, got cpu"):
        pagedkv.gather_cache(**arguments)
    assert card.launched == []


def test_other_options_are_other_launches(card, rng):
    arguments = without(ranges(rng, kv_cache_dtype="fp8"), "key_out", "value_out") | {"num_tokens": sum(LENS)}
    for _ in range(2):
        for k_scale, dtype in [(0.5, "float16"), (2.0, "float16"), (2.0, "float32"), (2.0, None)]:
            key, _ = pagedkv.gather_cache(**arguments, k_scale=k_scale, dtype=dtype)
            assert key.dtype.name == (dtype or "bfloat16")
            assert np.float32(k_scale).tobytes() in card.launched[-1]["params"].tobytes()
    assert len(repeats._replays) == 4


def test_nothing_to_read_is_no_launch(card, rng):
    arguments = put(batch(rng, [0, 0]))
    assert pagedkv.gather_cache(**arguments, num_tokens=0)[0].shape == (0, 2, 32)
    assert pagedkv.gather_cache(**put(batch(rng, [])), num_tokens=3)[0].shape == (3, 2, 32)
    assert card.launched == []


# ---- conversions ----------------------------------------------------------------------------------------------------


def test_every_pointer_of_a_conversion_is_in_its_place(card, rng):
    for _ in range(3):
        arguments = caches(rng)
        arguments |= {name: DeviceArray(np.zeros((3, 2, 16, 32), np.float16)) for name in ("key_out", "value_out")}
        pagedkv.convert_layout(**arguments, layout="NHD", to="HND")
        launch = card.launched[-1]
        assert {name: launch[name] for name in PARAMETERS["convert_layout"]} == pointers(arguments)
    assert card.allocated == []
    assert len(card.loaded) == 1


def test_converted_caches_are_new_at_every_call(card, rng):
    arguments, results = caches(rng), []
    for _ in range(3):
        key, value = pagedkv.convert_layout(**arguments, layout="NHD", to="packed")
        assert (key.shape, value.shape) == ((3, 2, 4, 16, 8), (3, 2, 32, 16))
        assert (key.data.ptr, value.data.ptr) == (card.launched[-1]["key_out"], card.launched[-1]["value_out"])
        results += [key.data.ptr, value.data.ptr]
    assert len(set(results)) == 6


def test_shared_memory_is_noticed_at_every_call(card, rng):
    """A call like one that went well, but for where its arrays lie."""
    arguments = caches(rng)
    outputs = {name: DeviceArray(np.zeros((3, 16, 2, 32), np.float16)) for name in ("key_out", "value_out")}
    for change in ({"key_out": arguments["value_cache"]}, {"value_out": outputs["key_out"]}):
        pagedkv.convert_layout(**arguments, **outputs, layout="NHD", to="NHD")
        count = len(card.launched)
        with pytest.raises(ValueError, match=r"^key_out and value_out: expected memory of their own"):
            pagedkv.convert_layout(**arguments, **outputs | change, layout="NHD", to="NHD")
        assert len(card.launched) == count
    assert len(repeats._replays) == 1


@pytest.mark.parametrize("name", ["key_out", "value_out"])
def test_conversions_to_other_devices(card, rng, name):
    output = {name: np.zeros((3, 2, 16, 32), np.float16)}
    with pytest.raises(TypeError, match=f"^{name}: expected an array on cuda:0 like key_cache, got cpu"):
        pagedkv.convert_layout(**caches(rng), layout="NHD", to="HND", **output)
    assert card.launched == []


def test_other_layouts_are_other_launches(card, rng):
    arguments = caches(rng)
    for _ in range(2):
        for to, shape in [("HND", (3, 2, 16, 32)), ("NHD", (3, 16, 2, 32)), ("packed", (3, 2, 32, 16))]:
            assert pagedkv.convert_layout(**arguments, layout="NHD", to=to)[1].shape == shape
    assert len(repeats._replays) == 3


def test_no_blocks_no_launch(card):
    empty = {name: DeviceArray(np.zeros((0, 16, 2, 32), np.float16)) for name in ("key_cache", "value_cache")}
    assert pagedkv.convert_layout(**empty, layout="NHD", to="HND")[0].shape == (0, 2, 16, 32)
    assert card.launched == []
