"""``pagedkv bench prefill``: a check before each time, options, the record and its table; without a card."""

import json
from pathlib import Path

import click
import numpy as np
import pytest
from bench_fakes import ORIGIN, StillClock, pretend_card, spy_on
from click.testing import CliRunner

import pagedkv
from pagedkv.cli import prefill_command, report
from pagedkv.cli.bench_cache import CacheKind
from pagedkv.cli.bench_prefill import PrefillBench
from pagedkv.cli.bench_shape import DEFAULT_SHAPE
from pagedkv.cli.main import main
from pagedkv.cli.prefill_record import PEER_SIZES, completed
from pagedkv.cli.prefill_rows import ROWS, PrefillRow, record_name
from pagedkv.cli.prefill_table import PEER_NAMES, prefill_markdown
from pagedkv.dtypes import BFLOAT16

RESULTS = Path(__file__).parent.parent / "results"
SHAPE = {**DEFAULT_SHAPE, "layout": "NHD"}
SMALL = PrefillRow(2, 40, 4, 2)
OTHERS = {
    "card": "A card",
    "date": "2026-01-01",
    "method": "as here",
    "versions": {"flashinfer": "0.6"},
    "prefill_tflops": [
        {**dict(zip(PEER_SIZES, (16, 1024, 32, 8), strict=True)), "cudnn_contiguous": 469.0, "fa3_paged": None}
    ],
}


def measured(us=1000.0, **shape):
    """A record of all rows, each of which took as long."""
    sizes = [{name: getattr(row, name) for name in PEER_SIZES} for row in ROWS]
    pairs = zip(ROWS, sizes, strict=True)
    rows = [{"row": row.name, **of_row, "flops": row.flops(128), "us": us, "instance": ""} for row, of_row in pairs]
    return {
        "bench": "prefill",
        **ORIGIN,
        "method": "medians",
        "shape": {**SHAPE, **shape},
        "ceilings": {"empty_us": 3.0, "read": {"nbytes": 268435456, "us": 60.0}},
        "rows": rows,
    }


# ---- the bench without a card ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_bench_records_what_it_measured(monkeypatch, layout, kv_cache_dtype):
    calls, lines = spy_on(monkeypatch, "flash_attn_varlen_func"), []
    bench = PrefillBench(np, StillClock(), CacheKind(BFLOAT16, kv_cache_dtype, layout, 32, 16))
    record = bench.run([SMALL], lines.append)
    assert record["shape"] == {**SHAPE, "layout": layout, "kv_cache_dtype": kv_cache_dtype, "head_size": 32}
    (row,) = record["rows"]
    assert row.pop("instance").startswith("varlen")
    assert row == {
        "row": "2x40-4/2",
        "num_seqs": 2,
        "length": 40,
        "num_heads": 4,
        "num_kv_heads": 2,
        "flops": 4 * 2 * 4 * 40 * 40 * 32 // 2,
        "us": 12.0,
    }
    assert lines == ["2x40-4/2              12.0 us     0.1 TFLOP/s"]
    assert len(calls) == 2  # checked, timed
    (_, given), _ = calls
    assert (given["causal"], given["max_seqlen_q"], given["max_seqlen_k"]) == (True, 40, 40)
    assert given["cu_seqlens_q"].tolist() == [0, 40, 80]
    assert given["out"].shape == given["q"].shape == (80, 4, 32)


def test_a_wrong_prefill_is_not_timed(monkeypatch):
    right = pagedkv.flash_attn_varlen_func

    def wrong(*, out, **arguments):
        right(out=out, **arguments)
        out[79] = out[78]

    monkeypatch.setattr(pagedkv, "flash_attn_varlen_func", wrong)
    bench = PrefillBench(np, StillClock(), CacheKind(BFLOAT16, "auto", "NHD", 32, 16))
    monkeypatch.setattr(bench.stopwatch, "microseconds", lambda launch: pytest.fail("it was timed"))
    with pytest.raises(
        click.ClickException, match=r"2x40-4/2: relative error .* in token 79, head .*so it is not timed"
    ):
        bench.run([SMALL], lambda line: None)


# ---- the record -----------------------------------------------------------------------------------------------------


def test_the_rows_are_those_whose_targets_were_set():
    assert [row.name for row in ROWS] == ["16x1024", "8x2048", "4x4096", "2x8192", "1x16384"]
    assert [row.target for row in ROWS] == [270, 310, 330, 335, 345]
    assert [row.flops(128) for row in ROWS] == [137438953472 << i for i in range(5)]


def test_what_follows_from_times():
    record = completed(measured(us=500.0), OTHERS)
    first, second, *_ = record["rows"]
    assert first["tflop_per_s"] == pytest.approx(274.88, abs=0.01)
    assert first["target_tflop_per_s"] == 270
    assert (first["ratio"], first["met"]) == (pytest.approx(274.88 / 270, rel=1e-4), True)
    assert first["peers"] == {"cudnn_contiguous": 469.0}
    assert second["peers"] is None
    assert completed(measured(us=520.0), None)["rows"][0]["met"] is False


