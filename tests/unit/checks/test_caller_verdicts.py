"""What counts as a verdict, in answers of reachable endpoints; the body of the check."""

import asyncio
import gzip
import json
import time
import zlib

import pytest

from halfway.checks import caller as question
from halfway.checks.caller import NotAVerdictError, is_json, read_verdict
from halfway.coordinator.ports import CheckReply, CheckRequest
from halfway.protocol.records import MAX_REMARK_BYTES, Message, rfc3339
from halfway.protocol.transactions import Outcome
from tests.support.checkback.servers import Serve, endpoint, hangs, repeats, response, sends
from tests.support.loop_time import LoopTime
from tests.support.waiting import until_true
from tests.unit.checks.conftest import GROUP, QUESTION, Ask, local_caller


def test_a_question_has_the_transaction_and_its_messages_as_a_prepare_takes_them() -> None:
    """Text is sent as text, other bytes as base64, missing fields as null; a fetched check is the same."""
    request = CheckRequest(
        check_id="order-1:3",
        id="order-1",
        group="orders",
        prepared_at=1_767_225_600_007,
        attempt=3,
        messages=(
            Message(
                topic="coupon",
                key="Gr\u00f6\u00dfe \U0001f381".encode(),
                value=b"\xff\x00",
                headers=(("trace", b"7"), ("empty", b""), ("none", None), ("raw", b"\xfe")),
                partition=0,
            ),
            Message(topic="cart", key=None, value=None),
            Message(topic="points", key=b"", value=b'{"points": 3}\x00'),
        ),
    )
    assert json.loads(question.encode(request, "Zk3vN0pQ")) == {
        "type": "transaction.check",
        "nonce": "Zk3vN0pQ",
        "id": "order-1",
        "group": "orders",
        "prepared_at": "2026-01-01T00:00:00.007Z",
        "attempt": 3,
        "messages": [
            {
                "topic": "coupon",
                "key": "Gr\u00f6\u00dfe \U0001f381",
                "value": {"type": "BINARY", "data": "/wA="},
                "headers": [
                    {"name": "trace", "value": "7"},
                    {"name": "empty", "value": ""},
                    {"name": "none", "value": None},
                    {"name": "raw", "value": {"type": "BINARY", "data": "/g=="}},
                ],
                "partition": 0,
            },
            {"topic": "cart", "key": None, "value": None, "headers": [], "partition": None},
            {
                "topic": "points",
                "key": "",
                "value": {"type": "BINARY", "data": "eyJwb2ludHMiOiAzfQA="},
                "headers": [],
                "partition": None,
            },
        ],
    }


def test_times_are_in_utc_with_milliseconds() -> None:
    """Every time has the same format, also on a full second."""
    assert rfc3339(0) == "1970-01-01T00:00:00.000Z"
    assert rfc3339(1_767_225_600_999) == "2026-01-01T00:00:00.999Z"


NONCE = "Zk3vN0pQ1rS5tUwXyZ-_ab"


def test_other_fields_are_let_through() -> None:
    """A service may send additional fields."""
    body = b'{"order": {"id": 7, "outcome": "rollback"}, "outcome": "commit", "tags": []}'
    assert read_verdict(body, NONCE) == (Outcome.COMMIT, None, False)


def test_an_echoed_nonce_binds_the_verdict_to_its_question() -> None:
    """Only the exact string counts, and only next to the outcome."""
    bound = b'{"outcome": "rollback", "nonce": "Zk3vN0pQ1rS5tUwXyZ-_ab", "remark": "never came"}'
    assert read_verdict(bound, NONCE) == (Outcome.ROLLBACK, "never came", True)
    elsewhere = b'{"outcome": "rollback", "question": {"nonce": "Zk3vN0pQ1rS5tUwXyZ-_ab"}}'
    assert not read_verdict(elsewhere, NONCE).bound


