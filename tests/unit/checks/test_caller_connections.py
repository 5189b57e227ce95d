"""How the caller reaches a group's endpoints, in which order, for how long, and closes."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path

import msgspec
import pytest
from aiohttp import StreamReader
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from halfway.checks import Destinations
from halfway.client import CheckVerifier
from halfway.coordinator.ports import CheckRequest
from halfway.coordinator.tls import Authorities
from halfway.protocol.keys import CheckSecrets
from halfway.protocol.records import Message
from halfway.protocol.transactions import Outcome
from tests.support.certificates import Authority
from tests.support.checkback.servers import Asked, echoes, endpoint, hangs, repeats, response, sends
from tests.support.hostile.key_updates import arriving_below_tls, key_updates, shaken_hands
from tests.support.loop_time import LoopTime
from tests.support.waiting import GENEROUS_S, until_true
from tests.unit.checks.conftest import COMMIT, GROUP, QUESTION, Ask, local_caller


async def test_a_refused_connection_is_not_sent(ask: Ask, refusing_port: int) -> None:
    """No endpoint was reached, so the check does not count."""
    reply = await ask(f"http://127.0.0.1:{refusing_port}/check")
    assert (reply.outcome, reply.sent, reply.answered, reply.reachable) == (Outcome.UNKNOWN, False, False, False)
    assert "refused" in reply.detail


async def test_a_host_that_cannot_be_found_is_not_sent(ask: Ask) -> None:
    """`.invalid` never has an address."""
    reply = await ask("http://orders.invalid/check")
    assert (reply.outcome, reply.sent, reply.reachable) == (Outcome.UNKNOWN, False, False)


async def test_an_endpoint_that_accepts_nothing_is_not_sent() -> None:
    """If the connection hangs, the time for connecting ends it and nothing counts as sent."""
    full = socket.socket()
    waiting: list[socket.socket] = []
    try:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        # Connections that are not accepted fill the backlog, and the next one gets no answer to its SYN.
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(full.getsockname())
            waiting.append(client)
        async with local_caller(timeout_s=20, connect_timeout_s=0.3) as caller:
            reply = await caller.call(GROUP, [f"http://127.0.0.1:{full.getsockname()[1]}/check"], QUESTION)
    finally:
        for opened in (*waiting, full):
            opened.close()
    assert (reply.sent, reply.reachable) == (False, False)


async def test_tls_with_one_who_does_not_speak_it_fails(ask: Ask) -> None:
    """An https endpoint that answers in plain text never gets the check."""

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
    """Nothing is sent, nothing is raised, and no password is revealed."""
    reply = await ask(url)
    assert (reply.outcome, reply.sent, reply.answered, reply.reachable) == (Outcome.UNKNOWN, False, False, False)
    assert reply.detail
    assert "secret" not in reply.detail


async def test_a_group_may_have_as_many_checks_in_flight_as_its_owner_wants() -> None:
    """The dispatcher bounds them (HALFWAY_CHECK_CONCURRENCY): here none waits for a connection in its own time."""
    count, arrived, all_there = 200, 0, asyncio.Event()

    async def answer_when_all_are_there(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        await reader.readuntil(b"\r\n\r\n")
        arrived += 1
        if arrived == count:
            all_there.set()
        await all_there.wait()
        writer.write(COMMIT)
        writer.close()

    server = await asyncio.start_server(answer_when_all_are_there, "127.0.0.1", 0, backlog=count)
    async with server, local_caller(timeout_s=30) as caller:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/check"
        replies = await asyncio.gather(*(caller.call(GROUP, [url], QUESTION) for _ in range(count)))
        all_there.set()
    assert {reply.outcome for reply in replies} == {Outcome.COMMIT}


async def test_a_service_that_does_not_echo_the_nonce_is_asked_on_a_new_connection_each_time(ask: Ask) -> None:
    """Its answers count, each on a connection that carries no other check."""
    async with endpoint(sends(COMMIT), keep=True) as service:
        for _ in range(3):
            assert (await ask(service.url)).outcome is Outcome.COMMIT
    assert (service.connections, len(service.asked)) == (3, 3)


async def test_a_kept_connection_that_breaks_on_the_question_is_replaced_once(ask: Ask) -> None:
    """If a service closed its side during the check, the check is sent again on a new connection."""
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
    """A service that breaks every connection gets one request per call."""

    async def break_it(writer: asyncio.StreamWriter, _: Asked) -> None:
        writer.transport.abort()

    async with endpoint(break_it) as service:
        reply = await ask(service.url)
    assert (reply.sent, reply.answered, reply.reachable) == (True, False, True)
    assert service.connections == 1


async def test_a_large_question_to_one_who_does_not_read_ends_in_time() -> None:
    """The time for a call also covers sending the request."""

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
    async with server, local_caller(timeout_s=200) as caller:
        asking = caller.call(GROUP, [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"], large)
        reply = await LoopTime().out(asking, 202, once=lambda: tasks, what="it is connected")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
    assert (reply.answered, reply.reachable) == (False, False)


async def test_a_closed_caller_answers_unknown() -> None:
    """A check that arrives while halfway is stopping is answered, and opens nothing."""
    async with endpoint(sends(COMMIT)) as service:
        caller = local_caller()
        await caller.close()
        reply = await caller.call(GROUP, [service.url], QUESTION)
    assert (reply.outcome, reply.sent, reply.answered) == (Outcome.UNKNOWN, False, False)
    assert service.connections == 0


async def test_closing_ends_what_waits() -> None:
    """A check under way is answered unknown when the caller closes."""
    async with endpoint(hangs()) as frozen:
        caller = local_caller(timeout_s=60)
        waiting = asyncio.create_task(caller.call(GROUP, [frozen.url], QUESTION))
        await until_true(lambda: frozen.asked)
        await caller.close()
        async with asyncio.timeout(GENEROUS_S):
            reply = await waiting
    assert (reply.outcome, reply.answered) == (Outcome.UNKNOWN, False)


async def test_proxies_and_passwords_of_the_environment_are_not_used(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, refusing_port: int
) -> None:
    """Regardless of the environment, the endpoint is called directly and without credentials."""
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
    async with endpoint(sends(COMMIT)) as proxy, local_caller(proxy=proxy.url) as caller:
        assert (await caller.call(GROUP, ["http://orders.invalid/check"], QUESTION)).answered
    assert proxy.asked[0].line == "POST http://orders.invalid/check HTTP/1.1"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "169.254.169.254", "[::ffff:7f00:1]"])
async def test_behind_a_proxy_what_the_url_itself_says_is_judged_here(host: str) -> None:
    """The proxy looks up names, so it checks their addresses; it is never called for a refused address."""
    async with endpoint(sends(COMMIT)) as proxy, local_caller(proxy=proxy.url, destinations=Destinations()) as caller:
        reply = await caller.call(GROUP, [f"http://{host}/check"], QUESTION)
    assert (reply.sent, proxy.connections) == (False, 0)
    assert "HALFWAY_CHECK_ALSO_NETWORKS" in reply.detail


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "127.1"])
async def test_an_address_that_the_operator_does_not_allow_gets_no_connection(host: str) -> None:
    """The HTTP client would refuse the two numbers itself, because they are not URLs."""
    async with endpoint(sends(COMMIT)) as service, local_caller(destinations=Destinations()) as caller:
        reply = await caller.call(GROUP, [f"http://{host}:{service.port}/check"], QUESTION)
    assert (reply.sent, reply.answered) == (False, False)
    assert "HALFWAY_CHECK_ALSO_NETWORKS" in reply.detail
    assert service.connections == 0


async def test_a_name_that_has_another_address_at_its_connection_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of the connection is checked, not that of an earlier look-up."""
    async with endpoint(sends(COMMIT)) as service, local_caller(destinations=Destinations()) as caller:
        url = f"http://orders.example:{service.port}/check"
        assert caller.refusal(url) is None  # as a registration sees it
        resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", service.port))]
        monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: resolved)
        reply = await caller.call(GROUP, [url], QUESTION)
    assert (reply.sent, service.connections) == (False, 0)
    assert "the host name has a loopback address" in reply.detail
    assert "HALFWAY_CHECK_ALSO_NETWORKS" in reply.detail


