"""The client against a coordinator over ports in memory, behind real HTTP."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from aiohttp import web
from multidict import MultiDict

from halfway.app.settings import Settings
from halfway.client import (
    AlreadyEndedError,
    AsgiChecks,
    Check,
    CheckWorker,
    ClientClosedError,
    EndUnconfirmedError,
    Halfway,
    InvalidRequestError,
    InvalidSettingError,
    InvalidUrlError,
    Message,
    NestedTransactionError,
    Outcome,
    PrepareUnconfirmedError,
    QueueFullError,
    SerializationContext,
    SyncHalfway,
    TransactionEndedError,
    TransactionProducer,
    UnknownGroupError,
    UnknownTransactionError,
    UnserialisableMessageError,
    WrongEventLoopError,
    WsgiChecks,
    answer_check,
    answer_check_sync,
    join_flask,
    join_starlette,
)
from halfway.client.barrier import Barrier, BarrierMaintenance, Store, sqlite_transactions
from halfway.client.calls.group import ATTEMPT_S
from tests.support.client.serving import serving
from tests.support.client.shop import final_state, values
from tests.support.ids import named_id
from tests.support.loop_time import LoopTime
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S

ORDER = Message(topic="orders", key="42", value={"total": 9.9}, headers={"trace": b"\xff"})
ORDER_ID = named_id("order-42")
SOME_ID = named_id("a")
NOWHERE = "http://127.0.0.1:1"
SHOP = SyncHalfway(NOWHERE, "shop")
JOIN: dict[str, Any] = {"topics": ["orders"], "check_url": "http://shop/check"}


@pytest.fixture
async def halfway(world: RestWorld) -> AsyncIterator[Halfway]:
    async with Halfway(world.url, "shop", prepare_timeout_s=GENEROUS_S, end_timeout_s=GENEROUS_S) as client:
        yield client


class DatabaseError(Exception):
    """Takes the place of the base class of a driver's errors."""


class OperationalError(DatabaseError):
    """The error of PEP 249 with this name: the connection may have broken during the commit."""


async def test_an_exception_rolls_back_and_goes_on(world: RestWorld, halfway: Halfway) -> None:
    transaction = halfway.transaction([ORDER])
    with pytest.raises(ZeroDivisionError):
        async with transaction:
            raise ZeroDivisionError
    assert await final_state(world, transaction.id) == "rolled_back"
    assert values(world) == []


@pytest.mark.parametrize("kind", [OperationalError, ConnectionResetError, TimeoutError, asyncio.CancelledError])
async def test_what_may_have_committed_is_left_to_check_back(halfway: Halfway, kind: type[BaseException]) -> None:
    """Also if the service raises its own error from it."""

    def database_commits() -> None:
        raise kind

    def local_transaction(*, wrapped: bool) -> None:
        try:
            database_commits()
        except kind as error:
            if wrapped:
                raise RuntimeError("no order today") from error
            raise

    for wrapped in (False, True):
        transaction = halfway.transaction([ORDER])
        with pytest.raises((kind, RuntimeError)):
            async with transaction:
                local_transaction(wrapped=wrapped)
        await halfway.end(transaction.id, "unknown")  # after the end in the background
        assert (await halfway.show(transaction.id))["state"] == "prepared"


async def test_the_block_may_end_it_itself_once(world: RestWorld, halfway: Halfway) -> None:
    async with halfway.transaction([ORDER]) as transaction:
        await transaction.rollback("sold out")
        with pytest.raises(TransactionEndedError, match="begin a new one"):
            await transaction.commit()
    assert (await halfway.show(transaction.id))["state"] == "rolled_back"
    with pytest.raises(TransactionEndedError, match="already entered"):
        await transaction.__aenter__()
    assert values(world) == []


