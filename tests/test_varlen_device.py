"""What only a device shows of varlen reads and of merges: graph capture and replay, memory, repeated calls, streams."""

import cases
import ml_dtypes
import numpy as np
import oracle
import pytest
import test_cascade
from far_blocks import BLOCK_STRIDE, blocks_far_apart, sparse_bytes
from graphs import LIVE, LONG, NUM_SEQS, SHORT, assert_results, captured, replay_in_turn
from test_merge_states import states
from test_varlen_attention_strides import assert_same_result

import pagedkv

pytestmark = pytest.mark.gpu

# Query tokens of each sequence when captured and of those that live in the replay, and the hint.
BATCHES = {
    "decode": (1, [1, 1, 1], 1),
    "decode without a hint": (1, [1, 1, 1], None),
    "prefill": (16, [20, 1, 45], None),
    "prefill with a hint": (16, [20, 1, 45], 45),
}
FORMATS = {
    "float16": {},
    "bfloat16 over fp8": {"dtype": ml_dtypes.bfloat16, "kv_cache_dtype": "fp8"},
    "float32": {"dtype": np.float32},
}
SPLITS = pytest.mark.parametrize("num_splits", [0, 3])
LENS = pytest.mark.parametrize("query_lens", [[1, 1], [20, 9]], ids=["decode", "prefill"])


