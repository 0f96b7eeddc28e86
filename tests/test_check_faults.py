"""`pagedkv check` must find a planted fault, make the case small, and print the command that repeats it."""

import re
import shlex
import shutil
from functools import cache, partial

import numpy as np
import pytest
from click.testing import CliRunner

from pagedkv import dtypes, indices, kernels, layout, numpy_ops, ptx_ops, validate
from pagedkv.cli.dimensions import DIMENSIONS, parse
from pagedkv.cli.main import main
from pagedkv.cli.shrink import shrunk
from pagedkv.softmax import SoftmaxState

WRITE, FLASH = "reshape_and_cache", "reshape_and_cache_flash"
SINGLE, DECODE = "paged_attention_v1", "paged_attention_v2"
VARLEN, MERGE = "flash_attn_varlen_func", "merge_attn_states"
MOST_NAMED = 6  # values of a shrunk case that are not the simplest


def call(*arguments):
    return CliRunner().invoke(main, ["check", *arguments])


def check_found(op, backend, said, needed=()):
    """Runs cases until one fails; the command printed fails in the same way, and names what the fault needs."""
    result = call(op, "--backend", backend, "--cases", "3000" if backend == "numpy" else "300")
    assert result.exit_code == 1, result.output
    failed = re.search(r"^FAILED  .*$", result.output, re.MULTILINE)[0]
    assert said in failed
    (command,) = re.findall(r"^  (pagedkv check .*)$", result.output, re.MULTILINE)
    again = call(*shlex.split(command)[2:])
    assert again.exit_code == 1
    assert failed in again.output
    spec = parse(op, shlex.split(command)[-1])
    named = {d.name for d in DIMENSIONS[op] if spec.values[d.name] != d.simplest}
    assert set(needed) <= named
    assert len(named) <= MOST_NAMED
    return spec


# ---- the NumPy backend ----------------------------------------------------------------------------------------------


def after(monkeypatch, module, name, change):
    """A function whose result goes through another one."""
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *arguments: change(right(*arguments), *arguments))


def test_a_negative_slot_that_is_written(monkeypatch):
    def live_tokens(problem):
        indices.check_slots(problem, problem.slot_mapping.numpy())
        slots = np.maximum(problem.slot_mapping.numpy().astype(np.int64), 0)
        return np.arange(slots.size), *np.divmod(slots, problem.cache.shape.block_size)

    monkeypatch.setattr(numpy_ops, "_live_tokens", live_tokens)
    check_found(FLASH, "numpy", "key_cache: ", ["negative"])


def test_a_missing_saturation(monkeypatch):
    def unsaturated(array, scale, dtype):
        quotient = dtypes.to_float32(array, array.dtype) / np.asarray(scale, np.float32)
        return quotient.astype(dtype).view(np.uint8)

    monkeypatch.setattr(numpy_ops, "quantize", unsaturated)
    with np.errstate(all="ignore"):
        check_found(WRITE, "numpy", "key_cache: ", ["cache"])


def test_a_scale_of_keys_for_values(monkeypatch):
    def sides(problem):
        cache = problem.cache
        yield problem.key.numpy(), numpy_ops._storage(cache.key), cache.k_scale
        yield problem.value.numpy(), numpy_ops._storage(cache.value), cache.k_scale

    monkeypatch.setattr(numpy_ops, "_sides", sides)
    check_found(WRITE, "numpy", "value_cache: ", ["cache", "scales"])


def test_an_input_that_is_changed(monkeypatch):
    def overwrite(live, problem):
        problem.slot_mapping.numpy().fill(-5)
        return live

    after(monkeypatch, numpy_ops, "_live_tokens", overwrite)
    check_found(FLASH, "numpy", "slot_mapping: ")


def test_a_byte_between_the_rows_of_a_cache(monkeypatch):
    def stray(problem):
        array = problem.cache.key.numpy()
        row_bytes = array.shape[3] * array.itemsize
        if array.strides[2] > row_bytes and 0 not in array.shape:
            first = array.ctypes.data - array.base.ctypes.data
            array.base[first + row_bytes] = 0

    right = numpy_ops.reshape_and_cache_flash
    monkeypatch.setattr(numpy_ops, "reshape_and_cache_flash", lambda problem: (right(problem), stray(problem)))
    check_found(FLASH, "numpy", "bytes changed that the op may not write, the first +32 from", ["caches"])