async def test_one_inside_another_is_refused_and_nothing_is_prepared(halfway: Halfway) -> None:
    async with halfway.transaction([ORDER]) as outer:
        inner = halfway.transaction([ORDER])
        with pytest.raises(NestedTransactionError, match=outer.id):
            async with inner:
                pytest.fail("the block ran")
        with pytest.raises(UnknownTransactionError):
            await halfway.show(inner.id)
    async with halfway.transaction([ORDER]):
        pass  # consecutive transactions are allowed


async def test_figures_count_what_became_of_calls(world: RestWorld, halfway: Halfway) -> None:
    async with halfway.transaction([ORDER]):
        pass
    with pytest.raises(InvalidRequestError):
        await halfway.prepare([Message(topic="elsewhere")], id=halfway.new_id())
    counted = halfway.figures
    assert (counted.prepares, counted.ends, counted.refused, counted.unconfirmed) == (1, 1, 1, 0)
    assert counted.seconds > 0
    async with Halfway("http://127.0.0.1:9", "shop", prepare_timeout_s=0.1) as nobody:
        with pytest.raises(PrepareUnconfirmedError):
            await nobody.prepare([ORDER], id=nobody.new_id())
        assert nobody.figures.unconfirmed == 1
    with SyncHalfway(world.url, "shop") as client:
        assert client.figures.prepares == 0
        figures = client.figures
    assert client.figures is figures, "a counter does not fall when its client is closed"


async def test_the_opposite_outcome_is_told_with_the_one_that_stands(halfway: Halfway) -> None:
    await halfway.prepare([ORDER], id=ORDER_ID)
    await halfway.end(ORDER_ID, "rollback")
    with pytest.raises(AlreadyEndedError) as told:
        await halfway.end(ORDER_ID, "commit")
    assert told.value.state == "rolled_back"
    with pytest.raises(AlreadyEndedError):
        await halfway.prepare([ORDER], id=ORDER_ID)


