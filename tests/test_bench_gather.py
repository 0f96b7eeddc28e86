"""`pagedkv bench gather`: what it records, that a wrong result is not timed, and its table."""

import json
import sys
from types import SimpleNamespace

import bench_fakes
import click
import numpy as np
import pytest
from bench_fakes import StillClock, pretend_card
from click.testing import CliRunner

import pagedkv
from pagedkv.cli import gather_command, machine, report
from pagedkv.cli.gather_rows import ROWS, AdvanceRow, ConvertRow, GatherBench, GatherForm, GatherRow
from pagedkv.cli.gather_table import gather_markdown
from pagedkv.cli.main import main

FORM = GatherForm(num_seqs=2, context=48, num_kv_heads=2, head_size=16)
NUMBERS = 2 * 2 * 48 * 2 * 16


class CopyClock(StillClock):
    def __init__(self, times=()):
        super().__init__(times)
        self.copied = []

    def copy(self, nbytes):
        self.copied.append(nbytes)
        return 9.0


def bench(times=()):
    return GatherBench(np, CopyClock(times), FORM)


def small(row):
    return AdvanceRow(num_seqs=40, max_blocks=300) if isinstance(row, AdvanceRow) else row


SMALL = [small(row) for row in ROWS]


def test_every_row_is_measured_beside_a_plain_copy():
    gathers, lines = bench(times=(10.0,) * 7 + (3.5,)), []
    rows = gathers.run(SMALL, lines.append)["rows"]
    assert [row["row"] for row in rows] == [
        *("gather-nhd", "gather-hnd", "gather-packed", "gather-nhd-fp8"),
        *("convert-nhd-hnd", "convert-nhd-packed", "convert-packed-nhd", "advance-40"),
    ]
    assert rows[0] == {
        "row": "gather-nhd",
        "what": "`gather_cache`, NHD",
        "read_bytes": 2 * NUMBERS,
        "written_bytes": 2 * NUMBERS,
        "us": 10.0,
        "plain_us": 9.0,
        "share": 0.9,
    }
    assert (rows[3]["read_bytes"], rows[3]["written_bytes"]) == (NUMBERS, 2 * NUMBERS)
    assert gathers.stopwatch.copied == [2 * NUMBERS] * 3 + [NUMBERS * 3 // 2] + [2 * NUMBERS] * 3
    assert rows[-1] == {"row": "advance-40", "what": "`advance_decode`, 40 sequences", "us": 3.5}
    assert lines[0] == "gather-nhd              10.0 us  plain copy       9.0 us  (90.0 %)"


OPS = {GatherRow: "gather_cache", ConvertRow: "convert_layout", AdvanceRow: "advance_decode"}


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
@pytest.mark.parametrize("side", [0, 1])
def test_a_wrong_result_is_not_timed(monkeypatch, row, side):
    op = OPS[type(row)]
    right = getattr(pagedkv, op)

    def wrong(*arrays, **options):
        right(*arrays, **options)
        out = arrays[2 + side] if op == "advance_decode" else options[("key_out", "value_out")[side]]
        flat = out.reshape(-1).view(np.uint8)
        flat[-1] ^= 1

    monkeypatch.setattr(pagedkv, op, wrong)
    gathers = bench()
    gathers.stopwatch.microseconds = pytest.fail
    with pytest.raises(click.ClickException, match=f"{row.name}: the result is wrong, so it is not timed"):
        gathers.run([row], str)


def test_the_table():
    record = bench_fakes.ORIGIN | bench(times=(10.0, 3.5)).run([SMALL[3], SMALL[-1]], str)
    lines = gather_markdown(record).splitlines()
    assert lines[0].endswith(
        ": keys and values of 2 sequences of 48 tokens, bfloat16, blocks of 16 x 2 x 16, "
        "medians of graph replays, L2 cold, 7 each."
    )
    assert lines[4:8] == [
        "| what | bytes read | and written | us | plain copy | share |",
        "|---|---:|---:|---:|---:|---:|",
        "| `gather_cache`, NHD, fp8 | 6.14 kB | 12.3 kB | 10.0 | 9.0 | 90.0 % |",
        "| `advance_decode`, 40 sequences |  |  | 3.5 |  |  |",
    ]


def call(*arguments):
    return CliRunner().invoke(main, ["bench", "gather", *arguments])


def test_from_options_to_record(monkeypatch, tmp_path):
    pretend_card(monkeypatch)
    clock = SimpleNamespace(Stopwatch=lambda repeats: CopyClock())
    monkeypatch.setitem(sys.modules, "pagedkv.cli.timing", clock)
    monkeypatch.setattr(pagedkv.cli, "timing", clock, raising=False)
    monkeypatch.setattr(gather_command, "ROWS_BY_NAME", {row.name: row for row in SMALL})
    monkeypatch.setattr(gather_command, "GatherBench", lambda xp, clock: GatherBench(xp, clock, FORM))
    result = call("--results", str(tmp_path))
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "a-card" / "gather.json").read_text())
    assert len(record["rows"]) == 8
    assert report.sections(tmp_path)["bench gather"] == gather_markdown(record)


def test_without_a_card(monkeypatch):
    monkeypatch.setattr(machine, "why_no_cuda", lambda: "no NVIDIA driver")
    result = call()
    assert result.exit_code == 1
    assert "bench gather needs a GPU: no NVIDIA driver" in result.output


@pytest.mark.gpu
def test_small_rows_on_a_card():
    import cupy

    from pagedkv.cli.timing import Stopwatch

    rows = GatherBench(cupy, Stopwatch(3), FORM).run(SMALL, str)["rows"]
    assert all(0 < row["us"] < 1000 for row in rows)
