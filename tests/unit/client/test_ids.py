"""Ids are born in the coordinator's time, whatever the clock of the service says, and a key gives one id everywhere."""

import asyncio
import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from aiohttp import web

from halfway.client import (
    Halfway,
    IdInFutureError,
    InvalidIdError,
    Message,
    OutcomeExpiredError,
    SyncHalfway,
    transaction_id,
)
from halfway.client.ids import NewIds
from halfway.client.producer.transaction import Sending
from halfway.protocol.ids import shard_of
from tests.support.client.serving import serving
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.unit.client.test_barrier import Shop

ORDER = Message(topic="orders", key="42", value="paid")
HOUR_MS = 3_600_000


def born_ms(id: str) -> int:  # noqa: A002 - as in the client
    return UUID(id).int >> 80


@pytest.mark.parametrize(
    "key, at, expected",
    [
        ("shop/order/42", 1_795_000_000_000, "01a1ee56-5e00-7983-bc65-f04bdd28a60b"),
        ("shop/order/42", 1_795_000_000_001, "01a1ee56-5e01-7983-bc65-f04bdd28a60b"),
        ("größe/7", datetime(2026, 11, 26, 12, 0, 0, 123456, UTC), "01a217ba-127b-7515-bf3b-5596168e8696"),
        (
            "shop/order/42",
            datetime(2026, 11, 26, 13, 0, 0, 123999, timezone(timedelta(hours=1))),
            "01a217ba-127b-7983-bc65-f04bdd28a60b",
        ),
    ],
)
def test_a_key_and_a_time_give_one_id(key: str, at: datetime | int, expected: str) -> None:
    """These are the vectors of docs/api.md."""
    assert transaction_id(key, at) == transaction_id(key.encode(), at) == expected
    assert UUID(expected).version == 7


@pytest.mark.parametrize(
    "key, at, error, remedy",
    [
        ("k", datetime(2026, 11, 26), ValueError, "without a time zone: give datetime.now"),  # noqa: DTZ001 - on purpose
        ("k", 1_795_000_000.5, TypeError, "give an aware datetime, or milliseconds"),
        ("k", True, TypeError, "give an aware datetime, or milliseconds"),
        ("k", 1_795_000_000, ValueError, "give milliseconds, not seconds"),
        ("k", -1, ValueError, "give milliseconds"),
        ("k", 2**48, ValueError, "give milliseconds"),
        ("", 1_795_000_000_000, ValueError, "give what is done"),
    ],
)
def test_a_wrong_key_or_time_names_the_remedy(key: str, at: Any, error: type[Exception], remedy: str) -> None:
    with pytest.raises(error, match=remedy):
        transaction_id(key, at)


@pytest.mark.parametrize("wrong", ["order-42", "", "0-" + named_id("a"), named_id("a").replace("-", ""), 42])
async def test_an_id_that_is_no_uuid7_is_refused_before_anything_is_sent(wrong: Any) -> None:
    async with Halfway("http://127.0.0.1:1", "shop") as client:
        with pytest.raises(InvalidIdError, match=re.escape(f"{wrong!r} is not a UUIDv7")):
            await client.prepare([ORDER], id=wrong)
        with pytest.raises(InvalidIdError, match="derive it from a business key"):
            client.transaction([ORDER], id=wrong)


async def test_upper_case_is_the_same_id_everywhere(world: RestWorld, shop: Shop) -> None:
    written = named_id("order").upper()
    async with Halfway(world.url, "shop", barrier=shop.barrier) as client:
        with shop.begin() as connection:
            shop.barrier.insert(connection, written)
        await client.prepare([ORDER], id=written)
        assert (await client.show(written.lower()))["state"] == "prepared"
        assert client.transaction([ORDER], id=written).id == written.lower()
    assert shop.barrier.look(written) == shop.barrier.look(written.lower()) == "commit"


def test_the_time_of_day_of_the_service_plays_no_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first answer there is only the service's own clock. A date that is no date changes nothing."""
    clock = NewIds()
    assert abs(born_ms(clock.new_id()) - time.time() * 1000) < 60_000
    monotonic = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: monotonic)
    clock.learn(formatdate(1_000_000_000, usegmt=True))
    clock.learn("Thursday")
    clock.learn(None)
    assert born_ms(clock.new_id()) == 1_000_000_000_000
    monkeypatch.setattr(time, "monotonic", lambda: monotonic + 60)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    made = [clock.new_id() for _ in range(100)]
    assert {born_ms(one) for one in made} == {1_000_000_060_000}
    assert len(set(made)) == 100
    assert all(UUID(one).version == 7 and UUID(one).variant == "specified in RFC 4122" for one in made)


