"""What all benches do before they measure."""

import pytest
from click.testing import CliRunner

from pagedkv.cli import machine
from pagedkv.cli.main import main


@pytest.mark.parametrize("bench", ["write", "decode", "prefill", "mixed"])
def test_without_a_gpu_it_says_why(monkeypatch, bench):
    monkeypatch.setattr(machine, "why_no_cuda", lambda: "no NVIDIA driver")
    result = CliRunner().invoke(main, ["bench", bench])
    assert result.exit_code == 1
    assert result.stderr == f"Error: bench {bench} needs a GPU: no NVIDIA driver; see pagedkv info\n"