async def test_a_redirect_is_not_followed_wherever_it_leads() -> None:
    location = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://%s/check\r\nContent-Length: 0\r\n\r\n"
    async with endpoint(sends(COMMIT)) as inside:
        redirect = location % f"127.0.0.1:{inside.port}".encode()
        async with endpoint(sends(redirect)) as service, local_caller() as caller:
            reply = await caller.call(GROUP, [service.url], QUESTION)
    assert (reply.answered, inside.connections) == (False, 0)


async def test_a_check_is_signed_with_every_secret_of_its_group_and_keeps_its_id() -> None:
    """A service with the old or the new secret accepts it; a retry of the same check has the same id."""
    secrets = CheckSecrets([b"n" * 32, b"o" * 32])
    async with endpoint(sends(COMMIT)) as service, local_caller(secrets_of=secrets.of) as caller:
        assert (await caller.call(GROUP, [service.url], QUESTION)).answered
        assert (await caller.call(GROUP, [service.url], QUESTION)).answered
    for asked in service.asked:
        for secret in secrets.shown("orders"):
            Webhook(secret).verify(asked.body, dict(asked.headers))
            CheckVerifier(secret).verify(asked.body, asked.headers)
        with pytest.raises(WebhookVerificationError):
            Webhook(secrets.shown("shop")[0]).verify(asked.body, dict(asked.headers))
    assert [asked.headers["webhook-id"] for asked in service.asked] == ["order-1:2"] * 2
    assert len({asked.body for asked in service.asked}) == 2


async def test_only_an_endpoint_with_a_valid_certificate_is_asked_over_https(tmp_path: Path) -> None:
    """A service at a wrong address does not even get the check."""
    authority = Authority(tmp_path, "authority")
    served = authority.server("DNS:localhost,IP:127.0.0.1")
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n"))
        writer.write(COMMIT)
        await writer.drain()
        writer.close()

    async with (
        await asyncio.start_server(answer, "127.0.0.1", 0, ssl=served) as server,
        local_caller() as doubting,
        local_caller(trust=authority.trusted) as trusts,
    ):
        port = server.sockets[0].getsockname()[1]
        url = f"https://127.0.0.1:{port}/check"
        refused = await doubting.call(GROUP, [url], QUESTION)
        assert (refused.sent, refused.detail) == (False, f"127.0.0.1:{port}: the TLS certificate is not valid")
        assert asked == []
        assert (await trusts.call(GROUP, [url], QUESTION)).answered


async def test_authorities_that_are_replaced_vouch_for_the_next_connection(tmp_path: Path) -> None:
    """Those that are gone vouch for none any more, not even for a connection that was kept."""
    authorities = {name: Authority(tmp_path, name) for name in ("one", "two")}
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authorities["one"].file.read_bytes())
    files = Authorities("HALFWAY_CHECK_CA_FILE", trusted)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))[15:])
            nonce = json.loads(await reader.readexactly(length))["nonce"]
            writer.write(response(json.dumps({"outcome": "commit", "nonce": nonce}).encode()))

    async with contextlib.AsyncExitStack() as stack:
        urls = {}
        for name, authority in authorities.items():
            served = authority.server("IP:127.0.0.1")
            server = await stack.enter_async_context(await asyncio.start_server(answer, "127.0.0.1", 0, ssl=served))
            urls[name] = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/check"
        caller = await stack.enter_async_context(local_caller(trust=files.current))

        async def answered() -> set[str]:
            return {name for name, url in urls.items() if (await caller.call(GROUP, [url], QUESTION)).answered}

        assert await answered() == {"one"}
        trusted.write_text("no certificate")
        files.reload_if_changed()
        assert await answered() == {"one"}
        trusted.write_bytes(authorities["two"].file.read_bytes())
        files.reload_if_changed()
        assert await answered() == {"two"}


