"""When an instance that serves nothing leaves its shards to others."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.ownership import membership
from halfway.kafka.ownership.consumer_group import USELESS_S, Uselessness
from tests.support.waiting import GENEROUS_S


def test_only_lasting_uselessness_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is served for a moment begins the time anew, and so does the decision itself."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    state = Uselessness()
    found = []
    for second in range(round(3.5 * USELESS_S)):
        now = float(second)
        if state.look(useless=second != USELESS_S - 1):
            found.append(second)
    assert found == [2 * USELESS_S, 3 * USELESS_S + 1]


def test_it_stays_away_longer_each_time_until_it_serves_a_shard() -> None:
    state = Uselessness()
    pauses = [state.take_pause() for _ in range(6)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == pauses[-2] == 300
    state.served()
    assert state.take_pause() == pauses[0]


async def test_instances_that_leave_all_at_once_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ails all of them is not one instance's alone, and nobody else serves the shards meanwhile."""
    others, calls = [True, True, False], list[str]()
    monkeypatch.setattr(membership, "TRY_AGAIN_S", 0.0)
    monkeypatch.setattr(membership, "has_members", lambda *_: others.pop(0))
    trouble = SimpleNamespace(shard=0, error="no", remedy=None)

    async def blocking(work: Callable[..., Any], *arguments: object) -> Any:
        return work(*arguments)

    instance = SimpleNamespace(
        _acquisitions=SimpleNamespace(troubles=[trouble]),
        _assigned={0},
        _blocking=blocking,
        _config=KafkaConfig(properties={"bootstrap.servers": "unused:1"}, max_prepare_bytes=1_000),
        _group=SimpleNamespace(leave_group=lambda: calls.append("left"), join_group=lambda: calls.append("joined")),
        _is_stopping=lambda: False,
        _useless=Uselessness(),
    )
    await asyncio.wait_for(membership.KafkaMembership._leave_shards_to_others(instance), GENEROUS_S)  # type: ignore[arg-type]
    assert calls == ["left", "joined"]
    assert others == []
