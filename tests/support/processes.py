"""Processes of this machine."""

import time
from collections.abc import Callable
from pathlib import Path

from tests.support.waiting import GENEROUS_S

_LOOK_AGAIN_S = 0.02


def alive(pid: int) -> bool:
    """Tell whether a process lives; one that has ended, but is not yet waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition: Callable[[], bool]) -> bool:
    """Wait for what another process does; tell whether it came about."""
    deadline = time.monotonic() + GENEROUS_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_AGAIN_S)
    return True
