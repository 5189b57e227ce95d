"""When an instance is ready: it serves what it can, also where a shard cannot be acquired."""

from typing import Any, cast

import pytest

from halfway.kafka.ownership.concurrent_acquisition import ShardTrouble
from halfway.kafka.ownership.membership import MembershipStatus
from halfway.runtime.backend import Backend

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
    """An instance that serves shards is ready although another one fails, once that was tried."""
    status = MembershipStatus(
        joined=True, incarnation="i", owned=owned, acquiring=acquiring, last_error=None, troubles=troubles
    )
    nothing = cast("Any", None)
    backend = Backend(nothing, lambda: status, nothing, prefix="_halfway.")
    found = backend.not_ready()
    assert len(found) == (reason is not None)
    assert reason is None or reason in found[0]
