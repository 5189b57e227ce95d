"""A stream requires keys as REST does, at the handshake and with each frame."""

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import AsyncMock

import aiohttp
import pytest

from halfway.http.requests.admission import ApiLimits
from halfway.protocol.errors import KafkaUnavailableError
from halfway.protocol.principal import PrincipalKind
from tests.support.rest.client import SHOP
from tests.support.rest.guarded import Guarded, guarded, own_id
from tests.support.waiting import GENEROUS_S, until_true
from tests.unit.http.stream.conftest import Opens

MESSAGE = {"topic": "orders", "value": "v"}


@pytest.fixture
async def both() -> AsyncIterator[Guarded]:
    """Provide two instances over one log, with the groups `shop` and `other`."""
    async with guarded() as world:
        yield world


def authorization(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize("caller, status", [("nobody", 401), ("board", 403)])
async def test_only_who_may_prepare_and_end_opens_a_stream(
    both: Guarded, opened: Opens, caller: str, status: int
) -> None:
    """Neither a caller without a key nor a reader."""
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await opened(both.here, authorization(both.tokens[caller]))
    assert refused.value.status == status


async def test_a_key_of_a_group_acts_for_its_own_group_only(both: Guarded, opened: Opens) -> None:
    """In a frame that also has operations of its own; a transaction of another group is not found."""
    shop = await opened(both.here, authorization(both.tokens["shop"]))
    other = await opened(both.here, authorization(both.tokens["other"]))
    own = own_id(0, "own")
    assert (await shop.prepare("shop", MESSAGE, id=own)).status == 201
    answers = await asyncio.gather(
        other.prepare("shop", MESSAGE),
        other.prepare("other", MESSAGE),
        other.end(own, "rollback"),
        other.subscribe("shop", 1),
    )
    assert [answer.status for answer in answers] == [403, 201, 404, 403]
    assert (await shop.end(own, "commit")).document["changed"] is True


async def test_a_stream_whose_key_is_revoked_is_closed_with_its_next_frame(both: Guarded, opened: Opens) -> None:
    """Nothing of that frame is done."""
    token = await both.new_key(PrincipalKind.GROUP, "shop")
    stream = await opened(both.here, authorization(token))
    name = own_id(0, "late")
    assert (await stream.prepare("shop", MESSAGE, id=name)).status == 201
    assert (await both.call("operator", "DELETE", f"/v1/keys/{token[5:17]}")).status == 204
    ending = asyncio.create_task(stream.end(name, "commit"))
    await asyncio.wait_for(stream.closed.wait(), GENEROUS_S)
    assert stream.close_code == 4403
    assert stream.problem is not None
    assert stream.problem["error_code"] == "unauthenticated"
    assert isinstance((await asyncio.gather(ending, return_exceptions=True))[0], Exception)
    assert (await both.call("operator", "GET", f"/v1/transactions/{name}")).body["state"] == "prepared"


async def test_a_stream_is_closed_for_a_while_if_no_key_can_be_verified(
    both: Guarded, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has done nothing wrong: its close code is one after which it connects again."""

    def refuse() -> None:
        raise KafkaUnavailableError("the keys were not read for too long")

    stream = await opened(both.here, authorization(both.tokens["shop"]))
    monkeypatch.setattr(both.here.memory.authority, "_require_fresh_keys", refuse)
    preparing = asyncio.create_task(stream.prepare("shop", MESSAGE, id=own_id(0, "unread")))
    await asyncio.wait_for(stream.closed.wait(), GENEROUS_S)
    assert stream.close_code == 1013
    assert stream.problem is not None
    assert stream.problem["error_code"] == "kafka_unavailable"
    assert isinstance((await asyncio.gather(preparing, return_exceptions=True))[0], Exception)


async def test_a_stream_that_only_waits_for_checks_is_closed_as_well(
    both: Guarded, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of a long wait for the first check."""
    monkeypatch.setattr("halfway.http.stream.stream._WAIT_S", 3600.0)
    await both.call("operator", "PUT", "/v1/groups/shop", {**SHOP, "check": {"mode": "pull"}})
    token = await both.new_key(PrincipalKind.GROUP, "shop")
    stream = await opened(both.here, authorization(token))
    assert (await stream.subscribe("shop", 1)).status == 200
    assert (await both.call("operator", "DELETE", f"/v1/keys/{token[5:17]}")).status == 204
    await asyncio.wait_for(stream.closed.wait(), GENEROUS_S)
    assert stream.close_code == 4403


async def test_a_stream_that_sends_nothing_is_closed_as_well(both: Guarded, opened: Opens) -> None:
    """Otherwise it would keep its place from the group's own services."""
    token = await both.new_key(PrincipalKind.GROUP, "shop")
    stream = await opened(both.here, authorization(token))
    assert (await both.call("operator", "DELETE", f"/v1/keys/{token[5:17]}")).status == 204
    await asyncio.wait_for(stream.closed.wait(), GENEROUS_S)
    assert stream.close_code == 4403


async def test_a_stream_whose_client_does_not_read_is_closed_as_well(
    both: Guarded, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent before would keep the close waiting."""
    token = await both.new_key(PrincipalKind.GROUP, "shop")
    stream = await opened(both.here, authorization(token))
    [served] = both.here.api.streams
    monkeypatch.setattr(served.socket, "send_frame", AsyncMock(side_effect=asyncio.Event().wait))
    assert (await both.call("operator", "DELETE", f"/v1/keys/{token[5:17]}")).status == 204
    await asyncio.wait_for(stream.closed.wait(), GENEROUS_S)
    await until_true(lambda: not len(both.here.api.streams))


async def test_one_group_leaves_half_of_the_streams_to_others(
    both: Guarded, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(both.here.api.streams, "_limits", ApiLimits(max_streams=4))
    for caller in ("shop", "other"):
        for _ in range(2):
            await opened(both.here, authorization(both.tokens[caller]))
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await opened(both.here, authorization(both.tokens["shop"]))
        assert refused.value.status == 429


#                             operator shop other
STREAMED: dict[str, tuple[int, int, int]] = {
    "prepare": (201, 201, 403),
    "end": (200, 200, 404),
    "subscribe": (200, 200, 403),
}


@pytest.mark.parametrize("shard", [0, 1], ids=["at the owner", "through another instance"])
async def test_each_principal_gets_on_a_stream_what_the_table_says(both: Guarded, opened: Opens, shard: int) -> None:
    """For the group `shop`; refused operations are not done."""
    await both.call("operator", "PUT", "/v1/groups/shop", {**SHOP, "check": {"mode": "pull"}})
    for place, caller in enumerate(("operator", "shop", "other")):
        stream = await opened(both.here, authorization(both.tokens[caller]))
        new, held = own_id(shard, f"new-{caller}"), own_id(shard, f"held-{caller}")
        made = {"group": "shop", "id": held, "messages": [MESSAGE]}
        assert (await both.call("shop", "POST", "/v1/transactions", made)).status == 201
        answers = {
            "prepare": await stream.prepare("shop", MESSAGE, id=new),
            "end": await stream.end(held, "commit"),
            "subscribe": await stream.subscribe("shop", 1),
        }
        assert {name: answer.status for name, answer in answers.items()} == {
            name: statuses[place] for name, statuses in STREAMED.items()
        }, caller
        state = (await both.call("shop", "GET", f"/v1/transactions/{held}")).body["state"]
        assert state == ("prepared" if caller == "other" else "committed")
        assert (await both.call("shop", "GET", f"/v1/transactions/{new}")).status == (404 if caller == "other" else 200)


@pytest.mark.parametrize("shard", [0, 1], ids=["at the owner", "through another instance"])
async def test_an_end_by_hand_on_a_stream_takes_an_operator(both: Guarded, opened: Opens, shard: int) -> None:
    for caller, status in (("shop", 403), ("operator", 200)):
        name = own_id(shard, f"of-{caller}")
        made = {"group": "shop", "id": name, "messages": [MESSAGE]}
        assert (await both.call("shop", "POST", "/v1/transactions", made)).status == 201
        stream = await opened(both.here, authorization(both.tokens[caller]) | {"Halfway-Cause": "operator"})
        assert (await stream.end(name, "commit")).status == status
        cause = (await both.call("operator", "GET", f"/v1/transactions/{name}")).body["cause"]
        assert cause == ("operator" if status == 200 else None)