async def test_a_connection_ends_though_its_endpoint_does_not_close_tls(tmp_path: Path) -> None:
    """TLS would wait 30 s for the endpoint's close, outside all bounds on connections."""
    authority = Authority(tmp_path, "one")
    served = authority.server("IP:127.0.0.1")
    listener = socket.create_server(("127.0.0.1", 0))
    sent = response(b"", status="500 Error")
    answering = asyncio.create_task(asyncio.to_thread(arriving_below_tls, listener, served, sent))
    async with local_caller(trust=authority.trusted) as caller:
        await caller.call(GROUP, [f"https://127.0.0.1:{listener.getsockname()[1]}/"], QUESTION)
        assert await asyncio.wait_for(answering, GENEROUS_S) == b""


async def test_an_endpoint_that_sends_only_messages_of_tls_is_cut_off(tmp_path: Path) -> None:
    """OpenSSL takes any number of KeyUpdates and asks nobody: the answer does not come, and the connection ends."""
    authority = Authority(tmp_path, "one")
    served = authority.server("IP:127.0.0.1")
    listener = socket.create_server(("127.0.0.1", 0))

    def flood() -> None:
        with listener, listener.accept()[0] as raw:
            raw.settimeout(GENEROUS_S)
            secret = shaken_hands(raw, served, tmp_path / "keys", is_server=True)
            with contextlib.suppress(ConnectionError):
                raw.sendall(key_updates(secret, 1000))
                while raw.recv(65536):
                    pass

    flooding = asyncio.create_task(asyncio.to_thread(flood))
    async with local_caller(trust=authority.trusted) as caller:
        reply = await caller.call(GROUP, [f"https://127.0.0.1:{listener.getsockname()[1]}/"], QUESTION)
    assert not reply.answered
    await asyncio.wait_for(flooding, GENEROUS_S)


async def test_without_a_master_secret_a_check_has_no_signature(ask: Ask) -> None:
    async with endpoint(sends(COMMIT)) as service:
        assert (await ask(service.url)).answered
    assert "webhook-signature" not in service.asked[0].headers


