"""``pagedkv bench mixed``: the calls of each row, a check before each time, the record, its table; without a card."""

import json

import click
import numpy as np
import pytest
from bench_fakes import ORIGIN, StillClock, pretend_card, spy_on
from click.testing import CliRunner

import pagedkv
from pagedkv.cli import mixed_command, report
from pagedkv.cli.bench_cache import CacheKind
from pagedkv.cli.bench_mixed import MixedBench
from pagedkv.cli.bench_shape import DEFAULT_SHAPE
from pagedkv.cli.main import main
from pagedkv.cli.mixed_rows import ROWS, CascadeRow, MixedRow, WindowRow, record_name
from pagedkv.cli.mixed_table import mixed_markdown
from pagedkv.dtypes import BFLOAT16

SMALL = (MixedRow(3, 40, 2, 24), WindowRow(2, 100, 20), CascadeRow(3, 64, 24))
TIMES = (10.0, 4.0, 6.0, 7.0, 5.0, 3.0, 15.0)


def small_bench(layout="NHD", times=TIMES):
    return MixedBench(np, StillClock(times), CacheKind(BFLOAT16, "auto", layout, 16, 16))


def test_the_rows_are_those_whose_targets_were_set():
    assert (MixedRow(32, 4096, 2, 2048), WindowRow(32, 32768, 1024), CascadeRow(64, 32768, 128)) == ROWS
    assert [(row.name, row.target) for row in ROWS] == [("mixed", 1.05), ("window", 1.2), ("cascade", 0.2)]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_bench_records_what_it_measured(layout):
    lines = []
    record = small_bench(layout).run(SMALL, lines.append)
    assert record["shape"] == {**DEFAULT_SHAPE, "layout": layout, "head_size": 16}
    assert record["ceilings"]["empty_us"] == 3.0
    mixed, window, cascade = record["rows"]
    assert mixed["us"] == {"mixed": 10.0, "decode": 4.0, "prefill": 6.0}
    assert window["us"] == {"window": 7.0, "short": 5.0}
    assert cascade["us"] == {"cascade": 3.0, "varlen": 15.0}
    assert [row["ratio"] for row in record["rows"]] == [1.0, 1.4, 0.2]
    assert [row["target_ratio"] for row in record["rows"]] == [1.05, 1.2, 0.2]
    assert [row["met"] for row in record["rows"]] == [True, False, True]
    assert [row["num_heads"] for row in record["rows"]] == [32, 32, 32]
    assert mixed["instance"].keys() == mixed["us"].keys()
    assert lines[1] == "window    window      7.0 us  short      5.0 us  (1.400)"


def test_one_call_has_the_sequences_of_its_parts(monkeypatch):
    calls = spy_on(monkeypatch, "flash_attn_varlen_func")
    small_bench().run(SMALL[:1], lambda line: None)
    whole, decode, prefill = (arguments for _, arguments in calls[::2])  # each is checked, then timed
    assert whole["seqused_k"].tolist() == [40, 40, 40, 24, 24]
    assert np.diff(whole["cu_seqlens_q"]).tolist() == [1, 1, 1, 24, 24]
    assert (decode["max_seqlen_q"], decode["cu_seqlens_q"].tolist()) == (1, [0, 1, 2, 3])
    assert (prefill["max_seqlen_q"], prefill["cu_seqlens_q"].tolist()) == (24, [0, 24, 48])
    assert all(given["causal"] for given in (whole, decode, prefill))
    for name in ("q", "block_table", "seqused_k"):
        np.testing.assert_array_equal(np.concatenate([decode[name], prefill[name]]), whole[name])


def test_a_window_of_a_long_context_beside_a_short_one(monkeypatch):
    calls = spy_on(monkeypatch, "flash_attn_varlen_func")
    small_bench().run(SMALL[1:2], lambda line: None)
    window, short = (arguments for _, arguments in calls[::2])
    assert (window["window_size"], window["seqused_k"].tolist()) == ((19, 0), [100, 100])
    assert (short["window_size"], short["seqused_k"].tolist()) == ((-1, 0), [20, 20])


