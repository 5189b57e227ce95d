"""The load on several instances: `python -m bench.load.fleet_load PLAN RESULT` (`SpreadPlan`, `SpreadResult` in JSON).

Closed loop: each caller begins its next transaction when the last one is confirmed. A caller has a connection to each
instance and chooses the ids, so that it knows the shard and the owner of each.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from itertools import cycle
from pathlib import Path
from typing import IO, Final, Literal, cast

import msgspec

from bench.audit.copies import COMMITTED, UNCONFIRMED
from bench.figures import cpu_us, percentile
from bench.load import event_loop
from bench.load.wire import Requests, WireError, split
from bench.plan import GROUP, KEYS, VALUE_BYTES
from halfway.domain.ids import shard_of
from halfway.embedded.ports import HOST

Aim = Literal["owner", "turn"]
MAX_FAILURES: Final = 1_000
FINISH_S: Final = 30.0
_SHOWN: Final = 300
_SENT_BUFFER: Final = 1024 * 1024
_PLACEHOLDER: Final = b"i" * len(uuid.uuid4().hex)
"""The placeholder of an id in a prepared request."""


class SpreadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of the load process: `lead_s` unmeasured, then `window_s`."""

    ports: list[int]
    """The ports of the called instances: the owner of the id, or one after the other."""
    owners: list[int]
    """The port of each shard's owner."""
    shards: list[int]
    """The shards whose ids are used."""
    aim: Aim
    topic: str
    callers: int
    lead_s: float
    window_s: float
    pids: Mapping[str, int]
    """The processes to measure the CPU time of, besides the load process."""
    sent_path: str
    """The file of the transactions whose end was sent; see `copies.Sent`."""


class SpreadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Confirmed commits and CPU time of the window; requests and failures include the lead."""

    seconds: float
    transactions: int
    p50_ms: float
    p99_ms: float
    cpu_us: Mapping[str, float]
    requests: int
    failed: int
    first_failure: str = ""


class _Connection(asyncio.Protocol):
    """One request at a time; the caller gets the answer, or status 0 if there is none."""

    def __init__(self, caller: _Caller) -> None:
        self._caller = caller
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._transport = None
            self._caller.answered(0, repr(exc).encode())

    def send(self, request: bytes) -> None:
        if self._transport is None:
            self._caller.answered(0, b"the connection is lost")
        else:
            self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            answer = split(self._received + data)
        except WireError as error:
            answer = 0, str(error).encode(), b""
        if answer is None:
            self._received += data
            return
        status, body, self._received = answer
        self._caller.answered(status, body)

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()


class _Caller:
    """Prepares and commits one transaction after the other."""

    def __init__(self, load: Load, turn: int) -> None:
        self._load = load
        self._turn = turn
        self._started = 0.0
        self._committing = False
        self._id = ""
        self._shard = 0
        self.busy = False
        self.connections: list[_Connection] = []

    def begin(self) -> None:
        self._started, self.busy, self._committing = time.perf_counter(), True, False
        self._id, self._shard = self._load.next_id()
        self._send(self._load.prepare(self._id.encode()))

    def _send(self, request: bytes) -> None:
        self._turn += 1
        self.connections[self._load.instance_index(self._shard, self._turn)].send(request)

    def answered(self, status: int, body: bytes) -> None:
        if not self.busy:
            return
        if not self._committing and status == HTTPStatus.CREATED:
            self._committing = True
            self._send(self._load.requests.end(self._id.encode()))
            return
        done = self._committing and status == HTTPStatus.OK and b'"committed"' in body
        self.busy = False
        self._load.ended(self, self._started, self._id, "" if done else f"answered {status}: {body[:_SHOWN]!r}")


class Load:
    """Chooses requests and instances, measures latencies, and records what was committed."""

    def __init__(self, plan: SpreadPlan, sent: IO[bytes]) -> None:
        """Build the requests; nothing connects yet. `sent` gets a line for each prepared transaction."""
        self._plan = plan
        self._sent = sent
        self._shards = frozenset(plan.shards)
        self._owner_at = [plan.ports.index(port) if port in plan.ports else 0 for port in plan.owners]
        self.requests = Requests(host=HOST, topic=plan.topic, batch=0)
        self._prepares = cycle([_prepare(plan.topic, number).split(_PLACEHOLDER) for number in range(KEYS)])
        self._latencies: list[float] = []
        self._started_count = self._failed = 0
        self._first_failure = ""
        self._running = True

    def next_id(self) -> tuple[str, int]:
        """Return a new id and its shard."""
        while True:
            transaction_id = uuid.uuid4().hex
            shard = shard_of(transaction_id, len(self._plan.owners))
            if shard in self._shards and shard is not None:
                self._started_count += 1
                return transaction_id, shard

    def prepare(self, transaction_id: bytes) -> bytes:
        """Return the prepare request of an id."""
        before, after = next(self._prepares)
        return b"%b%b%b" % (before, transaction_id, after)

    def instance_index(self, shard: int, turn: int) -> int:
        """Return the index of the instance that a request goes to."""
        return self._owner_at[shard] if self._plan.aim == "owner" else turn % len(self._plan.ports)

    def ended(self, caller: _Caller, started: float, transaction_id: str, failure: str) -> None:
        """Record the result of a transaction, and begin the next one."""
        self._sent.write(b"%b%b\n" % (UNCONFIRMED if failure else COMMITTED, transaction_id.encode()))
        if failure:
            self._failed += 1
            self._first_failure = self._first_failure or failure
        else:
            self._latencies.append(time.perf_counter() - started)
        if self._running and self._failed < MAX_FAILURES:
            caller.begin()

    async def run(self) -> SpreadResult:
        """Connect, carry out the plan, and finish the transactions under way."""
        plan, loop = self._plan, asyncio.get_running_loop()
        callers = [_Caller(self, number) for number in range(plan.callers)]
        for caller in callers:
            for port in plan.ports:
                _, connection = await loop.create_connection(lambda caller=caller: _Connection(caller), HOST, port)  # type: ignore[misc] # of this turn
                caller.connections.append(connection)
        gc.collect()
        gc.freeze()
        pids = {**plan.pids, "load": os.getpid()}
        for caller in callers:
            caller.begin()
        await asyncio.sleep(plan.lead_s)
        self._latencies.clear()
        started, cpu = time.perf_counter(), {name: cpu_us(pid) for name, pid in pids.items()}
        await asyncio.sleep(plan.window_s)
        seconds, used = time.perf_counter() - started, {name: cpu_us(pid) - cpu[name] for name, pid in pids.items()}
        ordered = sorted(self._latencies)
        self._running = False
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                while any(caller.busy for caller in callers):  # noqa: ASYNC110 - they set no event
                    await asyncio.sleep(0.01)
        for caller in callers:
            for connection in caller.connections:
                connection.close()
            caller.answered(0, b"no answer in time")
        return SpreadResult(
            seconds=seconds,
            transactions=len(ordered),
            p50_ms=percentile(ordered, 0.5) * 1000,
            p99_ms=percentile(ordered, 0.99) * 1000,
            cpu_us=used,
            requests=2 * self._started_count,
            failed=self._failed,
            first_failure=self._first_failure,
        )


def _prepare(topic: str, number: int) -> bytes:
    """Return a prepare request with `_PLACEHOLDER` as id."""
    message = {"topic": topic, "key": f"key-{number:05d}", "value": "v" * VALUE_BYTES}
    body = msgspec.json.encode({"group": GROUP, "id": _PLACEHOLDER.decode(), "messages": [message]})
    head = f"POST /v1/transactions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    return b"%bContent-Length: %d\r\n\r\n%b" % (head.encode(), len(body), body)


def main(arguments: Sequence[str]) -> None:
    """Carry out a plan."""
    plan_path, result_path = arguments
    plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=SpreadPlan)
    with Path(plan.sent_path).open("wb", buffering=_SENT_BUFFER) as sent:
        result = event_loop.run(Load(plan, sent).run())
    Path(result_path).write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main(sys.argv[1:])
