"""The event loop of a process that sends a load."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, on uvloop if it is installed."""
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.run(main)
    return uvloop.run(main)
