"""Progress of long work: a line of plain text on stderr every few seconds. Work that is done sooner says nothing."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EVERY_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Doing:
    """What an engine does now, and how much of it is done, if that is known."""

    what: str
    done: float = 0
    total: float = 0
    unit: str = ""
    aside: str = ""


@contextmanager
def told(job: str, doing: Callable[[], Doing | None]) -> Iterator[None]:
    """Say on stderr, until the end, what a job does."""
    ended = Event()

    def tell() -> None:
        began, before = time.monotonic(), Doing(what="")
        while not ended.wait(EVERY_S):
            now = doing()
            if now is None:
                continue
            if (now.what, now.total) != (before.what, before.total) or now.done < before.done:
                began = time.monotonic() - EVERY_S
            before = now
            sys.stderr.write(f"halfway-pipeline {job}: {line(now, time.monotonic() - began)}\n")
            sys.stderr.flush()

    thread = Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def line(now: Doing, seconds: float) -> str:
    """Return a line about work that has taken a time."""
    if not now.total:
        return f"{now.what}: {now.done:,.0f} {now.unit}{now.aside}, {seconds:.0f} s so far"
    share = min(1.0, now.done / now.total)
    amount = f"{now.done:,.0f} of {now.total:,.0f} {now.unit}" if now.unit else f"{share:.0%}"
    left = f", about {seconds * (1 - share) / share:,.0f} s left" if share else ""
    return f"{now.what}: {amount}{now.aside}{left}"
