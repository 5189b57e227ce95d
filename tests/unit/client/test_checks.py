"""The check endpoints, which all give the same answers."""

import asyncio
import io
import json
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import pytest
from aiohttp import ClientSession
from fastapi import FastAPI
from flask import Flask, current_app, g
from starlette.applications import Starlette
from werkzeug.exceptions import NotFound
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client as WsgiClient

from halfway.checks.caller import signed_headers
from halfway.client import (
    AiohttpChecks,
    AsgiChecks,
    Check,
    CheckVerifier,
    FlaskChecks,
    WsgiChecks,
    answer_check,
    answer_check_sync,
)
from halfway.client.checks import answers
from halfway.client.threads import BoundedThreads
from halfway.protocol.keys import CheckSecrets
from tests.support.client.serving import serving

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
NO_QUESTIONS += [
    json.dumps({**QUESTION, field: value}).encode()
    for field, value in (
        ("id", "a\nERROR forged"),
        ("id", "\x1b[2J"),
        ("id", "i" * 129),
        ("id", ["forged"] * 100_000),
        ("group", "g\u2028"),
        ("prepared_at", "forged"),
        ("prepared_at", "2026-01-02T03:04:05"),
        ("attempt", -1),
        ("messages", {}),
        ("nonce", 1),
        ("nonce", "n" * 257),
        ("check_id", "c" * 257),
    )
]
NO_QUESTIONS += [BODY.replace(b'"attempt": 1', b'"attempt": ' + number) for number in (b"1e999", b"NaN", b"9" * 5000)]


def commit(check: Check) -> str:
    assert check.id == "order-42"
    return "commit"


async def commit_async(check: Check) -> str:
    return commit(check)


def fail(check: Check) -> str:
    raise ZeroDivisionError


class Signed(NamedTuple):
    """The headers of a check, and their verifier."""

    headers: Mapping[str, str]
    verifier: CheckVerifier | None


UNSIGNED = Signed({}, None)
Ask = Callable[..., Any]


async def over_aiohttp(decide: Any, body: bytes, signed: Signed = UNSIGNED) -> tuple[int, str, bytes]:
    async with (
        serving(AiohttpChecks(decide, signed.verifier).__call__, client_max_size=10) as url,
        ClientSession() as session,
        session.post(f"{url}/check", data=body, headers=signed.headers) as response,
    ):
        return response.status, response.content_type, await response.read()


async def over_starlette(decide: Any, body: bytes, signed: Signed = UNSIGNED) -> tuple[int, str, bytes]:
    return await over_asgi(Starlette(), decide, body, signed)


async def over_fastapi(decide: Any, body: bytes, signed: Signed = UNSIGNED) -> tuple[int, str, bytes]:
    return await over_asgi(FastAPI(), decide, body, signed)


async def over_asgi(app: Starlette, decide: Any, body: bytes, signed: Signed) -> tuple[int, str, bytes]:
    app.add_route("/check", AsgiChecks(decide, signed.verifier), methods=["POST"])  # type: ignore[arg-type]  # also an application
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

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/check", "query_string": b""}
    headers = [(name.encode(), value.encode()) for name, value in signed.headers.items()]
    await app({**scope, "root_path": "", "headers": headers}, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"])[b"content-type"].decode(), sent[1]["body"]


async def over_wsgi(decide: Any, body: bytes, signed: Signed = UNSIGNED) -> tuple[int, str, bytes]:
    started: list[Any] = []
    environ = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body + b"next")}
    environ |= {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in signed.headers.items()}
    answer = await asyncio.to_thread(WsgiChecks(decide, signed.verifier), environ, lambda *line: started.extend(line))
    return int(started[0].partition(" ")[0]), dict(started[1])["Content-Type"], b"".join(answer)


async def over_flask(decide: Any, body: bytes, signed: Signed = UNSIGNED) -> tuple[int, str, bytes]:
    app = Flask("shop")
    app.add_url_rule("/check", "check", FlaskChecks(decide, signed.verifier), methods=["POST"])
    answer = await asyncio.to_thread(app.test_client().post, "/check", data=body, headers=dict(signed.headers))
    return answer.status_code, answer.mimetype or "", answer.data


async def over_werkzeug(decide: Any, body: bytes, signed: Signed = UNSIGNED) -> tuple[int, str, bytes]:
    mounted = DispatcherMiddleware(NotFound(), {"/check": WsgiChecks(decide, signed.verifier)})
    answer = await asyncio.to_thread(WsgiClient(mounted).post, "/check", data=body, headers=dict(signed.headers))
    return answer.status_code, answer.mimetype or "", answer.data


ENDPOINTS = [over_aiohttp, over_starlette, over_fastapi, over_wsgi, over_werkzeug, over_flask]


@pytest.mark.parametrize("ask", ENDPOINTS)
async def test_each_endpoint_answers_with_the_verdict_and_the_nonce(ask: Ask) -> None:
    status, content_type, answer = await ask(commit, BODY)
    assert (status, content_type) == (200, "application/json")
    assert json.loads(answer) == {"outcome": "commit", "nonce": "qL4c"}


