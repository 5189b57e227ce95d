"""Processes of this machine."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.support.waiting import GENEROUS_S

_LOOK_AGAIN_S = 0.02


def alive(pid: int) -> bool:
    """Tell whether a process lives; one that has ended, but is not yet waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """Return the ids of a process's running children, if the system provides them."""
    tasks = Path(f"/proc/{pid}/task")
    if not tasks.is_dir():
        return []
    found: list[int] = []
    for task in tasks.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += map(int, (task / "children").read_text().split())
    return found


def eventually(condition: Callable[[], bool]) -> bool:
    """Wait for what another process does; tell whether it came about."""
    deadline = time.monotonic() + GENEROUS_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_AGAIN_S)
    return True
