"""Calls blocking functions from an event loop, and waits for tasks."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


async def call_async(function: Callable[P, T | Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Await a coroutine function; run any other function in a thread, because it may block."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)  # type: ignore[no-any-return]  # T, by its type
    blocking = cast("Callable[P, T]", function)
    return await asyncio.to_thread(blocking, *args, **kwargs)


async def wait_for(task: asyncio.Task[None]) -> None:
    """Wait for a task. The task continues if the wait is cancelled."""
    await asyncio.wait({task})
