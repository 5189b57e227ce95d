"""The coordinator is killed by SIGKILL before and after each numbered step: a transaction is complete or not there.

Each cell fails if its point was not reached or the process did not die of signal 9. After the next start every
acknowledged end is stored exactly once, in all of its topics; callers without an answer repeat the end and get one;
everything else is unchanged. `pending` and `resolved` are the expected results of the ends in progress; a kill in the
middle of a commit allows both.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial

import aiohttp
import pytest

from halfway.protocol.records import OpKind
from tests.faults.plan import Fault
from tests.support.brokers.fixtures import Kafka
from tests.support.coordinator.by_hand import append_all
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.faulty import NewFaultyCoordinator
from tests.support.coordinator.kill_scene import HASTY, Attempt, Lineage, Scene
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import QUIET, Connect, message
from tests.support.coordinator.topics import Cluster, InternalTopics
from tests.support.waiting import eventually

AT_BROKER_S = 0.05
"""Long enough for the records to be in an open Kafka transaction at the broker."""


@pytest.fixture(scope="module")
def lineage(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lineage]:
    """Return the coordinator that every cell on this worker kills."""
    lineage = Lineage(kafka.bootstrap_servers, tmp_path_factory.mktemp("lineage"))
    yield lineage
    lineage.discard()


@pytest.fixture
async def scene(
    lineage: Lineage, connect: Connect, cluster: Cluster, note_log: Callable[[CoordinatorProcess], None]
) -> AsyncIterator[Scene]:
    coordinator, rest = await lineage.running(connect, cluster)
    note_log(coordinator)
    scene = Scene(lineage=lineage, coordinator=coordinator, rest=rest, cluster=cluster)
    yield scene
    if not scene.stood:
        lineage.discard()


@pytest.mark.parametrize(
    "point, seconds, victims",
    [
        ("lane.1.begin.before", 0, "pending"),
        ("lane.1.begin.after", 0, "pending"),
        ("lane.2.messages.before", 0, "pending"),
        ("lane.2.messages.after", AT_BROKER_S, "pending"),
        ("lane.3.op_markers.before", 0, "pending"),
        ("lane.3.op_markers.after", AT_BROKER_S, "pending"),
        ("lane.4.tombstones.before", 0, "pending"),
        ("lane.4.tombstones.after", AT_BROKER_S, "pending"),
        ("lane.5.commit.before", 0, "pending"),
        ("lane.5.commit.after", 0, "resolved"),
        ("lane.answer.before", 0, "resolved"),
        ("lane.answer.after", 0, "resolved"),
    ],
)
async def test_killed_in_the_lane(scene: Scene, point: str, seconds: float, victims: str) -> None:
    """Before the commit nothing of the batch is stored; after it everything, although no caller was answered."""
    await scene.set()
    await scene.end_victims(Fault(point=point, action="kill", hit=2, seconds=seconds))
    await scene.coordinator.killed_at_its_fault()
    assert not any(scene.attempts[name].acknowledged for name in scene.victims)

    await scene.restart()
    await scene.stands(victims=victims)


@pytest.mark.parametrize("seconds", [0.001, 0.004])
async def test_killed_while_the_commit_is_under_way(scene: Scene, seconds: float) -> None:
    """Kafka may or may not have received the request: each transaction is in all of its topics or in none."""
    await scene.set()
    await scene.end_victims(Fault(point="lane.5.commit.before", action="doom", hit=2, seconds=seconds))
    await scene.coordinator.killed_at_its_fault()

    await scene.restart()
    await scene.stands()


@pytest.mark.parametrize(
    "point, confirm, victims",
    [
        ("stream.hand_over.before", True, "pending"),
        ("stream.hand_over.after", True, "either"),
        ("stream.accept.after", False, "either"),
        ("lane.5.commit.before", True, "pending"),
        ("lane.5.commit.before", False, "pending"),
        ("stream.answer.before", True, "either"),
    ],
)
async def test_killed_while_it_serves_a_stream(scene: Scene, point: str, confirm: bool, victims: str) -> None:
    """Unconfirmed ends are pending or resolved, and their repeats are answered; 202 promises no more."""
    await scene.set()
    await scene.end_victims_on_a_stream(Fault(point=point, action="kill"), confirm=confirm)
    await scene.coordinator.killed_at_its_fault()
    assert not any(scene.attempts[name].acknowledged for name in scene.victims)

    await scene.restart()
    await scene.stands(victims=victims)


@pytest.mark.parametrize(
    "point, seconds, victims",
    [
        ("suspects.rehearse.after", 0, "pending"),
        ("lane.5.commit.before", AT_BROKER_S, "pending"),
        ("lane.5.commit.after", 0, "either"),
    ],
)
async def test_killed_in_the_suspects_lane(scene: Scene, point: str, seconds: float, victims: str) -> None:
    """After a failed Kafka transaction its ends are written apart, and are equally safe."""
    await scene.set()
    await scene.end_victims(
        Fault(point="lane.4.tombstones.after", action="fail", hit=2, thread="halfway-lane"),
        Fault(point=point, action="kill", seconds=seconds, thread="halfway-suspects"),
    )
    await scene.coordinator.killed_at_its_fault()

    await scene.restart()
    await scene.stands(victims=victims)


@pytest.mark.parametrize(
    "first, second, seconds",
    [
        ("acquire.1.fence_acquirers.before", "acquire.1.fence_acquirers.after", 0),
        ("acquire.2.read_owners.before", "acquire.2.read_owners.after", 0),
        ("acquire.3.fence_owners.before", "acquire.3.fence_owners.after", 0),
        ("acquire.4.claim.before", "acquire.4.claim.after", 0),
        ("acquire.4.produce_claim.after", "acquire.4.claim.after", AT_BROKER_S),
        ("acquire.5.fold.before", "acquire.5.fold.after", 0),
        ("acquire.6.serve.before", "acquire.6.serve.after", 0),
    ],
)
async def test_killed_while_it_acquires(scene: Scene, first: str, second: str, seconds: float) -> None:
    """One leaves an open Kafka transaction and unreleased shards; two in a row die during their takeover."""
    await scene.set()
    await scene.end_victims(Fault(point="lane.5.commit.before", action="kill", hit=2, seconds=AT_BROKER_S))
    await scene.coordinator.killed_at_its_fault()
    for point in (first, second):
        scene.coordinator.faults.plan(Fault(point=point, action="kill", seconds=seconds))
        scene.coordinator.launch()
        await scene.coordinator.killed_at_its_fault()

    await scene.restart()
    await scene.stands(victims="pending")


@pytest.mark.parametrize(
    "point, seconds",
    [
        ("release.give_back.before", 0),
        ("release.finish.after", 0),
        ("release.produce.after", AT_BROKER_S),
        ("release.commit.after", 0),
    ],
)
async def test_killed_while_it_gives_its_shards_back(scene: Scene, point: str, seconds: float) -> None:
    """An orderly stop that becomes a crash: the next start finds the same state, in released or unreleased shards."""
    await scene.set()
    scene.coordinator.faults.plan(Fault(point=point, action="kill", seconds=seconds))
    scene.coordinator.terminate()
    await scene.coordinator.killed_at_its_fault()

    await scene.restart()
    await scene.stands()


@pytest.mark.parametrize("point", ["scan.6.commit_cursors.before", "scan.6.commit_cursors.after"])
async def test_killed_in_a_scan(scene: Scene, point: str) -> None:
    """Uncommitted cursors cost only reading time."""
    await scene.set()
    scene.coordinator.faults.plan(Fault(point=point, action="kill"))
    await scene.coordinator.killed_at_its_fault()

    await scene.restart()
    await scene.stands()


@pytest.mark.parametrize(
    "point, counted", [("check.ask.after", 0), ("lane.5.commit.before", 0), ("lane.5.commit.after", 1)]
)
async def test_killed_after_a_check_was_sent(
    scene: Scene, endpoint: CheckEndpoint, group: str, point: str, counted: int
) -> None:
    """Until CHECKED is written the check is not counted: it is sent again, and its verdict is applied once."""
    (await scene.rest.put_group(group, topics=scene.lineage.topics, urls=[endpoint.url], policy=QUIET)).expect(201)
    transaction = await scene.prepare(group=group)
    await _killed_on_checking(scene, transaction, Fault(point=point, action="kill"))
    assert [asked.attempt for asked in endpoint.asked] == [1]

    await scene.restart()
    assert (await scene.rest.show(transaction))["checks"] == counted
    endpoint.answer("commit")
    (await scene.rest.check(transaction)).expect(202)
    await scene.rest.until(transaction, "committed")
    assert [asked.attempt for asked in endpoint.asked] == [1, 1 + counted]
    internal = InternalTopics(scene.cluster, scene.coordinator.prefix)
    notes = [(OpKind.CHECKED, "check")] * counted
    assert await internal.kinds(transaction) == [*notes, (OpKind.COMMITTED, "check")]
    scene.attempts[transaction] = Attempt(outcome="commit")
    await scene.stands()


@pytest.mark.parametrize("point, state", [("lane.5.commit.before", "prepared"), ("lane.5.commit.after", "committed")])
async def test_killed_after_a_verdict(
    scene: Scene, endpoint: CheckEndpoint, group: str, point: str, state: str
) -> None:
    """A verdict that was not recorded is requested again; one that was recorded is applied once."""
    (await scene.rest.put_group(group, topics=scene.lineage.topics, urls=[endpoint.url], policy=QUIET)).expect(201)
    transaction = await scene.prepare(group=group)
    endpoint.answer("commit")
    await _killed_on_checking(scene, transaction, Fault(point=point, action="kill", seconds=AT_BROKER_S))

    await scene.restart()
    assert (await scene.rest.show(transaction))["state"] == state
    if state == "prepared":
        (await scene.rest.check(transaction)).expect(202)
        await scene.rest.until(transaction, "committed")
    scene.attempts[transaction] = Attempt(outcome="commit")
    await scene.stands()


async def _killed_on_checking(scene: Scene, transaction: str, fault: Fault) -> None:
    scene.coordinator.faults.plan(fault)
    with suppress(aiohttp.ClientConnectionError):  # it may die first
        (await scene.rest.check(transaction)).expect(202)
    await scene.coordinator.killed_at_its_fault()


@pytest.mark.parametrize("point", ["lane.5.commit.before", "lane.5.commit.after"])
@pytest.mark.parametrize("on_exhausted, state", [("park", "parked"), ("rollback", "rolled_back")])
async def test_killed_while_it_gives_up(
    scene: Scene, endpoint: CheckEndpoint, group: str, on_exhausted: str, state: str, point: str
) -> None:
    """A decision of the policy is written once, by the first or by the second start.

    Only checked transactions are rolled back: each start records a check of its own before it rolls back.
    """
    asked = on_exhausted == "rollback"
    policy = {**HASTY, "on_exhausted": on_exhausted} | ({"max_checks": 1, "max_age_s": 3600} if asked else {})
    urls = [endpoint.url] if asked else None
    (await scene.rest.put_group(group, topics=scene.lineage.topics, urls=urls, policy=policy)).expect(201)
    scene.coordinator.faults.plan(Fault(point=point, action="kill", hit=2 if asked else 1, seconds=AT_BROKER_S))
    transaction = await scene.prepare(group=group)
    await scene.coordinator.killed_at_its_fault()

    await scene.restart()
    await scene.rest.until(transaction, state)
    internal = InternalTopics(scene.cluster, scene.coordinator.prefix)
    *checks, decided = await internal.kinds(transaction)
    assert decided == (OpKind(state.upper()), "policy")
    assert checks in ([(OpKind.CHECKED, "check")] * number for number in ((1, 2) if asked else (0,)))
    await scene.exactly({transaction: state})
    if state == "parked":
        assert (await scene.rest.commit(transaction))["changed"] is True
        await scene.exactly({transaction: "committed"})
    else:
        (await scene.rest.end(transaction, "commit")).refused(409, "already_ended")
    scene.stood = True


async def test_killed_while_it_writes_old_halves_again(
    faulty_coordinator: NewFaultyCoordinator, connect: Connect, cluster: Cluster, group: str, topic: str
) -> None:
    """A re-anchored transaction is pending before, between and after, and is committed once."""
    coordinator = faulty_coordinator({"HALFWAY_SHARDS": "1", "HALFWAY_MAX_OUTCOMES_PER_SHARD": "100"}).start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    internal = InternalTopics(cluster, coordinator.prefix)
    pending: list[str] = []
    for point in ("lane.5.commit.before", "lane.5.commit.after"):
        old = await rest.prepared(group, [message(topic, point)])
        pending.append(await rest.prepared(group, [message(topic, "younger")]))
        coordinator.faults.plan(Fault(point=point, action="kill", seconds=AT_BROKER_S))
        # Makes the log longer: ends would reach the kill point, and more pending transactions would raise the distance.
        await append_all(cluster, coordinator.topic("half"), 0, [(b"foreign", b"foreign")] * 50)
        await coordinator.killed_at_its_fault()
        await asyncio.to_thread(coordinator.start)

        halves = await eventually(partial(internal.halves, old), lambda halves: len(halves) > 1)
        assert None not in halves
        assert (await rest.show(old))["state"] == "prepared"
        assert (await rest.commit(old))["changed"] is True

    assert {(await rest.show(transaction))["state"] for transaction in pending} == {"prepared"}
    values = sorted(record.value or b"" for record in await cluster.read(topic))
    assert values == [b"lane.5.commit.after", b"lane.5.commit.before"]
