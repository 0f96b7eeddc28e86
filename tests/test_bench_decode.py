"""``pagedkv bench decode``: a check before each time, options, the record; without a card by a still clock."""

import json
import time
from dataclasses import replace

import click
import numpy as np
import pytest
from bench_fakes import StillClock, pretend_card, spy_on
from click.testing import CliRunner

import pagedkv
from pagedkv.cli import decode_command as command
from pagedkv.cli import machine
from pagedkv.cli.bench_cache import CacheKind
from pagedkv.cli.bench_decode import DecodeBench
from pagedkv.cli.bench_shape import DEFAULT_SHAPE
from pagedkv.cli.decode_inputs import decode_inputs
from pagedkv.cli.decode_rows import CROSSOVER, FUNCTIONS, ROWS, DecodeRow
from pagedkv.cli.main import main
from pagedkv.dtypes import BFLOAT16

SMALL = DecodeRow(3, 40, 6, 2, is_ragged=True)


# ---- the bench without a card ---------------------------------------------------------------------------------------


def small_bench(monkeypatch, ops=("v1", "v2"), kv_cache_dtype="auto", layout="packed", times=()):
    monkeypatch.setattr("pagedkv.cli.bench_decode.HOST_ROW", SMALL)
    return DecodeBench(np, StillClock(times), ops, CacheKind(BFLOAT16, kv_cache_dtype, layout, 32, 16))


def test_the_bench_records_what_it_measured(monkeypatch):
    lines = []
    bench = small_bench(monkeypatch, kv_cache_dtype="fp8")
    record = bench.run([SMALL], lines.append)
    assert record["shape"] == {**DEFAULT_SHAPE, "kv_cache_dtype": "fp8", "head_size": 32}
    assert record["method"] == "medians of graph replays, L2 cold, 7 each"
    assert record["host_us"] == {op: {"given": 5.0, "allocated": 5.0} for op in ("v1", "v2")}
    (row,) = record["rows"]
    assert row["us"] == {"v1": 12.0, "v2": 12.0}
    assert row["floor_us"] == 10.0
    assert row["nbytes"] == 2 * int(SMALL.seq_lens().sum()) * 2 * 32
    assert row["instance"]["v2"].startswith("paged_attention<__nv_bfloat16, __nv_fp8_e4m3, 32, 16, 8, ")
    assert lines == ["3xragged-6/2     floor    10.0 us  v1     12.0 us (1.200)  v2     12.0 us (1.200)"]


