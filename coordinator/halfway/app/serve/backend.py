"""The coordinator on a real Kafka: starts everything below the HTTP layer, and stops it in reverse order.

An instance is ready after its first recovery, if it can serve requests or forward them (docs/operating.md#health).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from halfway.app.serve.process import supervised
from halfway.app.serve.scheduler import ScanScheduler, SystemClock
from halfway.app.settings import Settings
from halfway.checks import Destinations, HttpCheckCaller
from halfway.coordinator.access import KeyedAccess, Keys, OpenAccess
from halfway.coordinator.coordinator import Coordinator
from halfway.coordinator.ports import Authority, Clock, Observer, OwnerHint, Owners
from halfway.coordinator.queries.activity import Activity
from halfway.coordinator.queries.queries import LATE_S, TailFreshness
from halfway.coordinator.records import HealthWarning
from halfway.coordinator.tls import Authorities, Trust
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.log.compacted_table import CompactedTable, KafkaOwners
from halfway.kafka.log.cursors import KafkaCursors
from halfway.kafka.log.half_log import KafkaHalfLog
from halfway.kafka.log.history import KafkaHistory
from halfway.kafka.log.registries import KafkaAuditTrail, KafkaGroups, KafkaKeys
from halfway.kafka.ownership.membership import KafkaCluster, MembershipStatus
from halfway.kafka.topics.metadata import TopicMetadata
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.peers import HttpPeers
from halfway.protocol.errors import ConfigurationError, KafkaUnavailableError
from halfway.protocol.keys import CheckSecrets, MasterSecret
from halfway.protocol.principal import PrincipalKind

_WATCH_S: Final = 1.0


class Readiness:
    """What a load balancer needs to know of this instance.

    What can happen to all instances at once makes none unready, except that Kafka hangs for longer than a session: a
    load balancer without any ready server refuses every call, also those that the instances could serve.
    """

    def __init__(
        self,
        status: Callable[[], MembershipStatus],
        others: Callable[[], Sequence[OwnerHint]],
        reaches: Callable[[OwnerHint], Awaitable[bool]],
        writer_trouble: Callable[[], str | None] = lambda: None,
        kafka_age_s: Callable[[], float] = float,
    ) -> None:
        """Take the functions that return the membership and the other owners, and that try to connect to one.

        `writer_trouble` returns why this instance can store no prepare, although Kafka may take them of others;
        `kafka_age_s` how long ago Kafka was last read.
        """
        self._status = status
        self._others = others
        self._reaches = reaches
        self._writer_trouble = writer_trouble
        self._kafka_age_s = kafka_age_s
        self._has_started = False
        self._is_cut_off = False
        """Whether no other owner could be reached when this instance tried last."""

    def starting(self) -> str | None:
        """Return what the first recovery still waits for; None once it is finished, for as long as this process runs.

        A shard that cannot be acquired is not waited for.
        """
        if not self._has_started:
            reason = unfinished(self._status())
            if reason is not None:
                return reason
            self._has_started = True
        return None

    def reason(self) -> str | None:
        """Return why this instance should get no requests; None if it should."""
        status = self._status()
        if (starting := self.starting()) is not None:
            return starting
        if status.too_old is not None:
            # It could forward, but a rollout of a release that can serve nothing must not go on.
            return f"this instance is of a release that is too old ({status.too_old})"
        if (trouble := self._writer_trouble()) is not None or status.owned:
            return trouble
        return self._cannot_forward(status)

    def _cannot_forward(self, status: MembershipStatus) -> str | None:
        if not self._others():
            return f"{_idle(status)}, and knows no other instance that it could forward calls to"
        if self._is_cut_off:
            return f"{_idle(status)}, and reaches no other instance that it could forward calls to"
        for silent in silence(self._kafka_age_s()):  # it does not learn who owns the shards now
            return f"{silent.detail}, and serves no shard"
        return None

    async def watch(self) -> None:
        """While this instance serves no shard, find out whether it reaches any other owner."""
        while True:
            await asyncio.sleep(_WATCH_S)
            self._is_cut_off = not self._status().owned and not await self._reaches_any()

    async def _reaches_any(self) -> bool:
        for owner in self._others():
            if await self._reaches(owner):
                return True
        return False


def unfinished(status: MembershipStatus) -> str | None:
    """Return what keeps this instance from serving its shards; None if it serves all that it can acquire."""
    if not status.joined:
        return f"this instance has not joined the group of instances yet{_in_brackets(status.last_error)}"
    failing = {trouble.shard for trouble in status.troubles}
    if recovering := [shard for shard in status.acquiring if shard not in failing]:
        shards = ", ".join(map(str, recovering))
        return f"this instance is recovering shards {shards}{_in_brackets(status.last_error)}"
    return None


def _idle(status: MembershipStatus) -> str:
    if (reason := unfinished(status)) is not None:
        return f"{reason}, serves no shard"
    if status.troubles:
        return "this instance serves no shard, because none of the shards assigned to it could be acquired"
    return "this instance serves no shard, because none is assigned to it"


def _in_brackets(error: str | None) -> str:
    return "" if error is None else f" ({error})"


def check_authorities(settings: Settings) -> Trust:
    """Return what endpoints must be vouched for by; raises ConfigurationError as `trusting` does."""
    return trusting("HALFWAY_CHECK_CA_FILE", settings.check_ca_file)


def trusting(setting: str, file: Path | None) -> Trust:
    """Return a function that gives the TLS context of a new connection: True, the system's authorities, without a file.

    Raises ConfigurationError: the file has no certificate in PEM format.
    """
    return (lambda: True) if file is None else Authorities(setting, file).current


def check_caller(settings: Settings, secrets_of: Callable[[str], Sequence[bytes]] | None = None) -> HttpCheckCaller:
    """Return a caller that signs checks with the secrets of their group. It has opened no connection yet.

    Raises ConfigurationError as `check_authorities` does.
    """
    return HttpCheckCaller(
        timeout_s=settings.check_timeout_s,
        connect_timeout_s=settings.check_timeout_s * 0.3,
        demand_nonce=settings.check_demand_nonce,
        secrets_of=secrets_of,
        destinations=Destinations(
            hosts=settings.check_hosts, networks=settings.check_networks, also_networks=settings.check_also_networks
        ),
        trust=check_authorities(settings),
        proxy=None if settings.check_proxy is None else settings.check_proxy.get_secret_value(),
    )


log = structlog.get_logger(__name__)

Table = TypeVar("Table", bound=CompactedTable[Any])

_RETRY_S: Final = 2.0
_WARN_AFTER_S: Final = 5.0
_TABLE_READ_S: Final = 30.0
_TOPICS_CHECK_S: Final = 60.0
_OTHERS_CHECK_S: Final = 1.0
STOP_S: Final = 20.0
"""The limit of a stop after the drain. With the default drain and a margin it fits into the usual grace of 30 s."""
_OTHERS_WARN_AGAIN_S: Final = 600.0
_KEYS_LATE_S: Final = 5.0
WARNINGS: Final = ("kafka", "topics", "log", "keys", "tail", "event_loop")
"""The checks that can warn."""
_AUTHORIZATION_ERRORS: Final = ("TRANSACTIONAL_ID_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED")


def silence(seconds: float) -> list[HealthWarning]:
    """Return the warning that Kafka has not answered for so long, nothing if it is not long."""
    detail = f"this instance has read nothing from Kafka for {seconds:.0f} s"
    return [HealthWarning(check="kafka", detail=detail)] if seconds > LATE_S else []


class Backend:
    """Everything below the REST layer."""

    def __init__(
        self,
        coordinator: Coordinator,
        membership_status: Callable[[], MembershipStatus],
        topics: InternalTopics,
        readiness: Readiness,
        tail: TailFreshness,
        *,
        prefix: str,
        keys: KafkaKeys | None = None,
        kafka_age_s: Callable[[], float] = float,
    ) -> None:
        """Store the parts that the health port needs. `keys` is None if callers need no keys.

        `kafka_age_s` returns how long ago Kafka was last read.
        """
        self._kafka_age_s = kafka_age_s
        self.keys = keys
        self.tail = tail
        self.coordinator = coordinator
        self.readiness = readiness
        self._prefix = prefix
        self.unsafe: tuple[str, ...] = ()
        """Problems of the internal topics that appeared after the start."""
        self.leave_by: float | None = None
        """The deadline for releasing the shards, on the event loop's clock; set when the stop begins."""
        self._status = membership_status
        self._topics = topics

    @property
    def status(self) -> MembershipStatus:
        """This instance's membership of the cluster."""
        return self._status()

    def warnings(self) -> list[HealthWarning]:
        """Return what is unsafe here although this instance may be ready: it can be the same on all instances.

        Each `check` is one of `WARNINGS`.
        """
        found = silence(self._kafka_age_s())
        found += [HealthWarning(check="topics", detail=problem) for problem in self.unsafe]
        shards = self.coordinator.shards
        found += [HealthWarning(check="log", detail=detail) for detail in shards.losses.warnings(shards.unwritten)]
        if self.keys is not None and self.keys.age_s > _KEYS_LATE_S:
            detail = f"this instance has not been able to read revocations of keys for {self.keys.age_s:.0f} s"
            found.append(HealthWarning(check="keys", detail=detail))
        if self.tail.is_late:
            detail = f"this instance has not been able to read its shards of half for {self.tail.age_s:.0f} s"
            found.append(HealthWarning(check="tail", detail=detail))
        return found

    def not_acquired_s(self) -> dict[str, float]:
        """Return for how long each shard that is assigned to this instance could not be acquired."""
        now = time.time()
        return {str(trouble.shard): max(0.0, now - trouble.since) for trouble in self.status.troubles}

    def demand_permission(self) -> None:
        """Raise ConfigurationError if Kafka refuses what this instance needs to start: a retry would not help.

        Call it until this instance is ready for the first time. After that, the operator must restore the ACLs.
        """
        status = self._status()
        if status.refused is not None:
            raise ConfigurationError(status.refused)
        code = next((code for code in _AUTHORIZATION_ERRORS if code in (status.last_error or "")), None)
        if code is not None and status.incarnation is None:
            raise ConfigurationError(
                f"Kafka refuses halfway's transactions ({code}): grant Write and Describe on transactional ids that "
                f"start with {self._prefix!r}, and IdempotentWrite on the cluster (ACLs), or set HALFWAY_KAFKA_PREFIX"
            )

    async def watch(self) -> None:
        """Verify the internal topics periodically. Problems are logged and shown, but nothing is changed."""
        while True:
            await asyncio.sleep(_TOPICS_CHECK_S)
            try:
                problems = await self._topics.watch()
            except (ConfigurationError, KafkaUnavailableError) as error:
                log.warning("topics_not_verified", error=error.detail)
                continue
            except Exception:
                # Whatever it is, the next verification may succeed, and the shards can be served meanwhile.
                log.exception("topics_not_verified")
                continue
            self.unsafe = tuple(map(str, problems))
            for problem in problems:
                log.error("topic_unsafe", problem=str(problem))


