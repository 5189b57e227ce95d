"""Only the answer to a check resolves its transaction, whatever an endpoint does to its connections."""

import asyncio
import contextlib
import gzip
import json
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

import msgspec
import pytest

from halfway.checks import HttpCheckCaller
from halfway.coordinator.ports import CheckReply, CheckRequest
from halfway.protocol.records import Group, Message
from halfway.protocol.transactions import Outcome
from tests.support.checkback.servers import Asked, echoes, endpoint, response, sends
from tests.unit.checks.conftest import GROUP, QUESTION, Ask, local_caller

STRAY = response(b'{"outcome": "commit"}')
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
OTHER_GROUP = Group(
    name="carts", mode=GROUP.mode, urls=(), topics=(), policy=GROUP.policy, created_at=0, updated_at=0
)  # fmt: skip


Second = Callable[[Asked], bytes]


def answered(asked: Asked, outcome: str) -> bytes:
    return response(json.dumps({"outcome": outcome, "nonce": asked.nonce}).encode())


@asynccontextmanager
async def strays_after(
    first: Second, later: Second, *, pause_s: float
) -> AsyncIterator[tuple[str, list[int], asyncio.Event]]:
    """Serve answers that are followed by something more, `pause_s` later.

    Give the URL, which connection each question came on, and what is set once something more was sent.
    """
    connections: list[int] = []
    sent = asyncio.Event()

    async def serve(writer: asyncio.StreamWriter, asked: Asked) -> None:
        connections.append(writer.get_extra_info("peername")[1])
        writer.write(first(asked))
        if pause_s:
            await writer.drain()
            await asyncio.sleep(pause_s)
        writer.write(later(asked))
        sent.set()

    async with endpoint(serve, keep=True) as service:
        yield service.url, connections, sent


STRAYS: dict[str, Second] = {
    "a second answer": lambda _: STRAY,
    "a second answer that echoes": lambda asked: answered(asked, "commit"),
    "its head": lambda _: STRAY.partition(b"\r\n\r\n")[0],
    "its first byte": lambda _: b"H",
    "an empty line": lambda _: b"\r\n",
    "an interim answer": lambda _: b"HTTP/1.1 100 Continue\r\n\r\n",
    "another status": lambda _: response(b"", status="500 Oh"),
    "what is not HTTP": lambda _: b"\x00" * 100,
    "a hundred answers": lambda _: STRAY * 100,
    "an answer without end": lambda _: HEAD + b"Content-Length: 100\r\n\r\n" + b" " * 79,
}


CASES = {
    f"{name}, {when}": (stray, pause_s)
    for name, stray in STRAYS.items()
    for when, pause_s in (("at once", 0.0), ("later", 0.02))
    # HTTP allows an empty line before a message, so sent at once it is read and dropped.
    if (name, when) != ("an empty line", "at once")
}


@pytest.mark.parametrize("stray, pause_s", CASES.values(), ids=CASES.keys())
async def test_a_connection_with_anything_left_to_read_is_not_used_again(
    ask: Ask, stray: Second, pause_s: float
) -> None:
    """Whatever follows an answer, the next check uses another connection and gets its own answer or none."""
    strays = strays_after(lambda asked: answered(asked, "rollback"), stray, pause_s=pause_s)
    async with strays as (url, connections, sent):
        assert (await ask(url)).outcome is not Outcome.COMMIT
        await sent.wait()
        await asyncio.sleep(0.05)  # it was sent, and is read in the next turn of the loop
        assert (await ask(url)).outcome is not Outcome.COMMIT
    assert len(connections) == len(set(connections)) == 2


async def test_an_answer_that_strays_to_the_next_question_does_not_count(ask: Ask) -> None:
    """Sent during the next check it is not a verdict: the check is sent again on a new connection."""
    first: list[Asked] = []

    async def serve(writer: asyncio.StreamWriter, asked: Asked) -> None:
        first.append(asked)
        if len(first) == 2:
            writer.write(STRAY)
        else:
            writer.write(answered(asked, "rollback"))

    async with endpoint(serve, keep=True) as service:
        assert (await ask(service.url)).outcome is Outcome.ROLLBACK
        assert (await ask(service.url)).outcome is Outcome.ROLLBACK
    assert (service.connections, len(first)) == (2, 3)
    assert len({asked.nonce for asked in first}) == 3