def batch(cupy, rng, query_lens, seq_lens, num_tokens=None, **sizes):
    """Arguments whose shapes do not depend on the lengths, as in an engine's own buffers; padding is NaN."""
    sizes = {"num_heads": 16, "num_kv_heads": 2} | sizes
    arguments = cases.varlen(rng, query_lens, seq_lens, **sizes)
    wide = {"q": (num_tokens or sum(query_lens),), "k": (4 * LONG // 16,), "v": (4 * LONG // 16,)}
    for name, shape in wide.items():
        array = arguments[name]
        arguments[name] = cases.poisoned((*shape, *array.shape[1:]), array.dtype)
        arguments[name][: len(array)] = array
    table = np.full((len(seq_lens), LONG // 16), -1, np.int32)
    given = arguments["block_table"][:, : table.shape[1]]
    table[:, : given.shape[1]] = given
    return on_device(cupy, {**arguments, "block_table": table})


def on_device(cupy, arguments):
    return {name: cupy.asarray(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}


def on_host(cupy, arguments):
    return {name: a.get() if isinstance(a, cupy.ndarray) else a for name, a in arguments.items()}


def overwrite(cupy, arguments, fresh):
    """What the arrays hold becomes what the fresh ones hold."""
    for name, array in arguments.items():
        if isinstance(array, cupy.ndarray):
            array[...] = fresh[name]


def among_dead(numbers):
    """A number for each sequence that lives, 0 for the others."""
    spread = np.zeros(NUM_SEQS, int)
    spread[LIVE] = numbers
    return spread.tolist()


def buffers(cupy, arguments, num_splits=0):
    """Outputs full of NaN and a workspace full of garbage."""
    num_tokens, num_heads, head_size = arguments["q"].shape
    sizes = {"num_tokens": num_tokens, "num_heads": num_heads, "head_size": head_size, "max_seq_len": LONG}
    nbytes = pagedkv.workspace_nbytes("flash_attn_varlen_func", **sizes, num_splits=num_splits)
    given = {"out": cupy.empty_like(arguments["q"]), "lse_out": cupy.empty((num_heads, num_tokens), np.float32)}
    given["workspace"] = cupy.empty(nbytes, np.uint8)
    for buffer in given.values():
        buffer.view(np.uint8)[...] = 0xFF
    return given


def call(arguments, **options):
    return pagedkv.flash_attn_varlen_func(**arguments, **options, return_softmax_lse=True)


def eager(arguments, **options):
    out, lse = call(arguments, **options)
    return out.get(), lse.get()


def assert_right(cupy, state, arguments, num_tokens=None):
    """The first tokens' out and LSE, or all, against the oracle."""
    host = on_host(cupy, arguments)
    state = state[0][:num_tokens], state[1][:, :num_tokens]
    cases.assert_state_close(state, oracle.varlen_attention, host | {"q": host["q"][:num_tokens]})


# ---- graphs ---------------------------------------------------------------------------------------------------------


@SPLITS
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("kind", BATCHES)
def test_graph_replay_with_other_lengths(cupy, rng, kind, formats, num_splits):
    """Captured with eight sequences at 128 tokens; replayed with three live ones at 4,096 over a dirty workspace, the
    others without queries. Rows past the last query keep what they held."""
    each, live, hint = BATCHES[kind]
    num_tokens, num_live = NUM_SEQS * each, sum(live)
    options = {"causal": True, "max_seqlen_q": hint, "num_splits": num_splits}
    arguments = batch(cupy, rng, [each] * NUM_SEQS, [SHORT] * NUM_SEQS, **FORMATS[formats])
    given = buffers(cupy, arguments, num_splits)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    graph = captured(cupy, stream, lambda: pagedkv.flash_attn_varlen_func(**arguments, **given, **options))
    stream.synchronize()
    fresh = batch(cupy, rng, among_dead(live), among_dead([LONG] * len(LIVE)), num_tokens, **FORMATS[formats])
    expected = eager(fresh, **options)
    assert_right(cupy, expected, fresh | options, num_live)
    for garbage in (0x00, 0x7F, 0xFF):
        overwrite(cupy, arguments, fresh)
        for buffer in given.values():
            buffer.view(np.uint8)[...] = garbage
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_results(given, expected, num_live)
        for padding in (given["out"].get()[num_live:], given["lse_out"].get()[:, num_live:]):
            assert (np.ascontiguousarray(padding).view(np.uint8) == garbage).all()


@SPLITS
def test_graphs_replayed_in_turn(cupy, rng, num_splits):
    """Graphs of different sizes captured on one stream, decode among them."""
    stream, replays = cupy.cuda.Stream(non_blocking=True), []
    for query_lens, seq_lens in (([1] * 8, [SHORT] * 8), ([40, 0, 7], [LONG, 0, 700]), ([1, 1], [LONG, 33])):
        arguments = batch(cupy, rng, query_lens, seq_lens)
        options = {"causal": True, "num_splits": num_splits, "max_seqlen_q": max(query_lens)}
        given = buffers(cupy, arguments, num_splits)
        cupy.cuda.Device().synchronize()
        graph = captured(
            cupy, stream, lambda a=arguments, g=given, o=options: pagedkv.flash_attn_varlen_func(**a, **g, **o)
        )
        replays.append((graph, arguments, given, eager(arguments, **options)))
    replay_in_turn(stream, replays)


def test_capture_of_first_calls_after_warmup(cupy, rng, monkeypatch):
    """Sizes that no other test has: nothing is compiled, loaded or allocated under capture."""
    from pagedkv import counters, kernels

    monkeypatch.setattr(counters, "_reserves", {})
    calls = []
    for query_lens, options in (([1, 1], {"max_seqlen_q": 1}), ([30, 2], {}), ([30, 2], {"num_splits": 2})):
        arguments = batch(cupy, rng, query_lens, [40, 500], head_size=88)
        calls.append((arguments, buffers(cupy, arguments, options.get("num_splits", 0)), options))
    parts = on_device(cupy, states(rng, head_size=88))
    merged = {"out": cupy.empty_like(parts["prefix_output"]), "lse_out": cupy.empty_like(parts["prefix_lse"])}
    pagedkv.warmup("float16", 16, 2, 88, 16, layout="NHD")
    loaded = kernels.load.cache_info().misses
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream, cupy.cuda.using_allocator(refuse):
        stream.begin_capture()
        for arguments, given, options in calls:
            pagedkv.flash_attn_varlen_func(**arguments, **given, **options)
        pagedkv.merge_attn_states(**parts, **merged)
        graph = stream.end_capture()
    assert kernels.load.cache_info().misses == loaded
    graph.launch(stream)
    stream.synchronize()
    for arguments, given, options in calls:
        assert_results(given, eager(arguments, **options))
    assert_results(merged, [array.get() for array in pagedkv.merge_attn_states(**parts)])


@pytest.mark.parametrize("name", ["block_table", "seqused_k", "cu_seqlens_q"])
def test_capture_refuses_what_needs_the_host(cupy, rng, name):
    """Indices that are not int32 are converted, into memory that a graph would not keep."""
    arguments = batch(cupy, rng, [3, 1], [40, 50])
    given = buffers(cupy, arguments)
    wide = arguments | {name: arguments[name].astype(np.int64)}
    out, lse = call(wide)
    assert_results({"out": out, "lse_out": lse}, eager(arguments))
    pagedkv.flash_attn_varlen_func(**arguments, **given)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(TypeError, match=f"^{name}: expected int32 under graph capture, got int64"):
                pagedkv.flash_attn_varlen_func(**wide, **given)
            with pagedkv.checked(), pytest.raises(RuntimeError, match="graph capture"):
                pagedkv.flash_attn_varlen_func(**arguments, **given)
        finally:
            stream.end_capture()


@pytest.mark.parametrize("dtype", cases.FLOATS.values(), ids=cases.FLOATS)
def test_graph_replay_of_a_merge(cupy, rng, dtype):
    """Empty sides lie elsewhere in the replay."""
    first, second = states(rng, dtype=dtype), states(rng, dtype=dtype)
    first["prefix_lse"][:, :3], first["suffix_lse"][:, 2:] = -np.inf, np.inf
    second["prefix_lse"][:, 4:] = -np.inf
    second["prefix_output"][4:] = np.nan
    arguments = on_device(cupy, first)
    given = {"out": cupy.empty_like(arguments["prefix_output"]), "lse_out": cupy.empty_like(arguments["prefix_lse"])}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    graph = captured(cupy, stream, lambda: pagedkv.merge_attn_states(**arguments, **given))
    stream.synchronize()
    overwrite(cupy, arguments, on_device(cupy, second))
    for buffer in given.values():
        buffer.view(np.uint8)[...] = 0xFF
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    cases.assert_state_close((given["out"].get(), given["lse_out"].get()), oracle.merge_states, second)
    assert_results(given, [array.get() for array in pagedkv.merge_attn_states(**on_device(cupy, second))])


# ---- memory ---------------------------------------------------------------------------------------------------------


def refuse(nbytes):
    raise AssertionError(f"{nbytes} bytes are allocated")


@SPLITS
@LENS
def test_calls_that_are_given_all_memory_allocate_none(cupy, rng, query_lens, num_splits):
    arguments = batch(cupy, rng, query_lens, [70, 300])
    options = {"num_splits": num_splits, "max_seqlen_q": max(query_lens)}
    given = buffers(cupy, arguments, num_splits)
    expected = eager(arguments, **options)
    pagedkv.flash_attn_varlen_func(**arguments, **given, **options)
    given["out"][...], given["lse_out"][...] = 0, 0
    with cupy.cuda.using_allocator(refuse):
        pagedkv.flash_attn_varlen_func(**arguments, **given, **options)
    assert_results(given, expected)


def test_merges_that_are_given_all_memory_allocate_none(cupy, rng):
    arguments = on_device(cupy, states(rng))
    given = {"out": cupy.empty_like(arguments["prefix_output"]), "lse_out": cupy.empty_like(arguments["prefix_lse"])}
    pagedkv.merge_attn_states(**arguments, **given)
    with cupy.cuda.using_allocator(refuse):
        pagedkv.merge_attn_states(**arguments, **given)


@SPLITS
@LENS
def test_repeated_calls_return_new_outputs(cupy, rng, query_lens, num_splits):
    """A workspace that is not given is new as well: nothing of one call is left for the next to find."""
    arguments = batch(cupy, rng, query_lens, [70, 300])
    results = [call(arguments, num_splits=num_splits, max_seqlen_q=max(query_lens)) for _ in range(3)]
    assert len({array.data.ptr for pair in results for array in pair}) == 6
    for out, lse in results[1:]:
        cases.assert_same_bits(out.get(), results[0][0].get())
        cases.assert_same_bits(lse.get(), results[0][1].get())


def test_repeated_merges_return_new_outputs(cupy, rng):
    arguments = on_device(cupy, states(rng))
    results = [pagedkv.merge_attn_states(**arguments) for _ in range(3)]
    assert len({array.data.ptr for pair in results for array in pair}) == 6
    for out, lse in results[1:]:
        cases.assert_same_bits(out.get(), results[0][0].get())
        cases.assert_same_bits(lse.get(), results[0][1].get())


# ---- repeated calls, streams ----------------------------------------------------------------------------------------


@LENS
def test_repeated_calls_see_what_changed(cupy, rng, query_lens):
    """Equal shapes again, with another option, alignment or output: each is a launch of its own."""
    arguments = batch(cupy, rng, [*query_lens, 0], [70, 300, 5]) | {"max_seqlen_q": max(query_lens)}
    shifted = cupy.zeros(arguments["q"].size + 1, np.float16)[1:].reshape(arguments["q"].shape)
    shifted[...] = arguments["q"]
    changes = [{}, {"causal": True}, {"softmax_scale": 0.5}, {"window_size": (20, 3)}, {"softcap": 2.0}]
    changes += [{"num_splits": 3}, {"max_seqlen_q": None}, {"max_seqlen_k": 300}]
    for _ in range(2):
        for change in changes:
            assert_right(cupy, eager(arguments | change), arguments | change)
        given = buffers(cupy, arguments)
        pagedkv.flash_attn_varlen_func(**arguments | {"q": shifted}, **given)
        assert_right(cupy, (given["out"].get(), given["lse_out"].get()), arguments)


@LENS
def test_descales_of_a_repeated_call(cupy, rng, query_lens):
    """Their addresses reach the kernels anew, v's also the one that merges splits."""
    fp8 = {"kv_cache_dtype": "fp8", "k_descale": np.array([0.02, 0.07], np.float32)}
    arguments = batch(cupy, rng, query_lens, [70, 300], **fp8, v_descale=np.array([0.3, 0.05], np.float32))
    for num_splits in (0, 3) * 2:
        options = {"num_splits": num_splits, "max_seqlen_q": max(query_lens)}
        for factor in (1, 2):
            change = {name: arguments[name] * np.float32(factor) for name in ("k_descale", "v_descale")}
            assert_right(cupy, eager(arguments | change, **options), arguments | change)


@SPLITS
@LENS
def test_calls_follow_the_current_stream(cupy, rng, query_lens, num_splits, queue_slow_work):
    """A call queued behind slow work on a stream sees what that work leaves."""
    options = {"causal": True, "num_splits": num_splits, "max_seqlen_q": max(query_lens)}
    arguments, fresh = batch(cupy, rng, query_lens, [70, 300]), batch(cupy, rng, query_lens, [300, 70])
    expected = eager(fresh, **options)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        queue_slow_work()
        overwrite(cupy, arguments, fresh)
        out, lse = call(arguments, **options)
    stream.synchronize()
    assert_results({"out": out, "lse_out": lse}, expected)


def test_merges_follow_the_current_stream(cupy, rng, queue_slow_work):
    arguments, fresh = (on_device(cupy, states(rng)) for _ in range(2))
    expected = [array.get() for array in pagedkv.merge_attn_states(**fresh)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        queue_slow_work()
        overwrite(cupy, arguments, fresh)
        out, lse = pagedkv.merge_attn_states(**arguments)
    stream.synchronize()
    assert_results({"out": out, "lse_out": lse}, expected)


@SPLITS
def test_calls_on_several_streams(cupy, rng, num_splits):
    """Back to back, each with outputs and a workspace of its own; no call finds another's states."""
    lens = [([1] * 8, [SHORT] * 8), ([40, 3], [LONG, 700]), ([1, 1], [LONG, 33])]
    calls = [(cupy.cuda.Stream(non_blocking=True), batch(cupy, rng, *each), max(each[0])) for each in lens]
    expected = [eager(arguments, num_splits=num_splits, max_seqlen_q=hint) for _, arguments, hint in calls]
    cupy.cuda.Device().synchronize()
    results = []
    for _ in range(20):
        for (stream, arguments, hint), state in zip(calls, expected, strict=True):
            with stream:
                results.append((call(arguments, num_splits=num_splits, max_seqlen_q=hint), state))
    cupy.cuda.Device().synchronize()
    for (out, lse), state in results:
        assert_results({"out": out, "lse_out": lse}, state)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_cascade_neither_waits_nor_leaves_the_stream(cupy, rng, dtype, queue_slow_work):
    """It returns while slow work is still to come before it, and sees what that work leaves."""
    arguments, fresh = (test_cascade.batch(rng, dtype=dtype) for _ in range(2))
    arguments, fresh = on_device(cupy, arguments), on_device(cupy, fresh)
    options = {"s_aux": cupy.asarray(test_cascade.SINKS), "return_softmax_lse": True}
    expected = [array.get() for array in pagedkv.cascade_attention(**fresh, **options)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        pagedkv.cascade_attention(**arguments, **options)  # memory of this stream, to be used again
        stream.synchronize()
        queue_slow_work()
        overwrite(cupy, arguments, fresh)
        out, lse = pagedkv.cascade_attention(**arguments, **options)
        assert not stream.done
    stream.synchronize()
    assert_results({"out": out, "lse_out": lse}, expected)


def test_calls_on_a_device_that_is_not_current(cupy, rng):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one device")
    expected = {}
    for device in (0, 1):
        with cupy.cuda.Device(device):
            arguments = on_device(cupy, test_cascade.batch(np.random.default_rng(0)))
            parts = on_device(cupy, states(np.random.default_rng(1)))
        for _ in range(2):
            results = [*call(test_cascade.whole(arguments)), *call(test_cascade.whole(arguments), num_splits=3)]
            results += [*pagedkv.cascade_attention(**arguments, return_softmax_lse=True)]
            results += [*pagedkv.merge_attn_states(**parts)]
            cupy.cuda.Device(device).synchronize()
            assert {array.device.id for array in results} == {device}
            for index, array in enumerate(results):
                cases.assert_same_bits(array.get(), expected.setdefault(index, array.get()))


# ---- checks, addresses ----------------------------------------------------------------------------------------------


def changed(index, value):
    """Of an array: the same with another value there."""

    def change(array):
        array = array.copy()
        array[index] = value
        return array

    return change


# what is wrong -> (the argument that its error names, what makes it wrong, the error)
MISTAKES = {
    "a visible block past the pool": ("block_table", changed((0, 1), 10**6), IndexError),
    "a visible block before the pool": ("block_table", changed((1, 0), -1), IndexError),
    "a length past the table": ("seqused_k", changed(0, LONG + 1), IndexError),
    "a length below zero": ("seqused_k", changed(1, -1), ValueError),
    "starts that fall": ("cu_seqlens_q", changed(1, 5), ValueError),
    "starts that begin after the first row": ("cu_seqlens_q", changed(0, 1), ValueError),
    "starts past the queries": ("cu_seqlens_q", changed(3, 99), ValueError),
    "a hint below a count": ("max_seqlen_q", lambda _: 2, ValueError),
    "a hint below a length": ("max_seqlen_k", lambda _: 39, ValueError),
    "a scale of zero": ("v_descale", changed(1, 0), ValueError),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_checked_finds_what_arrays_hold(cupy, rng, mistake):
    name, wrong, error = MISTAKES[mistake]
    scales = {"k_descale": np.full(2, 0.04, np.float32), "v_descale": np.full(2, 0.11, np.float32)}
    arguments = batch(cupy, rng, [3, 1, 0], [40, 17, 9], kv_cache_dtype="fp8", **scales)
    out = cupy.full_like(arguments["q"], 7)
    expected = eager(arguments)[0]
    with pagedkv.checked():
        with pytest.raises(error, match=f"^{name}: "):
            pagedkv.flash_attn_varlen_func(**arguments | {name: wrong(arguments.get(name)), "out": out})
        assert (out == 7).all()
        pagedkv.flash_attn_varlen_func(**arguments, out=out)
    cases.assert_same_bits(out.get(), expected)


@pytest.mark.parametrize("read_backend", ["cuda"], indirect=True)
@LENS
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_offsets_past_two_and_four_gigabytes(read_backend, rng, layout, query_lens):
    """What an offset that lost its high bits would find is zero."""
    sizes = {"block_size": 32, "head_size": 32, "kv_cache_dtype": "fp8", "layout": layout}
    arguments = cases.varlen(rng, query_lens, [30, 17], **sizes) | {"max_seqlen_q": max(query_lens)}
    used, table = arguments["block_table"][:, 0], arguments["block_table"].copy()
    table[:, 0] = [2, 3]
    views = {"block_table": read_backend.put(table)}
    for name in "kv":
        blocks = arguments[name][used]
        buffer = sparse_bytes(read_backend, 3 * BLOCK_STRIDE + blocks[0].nbytes)
        views[name] = blocks_far_apart(buffer, (4, *blocks.shape[1:]))
        views[name][2:] = read_backend.put(blocks)
    assert_same_result(read_backend, arguments, **views)


# ---- the sanitizer --------------------------------------------------------------------------------------------------

PREFILL, DECODE = ([20, 0, 7], [33, 5, 40]), ([1, 1, 1], [300, 0, 33])
SMALL = {
    "prefill bfloat16": (PREFILL, {"dtype": ml_dtypes.bfloat16}, {"causal": True}),
    "prefill fp8": (PREFILL, {"kv_cache_dtype": "fp8"}, {"causal": True}),
    "prefill float32": (PREFILL, {"dtype": np.float32}, {"causal": True}),
    "prefill large heads": (PREFILL, {"head_size": 256}, {}),
    "prefill splits": (PREFILL, {"dtype": ml_dtypes.bfloat16}, {"num_splits": 2}),
    "prefill fp8 splits": (PREFILL, {"kv_cache_dtype": "fp8"}, {"num_splits": 2}),
    "decode bfloat16": (DECODE, {"dtype": ml_dtypes.bfloat16}, {"max_seqlen_q": 1}),
    "decode fp8": (DECODE, {"kv_cache_dtype": "fp8"}, {"max_seqlen_q": 1}),
    "decode float32": (DECODE, {"dtype": np.float32}, {"max_seqlen_q": 1}),
    "decode splits": (DECODE, {}, {"max_seqlen_q": 1, "num_splits": 2}),
}


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", SMALL)
def test_small_enough_for_the_sanitizer(cupy, rng, kind):
    lens, formats, options = SMALL[kind]
    arguments = cases.varlen(rng, *lens, **formats)
    state = eager(on_device(cupy, arguments), **options)
    cases.assert_state_close(state, oracle.varlen_attention, arguments | options)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", cases.FLOATS.values(), ids=cases.FLOATS)
def test_merges_small_enough_for_the_sanitizer(cupy, rng, dtype):
    arguments = states(rng, dtype=dtype)
    merged = pagedkv.merge_attn_states(**on_device(cupy, arguments))
    cases.assert_state_close([array.get() for array in merged], oracle.merge_states, arguments)
