"""Each alert fires in a fault that is injected into real instances, and none of them does in the demo.

Minutes are not waited for: scrapes follow each other at once, and the alerts see them a minute apart.
`make deploy-test` runs this: it needs promtool.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from confluent_kafka import Producer
from rich.console import Console

from deploy.scrapes import Scrapes, fires
from examples.orders.plan import plan
from examples.orders.recorder import Recorder
from examples.orders.report import Progress
from examples.orders.run import Demo
from halfway.embedded.broker import HOST, pick_port
from halfway.embedded.process import SupervisedProcess
from halfway.kafka.records.codec import KIND_HALF, record_headers
from halfway.protocol.keys import RANDOM_BYTES, key_text
from halfway.protocol.principal import PrincipalKind
from tests.chaos.launcher import ClockFile
from tests.faults.plan import Fault
from tests.support.brokers.fixtures import Kafka
from tests.support.brokers.proxied import ProxiedKafka
from tests.support.brokers.raw import set_quota
from tests.support.coordinator.by_hand import append_all
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.faulty import NewFaultyCoordinator
from tests.support.coordinator.fleet import SHARDS, Fleet, id_in, settled
from tests.support.coordinator.metrics import samples, total
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator, halfway_command
from tests.support.coordinator.rest_client import QUIET, Connect, Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.ids import new_id
from tests.support.pipeline.fixtures import Command
from tests.support.pipeline.histories import Rogue, as_messages
from tests.support.processes import children
from tests.support.waiting import eventually

NEVER_GIVES_UP = {"first_check_after_s": 0.1, "check_interval_s": 0.1, "max_interval_s": 0.1, "max_checks": 1000}
ASKS_ONCE = {**NEVER_GIVES_UP, "max_checks": 1}
KEPT = ("cleanup.policy", "max.message.bytes", "min.compaction.lag.ms", "max.compaction.lag.ms", "segment.ms")
SEED = 39
OPERATOR = key_text(PrincipalKind.OPERATOR, bytes(range(RANDOM_BYTES)))
Start = Callable[..., Rest]


@pytest.fixture
def start(new_coordinator: NewCoordinator, connect: Connect) -> Start:
    """Return a function that starts an instance with settings, and gives a client."""
    return lambda **settings: connect(new_coordinator(settings).start())


async def counted(rest: Rest, more_than: float, metric: str, **labels: str) -> float:
    """Wait until a counter has become larger."""

    async def count() -> float:
        return total(await samples(rest), metric, **labels)

    return await eventually(count, lambda found: found > more_than)


# --- groups


@fires("HalfwayParked", "HalfwayParkedRising", "HalfwayChecksFail")
async def test_an_endpoint_knows_no_outcome(start: Start, endpoint: CheckEndpoint, group: str, topic: str) -> Scrapes:
    rest = start()
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=ASKS_ONCE)).expect(201)
    scrapes = await Scrapes(a=rest).take(12)
    for transaction in [await rest.prepared(group, [message(topic)]) for _ in range(12)]:
        await rest.until(transaction, "parked")
    return await scrapes.take(8)


@fires("HalfwayChecksFail")
async def test_an_endpoint_never_knows(start: Start, endpoint: CheckEndpoint, group: str, topic: str) -> Scrapes:
    rest = start()
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=NEVER_GIVES_UP)).expect(201)
    await rest.prepared(group, [message(topic)])
    scrapes, checks = Scrapes(a=rest), 0.0
    for _ in range(14):
        checks = await counted(rest, checks, "halfway_checks_total", group=group)
        await scrapes.take()
    return scrapes


@fires("HalfwayChecksFail")
async def test_a_worker_fetches_checks_and_does_not_answer(start: Start, group: str, topic: str) -> Scrapes:
    rest = start(HALFWAY_LEASE_S="600")
    (await rest.put_group(group, topics=[topic], policy=NEVER_GIVES_UP)).expect(201)
    scrapes = await Scrapes(a=rest).take()
    for _ in range(6):
        await rest.prepared(group, [message(topic)])
        assert await rest.lease(group, wait_s=30)
    await counted(rest, 5, "halfway_checks_total", group=group, verdict="leased")
    return await scrapes.take(8)


@fires("HalfwayEndpointUnreachable", besides=["HalfwayChecksFail"])
async def test_an_endpoint_is_gone(start: Start, endpoint: CheckEndpoint, group: str, topic: str) -> Scrapes:
    rest = start()
    await endpoint.stop()
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=NEVER_GIVES_UP)).expect(201)
    for _ in range(10):
        await rest.prepared(group, [message(topic)])
    await counted(rest, 0, "halfway_group_breaker_open", group=group)
    return await Scrapes(a=rest).take(8)


@fires("HalfwayOverdue")
async def test_nobody_fetches_checks(start: Start, group: str, topic: str) -> Scrapes:
    rest = start()
    (await rest.put_group(group, topics=[topic], policy=NEVER_GIVES_UP)).expect(201)
    await rest.prepared(group, [message(topic)])
    await counted(rest, 0, "halfway_group_overdue_seconds", group=group)
    scrapes = Scrapes(240, age="halfway_group_overdue_seconds", a=rest)
    for _ in range(8):
        await scrapes.take()
        await asyncio.sleep(1)
    return scrapes


@fires("HalfwayPreparesRefused")
async def test_a_topic_is_not_allowed(start: Start, group: str, topic: str) -> Scrapes:
    rest = start()
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    scrapes = Scrapes(a=rest)
    for _ in range(14):
        (await rest.prepare(group, [message("another")])).expect(422)
        await scrapes.take()
    return scrapes


@fires("HalfwayEndsRefused", "HalfwayErrors")
async def test_a_topic_is_deleted(start: Start, cluster: Cluster, group: str, topic: str) -> Scrapes:
    rest = start()
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    transaction = await rest.prepared(group, [message(topic)])
    await cluster.delete_topic(topic)
    await eventually(lambda: rest.end(transaction, "commit"), lambda answer: answer.error_code == "topic_unavailable")
    scrapes = Scrapes(a=rest)
    for _ in range(14):
        (await rest.end(transaction, "commit")).refused(503, "topic_unavailable")
        await scrapes.take()
    return scrapes


# --- callers and bounds


@fires("HalfwayOverloaded", "HalfwayPendingNearLimit", besides=["HalfwayPreparesRefused"])
async def test_nobody_ends_anything(start: Start, group: str, topic: str) -> Scrapes:
    rest = start(HALFWAY_MAX_PENDING="10")
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    for _ in range(10):
        await rest.prepared(group, [message(topic)])
    scrapes = Scrapes(15, a=rest)
    for _ in range(30):
        for answer in await asyncio.gather(*(rest.prepare(group, [message(topic)]) for _ in range(60))):
            answer.refused(429, "overloaded")
        await scrapes.take()
    return scrapes


@fires("HalfwayEndsSlow")
async def test_kafka_transactions_are_slow(
    faulty_coordinator: NewFaultyCoordinator, connect: Connect, group: str, topic: str
) -> Scrapes:
    coordinator = faulty_coordinator()
    rest = connect(coordinator.start())
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    coordinator.faults.plan(Fault(point="lane.5.commit.before", action="delay", seconds=0.7, times=0))
    scrapes = Scrapes(a=rest)
    for _ in range(14):
        await rest.commit(await rest.prepared(group, [message(topic)]))
        await scrapes.take()
    return scrapes


@fires("HalfwayHorizonShortened")
async def test_outcomes_have_no_room(start: Start, group: str, topic: str) -> Scrapes:
    rest = start(HALFWAY_MAX_OUTCOMES_PER_SHARD="1")
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    scrapes = await Scrapes(a=rest).take()
    for _ in range(10):
        await rest.commit(await rest.prepared(group, [message(topic)]))
    await counted(rest, 0, "halfway_horizon_shortened_total")
    return await scrapes.take(3)


# --- instances


@fires("HalfwayLoopPaused")
async def test_an_instance_gets_no_cpu(new_coordinator: NewCoordinator, connect: Connect) -> Scrapes:
    coordinator = new_coordinator()
    rest = connect(coordinator.start())
    coordinator.pause()
    await asyncio.sleep(0.6)
    coordinator.resume()
    return await Scrapes(a=rest).take(14)


@fires("HalfwayWorkersDie", besides=["HalfwayShardUnserved"])
async def test_workers_are_killed(
    new_coordinator: NewCoordinator, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> Scrapes:
    """A service of two, whose supervisor runs its own command again."""
    monkeypatch.setattr(CoordinatorProcess, "warm", False)
    service = new_coordinator({"HALFWAY_WORKERS": "2", "HALFWAY_SESSION_TIMEOUT_S": "10"})
    rest = connect(service.start())
    await counted(rest, 1, "halfway_ready")
    scrapes = await Scrapes(a=rest).take(3)
    for deaths in range(2):
        os.kill(children(service.pid)[0], signal.SIGKILL)
        await counted(rest, deaths, "halfway_worker_replaced_total")
        await counted(rest, 1, "halfway_ready")
        await scrapes.take(3)
    return scrapes


class ShiftedCoordinator(CoordinatorProcess):
    """A coordinator whose clock a test sets."""

    warm = False

    def _started(self) -> SupervisedProcess:
        self.clock = ClockFile(self.directory / "clock")
        command = halfway_command(self.settings, "serve")
        program = [*command[: command.index(sys.executable) + 1], "-m", "tests.chaos.launcher", str(self.clock.path)]
        return SupervisedProcess([*program, "serve"], cwd=Path.cwd(), log_path=self.log_path)


@fires("HalfwayClockSkew")
async def test_a_clock_is_a_minute_ahead(kafka: Kafka, connect: Connect, tmp_path: Path) -> Scrapes:
    coordinator = ShiftedCoordinator(kafka.bootstrap_servers, tmp_path)
    try:
        rest = connect(coordinator.start())
        coordinator.clock.set(60)
        # By that clock, what was read before is a minute old.
        await eventually(lambda: shown(rest, "halfway_warnings", check="kafka"), lambda warned: not warned)
        return await Scrapes(a=rest).take(8)
    finally:
        coordinator.close()


@pytest.fixture
def fleet(kafka: Kafka, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(kafka.bootstrap_servers, tmp_path, {"HALFWAY_SESSION_TIMEOUT_S": "60"})
    yield fleet
    fleet.close()


@fires("HalfwayMixedVersions", besides=["HalfwayShardUnserved"])
async def test_an_upgrade_stops(fleet: Fleet, connect: Connect, tmp_path: Path) -> Scrapes:
    older = tmp_path / "older" / "halfway-0.0.1.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: halfway\nVersion: 0.0.1\n", encoding="utf-8")
    fleet.start(1)
    fleet.add({"PYTHONPATH": str(older.parent)}).start()
    a, b = map(connect, fleet.members)
    return await Scrapes(240, a=a, b=b).take(18)


@fires("HalfwayDown", "HalfwayShardUnserved", "HalfwayPeersFail", "HalfwayErrors")
async def test_an_instance_dies_and_its_shards_stay_with_it(fleet: Fleet, connect: Connect) -> Scrapes:
    fleet.start(2)
    a, b = map(connect, fleet.members)
    _, lost = await settled([a, b])
    scrapes = await Scrapes(a=a, b=b).take()
    fleet.members[1].kill()
    for _ in range(14):
        (await a.get(id_in(min(lost)))).expect(503)
        await scrapes.take()
    return scrapes


# --- Kafka


@fires("HalfwayIncarnationsFlap", besides=["HalfwayErrors", "HalfwayEndsRefused"])
async def test_kafka_transactions_fail(
    faulty_coordinator: NewFaultyCoordinator, connect: Connect, group: str, topic: str
) -> Scrapes:
    coordinator = faulty_coordinator()
    rest = connect(coordinator.start())
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    scrapes = await Scrapes(a=rest).take()
    for failures in range(3):
        coordinator.faults.plan(Fault(point="lane.5.commit.before", action="fail", code=-185, thread="halfway-lane"))
        await rest.commit(await rest.prepared(group, [message(topic)], as_id=new_id(), retry=True), retry=True)
        await counted(rest, failures, "halfway_lane_failures_total")
        await scrapes.take()
    return await scrapes.take(2)


@fires("HalfwayForeignRecords")
async def test_another_program_writes_to_half(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster
) -> Scrapes:
    coordinator = new_coordinator()
    rest = connect(coordinator.start())
    scrapes = await Scrapes(a=rest).take()
    await append_all(cluster, coordinator.topic("half"), 0, [(b"key", b"no half")])
    await counted(rest, 0, "halfway_skipped_records_total")
    return await scrapes.take(2)


@fires("HalfwayRestartGetsSlow")
async def test_half_grows_behind_what_stays_pending(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, group: str, topic: str
) -> Scrapes:
    # By default what is pending is written again long before that.
    coordinator = new_coordinator({"HALFWAY_SHARDS": "1", "HALFWAY_MAX_OUTCOMES_PER_SHARD": str(10**9)})
    rest = connect(coordinator.start())
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    await rest.prepared(group, [message(topic)])
    coordinator.kill()
    key, headers = new_id().encode(), record_headers(KIND_HALF, group, "committed")

    def append() -> None:
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "queue.buffering.max.messages": 2_000_000})
        for _ in range(1_050_000):
            producer.produce(coordinator.topic("half"), None, key, 0, headers=headers)
        assert producer.flush(120) == 0

    await asyncio.to_thread(append)
    coordinator.start()
    await counted(rest, 1e6, "halfway_half_cursor_lag")
    return await Scrapes(240, a=rest).take(10)


@fires("HalfwayThrottled")
async def test_a_quota_is_too_small(
    new_coordinator: NewCoordinator, connect: Connect, kafka: Kafka, group: str
) -> Scrapes:
    client = f"halfway-{group}"
    rest = connect(new_coordinator({"HALFWAY_KAFKA__CLIENT_ID": client}).start())
    set_quota(kafka.bootstrap_servers, "client-id", client, "request_percentage", 0.1)
    scrapes, throttled = Scrapes(a=rest), 0.0
    try:
        for _ in range(24):
            throttled = await counted(rest, throttled + 6, "halfway_kafka_throttled_seconds_total")
            await scrapes.take()
    finally:
        set_quota(kafka.bootstrap_servers, "client-id", client, "request_percentage", None)
    return scrapes


@fires("HalfwayLogLost", besides=["HalfwayNoInstanceReady", "HalfwayShardUnserved"])
async def test_half_is_made_again(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, group: str, topic: str
) -> Scrapes:
    coordinator = new_coordinator()
    rest = connect(coordinator.start())
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    await rest.prepared(group, [message(topic)])
    half = coordinator.topic("half")
    settings = {name: value for name, value in (await cluster.config(half)).items() if name in KEPT and value}
    await asyncio.sleep(6)  # it has looked at the topic's id
    await cluster.delete_topic(half)
    await cluster.make_exactly(half, partitions=2, config=settings)
    await counted(rest, 0, "halfway_warnings", check="log")
    return await Scrapes(a=rest).take(2)


@fires("HalfwayUnsafeTopic")
async def test_a_topic_is_set_unsafely(new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster) -> Scrapes:
    coordinator = new_coordinator()
    rest = connect(coordinator.start())
    await cluster.set_config(coordinator.topic("op"), "retention.ms", "3600000")
    await counted(rest, 0, "halfway_warnings", check="topics")
    return await Scrapes(a=rest).take(5)


@fires("HalfwayKafkaAway", "HalfwayNotReady", "HalfwayNoInstanceReady")
async def test_kafka_cannot_be_reached(new_coordinator: NewCoordinator, connect: Connect) -> Scrapes:
    coordinator = new_coordinator(bootstrap_servers=f"{HOST}:{pick_port()}")
    coordinator.launch()
    rest = connect(coordinator)
    await eventually(lambda: shown(rest, "halfway_warnings", check="kafka"), lambda found: found > 0)
    return await Scrapes(a=rest).take(8)


@fires("HalfwayKafkaAway", "HalfwayNotReady", "HalfwayNoInstanceReady", "HalfwayShardUnserved")
@pytest.mark.xdist_group("proxied_kafka")
async def test_kafka_hangs_for_longer_than_a_session(
    new_coordinator: NewCoordinator, connect: Connect, proxied_kafka: ProxiedKafka
) -> Scrapes:
    rest = connect(new_coordinator(bootstrap_servers=proxied_kafka.bootstrap_servers).start())
    scrapes = await Scrapes(a=rest).take()
    proxied_kafka.pause()
    await counted(rest, 0, "halfway_warnings", check="kafka")
    await eventually(lambda: shown(rest, "halfway_ready"), lambda ready: ready == 0)
    return await scrapes.take(8)


async def shown(rest: Rest, metric: str, **labels: str) -> float:
    """Give a metric of an instance that is starting, 0 if it does not answer yet."""
    try:
        return total(await samples(rest), metric, **labels)
    except aiohttp.ClientConnectionError:
        return 0.0


@fires("HalfwayShardNotAcquired", "HalfwayShardUnserved")
async def test_shards_cannot_be_acquired(faulty_coordinator: NewFaultyCoordinator, connect: Connect) -> Scrapes:
    coordinator = faulty_coordinator()
    coordinator.faults.plan(Fault(point="acquire.2.read_owners.before", action="fail", code=-185, times=0))
    coordinator.launch()
    rest = connect(coordinator)
    not_acquired = "halfway_shard_not_acquired_seconds"
    await eventually(lambda: shown(rest, not_acquired, shard="0"), lambda seconds: seconds > 60)
    return await Scrapes(a=rest).take(8)


@fires("HalfwayKafkaAway", "HalfwayTailStale", "HalfwayKeysStale", "HalfwayAuditLost", besides=["HalfwayNotReady"])
@pytest.mark.xdist_group("proxied_kafka")
async def test_kafka_hangs(new_coordinator: NewCoordinator, connect: Connect, proxied_kafka: ProxiedKafka) -> Scrapes:
    settings = {
        "HALFWAY_MASTER_SECRET": "m" * 32,
        "HALFWAY_OPERATOR_KEY": OPERATOR,
        "HALFWAY_OPEN_ACCESS": "metrics",
        "HALFWAY_SESSION_TIMEOUT_S": "120",
    }
    rest = connect(new_coordinator(settings, bootstrap_servers=proxied_kafka.bootstrap_servers).start())
    rest.session.headers["Authorization"] = f"Bearer {OPERATOR}"
    scrapes = await Scrapes(a=rest).take()
    proxied_kafka.pause()
    await asyncio.gather(*(rest.check(new_id()) for _ in range(1100)))
    await counted(rest, 0, "halfway_audit_events_total", result="lost")
    await counted(rest, 30, "halfway_tail_age_seconds")
    await counted(rest, 0, "halfway_warnings", check="kafka")
    return await scrapes.take(4)


# --- audits and all


@fires("HalfwayAuditAnomaly")
async def test_somebody_writes_what_only_halfway_may(
    new_coordinator: NewCoordinator, connect: Connect, command: Command, group: str, topic: str, tmp_path: Path
) -> Scrapes:
    coordinator = new_coordinator()
    rest, figures = connect(coordinator.start()), tmp_path / "audit.prom"
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    leaked = message(topic, "no", key="k", headers=[])
    transaction = await rest.prepared(group, [leaked])
    await rest.rollback(transaction)
    settings = coordinator.settings
    rogue = Rogue(settings["HALFWAY_KAFKA__BOOTSTRAP_SERVERS"], coordinator.prefix, int(settings["HALFWAY_SHARDS"]))
    rogue.message(transaction, as_messages([leaked])[0], 1, 1)
    rogue.flush()
    job = ("audit", "--output", str(tmp_path / "audit"), "--metrics", str(figures), "--grace-s", "0")
    done = command(*job, **settings)
    assert figures.exists(), (done.output, done.exception)
    scrapes = Scrapes(a=rest)
    scrapes.read(figures.read_text(encoding="utf-8"), instance="node")
    return await scrapes.take()


NOT_HERE = {
    "Age of what is known",
    "Callers without permission",
    "Cannot be acquired",
    "Changes that wait",
    "Ends that are refused",
    "Incarnations that ended",
    "Streams",
    "What the log has lost, or others wrote",
}
"""Panels a query of which needs a fault, a stream, keys or a moment that this run does not have."""


async def test_every_panel_shows_something(
    fleet: Fleet, connect: Connect, endpoint: CheckEndpoint, group: str, topic: str
) -> None:
    """Of two instances, one of which has workers."""
    fleet.settings["HALFWAY_CHECK_ALSO_NETWORKS"] = "127.0.0.0/8"
    fleet.start(2)
    rests = a, b = [connect(member) for member in fleet.members]
    await settled(rests)
    (await a.put_group(group, topics=[topic], urls=[endpoint.url], policy=ASKS_ONCE)).expect(201)
    scrapes = Scrapes(a=a, b=b)
    scrapes.workers["b"] = ["0", "1"]
    for rest in rests:
        await counted(rest, 0, "halfway_kafka_round_trip_seconds")
    for _ in range(4):
        await scrapes.take()
        for shard in range(SHARDS):
            for rest in rests:
                await rest.commit(await rest.prepared(group, [message(topic)], as_id=id_in(shard)), retry=True)
        await a.until(await a.prepared(group, [message(topic)]), "parked")
        (await b.prepare(group, [message("another")])).expect(422)
    scrapes.expect_panels(empty=NOT_HERE)


@pytest.mark.usefixtures("short_lived_brokers")
async def test_none_fires_in_the_demo(tmp_path: Path) -> None:
    """A service that loses answers, dies, and answers checks wrongly does not alarm anybody: halfway copes."""
    orders = plan(60, SEED)
    async with AsyncExitStack() as stack:
        recorder = Recorder(tmp_path / "history.jsonl", SEED)
        stack.callback(recorder.close)
        demo = Demo(orders, stack, tmp_path, Progress(Console(quiet=True), len(orders)), recorder)
        await demo.start()
        headers = {"Authorization": f"Bearer {demo.halfway.operator_key}"}
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers))
        scrapes = Scrapes(15, a=Rest(session, demo.halfway.url, demo.halfway.health_url))
        over = asyncio.Event()

        async def scrape() -> None:
            while not over.is_set():
                await scrapes.take()
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(scrape())
            await demo.order()
            await demo.wait_for_outcomes()
            over.set()
    scrapes.expect([])