def test_two_tokens_with_one_slot_that_are_not_refused(monkeypatch):
    monkeypatch.setattr(indices, "check_slots", lambda problem, slots: None)
    monkeypatch.setattr(numpy_ops, "_live_tokens", lambda problem: (np.zeros(0, int),) * 3)
    result = call(FLASH, "--backend", "numpy", "--case", "tokens=2,negative=all,mistake=slot_twice,seed=1")
    assert result.exit_code == 1
    assert "a wrong slot_mapping raised no ValueError" in result.output


def test_an_error_of_another_type(monkeypatch):
    def refuse(array, name):
        raise KeyError(name)

    monkeypatch.setattr(validate.checks, "check_writable", refuse)
    check_found(WRITE, "numpy", "KeyError: 'key_cache'")


def test_a_window_that_is_one_key_short(monkeypatch):
    right = numpy_ops._adjust

    def short(scores, options, query_pos, key_pos):
        right(scores, options, query_pos, key_pos)
        if options.window[0] >= 0:
            scores[:, key_pos == query_pos - options.window[0]] = -np.inf

    monkeypatch.setattr(numpy_ops, "_adjust", short)
    check_found(VARLEN, "numpy", "flash_attn_varlen_func: out: relative error", ["left"])


def test_a_sink_that_counts_twice(monkeypatch):
    once = SoftmaxState.with_sink
    monkeypatch.setattr(SoftmaxState, "with_sink", lambda state, sinks: once(once(state, sinks), sinks))
    check_found(DECODE, "numpy", "paged_attention_v2: ", ["sinks"])


def test_a_softcap_of_positive_scores_only(monkeypatch):
    right = numpy_ops._adjust

    def positive_only(scores, options, query_pos, key_pos):
        negative, before = scores < 0, scores.copy()
        right(scores, options, query_pos, key_pos)
        if options.softcap > 0 and options.alibi_slopes is None and options.window == (-1, -1):
            scores[negative] = before[negative]

    monkeypatch.setattr(numpy_ops, "_adjust", positive_only)
    check_found(DECODE, "numpy", "paged_attention_v2: ", ["softcap"])


def test_an_lse_of_base_two(monkeypatch):
    right = SoftmaxState.normalize

    def base_two(state):
        out, lse = right(state)
        return out, lse / np.float32(np.log(2))

    monkeypatch.setattr(SoftmaxState, "normalize", base_two)
    check_found(MERGE, "numpy", "merge_attn_states: lse_out: relative error")


def test_queries_that_stand_elsewhere_when_there_are_more_than_keys(monkeypatch):
    right = numpy_ops._attend

    def shifted(problem, sequence, *rest):
        sequence.query_pos = sequence.query_pos - min(sequence.query_pos[0], 0)
        return right(problem, sequence, *rest)

    monkeypatch.setattr(numpy_ops, "_attend", shifted)
    check_found(VARLEN, "numpy", "flash_attn_varlen_func: out: ", ["queries"])


# ---- kernels --------------------------------------------------------------------------------------------------------


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """Replaces a text in a copy of the CUDA sources that the interpreter then compiles."""
    folder = tmp_path / "cuda"
    shutil.copytree(kernels.source_folder(), folder)
    monkeypatch.setattr(kernels, "source_folder", lambda: folder)
    monkeypatch.setattr(ptx_ops, "_kernel", cache(ptx_ops._kernel.__wrapped__))

    def replace(file, right, wrong):
        text = (folder / file).read_text(encoding="utf-8")
        assert text.count(right) >= 1
        (folder / file).write_text(text.replace(right, wrong), encoding="utf-8")

    return replace


