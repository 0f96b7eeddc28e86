"""What the CUDA backend does around a decode launch, with stand-ins for CuPy and the kernel: no GPU is needed."""

import inspect
from concurrent.futures import ThreadPoolExecutor

import cases
import numpy as np
import pytest
from stand_ins import DECODE, DeviceArray, Stream, pointers, put, stand_in

import pagedkv
from pagedkv import ops, repeats

SIZES = {"num_tokens": 3, "num_heads": 4, "head_size": 64, "max_seq_len": 96}


@pytest.fixture
def card(monkeypatch):
    yield from stand_in(monkeypatch)


def on_card(rng, **given):
    """Arguments of a call over three sequences, NumPy arrays among those given put on the card."""
    return put(cases.decode(rng, [5, 0, 60]) | given)


def call(card, op, arguments, **options):
    """What the op returns, the launch that it made, and what it allocated for it besides counters."""
    launches, allocations = len(card.launched), len(card.allocated)
    result = getattr(pagedkv, op)(**arguments, **options)
    (launch,) = card.launched[launches:]
    return result, launch, [array for array in card.allocated[allocations:] if array.dtype != np.int32]


def given_buffers(op):
    buffers = {"out": np.empty((3, 4, 64), np.float16), "lse_out": np.empty((4, 3), np.float32)}
    if op == "paged_attention_v2":
        buffers["workspace"] = np.empty(pagedkv.workspace_nbytes(op, **SIZES), np.uint8)
    return buffers


OPTIONAL = {
    "alibi_slopes": np.zeros(4, np.float32),
    "sinks": np.zeros(4, np.float32),
    "k_scale": np.full(2, 0.5, np.float32),
    "v_scale": np.full(2, 0.25, np.float32),
}


@pytest.mark.parametrize("op", ["paged_attention_v1", "paged_attention_v2"])
def test_every_pointer_is_in_its_place_at_first_and_again(card, rng, op):
    """Three calls of one form, each with arrays of its own: planned once, and nothing is allocated but counters."""
    for _ in range(3):
        fp8 = cases.decode(rng, [5, 0, 60], kv_cache_dtype="fp8")
        arguments = on_card(rng, **{**fp8, **OPTIONAL, **given_buffers(op)})
        out, launch, allocated = call(card, op, arguments)
        assert {name: launch[name] for name in pointers(arguments)} == pointers(arguments)
        assert out is arguments["out"]
        assert allocated == []
    assert len(card.loaded) == 1
    instance, device, shared_bytes = card.loaded[0]
    assert (instance.kernel, device, shared_bytes) == ("paged_attention", 0, launch["shared_bytes"])
    assert shared_bytes > 0
    assert launch["threads"] == (32 * instance.arguments[5],)


@pytest.mark.parametrize("op", ["paged_attention_v1", "paged_attention_v2"])
def test_what_is_not_there_is_null(card, rng, op):
    for _ in range(2):
        _, launch, _ = call(card, op, on_card(rng))
        nulls = {name for name in DECODE if launch[name] == 0}
        assert nulls == {"alibi_slopes", "sinks", "k_scale", "v_scale", "lse_out"} | (
            {"workspace", "counters"} if op == "paged_attention_v1" else set()
        )


@pytest.mark.parametrize("op", ["paged_attention_v1", "paged_attention_v2"])
def test_outputs_that_are_not_given_are_new_at_every_call(card, rng, op):
    arguments, results = on_card(rng), []
    for _ in range(3):
        (out, lse), launch, _ = call(card, op, arguments, return_lse=True)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((3, 4, 64), np.float16, (4, 3), np.float32)
        assert (out.data.ptr, lse.data.ptr) == (launch["out"], launch["lse_out"])
        results += [out, lse]
    assert len({array.data.ptr for array in results}) == 6


