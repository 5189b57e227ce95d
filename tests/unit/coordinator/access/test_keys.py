"""Operators make, rotate and revoke keys; a principal has at most two."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from halfway.coordinator.access import EXPIRED_KEPT_MS, KeyedAccess, Keys, KeySpec, NewKey
from halfway.coordinator.requests import End
from halfway.protocol.errors import (
    ForbiddenError,
    InvalidRequestError,
    KafkaUnavailableError,
    OverloadedError,
    TooManyKeysError,
    UnauthenticatedError,
    UnknownKeyError,
    UnknownTransactionError,
)
from halfway.protocol.keys import RANDOM_BYTES, Key, MasterSecret
from halfway.protocol.principal import Permission, Principal, PrincipalKind
from halfway.protocol.transactions import Outcome
from tests.support.ids import named_id
from tests.support.service.broker import Memory
from tests.support.service.world import LIMITS, World

SECRET = MasterSecret(b"s" * 32)
SHOP = KeySpec(kind=PrincipalKind.GROUP, name="shop")
OPERATOR = Principal(kind=PrincipalKind.OPERATOR, name="first")
DAY_MS = 24 * 3_600_000


class Scene:
    def __init__(self, max_keys: int = 100) -> None:
        self.memory = Memory(shards=1)
        self.access = self.memory.authority = KeyedAccess(self.memory.keys.table, [SECRET], self.memory.clock)
        random = (number.to_bytes(RANDOM_BYTES, "big") for number in itertools.count(1 << 260, 1 << 257))
        self.keys = Keys(
            self.access, self.memory.keys, SECRET, self.memory.clock, max_keys=max_keys, random=lambda _: next(random)
        )

    @property
    def deadline(self) -> float:
        return asyncio.get_running_loop().time() + 5

    async def create(self, spec: KeySpec = SHOP, principal: Principal = OPERATOR) -> NewKey:
        return await self.keys.create(spec, deadline=self.deadline, principal=principal)

    async def rotate(self, key_id: str, keep_ms: int = DAY_MS, expires_in_ms: int | None = None) -> NewKey:
        return await self.keys.rotate(
            key_id, keep_ms=keep_ms, expires_in_ms=expires_in_ms, deadline=self.deadline, principal=OPERATOR
        )

    async def revoke(self, key_id: str) -> Key:
        return await self.keys.revoke(key_id, deadline=self.deadline, principal=OPERATOR)

    def valid(self, new: NewKey) -> bool:
        try:
            return self.access.authenticate(new.text).name == new.key.name
        except UnauthenticatedError:
            return False


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    await scene.memory.open()
    yield scene
    await scene.memory.stop(deadline=scene.deadline)


async def test_what_a_key_sends_in_one_turn_is_permitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests bring the key, each of which is authenticated for itself."""
    scene = Scene()
    world = await World.start(scene.memory, replace(LIMITS, shards=1))
    new = await scene.create()
    asked = list[Permission]()
    require = scene.access.require

    def noting(principal: Principal, permission: Permission, group: str | None = None) -> None:
        asked.append(permission)
        require(principal, permission, group)

    monkeypatch.setattr(scene.access, "require", noting)
    ends = [
        world.coordinator.end(
            End(id=named_id(f"end-{number}"), outcome=Outcome.COMMIT),
            deadline=scene.deadline,
            principal=scene.access.authenticate(new.text or ""),
        )
        for number in range(5)
    ]
    for end in ends:
        with pytest.raises(UnknownTransactionError):
            await end
    assert asked == [Permission.END]
    await world.stop()


def _recording(
    last: dict[str, Key | None], apply: Callable[[str, Key | None], None], key_id: str, key: Key | None
) -> None:
    last[key_id] = key
    apply(key_id, key)


async def test_a_new_key_is_valid_at_once_and_only_its_hash_is_kept(scene: Scene) -> None:
    new = await scene.create()
    assert new.text is not None
    assert scene.valid(new)
    assert new.text.encode() not in msgspec.msgpack.encode(scene.memory.keys.table.all())


async def test_a_principal_has_two_keys_at_most_and_another_principal_its_own(scene: Scene) -> None:
    first, second = await scene.create(), await scene.create()
    with pytest.raises(TooManyKeysError, match=f"{first.key.id} and {second.key.id}"):
        await scene.create()
    assert scene.valid(first)
    assert scene.valid(second)
    assert scene.valid(await scene.create(KeySpec(kind=PrincipalKind.GROUP, name="other")))
    assert scene.valid(await scene.create(KeySpec(kind=PrincipalKind.READER, name="shop")))


async def test_two_instances_that_make_a_third_key_at_one_moment_do_not_keep_it(scene: Scene) -> None:
    await scene.create()
    made = await asyncio.gather(scene.create(), scene.create(), return_exceptions=True)
    assert any(isinstance(one, TooManyKeysError) for one in made)
    assert len(scene.memory.keys.table) <= 2


async def test_a_rotated_key_holds_on_for_a_time(scene: Scene) -> None:
    old = await scene.create()
    new = await scene.rotate(old.key.id, keep_ms=60_000)
    assert (new.key.kind, new.key.name) == (old.key.kind, old.key.name)
    assert scene.valid(old)
    assert scene.valid(new)
    scene.memory.clock.advance(60)
    assert not scene.valid(old)
    assert scene.valid(new)


async def test_a_rotation_never_makes_a_key_hold_longer(scene: Scene) -> None:
    old = await scene.create(msgspec.structs.replace(SHOP, expires_in_ms=1_000))
    await scene.rotate(old.key.id)
    scene.memory.clock.advance(1)
    assert not scene.valid(old)


