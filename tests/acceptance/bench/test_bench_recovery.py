"""The benchmark of starts, and what a start reads of a log that is written beforehand."""

import asyncio
from time import time_ns
from typing import Any

import msgspec

from bench.log_history import Plan, Writer
from halfway.app.metrics import Metrics
from halfway.coordinator.ports import Cursors
from halfway.kafka.log.cursors import KafkaCursors
from halfway.kafka.topics.provisioning import InternalTopics
from tests.support.coordinator.metrics import samples, total
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect
from tests.support.waiting import eventually


async def cursors_of(plan: Plan, shard: int) -> Cursors | None:
    cursors = KafkaCursors(plan.config, Metrics())
    await cursors.start()
    try:
        return (await asyncio.to_thread(cursors.load, [shard])).get(shard)
    finally:
        await cursors.stop()


async def test_what_a_start_reads_does_not_stay_long(
    new_coordinator: NewCoordinator, connect: Connect, group: str, topic: str
) -> None:
    """Old pending halves before many ended ones are re-anchored: the next start reads from after these."""
    count, ended = 6, 400
    coordinator = new_coordinator({"HALFWAY_MAX_OUTCOMES_PER_SHARD": "800", "HALFWAY_OUTCOME_HORIZON_S": "1"})
    shards = range(int(coordinator.settings["HALFWAY_SHARDS"]))
    plan = Plan(
        bootstrap_servers=coordinator.settings["HALFWAY_KAFKA__BOOTSTRAP_SERVERS"],
        prefix=coordinator.prefix,
        shards=len(shards),
        own=tuple(shards),
        group=group,
        topic=topic,
        value_bytes=40,
        pending=count,
        ended=ended,
        until_ms=time_ns() // 1_000_000 - 3_600_000,
        rate_per_s=100,
        reanchor_after=10**9,
        wave=50,
    )
    topics = InternalTopics(plan.config)
    await topics.ensure()
    topics.close()
    history = await asyncio.to_thread(lambda: Writer(plan).write())
    assert history.reanchored == 0
    assert set(history.half_cursors.values()) == {0}

    coordinator.start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy={**QUIET, "first_check_after_s": 7200})).expect(201)
    assert total(await samples(rest), "halfway_pending") == count
    await eventually(
        lambda: asyncio.gather(*(cursors_of(plan, shard) for shard in shards)),
        lambda found: all(at is not None and history.half_ends[0] - 40 <= at.half for at in found),
    )
    coordinator.kill()
    coordinator.start()
    read = [
        line["records"] for line in map(_decoded, coordinator.log.splitlines()) if line["event"] == "shards_acquired"
    ]
    assert sum(read[: len(shards)]) >= count + 2 * ended
    assert sum(read[-len(shards) :]) < ended
    assert total(await samples(rest), "halfway_pending") == count
    for transaction in (await rest.page(state="prepared"))["transactions"]:
        assert (await rest.commit(transaction["id"]))["changed"] is True


def _decoded(line: str) -> dict[str, Any]:
    return msgspec.json.decode(line, type=dict[str, Any]) if line.startswith("{") else {"event": ""}