KERNEL_FAULTS = {
    "keys to the left of a window": (
        VARLEN,
        ("query_tiles.cuh", "left < 0 || left >= at ? 0 : at - left", "0"),
        "",
        ["left"],
    ),
    "a merge that looks at what an empty side holds": (
        MERGE,
        ("merge.cu", "if (has_suffix)", ""),
        "out: ",
        [],
    ),
    "a merge whose larger LSE loses its last digits": (
        MERGE,
        ("merge.cu", "shift + state.lse()", "(shift * LOG2_E + __log2f(state.exp_sum) + 0.001f) * LN_2"),
        "lse_out: relative error",
        [],
    ),
    "a tail that is not copied": (
        FLASH,
        ("copy.cuh", "if (rows.prefix == 0) return;", "return;"),
        "values wrong",
        [],
    ),
    "keys that take the scale of values": (
        WRITE,
        ("cache_write.cu", "is_value ? v_scale : k_scale", "v_scale"),
        "key_cache: ",
        ["cache", "scales"],
    ),
    "a warp that does not wait": (WRITE, ("cache_write.cu", "  __syncwarp();\n", ""), "Fault: race: shared read", []),
    "e5m2 that is e4m3": (
        WRITE,
        ("convert.cuh", "FP8_FORMAT<__nv_fp8_e5m2> = __NV_E5M2", "FP8_FORMAT<__nv_fp8_e5m2> = __NV_E4M3"),
        "values wrong",
        ["cache"],
    ),
    "a stride of slots that is ignored": (
        FLASH,
        ("cache_write.cu", "slot_mapping[token * params.slot_stride]", "slot_mapping[token]"),
        "",
        ["tokens", "slot_stride"],
    ),
}


WAIT = "wait_for_copies<2 * TILES_AHEAD - 1>();"
STORE = "row.store(partials.at(segment.state(segment.partial, head)), state);"
DECODE_FAULTS = {
    "a mask that is off by one": (
        SINGLE,
        (
            "tensor_core_scan.cuh",
            "seen.has(first_token + Tile::token(i, row()))",
            "seen.has(first_token + Tile::token(i, row()) - 1)",
        ),
        "",
        [],
    ),
    "a maximum that rises and leaves the sums as they were": (
        SINGLE,
        ("tensor_core_scan.cuh", "acc_[f][n][i] *= factors[n][i % 2];", ";"),
        "out: relative error",
        ["context"],
    ),
    "a window that is not looked at": (
        SINGLE,
        ("partition.cuh", "window_left < 0 ? 0 : max(0, seq_len - 1 - window_left)", "0"),
        "",
        ["left"],
    ),
    "slopes of the wrong sign": (
        SINGLE,
        ("scores.cuh", "capped - slope *", "capped + slope *"),
        "relative error",
        ["alibi"],
    ),
    "a sink that counts in every partition": (
        DECODE,
        (
            "decode.cuh",
            STORE,
            "{ SoftmaxState more = state; "
            "if (arrays.sinks != nullptr) more.merge({results.sink(head) * LOG2_E, 1.0f}); "
            + STORE.replace(", state)", ", more)")
            + " }",
        ),
        "relative error",
        ["sinks", "partition"],
    ),
    "a merge without the first partition": (
        DECODE,
        ("decode.cuh", "partials.at(segment.state(i, head))", "partials.at(segment.state(max(i, 1), head))"),
        "relative error",
        ["partition"],
    ),
    "a warp that does not wait for its lanes' copies": (
        SINGLE,
        ("tensor_core_scan.cuh", f"{WAIT}\n    __syncwarp();", WAIT),
        "Fault: race: shared",
        [],
    ),
    "one block for both parts of a tile": (
        SINGLE,
        ("packed_tile.cuh", "__shfl_sync(WARP, block_, part)", "__shfl_sync(WARP, block_, 0)"),
        "",
        ["context"],
    ),
}


@pytest.mark.ptx
@pytest.mark.parametrize(("op", "fault", "said", "needed"), DECODE_FAULTS.values(), ids=DECODE_FAULTS.keys())
def test_a_faulty_decode_kernel(plant, monkeypatch, op, fault, said, needed):
    monkeypatch.setattr("pagedkv.cli.check.shrunk", partial(shrunk, seconds=300))  # to the end, on any machine
    plant(*fault)
    check_found(op, "ptx", said, needed)


@pytest.mark.ptx
@pytest.mark.parametrize(("op", "fault", "said", "needed"), KERNEL_FAULTS.values(), ids=KERNEL_FAULTS.keys())
def test_a_faulty_kernel(plant, op, fault, said, needed):
    plant(*fault)
    check_found(op, "ptx", said, needed)


@pytest.mark.ptx
def test_strides_taken_for_each_other_where_sizes_agree(monkeypatch):
    right = layout.flash_strides

    def confused(cache, name):
        return right(cache, "NHD" if cache.shape[1] == cache.shape[2] else name)

    monkeypatch.setattr(layout, "flash_strides", confused)
    spec = check_found(FLASH, "ptx", "values wrong", ["layout", "kv_heads"])
    assert spec.values["kv_heads"] == spec.values["block_size"]
