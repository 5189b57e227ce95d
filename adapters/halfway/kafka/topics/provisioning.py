"""Creates missing internal topics and verifies existing ones; never alters one (docs/protocol.md#topics).

A record in owners has the number of shards that the topics were created for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import structlog
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public, but not for mypy
    AclOperation,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from halfway.kafka.clients.config import KafkaConfig, acl_command, acl_flags
from halfway.kafka.clients.librdkafka_events import ApiVersionWatch
from halfway.kafka.clients.reader import Place, Reader
from halfway.kafka.clients.transactional_producer import verify_transactional_ids
from halfway.kafka.records.codec import (
    KIND_LAYOUT,
    LAYOUT_KEY,
    LAYOUT_PARTITION,
    Layout,
    UndecodableError,
    decode_layout,
    encode_layout,
    record_headers,
)
from halfway.kafka.records.lane_records import Count, is_layout, note_skipped, owner_in
from halfway.kafka.topics.admin_requests import AdminRequests, demand_properties
from halfway.kafka.topics.required_config import (
    FoundTopic,
    Problem,
    TopicPlan,
    missing_topic,
    plans,
    problems,
    require_tested_shard_count,
    surplus_partitions,
)
from halfway.protocol.errors import ConfigurationError, HalfwayError, KafkaUnavailableError
from halfway.protocol.records import base_url_refusal

log = structlog.get_logger(__name__)

_POLL_S: Final = 0.1
_FLUSH_S: Final = 0.5
_MIN_S: Final = 0.5


def _read_whole(
    config: KafkaConfig,
    places: Collection[Place],
    handle: Callable[[Place, Message], None],
    deadline: float,
    check: Callable[[], None],
) -> None:
    """Read partitions of owners from their beginning to their ends."""
    # The end of a partition is reported after an empty fetch.
    with Reader(config, **{"isolation.level": "read_uncommitted", "fetch.wait.max.ms": 10}) as reader:
        reader.add(dict.fromkeys(places, OFFSET_BEGINNING))
        while not reader.at_end.issuperset(places):
            check()
            if time.monotonic() >= deadline:
                raise KafkaUnavailableError(f"{config.owners_topic} could not be read in time")
            with suppress(KafkaException):  # the deadline bounds it
                reader.read(_POLL_S, handle)


class ShardCountRecord:
    """Reads, verifies and writes the record; blocks at most until `deadline`, on `time.monotonic()`."""

    def __init__(self, config: KafkaConfig, skipped: Count, deadline: float, check: Callable[[], None]) -> None:
        """Keep the parts; `check` raises if the call was cancelled."""
        self._config = config
        self._skipped = skipped
        self._deadline = deadline
        self._check = check

    def verify(self, layout: Layout) -> None:
        """Raise ConfigurationError if the topics were created for another number of shards."""
        if layout.shards != self._config.shards:
            raise ConfigurationError(
                f"HALFWAY_SHARDS is {self._config.shards}, but the topics {self._config.prefix}* were created for "
                f"{layout.shards} shards, over which ids are hashed: set HALFWAY_SHARDS={layout.shards}, "
                "or use another HALFWAY_KAFKA_PREFIX"
            )

    def read(self) -> tuple[Layout | None, bool]:
        """Return the record in partition 0 of owners, and whether another record has overwritten it.

        Compaction removes an overwritten record, so it must be written again. The layout is None if there is no record.

        Raises:
            ConfigurationError: there is a record, and it cannot be decoded.
            KafkaUnavailableError: owners could not be read to its end in time.
        """
        place = (self._config.owners_topic, LAYOUT_PARTITION)
        layout: Layout | None = None
        refused: UndecodableError | None = None

        def handle(_: Place, message: Message) -> None:
            nonlocal layout, refused
            if message.key() == LAYOUT_KEY:
                try:
                    layout, refused = decode_layout(message.value()), None
                except UndecodableError as undecodable:
                    refused = undecodable
                    note_skipped(message, undecodable, self._skipped)

        _read_whole(self._config, [place], handle, self._deadline, self._check)
        if layout is None and refused is not None:
            raise self._undecodable_error(refused)
        return layout, refused is not None

    def write(self, overwritten: Layout | None = None) -> None:
        """Write the record from the current settings, or write the `overwritten` record again.

        Raises KafkaUnavailableError: Kafka did not confirm it in time.
        """
        failures: list[KafkaError | None] = []
        producer = self._config.make_producer(**{"message.timeout.ms": round(self._left() * 1000)})
        layout = overwritten or Layout(shards=self._config.shards, created_at=time.time_ns() // 1_000_000)
        producer.produce(
            self._config.owners_topic,
            encode_layout(layout),
            LAYOUT_KEY,
            LAYOUT_PARTITION,
            on_delivery=lambda error, _message: failures.append(error),
            headers=record_headers(KIND_LAYOUT, "", "created"),
        )
        until = time.monotonic() + self._left()
        while producer.flush(_FLUSH_S) and time.monotonic() < until:
            self._check()
        if not failures or failures[0] is not None:
            reason = failures[0].str() if failures and failures[0] else "no answer in time"
            raise KafkaUnavailableError(f"the layout could not be written to {self._config.owners_topic}: {reason}")
        log.info("layout_written", topic=self._config.owners_topic, shards=layout.shards)

    def _left(self) -> float:
        return max(_MIN_S, self._deadline - time.monotonic())

    def _undecodable_error(self, error: UndecodableError) -> ConfigurationError:
        return ConfigurationError(
            f"the layout record of {self._config.owners_topic} cannot be read ({error}): this prefix belongs to "
            f"something else, or to a later release. If neither is the case, make sure that no instance runs and "
            f"delete {self._config.owners_topic}"
        )


T = TypeVar("T")

MAX_SKEW_S: Final = 60.0
"""How far clocks may be apart (docs/operating.md#clocks)."""
_RETRY_S: Final = 0.2
_GROUP_S: Final = 2.0
_NO_TIMEOUT_S: Final = 3600.0
_VERIFICATION: Final = "transaction.partition.verification.enable"
_VERIFYING_VERSION: Final = 4
_MAX_TRANSACTION_TIMEOUT: Final = "transaction.max.timeout.ms"
_ADDED_LATER: Final = ("audit", "keys")
"""Topics that older releases did not have: if one is missing, nothing was lost."""
_NEEDED_OPERATIONS: Final = (AclOperation.READ, AclOperation.WRITE, AclOperation.DESCRIBE)


def _count_nothing(_topic: str, _reason: str) -> None:
    """Count nothing; the command line has no metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was looked at; whether it is right, None if that cannot be known yet; and what was found, or the remedy."""

    check: str
    ok: bool | None
    detail: str

    @classmethod
    def of(cls, check: str, look: Callable[[], object]) -> Finding:
        """Look: an error says what is wrong, a text what was found."""
        try:
            found = look()
        except HalfwayError as error:
            return cls(check=check, ok=False, detail=error.detail)
        return cls(check=check, ok=True, detail=found if isinstance(found, str) else "ok")


class InternalTopics:
    """The internal topics of one prefix; every call to Kafka runs on one owned thread."""

    def __init__(self, config: KafkaConfig, skipped: Count = _count_nothing) -> None:
        """Keep the configuration and the counter of skipped records; nothing connects yet."""
        self._config = config
        self._skipped = skipped
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="halfway-topics")
        self._closed = threading.Event()
        self._ignored: dict[str, int] = {}
        """The topics with surplus_partitions partitions that were logged, and their number of partitions."""

    async def ensure(self, *, timeout_s: float = 30.0) -> None:
        """Create the missing topics and verify the others.

        Raises:
            ConfigurationError: credentials, a missing ACL, an old broker, another shard count, or all unsafe settings.
            KafkaUnavailableError: no broker answered in time; try again.
        """
        await self._call(lambda session: session.ensure(), timeout_s)

    async def watch(self, *, timeout_s: float = 10.0) -> list[Problem]:
        """Verify the topics without creating any, and return what has become unsafe; for use while running.

        Raises ConfigurationError, KafkaUnavailableError: as for `ensure`; the topics could not be described.
        """
        return await self._call(lambda session: session.watch(), timeout_s)

    async def examine(self, destinations: Sequence[str], *, timeout_s: float = 30.0) -> list[Finding]:
        """Look at all that a start needs, and at the permissions on topics of others; change nothing, raise nothing."""
        return await self._call(lambda session: list(session.examine(destinations)), timeout_s)

    async def instances(self, *, timeout_s: float = 10.0) -> list[str]:
        """Return the URLs of the instances that run and own a shard; errors as for `watch`."""
        return await self._call(lambda session: session.instances(), timeout_s)

    async def plans(self, *, timeout_s: float = 10.0) -> list[TopicPlan]:
        """Return the topics as `ensure` would create them in this cluster; errors as for `watch`."""
        return await self._call(lambda session: session.plans(), timeout_s)

    def close(self) -> None:
        """End the thread; a call that waits or is under way raises KafkaUnavailableError within about a second."""
        self._closed.set()
        self._thread.shutdown(wait=False)

    async def _call(self, call: Callable[[_Session], T], timeout_s: float) -> T:
        def run() -> T:
            deadline = time.monotonic() + timeout_s
            return call(_Session(self._config, self._skipped, deadline, self._closed.is_set, self._ignored))

        return await asyncio.wrap_future(self._thread.submit(run))