def test_the_floor_reads_the_blocks_of_the_ops(monkeypatch):
    """Those that some sequence uses, in one row, and no others."""
    bench = small_bench(monkeypatch)
    bench.run([SMALL], lambda line: None)
    launches, (key_cache, value_cache, table, lens, unused) = bench.stopwatch.best_of[0]
    assert key_cache.nbytes == value_cache.nbytes
    assert unused.nbytes == 4
    inputs = decode_inputs(np, SMALL, bench.kind)
    (blocks,) = table
    used = [entry for row, n in zip(inputs.tables, inputs.seq_lens, strict=True) for entry in row[: -(-n // 16)]]
    assert blocks.tolist() == used
    assert len(set(blocks.tolist())) == blocks.size < inputs.tables.size
    assert lens.tolist() == [16 * blocks.size]
    assert (table.dtype, lens.dtype) == (np.int32, np.int32)
    num_items, max_blocks, num_kv_heads, packs, block_size, _ = np.frombuffer(launches[0].params.tobytes(), np.uint32)
    assert (max_blocks, num_kv_heads, block_size) == (blocks.size, 2, 16)
    assert num_items == 2 * blocks.size * 2
    assert packs * 16 * num_kv_heads * key_cache.shape[0] == key_cache.nbytes


def test_all_memory_is_given(monkeypatch):
    calls = spy_on(monkeypatch, "paged_attention_v1", "paged_attention_v2")
    small_bench(monkeypatch).run([SMALL], lambda line: None)
    given = [arguments for _, arguments in calls if "out" in arguments]
    assert len(given) == 2 * 3  # checked, timed, and of the host's time
    assert sum("workspace" in arguments for arguments in given) == 3
    assert len(calls) - len(given) == 2  # of the host's time with nothing given


@pytest.mark.parametrize(("op", "layout"), [("v1", "packed"), ("v2", "packed"), ("varlen", "NHD"), ("v2", "HND")])
def test_a_wrong_decode_step_is_not_timed(monkeypatch, op, layout):
    monkeypatch.setattr(pagedkv, FUNCTIONS[op], lambda *arrays, out, **options: out.fill(0))
    bench = small_bench(monkeypatch, ops=(op,), layout=layout)
    monkeypatch.setattr(bench.stopwatch, "microseconds", lambda launch: pytest.fail("it was timed"))
    with pytest.raises(
        click.ClickException, match=rf"3xragged-6/2, {op}: relative error 1 in token 0, head 0, .*timed"
    ):
        bench.run([SMALL], lambda line: None)


# ---- flash layouts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_varlen_stands_beside_v2_of_the_same_run(monkeypatch, layout, kv_cache_dtype):
    calls = spy_on(monkeypatch, "flash_attn_varlen_func", "paged_attention_v2")
    bench = small_bench(monkeypatch, ("varlen", "v2"), kv_cache_dtype, layout, times=(11.0, 12.5))
    record = bench.run([SMALL], lambda line: None)
    assert record["shape"] == {**DEFAULT_SHAPE, "kv_cache_dtype": kv_cache_dtype, "layout": layout, "head_size": 32}
    (row,) = record["rows"]
    assert row["us"] == {"varlen": 11.0, "v2": 12.5}
    assert record["host_us"].keys() == row["instance"].keys() == row["us"].keys()
    assert row["instance"]["v2"].startswith("paged_attention<")
    assert not row["instance"]["varlen"].startswith("paged_attention<")
    caches = [arrays[0].ndim for _, arrays in bench.stopwatch.best_of]
    assert caches == [4, 5]  # one of each layout, and the faster floor counts
    (_, varlen), *_ = calls
    assert (varlen["layout"], varlen["causal"], varlen["max_seqlen_q"]) == (layout, True, 1)
    assert varlen["max_seqlen_k"] == SMALL.seq_lens().max()
    assert varlen["cu_seqlens_q"].tolist() == [0, 1, 2, 3]
    given = ["out" in arguments for name, arguments in calls if name == "flash_attn_varlen_func"]
    assert given == [True, True, True, False]  # checked, timed, and of the host's time


def test_one_op_needs_one_cache(monkeypatch):
    for ops, ndim in ((("varlen",), 4), (("v2",), 5)):
        bench = small_bench(monkeypatch, ops, layout="NHD")
        (row,) = bench.run([SMALL], lambda line: None)["rows"]
        assert tuple(row["us"]) == ops
        assert [arrays[0].ndim for _, arrays in bench.stopwatch.best_of] == [ndim]


# ---- the command ----------------------------------------------------------------------------------------------------


def call(*arguments):
    return CliRunner().invoke(main, ["bench", "decode", *arguments])


MISTAKES = {
    "--row 1x1-1/1": "--row",
    "--row 8x4096-64/8 --seqs 3 --context 9": "--row and --seqs with --context: expected one or the other",
    "--crossover --seqs 3 --context 9": "--crossover has rows of its own",
    "--seqs 3": "a batch of your own needs both --seqs and --context",
    "--context 3": "a batch of your own needs both --seqs and --context",
    "--seqs 3 --context 9 --heads 9": "--heads 9 is no multiple of --kv-heads 8",
    "--op v3": "--op",
    "--op v1 --layout NHD": "--op v1: expected varlen or v2 with --layout NHD",
    "--op varlen": "--op varlen: expected v1 or v2 with --layout packed",
    "--crossover --layout HND": "--crossover is of v1 and v2, which read no HND cache",
    "--layout NCHW": "--layout",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_gets_one_line(line):
    result = call(*line.split())
    assert result.exit_code == 2
    assert MISTAKES[line] in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.fixture
def measured(monkeypatch):
    """What the command measures, in place of measuring it."""
    seen = []

    def record(rows, results, ops, layout, **options):
        seen.append((rows, {"ops": ops, **options}))
        return {"bench": "decode", "shape": {**DEFAULT_SHAPE, "layout": layout}, "card": "A card"}

    monkeypatch.setattr(machine, "why_no_cuda", lambda: None)
    monkeypatch.setattr(command, "_record", record)
    return seen


def test_rows_by_name_or_of_ones_own(measured, tmp_path):
    assert call("--json").exit_code == 0
    assert call("--json", "--row", "1x1024-32/8", "--row", "256xragged-64/8", "--op", "v2").exit_code == 0
    own = ("--seqs", "3", "--context", "9", "--heads", "4", "--kv-heads", "2")
    assert call("--json", *own, "--kv-cache-dtype", "fp8").exit_code == 0
    assert [rows for rows, _ in measured] == [list(ROWS), [ROWS[0], ROWS[-1]], [DecodeRow(3, 9, 4, 2)]]
    assert [options["ops"] for _, options in measured] == [("v1", "v2"), ("v2",), ("v1", "v2")]
    assert measured[2][1]["kv_cache_dtype"] == "fp8"


def test_all_rows_and_the_crossover_are_two_records(measured, tmp_path):
    for options in ([], ["--crossover"]):
        assert call("--json", "--results", str(tmp_path), *options).exit_code == 0
    assert [rows for rows, _ in measured] == [list(ROWS), list(CROSSOVER)]
    assert {path.name for path in (tmp_path / "a-card").iterdir()} == {"decode.json", "decode-crossover.json"}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layouts_have_records_of_their_own(measured, tmp_path, layout):
    assert call("--json", "--results", str(tmp_path), "--layout", layout).exit_code == 0
    assert [options["ops"] for _, options in measured] == [("varlen", "v2")]
    assert {path.name for path in (tmp_path / "a-card").iterdir()} == {f"decode-{layout.lower()}.json"}


@pytest.mark.parametrize("part", ["--row 1x1024-32/8", "--seqs 3 --context 9", "--op v2"])
def test_a_part_replaces_no_record(measured, tmp_path, part):
    result = call("--results", str(tmp_path), *part.split())
    assert result.exit_code == 2
    assert "--results keeps records of all rows and ops" in result.stderr
    assert not measured and not list(tmp_path.iterdir())


def test_the_crossover_has_batches_of_several_sizes_over_the_context():
    assert len({(row.num_seqs, row.context) for row in CROSSOVER}) == len(CROSSOVER) == 17
    for num_seqs in (1, 4, 16, 64, 256):
        contexts = [row.context for row in CROSSOVER if row.num_seqs == num_seqs]
        assert len(contexts) >= 2 and contexts == sorted(contexts)
    assert not {row.name for row in CROSSOVER} & {row.name for row in ROWS if row.is_ragged}


@pytest.fixture
def numpy_as_card(monkeypatch):
    pretend_card(monkeypatch)


def test_from_options_to_record(numpy_as_card, monkeypatch, tmp_path):
    """fp8 finds the record of the plain cache, and every record the times of others, in the card's folder."""
    (tmp_path / "a-card").mkdir()
    entry = {
        "num_seqs": 1,
        "context": 1024,
        "num_heads": 32,
        "num_kv_heads": 8,
        "read_floor": 5.0,
        "flash_attn_3": 15.0,
    }
    others = {"card": "A card", "date": "then", "method": "so", "versions": {}, "decode_us": [entry]}
    (tmp_path / "a-card" / "peers.json").write_text(json.dumps(others))
    monkeypatch.setattr(command, "ROWS_BY_NAME", {ROWS[0].name: ROWS[0]})
    rows = []
    for kv_cache_dtype in ("auto", "fp8"):
        result = call("--kv-cache-dtype", kv_cache_dtype, "--results", str(tmp_path), "--json")
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout)
        assert record["card"] == "A card"
        rows += record["rows"]
    assert {path.stem for path in tmp_path.glob("*/*")} == {"peers", "decode", "decode-bfloat16-fp8"}
    assert [row["target_ratio"]["v2"] for row in rows] == [1.45, 1.2]
    assert [row["peers"] for row in rows] == [{"floor_us": 5.0, "us": {"flash_attn_3": 15.0}}, None]
    assert [row["nbytes"] for row in rows] == [4 << 20, 2 << 20]


def test_the_picture_of_a_run(numpy_as_card, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    picture = tmp_path / "decode.png"
    result = call("--seqs", "2", "--context", "20", "--head-size", "16", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "| 2 | 20 | 32/8 |" in result.stdout
    assert f"plot: {picture}" in result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_small_batch_on_a_card(kv_cache_dtype):
    """From the options to the record: the floor is nearer to the bytes than what computes with them."""
    sizes = ("--seqs", "5", "--context", "300", "--heads", "8", "--kv-heads", "2", "--repeats", "3")
    result = call(*sizes, "--kv-cache-dtype", kv_cache_dtype, "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert row["nbytes"] == 2 * 5 * 300 * 2 * 128 * (1 if kv_cache_dtype == "fp8" else 2)
    assert 0 < row["floor_us"] < min(row["us"].values()) < 1000


@pytest.mark.gpu
def test_the_floor_is_the_fastest_launch():
    """Of one CTA and of many that read the same blocks."""
    import cupy

    from pagedkv.cli.read_floor import read_launches
    from pagedkv.cli.timing import Stopwatch, random_bytes

    stopwatch = Stopwatch(repeats=3)
    caches = [random_bytes(64 << 20) for _ in "kv"]
    tables, lens = cupy.arange(2048, dtype=np.int32).reshape(1, -1), cupy.full(1, 2048 * 16, np.int32)
    *_, many = read_launches(1, 2048, 8, 16, 4096, stopwatch.sms)
    alone = replace(many, grid=(1,))
    us, best = stopwatch.best([alone, many, alone], [*caches, tables, lens, cupy.zeros(1, np.uint32)])
    assert best is many
    assert 10 < us < stopwatch.best([alone], [*caches, tables, lens, cupy.zeros(1, np.uint32)])[0] / 10


@pytest.mark.gpu
def test_the_time_of_the_host():
    from pagedkv.cli.timing import Stopwatch

    assert 1000 <= Stopwatch(repeats=1).host_microseconds(lambda: time.sleep(0.001)) < 3000


@pytest.mark.gpu
def test_the_time_of_the_host_begins_when_the_inputs_are_there(cupy, queue_slow_work):
    """They are made on another stream than the one that is timed."""
    from pagedkv.cli.timing import Stopwatch

    stopwatch, inputs, seen = Stopwatch(repeats=1), cupy.zeros(1), []
    queue_slow_work()
    inputs[...] = 7
    stopwatch.host_microseconds(lambda: seen.append(inputs.copy()))
    assert all(float(copy[0]) == 7 for copy in seen)