def test_a_shared_prefix_beside_the_same_read_for_each(monkeypatch):
    calls = spy_on(monkeypatch, "cascade_attention", "flash_attn_varlen_func")
    small_bench().run(SMALL[2:], lambda line: None)
    (_, cascade), _, (_, varlen), _ = calls
    assert cascade["common_prefix_len"] == 64
    assert varlen["seqused_k"].tolist() == [88, 88, 88]
    for name in ("q", "k", "v", "block_table", "seqused_k", "cu_seqlens_q"):
        assert cascade[name] is varlen[name]
    table = varlen["block_table"]
    assert (table[:, :4] == table[0, :4]).all()
    assert np.unique(table).size == 4 + 3 * 2


@pytest.mark.parametrize(
    ("row", "op", "first"), [(0, "flash_attn_varlen_func", "mixed"), (2, "cascade_attention", "cascade")]
)
def test_a_wrong_result_is_not_timed(monkeypatch, row, op, first):
    monkeypatch.setattr(pagedkv, op, lambda *arrays, out, **options: out.fill(0))
    bench = small_bench()
    monkeypatch.setattr(bench.stopwatch, "microseconds", lambda launch: pytest.fail("it was timed"))
    with pytest.raises(
        click.ClickException, match=f"{first}, {first}: relative error 1 in token 0, .*so it is not timed"
    ):
        bench.run(SMALL[row:], lambda line: None)


def test_the_last_call_is_checked_too(monkeypatch):
    monkeypatch.setattr(pagedkv, "flash_attn_varlen_func", lambda *arrays, out, **options: out.fill(0))
    with pytest.raises(click.ClickException, match="cascade, varlen: relative error 1"):
        small_bench().run(SMALL[2:], lambda line: None)


def test_names_of_records():
    shape = {**DEFAULT_SHAPE, "layout": "NHD"}
    assert record_name(shape) == "mixed"
    assert record_name({**shape, "layout": "HND", "kv_cache_dtype": "fp8"}) == "mixed-hnd-bfloat16-fp8"


def test_the_table(tmp_path):
    record = {**ORIGIN, **small_bench().run(SMALL, lambda line: None)}
    lines = mixed_markdown(record).splitlines()
    assert "32/8 heads, bfloat16, NHD cache auto, heads of 16, blocks of 16, medians" in lines[0]
    assert lines[4:9] == [
        "| what | us | beside | us | ratio |",
        "|---|---|---|---|---:|",
        "| 3 decodes at 40 with 2 prefills of 24 in one call | 10.0 | a call of each | 4.0 + 6.0 | **1.000** (1.050) |",
        "| 2 decodes at 100 with a window of 20 | 7.0 | 2 decodes at 20 without one | 5.0 | 1.400 (1.200) |",
        "| `cascade_attention`, 3 decodes over 64 shared tokens and 24 of their own | 3.0 "
        "| `flash_attn_varlen_func` over the same | 15.0 | **0.200** (0.200) |",
    ]
    report.save(record, tmp_path)
    assert report.sections(tmp_path)["bench mixed"] == "\n".join(lines)


# ---- the command ----------------------------------------------------------------------------------------------------


def call(*arguments):
    return CliRunner().invoke(main, ["bench", "mixed", *arguments])


def test_a_part_replaces_no_record(tmp_path):
    result = call("--row", "window", "--results", str(tmp_path))
    assert result.exit_code == 2
    assert "leave out --row, or take --json" in result.stderr


def test_from_options_to_record(monkeypatch, tmp_path):
    pretend_card(monkeypatch)
    monkeypatch.setattr(mixed_command, "ROWS_BY_NAME", {row.name: row for row in SMALL})
    for layout in ("NHD", "HND"):
        result = call("--results", str(tmp_path), "--layout", layout, "--head-size", "16", "--json")
        assert result.exit_code == 0, result.output
        assert [row["row"] for row in json.loads(result.stdout)["rows"]] == ["mixed", "window", "cascade"]
    assert {path.stem for path in tmp_path.glob("*/*")} == {"mixed-h16", "mixed-hnd-h16"}
    (row,) = json.loads(call("--row", "cascade", "--json").stdout)["rows"]
    assert row["ratio"] == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_small_rows_on_a_card(monkeypatch, layout):
    monkeypatch.setattr(mixed_command, "ROWS_BY_NAME", {row.name: row for row in SMALL})
    result = call("--layout", layout, "--repeats", "3", "--json")
    assert result.exit_code == 0, result.output
    assert all(0 < us < 1000 for row in json.loads(result.stdout)["rows"] for us in row["us"].values())
