"""A coordinator that stalls, or dies, between the calls of a client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from tests.support.client.serving import serving
from tests.support.rest.client import RestWorld


class Stalling:
    """Accepts requests, and answers each only when the test allows it."""

    def __init__(self, world: RestWorld) -> None:
        self._world = world
        self.arrived: asyncio.Queue[str] = asyncio.Queue()
        self.goes_on = asyncio.Semaphore(0)
        self.dies_before = ""
        """The kind of call, `prepare` or `end`, whose connections are cut from then on."""
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        kind = next(iter(body))
        if kind == self.dies_before:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        self.arrived.put_nowait(kind)
        await self.goes_on.acquire()
        answer = await self._world.call("POST", "/v1/batch", body)
        return web.json_response(answer.body, status=answer.status, headers={"Date": answer.headers["Date"]})


@asynccontextmanager
async def run_stalling(world: RestWorld) -> AsyncIterator[Stalling]:
    """Run one in front of the coordinator of `world`."""
    stalling = Stalling(world)
    app = web.Application()
    app.router.add_post("/v1/batch", stalling.answer)
    async with serving(app) as stalling.url:
        try:
            yield stalling
        finally:
            for _ in range(100):  # release waiting requests: the server stops after it has answered
                stalling.goes_on.release()
