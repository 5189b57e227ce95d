"""Waiting for something that comes about by itself."""

import asyncio
import fcntl
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

GENEROUS_S = 180.0
"""Only a broken product needs this long; no test passes or fails by how fast the machine is."""
_LOOK_AGAIN_S = 0.05
_LOOK_SOON_S = 0.01
"""A condition costs next to nothing, a probe may ask somebody."""


@contextmanager
def only_worker(lock: Path) -> Iterator[None]:
    """Wait until no other worker of the run is in this block with the same file."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


async def eventually(
    probe: Callable[[], Awaitable[T]], until: Callable[[T], object], *, within_s: float = GENEROUS_S
) -> T:
    """Give what `probe` answers as soon as `until` is true of it; AssertionError with the last answer otherwise."""
    deadline = time.monotonic() + within_s
    while True:
        answer = await probe()
        if until(answer):
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"after {within_s:g} s it is still {answer!r}")
        await asyncio.sleep(_LOOK_AGAIN_S)


async def until_true(
    condition: Callable[[], object], what: str = "what is waited for", *, within_s: float = GENEROUS_S
) -> None:
    """Return as soon as `condition` is true; AssertionError with `what` otherwise."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {within_s:g} s still not: {what}")
        await asyncio.sleep(_LOOK_SOON_S)
