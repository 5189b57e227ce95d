"""The wall clock as `halfway.coordinator.logging` reads it, moved on by a test; the monotonic one goes on as ever."""

import time
from types import SimpleNamespace
from typing import Self
from unittest.mock import patch


class WallClock:
    """A clock that jumps where a test advances it, as it does for a machine that was suspended.

    It is put back within the test: `monkeypatch` would do so after the machine of a test in virtual time has ended, and
    put that machine's clock back.
    """

    def __init__(self) -> None:
        self._ahead_s = 0.0
        clocks = SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + self._ahead_s)
        self._patch = patch("halfway.coordinator.logging.time", clocks)

    def __enter__(self) -> Self:
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds
