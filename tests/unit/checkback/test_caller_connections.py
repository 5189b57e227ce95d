"""How the caller gets to an endpoint, to the next one, and away again."""

import asyncio
import json
import socket
from ipaddress import IPv4Address, IPv6Address

import msgspec
import pytest
from yarl import URL

from halfway.checkback import AnyAddress, HttpCheckCaller
from halfway.domain.records import Message
from halfway.domain.transaction import Outcome
from halfway.service.ports import CheckRequest
from tests.support.checkback.servers import Asked, echoes, endpoint, hangs, repeats, response, sends
from tests.unit.checkback.conftest import GROUP, QUESTION, Ask

COMMIT = response(b'{"outcome": "commit"}')


@pytest.fixture
def refusing_port() -> int:
    """Give a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


async def test_a_refused_connection_is_not_sent(ask: Ask, refusing_port: int) -> None:
    """Nobody was asked, so the check does not count."""
    reply = await ask(f"http://127.0.0.1:{refusing_port}/check")
    assert (reply.outcome, reply.sent, reply.answered, reply.reachable) == (Outcome.UNKNOWN, False, False, False)
    assert "refused" in reply.detail


async def test_a_host_that_cannot_be_found_is_not_sent(ask: Ask) -> None:
    """`.invalid` never has an address."""
    reply = await ask("http://orders.invalid/check")
    assert (reply.outcome, reply.sent, reply.reachable) == (Outcome.UNKNOWN, False, False)


async def test_a_host_name_is_looked_up(ask: Ask) -> None:
    """A name that has an address is called there."""
    async with endpoint(sends(COMMIT)) as service:
        assert (await ask(f"http://localhost:{service.port}/check")).outcome is Outcome.COMMIT


async def test_an_endpoint_that_accepts_nothing_is_not_sent() -> None:
    """Where the connection itself hangs, the time for connecting ends it and nothing counts as sent."""
    full = socket.socket()
    waiting: list[socket.socket] = []
    try:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        # Connections that nobody accepts fill the backlog, and the next one gets no answer to its SYN.
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(full.getsockname())
            waiting.append(client)
        async with HttpCheckCaller(timeout_s=20, connect_timeout_s=0.3) as caller:
            reply = await caller.call(GROUP, [f"http://127.0.0.1:{full.getsockname()[1]}/check"], QUESTION)
    finally:
        for opened in (*waiting, full):
            opened.close()
    assert (reply.sent, reply.reachable) == (False, False)


async def test_tls_with_one_who_does_not_speak_it_fails(ask: Ask) -> None:
    """An https endpoint that answers in plain text is never sent the question."""

    async def speak_plainly(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(COMMIT)
        writer.close()

    async with await asyncio.start_server(speak_plainly, "127.0.0.1", 0) as server:
        reply = await ask(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/check")
    assert (reply.outcome, reply.sent, reply.reachable) == (Outcome.UNKNOWN, False, False)
    assert "TLS" in reply.detail


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1/check",
        "file:///etc/passwd",
        "unix:///run/orders.sock",
        "/check",
        "",
        "http://",
        "http:///check",
        "http://user:secret@127.0.0.1/check",
        "http://user@127.0.0.1/check",
        "http://127.0.0.1:99999/check",
        "http://[::1/check",
        "javascript:commit",
        "http://a b/check",
        "http://" + "a" * 300 + "/check",
    ],
)
async def test_a_url_that_is_not_plain_http_is_not_called(ask: Ask, url: str) -> None:
    """Nothing is sent, nothing is raised, and no password is told."""
    reply = await ask(url)
    assert (reply.outcome, reply.sent, reply.answered, reply.reachable) == (Outcome.UNKNOWN, False, False, False)
    assert reply.detail
    assert "secret" not in reply.detail


async def test_no_endpoint_at_all_is_unknown(ask: Ask) -> None:
    """A group without endpoints is nobody's to ask."""
    reply = await ask()
    assert (reply.outcome, reply.sent, reply.reachable) == (Outcome.UNKNOWN, False, False)


