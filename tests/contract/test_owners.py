"""The port `Owners`: the owner of a shard of another instance."""

import pytest

from halfway.coordinator.ports import OwnerHint
from tests.support.contract.backend import SHARDS, Backend
from tests.support.contract.instance import running
from tests.support.waiting import until_true

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_owners_are_known_while_they_own_and_never_this_very_instance(backend: Backend) -> None:
    async with backend.ports() as watcher:
        async with running(backend) as owner:
            await until_true(
                lambda: all(watcher.owners.find(shard) is not None for shard in range(SHARDS)), "every owner is known"
            )
            hints = {watcher.owners.find(shard) for shard in range(SHARDS)}
            assert len(hints) == 1, "one incarnation owns them all"
            [hint] = hints
            assert isinstance(hint, OwnerHint)
            assert [owner.owners.find(shard) for shard in range(SHARDS)] == [None] * SHARDS
        await until_true(
            lambda: all(watcher.owners.find(shard) is None for shard in range(SHARDS)), "what is released is no one's"
        )
        async with running(backend):
            await until_true(lambda: watcher.owners.find(0) not in (None, hint), "the next incarnation is known")