def test_a_remark_is_kept_and_cut_to_its_limit() -> None:
    """A remark of any length does not affect the verdict, and is cut between characters."""
    body = '{{"outcome": "rollback", "remark": "{}"}}'.format("\u00e9" * 5000).encode()
    outcome, remark, _ = read_verdict(body, NONCE)
    assert (outcome, remark) == (Outcome.ROLLBACK, "\u00e9" * (MAX_REMARK_BYTES // 2))


@pytest.mark.parametrize("remark", ["7", "null", '{"a": 1}', "[]"])
def test_a_remark_that_is_no_string_is_left_out(remark: str) -> None:
    """The verdict counts without it."""
    assert read_verdict(f'{{"outcome": "commit", "remark": {remark}}}'.encode(), NONCE)[:2] == (Outcome.COMMIT, None)


def test_a_remark_with_half_a_character_is_text_afterwards() -> None:
    """A lone surrogate, which JSON can contain, is replaced, because UTF-8 cannot encode it."""
    _, remark, _ = read_verdict(b'{"outcome": "commit", "remark": "\\ud800!"}', NONCE)
    assert remark == "?!"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"commit",
        b'"commit"',
        b"null",
        b'["commit"]',
        b'[{"outcome": "commit"}]',
        b"{}",
        b'{"outcome": "COMMITTED"}',
        b'{"outcome": "COMMIT"}',
        b'{"outcome": "Commit"}',
        b'{"outcome": " commit"}',
        b'{"outcome": "commit\\u0000"}',
        b'{"outcome": "committed"}',
        b'{"outcome": ""}',
        b'{"outcome": null}',
        b'{"outcome": true}',
        b'{"outcome": 0}',
        b'{"outcome": ["commit"]}',
        b'{"outcome": {"outcome": "commit"}}',
        b'{"Outcome": "commit"}',
        b'{"result": {"outcome": "commit"}}',
        b'{"outcome": "commit"} and so on',
        b'{"outcome": "commit"}{"outcome": "commit"}',
        b'{"outcome": "commit"},',
        b'{"outcome": "commit",}',
        b'{"outcome": "commit"',
        b"{'outcome': 'commit'}",
        b'{outcome: "commit"}',
        b'{"outcome": "commit"} // done',
        b'{"outcome": "commit", "outcome": "rollback"}',
        b'{"outcome": "rollback", "outcome": "commit"}',
        b'{"outcome": "commit", "outcome": "commit"}',
        b'{"outcome": "commit", "\\u006futcome": "rollback"}',
        b'{"outcome": "commit", "nonce": "that of another question"}',
        b'{"outcome": "commit", "nonce": null}',
        b'{"outcome": "commit", "nonce": ["Zk3vN0pQ1rS5tUwXyZ-_ab"]}',
        b'{"outcome": "commit", "nonce": "Zk3vN0pQ1rS5tUwXyZ-_ab ", "a": 1}',
        b'{"outcome": "commit", "nonce": "Zk3vN0pQ1rS5tUwXyZ-_ab", "nonce": "Zk3vN0pQ1rS5tUwXyZ-_ab"}',
        b'{"outcome": "commit", "cost": NaN}',
        b'{"outcome": "commit", "cost": -Infinity}',
        b'\xef\xbb\xbf{"outcome": "commit"}',
        b'{"outcome": "commit", "remark": "\xff"}',
        '{"outcome": "commit"}'.encode("utf-16"),
        b'{"outcome": "commit", "a": ' + b"[" * 60_000,
        b'{"outcome": "commit", "a": ' + b"9" * 60_000 + b"}",
        b"<html><body>commit</body></html>",
    ],
    ids=lambda body: repr(body[:70]),
)
def test_anything_else_is_no_verdict(body: bytes) -> None:
    """Everything except one object with one valid outcome is refused."""
    with pytest.raises(NotAVerdictError) as caught:
        read_verdict(body, NONCE)
    assert "commit" not in str(caught.value).replace("is not commit, rollback or unknown", "")
    assert NONCE not in str(caught.value)


@pytest.mark.parametrize(
    "content_type, accepted",
    [
        ("application/json", True),
        ("application/vnd.orders.v1+json", True),
        ("text/html", False),
        ("text/json", False),
        ("text/plain", False),
        ("application/jsonp", False),
        ("application/octet-stream", False),
        ("image/svg+json", False),
    ],
)
def test_only_a_json_media_type_holds_a_verdict(content_type: str, accepted: bool) -> None:
    """The answer must declare itself as JSON."""
    assert is_json(content_type) is accepted


COMMIT = b'{"outcome": "commit"}'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def assert_no_verdict(reply: CheckReply) -> None:
    assert (reply.outcome, reply.answered, reply.remark) == (Outcome.UNKNOWN, False, None)
    assert reply.detail
    assert len(reply.detail) <= 500


@pytest.mark.parametrize("outcome", list(Outcome))
async def test_a_verdict_is_taken(ask: Ask, outcome: Outcome) -> None:
    """Each outcome counts as an answer, including an explicit `unknown`."""
    body = json.dumps({"outcome": outcome.value, "remark": "as booked"}).encode()
    async with endpoint(sends(response(body, content_type="application/json; charset=utf-8"))) as service:
        reply = await ask(service.url)
    assert reply == CheckReply(
        outcome=outcome,
        sent=True,
        answered=True,
        reachable=True,
        detail=reply.detail,
        remark="as booked",
        attempts=reply.attempts,
    )
    (attempt,) = reply.attempts
    assert (attempt.status, attempt.answered) == (200, True)
    assert service.url.startswith(attempt.host)