@pytest.fixture
def long_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no call be sent again, nor by another way, because the machine is slow."""
    monkeypatch.setattr("halfway.client.calls.group.ATTEMPT_S", GENEROUS_S)


async def run_many(halfway: Halfway, count: int) -> None:
    async def run_one() -> None:
        async with halfway.transaction([ORDER]):
            pass

    await asyncio.gather(*(run_one() for _ in range(count)))


async def test_callers_share_one_stream(world: RestWorld, long_attempts: None) -> None:
    async with Halfway(world.url, "shop", prepare_timeout_s=60, end_timeout_s=60, stream=True) as client:
        await run_many(client, 300)
    assert len(values(world)) == 300
    assert world.requests.counts == {("putGroup", 201): 1, ("stream", 101): 1, ("prepare", 201): 300, ("end", 200): 300}


async def test_without_a_stream_callers_at_one_moment_share_requests(world: RestWorld, long_attempts: None) -> None:
    async with Halfway(world.url, "shop", prepare_timeout_s=60, end_timeout_s=60) as client:
        await run_many(client, 300)
    assert len(values(world)) == 300
    assert {operation for operation, _ in world.requests.counts} == {"putGroup", "batch"}
    assert world.requests.counts.total() < 60, world.requests.counts


async def test_a_shared_request_that_is_refused_as_a_whole_is_divided(world: RestWorld) -> None:
    """Each prepare is legal; together they have more fields than a body may have."""
    messages = [Message(topic="orders", value="v")] * 100
    async with Halfway(world.url, "shop", prepare_timeout_s=GENEROUS_S) as client:
        await asyncio.gather(*(client.prepare(messages, id=client.new_id()) for _ in range(100)))
    assert world.requests.counts["batch", 422] > 0


async def test_one_that_is_wrong_disturbs_no_other(world: RestWorld, halfway: Halfway) -> None:
    async def run_one(topic: str) -> None:
        async with halfway.transaction([Message(topic=topic, value="v")]):
            pass

    results = await asyncio.gather(*map(run_one, ["orders", "absent", "orders"]), return_exceptions=True)
    assert [type(one) for one in results] == [type(None), InvalidRequestError, type(None)]
    assert "absent" in str(results[1])
    assert len(values(world)) == 2


async def test_a_coordinator_that_is_down_is_passed_by(world: RestWorld) -> None:
    async with Halfway(["http://127.0.0.1:1", world.url], "shop") as client, client.transaction([ORDER]):
        pass
    assert len(values(world)) == 1


async def test_a_coordinator_that_hangs_leaves_time_for_the_next(world: RestWorld) -> None:
    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await done.wait()
        writer.close()

    asked, done, time = asyncio.Event(), asyncio.Event(), LoopTime()
    async with await asyncio.start_server(hang, "127.0.0.1") as server:
        hung = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Halfway([hung, world.url], "shop", prepare_timeout_s=200) as client:
            await time.out(client.prepare([ORDER], id=ORDER_ID), 102, once=asked.is_set, what="one hangs")
            assert (await client.show(ORDER_ID))["state"] == "prepared"
        done.set()


@pytest.mark.parametrize("new_id, state", [(True, "rolled_back"), (False, "prepared")])
async def test_a_rollback_that_overtakes_a_cancelled_prepare_is_sent_again(
    world: RestWorld, halfway: Halfway, monkeypatch: pytest.MonkeyPatch, new_id: bool, state: str
) -> None:
    """The prepare's request is still under way, and the rollback uses another connection."""
    halfway._shared._by_request, halfway._shared._uses_stream = True, False
    on_its_way, overtaken, ends = asyncio.Event(), asyncio.Event(), list[Any]()
    send = halfway._transport.send

    async def hold_the_prepare(method: str, path: str, body: bytes, **named: Any) -> Any:
        if b'"prepare"' in body:
            on_its_way.set()
            await overtaken.wait()
            return await send(method, path, body, **named)
        reply = await send(method, path, body, **named)
        ends.append(reply.body["end"][0]["status"])
        overtaken.set()
        return reply

    monkeypatch.setattr(halfway._transport, "send", hold_the_prepare)
    prepare = asyncio.create_task(halfway.prepare([ORDER], id=ORDER_ID, new_id=new_id))
    await on_its_way.wait()
    prepare.cancel()
    await asyncio.gather(prepare, return_exceptions=True)
    await asyncio.gather(*halfway._background)
    assert ends == [404, 200]
    assert (await world.show(ORDER_ID)).body["state"] == state


async def test_nothing_is_begun_when_no_coordinator_answers() -> None:
    async with Halfway("http://127.0.0.1:1", "shop", prepare_timeout_s=2, end_timeout_s=2) as client:
        with pytest.raises(PrepareUnconfirmedError, match=r"127\.0\.0\.1:1"):
            async with client.transaction([ORDER]):
                pytest.fail("the block ran")
        with pytest.raises(EndUnconfirmedError, match="the commit of x"):
            await client.end("x", "commit")


async def test_too_many_at_once_are_refused_before_anything_is_sent(world: RestWorld) -> None:
    async with Halfway(world.url, "shop", max_waiting=2) as client:
        calls = (client.prepare([ORDER], id=named_id(f"order-{number}")) for number in range(5))
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in results] == [type(None)] * 2 + [QueueFullError] * 3


async def test_use_that_cannot_work_names_the_remedy(world: RestWorld, halfway: Halfway) -> None:
    for url in ("halfway:8080", "ftp://halfway", "http://halfway:8080/v1", "http://halfway:99999"):
        with pytest.raises(InvalidUrlError, match="such as http://halfway:8080"):
            Halfway(url, "shop")
    with pytest.raises(ClientClosedError, match="async with"):
        await Halfway(world.url, "shop").prepare([ORDER], id=SOME_ID)
    async with Halfway(world.url, "nobody") as client:
        with pytest.raises(UnknownGroupError):
            await client.prepare([ORDER], id=SOME_ID)
    elsewhere = asyncio.to_thread(asyncio.run, halfway.prepare([ORDER], id=SOME_ID))
    with pytest.raises(WrongEventLoopError, match="one client per loop"):
        await elsewhere
    with pytest.raises(UnknownTransactionError):
        await halfway.show("a")