async def wait_for_topics(topics: InternalTopics, bootstrap: str) -> None:
    """Create or verify the internal topics. Wait for Kafka as long as it cannot be reached.

    Raises ConfigurationError: a topic is unsafe.
    """
    while True:
        ensure_task = asyncio.ensure_future(topics.ensure())
        try:
            while not (await asyncio.wait({ensure_task}, timeout=_WARN_AFTER_S))[0]:
                log.warning("kafka_does_not_answer_yet", bootstrap_servers=bootstrap)
            ensure_task.result()
        except asyncio.CancelledError:
            ensure_task.cancel()
            raise
        except KafkaUnavailableError as error:
            log.warning("kafka_not_reachable", bootstrap_servers=bootstrap, error=error.detail, again_in_s=_RETRY_S)
            await asyncio.sleep(_RETRY_S)
        else:
            return


@asynccontextmanager
async def running_backend(settings: Settings, config: KafkaConfig, observer: Observer) -> AsyncIterator[Backend]:
    """Run everything below the REST layer. At the end, finish the work in flight and release the shards.

    Raises ConfigurationError: a topic is unsafe, the credentials are wrong, or an ACL is missing.
    """
    clock = SystemClock()
    observer = Activity.around(observer, clock)
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        topics = InternalTopics(config, observer.skipped_record)
        stack.callback(topics.close)
        await wait_for_topics(topics, config.properties["bootstrap.servers"])

        groups = await _read(stack, lambda: KafkaGroups(config, observer))
        authority, keys, key_store = await _access(stack, settings, config, observer, clock)
        half_log = KafkaHalfLog(config, observer)
        stack.push_async_callback(half_log.stop)
        await half_log.start()
        cursors = KafkaCursors(config, observer)
        stack.push_async_callback(cursors.stop)
        await cursors.start()
        owners = KafkaOwners(config, observer.skipped_record)
        stack.push_async_callback(owners.stop)
        await owners.start()
        peers = await _peers(stack, settings)
        destinations = TopicMetadata(config)
        cluster = KafkaCluster(config, observer, destinations, cursors)
        half_log.on_lost_sequence = cluster.membership.lost_records
        audit_trail = KafkaAuditTrail(config, observer)
        stack.push_async_callback(audit_trail.stop)
        await audit_trail.start()
        check_secrets = CheckSecrets(settings.master_secrets)
        caller = await stack.enter_async_context(check_caller(settings, check_secrets.of))
        coordinator = Coordinator(
            limits=settings.service_limits(),
            lane=cluster.lane,
            half_log=half_log,
            cursors=cursors,
            groups=groups,
            topics=destinations,
            caller=caller,
            authority=authority,
            keys=keys,
            clock=clock,
            observer=observer,
            owners=owners,
            peers=peers,
            check_secrets=check_secrets,
            audit_trail=audit_trail,
            history=KafkaHistory(config),
            instance=config.instance_url,
        )
        scheduler = ScanScheduler(coordinator, clock, interval_s=settings.scan_interval_s)
        stack.push_async_callback(scheduler.stop)
        scheduler.start()

        def status() -> MembershipStatus:
            return cluster.membership.status

        tail = TailFreshness(coordinator.shards, half_log)

        def kafka_age_s() -> float:
            return min(groups.age_s, tail.least_age_s)

        readiness = Readiness(
            status,
            coordinator.other_owners,
            _alone if peers is None else peers.reaches,
            lambda: half_log.trouble,
            kafka_age_s,
        )
        parts = coordinator, status, topics, readiness, tail
        backend = Backend(*parts, prefix=config.prefix, keys=key_store, kafka_age_s=kafka_age_s)

        async def leave() -> None:
            await coordinator.drain()
            deadline = backend.leave_by or loop.time() + STOP_S
            await cluster.membership.stop(deadline=deadline)

        stack.push_async_callback(leave)
        await cluster.membership.start(coordinator.shards)
        for watch in (backend.watch, readiness.watch, tail.watch, coordinator.statistics.watch):
            watch_task = supervised(watch())
            stack.callback(watch_task.cancel)
        if peers is None:
            warn_task = supervised(_warn_of_others(backend, owners))
            stack.callback(warn_task.cancel)
        yield backend