@pytest.mark.parametrize(
    "shape", [{"kv_cache_dtype": "fp8"}, {"head_size": 64}, {"block_size": 8}, {"dtype": "float32"}]
)
def test_other_shapes_have_neither_target_nor_others(shape):
    record = completed(measured(**shape), OTHERS)
    assert record["peers"] is None
    assert all(row[name] is None for row in record["rows"] for name in ("target_tflop_per_s", "ratio", "met", "peers"))


def test_names_of_records():
    shapes = ({}, {"layout": "HND"}, {"kv_cache_dtype": "fp8"}, {"layout": "HND", "head_size": 64})
    names = ["prefill", "prefill-hnd", "prefill-bfloat16-fp8", "prefill-hnd-h64"]
    assert [record_name({**SHAPE, **shape}) for shape in shapes] == names


def test_what_is_kept_of_others():
    record = completed(measured(), report.load(RESULTS, "NVIDIA H200", report.PEERS))
    assert all(row["peers"].keys() == PEER_NAMES.keys() for row in record["rows"])
    assert record["rows"][2]["peers"]["fa3_paged"] == 588


def test_the_table():
    lines = prefill_markdown(completed(measured(us=500.0), OTHERS)).splitlines()
    assert (
        "`flash_attn_varlen_func`, causal, bfloat16, NHD cache auto, heads of 128, blocks of 16, medians." in lines[0]
    )
    assert lines[4].startswith("| sequences | length | heads | us | TFLOP/s | of the target | cuDNN, contiguous |")
    assert lines[6] == "| 16 | 1,024 | 32/8 | 500.0 | 274.9 | **101.8 %** (270) | 469 |  |  |  |  |  |"
    assert lines[7].endswith("| 500.0 | 549.8 | **177.3 %** (310) |  |  |  |  |  |  |")
    assert "Others as recorded on 2026-01-01, A card: as here; flashinfer 0.6." in lines
    slow = prefill_markdown(completed(measured(us=1000.0), None)).splitlines()
    assert slow[6] == "| 16 | 1,024 | 32/8 | 1000.0 | 137.4 | 50.9 % (270) |"
    assert not slow[-1].startswith("Others")


def test_the_section_has_all_records(tmp_path):
    for layout in ("NHD", "HND"):
        record = completed(measured(layout=layout), None)
        report.save(record | {"name": record_name(record["shape"])}, tmp_path)
    section = report.sections(tmp_path)["bench prefill"]
    assert section.count("| 16 | 1,024 | 32/8 | 1000.0 |") == 2
    assert "NHD cache" in section and "HND cache" in section


# ---- the command ----------------------------------------------------------------------------------------------------


def call(*arguments):
    return CliRunner().invoke(main, ["bench", "prefill", *arguments])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--layout packed", "--layout"),
        ("--row 1x1", "--row"),
        ("--seqs 3", "a batch of your own needs both --seqs and --context"),
        ("--results there --row 16x1024", "--results keeps records of all rows and ops: leave out --row, --seqs"),
    ],
)
def test_a_mistake_gets_one_line(line, message):
    result = call(*line.split())
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_from_options_to_record(monkeypatch, tmp_path):
    pretend_card(monkeypatch)
    row = PrefillRow(16, 1024, 32, 8, 270)
    monkeypatch.setattr(PrefillBench, "_row", lambda bench, row: measured(us=500.0)["rows"][0])
    monkeypatch.setattr(prefill_command, "ROWS_BY_NAME", {row.name: row})
    (tmp_path / "a-card").mkdir()
    (tmp_path / "a-card" / "peers.json").write_text(json.dumps(OTHERS))
    for layout in ("NHD", "HND"):
        result = call("--results", str(tmp_path), "--layout", layout)
        assert result.exit_code == 0, result.output
        assert "| 274.9 | **101.8 %** (270) | 469 |" in result.stdout
    assert {path.stem for path in tmp_path.glob("*/*")} == {"peers", "prefill", "prefill-hnd"}


def test_a_batch_of_ones_own(monkeypatch):
    pretend_card(monkeypatch)
    sizes = ("--seqs", "2", "--context", "20", "--heads", "4", "--kv-heads", "2", "--head-size", "16")
    result = call(*sizes, "--kv-cache-dtype", "fp8", "--block-size", "4", "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert (row["row"], row["flops"], row["ratio"]) == ("2x20-4/2", 4 * 2 * 4 * 400 * 16 // 2, None)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_small_batch_on_a_card(layout):
    sizes = ("--seqs", "3", "--context", "300", "--heads", "8", "--kv-heads", "2", "--repeats", "3")
    result = call(*sizes, "--layout", layout, "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert 0 < row["us"] < 1000