async def test_a_record_that_somebody_else_changed_is_not_rotated(scene: Scene) -> None:
    """Otherwise halfway would seal it, and a group's service that can write to the topic could become an operator."""
    new = await scene.create()
    forged = msgspec.structs.replace(new.key, kind=PrincipalKind.OPERATOR, name="alice")
    scene.memory.keys.table.apply(forged.id, forged)
    with pytest.raises(InvalidRequestError, match="a master secret that is no longer set"):
        await scene.rotate(forged.id)
    assert not scene.keys.is_valid(forged)
    assert scene.memory.keys.table.all() == [forged]
    with pytest.raises(UnauthenticatedError):
        scene.access.authenticate(new.text)


async def test_a_key_of_the_master_secret_before_is_rotated(scene: Scene) -> None:
    new = await scene.create()
    later = MasterSecret(b"t" * 32)
    keys = Keys(scene.access, scene.memory.keys, later, scene.memory.clock, max_keys=100, previous=[SECRET])
    await keys.rotate(new.key.id, keep_ms=DAY_MS, expires_in_ms=None, deadline=scene.deadline, principal=OPERATOR)
    assert all(later.has_sealed(key) for key in scene.memory.keys.table.all())


async def test_a_key_that_is_revoked_while_it_is_rotated_does_not_come_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after a restart either: the last record of the key is the revocation."""
    last: dict[str, Key | None] = {}
    old, put = await scene.create(), scene.memory.keys.put

    async def after_a_revocation(key: Key, *, deadline: float) -> None:
        if key.id == old.key.id:
            await scene.revoke(key.id)
        await put(key, deadline=deadline)

    monkeypatch.setattr(scene.memory.keys, "put", after_a_revocation)
    monkeypatch.setattr(scene.memory.keys.table, "apply", partial(_recording, last, scene.memory.keys.table.apply))
    new = await scene.rotate(old.key.id)
    assert last[old.key.id] is None
    assert not scene.valid(old)
    assert [key.id for key in scene.memory.keys.table.all()] == [new.key.id]


async def test_a_key_can_expire_by_itself_and_makes_room(scene: Scene) -> None:
    for _ in range(2):
        await scene.create(msgspec.structs.replace(SHOP, expires_in_ms=1_000))
    scene.memory.clock.advance(1)
    assert scene.valid(await scene.create())
    assert len(scene.memory.keys.table) == 3
    scene.memory.clock.advance(EXPIRED_KEPT_MS / 1000 + 1)
    await scene.create()
    assert len(scene.memory.keys.table) == 2


async def test_a_revoked_key_is_gone(scene: Scene) -> None:
    new = await scene.create()
    await scene.revoke(new.key.id)
    assert not scene.valid(new)
    for again in (scene.revoke, scene.rotate):
        with pytest.raises(UnknownKeyError):
            await again(new.key.id)


async def test_a_certificate_is_bound_once(scene: Scene) -> None:
    spec = msgspec.structs.replace(SHOP, certificate="DNS:shop.svc")
    bound = await scene.create(spec)
    assert bound.text is None
    assert scene.access.authenticate(None, ["DNS:shop.svc"]).name == "shop"
    with pytest.raises(InvalidRequestError, match="already bound"):
        await scene.create(msgspec.structs.replace(spec, name="other"))
    with pytest.raises(InvalidRequestError, match="binds a certificate"):
        await scene.rotate(bound.key.id)
    await scene.revoke(bound.key.id)
    with pytest.raises(UnauthenticatedError):
        scene.access.authenticate(None, ["DNS:shop.svc"])


async def test_keys_are_bounded() -> None:
    scene = Scene(max_keys=1)
    await scene.memory.open()
    await scene.create()
    with pytest.raises(OverloadedError, match="there are already 1 keys: revoke some"):
        await scene.create(KeySpec(kind=PrincipalKind.GROUP, name="other"))
    await scene.memory.stop(deadline=scene.deadline)


async def test_keys_are_listed_by_page(scene: Scene) -> None:
    ids = sorted([(await scene.create(msgspec.structs.replace(SHOP, name=f"g{number}"))).key.id for number in range(5)])
    shown: list[str] = []
    after = None
    while True:
        page = await scene.keys.page(name=None, limit=2, after=after, deadline=scene.deadline, principal=OPERATOR)
        shown += [key.id for key in page.keys]
        if (after := page.next) is None:
            break
    assert shown == ids
    page = await scene.keys.page(name="g3", limit=2, after=None, deadline=scene.deadline, principal=OPERATOR)
    assert [key.name for key in page.keys] == ["g3"]


async def test_only_operators_manage_keys(scene: Scene) -> None:
    new = await scene.create()
    for principal in (new.key.principal, Principal(kind=PrincipalKind.READER, name="board")):
        with pytest.raises(ForbiddenError):
            await scene.create(principal=principal)
        with pytest.raises(ForbiddenError):
            await scene.keys.revoke(new.key.id, deadline=scene.deadline, principal=principal)
    assert scene.valid(new)


async def test_without_kafka_nothing_is_told_to_be_done(scene: Scene) -> None:
    new = await scene.create()
    scene.memory.faults.unavailable = True
    for call in (scene.create(), scene.revoke(new.key.id), scene.rotate(new.key.id)):
        with pytest.raises(KafkaUnavailableError):
            await call
    assert scene.valid(new)