def test_names_of_headers_may_be_repeated() -> None:
    """As in Kafka. Those that a serializer adds come last; without a repetition, headers stay a dict."""

    def marked(value: object, context: SerializationContext) -> str:
        context.headers["schema"] = "7"
        return str(value)

    given: MultiDict[str | bytes | None] = MultiDict([("trace", "1"), ("trace", b"2")])
    for headers in (given, [*given.items()], iter([*given.items()])):
        message = Message(topic="orders", value=5, headers=headers, serializer=marked)
        names = [(one["name"], one["value"]) for one in message.as_json()["headers"]]
        assert names == [("trace", "1"), ("trace", {"type": "BINARY", "data": "Mg=="}), ("schema", "7")]
    only = Message(topic="orders", value=5, headers=[("trace", "1")], serializer=marked)
    assert only.headers == {"trace": "1", "schema": "7"}


async def test_a_process_of_an_old_release_takes_nothing_from_its_group(world: RestWorld) -> None:
    """Nor does it set back what an operator has set, unless it is told to replace the group."""
    async with Halfway(world.url, "returns") as client:
        await client.register(topics=["orders", "points"], check_urls=["http://returns:9000/check"])
        urls, policy = ["http://returns-2:9000/check"], {"max_checks": 3, "max_age_s": 600}
        operators = {"topics": ["orders", "points"], "check": {"urls": urls}, "policy": policy}
        await world.call("PUT", "/v1/groups/returns", operators)
        kept = await client.register(topics=["orders"])
        assert kept["topics"] == ["orders", "points"]
        assert kept["check"]["urls"] == urls
        assert (kept["policy"]["max_checks"], kept["policy"]["max_age_s"]) == (3, 600)
        assert (await client.register(topics=["orders"], policy={"max_checks": 5}))["policy"]["max_age_s"] == 600
        replaced = await client.register(topics=["orders"], replace=True)
        assert (replaced["topics"], replaced["check"]) == (["orders"], {"mode": "pull", "urls": []})
        assert replaced["policy"]["max_checks"] == 15


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    "part, told",
    [
        ({"value": "\ud800"}, "value cannot be encoded"),
        ({"value": {"name": "\ud800"}}, "value cannot be serialised as JSON"),
        ({"value": {"\ud800": 1}}, "value cannot be serialised"),
        ({"value": [float("nan")]}, "value cannot be serialised"),
        ({"value": {"at": datetime(2026, 1, 1, tzinfo=UTC)}}, "value cannot be serialised"),
        ({"value": {"deep": nested(500)}}, r"value cannot be serialised .*nested at most 500 deep"),
        ({"value": nested(5_000)}, "nested at most 500 deep"),
        ({"key": "\ud800"}, "key cannot be encoded"),
        ({"key": 42}, "key is int: give str"),
        ({"headers": {"trace": "\ud800"}}, r"headers\['trace'\] cannot be encoded"),
        ({"headers": {"trace": 1}}, r"headers\['trace'\] is int: give str"),
        ({"headers": {"halfway-id": "1"}}, "do not start with halfway-"),
        ({"headers": 1}, "headers is int: give a dict, or pairs"),
        ({"headers": "trace"}, "headers is str"),
        ({"topic": ""}, "topic is '': give 1 to 249"),
        ({"topic": 7}, "topic is 7"),
        ({"partition": -1}, "partition is -1: give a number from 0"),
        ({"partition": 2**31}, "partition is 2147483648"),
        ({"partition": True}, "partition is True"),
    ],
)
def test_a_message_that_halfway_would_refuse_is_not_made(part: dict[str, Any], told: str) -> None:
    with pytest.raises(UnserialisableMessageError, match=f"^.*{told}"):
        Message(**{"topic": "orders", **part})


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: Halfway(NOWHERE, "my shop"), "group is 'my shop': give 1 to 100 letters"),
        (lambda: Halfway(NOWHERE, ".."), "group is"),
        (lambda: SyncHalfway(NOWHERE, "shop", prepare_timeout_s=0), "prepare_timeout_s is 0: give a number above 0"),
        (lambda: Halfway(NOWHERE, "shop", end_timeout_s=float("nan")), "end_timeout_s is nan"),
        (lambda: Halfway(NOWHERE, "shop", connections=0), "connections is 0: give a number of at least 1"),
        (lambda: Store(max_rows=0), "max_rows is 0"),
        (lambda: BarrierMaintenance(Any, Any, every_s=0), "every_s is 0"),  # type: ignore[arg-type]
        (lambda: AsgiChecks(7), "decide is 7: give a function: barrier.decide"),  # type: ignore[arg-type]
        (lambda: WsgiChecks(asyncio.sleep), "give a function without async: barrier.decide"),  # type: ignore[arg-type]
        (lambda: join_flask(Any, SHOP, **JOIN, decide=asyncio.sleep), "without async: barrier.decide"),
        (lambda: join_starlette(Any, Halfway(NOWHERE, "shop"), **JOIN, decide=7), "decide is 7: give a function"),
        (lambda: asyncio.run(Halfway(NOWHERE, "shop").start(topics=["orders"], decide=7)), "is 7: give a function"),  # type: ignore[arg-type]
        (lambda: CheckWorker(Halfway(NOWHERE, "shop"), 7), "decide is 7"),  # type: ignore[arg-type]
        (lambda: CheckWorker(Any, print, side_by_side=0), "side_by_side is 0"),  # type: ignore[arg-type]
    ],
)
def test_a_setting_that_fails_late_is_refused_at_once(make: Callable[[], object], told: str) -> None:
    with pytest.raises(InvalidSettingError, match=told):
        make()


