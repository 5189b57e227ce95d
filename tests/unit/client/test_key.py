"""The client sends its key to halfway with each request, and shows it nowhere else."""

import logging
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from halfway.client import (
    ForbiddenError,
    Halfway,
    InvalidKeyError,
    Message,
    PreparesRejectedError,
    SyncHalfway,
    UnauthenticatedError,
)
from tests.support.client.serving import serving
from tests.support.ids import named_id

KEY = "hw_canary7Qm4"
ORDER = Message(topic="orders", key="42", value="paid")
SOME_ID = named_id("a")


class Guarded:
    """Answers every request with one problem, and stores the keys that it received."""

    def __init__(self) -> None:
        self.shown: list[str | None] = []
        self.status = 401
        self.problem: dict[str, Any] = {"error_code": "unauthenticated", "detail": "no valid key is shown"}

    async def answer(self, request: web.Request) -> web.Response:
        await request.read()
        self.shown.append(request.headers.get("Authorization"))
        return web.json_response(self.problem, status=self.status)


@pytest.fixture
async def guarded() -> AsyncIterator[tuple[Guarded, str]]:
    guarded = Guarded()
    async with serving(guarded.answer) as url:
        yield guarded, url


async def test_each_request_shows_it(guarded: tuple[Guarded, str]) -> None:
    server, url = guarded
    async with Halfway(url, "shop", key=KEY) as client:
        with pytest.raises(UnauthenticatedError, match="no valid key is shown"):
            await client.prepare([ORDER], id=SOME_ID)
        with pytest.raises(UnauthenticatedError):
            await client.end("a", "commit")
        with pytest.raises(UnauthenticatedError):
            await client.register(topics=["orders"])
    assert server.shown == [f"Bearer {KEY}"] * 3


async def test_it_may_come_from_the_environment(guarded: tuple[Guarded, str], monkeypatch: pytest.MonkeyPatch) -> None:
    server, url = guarded
    async with Halfway(url, "shop") as client:
        with pytest.raises(UnauthenticatedError):
            await client.show("a")
    monkeypatch.setenv("HALFWAY_CLIENT_KEY", f"{KEY}\n")
    async with Halfway(url, "shop") as client:
        with pytest.raises(UnauthenticatedError):
            await client.show("a")
    assert server.shown == [None, f"Bearer {KEY}"]


async def test_it_may_come_from_a_file(
    guarded: tuple[Guarded, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As secret stores mount it. A file that has no key, or is missing, and a second key are refused by name."""
    server, url = guarded
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    monkeypatch.setenv("HALFWAY_CLIENT_KEY_FILE", str(file))
    async with Halfway(url, "shop") as client:
        with pytest.raises(UnauthenticatedError):
            await client.show("a")
    assert server.shown == [f"Bearer {KEY}"]
    file.write_bytes(b"\xff" + KEY.encode())
    with pytest.raises(InvalidKeyError, match=f"HALFWAY_CLIENT_KEY_FILE '{file}'") as refused:
        Halfway(url, "shop")
    assert KEY not in str(refused.value)
    file.unlink()
    with pytest.raises(InvalidKeyError, match=f"cannot read HALFWAY_CLIENT_KEY_FILE '{file}': No such file"):
        SyncHalfway(url, "shop")
    monkeypatch.setenv("HALFWAY_CLIENT_KEY", KEY)
    with pytest.raises(InvalidKeyError, match="both set"):
        Halfway(url, "shop")
    Halfway(url, "shop", key=KEY)


@pytest.mark.parametrize(
    "code, kind", [("forbidden", ForbiddenError), ("prepares_rejected", PreparesRejectedError), (None, ForbiddenError)]
)
async def test_403_is_told_by_its_reason(guarded: tuple[Guarded, str], code: str | None, kind: type[Exception]) -> None:
    server, url = guarded
    server.status, server.problem = 403, {"detail": "this is group cart"} | ({"error_code": code} if code else {})
    async with Halfway(url, "shop", key=KEY) as client:
        with pytest.raises(kind, match="this is group cart"):
            async with client.transaction([ORDER]):
                pytest.fail("the block ran")


async def test_no_log_repr_or_error_tells_it(guarded: tuple[Guarded, str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    _, url = guarded
    client, blocking = Halfway(url, "shop", key=KEY), SyncHalfway(url, "shop", key=KEY)
    away = Halfway("http://127.0.0.1:1", "shop", key=KEY, prepare_timeout_s=0.2)
    told = [repr(client), repr(vars(client)), repr(vars(client._transport)), repr(vars(blocking))]
    async with client, away:
        told += [repr(vars(client._transport))]
        for one in (client, away):
            try:
                await one.show("a")
            except Exception as error:  # noqa: BLE001 - every error
                told += [*traceback.format_exception(error), repr(error)]
    with pytest.raises(InvalidKeyError) as refused:
        Halfway(url, "shop", key=f"{KEY}\r\nHost: elsewhere")
    told += [repr(refused.value), caplog.text]
    assert len(told) > 8
    assert [text for text in told if KEY in text] == []


async def test_a_missing_and_an_illegal_key_name_where_to_give_one(guarded: tuple[Guarded, str]) -> None:
    _, url = guarded
    async with Halfway(url, "shop") as client:
        with pytest.raises(UnauthenticatedError, match=r"key= .*HALFWAY_CLIENT_KEY"):
            await client.show("a")
    for wrong in ("hw_two words", "abc", ""):
        with pytest.raises(InvalidKeyError, match="the key that key= gives is not a key"):
            Halfway(url, "shop", key=wrong)
