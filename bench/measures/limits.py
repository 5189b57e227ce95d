"""Measures the cost of a flooding group for other groups, with and without limits, and the cost of keys.

All coordinators run on one broker and are called in turn, so that a change of the machine's speed affects all of them.
The cost of keys is measured on one coordinator, because two equal ones differ by more. It has keys and open access, so
it verifies a caller's key in the same way as with access control.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # public, but not for mypy

from bench.figures import cpu_us, percentile
from bench.load.wire import id_in, post, split
from bench.system.instance import Instance
from halfway.domain.keys import RANDOM_BYTES, Key, KeyTable, MasterSecret, key_text, public_id
from halfway.domain.principal import Permission, PrincipalKind
from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from halfway.embedded.ports import HOST
from halfway.runtime.serve.scheduler import SystemClock
from halfway.service.access.access import KeyedAccess

TOPIC: Final = "limits"
FLOOD: Final = "flood"
LEAD_S: Final = 2.0
"""The unmeasured beginning of each turn: an idle group may send a burst."""
KEYS: Final = (("no key is shown", False), ("a key is shown", True))
_SLICES: Final = 4
"""The slices of each kind in each turn."""
_READY_S: Final = 60.0
_REFUSED: Final = 429
_CREATED: Final = 201
_OK: Final = 200
_SHARE: Final = 0.95
"""The share of the limit that a group below it sends."""
_ROUNDS: Final = 500
_CALLS: Final = 200


class LimitsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the load."""

    groups: int = 10
    """Working groups."""
    callers: int = 20
    """Callers of the working groups, each with one transaction at a time, at a fixed rate."""
    rate_per_s: float = 150.0
    """Transactions per second of all working groups together."""
    flood: int = 64
    """Callers of the flooding group, which start the next transaction as soon as the last is answered."""
    limit_per_s: float = 20.0
    """Prepares per second that a group may send."""
    seconds: float = 8.0
    """The length of a turn; a slice with or without keys takes a quarter of it."""
    turns: int = 8
    warm_up_s: float = 30.0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one case, over all its turns."""

    name: str
    transactions: int
    p50_ms: float
    p99_ms: float
    flooded: int
    """Transactions that the flooding group committed."""
    refused: int
    """Prepares of the flooding group that were refused."""
    cpu_us: float
    """CPU of the coordinator per transaction of any group, in microseconds."""


class Tally:
    def __init__(self) -> None:
        self.times: list[float] = []
        self.committed = 0
        self.refused = 0
        self.cpu_us = 0.0

    def cost(self, name: str) -> Cost:
        ordered = sorted(self.times)
        return Cost(
            name=name,
            transactions=len(ordered),
            p50_ms=percentile(ordered, 0.5) * 1000,
            p99_ms=percentile(ordered, 0.99) * 1000,
            flooded=self.committed,
            refused=self.refused,
            cpu_us=self.cpu_us / max(1, len(ordered) + self.committed),
        )


class Service:
    """One caller of a group, on its own connection."""

    def __init__(self, port: int, group: str, key: str | None) -> None:
        self._port = port
        host = f"{HOST}:{port}" + ("" if key is None else f"\r\nAuthorization: Bearer {key}")
        body = msgspec.json.encode({"group": group, "messages": [{"topic": TOPIC, "key": group, "value": "v" * 512}]})
        self._prepare = post(host, b"/v1/transactions", body)
        self._end = post(host, b"/v1/transactions/\0/end", b'{"outcome":"commit"}').split(b"\0")
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def transaction(self) -> bool:
        """Prepare and commit; False if the prepare was refused."""
        status, body = await self._ask(self._prepare)
        if status == _REFUSED:
            return False
        if status != _CREATED:
            raise RuntimeError(f"a prepare was answered {status}: {body[:300]!r}")
        status, body = await self._ask(id_in(body).join(self._end))
        if status != _OK:
            raise RuntimeError(f"a commit was answered {status}: {body[:300]!r}")
        return True

    async def _ask(self, request: bytes) -> tuple[int, bytes]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(HOST, self._port)
        self._writer.write(request)
        received = b""
        while (answer := split(received)) is None:
            more = await self._reader.read(65_536)
            if not more:
                raise RuntimeError("a connection was closed")
            received += more
        return answer[0], answer[1]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def _paced(service: Service, every_s: float, first_s: float, until: float, tally: Tally) -> None:
    started = time.monotonic()
    due = started + first_s
    while due < until:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        if not await service.transaction():
            raise RuntimeError("a group that works was refused: its rate is above the limit")
        if due > started + LEAD_S:
            tally.times.append(time.monotonic() - due)
        due += every_s


async def flooding(service: Service, until: float, tally: Tally) -> None:
    while time.monotonic() < until:
        if await service.transaction():
            tally.committed += 1
        else:
            tally.refused += 1


class Side:
    """A coordinator with groups, and their keys if it knows keys."""

    def __init__(self, instance: Instance, operator: str | None, groups: Sequence[str]) -> None:
        self.instance = instance
        self._operator = operator
        self._keys: dict[str, str | None] = dict.fromkeys(groups)

    async def register(self) -> None:
        for group in self._keys:
            await self._call(b"PUT", f"/v1/groups/{group}", {"check": {"mode": "pull"}, "topics": [TOPIC]})
            if self._operator is not None:
                created = await self._call(b"POST", "/v1/keys", {"kind": "group", "name": group})
                self._keys[group] = str(msgspec.json.decode(created)["key"])

    async def _call(self, method: bytes, path: str, body: object) -> bytes:
        host = f"{HOST}:{self.instance.port}"
        host += "" if self._operator is None else f"\r\nAuthorization: Bearer {self._operator}"
        reader, writer = await asyncio.open_connection(HOST, self.instance.port)
        try:
            writer.write(post(host, path.encode(), msgspec.json.encode(body)).replace(b"POST", method, 1))
            received = b""
            while (answer := split(received)) is None:
                received += await reader.read(65_536)
        finally:
            writer.close()
        if answer[0] not in (_OK, _CREATED):
            raise RuntimeError(f"{path} was answered {answer[0]}: {answer[1][:300]!r}")
        return answer[1]

    async def turn(
        self,
        options: LimitsOptions,
        flood: int,
        seconds: float,
        tally: Tally,
        *,
        paced: bool = True,
        keys: bool = True,
        share: bool = False,
    ) -> None:
        """Load the coordinator for a time.

        `paced`: callers use a fixed rate, else they flood. `keys`: callers send their keys. `share`: the flooding group
        sends what its limit allows, at a fixed rate.
        """
        port, cpu_before = self.instance.port, cpu_us(self.instance.pid)
        working = [group for group in self._keys if group != FLOOD]
        groups = [working[number % len(working)] for number in range(options.callers)]
        shop = [Service(port, group, self._keys[group] if keys else None) for group in groups]
        others = [Service(port, FLOOD, self._keys[FLOOD]) for _ in range(flood)]
        until = time.monotonic() + seconds
        every_s = options.callers / options.rate_per_s
        loads = [
            _paced(caller, every_s, every_s * number / len(shop), until, tally)
            if paced
            else flooding(caller, until, tally)
            for number, caller in enumerate(shop)
        ]
        if share:
            allowed, polite = _SHARE * options.limit_per_s, Tally()
            others = [Service(port, FLOOD, self._keys[FLOOD]) for _ in range(options.callers)]
            every_s = len(others) / allowed
            loads += [_paced(caller, every_s, number / allowed, until, polite) for number, caller in enumerate(others)]
        else:
            loads += [flooding(caller, until, tally) for caller in others]
        await asyncio.gather(*loads)
        tally.cpu_us += cpu_us(self.instance.pid) - cpu_before
        for caller in (*shop, *others):
            caller.close()


def verifying_us() -> tuple[float, float]:
    """Return the CPU time of authenticating a key and authorising its call, in microseconds: first, and repeated."""
    secret, table = MasterSecret(os.urandom(32)), KeyTable()
    text = key_text(PrincipalKind.GROUP, os.urandom(RANDOM_BYTES))
    key = Key(id=public_id(text), kind=PrincipalKind.GROUP, name="shop", created_at=0, digest=secret.digest(text))
    table.apply(key.id, secret.sealed(key))
    first, repeated = [], []
    for _ in range(_ROUNDS):
        access = KeyedAccess(table, [secret], SystemClock())
        started = time.thread_time()
        access.require(access.authenticate(text), Permission.PREPARE, "shop")
        first_done = time.thread_time()
        for _ in range(_CALLS):
            access.require(access.authenticate(text), Permission.PREPARE, "shop")
        first.append((first_done - started) * 1e6)
        repeated.append((time.thread_time() - first_done) / _CALLS * 1e6)
    return median(first), median(repeated)


def limits(options: LimitsOptions, say: Callable[[str], None]) -> tuple[list[Cost], list[Cost]]:
    """Return the cost of the flood for the other groups (alone, limited, unlimited), and the cost of keys."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="halfway-bench-")))
        bootstrap = stack.enter_context(EmbeddedKafka(EmbeddedConfig(heap="1g", progress=say))).bootstrap_servers
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic(TOPIC, 6, 1)])[TOPIC].result(_READY_S)
        operator = key_text(PrincipalKind.OPERATOR, os.urandom(RANDOM_BYTES))
        keyed = {"HALFWAY_MASTER_SECRET": os.urandom(32).hex(), "HALFWAY_OPERATOR_KEY": operator}
        limited = {"HALFWAY_GROUP_PREPARES_PER_S": f"{options.limit_per_s:g}"}
        sides = []
        for name, settings in (
            ("limited", keyed | limited),
            ("flooded", keyed),
            ("open", keyed | {"HALFWAY_OPEN_ACCESS": "true"}),
        ):
            shared = {
                "HALFWAY_KAFKA__BOOTSTRAP_SERVERS": bootstrap,
                "HALFWAY_KAFKA_PREFIX": f"_{name}.",
                "HALFWAY_SHARDS": "2",
            }
            instance = stack.enter_context(Instance(directory, shared | settings))
            instance.ready(_READY_S)
            working = [f"shop-{number}" for number in range(options.groups)]
            sides.append(Side(instance, operator, [*working, FLOOD]))
        return asyncio.run(_measure(options, sides, say))