async def _peers(stack: AsyncExitStack, settings: Settings) -> HttpPeers | None:
    if not settings.peer_credentials:
        log.info("forwarding_off", reason="HALFWAY_PEER_CREDENTIAL is not set, which is right only for one instance")
        return None
    trust = trusting("HALFWAY_PEER_CA_FILE", settings.peer_ca_file)
    return await stack.enter_async_context(HttpPeers(*settings.peer_credentials, trust=trust))


async def _alone(_: OwnerHint) -> bool:
    """Return False: without peers, no other instance is ever called."""
    return False


async def _warn_of_others(backend: Backend, owners: Owners) -> None:
    """Warn if another instance serves shards: requests to this instance do not reach them."""
    count = backend.coordinator.shards.count
    while True:
        await asyncio.sleep(_OTHERS_CHECK_S)
        if unfinished(backend.status) is not None:
            continue  # until this instance has acquired its shards, the records may name their former owners
        others = {hint.url for shard in range(count) if (hint := owners.find(shard)) is not None}
        if others:
            log.warning(
                "other_instances_are_not_asked",
                others=sorted(others),
                remedy="set HALFWAY_PEER_CREDENTIAL to the same secret on every instance",
            )
            await asyncio.sleep(_OTHERS_WARN_AGAIN_S)


