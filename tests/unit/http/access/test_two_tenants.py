"""What one group sends or asks for, and what another one feels of it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
from aiohttp import StreamReader

from halfway.coordinator.operations import Operation
from halfway.coordinator.ports import OpsRead
from halfway.coordinator.queries import queries as get_and_list
from halfway.coordinator.queries.queries import Filter, Lookup
from halfway.coordinator.requests import End, EndResult
from halfway.http.requests.admission import ApiLimits
from halfway.http.responses import MAX_BYTES, SLICE_BYTES
from halfway.protocol.entries import Entry
from halfway.protocol.principal import Principal
from tests.support.coordinator.stream_client import StreamClient
from tests.support.rest.client import HOST, SHOP
from tests.support.rest.guarded import Guarded, guarded, own_id
from tests.support.waiting import GENEROUS_S, until_true
from tests.unit.http.stream.conftest import HANDSHAKE

MESSAGE = {"topic": "orders", "key": "k", "value": "v"}
CHUNK = b"1\r\n \r\n"
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


@pytest.mark.parametrize(
    "begun, sent",
    [(b"", PING), (b"\x01\x80\0\0\0\0", b"\x00\x80\0\0\0\0")],
    ids=["pings", "fragments of a message that never ends"],
)
async def test_a_stream_that_sends_no_content_takes_nothing_from_the_streams_of_others(
    begun: bytes, sent: bytes
) -> None:
    """It may send few such frames a second, which take none of the bytes of others; one that sends more is cut off."""
    limits = ApiLimits(max_body_bytes=60_000, max_body_bytes_in_flight=60_000)
    async with guarded(limits=limits) as world:
        _, writer = await open_raw(world, "other")
        stream = await StreamClient.connect(world.here.session, world.here.url, bearer(world, "shop"))
        try:
            writer.write(begun + sent * 15)
            answer = await stream.prepare("shop", {**MESSAGE, "value": "x" * 40_000})
            assert answer.status == 201
            assert len(world.here.api.streams) == 2
            writer.write(sent * 1000)
            await until_true(lambda: len(world.here.api.streams) == 1)
            answer = await stream.prepare("shop", {**MESSAGE, "value": "x" * 40_000})
            assert answer.status == 201
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


async def test_look_ups_of_one_group_let_the_history_of_another_be_read_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group asks for 24 at once. Those above its own bound are refused; the other's one waits for two of them."""
    async with guarded() as world:
        read: list[str] = []
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def ops(shard: int, transaction_id: str, **_: object) -> OpsRead:
            del shard
            read.append(transaction_id)
            begun.set()
            await go_on.wait()
            return OpsRead(ops=(), complete=True)

        histories = world.here.coordinator._histories
        monkeypatch.setattr(histories._history, "ops", ops)
        many = [asyncio.create_task(_history(world, "other", own_id(0, f"o{number}"))) for number in range(24)]
        await asyncio.wait_for(begun.wait(), GENEROUS_S)
        await until_true(lambda: sum(task.done() for task in many) == 24 - 17)
        one = asyncio.create_task(_history(world, "shop", own_id(0, "s")))
        await until_true(lambda: histories._group_places.waiting_of("shop") == 1)
        go_on.set()
        assert await one == 404
        assert read.index(own_id(0, "s")) <= 2
        statuses = await asyncio.gather(*many)
        assert (statuses.count(404), statuses.count(429)) == (17, 7)


async def _history(world: Guarded, caller: str, name: str) -> int:
    return (await world.call(caller, "GET", f"/v1/transactions/{name}/history")).status