class Strict:
    """A coordinator that accepts ids of its own hour only, and stores what it accepted."""

    def __init__(self, error_code: str, status: int) -> None:
        self.now_s = 1_900_000_000
        self.prepared: list[str] = []
        self.refused: list[str] = []
        self.lost = 0
        self._problem: dict[str, object] = {"error_code": error_code, "detail": "its time", "status": status}

    async def answer(self, request: web.Request) -> web.Response:
        body = json.loads(await request.text())
        if self.lost:
            self.lost -= 1
            return web.Response(status=502)
        done = [self._prepare(one["id"]) for one in body.get("prepare", ())]
        ended = [{"status": 200, "body": {"id": one["id"], "state": "committed"}} for one in body.get("end", ())]
        headers = {"Date": formatdate(self.now_s, usegmt=True)}
        return web.json_response({"prepare": done, "end": ended}, headers=headers)

    def _prepare(self, id: str) -> dict[str, Any]:  # noqa: A002 - as in REST
        if abs(born_ms(id) - self.now_s * 1000) < HOUR_MS:
            self.prepared.append(id)
            return {"status": 201, "body": {"id": id, "state": "prepared"}}
        self.refused.append(id)
        return {"status": self._problem["status"], "problem": self._problem}


REFUSALS = [("id_in_future", 422, IdInFutureError), ("outcome_expired", 410, OutcomeExpiredError)]


@pytest.mark.parametrize("error_code, status, error", REFUSALS)
async def test_a_refused_id_tells_the_coordinators_time_and_another_one_follows(
    error_code: str, status: int, error: type[Exception]
) -> None:
    """The next ids need no second call. An id of the caller is not replaced."""
    strict = Strict(error_code, status)
    async with serving(strict.answer, "/v1/batch") as url, Halfway(url, "shop") as client:
        for _ in range(2):
            async with client.transaction([ORDER]) as transaction:
                assert transaction.id == strict.prepared[-1]
        assert (len(strict.refused), len(strict.prepared)) == (1, 2)
        with pytest.raises(error):
            async with client.transaction([ORDER], id=named_id("own")):
                pytest.fail("the block ran")
        assert strict.refused[-1] == named_id("own")


async def test_an_id_that_may_have_been_accepted_is_not_replaced() -> None:
    """The answer to the first attempt was lost."""
    strict = Strict("outcome_expired", 410)
    strict.lost = 1
    async with serving(strict.answer, "/v1/batch") as url, Halfway(url, "shop") as client:
        with pytest.raises(OutcomeExpiredError):
            async with client.transaction([ORDER]):
                pytest.fail("the block ran")
    assert strict.prepared == []


async def test_a_local_transaction_that_lasts_longer_than_the_horizon_is_sent_under_a_new_id() -> None:
    """Its id was made when its first message was sent."""
    strict = Strict("outcome_expired", 410)
    rows: list[str] = []

    def commit(client: SyncHalfway) -> None:
        with client.transaction([ORDER]):
            pass  # the client learns the time
        sending = Sending(client)
        strict.now_s += 7200
        sending.add(ORDER)
        nothing: Callable[[], None] = lambda: None  # noqa: E731
        refused = sending.id
        sending.commit(
            client, insert=rows.append, still_has=refused.__eq__, commit=nothing, rollback=nothing, confirm=True
        )
        assert (strict.refused[-1], rows) == (refused, [sending.id])

    def work(url: str) -> None:
        with SyncHalfway(url, "shop") as client:
            commit(client)

    async with serving(strict.answer, "/v1/batch") as url:
        await asyncio.to_thread(work, url)
    assert strict.prepared[-1] == rows[-1]


@pytest.mark.parametrize(
    "count, here", [(1, [0]), (4, [0, 1, 2, 3]), (4, [2]), (6, [1, 4]), (64, [*range(64)]), (16, [3, 9])]
)
def test_an_id_is_of_a_shard_that_is_served_where_the_calls_go(
    count: int, here: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every such shard has its turn, and in one turn an id is of at most an eighth of all shards, or of one."""
    maker, now = NewIds(), list[float]()
    maker.learn_shards({"shards": {"count": count, "here": here}})
    monkeypatch.setattr("halfway.client.ids.time", SimpleNamespace(time=now.pop))
    turns: list[set[int]] = []
    for turn in range(20):
        now += [1_795_000_000 + turn / 20 + 0.01] * 40
        ids = {maker.new_id() for _ in range(40)}
        assert len(ids) == 40
        turns.append({shard for one in ids if (shard := shard_of(one, count)) is not None})
    assert set().union(*turns) == set(here)
    assert max(map(len, turns)) <= max(1, count // 8)


@pytest.mark.parametrize("said", [{}, {"shards": {"count": 4, "here": []}}], ids=["an earlier release", "none"])
def test_the_shards_of_a_coordinator_are_forgotten_with_it(said: dict[str, Any]) -> None:
    """Otherwise all new ids would belong to the few shards of one that gets no more calls."""
    maker = NewIds()
    maker.learn_shards({"shards": {"count": 4, "here": [2]}})
    assert {shard_of(maker.new_id(), 4) for _ in range(20)} == {2}
    maker.learn_shards(said)
    assert len({shard_of(maker.new_id(), 4) for _ in range(100)}) > 1