class _Session:
    """One call with an admin client of its own; blocks. `deadline` is on `time.monotonic()`."""

    def __init__(
        self,
        config: KafkaConfig,
        skipped: Count,
        deadline: float,
        cancelled: Callable[[], bool],
        ignored: dict[str, int],
    ) -> None:
        self._config = config
        self._ignored = ignored
        self._skipped = skipped
        self._requests = AdminRequests(config, deadline, cancelled)
        self._is_recorded = False  # whether owners says that there was a start
        self._silent: set[int] = set()  # brokers that did not answer at their advertised addresses

    def ensure(self) -> None:
        """Create the missing topics, verify all, and write the layout record."""
        demand_properties(self._config)
        brokers = self._requests.brokers()
        self._verify_brokers(brokers)
        planned = plans(self._config, len(brokers))
        found = self._describe(planned)
        record = ShardCountRecord(self._config, self._skipped, self._requests.deadline, self._requests.check)
        layout, overwritten = record.read() if self._config.owners_topic in found else (None, False)
        if layout is not None:
            record.verify(layout)
        require_tested_shard_count(self._config, found, recorded=layout is not None)
        missing = [plan for plan in planned if plan.name not in found]
        if missing:
            lost = [plan.name for plan in missing if plan.kind not in _ADDED_LATER]
            if layout is not None and lost:
                log.warning("topics_lost", topics=lost, remedy="they are created empty")
            self._create(missing)
            found = self._describe_created(planned)
        unsafe = self._problems(planned, found, recorded=layout is not None)
        if unsafe:
            raise ConfigurationError(
                "unsafe topics:\n" + "\n".join(f"  {problem}" for problem in unsafe), problems=unsafe
            )
        for group in (self._config.cursors_group, self._config.members_group):
            self._verify_group(group)
        verify_transactional_ids(self._config, time.monotonic() + self._requests.left(), self._requests.cancelled)
        if layout is None or overwritten:
            record.write(layout)

    def plans(self) -> list[TopicPlan]:
        return plans(self._config, len(self._requests.brokers()))

    def watch(self) -> list[Problem]:
        planned = self.plans()
        return self._problems(planned, self._describe(planned), recorded=True)

    def instances(self) -> list[str]:
        owners: dict[Place, str] = {}

        def handle(place: Place, message: Message) -> None:
            if not is_layout(message):
                with suppress(UndecodableError):
                    owner = owner_in(message)
                    owners[place] = "" if owner is None or base_url_refusal(owner.url) else owner.url

        if self._described_group(self._config.members_group).members:  # else all owners are former ones
            places = [(self._config.owners_topic, shard) for shard in range(self._config.shards)]
            _read_whole(self._config, places, handle, self._requests.deadline, self._requests.check)
        return sorted({*owners.values()} - {""})

    # --- looking at everything, where a start ends with the first that is wrong

    def examine(self, destinations: Sequence[str]) -> Iterator[Finding]:
        yield Finding.of("properties of Kafka clients", lambda: demand_properties(self._config))
        brokers: list[int] = []
        yield Finding.of(f"Kafka at {self._requests.bootstrap}", lambda: brokers.extend(self._requests.brokers()))
        for broker in brokers:
            yield Finding.of(f"broker {broker}", partial(self._verify_brokers, [broker]))
        if self._silent.issuperset(brokers):
            return  # nobody answers: all else would only be that once more
        planned, found = plans(self._config, len(brokers)), dict[str, FoundTopic]()
        yield from self._permissions(f"topics {self._config.prefix}*", [plan.name for plan in planned])
        owners = self._config.owners_topic
        for plan in sorted(planned, key=lambda one: one.name != owners):  # it shows whether the others have ever been
            yield Finding.of(f"topic {plan.name}", partial(self._find, plan, found))
            if plan.name == owners in found:
                yield Finding.of("HALFWAY_SHARDS", self._verify_shards)
        for problem in problems(planned, found, bootstrap=self._config.for_tools, recorded=True):
            if problem.setting != "topic":
                yield Finding(check=f"{problem.setting} of {problem.topic}", ok=False, detail=str(problem))
        if self._config.op_topic in found:
            yield Finding.of("clock", self._verify_clock)
        for group in (self._config.cursors_group, self._config.members_group):
            yield Finding.of(f"Read and Describe on group {group}", partial(self._verify_group, group))
        until = time.monotonic() + self._requests.left()
        verify = partial(verify_transactional_ids, self._config, until, self._requests.cancelled)
        yield Finding.of(f"Write and Describe on transactional ids {self._config.prefix}*", verify)
        for name in destinations:
            yield from self._permissions(f"topic {name}", [name], reads=False)
            with suppress(HalfwayError):  # the permissions say it
                yield self._limits(name)

    def _permissions(self, what: str, names: Sequence[str], *, reads: bool = True) -> Iterator[Finding]:
        """Yield a finding for each operation: denied for one of the topics, allowed for all, or not known yet."""
        denied, known = set[str](), False
        try:
            for name in names:
                known = self._look_allowed(name, denied) or known
        except KafkaUnavailableError as error:
            yield Finding(check=f"permissions on {what}", ok=False, detail=error.detail)
            return
        for operation in ("Describe", "DescribeConfigs", "Write", *(["Read"] if reads else [])):
            command = acl_command(self._config, acl_flags(self._config, f"topic {names[0]}"), [operation])
            detail = f"allow it with {command}"
            # Whether it may be described, Kafka says of a missing topic too.
            ok = False if operation in denied else True if known or operation.startswith("Describe") else None
            if ok is not False:
                detail = "ok" if ok else f"Kafka shows it only once the topics exist; {detail}"
            yield Finding(check=f"{operation} on {what}", ok=ok, detail=detail)

    def _look_allowed(self, name: str, denied: set[str]) -> bool:
        """Add the operations that are denied on a topic; return whether there is such a topic."""
        request = self._requests.admin.describe_topics(
            TopicCollection([name]), include_authorized_operations=True, request_timeout=self._requests.left()
        )[name]
        there = True
        try:
            allowed = self._requests.result(request, "Describe", f"topic {name}").authorized_operations
            denied |= {one.name.title() for one in _NEEDED_OPERATIONS if allowed and one not in allowed}
        except KafkaException:
            there = False
        except ConfigurationError:
            denied |= {"Describe", "Read", "Write"}  # the others include Describe
        try:
            self._settings([name])
        except ConfigurationError:
            denied.add("DescribeConfigs")
        return there

    def _limits(self, name: str) -> Finding:
        """Say what a topic of others refuses."""
        check, settings = f"limits of topic {name}", self._settings([name]).get(name)
        if settings is None:
            return Finding(check=check, ok=None, detail="the topic is missing: messages to it are refused")
        keyless = " with keys, as it is compacted," if "compact" in settings["cleanup.policy"] else ""
        size, copies = f"{int(settings['max.message.bytes']):,}", settings["min.insync.replicas"]
        detail = f"it takes messages{keyless} in batches of up to {size} bytes; min.insync.replicas is {copies}"
        return Finding(check=check, ok=True, detail=detail)

    def _find(self, plan: TopicPlan, found: dict[str, FoundTopic]) -> str | None:
        """Add a topic to those found; ConfigurationError if it is lost, or is missing and cannot be created."""
        found |= self._describe([plan])
        if plan.name in found:
            return None
        if self._is_recorded and plan.kind not in _ADDED_LATER:
            raise ConfigurationError(str(missing_topic(plan.name)))
        self._create([plan], validate_only=True)
        return "it is missing: the first start creates it"

    def _verify_clock(self) -> str:
        """Compare the clock here with the newest records of op: instances and, as markers, brokers wrote them."""
        places = [TopicPartition(self._config.op_topic, shard) for shard in range(self._config.shards)]
        asked = {place: OffsetSpec.max_timestamp() for place in places}  # type: ignore[no-untyped-call]
        requests = self._requests.admin.list_offsets(asked, request_timeout=self._requests.left())
        results = (
            self._requests.result(one, "Describe", f"topic {self._config.op_topic}") for one in requests.values()
        )
        ahead_s = max(result.timestamp for result in results) / 1000 - time.time()
        if ahead_s > MAX_SKEW_S:
            raise ConfigurationError(
                f"instances or brokers have written records {ahead_s:.0f} s ahead of the clock here: set the clocks "
                "right (NTP)"
            )
        return "nothing in Kafka is ahead of the clock here"

    def _verify_shards(self) -> None:
        record = ShardCountRecord(self._config, self._skipped, self._requests.deadline, self._requests.check)
        layout, _ = record.read()
        self._is_recorded = layout is not None
        if layout is not None:
            record.verify(layout)

    def _problems(
        self, planned: Sequence[TopicPlan], found: Mapping[str, FoundTopic], *, recorded: bool
    ) -> list[Problem]:
        if recorded:
            for name, used in surplus_partitions(planned, found).items():
                if self._ignored.get(name) != found[name].partitions:
                    self._ignored[name] = found[name].partitions
                    log.warning(
                        "partitions_ignored",
                        topic=name,
                        partitions=found[name].partitions,
                        used=used,
                        reason="the number of shards was written down when the topics were created",
                    )
        return problems(planned, found, bootstrap=self._config.for_tools, recorded=recorded)

    # --- brokers and groups

    def _verify_brokers(self, brokers: Iterable[int]) -> str:
        """Refuse brokers without the verification of KIP-890, that is, of releases before 3.6; return what is unknown.

        A broker that does not show its settings, because of an ACL or because it hides them, is judged by the versions
        of its requests.
        """
        debug = self._config.properties.get("debug", "")
        watch = ApiVersionWatch(verbose=bool(debug))
        debugs = ",".join(filter(None, (ApiVersionWatch.debug, debug)))
        admin = self._requests.new_client(debug=debugs, logger=watch)
        unknown: list[str] = []
        for broker in brokers:
            resource = ConfigResource(ResourceType.BROKER, str(broker))
            request = admin.describe_configs([resource], request_timeout=self._requests.left())[resource]
            settings: dict[str, str | None] = {}
            reason = "it hides its settings"
            try:
                entries = self._requests.result(request, "DescribeConfigs", "the cluster", admin)
                settings = {name: entry.value for name, entry in entries.items()}
            except ConfigurationError as error:
                reason = error.detail  # the permission is not required
            except KafkaUnavailableError as error:
                self._silent.add(broker)
                where = "is it up, and can its address in advertised.listeners be reached from here?"
                raise KafkaUnavailableError(f"{error.detail}: broker {broker}: {where}") from error
            admin.poll(0)  # what the client has logged about the broker
            if not check_broker(broker, settings, self._config, watch.versions.get(broker)):
                log.warning("brokers_not_verified", broker=broker, reason=reason)
                unknown.append(f"whether broker {broker} is of Kafka 3.6 or later is not known: {reason}")
        return "; ".join(unknown) or "ok"

    def _verify_group(self, group: str) -> None:
        described = self._described_group(group)
        self._require_operations((AclOperation.READ,), described.authorized_operations, f"consumer group {group}")

    def _described_group(self, group: str) -> Any:
        """Describe a group. In a new cluster the first request creates the group's coordinator and gets no answer.

        Each request has a client of its own and ends with it, long before its time-out. After a request to a
        coordinator has timed out, librdkafka forgets the request but still waits for the coordinator. Then the next
        broker that appears or disappears ends the process (`Assertion eonce->refcnt > 0`).
        """
        while True:
            admin = self._requests.new_client()
            request = admin.describe_consumer_groups(
                [group], include_authorized_operations=True, request_timeout=_NO_TIMEOUT_S
            )[group]
            until = time.monotonic() + min(self._requests.left(), _GROUP_S)
            try:
                return self._requests.result(request, "Describe", f"consumer group {group}", admin, until)
            except KafkaUnavailableError:
                if self._requests.cancelled() or time.monotonic() > self._requests.deadline:
                    raise
                time.sleep(_RETRY_S)

    def _require_operations(self, needed: Sequence[Any], allowed: Sequence[Any] | None, thing: str) -> None:
        """Raise ConfigurationError if an operation is denied; if the broker reports nothing, assume it is allowed."""
        if not allowed:
            return
        denied = [operation.name.title() for operation in needed if operation not in allowed]
        if denied:
            command = acl_command(self._config, acl_flags(self._config, thing), denied)
            raise ConfigurationError(f"Kafka denies halfway {' or '.join(denied)} on {thing}: allow it with {command}")

    # --- topics

    def _describe(self, planned: Iterable[TopicPlan]) -> dict[str, FoundTopic]:
        names = [plan.name for plan in planned]
        requests = self._requests.admin.describe_topics(
            TopicCollection(names), include_authorized_operations=True, request_timeout=self._requests.left()
        )
        shapes: dict[str, Any] = {}
        for name, request in requests.items():
            try:
                shapes[name] = self._requests.result(request, "Describe", f"topic {name}")
            except KafkaException:
                continue
            self._require_operations(_NEEDED_OPERATIONS, shapes[name].authorized_operations, f"topic {name}")
        settings = self._settings(shapes)
        return {
            name: FoundTopic(
                partitions=len(shape.partitions),
                replication=min(len(partition.replicas) for partition in shape.partitions),
                settings=settings[name],
            )
            for name, shape in shapes.items()
            if name in settings
        }

    def _settings(self, names: Iterable[str]) -> dict[str, Mapping[str, str]]:
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        if not resources:
            return {}
        settings: dict[str, Mapping[str, str]] = {}
        for resource, request in self._requests.admin.describe_configs(
            resources, request_timeout=self._requests.left()
        ).items():
            try:
                entries = self._requests.result(request, "DescribeConfigs", f"topic {resource.name}")
            except KafkaException:
                continue
            settings[resource.name] = {name: entry.value for name, entry in entries.items() if entry.value is not None}
        return settings

    def _create(self, missing: Iterable[TopicPlan], *, validate_only: bool = False) -> None:
        new = [NewTopic(plan.name, plan.partitions, plan.replication, config=plan.settings) for plan in missing]
        left = self._requests.left()
        for name, request in self._requests.admin.create_topics(
            new, request_timeout=left, operation_timeout=left, validate_only=validate_only
        ).items():
            try:
                self._requests.result(request, "Create", f"topic {name}")
            except KafkaException:
                continue  # another instance was faster; its topic is verified like any other
            if not validate_only:
                log.info("topic_created", topic=name)

    def _describe_created(self, planned: Sequence[TopicPlan]) -> dict[str, FoundTopic]:
        """Describe the topics as soon as the brokers know all of them."""
        while True:
            found = self._describe(planned)
            if len(found) == len(planned):
                return found
            self._requests.check()
            if time.monotonic() > self._requests.deadline:
                raise KafkaUnavailableError("Kafka does not describe the topics that it has just created")
            time.sleep(_RETRY_S)