def test_a_mock_of_a_function_decides() -> None:
    """`inspect.iscoroutinefunction` raises a TypeError for it."""

    def decide(check: Check) -> Outcome:
        raise NotImplementedError(check.id)

    mock = Mock(spec=decide, return_value="commit")
    WsgiChecks(mock)
    check = {"type": "transaction.check", "id": "a", "group": "shop", "attempt": 1, "messages": []}
    body = json.dumps(check | {"prepared_at": "2026-11-27T00:00:00Z"}).encode()
    assert answer_check_sync(body, mock) == (200, b'{"outcome": "commit"}')
    assert asyncio.run(answer_check(body, mock)) == (200, b'{"outcome": "commit"}')


def test_a_partition_may_have_a_name() -> None:
    assert Message(topic="orders", partition=HTTPStatus.OK).as_json()["partition"] == 200


async def test_an_asynchronous_serializer_is_awaited() -> None:
    """As confluent_kafka's AsyncAvroSerializer. It may add headers, too."""

    async def marked(value: object, context: SerializationContext) -> bytes:
        await asyncio.sleep(0)
        context.headers[f"schema-of-{context.field}"] = "7"
        return repr(value).encode()

    given: dict[str, Any] = {"topic": "orders", "key": 4, "serializer": marked, "key_serializer": marked}
    message = await Message(value=5, **given)
    assert (message.key, message.value) == (b"4", b"5")
    assert message.headers == {"schema-of-key": "7", "schema-of-value": "7"}
    assert message == await message
    unawaited = Message(value=5, **given)
    with pytest.raises(UnserialisableMessageError, match=r"give `await Message\(\.\.\.\)`"):
        unawaited.as_json()
    await unawaited


async def test_a_block_of_another_client_hides_none_around_it(world: RestWorld, halfway: Halfway) -> None:
    async with Halfway(world.url, "shop") as other, halfway.transaction([ORDER]) as outer, other.transaction([ORDER]):
        with pytest.raises(NestedTransactionError, match=outer.id):
            await halfway.transaction([ORDER]).__aenter__()
        with pytest.raises(NestedTransactionError, match=outer.id):
            halfway.demand_no_block()


