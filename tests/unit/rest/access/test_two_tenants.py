"""What one group sends or asks for, and what another one feels of it."""

import asyncio
import json
from functools import partial

from bench.load.stream_client import StreamClient
from halfway.rest.server.limits import ApiLimits
from tests.support.rest.client import HOST
from tests.support.rest.guarded import Guarded, guarded
from tests.support.waiting import until_true
from tests.unit.rest.stream.conftest import HANDSHAKE

MESSAGE = {"topic": "orders", "key": "k", "value": "v"}
PING = b"\x89\xfd\0\0\0\0" + b"p" * 125


def bearer(world: Guarded, caller: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {world.tokens[caller]}"}


async def open_raw(world: Guarded, caller: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a stream byte by byte."""
    reader, writer = await asyncio.open_connection(HOST, world.here.port)
    head, _, end = HANDSHAKE.rpartition(b"\r\n")
    writer.write(head + f"Authorization: Bearer {world.tokens[caller]}\r\n".encode() + end + b"\r\n")
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


def _holds(world: Guarded, streams: int, size: int) -> bool:
    """Return whether `here` has this many unfinished frames of a size, on as many streams beside one other."""
    api = world.here.api
    return len(api.streams) == streams + 1 and api.in_flight.arriving == streams * size


async def test_a_stream_that_only_pings_takes_nothing_from_the_streams_of_others() -> None:
    """It sends ten times the bytes that all unread frames may have; the other group's large frame is then done."""
    limits = ApiLimits(max_body_bytes=60_000, max_body_bytes_in_flight=60_000)
    async with guarded(limits=limits) as world:
        _, writer = await open_raw(world, "other")
        stream = await StreamClient.connect(world.here.session, world.here.url, bearer(world, "shop"))
        try:
            for _ in range(10):
                writer.write(PING * (60_000 // len(PING)))
                await writer.drain()
                answer = await stream.prepare("shop", {**MESSAGE, "value": "x" * 40_000})
                assert answer.status == 201
            assert len(world.here.api.streams) == 2
        finally:
            writer.transport.abort()
            await stream.close()
        await until_true(lambda: world.here.api.in_flight.arriving == 0)


async def test_whoever_has_most_unfinished_frames_is_cut_off_and_the_other_group_is_served() -> None:
    """One group begins a large frame on each of many streams, with pings in between, and ends none."""
    limits = ApiLimits(max_body_bytes=60_000, max_body_bytes_in_flight=200_000)
    async with guarded(limits=limits) as world:
        stream = await StreamClient.connect(world.here.session, world.here.url, bearer(world, "shop"))
        writers = []
        try:
            for number in range(8):
                _, writer = await open_raw(world, "other")
                writers.append(writer)
                begun = b"\x01\xfe" + (50_000).to_bytes(2) + b"\0\0\0\0" + b" " * 50_000
                writer.write(begun + PING * 3)
                await until_true(partial(_holds, world, min(number + 1, 4), 50_000))
                answer = await stream.prepare("shop", {**MESSAGE, "value": "x" * 40_000})
                assert answer.status == 201
        finally:
            for writer in writers:
                writer.transport.abort()
            await stream.close()
        await until_true(lambda: world.here.api.in_flight.arriving == 0)


async def test_fragments_without_content_take_nothing_from_the_streams_of_others() -> None:
    """A message of a million empty fragments never ends, and holds nothing."""
    limits = ApiLimits(max_body_bytes=60_000, max_body_bytes_in_flight=60_000)
    async with guarded(limits=limits) as world:
        _, writer = await open_raw(world, "other")
        stream = await StreamClient.connect(world.here.session, world.here.url, bearer(world, "shop"))
        try:
            writer.write(b"\x01\x80\0\0\0\0" + b"\x00\x80\0\0\0\0" * 50_000)
            await writer.drain()
            prepare = {"n": 1, "group": "shop", "messages": [{**MESSAGE, "value": "x" * 40_000}]}
            assert len(json.dumps(prepare)) > 40_000
            assert (await stream.prepare("shop", {**MESSAGE, "value": "x" * 40_000})).status == 201
            assert len(world.here.api.streams) == 2
        finally:
            writer.transport.abort()
            await stream.close()