async def _measure(
    options: LimitsOptions, sides: Sequence[Side], say: Callable[[str], None]
) -> tuple[list[Cost], list[Cost]]:
    limited, flooded, unguarded = sides
    for side in sides:
        await side.register()
    gc.collect()
    gc.freeze()  # the garbage collector must not pause the load process
    say("warming up")
    for side in sides:
        await side.turn(options, 0, options.warm_up_s / len(sides), Tally(), paced=side is limited)
    # With limits the working groups stay below their own; only the flood must be limited.
    kinds = (
        ("alone", limited, 0, False),
        ("beside a group that stays below its limit", limited, 0, True),
        ("beside a flood that is limited", limited, options.flood, False),
        ("beside a flood without limits", flooded, options.flood, False),
    )
    named = {name: Tally() for name, *_ in kinds}
    costs = {name: Tally() for name, _ in KEYS}
    for turn in range(options.turns):
        say(f"turn {turn + 1} of {options.turns}")
        for name, side, flood, share in kinds if turn % 2 else kinds[::-1]:
            await side.turn(options, flood, options.seconds, named[name], share=share)
        for number in range(_SLICES):
            for name, shown in KEYS if number % 2 else KEYS[::-1]:
                await unguarded.turn(options, 0, options.seconds / 4, costs[name], paced=False, keys=shown)
    gc.unfreeze()  # otherwise extension modules report errors at the exit
    return [tally.cost(name) for name, tally in named.items()], [tally.cost(name) for name, tally in costs.items()]