def test_each_event_loop_has_a_client_of_its_own_at_the_same_time() -> None:
    """Event loops in several threads, each with its client, together with a client for threads that all share."""

    async def serve() -> None:
        async with RestWorld() as world:
            await world.put_shop()

            async def run_one() -> None:
                async with Halfway(world.url, "shop") as client:
                    for _ in range(5):
                        async with client.transaction([ORDER]):
                            pass

            def use_both(shared: SyncHalfway) -> None:
                asyncio.run(run_one())
                with shared.transaction([ORDER]):
                    pass

            with SyncHalfway(world.url, "shop") as shared:
                await asyncio.gather(*(asyncio.to_thread(use_both, shared) for _ in range(3)))
                await asyncio.to_thread(shared.close)
            assert len(values(world)) == 18

    asyncio.run(serve())


async def test_tasks_that_a_block_starts_have_transactions_of_their_own(world: RestWorld, halfway: Halfway) -> None:
    async def child() -> None:
        async with halfway.transaction([ORDER]):
            pass

    async with halfway.transaction([ORDER]):
        await asyncio.gather(child(), child())
    assert len(world.memory.records("orders")) == 3


async def test_a_listener_inside_a_block_is_refused_before_it_runs(halfway: Halfway) -> None:
    class Listener:
        def execute_local_transaction(self, transaction_id: str, argument: object) -> Outcome:
            raise AssertionError("it ran")

        check_local_transaction = None

    producer = TransactionProducer(halfway, Listener())  # type: ignore[arg-type]  # never called
    async with halfway.transaction([ORDER]):
        with pytest.raises(NestedTransactionError):
            await producer.send_in_transaction([ORDER])


async def test_the_maintenance_of_a_barrier_ends_with_its_client(
    world: RestWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = Barrier("sqlite", sqlite_transactions(tmp_path / "shop.sqlite"))
    barrier.create()
    async with Halfway(world.url, "shop") as client:
        maintenance = BarrierMaintenance(client, barrier, every_s=0.01)
        rounds = asyncio.Event()
        monkeypatch.setattr(maintenance, "clean", AsyncMock(side_effect=rounds.set))
        running = asyncio.create_task(maintenance.run())
        await rounds.wait()
    with pytest.raises(ClientClosedError):
        await running


def test_a_prepare_outlasts_the_takeover_of_a_killed_instance() -> None:
    """The shards of an instance that was killed are unserved for its session time-out, and for the takeover."""
    default_s = inspect.signature(Halfway).parameters["prepare_timeout_s"].default
    assert default_s >= 1.5 * Settings.model_fields["session_timeout_s"].default


async def test_the_end_of_what_was_never_prepared_is_no_warning(
    world: RestWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """The prepare is abandoned, so there is nothing that check-back would have to do."""
    async with Halfway(world.url, "shop") as client:
        client.abandon(ORDER_ID, new_id=True)
        await asyncio.gather(*client._background)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


async def test_a_poll_waits_no_longer_than_its_attempt_may_take() -> None:
    """Neither a repeated one, nor one that shares its time with another coordinator."""
    time, asked = LoopTime(), []

    async def answer(request: web.Request) -> web.Response:
        asked.append(float(request.query["wait_s"]))
        if len(asked) == 1:
            time.advance(25)
            return web.json_response({"error_code": "overloaded", "detail": "later"}, status=503)
        return web.json_response({"checks": []})

    async with serving(answer) as url:
        async with Halfway(url, "shop", prepare_timeout_s=20) as client:
            await client.fetch_checks(wait_s=20, max_checks=1)
        async with Halfway([url, "http://127.0.0.1:1"], "shop", prepare_timeout_s=20) as client:
            await client.fetch_checks(wait_s=20, max_checks=1)
    first, repeated, shared = asked
    assert (first, repeated <= 40 - 25 - ATTEMPT_S, shared <= 40 / 2 - ATTEMPT_S) == (20, True, True)