async def test_an_id_that_is_no_header_is_not_sent(ask: Ask) -> None:
    """A line break cannot add a header."""
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
    """For any framing, halfway reads little of it, and calls other endpoints in the meantime."""
    flooded = repeats(before, flood * (65536 // len(flood)), pause_s=0)
    async with endpoint(flooded) as service:
        reply = await ask(service.url)
    assert (reply.outcome, reply.sent) == (Outcome.UNKNOWN, True)
    assert reply.detail.endswith("more came than an answer may have")


async def test_an_answer_in_tiny_chunks_is_cut_off_before_it_takes_long(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 8 us, so that a verdict of 64 KiB in chunks of one byte would take half a second."""
    end, parsed = StreamReader.end_http_chunk_receiving, []

    def note(self: StreamReader) -> None:
        parsed.append(1)
        end(self)

    monkeypatch.setattr(StreamReader, "end_http_chunk_receiving", note)
    async with endpoint(repeats(HEAD, b"1\r\n \r\n" * 10_000, pause_s=0)) as service:
        reply = await ask(service.url)
    assert (reply.outcome, reply.detail.endswith("more came than an answer may have")) == (Outcome.UNKNOWN, True)
    assert len(parsed) < 1000


async def test_a_few_interim_answers_may_come_before_the_answer(ask: Ask) -> None:
    async with endpoint(sends(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 16 + COMMIT)) as service:
        assert (await ask(service.url)).outcome is Outcome.COMMIT


async def test_no_endpoint_at_all_is_unknown(ask: Ask) -> None:
    """A group without endpoints gets no call."""
    reply = await ask()
    assert (reply.outcome, reply.sent, reply.reachable) == (Outcome.UNKNOWN, False, False)


async def test_the_next_endpoint_is_asked_when_one_fails(ask: Ask, refusing_port: int) -> None:
    """Refused, 500 and HTML are not verdicts, so the fourth endpoint decides; the fifth is not called."""
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
    """Ten URLs of one host do not cause ten requests of one check; another host is called too."""
    async with endpoint(sends(response(b"", status="500 Oh"))) as broken, endpoint(sends(COMMIT)) as good:
        reply = await ask(*(f"{broken.url}/{number}" for number in range(9)), good.url)
    assert reply.outcome is Outcome.COMMIT
    assert (len(broken.asked), len(good.asked)) == (1, 1)


async def test_twenty_hung_groups_on_a_host_do_not_hold_up_another() -> None:
    """Each group has its own connections to an address: 16 hanging checks of each of twenty delay no other's."""
    waiting: list[asyncio.Task[object]] = []

    async def serve(writer: asyncio.StreamWriter, asked: Asked) -> None:
        if json.loads(asked.body)["group"] == "orders":
            writer.write(COMMIT)
        else:
            await asyncio.Event().wait()

    async with endpoint(serve) as service, local_caller(timeout_s=170, connect_timeout_s=160) as caller:
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
    """One deadline covers all endpoints, and none may use it up alone."""
    async with endpoint(hangs()) as frozen, endpoint(sends(COMMIT)) as good, local_caller(timeout_s=200) as caller:
        asking = caller.call(GROUP, [frozen.url, good.url], QUESTION)
        reply = await LoopTime().out(asking, 102, once=lambda: frozen.asked, what="one hangs")
    assert (reply.outcome, reply.reachable) == (Outcome.COMMIT, True)


async def test_one_reachable_endpoint_makes_the_group_reachable(ask: Ask, refusing_port: int) -> None:
    """The first was sent and gave an invalid answer, the second was refused: sent, and not for the circuit breaker."""
    async with endpoint(sends(response(b"", status="500 Oh"))) as broken:
        reply = await ask(broken.url, f"http://127.0.0.1:{refusing_port}/check")
    assert (reply.sent, reply.answered, reply.reachable) == (True, False, True)
    assert "500" in reply.detail
    assert "refused" in reply.detail


async def test_twenty_hung_endpoints_do_not_hold_up_another(ask: Ask) -> None:
    """While checks to twenty paused services wait, one to a healthy service is answered."""
    async with endpoint(sends(COMMIT)) as healthy, endpoint(hangs()) as frozen:
        waiting = [asyncio.create_task(ask(frozen.url)) for _ in range(20)]
        await until_true(lambda: len(frozen.asked) >= 20)
        assert (await ask(healthy.url)).outcome is Outcome.COMMIT
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended)


async def test_a_place_that_does_not_come_free_says_nothing_of_the_endpoint() -> None:
    """If the only connection hangs, the other endpoint was not tried: not sent, not unreachable."""
    async with (
        endpoint(hangs()) as frozen,
        endpoint(sends(COMMIT)) as healthy,
        local_caller(max_connections=1) as caller,
        local_caller() as other,
    ):
        waiting = asyncio.create_task(caller.call(GROUP, [frozen.url], QUESTION))
        await until_true(lambda: frozen.asked)
        caller._timeout_s = 0.3
        reply = await caller.call(GROUP, [healthy.url], QUESTION)
        waiting.cancel()
        assert (await other.call(GROUP, [healthy.url], QUESTION)).answered
    assert (reply.sent, reply.answered, reply.reachable) == (False, False, True)