async def _access(
    stack: AsyncExitStack, settings: Settings, config: KafkaConfig, observer: Observer, clock: Clock
) -> tuple[Authority, Keys | None, KafkaKeys | None]:
    """Return the authority over callers, with a master secret the service for keys, and if they are needed the keys."""
    if not settings.access_control:
        log.warning("open_access", reason="everybody who can reach the API may do everything")
    if not settings.master_secrets:
        return OpenAccess(), None, None
    store = await _read(stack, lambda: KafkaKeys(config, observer))
    secrets = [MasterSecret(master) for master in settings.master_secrets]
    operator_key = None if settings.operator_key is None else settings.operator_key.get_secret_value()
    keyed = KeyedAccess(
        store.table,
        secrets,
        clock,
        first_operator=operator_key,
        hide_payloads=settings.hide_payloads_from_operators,
        count_refusal=observer.refused_caller,
        keys_age_s=lambda: store.age_s,
    )
    if operator_key is None and not any(key.kind is PrincipalKind.OPERATOR for key in store.table.all()):
        log.warning("no_operator", remedy="set HALFWAY_OPERATOR_KEY to the output of halfway keys generate")
    authority = keyed if settings.access_control else OpenAccess(keyed)
    keys = Keys(authority, store, secrets[0], clock, previous=secrets[1:])
    return authority, keys, store if settings.access_control else None


async def _read(stack: AsyncExitStack, new_table: Callable[[], Table]) -> Table:
    """Read a table that every instance follows. Wait for Kafka as long as it cannot be reached."""
    loop = asyncio.get_running_loop()
    while True:
        table = new_table()
        try:
            await table.start(deadline=loop.time() + _TABLE_READ_S)
        except KafkaUnavailableError as error:
            log.warning(table.not_read_event, error=error.detail, again_in_s=_RETRY_S)
            await table.stop()
            await asyncio.sleep(_RETRY_S)
        else:
            stack.push_async_callback(table.stop)
            return table