@pytest.mark.parametrize("body", [b"<script>alert(1)</script>", b"\xff\x00" * 400, b""])
async def test_nothing_of_a_body_that_is_no_verdict_is_kept(ask: Ask, body: bytes) -> None:
    async with endpoint(sends(response(body, status="502 Bad Gateway", content_type="text/html"))) as service:
        reply = await ask(service.url)
    assert_no_verdict(reply)
    (attempt,) = reply.attempts
    assert (attempt.sent, attempt.answered, attempt.status) == (True, False, 502)
    assert "alert" not in repr(reply)
    assert attempt.duration_s >= 0


async def test_the_request_is_what_the_protocol_says(ask: Ask) -> None:
    """One POST with the check in JSON, and its id and time in the headers of Standard Webhooks."""
    before = int(time.time())
    async with endpoint(sends(response(COMMIT))) as service:
        await ask(service.url + "?tenant=a%20b&to=c")
    (asked,) = service.asked
    assert asked.line == "POST /check?tenant=a%20b&to=c HTTP/1.1"
    assert asked.headers["content-type"] == "application/json"
    assert asked.headers["accept-encoding"] == "identity"
    assert asked.headers["webhook-id"] == QUESTION.check_id
    assert before <= int(asked.headers["webhook-timestamp"]) <= time.time()
    assert "authorization" not in asked.headers
    body = json.loads(asked.body)
    assert (body["type"], body["id"], body["attempt"]) == ("transaction.check", "order-1", 2)


STATUSES = [
    "201 Created", "202 Accepted", "204 No Content", "206 Partial Content", "301 Moved", "302 Found", "303 See Other",
    "304 Not Modified", "307 Temporary", "400 Bad", "401 Unauthorized", "404 Not Found", "429 Slow", "500 Oh",
    "503 Busy",
]  # fmt: skip


@pytest.mark.parametrize("status", STATUSES)
async def test_only_status_200_answers(ask: Ask, status: str) -> None:
    """A valid body with any other status does not count."""
    body = b"" if status[:3] in {"204", "304"} else COMMIT
    async with endpoint(sends(response(body, status=status))) as service:
        reply = await ask(service.url)
    assert_no_verdict(reply)
    assert (reply.sent, reply.reachable) == (True, True)
    assert status[:3] in reply.detail


ANSWERS = {
    "html": response(b"<html>commit</html>", content_type="text/html"),
    "a verdict called html": response(COMMIT, content_type="text/html"),
    "html called json": response(b"<html>commit</html>"),
    "no content type": b"HTTP/1.1 200 OK\r\nContent-Length: 21\r\n\r\n" + COMMIT,
    "nothing": response(b""),
    "too short for its length": HEAD + b"Content-Length: 100\r\n\r\n" + COMMIT,
    "cut by its length": HEAD + b"Content-Length: 20\r\n\r\n" + COMMIT,
    "a length that is no number": HEAD + b"Content-Length: many\r\n\r\n" + COMMIT,
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + COMMIT,
    "two lengths": HEAD + b"Content-Length: 21\r\nContent-Length: 22\r\n\r\n" + COMMIT,
    "chunks that do not end": HEAD + b"Transfer-Encoding: chunked\r\n\r\n15\r\n" + COMMIT + b"\r\n",
    "a chunk of no size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + COMMIT + b"\r\n0\r\n\r\n",
    "not HTTP": b"220 mail.example ESMTP\r\n",
    "HTTP of another kind": b"HTTP/9.9 200 OK\r\n\r\n" + COMMIT,
    "binary": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a header without end": b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 100_000,
    "headers by the thousand": b"HTTP/1.1 200 OK\r\n" + b"X-A: a\r\n" * 5000 + b"\r\n",
    "an empty answer": b"",
    "interim answers only": b"HTTP/1.1 100 Continue\r\n\r\n" * 3,
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n" + COMMIT,
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_an_answer_that_is_no_verdict_is_unknown(ask: Ask, answer: bytes) -> None:
    """The request was sent and the connection was open, but there was no answer; the caller does not fail."""
    async with endpoint(sends(answer)) as service:
        reply = await ask(service.url)
    assert_no_verdict(reply)
    assert (reply.sent, reply.reachable) == (True, True)
    assert "commit<" not in reply.detail


async def test_a_verdict_without_length_counts_when_it_is_whole(ask: Ask) -> None:
    """A body that ends with its connection, or is chunked, is as good as one with a length."""
    async with endpoint(sends(HEAD + b"\r\n" + COMMIT)) as service:
        assert (await ask(service.url)).outcome is Outcome.COMMIT
    chunks = b"Transfer-Encoding: chunked\r\n\r\n3\r\n" + COMMIT[:3] + b"\r\n12\r\n" + COMMIT[3:] + b"\r\n0\r\n\r\n"
    async with endpoint(sends(HEAD + chunks)) as service:
        assert (await ask(service.url)).outcome is Outcome.COMMIT


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "x-own"])
async def test_a_compressed_body_is_not_unpacked(ask: Ask, coding: str) -> None:
    """A kilobyte can unpack to a gigabyte: an unrequested encoding is not read."""
    bomb = zlib.compress(b" " * 50_000_000) if coding == "deflate" else gzip.compress(COMMIT)
    async with endpoint(sends(response(bomb, extra=(f"Content-Encoding: {coding}",)))) as service:
        reply = await ask(service.url)
    assert_no_verdict(reply)
    assert "compressed" in reply.detail