async def test_requests_of_one_group_that_hang_leave_places_to_another() -> None:
    """They are all that may be in flight; the other group prepares, looks and ends, and the first one has its share."""
    async with guarded(limits=ApiLimits(max_requests=8)) as world:
        names = [own_id(0, f"o{number}") for number in range(12)]
        for name in names:
            assert await _prepare(world, "other", name) == 201
        with world.here.memory.faults.lane_held():
            ending = [asyncio.create_task(_end(world, "other", name)) for name in names]
            await until_true(lambda: sum(task.done() for task in ending) == 4)
            assert world.here.api.in_flight.taken == 8
            for name in (own_id(0, "s1"), own_id(0, "s2")):
                assert await _prepare(world, "shop", name) == 201
                assert (await world.call("shop", "GET", f"/v1/transactions/{name}")).status == 200
            mine = asyncio.create_task(_end(world, "shop", own_id(0, "s1")))
            await until_true(lambda: world.here.api.in_flight.taken == 9)
        assert await mine == 200
        statuses = await asyncio.gather(*ending)
        assert (statuses.count(200), statuses.count(429)) == (8, 4)
        assert world.here.api.in_flight.taken == 0


async def test_bodies_of_one_group_leave_bytes_to_another() -> None:
    """One group's slow bodies are all that may be in flight; another group's large body is done."""
    limits = ApiLimits(max_body_bytes=60_000, max_body_bytes_in_flight=100_000)
    async with guarded(limits=limits) as world:
        slow = []
        try:
            for number in range(2):
                _, writer = await asyncio.open_connection(HOST, world.here.port)
                slow.append(writer)
                writer.write(
                    b"POST /v1/transactions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
                    + f"Authorization: Bearer {world.tokens['other']}\r\n".encode()
                    + b"Content-Length: 60000\r\n\r\n"
                    + b" " * 50_000
                )
                await until_true(lambda held=(number + 1) * 50_000: world.here.api.in_flight.bytes == held)  # type: ignore[misc]
            assert await _prepare(world, "shop", own_id(0, "s"), "x" * 40_000) == 201
            assert await _prepare(world, "other", own_id(0, "o"), "x" * 40_000) == 429
        finally:
            for writer in slow:
                writer.transport.abort()
        await until_true(lambda: world.here.api.in_flight.bytes == 0)


async def test_prepares_of_one_group_that_wait_let_one_of_another_come_next() -> None:
    """As many of one group wait as may; the next place but one is the other group's."""
    async with guarded(limits=ApiLimits(max_requests=40, prepare_wait_s=GENEROUS_S)) as world:
        admission = world.here.api.admission
        assert admission.take(10) == 10
        answered: list[str] = []

        async def prepare(caller: str, name: str) -> int:
            status = await _prepare(world, caller, own_id(0, name))
            answered.append(caller)
            return status

        many = [asyncio.create_task(prepare("other", f"o{number}")) for number in range(24)]
        await until_true(lambda: admission.waiting == 20 and sum(task.done() for task in many) == 4)
        one = asyncio.create_task(prepare("shop", "s"))
        await until_true(lambda: admission.waiting == 21)
        del answered[:]
        admission.leave()
        assert await one == 201
        assert len(answered) <= 3
        admission.leave(9)
        statuses = await asyncio.gather(*many)
        assert (statuses.count(201), statuses.count(429)) == (20, 4)


async def _prepare(world: Guarded, caller: str, name: str, value: str = "v") -> int:
    made = {"group": caller, "id": name, "messages": [{**MESSAGE, "value": value}]}
    return (await world.call(caller, "POST", "/v1/transactions", made)).status


async def _end(world: Guarded, caller: str, name: str) -> int:
    return (await world.call(caller, "POST", f"/v1/transactions/{name}/end", {"outcome": "commit"})).status


class LoopTurns:
    """Counts the turns of the event loop, and in which of them something happened."""

    def __init__(self) -> None:
        self.turn = 0
        self.events: list[tuple[int, str]] = []

    async def count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turn += 1

    def note(self, who: str) -> None:
        self.events.append((self.turn, who))

    @property
    def most_in_one(self) -> int:
        """The most events of one turn: 2 where the first after a pause begins in the turn of the last before it."""
        return max(Counter(turn for turn, _ in self.events).values())


