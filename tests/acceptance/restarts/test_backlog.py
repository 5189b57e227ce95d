"""A large backlog of pending transactions: memory is bounded, a restart restores it, and ends are answered."""

import asyncio
import os
import re
import time

import pytest

from tests.support.canary import PAYLOAD
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Rest, message, preparation
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import eventually

BATCH = 1000
PENDING = int(os.environ.get("HALFWAY_TEST_PENDING", "20000"))
CALLERS = 4
VALUE = PAYLOAD.ljust(100, "v")
MIB = 1024 * 1024
BEYOND_PAYLOAD = 1024
"""The memory that a pending transaction may take, without its payload."""
CACHED = 100 + 512
"""The size of a payload in the cache."""
SLACK = 64 * MIB
"""The memory for data in flight to and from Kafka, independent of the backlog."""


async def metric(rest: Rest, name: str) -> int:
    """Return a metric, summed over its labels."""
    _, text = await rest.health("/metrics")
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert found, f"no metric {name}"
    return round(sum(map(float, found)))


async def memory(rest: Rest) -> int:
    """Return the resident memory of the coordinator in bytes."""
    return await metric(rest, "process_resident_memory_bytes")


async def prepare_many(rest: Rest, group: str, topic: str, count: int) -> list[str]:
    """Prepare in large batches and return the ids."""
    body = [preparation(group, [message(topic, VALUE, key="k", headers=[])])] * BATCH
    made: list[str] = []
    left = iter(range(count // BATCH))

    async def caller() -> None:
        for _ in left:
            answer = (await rest.batch(prepare=body)).expect(200)
            assert {item["status"] for item in answer["prepare"]} == {201}, answer["prepare"][0]
            made.extend(item["body"]["id"] for item in answer["prepare"])

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return made


async def commit_many(rest: Rest, transactions: list[str]) -> None:
    answer = (await rest.batch(end=[{"id": one, "outcome": "commit"} for one in transactions])).expect(200)
    assert [(item["status"], item["body"]["changed"]) for item in answer["end"]] == [(200, True)] * len(transactions)


@pytest.mark.timeout(1800)
async def test_a_large_backlog_fits_into_memory_and_survives_a_crash(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, group: str, topic: str
) -> None:
    """Ends are answered at the same time; after the crash with a small cache, so that payloads are read from Kafka."""
    count = PENDING
    coordinator = new_coordinator().start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    await commit_many(rest, await prepare_many(rest, group, topic, BATCH))
    empty = await memory(rest)

    pending = await prepare_many(rest, group, topic, count)
    full = await memory(rest)
    print(f"{(full - empty) / count:.0f} bytes of memory for each pending transaction, payload cached")  # noqa: T201
    assert full - empty < count * (BEYOND_PAYLOAD + CACHED) + SLACK
    assert await metric(rest, "halfway_pending") == count
    assert (await rest.commit(pending.pop()))["changed"] is True
    await commit_many(rest, [pending.pop() for _ in range(BATCH)])
    assert await metric(rest, "halfway_payload_cache_bytes") > MIB

    coordinator.kill()
    began = time.monotonic()
    await asyncio.to_thread(coordinator.start, HALFWAY_PAYLOAD_CACHE_BYTES=str(MIB))
    print(f"{len(pending)} pending transactions recovered in {time.monotonic() - began:.1f} s, start included")  # noqa: T201
    assert await metric(rest, "halfway_pending") == len(pending)
    assert (await rest.commit(pending.pop(0)))["changed"] is True
    await commit_many(rest, [pending.pop(0) for _ in range(BATCH)])
    recovered = await memory(rest)
    print(f"{(recovered - empty) / count:.0f} bytes for each after the recovery, payload not cached")  # noqa: T201
    assert recovered - empty < count * BEYOND_PAYLOAD + SLACK
    assert await metric(rest, "halfway_payload_cache_bytes") <= MIB
    assert await metric(rest, "halfway_pending") == len(pending)
    assert len(await cluster.read(topic)) == count + BATCH - len(pending)


async def test_ends_are_answered_while_everything_is_due_and_the_endpoint_is_slow(
    new_coordinator: NewCoordinator, connect: Connect, endpoint: CheckEndpoint, group: str, topic: str
) -> None:
    """Checks wait in a bounded queue, and delay nothing else."""
    count = 10_000

    async def slowly(_: object) -> str:
        await asyncio.sleep(1.5)
        return "unknown"

    endpoint.answer(slowly)
    rest = connect(new_coordinator().start())
    at_once = {"first_check_after_s": 0.1, "check_interval_s": 0.1, "max_interval_s": 0.1, "max_checks": 1000}
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=at_once)).expect(201)
    await commit_many(rest, await prepare_many(rest, group, topic, BATCH))
    empty = await memory(rest)

    pending = await prepare_many(rest, group, topic, count)
    await eventually(lambda: asyncio.sleep(0, len(endpoint.asked)), lambda asked: asked > 16)
    for _ in range(10):
        assert (await rest.commit(pending.pop()))["changed"] is True
    await commit_many(rest, [pending.pop() for _ in range(BATCH)])
    full = await memory(rest)
    print(f"{(full - empty) / count:.0f} bytes of memory for each transaction that is due")  # noqa: T201
    assert full - empty < count * (BEYOND_PAYLOAD + CACHED) + SLACK
    assert await metric(rest, "halfway_pending") == len(pending)
