"""Samples before the first event, totals of groups, and pauses of the event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from halfway.app.metrics import MAX_GROUPS, OTHER, LoopPauses, Metrics
from halfway.coordinator.records import Totals
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.records.codec import UndecodableError
from halfway.kafka.records.lane_records import SKIP_REASONS
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.waiting import until_true

CONFIG = KafkaConfig(properties={"bootstrap.servers": "unused:1"}, max_prepare_bytes=1_000, prefix="h.")


@pytest.fixture
async def world() -> AsyncIterator[RestWorld]:
    async with RestWorld() as world:
        yield world


def samples(metrics: Metrics, name: str) -> list[Mapping[str, str]]:
    """Return the labels of each sample of a counter; each is 0."""
    families = text_string_to_metric_families(metrics.render()[0].decode())
    found = [sample for family in families for sample in family.samples if sample.name == name]
    assert all(sample.value == 0 for sample in found)
    return [sample.labels for sample in found]


def test_failures_and_skipped_records_are_zero_at_the_start() -> None:
    metrics = Metrics()
    metrics.export_zeros(CONFIG, has_peers=True)
    reasons = {labels["reason"] for labels in samples(metrics, "halfway_lane_failures_total")}
    assert {"fenced", "commit_transaction", "lane", "tail"} <= reasons
    skipped = samples(metrics, "halfway_skipped_records_total")
    assert {"topic": "h.half", "reason": "undecodable"} in skipped
    assert {"topic": "h.cursors", "reason": "foreign_cursor"} in skipped
    assert {labels["result"] for labels in samples(metrics, "halfway_audit_events_total")} == {"written", "lost"}
    assert {"no_key", "revoked", "kind"} <= {
        labels["reason"] for labels in samples(metrics, "halfway_refused_callers_total")
    }


@pytest.mark.parametrize("has_peers", [True, False])
def test_forwarded_calls_are_zero_at_the_start_if_there_are_peers(has_peers: bool) -> None:
    metrics = Metrics()
    metrics.export_zeros(CONFIG, has_peers=has_peers)
    forwarded = samples(metrics, "halfway_forwarded_total")
    assert ({"call": "prepare", "result": "peer_lost"} in forwarded) is has_peers
    assert bool(forwarded) is has_peers


async def test_each_shard_has_shortened_no_horizon_at_the_start(world: RestWorld) -> None:
    metrics = Metrics()
    metrics.show(world.coordinator, world.api)
    assert [labels["shard"] for labels in samples(metrics, "halfway_horizon_shortened_total")] == ["0", "1"]


async def test_the_failing_checks_of_a_group_are_zero_from_its_registration(world: RestWorld) -> None:
    metrics = Metrics()
    metrics.show(world.coordinator, world.api)
    await world.put_shop()
    found = samples(metrics, "halfway_checks_total")
    assert {(one["group"], one["verdict"]) for one in found} == {
        ("shop", name) for name in ("none", "unknown", "leased")
    }


def test_an_event_counts_in_the_sample_that_was_zero() -> None:
    metrics = Metrics()
    metrics.export_zeros(CONFIG, has_peers=False)
    metrics.lane_failed("fenced")
    metrics.skipped_record("h.half", "wrong_key")
    text = metrics.render()[0].decode()
    assert text.count('halfway_lane_failures_total{reason="fenced"} 1.0') == 1
    assert text.count('halfway_skipped_records_total{reason="wrong_key",topic="h.half"} 1.0') == 1


def test_every_reason_to_skip_a_record_is_listed() -> None:
    kinds: list[type[UndecodableError]] = [UndecodableError, *UndecodableError.__subclasses__()]
    assert {kind.reason for kind in kinds} == set(SKIP_REASONS)


async def test_a_gauge_shows_what_the_changes_without_an_answer_wait_for(world: RestWorld) -> None:
    metrics = Metrics()
    metrics.show(world.coordinator, world.api)
    await world.put_shop()
    await world.prepared(id=named_id("held"))
    with world.memory.faults.lane_held():
        ending = asyncio.create_task(world.end(named_id("held"), "commit"))
        await until_true(lambda: b'halfway_changes_waiting{on="lane"} 1.0' in metrics.render()[0])
    assert (await ending).status == 200
    assert b"halfway_changes_waiting{on=" not in metrics.render()[0]


async def test_a_pause_is_measured() -> None:
    pauses = LoopPauses()
    watching = asyncio.create_task(pauses.watch())
    await asyncio.sleep(0.05)
    time.sleep(0.2)  # noqa: ASYNC251 - this is the pause
    await asyncio.sleep(0.05)
    watching.cancel()
    assert pauses.longest_s() >= 0.17


def test_the_longest_pause_of_the_last_seconds_counts() -> None:
    pauses = LoopPauses()
    now = time.monotonic()
    for ago, pause in ((300, 9.0), (30, 3.0), (30, 1.0), (1, 0.5)):
        pauses.record(now - ago, pause)
    assert pauses.longest_s() == 3.0
    assert pauses.longest_s(within_s=10) == 0.5
    assert LoopPauses().longest_s() == 0.0


def test_a_group_gets_its_own_totals_alone() -> None:
    """Not those of groups that are counted together, whatever its name is."""
    metrics = Metrics()
    for group, count in (("shop", 2), ("mall", 3)):
        metrics.prepared({group: count}, "prepared", 0.1)
        metrics.prepared({group: 50}, "group_limited", 0.1)
        metrics.resolved_after({group: count}, "commit", 1.0)
        metrics.checked(group, "none", sent=True, seconds=0.1)
    metrics.lane_committed(4, 100, 0.5)
    metrics.lane_failed("fenced")
    assert metrics.totals("shop") == Totals(prepares=2, commits=2, checks_none=1)
    for number in range(MAX_GROUPS):
        metrics.prepared({f"g{number}": 1}, "prepared", 0.1)
    for group in ("nobody", OTHER, f"g{MAX_GROUPS - 1}"):
        assert metrics.totals(group) == Totals()
    assert metrics.totals(None) == Totals(
        prepares=5 + MAX_GROUPS, commits=5, checks_none=2, lane_commits=1, lane_ends=4, lane_s=0.5, lane_failures=1
    )
