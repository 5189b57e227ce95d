"""The ports that the tests pick: no two processes of any test run pick the same one.

A port is picked before the process that is to listen at it starts, so looking whether it is free does not suffice. Each
worker of pytest-xdist, and each run beside it on the same machine, holds a slice of its own by a file's lock as long as
it lives, and gives out the slice's ports in turn. The slices lie below the ports that halfway picks by itself, since
tests also start programs that do so, and below the ephemeral ones.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from pathlib import Path

from halfway.embedded import broker as ports

FIRST = 5_000
SLICE = 500
SLICES = (ports.LOWEST - FIRST) // SLICE
REFUSED_BY_BROWSERS = {5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080}


def take_slice(folder: Path) -> range:
    """Give the first slice that no living process has taken; it is ours until this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(SLICES):
        # Never closed: the lock goes with the process.
        lock = os.open(folder / str(number), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return range(FIRST + number * SLICE, FIRST + (number + 1) * SLICE)
    raise RuntimeError(f"{SLICES} test workers hold all ports from {FIRST} to {ports.LOWEST - 1}: end one of the runs")


@cache
def _turns() -> Iterator[int]:
    own = take_slice(Path(tempfile.gettempdir(), f"halfway-test-ports-{os.getuid()}"))
    return cycle([port for port in own if port not in REFUSED_BY_BROWSERS])


def in_turn() -> Iterator[int]:
    """Give the ports of this worker's slice, once each, from where the last caller stopped."""
    for _, port in zip(range(SLICE), _turns(), strict=False):
        yield port