@pytest.mark.parametrize("ask", ENDPOINTS)
async def test_each_endpoint_with_a_verifier_answers_signed_checks_once(ask: Ask) -> None:
    """An unsigned request, and a copy of an answered request, are 401."""
    secrets = CheckSecrets([b"m" * 32])
    verifier = CheckVerifier(*secrets.shown("shop"))
    signed = Signed(signed_headers("order-42:1", BODY, secrets.of("shop")), verifier)
    statuses = [(await ask(commit, BODY, one))[0] for one in (Signed({}, verifier), signed, signed)]
    assert statuses == [401, 200, 401]


@pytest.mark.parametrize("ask", ENDPOINTS)
async def test_what_is_no_check_is_refused(ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of it gets into the log, and little into the answer."""
    for body in NO_QUESTIONS:
        status, _, answer = await ask(fail, body)
        assert (status, len(answer) < 200) == (400, True), body[:80]
    assert "forged" not in caplog.text


@pytest.mark.parametrize("ask", ENDPOINTS)
async def test_a_body_is_bounded(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfway.client.checks.endpoints.MAX_CHECK_BYTES", len(BODY))
    assert (await ask(commit, BODY))[0] == 200
    assert (await ask(commit, BODY + b" "))[0] == 413


async def test_only_a_post_is_a_check() -> None:
    started: list[Any] = []
    WsgiChecks(commit)({"REQUEST_METHOD": "GET"}, lambda *line: started.extend(line))  # type: ignore[arg-type]
    assert started[0] == "405 Method Not Allowed"


async def test_a_service_that_fails_or_answers_nonsense_says_unknown() -> None:
    async def forgotten(check: Check) -> str:
        return "commit"

    wrong: list[Any] = [fail, lambda _: "committed", lambda _: None, lambda _: ["commit"]]
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
    assert json.loads(answer_check_sync(BODY, stuck, within_s=0.05)[1])["outcome"] == "unknown"
    go_on.set()


def test_checks_that_are_stuck_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check without a free thread is answered at once, and not decided later."""
    threads = BoundedThreads(2, "test")
    monkeypatch.setattr(answers, "_threads", threads)
    go_on = threading.Event()
    decided: list[str] = []

    def stuck(check: Check) -> Any:
        go_on.wait()
        decided.append(threading.current_thread().name)
        return "commit"

    assert [outcome_of(answer_check_sync(BODY, stuck, within_s=0.01)) for _ in range(2)] == ["unknown"] * 2
    assert outcome_of(answer_check_sync(BODY, stuck, within_s=600)) == "unknown"
    assert outcome_of(answer_check_sync(BODY, commit, within_s=None)) == "commit"  # type: ignore[arg-type]
    stuck_threads = list(threads._threads)
    go_on.set()
    for thread in stuck_threads:
        thread.join()
    assert decided == ["test", "test"]
    assert outcome_of(answer_check_sync(BODY, commit, within_s=600)) == "commit"  # type: ignore[arg-type]


def test_a_decision_has_no_context_of_the_request() -> None:
    """A session that a framework keeps in it is closed with the request, and a decision may take longer."""
    request: ContextVar[str] = ContextVar("request")
    request.set("order-42")

    def decide(check: Check) -> Any:
        return "rollback" if request.get("") == check.id else "commit"

    assert outcome_of(answer_check_sync(BODY, decide, within_s=600)) == "commit"


async def test_a_decision_over_flask_has_an_application_context_of_its_own() -> None:
    """Like the sessions of extensions: they are closed together with the decision that opened them."""
    app, closed = Flask("shop"), []

    def decide(check: Check) -> Any:
        g.order = check.id
        return "commit" if current_app.name == "shop" and not hasattr(g, "user") else "rollback"

    @app.before_request
    def log_in() -> None:
        g.user = "somebody"

    @app.teardown_appcontext
    def close(_: BaseException | None) -> None:
        closed.append(hasattr(g, "order"))

    app.add_url_rule("/check", "check", FlaskChecks(decide), methods=["POST"])
    answer = await asyncio.to_thread(lambda: app.test_client().post("/check", data=BODY))
    assert outcome_of((answer.status_code, answer.data)) == "commit"
    assert closed == [True, False]


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, KeyboardInterrupt])
def test_whatever_a_decision_raises_in_its_thread_the_answer_is_unknown(error: type[BaseException]) -> None:
    def decide(_: Check) -> Any:
        raise error

    assert outcome_of(answer_check_sync(BODY, decide)) == "unknown"


def outcome_of(answer: tuple[int, bytes]) -> str:
    assert answer[0] == 200
    return str(json.loads(answer[1])["outcome"])


def test_a_question_without_a_nonce_is_answered_without_one() -> None:
    body = json.dumps({name: value for name, value in QUESTION.items() if name != "nonce"}).encode()
    assert json.loads(answer_check_sync(body, commit)[1]) == {"outcome": "commit"}  # type: ignore[arg-type]
    assert answers.read_check(BODY).nonce == "qL4c"
