"""Calling what may block from an event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


async def awaited(call: Callable[P, T | Awaitable[T]], *arguments: P.args, **named: P.kwargs) -> T:
    """Call a coroutine function here, and any other, which may block, in a thread."""
    if inspect.iscoroutinefunction(call):
        return await call(*arguments, **named)  # type: ignore[no-any-return]  # what it says
    blocking = cast("Callable[P, T]", call)
    return await asyncio.to_thread(blocking, *arguments, **named)
