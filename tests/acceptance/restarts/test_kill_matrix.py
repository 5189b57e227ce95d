"""The coordinator is killed by SIGKILL before and after each numbered step: a transaction stands whole or not at all.

Each cell fails where its point was not reached or the process was not seen dead by signal 9. After the next start every
acknowledged end stands exactly once, in all of its topics; whoever got no answer sends the same end again and is
answered; everything else is as it was. `pending` and `resolved` say what must have become of the ends that were under
way; a kill in the middle of a commit leaves either.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial

import aiohttp
import pytest

from halfway.domain.records import OpKind
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
"""Long enough for what was produced to be in an open Kafka transaction at the broker."""


@pytest.fixture(scope="module")
def lineage(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lineage]:
    """Give the coordinator that is killed for cell after cell on this worker."""
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
    """Until the commit nothing of the batch stands; from then on all of it, though nobody was answered."""
    await scene.set()
    await scene.end_victims(Fault(point=point, action="kill", hit=2, seconds=seconds))
    await scene.coordinator.killed_at_its_fault()
    assert not any(scene.attempts[name].acknowledged for name in scene.victims)

    await scene.restart()
    await scene.stands(victims=victims)


@pytest.mark.parametrize("seconds", [0.001, 0.004])
async def test_killed_while_the_commit_is_under_way(scene: Scene, seconds: float) -> None:
    """Kafka may have heard of it or not: each transaction stands in all of its topics or in none."""
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
    """What was not confirmed is pending or resolved, and the same end again is answered; 202 promises no more."""
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
    """After a Kafka transaction has failed its ends are tried apart, and are as safe there."""
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
    """One leaves a Kafka transaction open and its shards unreleased; two in a row die on taking them over."""
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
    """An orderly stop that becomes a crash: the next start finds the shards released or not, and the same in them."""
    await scene.set()
    scene.coordinator.faults.plan(Fault(point=point, action="kill", seconds=seconds))
    scene.coordinator.terminate()
    await scene.coordinator.killed_at_its_fault()

    await scene.restart()
    await scene.stands()


@pytest.mark.parametrize("point", ["scan.6.commit_cursors.before", "scan.6.commit_cursors.after"])
async def test_killed_in_a_scan(scene: Scene, point: str) -> None:
    """Cursors that were not committed cost reading time, nothing else."""
    await scene.set()
    scene.coordinator.faults.plan(Fault(point=point, action="kill"))
    await scene.coordinator.killed_at_its_fault()

    await scene.restart()
    await scene.stands()


@pytest.mark.parametrize(
    "point, counted",
    [
        ("check.ask.after", 0),
        ("lane.5.commit.before", 0),
        ("lane.5.commit.after", 1),
    ],
)
async def test_killed_after_a_check_was_sent(
    scene: Scene, endpoint: CheckEndpoint, group: str, point: str, counted: int
) -> None:
    """Until CHECKED stands the check is not counted: it is sent again, and its verdict is carried out once."""
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


@pytest.mark.parametrize(
    "point, state",
    [("lane.5.commit.before", "prepared"), ("lane.5.commit.after", "committed")],
)
async def test_killed_after_a_verdict(
    scene: Scene, endpoint: CheckEndpoint, group: str, point: str, state: str
) -> None:
    """A verdict that does not stand is asked for again; one that stands is carried out once."""
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
    """What policy decided stands once, whether the first or the second start wrote it.

    What is rolled back was asked about: each start notes a check of its own before it rolls back.
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
    coordinator = faulty_coordinator({"HALFWAY_SHARDS": "1", "HALFWAY_REANCHOR_AFTER": "5"})
    coordinator.start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    internal = InternalTopics(cluster, coordinator.prefix)
    pending: list[str] = []
    for point in ("lane.5.commit.before", "lane.5.commit.after"):
        old = await rest.prepared(group, [message(topic, point)])
        pending.append(await rest.prepared(group, [message(topic, "younger")]))
        coordinator.faults.plan(Fault(point=point, action="kill", seconds=AT_BROKER_S))
        # Makes the log longer: ends would be killed themselves, and more that is pending is allowed more of it.
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
