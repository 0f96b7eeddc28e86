"""What stands in for a card in tests of benches: a clock that says what it likes, and NumPy for CuPy."""

import sys
from types import SimpleNamespace

import numpy as np

import pagedkv
from pagedkv.cli import machine

ORIGIN = {"card": "A card", "driver": "1.2", "versions": {"cupy": "14.2.0"}, "commit": "abc", "date": "2026-01-02"}


class StillClock:
    """A stopwatch that runs what it is given and says what it likes: 12 us, or what ``times`` has next."""

    repeats, sms = 7, 4

    def __init__(self, times=()):
        self.best_of, self.times = [], iter(times)

    def microseconds(self, launch):
        launch()
        return next(self.times, 12.0)

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


def pretend_card(monkeypatch):
    """A whole command with NumPy for CuPy and a still clock."""
    parts = {
        "cupy": np,
        "pagedkv.cli.timing": SimpleNamespace(Stopwatch=lambda repeats: StillClock()),
        "pagedkv.cli.environment": SimpleNamespace(environment=lambda: dict(ORIGIN)),
    }
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
    monkeypatch.setattr(machine, "why_no_cuda", lambda: None)


def spy_on(monkeypatch, *ops):
    """The arguments of all calls of these ops from now on, with the op's name first."""
    calls = []
    for name in ops:
        monkeypatch.setattr(pagedkv, name, _spy(name, getattr(pagedkv, name), calls))
    return calls


def _spy(name, op, calls):
    def called(**arguments):
        calls.append((name, arguments))
        return op(**arguments)

    called.__signature__ = pagedkv.cli.execute.signature(op)
    return called