@pytest.fixture
async def loop_turns() -> AsyncIterator[LoopTurns]:
    turns = LoopTurns()
    counting = asyncio.create_task(turns.count())
    yield turns
    counting.cancel()


async def _prepare_many(world: Guarded, caller: str, count: int) -> None:
    made = [{"group": caller, "id": own_id(0, f"{caller}{n}"), "messages": [MESSAGE]} for n in range(count)]
    answer = await world.call(caller, "POST", "/v1/batch", {"prepare": made, "end": []})
    assert {item["status"] for item in answer.body["prepare"]} == {201}


@pytest.mark.parametrize("caller", ["other", None], ids=["another group", "nobody"])
async def test_of_bodies_in_tiny_chunks_one_piece_is_parsed_in_a_turn(
    loop_turns: LoopTurns, monkeypatch: pytest.MonkeyPatch, caller: str | None
) -> None:
    """A chunk of one byte takes as long as one of 4 KiB, also in the body of a request that is refused before it."""
    end = StreamReader.end_http_chunk_receiving

    def note(self: StreamReader) -> None:
        loop_turns.note("")
        end(self)

    monkeypatch.setattr(StreamReader, "end_http_chunk_receiving", note)
    in_a_piece = 8 * 1024 // len(CHUNK) + 1
    async with guarded() as world:
        head = {"Host": HOST, "Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        head |= bearer(world, caller) if caller else {}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        writers = [(await asyncio.open_connection(HOST, world.here.port))[1] for _ in range(8)]
        for writer in writers:
            writer.write(f"POST /v1/batch HTTP/1.1\r\n{lines}\r\n".encode() + CHUNK * 40_000)
        await until_true(lambda: len(loop_turns.events) > 8 * in_a_piece)  # the first one of each connection
        loop_turns.events.clear()
        await until_true(lambda: len(loop_turns.events) > 40 * in_a_piece)
        for writer in writers:
            writer.transport.abort()
        await until_true(lambda: not world.here.api._open)
    assert loop_turns.most_in_one <= 3 * in_a_piece  # one in turn, and those of connections that are read again


async def test_lists_of_one_group_leave_every_other_turn_to_another(
    loop_turns: LoopTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slice is done in a turn of the loop. A list of the other group waits for as many slices as it has itself."""
    monkeypatch.setattr(get_and_list, "_SLICE", 20)
    apply = Filter.apply

    def note(self: Filter, entries: list[Entry]) -> list[Entry]:
        if entries:
            loop_turns.note(self._query.group or "")
        return apply(self, entries)

    monkeypatch.setattr(Filter, "apply", note)
    async with guarded() as world:
        await _prepare_many(world, "other", 600)
        await _prepare_many(world, "shop", 1)
        many = [asyncio.create_task(world.call("other", "GET", "/v1/transactions?limit=1")) for _ in range(32)]
        await until_true(lambda: len(loop_turns.events) > 100)
        before = len(loop_turns.events)
        for turn in range(3):
            name = own_id(0, f"s{turn}")
            assert await _prepare(world, "shop", name) == 201
            assert await _end(world, "shop", name) == 200
        answer = await world.call("shop", "GET", "/v1/transactions")
        assert answer.status == 200
        assert not all(task.done() for task in many)
        mine = [at for at, (_, who) in enumerate(loop_turns.events[before:]) if who == "shop"]
        assert mine[-1] - mine[0] <= 2 * len(mine)
        assert {answer.status for answer in await asyncio.gather(*many)} == {200}
    assert loop_turns.most_in_one <= 2


async def test_batches_of_one_group_leave_every_other_turn_to_another(
    loop_turns: LoopTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each begins up to 200 items in a turn, and no two batches do so in the same turn."""
    async with guarded() as world:
        coordinator = world.here.coordinator
        end, next_turn, begun = coordinator.end, coordinator.turns.next, [0]

        async def note_turn(caller: str | None) -> None:
            await next_turn(caller)
            loop_turns.note(caller or "")
            begun.append(0)

        def note(request: End, *, deadline: float, principal: Principal) -> Operation[EndResult]:
            begun[-1] += 1
            return end(request, deadline=deadline, principal=principal)

        monkeypatch.setattr(coordinator.turns, "next", note_turn)
        monkeypatch.setattr(coordinator, "end", note)

        async def batch(caller: str, count: int) -> None:
            ends = [{"id": own_id(0, f"{caller}-{number}"), "outcome": "commit"} for number in range(count)]
            answer = await world.call(caller, "POST", "/v1/batch", {"prepare": [], "end": ends})
            assert {item["status"] for item in answer.body["end"]} == {404}

        many = [asyncio.create_task(batch("other", 600)) for _ in range(8)]
        await until_true(lambda: len(loop_turns.events) > 1)
        await batch("shop", 400)
        await asyncio.gather(*many)
        assert loop_turns.most_in_one <= 2
        assert max(begun) <= 200


async def test_large_answers_of_one_group_let_one_of_another_be_made_next(
    loop_turns: LoopTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few are made at once, the groups in turn, and those that wait have read no payload yet.

    Each gives the loop a turn for each slice.
    """
    value = "x" * 900_000
    async with guarded() as world:
        theirs, mine = own_id(0, "o"), own_id(0, "s")
        for caller, name in (("other", theirs), ("shop", mine)):
            assert await _prepare(world, caller, name, value) == 201
        large = world.here.api._site.large_answers
        answered: list[str] = []

        async def show(caller: str, name: str) -> None:
            answer = await world.call(caller, "GET", f"/v1/transactions/{name}")
            assert answer.body["messages"][0]["value"] == value
            answered.append(caller)

        read = create_autospec(Lookup.payload, side_effect=Lookup.payload)
        monkeypatch.setattr(Lookup, "payload", read)
        places = large.take(13)  # so that all wait, however slowly they come
        many = [asyncio.create_task(show(*one)) for one in [("other", theirs)] * 12 + [("shop", mine)]]
        await until_true(lambda: large.waiting == 13)
        assert not read.called
        turn = loop_turns.turn
        large.leave(places)
        await many[-1]
        assert large.taken <= places
        assert answered.index("shop") <= 2 * places
        assert loop_turns.turn - turn > len(value) // SLICE_BYTES
        await asyncio.gather(*many)
        assert large.taken == large.waiting == 0


async def test_answers_that_one_group_does_not_read_keep_no_answer_from_another() -> None:
    """They are all that may be held. The other group gets large answers and checks, and the first one gets neither."""
    async with guarded() as world:
        unsent = world.here.api._site.unsent
        pull = {**SHOP, "check": {"mode": "pull"}, "policy": {"first_check_after_s": 1}}
        for caller in ("other", "shop"):
            assert (await world.call("operator", "PUT", f"/v1/groups/{caller}", pull)).status == 200
            assert await _prepare(world, caller, own_id(0, caller), "x" * 200_000) == 201
        held = SimpleNamespace(get_write_buffer_size=lambda: MAX_BYTES)
        unsent.begin("a connection", held, "other")  # type: ignore[arg-type]  # it needs nothing else
        try:
            shown = {
                caller: (await world.call(caller, "GET", f"/v1/transactions/{own_id(0, caller)}")).status
                for caller in ("other", "shop")
            }
            assert shown == {"other": 429, "shop": 200}
            world.here.memory.clock.advance(5)
            await world.here.coordinator.scan(0, world.here.memory.clock.now_ms())
            checks = {
                caller: len((await world.call(caller, "GET", f"/v1/groups/{caller}/checks?wait_s=0")).body["checks"])
                for caller in ("other", "shop")
            }
            assert checks == {"other": 0, "shop": 1}
        finally:
            unsent.end("a connection")