@pytest.mark.parametrize("given", ["out", "lse_out"])
def test_one_output_given_and_one_not(card, rng, given):
    arguments = on_card(rng, **{given: given_buffers("paged_attention_v2")[given]})
    for _ in range(2):
        (out, lse), launch, _ = call(card, "paged_attention_v2", arguments, return_lse=True)
        assert {"out": out, "lse_out": lse}[given] is arguments[given]
        assert (out.data.ptr, lse.data.ptr) == (launch["out"], launch["lse_out"])


@pytest.mark.parametrize(("options", "states"), [({}, 2 * 6 * 8), ({"partition_size": 32}, 3 * 4 * 3)])
def test_a_workspace_is_allocated_where_none_is_given(card, rng, options, states):
    """Two states of 8 heads for each of six CTAs, or one of each head for each partition of a table of 96 tokens."""
    for _ in range(2):
        _, launch, allocated = call(card, "paged_attention_v2", on_card(rng), **options)
        (memory,) = [array for array in allocated if array.dtype == np.uint8]
        assert launch["workspace"] == memory.data.ptr
        assert memory.size == states * (64 + 2) * 4


@pytest.mark.parametrize("name", ["block_tables", "seq_lens"])
def test_indices_of_another_width_are_converted_at_every_call(card, rng, name):
    arguments = on_card(rng)
    arguments[name] = arguments[name].astype(np.int64)
    _, launch, _ = call(card, "paged_attention_v2", arguments)
    assert launch[name] != arguments[name].data.ptr
    assert repeats._replays == {}
    card.is_capturing = True
    with pytest.raises(TypeError, match=f"{name}: expected int32 under graph capture, got int64"):
        pagedkv.paged_attention_v2(**arguments)


def test_checked_reads_what_indices_and_scales_hold(card, rng):
    fp8 = cases.decode(rng, [5, 0, 60], kv_cache_dtype="fp8")
    arguments = on_card(rng, **{**fp8, **OPTIONAL})
    wrong = {
        "block_tables": (np.full_like(fp8["block_tables"], 99), IndexError),
        "seq_lens": (np.array([5, -1, 60], np.int32), ValueError),
        "k_scale": (np.array([0.5, -1], np.float32), ValueError),
    }
    with pagedkv.checked():
        call(card, "paged_attention_v2", arguments)
        for name, (array, error) in wrong.items():
            launches = len(card.launched)
            with pytest.raises(error, match=f"^{name}: "):
                pagedkv.paged_attention_v2(**arguments | {name: DeviceArray(array)})
            assert len(card.launched) == launches
        card.is_capturing = True
        with pytest.raises(RuntimeError, match="checked\\(\\) reads the device"):
            pagedkv.paged_attention_v2(**arguments)


@pytest.mark.parametrize("name", ["block_tables", "seq_lens"])
def test_checked_sees_wide_indices_as_they_are(card, rng, name):
    """Cut to int32 they would be legal."""
    arguments = on_card(rng)
    arguments[name] = arguments[name].astype(np.int64)
    arguments[name].host[-1] += 2**32
    with pagedkv.checked(), pytest.raises(IndexError, match=f"^{name}: "):
        pagedkv.paged_attention_v1(**arguments)
    assert card.launched == []


@pytest.mark.parametrize("op", ["paged_attention_v1", "paged_attention_v2"])
def test_no_sequences_no_launch(card, rng, op):
    arguments = cases.decode(rng, [])
    out, lse = getattr(pagedkv, op)(**on_card(rng, **arguments), return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 64), (4, 0))
    assert card.launched == []


# ---- counters -------------------------------------------------------------------------------------------------------


@pytest.fixture
def counters_for(card):
    return pagedkv.counters.counters_for


def counters_at(card, address, count):
    """The zeros that an address stands for, and how many of its buffer lie before it."""
    for buffer in card.allocated:
        first = (address - buffer.data.ptr) // 4
        if first >= 0 and first + count <= buffer.size:
            assert not buffer.host.any()
            return buffer, first
    raise AssertionError("an address outside every buffer")


