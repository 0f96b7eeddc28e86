"""What only a device shows of decode: graph capture and replay, counters, workspaces, repeated calls, streams."""

import cases
import numpy as np
import oracle
import pytest
from graphs import LIVE, LONG, NUM_SEQS, SHORT, assert_results, captured, replay_in_turn

import pagedkv

pytestmark = pytest.mark.gpu

WAYS = {
    "v1": ("paged_attention_v1", {}),
    "v2": ("paged_attention_v2", {}),
    "v2 by partitions": ("paged_attention_v2", {"partition_size": 256}),
}


@pytest.fixture(params=WAYS)
def way(request):
    """An op and its options."""
    return WAYS[request.param]


def batch(cupy, rng, lens, table_width=LONG // 16, num_blocks=4 * LONG // 16, head_size=64):
    """Arguments whose shapes do not depend on the lengths, as in an engine's own buffers."""
    arguments = cases.decode(rng, lens, num_heads=16, num_kv_heads=2, head_size=head_size)
    for name in ("key_cache", "value_cache"):
        cache = cases.poisoned((num_blocks, *arguments[name].shape[1:]), np.float16)
        cache[: len(arguments[name])] = arguments[name]
        arguments[name] = cache
    tables = np.full((len(lens), table_width), -1, np.int32)
    tables[:, : arguments["block_tables"].shape[1]] = arguments["block_tables"][:, :table_width]
    return {name: cupy.asarray(array) for name, array in {**arguments, "block_tables": tables}.items()}


def buffers(cupy, arguments, op, options):
    """Outputs full of NaN and a workspace full of garbage."""
    num_seqs, num_heads, head_size = arguments["query"].shape
    outs = {"out": cupy.full_like(arguments["query"], np.nan)}
    outs["lse_out"] = cupy.full((num_heads, num_seqs), np.nan, np.float32)
    if op == "paged_attention_v1":
        return outs
    sizes = {"num_tokens": num_seqs, "num_heads": num_heads, "head_size": head_size, "max_seq_len": LONG}
    return outs | {"workspace": cupy.full(pagedkv.workspace_nbytes(op, **sizes, **options), 0xFF, np.uint8)}


def eager(op, arguments, options):
    out, lse = getattr(pagedkv, op)(**arguments, **options, return_lse=True)
    return out.get(), lse.get()


def test_graph_replay_with_other_lengths(cupy, rng, way):
    """Captured with eight sequences at 128 tokens; replayed with three live ones at 4,096 over a dirty workspace."""
    op, options = way
    arguments = batch(cupy, rng, [SHORT] * NUM_SEQS)
    given = buffers(cupy, arguments, op, options)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    graph = captured(cupy, stream, lambda: getattr(pagedkv, op)(**arguments, **given, **options))
    stream.synchronize()
    fresh = batch(cupy, rng, [LONG if seq in LIVE else 0 for seq in range(NUM_SEQS)])
    for garbage in (0x00, 0x7F, 0xFF):
        for name, buffer in arguments.items():
            buffer[...] = fresh[name]
        for buffer in given.values():
            buffer.view(np.uint8)[...] = garbage
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_results(given, eager(op, fresh, options))


def test_graphs_replayed_in_turn(cupy, rng, way):
    """Two graphs captured on one stream, of different sizes; each has counters of its own and leaves them at zero."""
    op, options = way
    stream, replays = cupy.cuda.Stream(non_blocking=True), []
    for lens in ([SHORT] * NUM_SEQS, [LONG, 0, 700]):
        arguments = batch(cupy, rng, lens)
        given = buffers(cupy, arguments, op, options)
        cupy.cuda.Device().synchronize()
        graph = captured(cupy, stream, lambda a=arguments, g=given: getattr(pagedkv, op)(**a, **g, **options))
        replays.append((graph, arguments, given, eager(op, arguments, options)))
    replay_in_turn(stream, replays)


def test_a_graph_beside_eager_calls_on_another_stream(cupy, rng):
    """Their units are cut as well, and neither waits for the other's arrivals."""
    arguments, others = batch(cupy, rng, [LONG, 900, 33]), batch(cupy, rng, [LONG] * 2)
    expected, expected_of_others = (eager("paged_attention_v2", each, {}) for each in (arguments, others))
    given = buffers(cupy, arguments, "paged_attention_v2", {})
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    graph = captured(cupy, streams[0], lambda: pagedkv.paged_attention_v2(**arguments, **given))
    results = []
    for _ in range(50):
        graph.launch(streams[0])
        with streams[1]:
            results.append(pagedkv.paged_attention_v2(**others))
    cupy.cuda.Device().synchronize()
    assert_results(given, expected)
    for out in results:
        cases.assert_same_bits(out.get(), expected_of_others[0])


def test_capture_before_any_call(cupy, rng, monkeypatch):
    """Counters cannot be allocated under capture; v1, which cuts nothing, needs none."""
    from pagedkv import counters

    arguments = batch(cupy, rng, [40, 50])
    for op in ("paged_attention_v1", "paged_attention_v2"):
        eager(op, arguments, {})
    given = buffers(cupy, arguments, "paged_attention_v2", {})
    monkeypatch.setattr(counters, "_reserves", {})
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="under graph capture: call the op or warmup before"):
                pagedkv.paged_attention_v2(**arguments, **given)
            pagedkv.paged_attention_v1(**arguments, out=given["out"], lse_out=given["lse_out"])
        finally:
            stream.end_capture()


