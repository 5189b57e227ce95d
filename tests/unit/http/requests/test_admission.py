"""Prepares above the limit wait for a place or are refused; everything else continues."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from halfway.http.requests.admission import Admission, ApiLimits, HeldRefusals, held_s
from tests.support.replies import once
from tests.support.rest.client import HOST, RestWorld
from tests.support.waiting import GENEROUS_S, until_true
from tests.unit.http.conftest import NewWorld

HEAD = b"POST /v1/transactions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
BODY = b'{"group":"shop","messages":[{"topic":"orders","value":"v"}]}'
PREPARE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
LIST = b"GET /v1/groups HTTP/1.1\r\nHost: h\r\n\r\n"
LONG_S = 2 * GENEROUS_S

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connect(world: RestWorld, count: int = 1) -> AsyncIterator[Sequence[Streams]]:
    streams = [await asyncio.open_connection(HOST, world.port) for _ in range(count)]
    try:
        yield streams
    finally:
        for _, writer in streams:
            writer.transport.abort()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], dict[str, object]]:
    async with asyncio.timeout(GENEROUS_S):
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
    return int(lines[0].split()[1]), headers, body


async def until_taken(world: RestWorld, prepares: int, waiting: int = 0) -> None:
    await until_true(lambda: (world.api.admission.prepares, world.api.admission.waiting) == (prepares, waiting))


@pytest.fixture
async def waiting_world(new_world: NewWorld) -> RestWorld:
    """An interface with one prepare at a time; others wait for a long time."""
    return await shop(new_world, LONG_S)


@pytest.fixture
async def refusing_world(new_world: NewWorld) -> RestWorld:
    """An interface with one prepare at a time; others are refused soon."""
    return await shop(new_world, 0.05)


async def shop(new_world: NewWorld, wait_s: float) -> RestWorld:
    world = await new_world(ApiLimits(max_requests=4, prepare_wait_s=wait_s))
    await world.put_shop()
    return world


@asynccontextmanager
async def occupy(world: RestWorld) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.Event]]:
    """Occupy the only place with a prepare that Kafka does not confirm until the event is set; return its reader."""
    go_on = asyncio.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.memory.half_log, "append", once(go_on, world.memory.half_log.append))
        async with connect(world) as [(reader, writer)]:
            writer.write(PREPARE)
            await until_taken(world, 1)
            try:
                yield reader, go_on
            finally:
                go_on.set()


def finish(occupant: tuple[asyncio.StreamReader, asyncio.Event]) -> None:
    occupant[1].set()


async def test_a_prepare_that_waits_gets_the_place_that_becomes_free(waiting_world: RestWorld) -> None:
    async with occupy(waiting_world) as occupant, connect(waiting_world, 2) as waiters:
        for _, writer in waiters:
            writer.write(PREPARE)
        await until_taken(waiting_world, 1, 2)
        finish(occupant)
        assert (await answer(occupant[0]))[0] == 201
        assert [(await answer(reader))[0] for reader, _ in waiters] == [201, 201]
    await until_taken(waiting_world, 0)


async def test_a_prepare_that_waits_in_vain_is_told_when_to_come_again(refusing_world: RestWorld) -> None:
    """With a problem document and the id of its request, on a connection that stays open."""
    async with occupy(refusing_world) as occupant, connect(refusing_world) as [(reader, writer)]:
        for _ in range(2):
            writer.write(PREPARE.replace(b"Host: h\r\n", b"Host: h\r\nX-Request-Id: mine\r\n"))
            status, headers, problem = await answer(reader)
            assert (status, headers["retry-after"], problem["error_code"]) == (429, "1", "overloaded")
            assert headers["content-type"] == "application/problem+json"
            assert headers["x-request-id"] == problem["instance"] == "mine"
        writer.write(PREPARE)
        _, headers, problem = await answer(reader)
        assert headers["x-request-id"] == problem["instance"]
        writer.write(LIST)
        assert (await answer(reader))[0] == 200
        finish(occupant)
        assert (await answer(occupant[0]))[0] == 201
        await until_taken(refusing_world, 0)
        writer.write(PREPARE)
        assert (await answer(reader))[0] == 201


async def test_whatever_begins_nothing_is_served_meanwhile(waiting_world: RestWorld) -> None:
    """Ends above all: transactions that were begun must be ended."""
    transaction_id = await waiting_world.prepared()
    async with occupy(waiting_world), connect(waiting_world) as [(_, writer)]:
        writer.write(PREPARE)
        await until_taken(waiting_world, 1, 1)
        ended = await waiting_world.call("POST", f"/v1/transactions/{transaction_id}/end", {"outcome": "commit"})
        assert (ended.status, ended.body["state"]) == (200, "committed")
        assert (await waiting_world.call("GET", "/v1/groups")).status == 200


async def test_who_goes_away_while_waiting_begins_nothing(waiting_world: RestWorld) -> None:
    async with occupy(waiting_world) as occupant:
        async with connect(waiting_world) as [(_, writer)]:
            writer.write(PREPARE)
            await until_taken(waiting_world, 1, 1)
        finish(occupant)
        assert (await answer(occupant[0]))[0] == 201
        await until_taken(waiting_world, 0)
    assert waiting_world.requests.counts["prepare", 201] == 1


async def test_who_goes_away_with_a_place_gives_it_back(waiting_world: RestWorld) -> None:
    async with occupy(waiting_world):
        pass
    await until_taken(waiting_world, 0)
    assert (await waiting_world.prepare()).status == 201


async def test_a_body_that_is_slow_to_come_keeps_nobody_out(waiting_world: RestWorld) -> None:
    async with connect(waiting_world, 2) as [(slow_reader, slow), (reader, writer)]:
        slow.write(PREPARE[:-1])
        await until_true(lambda: waiting_world.api.in_flight.bytes)
        assert waiting_world.api.in_flight.taken == 0, "only what has wholly come takes a place"
        writer.write(PREPARE)
        assert (await answer(reader))[0] == 201
        slow.write(PREPARE[-1:])
        assert (await answer(slow_reader))[0] == 201
    await until_taken(waiting_world, 0)


async def test_a_prepare_that_is_refused_further_in_gives_its_place_back(waiting_world: RestWorld) -> None:
    async with connect(waiting_world) as [(reader, writer)]:
        for wrong in (b"text/plain", b"application/json"):
            writer.write(PREPARE.replace(b"application/json", wrong).replace(b'"shop"', b'"nope"'))
            assert (await answer(reader))[0] in {415, 404}
            await until_taken(waiting_world, 0)
        writer.write(PREPARE)
        assert (await answer(reader))[0] == 201


async def test_requests_sent_ahead_of_answers_are_answered_in_order(refusing_world: RestWorld) -> None:
    async with occupy(refusing_world), connect(refusing_world) as [(reader, writer)]:
        writer.write(PREPARE + LIST)
        assert [(await answer(reader))[0] for _ in range(2)] == [429, 200]
        writer.write(LIST + PREPARE + LIST)
        assert [(await answer(reader))[0] for _ in range(3)] == [200, 429, 200]


async def test_more_than_may_wait_are_turned_away_at_once(waiting_world: RestWorld) -> None:
    async with occupy(waiting_world), connect(waiting_world, 3) as callers:
        for _, writer in callers[:2]:
            writer.write(PREPARE)
        await until_taken(waiting_world, 1, 2)
        callers[2][1].write(PREPARE)
        assert (await answer(callers[2][0]))[0] == 429


async def test_whoever_waits_at_a_stop_hears_of_it(waiting_world: RestWorld) -> None:
    async with occupy(waiting_world) as occupant, connect(waiting_world) as [(reader, writer)]:
        writer.write(PREPARE)
        await until_taken(waiting_world, 1, 1)
        draining = asyncio.create_task(waiting_world.api.drain(asyncio.get_running_loop().time() + 30))
        status, headers, problem = await answer(reader)
        assert (status, problem["error_code"]) == (503, "shutting_down")
        assert headers["retry-after"]
        finish(occupant)
        async with asyncio.timeout(GENEROUS_S):
            await draining


async def test_a_place_that_comes_with_the_end_of_patience_is_taken_or_given_on() -> None:
    """Whatever coincides in one turn of the event loop, no place is lost and none is created."""
    admission = Admission(max_requests=4, wait_s=0.01)
    loop = asyncio.get_running_loop()
    for late_s in (0.0, 0.005, 0.0099, 0.01, 0.0101, 0.015):
        await admission.enter(None)
        waiting = [asyncio.create_task(admission.enter(None)) for _ in range(2)]
        await asyncio.sleep(0)
        loop.call_later(late_s, admission.leave)
        loop.call_later(late_s, waiting[0].cancel)
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.sleep(0.02)
        assert (admission.prepares, admission.waiting) == (ends.count(None), 0)
        for _ in range(ends.count(None)):
            admission.leave()


async def test_refusals_of_a_group_at_its_limit_are_held_back_up_to_a_number() -> None:
    """Further refusals, and those of other groups, are not delayed; each answered one makes room for another."""
    refusals = HeldRefusals(wait_s=3600, most=2)
    held = [asyncio.create_task(refusals.hold("shop")) for _ in range(2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(GENEROUS_S):
        await refusals.hold("shop")
    assert not any(task.done() for task in held)
    held.pop().cancel()
    await asyncio.sleep(0)
    held.append(asyncio.create_task(refusals.hold("shop")))
    await asyncio.sleep(0)
    assert not any(task.done() for task in held)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)


async def test_a_refusal_that_was_held_back_is_told_in_the_end() -> None:
    refusals = HeldRefusals(wait_s=0.01, most=1)
    for _ in range(2):
        await asyncio.wait_for(refusals.hold("shop"), GENEROUS_S)


def test_refusals_are_not_all_told_at_one_moment() -> None:
    """Callers that were refused together would otherwise return together."""
    times = [held_s(2.0) for _ in range(100)]
    assert len(set(times)) > 50
    assert 1.0 <= min(times) < max(times) <= 2.0
