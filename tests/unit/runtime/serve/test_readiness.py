"""Readiness: an instance serves the shards that it can, even if it cannot acquire another one."""

from typing import Any, cast

import pytest

from halfway.kafka.ownership.concurrent_acquisition import ShardTrouble
from halfway.kafka.ownership.membership import MembershipStatus
from halfway.runtime.serve.backend import Backend
from halfway.service.access.key_freshness import KeyFreshness

TROUBLE = ShardTrouble(shard=0, since=1.0, tries=3, error="folding: held", remedy="look")


@pytest.mark.parametrize(
    "owned, acquiring, troubles, reason",
    [
        ((1, 2), (), (), None),
        ((1, 2), (0,), (TROUBLE,), None),
        ((1, 2), (0,), (), "recovering shards 0"),
        ((1,), (0, 2), (TROUBLE,), "recovering shards 2"),
        ((), (0,), (TROUBLE,), "serves no shard"),
        ((), (), (), None),
    ],
)
def test_a_shard_that_cannot_be_acquired_takes_the_others_from_nobody(
    owned: tuple[int, ...], acquiring: tuple[int, ...], troubles: tuple[ShardTrouble, ...], reason: str | None
) -> None:
    """An instance that serves shards is ready although another shard fails, once that was tried."""
    status = MembershipStatus(
        joined=True, incarnation="i", owned=owned, acquiring=acquiring, last_error=None, troubles=troubles
    )
    nothing = cast("Any", None)
    backend = Backend(nothing, lambda: status, nothing, prefix="_halfway.")
    found = backend.not_ready()
    assert len(found) == (reason is not None)
    assert reason is None or reason in found[0]


async def test_an_instance_that_cannot_read_which_keys_are_revoked_is_not_ready() -> None:
    nothing = cast("Any", None)
    status = MembershipStatus(joined=True, incarnation="i", owned=(1,), acquiring=(), last_error=None, troubles=())
    keys = KeyFreshness(nothing, not_ready_s=-1)
    assert "read revocations of keys" in Backend(nothing, lambda: status, nothing, prefix="p", keys=keys).not_ready()[0]
    assert Backend(nothing, lambda: status, nothing, prefix="p", keys=KeyFreshness(nothing)).not_ready() == []