async def test_the_next_endpoint_is_asked_when_one_fails(ask: Ask, refusing_port: int) -> None:
    """Refused, 500 and HTML are no verdicts, so the fourth endpoint gives it; the fifth is not asked any more."""
    async with (
        endpoint(sends(response(b"", status="500 Oh"))) as broken,
        endpoint(sends(response(b"<html>", content_type="text/html"))) as html,
        endpoint(sends(COMMIT)) as good,
        endpoint(sends(COMMIT)) as spare,
    ):
        reply = await ask(f"http://127.0.0.1:{refusing_port}/", broken.url, html.url, good.url, spare.url)
    assert (reply.outcome, reply.sent, reply.answered, reply.reachable) == (Outcome.COMMIT, True, True, True)
    assert [len(service.asked) for service in (broken, html, good, spare)] == [1, 1, 1, 0]
    assert {asked.headers["webhook-id"] for service in (broken, html, good) for asked in service.asked} == {"order-1:2"}


async def test_each_host_gets_one_attempt_of_a_check(ask: Ask) -> None:
    """Ten URLs of one host do not make ten requests of one check; another host is asked all the same."""
    async with endpoint(sends(response(b"", status="500 Oh"))) as broken, endpoint(sends(COMMIT)) as good:
        reply = await ask(*(f"{broken.url}/{number}" for number in range(9)), good.url)
    assert reply.outcome is Outcome.COMMIT
    assert (len(broken.asked), len(good.asked)) == (1, 1)


async def test_twenty_hung_groups_on_a_host_do_not_hold_up_another() -> None:
    """Each group has connections of its own to an address: 16 checks of each of twenty that hang delay no other's."""
    waiting: list[asyncio.Task[object]] = []

    async def serve(writer: asyncio.StreamWriter, asked: Asked) -> None:
        if json.loads(asked.body)["group"] == "orders":
            writer.write(COMMIT)
        else:
            await asyncio.Event().wait()

    async with endpoint(serve) as service, HttpCheckCaller(timeout_s=170, connect_timeout_s=160) as caller:
        for number in range(20 * 16):
            hung = msgspec.structs.replace(QUESTION, group=f"hung{number % 20}")
            group = msgspec.structs.replace(GROUP, name=hung.group)
            waiting.append(asyncio.create_task(caller.call(group, [service.url], hung)))
        while len(service.asked) < len(waiting):
            assert not any(task.done() for task in waiting)
            await asyncio.sleep(0.01)
        assert (await caller.call(GROUP, [service.url], QUESTION)).outcome is Outcome.COMMIT
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_unknown_said_so_ends_the_asking(ask: Ask) -> None:
    """It is a verdict: the next endpoint of the same service knows no more."""
    async with endpoint(sends(response(b'{"outcome": "unknown"}'))) as first, endpoint(sends(COMMIT)) as second:
        reply = await ask(first.url, second.url)
    assert (reply.outcome, reply.answered) == (Outcome.UNKNOWN, True)
    assert second.asked == []


async def test_an_endpoint_that_hangs_leaves_time_for_the_next() -> None:
    """One deadline holds for all, and none may use it up alone."""
    async with endpoint(hangs()) as frozen, endpoint(sends(COMMIT)) as good, HttpCheckCaller(timeout_s=6) as caller:
        reply = await caller.call(GROUP, [frozen.url, good.url], QUESTION)
    assert (reply.outcome, reply.reachable) == (Outcome.COMMIT, True)


async def test_one_reachable_endpoint_makes_the_group_reachable(ask: Ask, refusing_port: int) -> None:
    """The first was sent and answered nonsense, the second refused: sent, and not for the circuit breaker."""
    async with endpoint(sends(response(b"", status="500 Oh"))) as broken:
        reply = await ask(broken.url, f"http://127.0.0.1:{refusing_port}/check")
    assert (reply.sent, reply.answered, reply.reachable) == (True, False, True)
    assert "500" in reply.detail
    assert "refused" in reply.detail


async def test_twenty_hung_endpoints_do_not_hold_up_another(ask: Ask) -> None:
    """While questions to twenty frozen services wait, one to a healthy service is answered."""
    async with endpoint(sends(COMMIT)) as healthy, endpoint(hangs()) as frozen:
        waiting = [asyncio.create_task(ask(frozen.url)) for _ in range(20)]
        while len(frozen.asked) < 20:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)
        assert (await ask(healthy.url)).outcome is Outcome.COMMIT
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended)


