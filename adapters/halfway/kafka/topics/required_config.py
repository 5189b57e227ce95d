"""The required configuration of the internal topics: pure code that plans them and finds unsafe settings.

See docs/protocol.md#topics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from halfway.kafka.clients.config import KafkaConfig
from halfway.protocol.errors import ConfigurationError

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
SAFE_REPLICATION: Final = 3
"""With this many replicas and brokers, two replicas must be in sync."""
MAX_NEW_SHARDS: Final = 512
"""The most shards for which topics are created: the largest number that was tested."""
_FOREVER: Final = -1
_ANY_TIME_MS: Final = 9_223_372_036_854_775_807
"""Kafka accepts records however far their time is from the broker's. From 4.0 on its default for times ahead is 1 h."""
_KAFKA_DEFAULT_MESSAGE_BYTES: Final = 1_048_588
"""The default of `max.message.bytes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An unsafe setting of a topic: its value, the needed value, and the command that corrects it."""

    topic: str
    setting: str
    found: str
    needed: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.setting} is {self.found}, needed {self.needed}; {self.remedy}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundTopic:
    """An existing internal topic; `replication` is that of the partition with the fewest replicas."""

    partitions: int
    replication: int
    settings: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """A requirement on one setting: the value for a new topic, and which other values are safe too."""

    value: str
    needed: str
    safe: Callable[[str], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicPlan:
    """One internal topic as it would be created."""

    kind: str
    name: str
    partitions: int
    replication: int
    needs: Mapping[str, Need]

    @property
    def settings(self) -> dict[str, str]:
        """The configuration that a new topic gets."""
        return {setting: need.value for setting, need in self.needs.items()}


def plans(config: KafkaConfig, brokers: int) -> list[TopicPlan]:
    """Plan the internal topics for a cluster with this many brokers."""
    replication = config.replication_factor or (SAFE_REPLICATION if brokers >= SAFE_REPLICATION else 1)
    shared = {
        "unclean.leader.election.enable": _exactly("false"),
        "message.timestamp.type": _exactly("CreateTime"),
        # An instance whose clock is wrong must still be able to write what it owns.
        "message.timestamp.before.max.ms": _at_least(DAY_MS, value=_ANY_TIME_MS),
        "message.timestamp.after.max.ms": _at_least(HOUR_MS, value=_ANY_TIME_MS),
        "min.insync.replicas": _at_least(_in_sync(replication)),
        "segment.ms": _at_most(config.segment_ms, max(config.segment_ms, DAY_MS)),
        "min.compaction.lag.ms": _at_least(config.min_compaction_lag_ms),
        "max.compaction.lag.ms": _at_most(config.max_compaction_lag_ms, max(config.max_compaction_lag_ms, DAY_MS)),
        "delete.retention.ms": _at_least(round(config.outcome_horizon_s * 1000), value=DAY_MS),
    }
    compact = {**shared, "cleanup.policy": _policies("compact")}
    by_time = {
        **shared,
        "cleanup.policy": _policies("compact,delete"),
        "retention.ms": _at_least(config.op_retention_ms, forever=True),
        "retention.bytes": _exactly(str(_FOREVER)),
        "max.message.bytes": _at_least(config.op_max_message_bytes, value=_KAFKA_DEFAULT_MESSAGE_BYTES),
    }

    audit = {
        **{name: shared[name] for name in shared if name.startswith(("unclean.", "message.timestamp.", "min.insync."))},
        "cleanup.policy": _policies("delete"),
        "retention.ms": _any(str(90 * DAY_MS)),
    }

    # Whose clock is further off would refuse the ids of everybody else: it cannot own a shard, and others can.
    owners = {**compact, **{f"message.timestamp.{way}.max.ms": _at_least(HOUR_MS) for way in ("before", "after")}}

    def plan(kind: str, needs: Mapping[str, Need], partitions: int) -> TopicPlan:
        return TopicPlan(
            kind=kind, name=config.topic(kind), partitions=partitions, replication=replication, needs=needs
        )

    return [
        plan("half", {**compact, "max.message.bytes": _at_least(config.half_max_message_bytes)}, config.shards),
        plan("op", by_time, config.shards),
        plan("parked", {**compact, "max.message.bytes": _at_least(config.parked_max_message_bytes)}, config.shards),
        plan("groups", compact, 1),
        plan("owners", owners, config.shards),
        *([plan("keys", compact, 1)] if config.has_keys else []),
        plan("audit", audit, 1),
    ]


def require_tested_shard_count(config: KafkaConfig, found: Mapping[str, FoundTopic], *, recorded: bool) -> None:
    """Raise ConfigurationError if new topics would have more shards than were tested.

    Existing topics, and topics whose number of shards is `recorded`, are used as they are.
    """
    if config.shards > MAX_NEW_SHARDS and config.half_topic not in found and not recorded:
        raise ConfigurationError(
            f"HALFWAY_SHARDS is {config.shards}: topics are created for at most {MAX_NEW_SHARDS} shards; set fewer, "
            "or create the topics yourself"
        )


def surplus_partitions(planned: Iterable[TopicPlan], found: Mapping[str, FoundTopic]) -> dict[str, int]:
    """Return the topics with more partitions than planned, each with the planned number."""
    return {
        plan.name: plan.partitions
        for plan in planned
        if plan.name in found and found[plan.name].partitions > plan.partitions
    }


def problems(
    planned: Iterable[TopicPlan], found: Mapping[str, FoundTopic], *, bootstrap: str, recorded: bool = False
) -> list[Problem]:
    """Return every problem of the existing topics; a missing topic is a problem too.

    Once the number of shards is `recorded`, partitions that an operator has added are no problem: they are not used.
    """
    planned = list(planned)
    unsafe: list[Problem] = []
    for plan in planned:
        topic = found.get(plan.name)
        if topic is None:
            unsafe.append(missing_topic(plan.name))
            continue
        unsafe += _shape_problems(plan, topic, bootstrap, recorded=recorded)
        unsafe += _setting_problems(plan, topic, bootstrap)
    names = {plan.kind: plan.name for plan in planned}
    return unsafe + _size_problem(names["half"], names["parked"], found, bootstrap)


def missing_topic(name: str) -> Problem:
    """Return the problem of a topic that a start had created."""
    remedy = (
        "run halfway topics create; instances that run write again what they have in memory, the rest of what "
        "the topic held is lost"
    )
    return Problem(topic=name, setting="topic", found="missing", needed="present", remedy=remedy)


def _shape_problems(plan: TopicPlan, topic: FoundTopic, bootstrap: str, *, recorded: bool) -> list[Problem]:
    unsafe: list[Problem] = []
    if topic.partitions < plan.partitions or (topic.partitions > plan.partitions and not recorded):
        created_with = f"set HALFWAY_SHARDS={topic.partitions}, the number it was created with, or "
        remedy = ("" if plan.kind in ("groups", "keys") else created_with) + "use another HALFWAY_KAFKA_PREFIX"
        unsafe.append(
            Problem(
                topic=plan.name,
                setting="partitions",
                found=str(topic.partitions),
                needed=str(plan.partitions),
                remedy=remedy,
            )
        )
    if topic.replication < plan.replication:
        remedy = (
            f"run kafka-reassign-partitions.sh --bootstrap-server {bootstrap} --execute with more replicas for "
            f"{plan.name}, or set HALFWAY_REPLICATION_FACTOR={topic.replication} and accept that messages can be lost"
        )
        unsafe.append(
            Problem(
                topic=plan.name,
                setting="replication factor",
                found=str(topic.replication),
                needed=f"at least {plan.replication}",
                remedy=remedy,
            )
        )
    return unsafe


def _setting_problems(plan: TopicPlan, topic: FoundTopic, bootstrap: str) -> list[Problem]:
    unsafe: list[Problem] = []
    # This depends on the replicas that the topic has, even if a new topic would get more or fewer.
    needs = {**plan.needs, "min.insync.replicas": _at_least(_in_sync(topic.replication))}
    for setting, need in needs.items():
        found = topic.settings.get(setting)
        # A setting that the broker does not return does not exist there.
        if found is not None and not need.safe(found):
            unsafe.append(_setting_problem(plan.name, setting, found, need.needed, need.value, bootstrap))
    in_sync = topic.settings.get("min.insync.replicas")
    if in_sync is not None and int(in_sync) > topic.replication:
        unsafe.append(
            _setting_problem(
                plan.name, "min.insync.replicas", in_sync, f"at most {topic.replication}", topic.replication, bootstrap
            )
        )
    return unsafe


def _size_problem(half: str, parked: str, found: Mapping[str, FoundTopic], bootstrap: str) -> list[Problem]:
    """Return a problem if a record of half may not fit into parked."""
    setting = "max.message.bytes"
    if half not in found or parked not in found:
        return []
    of_half, of_parked = found[half].settings.get(setting), found[parked].settings.get(setting)
    if of_half is None or of_parked is None or int(of_parked) > int(of_half):
        return []
    needed = f"more than the {of_half} of {half}"
    return [_setting_problem(parked, setting, of_parked, needed, int(of_half) + 65_536, bootstrap)]


def _setting_problem(topic: str, setting: str, found: str, needed: str, value: object, bootstrap: str) -> Problem:
    # kafka-configs.sh takes a list in brackets.
    shown = f"[{value}]" if "," in str(value) else value
    remedy = (
        f"run kafka-configs.sh --bootstrap-server {bootstrap} --alter --entity-type topics --entity-name {topic} "
        f"--add-config {setting}={shown}"
    )
    return Problem(topic=topic, setting=setting, found=found, needed=needed, remedy=remedy)


def _in_sync(replication: int) -> int:
    return 2 if replication >= SAFE_REPLICATION else 1


def _any(value: str) -> Need:
    return Need(value=value, needed="any", safe=lambda _: True)


def _exactly(value: str) -> Need:
    return Need(value=value, needed=value, safe=lambda found: found == value)


def _policies(value: str) -> Need:
    wanted = set(value.split(","))
    return Need(value=value, needed=value, safe=lambda found: {part.strip() for part in found.split(",")} == wanted)


def _at_least(least: int, *, value: int | None = None, forever: bool = False) -> Need:
    return Need(
        value=str(max(least, value or 0)),
        needed=f"at least {least}",
        safe=lambda found: int(found) >= least or (forever and int(found) == _FOREVER),
    )


def _at_most(value: int, most: int) -> Need:
    return Need(value=str(value), needed=f"at most {most}", safe=lambda found: int(found) <= most)
