"""Every unsafe setting of an internal topic is found and named, with its remedy."""

from dataclasses import replace

import pytest

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.topics.provisioning import check_broker
from halfway.kafka.topics.required_config import (
    MAX_NEW_SHARDS,
    FoundTopic,
    Problem,
    plans,
    problems,
    require_tested_shard_count,
    surplus_partitions,
)
from halfway.protocol.errors import ConfigurationError

CONFIG = KafkaConfig(properties={"bootstrap.servers": "kafka:9092"}, max_prepare_bytes=1_000_000, shards=4)
BROKER = {"transaction.partition.verification.enable": "true", "transaction.max.timeout.ms": "900000"}


def as_planned(config: KafkaConfig = CONFIG, brokers: int = 1) -> dict[str, FoundTopic]:
    """Return the topics as halfway creates them."""
    return {
        plan.name: FoundTopic(partitions=plan.partitions, replication=plan.replication, settings=plan.settings)
        for plan in plans(config, brokers)
    }


def found_problems(found: dict[str, FoundTopic], config: KafkaConfig = CONFIG, brokers: int = 1) -> list[Problem]:
    return problems(plans(config, brokers), found, bootstrap="kafka:9092")


def grown(topic: str, partitions: int) -> dict[str, FoundTopic]:
    found = as_planned()
    found[topic] = replace(found[topic], partitions=partitions)
    return found


@pytest.mark.parametrize(
    "topic", ["_halfway.half", "_halfway.op", "_halfway.parked", "_halfway.groups", "_halfway.owners"]
)
def test_partitions_beyond_the_recorded_number_are_no_problem(topic: str) -> None:
    """An operator added them: otherwise neither the old nor the new number could start. Too few are refused."""
    planned, found = plans(CONFIG, 1), grown(topic, 9)
    assert problems(planned, found, bootstrap="kafka:9092", recorded=True) == []
    assert surplus_partitions(planned, found) == {topic: 1 if topic.endswith("groups") else 4}
    assert [problem.topic for problem in problems(planned, found, bootstrap="kafka:9092")] == [topic]
    assert surplus_partitions(planned, as_planned()) == {}
    (few,) = problems(planned, grown(topic, 0), bootstrap="kafka:9092", recorded=True)
    assert (few.topic, few.setting) == (topic, "partitions")


def test_topics_that_have_very_many_shards_already_are_used_as_they_are() -> None:
    """Their number can never change: only new topics are refused, and none if the number was recorded."""
    many = replace(CONFIG, shards=MAX_NEW_SHARDS + 1)
    with pytest.raises(ConfigurationError, match="HALFWAY_SHARDS is 513"):
        require_tested_shard_count(many, {}, recorded=False)
    require_tested_shard_count(many, as_planned(many), recorded=False)
    require_tested_shard_count(many, {}, recorded=True)
    require_tested_shard_count(replace(CONFIG, shards=MAX_NEW_SHARDS), {}, recorded=False)


def changed(topic: str, setting: str, value: str) -> dict[str, FoundTopic]:
    found = as_planned()
    found[topic] = replace(found[topic], settings={**found[topic].settings, setting: value})
    return found


@pytest.mark.parametrize("brokers", [1, 2, 3, 5])
def test_what_halfway_creates_is_safe(brokers: int) -> None:
    """A plan has no problems, for any cluster size."""
    assert found_problems(as_planned(brokers=brokers), brokers=brokers) == []


def test_three_brokers_make_three_replicas_with_two_in_sync() -> None:
    """One broker may be lost; with a single broker there is one replica."""
    for plan in plans(CONFIG, 3):
        assert (plan.replication, plan.settings["min.insync.replicas"]) == (3, "2")
    for plan in plans(CONFIG, 1):
        assert (plan.replication, plan.settings["min.insync.replicas"]) == (1, "1")