async def test_a_large_body_with_a_length_is_not_read(ask: Ask) -> None:
    """A declared length of twenty megabytes is refused."""
    head = HEAD + b"Content-Length: 20000000\r\n\r\n"
    taken: list[int] = []
    async with endpoint(repeats(head, b" " * 65536, written=taken.append)) as service:
        reply = await ask(service.url)
    assert_no_verdict(reply)
    assert "larger than 65536" in reply.detail
    assert sum(taken) < 20_000_000


@pytest.mark.parametrize("head", [b"\r\n", b"Transfer-Encoding: chunked\r\n\r\n"], ids=["until closed", "chunked"])
async def test_reading_a_body_that_never_ends_stops_at_the_bound(ask: Ask, head: bytes) -> None:
    """Endless white space is valid at the start of JSON; the connection is closed after 64 KiB of it."""
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n" if b"chunked" in head else b" " * 4096
    async with endpoint(repeats(HEAD + head, chunk)) as service:
        reply = await ask(service.url)
    assert_no_verdict(reply)
    assert (reply.sent, reply.reachable) == (True, True)
    assert "larger than 65536" in reply.detail


async def test_a_body_at_the_bound_is_read(ask: Ask) -> None:
    """The limit itself is allowed, one byte more is not."""
    async with endpoint(sends(response(COMMIT.ljust(65_536)))) as service:
        assert (await ask(service.url)).outcome is Outcome.COMMIT
    async with endpoint(sends(response(COMMIT.ljust(65_537)))) as service:
        assert_no_verdict(await ask(service.url))


SLOW: dict[str, Serve] = {
    "no answer": hangs(),
    "half a status line": hangs(b"HTTP/1.1 20"),
    "headers without end": hangs(HEAD),
    "a body without end": hangs(HEAD + b"Content-Length: 100\r\n\r\n" + COMMIT),
    "a verdict in a connection left open": hangs(HEAD + b"\r\n" + COMMIT),
    "a body in drops": repeats(HEAD + b"Content-Length: 10000\r\n\r\n", b" ", pause_s=0.02),
    "headers in drops": repeats(HEAD, b"X-A: a\r\n", pause_s=0.05),
    "interim answers in drops": repeats(b"", b"HTTP/1.1 102 Processing\r\n\r\n", pause_s=0.2),
}


@pytest.mark.parametrize("serve", SLOW.values(), ids=SLOW.keys())
async def test_an_answer_that_is_not_whole_in_time_is_unknown(serve: Serve) -> None:
    """The request was sent, but the endpoint hung: the time is bounded even if single bytes arrive."""
    async with endpoint(serve) as service, local_caller(timeout_s=100) as caller:
        asking = asyncio.create_task(caller.call(GROUP, [service.url], QUESTION))
        await until_true(lambda: service.asked, what="it is asked")
        time = LoopTime()
        for _ in range(3):
            await asyncio.sleep(0.3)  # for one byte of each kind
            assert not asking.done()
            time.advance(34)
        reply = await asking
        assert_no_verdict(reply)
        assert (reply.sent, reply.reachable) == (True, False)
        assert "in time" in reply.detail


async def test_cookies_are_not_kept(ask: Ask) -> None:
    """A cookie of one answer is not sent with the next check."""
    async with endpoint(sends(response(COMMIT, extra=("Set-Cookie: a=b; Path=/",)))) as service:
        await ask(service.url)
        await ask(service.url)
    assert ["cookie" in asked.headers for asked in service.asked] == [False, False]