def test_calls_on_a_stream_share_counters(card, counters_for):
    first = counters_for(card.stream, 0, 10)
    assert counters_for(card.stream, 0, 4000) == first
    assert counters_at(card, first, 4000)[1] == 0
    assert counters_for(Stream(2), 0, 10) != first
    assert counters_for(card.stream, 1, 10) != first


@pytest.mark.parametrize(("ptr", "is_shared"), [(0, True), (2, False)], ids=["legacy", "per_thread"])
def test_default_streams_of_two_threads(card, counters_for, ptr, is_shared):
    """All threads call a default stream of their own by the same handle."""
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(counters_for, Stream(ptr), 0, 10).result()
    assert (counters_for(Stream(ptr), 0, 10) == other) == is_shared


def test_more_counters_than_before(card, counters_for):
    few, many = counters_for(card.stream, 0, 10), counters_for(card.stream, 0, 100_000)
    assert few != many
    assert counters_at(card, many, 100_000)[1] == 0
    assert counters_for(card.stream, 0, 10) == many


def test_captured_calls_share_no_counters(card, counters_for):
    """Neither with each other nor with eager calls, on whatever stream they were captured."""
    eager = counters_at(card, counters_for(card.stream, 0, 50), 50)[0]
    card.is_capturing = True
    taken = set()
    for stream in (card.stream, card.stream, Stream(2)):
        buffer, first = counters_at(card, counters_for(stream, 0, 50), 50)
        assert buffer is not eager
        assert not taken & set(range(first, first + 50))
        taken |= set(range(first, first + 50))


def test_capture_before_any_call_has_no_counters(card, counters_for):
    card.is_capturing = True
    with pytest.raises(RuntimeError, match="under graph capture: call the op or warmup before"):
        counters_for(card.stream, 0, 1)


def test_a_reserve_that_is_half_taken_is_renewed_by_an_eager_call(card, counters_for):
    reserve = pagedkv.counters.RESERVE
    counters_for(card.stream, 0, 1)
    card.is_capturing = True
    captured = counters_for(card.stream, 0, reserve // 2 + 1)
    with pytest.raises(RuntimeError, match="under graph capture"):
        counters_for(card.stream, 0, reserve // 2)
    card.is_capturing = False
    counters_for(card.stream, 0, 1)
    card.is_capturing = True
    later = counters_for(card.stream, 0, reserve // 2)
    assert counters_at(card, later, reserve // 2)[0] is not counters_at(card, captured, 1)[0]
    buffers = [each.buffer for each in pagedkv.counters._reserves.values()] + pagedkv.counters._reserves[0].full
    assert counters_at(card, captured, 1)[0] in buffers  # kept for the graph


def test_v2_takes_counters_of_its_stream_at_every_call(card, rng):
    arguments = on_card(rng)
    seen = []
    for stream in (card.stream, Stream(2), card.stream):
        card.stream = stream
        seen.append(call(card, "paged_attention_v2", arguments)[1]["counters"])
    assert seen[0] == seen[2] != seen[1]
    assert all(counters_at(card, address, 3 * 2)[1] == 0 for address in seen)


def test_after_warmup_a_first_call_can_be_captured(card, rng):
    (name,) = (name for name in pagedkv.warmup("float16", 4, 2, 64, 16) if name.startswith("paged_attention<"))
    warm = set(card.loaded)
    card.is_capturing = True
    for op in ("paged_attention_v1", "paged_attention_v2"):
        call(card, op, on_card(rng, **given_buffers(op)))
        assert str(card.loaded[-1][0]) == name and card.loaded[-1] in warm


def test_every_argument_of_a_read_is_part_of_what_repeats():
    """As an array, by form and address, or as an option, by value: none is forgotten."""
    forms = {pagedkv.paged_attention_v1: ops.DECODE, pagedkv.paged_attention_v2: ops.DECODE}
    for op, form in (forms | {pagedkv.flash_attn_varlen_func: ops.VARLEN}).items():
        assert set(inspect.signature(op).parameters) <= {*form.arrays, *form.options}
