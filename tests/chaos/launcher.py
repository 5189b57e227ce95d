"""Runs `halfway` with a wall clock that the chaos harness can set: `python -m tests.chaos.launcher CLOCK serve`.

CLOCK is a file with one signed 64-bit number, the nanoseconds by which the clock is ahead.
"""

from __future__ import annotations

import datetime as dt
import mmap
import struct
import sys
import time
from pathlib import Path
from typing import Any

_FORMAT = struct.Struct("<q")


class ClockFile:
    """The harness's side of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set(0)

    def set(self, ahead_s: float) -> None:
        """Set the clock ahead of the true time, or back if `ahead_s` is negative."""
        self.ahead_s = ahead_s
        data = _FORMAT.pack(int(ahead_s * 1e9))
        if self.path.exists():
            with self.path.open("r+b") as file:
                file.write(data)
        else:
            self.path.write_bytes(data)


def _shift_the_clock(path: Path) -> None:
    with path.open("rb") as file:
        ahead = mmap.mmap(file.fileno(), _FORMAT.size, access=mmap.ACCESS_READ)
    true_time, true_ns = time.time, time.time_ns

    def ahead_ns() -> int:
        return int(_FORMAT.unpack_from(ahead)[0])

    time.time = lambda: true_time() + ahead_ns() / 1e9
    time.time_ns = lambda: true_ns() + ahead_ns()

    class ShiftedDatetime(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Any:
            return dt.datetime.fromtimestamp(time.time(), tz)

    # The scheduler reads these; datetime itself cannot be patched.
    import apscheduler.executors.base
    import apscheduler.job
    import apscheduler.schedulers.base
    import apscheduler.triggers.interval

    for module in (
        apscheduler.executors.base,
        apscheduler.job,
        apscheduler.schedulers.base,
        apscheduler.triggers.interval,
    ):
        if hasattr(module, "datetime"):
            module.datetime = ShiftedDatetime


if __name__ == "__main__":
    _shift_the_clock(Path(sys.argv.pop(1)))
    from halfway.app.cli.main import main

    main()