async def test_the_answer_to_another_question_does_not_count_on_any_connection(ask: Ask) -> None:
    """An answer with the nonce of the check before is not a verdict, also on a new connection."""
    nonces: list[str] = []

    async def serve(writer: asyncio.StreamWriter, asked: Asked) -> None:
        nonces.append(asked.nonce)
        writer.write(response(json.dumps({"outcome": "commit", "nonce": nonces[0]}).encode()))

    async with endpoint(serve) as service:
        assert (await ask(service.url)).outcome is Outcome.COMMIT
        reply = await ask(service.url)
    assert (reply.outcome, reply.answered, reply.sent) == (Outcome.UNKNOWN, False, True)
    assert "another question" in reply.detail


async def test_groups_behind_one_address_share_no_connection(caller: HttpCheckCaller) -> None:
    """A stray answer on a connection of one group cannot reach another's check."""
    async with endpoint(echoes("rollback"), keep=True) as service:
        for group in (GROUP, OTHER_GROUP, GROUP, OTHER_GROUP):
            assert (
                await caller.call(group, [service.url], msgspec.structs.replace(QUESTION, group=group.name))
            ).answered
    assert service.connections == 2


async def test_an_answer_before_the_question_was_read_does_not_count() -> None:
    """A service that returns commit while the check is still being sent has not seen the transaction."""
    large = CheckRequest(
        check_id="a:1", id="a", group="orders", prepared_at=0, attempt=1,
        messages=(Message(topic="coupon", value=b"v" * 16_000_000),),
    )  # fmt: skip

    gone = asyncio.Event()

    async def answer_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(STRAY)
        await writer.drain()
        with contextlib.suppress(ConnectionError):
            while await reader.read(1_000_000):
                pass
        writer.close()
        gone.set()

    async with await asyncio.start_server(answer_first, "127.0.0.1", 0) as server, local_caller() as caller:
        reply = await caller.call(GROUP, [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"], large)
        await gone.wait()
    assert (reply.outcome, reply.answered) == (Outcome.UNKNOWN, False)


async def test_an_answer_out_of_a_cache_counts_only_if_it_echoes_the_nonce(ask: Ask) -> None:
    """A cache that stores answers to POST would return one transaction's verdict for another."""
    async with endpoint(sends(response(b'{"outcome": "commit"}', extra=("Age: 7",)))) as service:
        reply: CheckReply = await ask(service.url)
    assert (reply.outcome, reply.answered) == (Outcome.UNKNOWN, False)
    assert "cache" in reply.detail


async def test_an_answer_whose_framing_breaks_ends_at_once(ask: Ask) -> None:
    """Chunks that turn into something else are not a verdict, and the caller does not wait for the rest."""
    broken = (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n15\r\n" + b'{"outcome": "commit"}' + b"\r\n0\r\n\x00\x00: \x00\r\n"
    )
    async with endpoint(sends(broken), keep=True) as service:
        reply = await ask(service.url)
    assert (reply.answered, reply.reachable) == (False, True)


JSON = "Content-Type: application/json"
BOMB = gzip.compress(b" " * 20_000_000)
IDLE_S = 0.5
OUTCOMES = ("commit", "rollback", "unknown")


@dataclass
class Adversary:
    """Answers questions, most of them, as its handler says, between answers that nobody asked for.

    `truth` has the handler's outcome for each transaction id. What strays may hold any outcome, and the nonce of any
    other question. Without `silent_strays`, those on a new connection hold a nonce that is not that of its question,
    and no answer is cut, because a stray would complete it: it carries one question only, and what comes on it without
    a nonce is taken for the answer.
    """

    truth: dict[str, str]
    random: random.Random
    silent_strays: bool
    nonces: list[str] = field(default_factory=list)
    questions: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @classmethod
    def drawn(cls, seed: str, *, silent_strays: bool) -> Self:
        """Make one with two dozen transactions, as a seed says."""
        chance = random.Random(seed)
        truth = {f"{seed}/{name}": chance.choice(OUTCOMES) for name in range(24)}
        return cls(truth, chance, silent_strays)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            with contextlib.suppress(
                ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError
            ):
                await self._serve(reader, writer)
        finally:
            self.tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chance = self.random
        strays = 0.0 if chance.random() < 0.3 else chance.random()
        echoes = chance.random() < 0.7
        await self._stray(writer, strays, first=True)
        for served in range(100):
            async with asyncio.timeout(IDLE_S):  # so that nobody waits long for the rest of an answer
                head = await reader.readuntil(b"\r\n\r\n")
            await self._stray(writer, strays, first=not served)
            length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            question = json.loads(await reader.readexactly(int(length.split(b":")[1])))
            self.questions += 1
            others = tuple(self.nonces)
            self.nonces.append(question["nonce"])
            if chance.random() < strays / 2:  # with the nonce of another question, or none on a used connection
                await self._stray(writer, 1.0, first=not served, others=others)
            answer = {"outcome": self.truth[question["id"]]}
            if echoes:
                answer["nonce"] = question["nonce"]
            await self._send(writer, self._framed(json.dumps(answer).encode()))
            await self._stray(writer, strays, first=False, others=others)
            await asyncio.sleep(chance.choice((0, 0, 0.001, 0.01)))

    async def _stray(
        self, writer: asyncio.StreamWriter, likely: float, *, first: bool, others: tuple[str, ...] | None = None
    ) -> None:
        """Say what nobody asked for, once or more often, with some probability."""
        chance = self.random
        while chance.random() < likely:
            likely /= 2
            known = tuple(self.nonces) if others is None else others
            answer: dict[str, object] = {"outcome": chance.choice(OUTCOMES)}
            pick = chance.random()
            if known and pick < 0.4:  # also its own connection's last
                answer["nonce"] = chance.choice(known[-4:])
            elif pick < 0.6 or (first and not self.silent_strays):
                answer["nonce"] = chance.choice(("", "AAAAAAAAAAAAAAAAAAAAAA", None, 7, ["x"]))
            await self._send(writer, self._framed(json.dumps(answer).encode()) * chance.choice((1, 1, 1, 2, 5)))

    def _framed(self, body: bytes) -> bytes:
        """Return an answer in one of the ways, right and wrong, in which HTTP may carry it."""
        chance = self.random
        length = f"Content-Length: {len(body)}"
        ok = f"HTTP/1.1 200 OK\r\n{JSON}\r\n"
        whole = f"{ok}{length}\r\n\r\n".encode() + body
        chunks = b"%x;a=b\r\n%s\r\n%x\r\n%s\r\n0\r\n" % (5, body[:5], len(body) - 5, body[5:])
        wrong = chance.randrange(max(0, len(body) - 9), len(body) + 200)
        frames = (
            b"HTTP/1.1 100 Continue\r\n\r\n" + whole,
            b"HTTP/1.1 102 Processing\r\nX: y\r\n\r\n" * 3 + whole,
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n" + whole,
            f"HTTP/1.0 200 OK\r\n{JSON}\r\n{length}\r\n\r\n".encode() + body,
            f"HTTP/1.0 200 OK\r\n{JSON}\r\nConnection: keep-alive\r\n{length}\r\n\r\n".encode() + body,
            f"{ok}Connection: close\r\n{length}\r\n\r\n".encode() + body,
            f"{ok}Connection: keep-alive\r\nKeep-Alive: timeout=99\r\n{length}\r\n\r\n".encode() + body,
            f"{ok}Content-Length: {wrong}\r\n\r\n".encode() + body,
            f"{ok}{length}\r\nContent-Length: {wrong}\r\n\r\n".encode() + body,
            f"{ok}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"\r\n",
            f"{ok}Transfer-Encoding: chunked\r\nTrailer: X\r\n\r\n".encode() + chunks + b"X: HTTP/1.1 200 OK\r\n\r\n",
            f"{ok}Transfer-Encoding: chunked\r\n{length}\r\n\r\n".encode() + chunks + b"\r\n",
            f"{ok}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks,
            f"{ok}\r\n".encode() + body,
            f"{ok}Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + _chunk(gzip.compress(body)),
            f"{ok}Content-Encoding: gzip\r\nContent-Length: 20000\r\n\r\n".encode() + BOMB,
            f"{ok}X: {'y' * 9000}\r\n{length}\r\n\r\n".encode() + body,
            ok.encode() + b"X: y\r\n" * 200 + f"{length}\r\n\r\n".encode() + body,
            f"HTTP/1.1 204 No Content\r\n{JSON}\r\n{length}\r\n\r\n".encode() + body,
            f"HTTP/1.1 304 Not Modified\r\n{JSON}\r\n\r\n".encode() + whole,
            f"HTTP/1.1 500 Oh\r\nContent-Length: {len(whole)}\r\n\r\n".encode() + whole,
            f"{ok}Age: 3\r\n{length}\r\n\r\n".encode() + body,
            f"{ok}{length}\n\n".encode() + body,
            b"\r\n\r\n" + whole,
            whole + b"H",
            whole + chance.randbytes(chance.randrange(60)),
        )
        cut = (whole[: chance.randrange(len(whole))], chance.randbytes(200)) if self.silent_strays else ()
        return whole if chance.random() < 0.5 else chance.choice(frames + cut)

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Write the bytes in one piece or in several, with some time in between, perhaps."""
        chance = self.random
        pieces = chance.choice((1, 1, 1, 2, 4))
        cuts = sorted(chance.randrange(len(data) + 1) for _ in range(pieces - 1))
        for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
            writer.write(data[start:end])
            await writer.drain()
            await asyncio.sleep(chance.choice((0, 0, 0, 0.002)))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)


ROUNDS = int(os.environ.get("HALFWAY_TEST_ADVERSARIES", "25"))
"""The endpoints to try for either rule, with some dozens of checks each."""
AT_ONCE = 25


@pytest.mark.parametrize("demanded", [False, True], ids=["nonce echoed or not", "nonce demanded"])
async def test_no_endpoint_resolves_what_its_handler_did_not_say(demanded: bool) -> None:
    """Two groups call one address at once; each verdict is that of the handler for the same transaction.

    If the nonce is required, this holds for any bytes at any time. Otherwise it holds for everything except an answer
    without a nonce on a new connection before its check was read. HALFWAY_TEST_ADVERSARIES is the number of endpoints.
    """
    verdicts = questions = 0
    seed = random.SystemRandom().randbytes(8).hex()
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    for number in range(0, ROUNDS, AT_ONCE):
        names = [f"{seed}/{number + one}" for one in range(AT_ONCE)]
        adversaries = [Adversary.drawn(name, silent_strays=demanded) for name in names]
        for adversary, replies in zip(
            adversaries, await asyncio.gather(*(answers(one, demanded=demanded) for one in adversaries)), strict=True
        ):
            questions += adversary.questions
            for name, reply in replies:
                assert not reply.answered or reply.outcome is Outcome(adversary.truth[name]), (name, reply)
                verdicts += reply.answered and reply.outcome is not Outcome.UNKNOWN
    print(f"{questions} questions, {verdicts} verdicts")  # noqa: T201
    assert verdicts


async def answers(adversary: Adversary, *, demanded: bool) -> list[tuple[str, CheckReply]]:
    """Check every transaction, some at once and some in sequence, for two groups."""
    server = await asyncio.start_server(adversary.connected, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/check"
    replies: list[tuple[str, CheckReply]] = []

    async def ask(ids: list[str], group: Group) -> None:
        for transaction_id in ids:
            request = CheckRequest(
                check_id=f"{transaction_id}:1",
                id=transaction_id,
                group=group.name,
                prepared_at=0,
                attempt=1,
                messages=(),
            )
            replies.append((transaction_id, await caller.call(group, [url], request)))

    try:
        async with local_caller(timeout_s=5, demand_nonce=demanded) as caller:
            ids = list(adversary.truth)
            await asyncio.gather(*(ask(ids[start::6], (GROUP, OTHER_GROUP)[start % 2]) for start in range(6)))
    finally:
        server.close()
        for task in adversary.tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*adversary.tasks)
    return replies