@pytest.mark.parametrize(
    "topic, setting, value, needed",
    [
        ("half", "cleanup.policy", "delete", "compact"),
        ("half", "cleanup.policy", "compact,delete", "compact"),
        ("op", "cleanup.policy", "compact", "compact,delete"),
        ("op", "retention.ms", "3600000", "at least 604800000"),
        ("op", "retention.bytes", "1000", "-1"),
        ("parked", "cleanup.policy", "delete", "compact"),
        ("half", "min.compaction.lag.ms", "0", "at least 900000"),
        ("half", "max.compaction.lag.ms", str(2**63 - 1), "at most 86400000"),
        ("half", "segment.ms", "604800000", "at most 86400000"),
        ("half", "delete.retention.ms", "0", "at least 900000"),
        ("half", "max.message.bytes", "1000", f"at least {CONFIG.half_max_message_bytes}"),
        ("op", "max.message.bytes", "1000", f"at least {CONFIG.op_max_message_bytes}"),
        ("parked", "max.message.bytes", "1000", f"at least {CONFIG.parked_max_message_bytes}"),
        ("groups", "unclean.leader.election.enable", "true", "false"),
        ("owners", "message.timestamp.type", "LogAppendTime", "CreateTime"),
        ("op", "message.timestamp.after.max.ms", "60000", "at least 3600000"),
        ("half", "message.timestamp.before.max.ms", "60000", "at least 86400000"),
        ("half", "min.insync.replicas", "2", "at most 1"),
        ("audit", "cleanup.policy", "compact", "delete"),
    ],
)
def test_an_unsafe_setting_is_named_with_its_remedy(topic: str, setting: str, value: str, needed: str) -> None:
    """Topic, setting, value found, value needed, and the command that alters it."""
    name = CONFIG.topic(topic)
    problem = found_problems(changed(name, setting, value))[0]
    assert (problem.topic, problem.setting, problem.found, problem.needed) == (name, setting, value, needed)
    assert f"kafka-configs.sh --bootstrap-server kafka:9092 --alter --entity-type topics --entity-name {name}" in str(
        problem
    )
    assert f"--add-config {setting}=" in problem.remedy


@pytest.mark.parametrize(
    "topic, setting, value",
    [
        ("op", "cleanup.policy", "delete, compact"),
        ("op", "retention.ms", "-1"),
        ("op", "retention.ms", str(30 * 24 * 3_600_000)),
        ("half", "min.compaction.lag.ms", "3600000"),
        ("half", "segment.ms", "60000"),
        ("parked", "max.message.bytes", "10000000"),
    ],
)
def test_a_setting_that_is_safer_than_needed_is_accepted(topic: str, setting: str, value: str) -> None:
    """An operator may keep op longer, roll segments sooner, and so on."""
    assert found_problems(changed(CONFIG.topic(topic), setting, value)) == []


def test_parked_must_take_whatever_half_takes() -> None:
    """A half topic that an operator enlarged needs an even larger parked topic."""
    found = changed(CONFIG.half_topic, "max.message.bytes", "20000000")
    (problem,) = found_problems(found)
    assert (problem.topic, problem.setting) == (CONFIG.parked_topic, "max.message.bytes")
    assert "20000000" in problem.needed


def test_too_few_replicas_are_refused_and_no_setting_that_they_cannot_fulfil_is_asked_for() -> None:
    """One replica with three brokers is unsafe; two in-sync replicas of one would stop all writes."""
    unsafe = found_problems(as_planned(brokers=1), brokers=3)
    assert {problem.setting for problem in unsafe} == {"replication factor"}
    assert len(unsafe) == 6


def test_three_replicas_need_two_in_sync_even_while_a_broker_is_down() -> None:
    """The requirement follows from the existing replicas, not from the brokers that answer."""
    found = as_planned(brokers=3)
    assert found_problems(found, brokers=2) == []
    half = found[CONFIG.half_topic]
    found[CONFIG.half_topic] = replace(half, settings={**half.settings, "min.insync.replicas": "1"})
    (problem,) = found_problems(found, brokers=2)
    assert (problem.setting, problem.needed) == ("min.insync.replicas", "at least 2")


def test_a_list_is_put_in_brackets_for_the_command() -> None:
    """kafka-configs.sh would read a comma as the end of a setting."""
    (problem,) = found_problems(changed(CONFIG.op_topic, "cleanup.policy", "delete"))
    assert problem.remedy.endswith("cleanup.policy=[compact,delete]")


@pytest.mark.parametrize("settings", [BROKER, {}, {"transaction.max.timeout.ms": "900000"}])
def test_a_current_broker_is_accepted_also_if_it_hides_settings(settings: dict[str, str | None]) -> None:
    """The version of a request shows what its settings do not, such as those of a managed service."""
    assert check_broker(1, settings, CONFIG, 4)


def test_a_broker_that_shows_nothing_is_not_verified() -> None:
    """It is not refused: nothing says that it is old."""
    assert not check_broker(1, {}, CONFIG, None)
    assert check_broker(1, BROKER, CONFIG, None)


@pytest.mark.parametrize(
    "settings, named",
    [
        ({}, r"broker 1 is older than Kafka 3\.6"),
        ({**BROKER, "transaction.partition.verification.enable": "false"}, "verification.enable is false"),
        ({**BROKER, "transaction.max.timeout.ms": "30000"}, "transaction.max.timeout.ms is 30000"),
    ],
)
def test_a_broker_that_cannot_carry_the_transactions_is_refused(settings: dict[str, str | None], named: str) -> None:
    """The error names the broker and what it lacks."""
    with pytest.raises(ConfigurationError, match=named):
        check_broker(1, settings, CONFIG, 3)
