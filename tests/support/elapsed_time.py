"""The wall clock as `halfway.coordinator.logging` reads it, moved on by a test; the monotonic one goes on as ever."""

import time
from types import SimpleNamespace

import pytest


class WallClock:
    """A clock that jumps where a test advances it, as it does for a machine that was suspended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead_s = 0.0
        clocks = SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + self._ahead_s)
        monkeypatch.setattr("halfway.coordinator.logging.time", clocks)

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds
