"""The check endpoints: one answer behind each of them."""

import asyncio
import io
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import ClientSession, web
from fastapi import FastAPI
from flask import Flask
from starlette.applications import Starlette
from werkzeug.exceptions import NotFound
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client as WsgiClient

from halfway.client import (
    AiohttpChecks,
    AsgiChecks,
    Check,
    FlaskChecks,
    WsgiChecks,
    answer_check,
    answer_check_sync,
)
from halfway.client import checks as checks_module

QUESTION: dict[str, Any] = {
    "type": "transaction.check",
    "nonce": "qL4c",
    "id": "order-42",
    "group": "shop",
    "prepared_at": "2026-01-02T03:04:05.678Z",
    "attempt": 1,
    "messages": [{"topic": "orders", "key": "42", "value": None}],
}
BODY = json.dumps(QUESTION).encode()
NO_QUESTIONS = [b"", b"{", b"[]", b"null", b'{"type": "x"}', json.dumps({**QUESTION, "id": 1}).encode(), b"[" * 100_000]


def commit(check: Check) -> str:
    assert check.id == "order-42"
    return "commit"


async def commit_async(check: Check) -> str:
    return commit(check)


def fails(check: Check) -> str:
    raise ZeroDivisionError


Ask = Callable[[Any, bytes], Any]


async def over_aiohttp(decide: Any, body: bytes) -> tuple[int, str, bytes]:
    app = web.Application(client_max_size=10)
    app.router.add_post("/check", AiohttpChecks(decide).__call__)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}/check"
        async with ClientSession() as session, session.post(address, data=body) as response:
            return response.status, response.content_type, await response.read()
    finally:
        await runner.cleanup()


async def over_starlette(decide: Any, body: bytes) -> tuple[int, str, bytes]:
    return await over_asgi(Starlette(), decide, body)


async def over_fastapi(decide: Any, body: bytes) -> tuple[int, str, bytes]:
    return await over_asgi(FastAPI(), decide, body)


async def over_asgi(app: Starlette, decide: Any, body: bytes) -> tuple[int, str, bytes]:
    app.add_route("/check", AsgiChecks(decide), methods=["POST"])  # type: ignore[arg-type]  # an application as well
    half = len(body) // 2
    events = [
        {"type": "http.request", "body": body[:half], "more_body": True},
        {"type": "http.request", "body": body[half:]},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return events.pop(0)

    async def send(event: Any) -> None:
        sent.append(event)

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/check", "headers": [], "query_string": b""}
    await app({**scope, "root_path": ""}, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"])[b"content-type"].decode(), sent[1]["body"]


async def over_wsgi(decide: Any, body: bytes) -> tuple[int, str, bytes]:
    started: list[Any] = []
    environ = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body + b"next")}
    answer = await asyncio.to_thread(WsgiChecks(decide), environ, lambda *line: started.extend(line))
    return int(started[0].partition(" ")[0]), dict(started[1])["Content-Type"], b"".join(answer)


async def over_flask(decide: Any, body: bytes) -> tuple[int, str, bytes]:
    app = Flask("shop")
    app.add_url_rule("/check", "check", FlaskChecks(decide), methods=["POST"])
    answer = await asyncio.to_thread(app.test_client().post, "/check", data=body)
    return answer.status_code, answer.mimetype or "", answer.data


async def over_werkzeug(decide: Any, body: bytes) -> tuple[int, str, bytes]:
    mounted = DispatcherMiddleware(NotFound(), {"/check": WsgiChecks(decide)})
    answer = await asyncio.to_thread(WsgiClient(mounted).post, "/check", data=body)
    return answer.status_code, answer.mimetype or "", answer.data


ENDPOINTS = [over_aiohttp, over_starlette, over_fastapi, over_wsgi, over_werkzeug, over_flask]


@pytest.mark.parametrize("ask", ENDPOINTS)
async def test_each_endpoint_answers_with_the_verdict_and_the_nonce(ask: Ask) -> None:
    status, content_type, answer = await ask(commit, BODY)
    assert (status, content_type) == (200, "application/json")
    assert json.loads(answer) == {"outcome": "commit", "nonce": "qL4c"}


@pytest.mark.parametrize("ask", ENDPOINTS)
async def test_what_is_no_check_is_refused(ask: Ask) -> None:
    for body in NO_QUESTIONS:
        assert (await ask(fails, body))[0] == 400


@pytest.mark.parametrize("ask", ENDPOINTS)
async def test_a_body_is_bounded(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfway.client.endpoints.MAX_QUESTION_BYTES", len(BODY))
    assert (await ask(commit, BODY))[0] == 200
    assert (await ask(commit, BODY + b" "))[0] == 413


async def test_only_a_post_is_a_check() -> None:
    started: list[Any] = []
    WsgiChecks(commit)({"REQUEST_METHOD": "GET"}, lambda *line: started.extend(line))  # type: ignore[arg-type]
    assert started[0] == "405 Method Not Allowed"


async def test_a_service_that_fails_or_answers_nonsense_says_unknown() -> None:
    async def forgotten(check: Check) -> str:
        return "commit"

    wrong: list[Any] = [fails, lambda _: "committed", lambda _: None, lambda _: ["commit"]]
    for decide in wrong:
        assert json.loads((await answer_check(BODY, decide))[1])["outcome"] == "unknown"
        assert json.loads(answer_check_sync(BODY, decide)[1])["outcome"] == "unknown"
    assert json.loads((await answer_check(BODY, commit_async))[1])["outcome"] == "commit"  # type: ignore[arg-type]
    assert json.loads(answer_check_sync(BODY, forgotten)[1])["outcome"] == "unknown"  # type: ignore[arg-type]


async def test_a_service_that_takes_too_long_says_unknown_and_blocks_no_loop() -> None:
    go_on = threading.Event()

    def stuck(check: Check) -> Any:
        go_on.wait(30)
        return "commit"

    async def stuck_async(check: Check) -> Any:
        await asyncio.sleep(30)

    for decide in (stuck, stuck_async):
        assert json.loads((await answer_check(BODY, decide, within_s=0.05))[1])["outcome"] == "unknown"
    go_on.set()


def test_a_question_without_a_nonce_is_answered_without_one() -> None:
    body = json.dumps({name: value for name, value in QUESTION.items() if name != "nonce"}).encode()
    assert json.loads(answer_check_sync(body, commit)[1]) == {"outcome": "commit"}  # type: ignore[arg-type]
    assert checks_module.read_check(BODY).nonce == "qL4c"
