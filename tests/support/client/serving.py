"""A small server on a free port, which answers as a test says."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


@asynccontextmanager
async def serving(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], path: str = "/{path:.*}", **settings: Any
) -> AsyncIterator[str]:
    """Answer requests of any method to this path (by default to any) on 127.0.0.1 until the block ends; yield the URL.

    `settings` are those of `web.Application`.
    """
    app = web.Application(**settings)
    app.router.add_route("*", path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
