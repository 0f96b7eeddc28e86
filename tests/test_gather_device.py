"""gather_cache and convert_layout on a device: graph capture and replay, streams, tiles of large inputs, torch."""

import gathers
import numpy as np
import pytest
from gathers import LAYOUTS, assert_same_bits, batch, expected_rows, outputs_for, random_caches
from graphs import captured
from test_convert_layout import expected_caches

import pagedkv

pytestmark = pytest.mark.gpu

INDICES = ("block_table", "cu_seq_lens", "seq_starts")
SCALES = {"k_scale": np.array([0.3, 2.5], np.float32), "v_scale": np.array([0.7, 0.011], np.float32)}


def on_device(cupy, arguments):
    return {name: cupy.asarray(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}


def same_table(arguments, max_blocks):
    """The table with more columns of garbage, so that other ranges fit into the same buffer."""
    table = np.full((len(arguments["block_table"]), max_blocks), -1, np.int32)
    table[:, : arguments["block_table"].shape[1]] = arguments["block_table"]
    return arguments | {"block_table": table}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_graph_replay_with_other_ranges(cupy, rng, layout, kv_cache_dtype):
    """Captured with eight short ranges; replayed with three long ones, of which the output holds more or fewer rows."""
    options = {"layout": layout, "kv_cache_dtype": kv_cache_dtype, **(SCALES if kv_cache_dtype == "fp8" else {})}
    long = same_table(batch(rng, [0, 700, 0, 0, 5, 0, 0, 450], [9, 3, 0, 8, 250, 0, 0, 17], **options), 50)
    short = same_table(batch(rng, [12] * 8, [5] * 8, **options), 50)
    for name in ("key_cache", "value_cache"):  # one pool
        short[name] = long[name]
    short["block_table"] %= len(long["key_cache"])
    outputs = outputs_for(long)
    given = on_device(cupy, short)
    buffers = [cupy.asarray(output) for output in outputs]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    graph = captured(cupy, stream, lambda: pagedkv.gather_cache(**given, key_out=buffers[0], value_out=buffers[1]))
    for arguments in (long, short, long):
        for name in INDICES:
            given[name][...] = cupy.asarray(arguments[name])
        for buffer in buffers:
            buffer.view(np.uint8).fill(gathers.POISON)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for got, want in zip(buffers, expected_rows(arguments, *outputs), strict=True):
            assert_same_bits(got.get(), want)


@pytest.mark.parametrize(("layout", "to"), [("NHD", "packed"), ("packed", "HND"), ("HND", "NHD"), ("packed", "packed")])
def test_graph_replay_of_a_conversion(cupy, rng, layout, to):
    first, second = (random_caches(rng, layout, 5, 16, 2, 64, np.float16) for _ in range(2))
    given = [cupy.asarray(cache) for cache in first]
    targets = [cupy.zeros(cache.shape, np.float16) for cache in expected_caches(*first, layout, to)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    graph = captured(
        cupy, stream, lambda: pagedkv.convert_layout(*given, layout, to, key_out=targets[0], value_out=targets[1])
    )
    for buffer, content in zip(given, second, strict=True):
        buffer[...] = cupy.asarray(content)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    for got, want in zip(targets, expected_caches(*second, layout, to), strict=True):
        assert_same_bits(got.get(), want)


def test_capture_refuses_what_needs_the_host(cupy, rng):
    arguments = batch(rng, [9, 5], [0, 3])
    given = on_device(cupy, arguments)
    outputs = dict(zip(("key_out", "value_out"), map(cupy.asarray, outputs_for(arguments)), strict=True))
    pagedkv.gather_cache(**given, **outputs)
    wide = {name: given[name].astype(np.int64) for name in INDICES}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            for name, array in wide.items():
                with pytest.raises(TypeError, match=f"^{name}: expected int32 under graph capture, got int64"):
                    pagedkv.gather_cache(**given | {name: array}, **outputs)
            with pagedkv.checked(), pytest.raises(RuntimeError, match="graph capture"):
                pagedkv.gather_cache(**given, **outputs)
            with pytest.raises(ValueError, match=r"^num_tokens: expected a number or outputs"):
                pagedkv.gather_cache(**given)
        finally:
            stream.end_capture()


def test_rows_past_the_output_are_not_written(cupy, rng):
    """Unchecked starts that promise more rows than there is room for."""
    arguments = batch(rng, [20, 30], layout="packed")
    room = cupy.asarray(gathers.poisoned((50, 2, 32), np.float16))
    key_out, value_out = room[:20], cupy.zeros((20, 2, 32), np.float16)
    pagedkv.gather_cache(**on_device(cupy, arguments), key_out=key_out, value_out=value_out)
    expected = expected_rows(arguments, *outputs_for(arguments, spare_rows=0))
    assert_same_bits(key_out.get(), expected[0][:20])
    assert (room[20:].get().view(np.uint8) == gathers.POISON).all()


@pytest.mark.sanitize
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_rows(cupy, rng, layout, kv_cache_dtype):
    """More CTAs than a card holds at once."""
    options = {"layout": layout, "kv_cache_dtype": kv_cache_dtype, "heads": 8, "head_size": 128}
    arguments = batch(rng, [700, 3, 1200, 0, 33], [5, 0, 17, 0, 1], **options)
    outputs = outputs_for(arguments)
    results = pagedkv.gather_cache(
        **on_device(cupy, arguments), key_out=cupy.asarray(outputs[0]), value_out=cupy.asarray(outputs[1])
    )
    for got, want in zip(results, expected_rows(arguments, *outputs), strict=True):
        assert_same_bits(got.get(), want)


def test_gathers_follow_the_current_stream(cupy, rng, queue_slow_work):
    """One queued behind slow work on a stream sees what that work leaves."""
    first, second = batch(rng, [40, 9]), batch(rng, [40, 9])
    given, fresh = on_device(cupy, first), on_device(cupy, second)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        queue_slow_work()
        for name in ("key_cache", "value_cache", "block_table"):
            given[name][...] = fresh[name]
        results = pagedkv.gather_cache(**given, num_tokens=49)
        packed = pagedkv.convert_layout(given["key_cache"], given["value_cache"], "NHD", "packed")
    stream.synchronize()
    for got, want in zip(results, expected_rows(second, *outputs_for(second, spare_rows=0)), strict=True):
        assert_same_bits(got.get(), want)
    for got, want in zip(
        packed, expected_caches(second["key_cache"], second["value_cache"], "NHD", "packed"), strict=True
    ):
        assert_same_bits(got.get(), want)


def test_torch_on_a_device(rng):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    arguments = batch(rng, [37, 0, 5], [3, 7, 16], kv_cache_dtype="fp8", **SCALES)
    given = {name: torch.from_numpy(a).cuda() if isinstance(a, np.ndarray) else a for name, a in arguments.items()}
    expected = expected_rows(arguments, *outputs_for(arguments, np.float16, spare_rows=0))
    for _ in range(2):
        results = pagedkv.gather_cache(**given, num_tokens=42, dtype=torch.float16)
        for got, want in zip(results, expected, strict=True):
            assert_same_bits(got.cpu().numpy(), want)
    packed = pagedkv.convert_layout(given["key_cache"], given["value_cache"], "NHD", "packed")
    expected = expected_caches(arguments["key_cache"], arguments["value_cache"], "NHD", "packed")
    for got, want in zip(packed, expected, strict=True):
        assert_same_bits(got.cpu().numpy(), want)