async def test_a_place_that_does_not_come_free_says_nothing_of_the_endpoint() -> None:
    """With one connection for all and that one hung, the other endpoint was not tried: not sent, not unreachable."""
    async with (
        endpoint(hangs()) as frozen,
        endpoint(sends(COMMIT)) as healthy,
        HttpCheckCaller(timeout_s=20, max_connections=1) as caller,
        HttpCheckCaller(timeout_s=20) as other,
    ):
        waiting = asyncio.create_task(caller.call(GROUP, [frozen.url], QUESTION))
        while not frozen.asked:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)
        caller._timeout_s = 0.3
        reply = await caller.call(GROUP, [healthy.url], QUESTION)
        waiting.cancel()
        assert (await other.call(GROUP, [healthy.url], QUESTION)).answered
    assert (reply.sent, reply.answered, reply.reachable) == (False, False, True)


async def test_connections_are_kept_and_used_again(ask: Ask) -> None:
    """Ten questions one after the other to a service that echoes the nonce come over one connection."""
    async with endpoint(echoes("commit"), keep=True) as service:
        for _ in range(10):
            assert (await ask(service.url)).answered
    assert service.connections == 1
    assert len(service.asked) == 10


async def test_a_service_that_does_not_echo_the_nonce_is_asked_on_a_new_connection_each_time(ask: Ask) -> None:
    """Its answers count, each on a connection that carries no other question."""
    async with endpoint(sends(COMMIT), keep=True) as service:
        for _ in range(3):
            assert (await ask(service.url)).outcome is Outcome.COMMIT
    assert (service.connections, len(service.asked)) == (3, 3)


async def test_a_kept_connection_that_breaks_on_the_question_is_replaced_once(ask: Ask) -> None:
    """A service that closed its side while the question was under way is asked again on a new connection."""
    answer = echoes("commit")
    answers = 0

    async def serve_one_and_break(writer: asyncio.StreamWriter, asked: Asked) -> None:
        nonlocal answers
        answers += 1
        if answers == 2:
            writer.transport.abort()
        else:
            await answer(writer, asked)

    async with endpoint(serve_one_and_break, keep=True) as service:
        assert (await ask(service.url)).answered
        assert (await ask(service.url)).answered
    assert service.connections == 2


async def test_a_new_connection_that_breaks_is_not_tried_again(ask: Ask) -> None:
    """A service that breaks every connection is asked once a call."""

    async def break_it(writer: asyncio.StreamWriter, _: Asked) -> None:
        writer.transport.abort()

    async with endpoint(break_it) as service:
        reply = await ask(service.url)
    assert (reply.sent, reply.answered, reply.reachable) == (True, False, True)
    assert service.connections == 1


async def test_what_follows_an_answer_does_not_reach_the_next_question(ask: Ask) -> None:
    """A second answer smuggled behind the first is never taken for the answer to a later question."""
    unknown = response(b'{"outcome": "unknown"}')
    async with endpoint(sends(unknown + COMMIT), keep=True) as service:
        replies = [await ask(service.url) for _ in range(5)]
    assert Outcome.COMMIT not in {reply.outcome for reply in replies}


async def test_an_answer_cut_off_does_not_leak_into_the_next(ask: Ask) -> None:
    """The rest of a body that was not read goes away with its connection."""
    async with endpoint(repeats(b"HTTP/1.1 404 Not Found\r\n\r\n", COMMIT)) as service:
        replies = [await ask(service.url) for _ in range(3)]
    assert not any(reply.answered for reply in replies)
    assert service.connections == 3