def check_broker(
    broker: int, settings: Mapping[str, str | None], config: KafkaConfig, add_partitions: int | None
) -> bool:
    """Raise ConfigurationError if halfway cannot use a broker's transactions; return whether it certainly can.

    `add_partitions` is the highest version of AddPartitionsToTxn that the broker knows: with the fourth, of Kafka 3.6,
    leaders ask the coordinator whether a partition is part of a transaction.
    """
    verification = settings.get(_VERIFICATION)
    if verification is None and add_partitions is not None and add_partitions < _VERIFYING_VERSION:
        raise ConfigurationError(
            f"broker {broker} is older than Kafka 3.6, whose transactions can hang or lose their order (KIP-890): "
            "upgrade it"
        )
    if verification not in (None, "true"):
        raise ConfigurationError(
            f"broker {broker}: {_VERIFICATION} is {verification}, needed true (KIP-890): set it in its configuration"
        )
    longest = settings.get(_MAX_TRANSACTION_TIMEOUT)
    if longest is not None and int(longest) < config.transaction_timeout_s * 1000:
        raise ConfigurationError(
            f"broker {broker}: {_MAX_TRANSACTION_TIMEOUT} is {longest}, needed at least the "
            f"{config.transaction_timeout_s * 1000:.0f} ms of HALFWAY_TRANSACTION_TIMEOUT_S: change one of them"
        )
    return verification is not None or add_partitions is not None
