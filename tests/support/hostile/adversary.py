"""An endpoint that says anything at any time on any connection, beside what its handler says of each question."""

import asyncio
import contextlib
import gzip
import json
import random
from dataclasses import dataclass, field
from typing import Self

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