async def test_a_large_question_to_one_who_does_not_read_ends_in_time() -> None:
    """The time for a call holds while the request itself is being sent, too."""

    async def ignore(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            writer.transport.abort()

    tasks: list[asyncio.Task[None]] = []
    server = await asyncio.start_server(
        lambda reader, writer: tasks.append(asyncio.create_task(ignore(reader, writer))), "127.0.0.1", 0
    )
    large = CheckRequest(
        check_id="a:1", id="a", group="orders", prepared_at=0, attempt=1,
        messages=(Message(topic="coupon", value=b"\xff" * 8_000_000),),
    )  # fmt: skip
    async with server, HttpCheckCaller(timeout_s=1) as caller, asyncio.timeout(30):
        reply = await caller.call(GROUP, [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"], large)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
    assert (reply.answered, reply.reachable) == (False, False)


async def test_a_closed_caller_answers_unknown() -> None:
    """A question that comes while halfway stops is answered, and opens nothing."""
    async with endpoint(sends(COMMIT)) as service:
        caller = HttpCheckCaller()
        await caller.close()
        reply = await caller.call(GROUP, [service.url], QUESTION)
    assert (reply.outcome, reply.sent, reply.answered) == (Outcome.UNKNOWN, False, False)
    assert service.connections == 0


async def test_closing_ends_what_waits() -> None:
    """A question under way is answered unknown when the caller closes."""
    async with endpoint(hangs()) as frozen:
        caller = HttpCheckCaller(timeout_s=60)
        waiting = asyncio.create_task(caller.call(GROUP, [frozen.url], QUESTION))
        while not frozen.asked:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)
        await caller.close()
        async with asyncio.timeout(30):
            reply = await waiting
    assert (reply.outcome, reply.answered) == (Outcome.UNKNOWN, False)


async def test_proxies_and_passwords_of_the_environment_are_not_used(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, refusing_port: int
) -> None:
    """Whatever the environment says, the endpoint is called directly and without credentials."""
    netrc = tmp_path_factory.mktemp("home") / "netrc"
    netrc.write_text("machine 127.0.0.1 login user password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{refusing_port}")
    async with endpoint(sends(COMMIT)) as service:
        assert (await ask(service.url)).answered
    assert "authorization" not in service.asked[0].headers


async def test_a_proxy_that_the_operator_names_is_used() -> None:
    """The proxy gets the whole URL of the endpoint."""
    async with endpoint(sends(COMMIT)) as proxy, HttpCheckCaller(proxy=proxy.url) as caller:
        assert (await caller.call(GROUP, ["http://orders.invalid/check"], QUESTION)).answered
    assert proxy.asked[0].line == "POST http://orders.invalid/check HTTP/1.1"


class _OnlyIPv6(AnyAddress):
    def allows(self, address: IPv4Address | IPv6Address) -> bool:
        return isinstance(address, IPv6Address)


class _NoCheckPath(AnyAddress):
    def refusal(self, url: URL) -> str | None:
        return "not that path" if url.path == "/check" else None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "127.1"])
async def test_an_address_that_the_operator_does_not_allow_gets_no_connection(host: str) -> None:
    """The rule sees the address that is connected to, whatever it was called in the URL; the refusal names the setting.

    The two numbers are no URLs for the HTTP client: it refuses them by itself.
    """
    async with endpoint(sends(COMMIT)) as service, HttpCheckCaller(urls=_OnlyIPv6()) as caller:
        reply = await caller.call(GROUP, [f"http://{host}:{service.port}/check"], QUESTION)
    assert (reply.sent, reply.answered) == (False, False)
    assert "HALFWAY_CHECK_NETWORKS" in reply.detail or "the URL cannot be read" in reply.detail
    assert service.connections == 0


async def test_a_url_that_the_operator_does_not_allow_is_not_called() -> None:
    """The rule's reason is shown, and the next endpoint is asked."""
    async with endpoint(sends(COMMIT)) as service, HttpCheckCaller(urls=_NoCheckPath()) as caller:
        refused = await caller.call(GROUP, [service.url], QUESTION)
        allowed = await caller.call(GROUP, [service.url, service.url + "/2"], QUESTION)
    assert (refused.sent, refused.detail) == (False, "not that path")
    assert allowed.answered
    assert service.connections == 1


async def test_an_id_that_is_no_header_is_not_sent(ask: Ask) -> None:
    """A line break cannot smuggle a header in."""
    async with endpoint(sends(COMMIT)) as service:
        request = CheckRequest(check_id="a\r\nX: y", id="a", group="orders", prepared_at=0, attempt=1, messages=())
        reply = await ask(service.url, request=request)
    assert (reply.outcome, reply.answered) == (Outcome.UNKNOWN, False)
    assert service.asked == []


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "before, flood",
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"),
        (b"", b"\r\n"),
        (HEAD + b"1;", b"x"),
        (HEAD, b"0"),
    ],
    ids=["continue", "hints", "empty lines", "a chunk's extension", "a chunk's length"],
)
async def test_an_endpoint_that_floods_the_connection_is_cut_off(ask: Ask, before: bytes, flood: bytes) -> None:
    """Whatever framing it does so with, halfway reads little of it, and answers others meanwhile."""
    flooded = repeats(before, flood * (65536 // len(flood)), pause_s=0)
    async with endpoint(flooded) as service:
        reply = await ask(service.url)
    assert (reply.outcome, reply.sent) == (Outcome.UNKNOWN, True)
    assert reply.detail.endswith("more came than an answer may have")


async def test_a_few_interim_answers_may_come_before_the_answer(ask: Ask) -> None:
    async with endpoint(sends(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 16 + COMMIT)) as service:
        assert (await ask(service.url)).outcome is Outcome.COMMIT
