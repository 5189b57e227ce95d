"""Calls functions that may block from an event loop, and waits for tasks."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


async def awaited(call: Callable[P, T | Awaitable[T]], *arguments: P.args, **named: P.kwargs) -> T:
    """Await a coroutine function; run any other function, which may block, in a thread."""
    if inspect.iscoroutinefunction(call):
        return await call(*arguments, **named)  # type: ignore[no-any-return]  # what it says
    blocking = cast("Callable[P, T]", call)
    return await asyncio.to_thread(blocking, *arguments, **named)


async def finished(task: asyncio.Task[None]) -> None:
    """Wait for a task, which goes on if this is cancelled."""
    await asyncio.wait({task})
