"""A key, a group and a policy that change while an instance is away, and whether it notices when it is back.

Kafka compacts the tombstones of the key and of the group away in the meantime, so only reading the topics anew shows
that they were deleted. An instance never accepts a revoked key once it says that it has read the keys since then, nor
later than `REFUSED_S` after the revocation, whatever it says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Final
from uuid import uuid4

from confluent_kafka import KafkaException

from halfway.coordinator.access import REFUSED_S
from tests.chaos.answer import Answer
from tests.chaos.brokers import BrokerCluster
from tests.chaos.caller import Caller
from tests.chaos.coordinators import Instance
from tests.support.brokers.compaction import EAGER, names_left
from tests.support.waiting import eventually

TABLES: Final = ("keys", "groups")
"""The compacted topics that every instance follows, without their prefix."""
_NOTICED_WITHIN_S: Final = 60.0
_COMPACTED_WITHIN_S: Final = 120.0
_LOOK_AGAIN_S: Final = 0.5
_CHANGED: Final = 7


class Deletions:
    """One key, one group and one policy, made for one fault; used once."""

    def __init__(self, cluster: BrokerCluster, caller: Caller, instances: Collection[Instance]) -> None:
        self._cluster = cluster
        self._caller = caller
        self._instances = instances
        name = uuid4().hex[:8]
        self._kept, self._deleted = f"kept-{name}", f"deleted-{name}"
        self._key_id = ""
        self._revoked_key: dict[str, str] = {}
        self._valid_key: dict[str, str] = {}
        self._revoked_at: float | None = None
        self.violations: list[str] = []

    async def make(self) -> None:
        """Register both groups, make two keys of the one that is kept, and wait until every instance takes them."""
        await self._put(self._kept, 5)
        await self._put(self._deleted, 5)
        self._key_id, self._revoked_key = await self._new_key()
        _, self._valid_key = await self._new_key()
        for instance in self._instances:
            for key in (self._revoked_key, self._valid_key):
                await self._until(instance, self._kept, HTTPStatus.OK, key)
            await self._until(instance, self._deleted, HTTPStatus.OK)

    async def delete(self, away: Instance) -> None:
        """Revoke the key, delete the group and change the policy, and return when Kafka has no trace of the former two.

        The other instances read the tombstones before: for shorter absences than `away` has, Kafka must keep them.
        """
        for path in (f"/keys/{self._key_id}", f"/groups/{self._deleted}"):
            answer = await self._caller.persist("DELETE", path)
            assert answer.status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_FOUND), (path, answer)
            self._revoked_at = self._revoked_at or time.monotonic()
        await self._put(self._kept, _CHANGED)
        for instance in self._instances:
            if instance is not away:
                await self._until(instance, self._kept, HTTPStatus.UNAUTHORIZED, self._revoked_key)
                await self._until(instance, self._deleted, HTTPStatus.NOT_FOUND)
        with self._eager():
            await self._compacted()

    async def look(self, instance: Instance) -> bool:
        """Show an instance the revoked key; return whether it has noticed everything."""
        before = time.monotonic()
        age_s = await asyncio.to_thread(instance.keys_age_s)
        asked_at = time.monotonic()
        revoked = await self._ask(instance, self._kept, self._revoked_key)
        if revoked.status == HTTPStatus.OK and age_s is not None and self._revoked_at is not None:
            read_at = before - age_s
            if read_at > self._revoked_at or asked_at - self._revoked_at > REFUSED_S:
                self.violations.append(
                    f"{instance.name} accepts key {self._key_id} {asked_at - self._revoked_at:.1f} s after its "
                    f"revocation, and says that it has read the keys {read_at - self._revoked_at:.1f} s after it"
                )
        deleted, kept = [await self._ask(instance, name) for name in (self._deleted, self._kept)]
        return (
            revoked.status == HTTPStatus.UNAUTHORIZED
            and deleted.status == HTTPStatus.NOT_FOUND
            and kept.status == HTTPStatus.OK
            and kept.body["policy"]["max_checks"] == _CHANGED
            and (await self._ask(instance, self._kept, self._valid_key)).status == HTTPStatus.OK
        )

    async def noticed(self, instance: Instance) -> float | None:
        """Wait until an instance that is back has noticed everything; return how long that took, None if it has not."""
        back = time.monotonic()
        while not await self.look(instance):
            if time.monotonic() - back > _NOTICED_WITHIN_S:
                self.violations.append(
                    f"{instance.name} has not noticed within {_NOTICED_WITHIN_S:g} s that key {self._key_id} was "
                    f"revoked, group {self._deleted} deleted and the policy of {self._kept} changed"
                )
                return None
            await asyncio.sleep(_LOOK_AGAIN_S)
        return time.monotonic() - back

    async def _put(self, group: str, checks: int) -> None:
        body = {"check": {"mode": "pull"}, "topics": ["orders"], "policy": {"max_checks": checks}}
        answer = await self._caller.persist("PUT", f"/groups/{group}", body)
        assert answer.status in (HTTPStatus.OK, HTTPStatus.CREATED), answer

    async def _new_key(self) -> tuple[str, dict[str, str]]:
        created = await self._caller.persist("POST", "/keys", {"kind": "group", "name": self._kept})
        assert created.status == HTTPStatus.CREATED, created
        return created.body["id"], {"Authorization": f"Bearer {created.body['key']}"}

    async def _ask(self, instance: Instance, group: str, key: Mapping[str, str] | None = None) -> Answer:
        return await self._caller.ask(instance, f"/groups/{group}", shown=key)

    async def _until(
        self, instance: Instance, group: str, status: HTTPStatus, key: Mapping[str, str] | None = None
    ) -> None:
        await eventually(partial(self._ask, instance, group, key), lambda answer: answer.status == status)

    # --- compaction

    @contextmanager
    def _eager(self) -> Iterator[None]:
        """Let Kafka remove tombstones at once. The instances may say that the topics are unsafe: they are."""
        topics = [next(iter(self._instances)).topic(kind) for kind in TABLES]
        before = {topic: self._cluster.settings(topic, EAGER) for topic in topics}
        try:
            for topic in topics:
                self._cluster.configure(topic, EAGER)
            yield
        finally:
            for topic, settings in before.items():
                self._cluster.configure(topic, settings)

    async def _compacted(self) -> None:
        deadline = time.monotonic() + _COMPACTED_WITHIN_S
        while await asyncio.to_thread(self._is_left):
            assert time.monotonic() < deadline, "Kafka has not compacted the tombstones away"
            # The active segment is not compacted: records behind the tombstones close it.
            await self._put(self._kept, _CHANGED)
            other = {"kind": "reader", "name": f"other-{uuid4().hex[:8]}"}  # in doubt it is left
            created = await self._caller.persist("POST", "/keys", other)
            await self._caller.persist("DELETE", f"/keys/{created.text('id') or self._key_id}")
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _is_left(self) -> bool:
        instance, servers = next(iter(self._instances)), {"bootstrap.servers": self._cluster.bootstrap_servers}
        try:
            return any(
                name.encode() in set(names_left(servers, instance.topic(kind)))
                for kind, name in zip(TABLES, (self._key_id, self._deleted), strict=True)
            )
        except KafkaException:
            return True
