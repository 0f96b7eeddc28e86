"""``pagedkv bench decode``: a check before each time, options, the record; without a card by a still clock."""

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import click
import numpy as np
import pytest
from click.testing import CliRunner

import pagedkv
from pagedkv.cli import bench as command
from pagedkv.cli import machine
from pagedkv.cli.bench_decode import DecodeBench
from pagedkv.cli.decode_rows import CROSSOVER, DEFAULT_SHAPE, ROWS, DecodeRow
from pagedkv.cli.main import main
from pagedkv.dtypes import BFLOAT16

SMALL = DecodeRow(3, 40, 6, 2, is_ragged=True)


# ---- the bench without a card ---------------------------------------------------------------------------------------


class StillClock:
    """A stopwatch that runs what it is given and says what it likes."""

    repeats, sms = 7, 4

    def __init__(self):
        self.best_of = []

    def microseconds(self, launch):
        launch()
        return 12.0

    def best(self, launches, arrays):
        self.best_of.append((launches, arrays))
        return 10.0, launches[3]

    def host_microseconds(self, call):
        call()
        return 5.0

    def empty(self):
        return 3.0

    def read(self, nbytes):
        return nbytes / 4.5e6


def small_bench(monkeypatch, ops=("v1", "v2"), kv_cache_dtype="auto"):
    monkeypatch.setattr("pagedkv.cli.bench_decode.HOST_ROW", SMALL)
    return DecodeBench(np, StillClock(), ops, BFLOAT16, kv_cache_dtype, 32, 16)


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
    inputs = bench._inputs(SMALL)
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
    calls = []
    for op in ("paged_attention_v1", "paged_attention_v2"):
        monkeypatch.setattr(pagedkv, op, spy(getattr(pagedkv, op), calls))
    small_bench(monkeypatch).run([SMALL], lambda line: None)
    given = [call for call in calls if "out" in call]
    assert len(given) == 2 * 3  # checked, timed, and of the host's time
    assert sum("workspace" in call for call in given) == 3
    assert len(calls) - len(given) == 2  # of the host's time with nothing given


def spy(op, calls):
    def called(**arguments):
        calls.append(arguments)
        return op(**arguments)

    called.__signature__ = pagedkv.cli.execute.signature(op)
    return called


@pytest.mark.parametrize("op", ["v1", "v2"])
def test_a_wrong_decode_step_is_not_timed(monkeypatch, op):
    monkeypatch.setattr(pagedkv, f"paged_attention_{op}", lambda *arrays, out, **options: out.fill(0))
    bench = small_bench(monkeypatch, ops=(op,))
    monkeypatch.setattr(bench.stopwatch, "microseconds", lambda launch: pytest.fail("it was timed"))
    with pytest.raises(
        click.ClickException, match=rf"3xragged-6/2, {op}: relative error 1 in token 0, head 0, .*timed"
    ):
        bench.run([SMALL], lambda line: None)


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
    "--layout NCHW": "--layout",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_gets_one_line(line):
    result = call(*line.split())
    assert result.exit_code == 2
    assert MISTAKES[line] in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_a_gpu_it_says_why(monkeypatch):
    monkeypatch.setattr(machine, "why_no_cuda", lambda: "no NVIDIA driver")
    result = call()
    assert result.exit_code == 1
    assert result.stderr == "Error: bench decode needs a GPU: no NVIDIA driver; see pagedkv info\n"


@pytest.mark.parametrize(
    ("has_kernel", "why"), [(False, "flash_attn_varlen_func has no kernel yet"), (True, "bench decode reads packed")]
)
def test_flash_layouts_are_not_measured(monkeypatch, has_kernel, why):
    monkeypatch.setattr(machine, "why_no_cuda", lambda: None)
    monkeypatch.setattr(command, "has_kernel", lambda op, backend: has_kernel)
    result = call("--layout", "HND")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: --layout HND: {why}")


@pytest.fixture
def measured(monkeypatch):
    """What the command measures, in place of measuring it."""
    seen = []

    def record(rows, results, **options):
        seen.append((rows, options))
        return {"bench": "decode", "shape": DEFAULT_SHAPE, "card": "A card"}

    monkeypatch.setattr(machine, "why_no_cuda", lambda: None)
    monkeypatch.setattr(command, "_decode_record", record)
    return seen


def test_rows_by_name_or_of_ones_own(measured, tmp_path):
    assert call("--json").exit_code == 0
    assert call("--json", "--row", "1x1024-32/8", "--row", "256xragged-64/8", "--op", "v2").exit_code == 0
    own = ("--seqs", "3", "--context", "9", "--heads", "4", "--kv-heads", "2")
    assert call("--json", *own, "--kv-cache-dtype", "fp8").exit_code == 0
    assert [rows for rows, _ in measured] == [list(ROWS), [ROWS[0], ROWS[-1]], [DecodeRow(3, 9, 4, 2)]]
    assert [options["ops"] for _, options in measured] == [(), ("v2",), ()]
    assert measured[2][1]["kv_cache_dtype"] == "fp8"


def test_all_rows_and_the_crossover_are_two_records(measured, tmp_path):
    for options in ([], ["--crossover"]):
        assert call("--json", "--results", str(tmp_path), *options).exit_code == 0
    assert [rows for rows, _ in measured] == [list(ROWS), list(CROSSOVER)]
    assert {path.name for path in (tmp_path / "a-card").iterdir()} == {"decode.json", "decode-crossover.json"}


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
    """The whole command with NumPy for CuPy and a still clock."""
    parts = {
        "cupy": np,
        "pagedkv.cli.timing": SimpleNamespace(Stopwatch=lambda repeats: StillClock()),
        "pagedkv.cli.environment": SimpleNamespace(environment=lambda: dict(ORIGIN)),
    }
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
    monkeypatch.setattr(machine, "why_no_cuda", lambda: None)


ORIGIN = {"card": "A card", "driver": "1.2", "versions": {"cupy": "14.2.0"}, "commit": "abc", "date": "2026-01-02"}


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
