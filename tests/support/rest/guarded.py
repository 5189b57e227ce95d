"""Two instances with access control over one log, and a key for each kind of caller."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from halfway.coordinator.access import KeyedAccess, Keys, KeySpec
from halfway.http.requests.admission import ApiLimits
from halfway.protocol.keys import RANDOM_BYTES, MasterSecret, key_text
from halfway.protocol.principal import Principal, PrincipalKind
from tests.support.ids import named_id_in
from tests.support.rest.client import SHOP, Answer, RestWorld
from tests.support.service.broker import Memory

SHARDS = 2
SECRET = MasterSecret(b"the master secret of these tests, which is long enough")
FIRST = key_text(PrincipalKind.OPERATOR, bytes(range(RANDOM_BYTES)))
OPERATOR = Principal(kind=PrincipalKind.OPERATOR, name="first", key_id=FIRST[5:17])


@dataclass
class Guarded:
    """The instances `here` and `there`, each with one shard; `tokens` by caller, None for a caller without a key."""

    here: RestWorld
    there: RestWorld
    keys: Keys
    tokens: dict[str, str | None]

    async def call(
        self, caller: str, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Call `here` as a caller."""
        return await self.call_at(self.here, caller, method, path, body, headers)

    async def call_at(
        self,
        world: RestWorld,
        caller: str,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        token = self.tokens[caller]
        shown = {} if token is None else {"Authorization": f"Bearer {token}"}
        return await world.call(method, path, body, headers=shown | dict(headers or {}))

    async def new_key(self, kind: PrincipalKind, name: str, *, expires_in_ms: int | None = None) -> str:
        made = await self.keys.create(
            KeySpec(kind=kind, name=name, expires_in_ms=expires_in_ms), deadline=deadline(), principal=OPERATOR
        )
        assert made.text is not None
        return made.text


def deadline() -> float:
    return asyncio.get_running_loop().time() + 30


def own_id(shard: int, name: str) -> str:
    """Return a client's own id that belongs to a shard."""
    return named_id_in(shard, name, shards=SHARDS)


def enable_access(memory: Memory, *, hide_payloads: bool = False) -> Keys:
    """Turn access control on for an instance, and return its service for keys."""
    memory.authority = KeyedAccess(
        memory.keys.table,
        [SECRET],
        memory.clock,
        first_operator=FIRST,
        hide_payloads=hide_payloads,
        count_refusal=memory.observer.refused_caller,
    )
    return Keys(memory.authority, memory.keys, SECRET, memory.clock, max_keys=1000)


@asynccontextmanager
async def guarded(*, hide_payloads: bool = False, limits: ApiLimits | None = None) -> AsyncIterator[Guarded]:
    first = Memory(shards=SHARDS, topics={"orders": 3, "coupons": 1}, owns={0})
    second = Memory(shards=SHARDS, owns={1}, beside=first)
    keys, others = (enable_access(memory, hide_payloads=hide_payloads) for memory in (first, second))
    async with (
        RestWorld(limits, memory=first, keys=keys) as here,
        RestWorld(limits, memory=second, keys=others) as there,
    ):
        world = Guarded(here, there, keys, {"operator": FIRST, "nobody": None})
        for kind, name in (("group", "shop"), ("group", "other"), ("reader", "board")):
            world.tokens[name] = await world.new_key(PrincipalKind(kind), name)
        for name in ("shop", "other"):
            assert (await world.call("operator", "PUT", f"/v1/groups/{name}", SHOP)).status == 201
        yield world