def test_capture_of_a_first_call_after_warmup(cupy, rng, monkeypatch):
    """Sizes that no other test has: nothing is compiled, loaded or allocated under capture."""
    from pagedkv import counters, kernels

    arguments = batch(cupy, rng, [40, 500], head_size=88)
    num_heads, num_kv_heads = arguments["query"].shape[1], arguments["key_cache"].shape[1]
    given = buffers(cupy, arguments, "paged_attention_v2", {})
    monkeypatch.setattr(counters, "_reserves", {})
    dtype = arguments["query"].dtype
    pagedkv.warmup(dtype, num_heads, num_kv_heads, 88, arguments["key_cache"].shape[3])
    loaded = kernels.load.cache_info().misses
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        pagedkv.paged_attention_v2(**arguments, **given)
        graph = stream.end_capture()
    assert kernels.load.cache_info().misses == loaded
    graph.launch(stream)
    stream.synchronize()
    assert_results(given, eager("paged_attention_v2", arguments, {}))


@pytest.mark.parametrize("name", ["block_tables", "seq_lens"])
def test_capture_refuses_what_needs_the_host(cupy, rng, name):
    arguments = batch(cupy, rng, [40, 50])
    given = buffers(cupy, arguments, "paged_attention_v2", {})
    wide = {name: arguments[name].astype(np.int64)}
    pagedkv.paged_attention_v2(**arguments, **given)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(TypeError, match=f"{name}: expected int32 under graph capture, got int64"):
                pagedkv.paged_attention_v2(**arguments | wide, **given)
            with pagedkv.checked(), pytest.raises(RuntimeError, match="graph capture"):
                pagedkv.paged_attention_v2(**arguments, **given)
        finally:
            stream.end_capture()


def test_repeated_calls_see_what_changed(cupy, rng, way):
    """Equal shapes again, with another scale, window, alignment or output: each is a launch of its own."""
    op, options = way
    arguments = batch(cupy, rng, [70, 1, 0, 300])
    on_host = {name: array.get() for name, array in arguments.items()}
    shifted = cupy.zeros(arguments["query"].size + 1, np.float16)[1:].reshape(arguments["query"].shape)
    shifted[...] = arguments["query"]
    changes = [{}, {"scale": 0.5}, {"window_size": (20, -1)}, {"softcap": 2.0}]
    for _ in range(2):
        for change in changes:
            state = eager(op, arguments, options | change)
            cases.assert_state_close(state, oracle.paged_attention, on_host | change)
        given = buffers(cupy, arguments, op, options)
        getattr(pagedkv, op)(**arguments | {"query": shifted}, **given, **options)
        assert_results(given, eager(op, arguments, options))


def test_repeated_calls_return_new_outputs(cupy, rng, way):
    op, options = way
    arguments = batch(cupy, rng, [70, 300])
    results = [getattr(pagedkv, op)(**arguments, **options, return_lse=True) for _ in range(3)]
    assert len({array.data.ptr for pair in results for array in pair}) == 6
    for out, lse in results[1:]:
        cases.assert_same_bits(out.get(), results[0][0].get())
        cases.assert_same_bits(lse.get(), results[0][1].get())


def test_calls_follow_the_current_stream(cupy, rng, way, queue_slow_work):
    """A call queued behind slow work on a stream sees what that work leaves."""
    op, options = way
    arguments, fresh = batch(cupy, rng, [70, 300]), batch(cupy, rng, [300, 70])
    expected = eager(op, fresh, options)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        queue_slow_work()
        for name, buffer in arguments.items():
            buffer[...] = fresh[name]
        out, lse = getattr(pagedkv, op)(**arguments, **options, return_lse=True)
    stream.synchronize()
    assert_results({"out": out, "lse_out": lse}, expected)


@pytest.mark.sanitize
def test_small_enough_for_the_sanitizer(cupy, rng, way):
    op, options = way
    arguments = batch(cupy, rng, [70, 0, 33])
    state = eager(op, arguments, options | ({"partition_size": 32} if options else {}))
    cases.assert_state_close(state, oracle.paged_attention, {name: a.get() for name, a in arguments.items()})
