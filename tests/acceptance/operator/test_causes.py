"""What Kafka denies or delays is named: the resource, and the command that helps."""

import re
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AclOperation, ResourceType  # type: ignore[attr-defined]  # they are there

from tests.support.brokers.guarded import USERS, GuardedKafka, credentials
from tests.support.brokers.raw import set_quota
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import eventually, until_true

pytestmark = pytest.mark.xdist_group("guarded_kafka")
USER = "entitled"


@pytest.fixture
def restricted(new_coordinator: NewCoordinator, guarded_kafka: GuardedKafka) -> Iterator[CoordinatorProcess]:
    """Return a coordinator with exactly the documented permissions, which a test takes away."""
    coordinator = new_coordinator(
        {**credentials(USER, USERS[USER]), "HALFWAY_SESSION_TIMEOUT_S": "6", "HALFWAY_REQUEST_TIMEOUT_S": "5"},
        bootstrap_servers=guarded_kafka.guarded_servers,
    )
    operations = AclOperation
    of_topics = (operations.READ, operations.WRITE, operations.DESCRIBE, operations.DESCRIBE_CONFIGS, operations.CREATE)
    guarded_kafka.allow(USER, ResourceType.TOPIC, coordinator.prefix, *of_topics)
    guarded_kafka.allow(USER, ResourceType.GROUP, coordinator.prefix, operations.READ, operations.DESCRIBE)
    guarded_kafka.allow(USER, ResourceType.TRANSACTIONAL_ID, coordinator.prefix, operations.WRITE, operations.DESCRIBE)
    coordinator.start()
    # Without DescribeConfigs on the cluster, the versions of requests show what the brokers can do.
    assert "brokers_not_verified" not in coordinator.log
    yield coordinator
    coordinator.close()


async def prepared(guarded_kafka: GuardedKafka, rest: Rest, group: str, value: str = "v") -> str:
    topic = await Cluster(guarded_kafka.bootstrap_servers).make_topic()
    guarded_kafka.allow(USER, ResourceType.TOPIC, topic, AclOperation.WRITE, AclOperation.DESCRIBE_CONFIGS)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    return await rest.prepared(group, [message(topic, value)])


async def test_a_permission_that_is_taken_away_is_named_with_its_command(
    restricted: CoordinatorProcess, connect: Connect, guarded_kafka: GuardedKafka, group: str
) -> None:
    """Write on op, Read on half, Read on the group: each is named, not leaders or hanging transactions."""
    rest = connect(restricted)
    name = await prepared(guarded_kafka, rest, group)

    async def ready() -> str:
        return (await rest.health("/health/ready"))[1]

    def allowed_by(flag: str, resource: str, operation: str) -> re.Pattern[str]:
        return re.compile(
            r"kafka-acls\.sh --bootstrap-server \S+ --command-config admin\.properties --add "
            rf"--allow-principal 'User:{USER}' {flag} '{re.escape(resource)}'[^\"]* --operation {operation}"
        )

    op, half, members = (restricted.topic(kind) for kind in ("op", "half", "members"))
    guarded_kafka.deny(USER, op, AclOperation.WRITE)
    await rest.end(name, "commit")
    of_op = allowed_by("--topic", op, "Write")
    said = await eventually(ready, lambda answer: of_op.search(answer) is not None)
    assert "find-hanging" not in said
    await until_true(lambda: of_op.search(restricted.log), what="the log says it too")
    guarded_kafka.stop_denying(USER, op, AclOperation.WRITE)
    await rest.commit(name, retry=True)
    restricted.wait_until_ready()

    guarded_kafka.deny(USER, half, AclOperation.READ)
    of_half = allowed_by("--topic", half, "Read")
    await until_true(lambda: of_half.search(restricted.log), what="the tail says what it may not do")
    guarded_kafka.stop_denying(USER, half, AclOperation.READ)

    guarded_kafka.deny(USER, members, AclOperation.READ, ResourceType.GROUP)
    of_group = allowed_by("--group", restricted.prefix, "Read")
    await eventually(ready, lambda answer: of_group.search(answer) is not None)
    assert "gave this instance's shards to others" not in restricted.log
    guarded_kafka.stop_denying(USER, members, AclOperation.READ, ResourceType.GROUP)
    restricted.wait_until_ready()


async def test_a_quota_is_an_event_and_a_metric(
    restricted: CoordinatorProcess, connect: Connect, guarded_kafka: GuardedKafka, group: str
) -> None:
    """Brokers delay answers without an error: otherwise nothing shows why everything is slow."""
    rest = connect(restricted)
    name = await prepared(guarded_kafka, rest, group)
    metrics = (await rest.health("/metrics"))[1]
    assert "halfway_kafka_throttled_seconds_total 0.0" in metrics
    assert "halfway_tail_age_seconds" in metrics
    set_quota(guarded_kafka.bootstrap_servers, "user", USER, "producer_byte_rate", 2_000)
    try:
        await prepared(guarded_kafka, rest, f"{group}-large", "x" * 60_000)
        await until_true(lambda: "kafka_throttled" in restricted.log, what="the delay is logged")
        _, shown = await rest.health("/metrics")
        found = re.search(r"^halfway_kafka_throttled_seconds_total (\S+)", shown, re.MULTILINE)
        assert found is not None
        assert float(found[1]) > 0
    finally:
        set_quota(guarded_kafka.bootstrap_servers, "user", USER, "producer_byte_rate", None)
    await rest.commit(name, retry=True)
