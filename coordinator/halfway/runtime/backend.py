"""The coordinator on a real Kafka: everything below the REST layer, started in order and stopped in reverse."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Final

import structlog

from halfway.checkback import AllowedHosts, HttpCheckCaller
from halfway.domain.errors import ConfigurationError, KafkaUnavailableError
from halfway.kafka.log.cursors import KafkaCursors
from halfway.kafka.log.group_registry import KafkaGroups
from halfway.kafka.log.half_log import KafkaHalfLog
from halfway.kafka.log.owners import KafkaOwners
from halfway.kafka.ownership.cluster import KafkaCluster
from halfway.kafka.topics.metadata import Destinations
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.peers import HttpPeers
from halfway.runtime.scheduler import ScannedShards, ScanScheduler, SystemClock
from halfway.service.access import OpenAccess
from halfway.service.coordinator import Coordinator

if TYPE_CHECKING:
    from halfway.kafka.clients.config import KafkaConfig
    from halfway.kafka.ownership.membership import MembershipStatus
    from halfway.runtime.settings import Settings
    from halfway.service.ports import Observer, Owners

log = structlog.get_logger(__name__)

_RETRY_S: Final = 2.0
_SAY_AFTER_S: Final = 5.0
_GROUPS_READ_S: Final = 30.0
_WATCH_EVERY_S: Final = 60.0
_LOOK_EVERY_S: Final = 1.0
_SAY_AGAIN_S: Final = 600.0
_REFUSALS: Final = ("TRANSACTIONAL_ID_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED")


class Backend:
    """What runs below the REST layer."""

    def __init__(
        self,
        coordinator: Coordinator,
        membership_status: Callable[[], MembershipStatus],
        topics: InternalTopics,
        *,
        prefix: str,
    ) -> None:
        """Keep what the health port asks for."""
        self.coordinator = coordinator
        self._prefix = prefix
        self.unsafe: tuple[str, ...] = ()
        """What has become unsafe of the internal topics since the start."""
        self.leave_by: float | None = None
        """When the shards must have been released, on the loop's clock; set when the stop begins."""
        self._status = membership_status
        self._topics = topics

    @property
    def status(self) -> MembershipStatus:
        """Where this instance stands in the cluster."""
        return self._status()

    def not_ready(self) -> list[str]:
        """Return why this instance should get no requests; nothing where it should.

        Shards that cannot be acquired are no reason as long as others are served.
        """
        status = self._status()
        if not status.joined:
            return [f"it has not joined the group of instances yet{_because(status.last_error)}"]
        in_trouble = {trouble.shard for trouble in status.troubles}
        if starting := [shard for shard in status.acquiring if shard not in in_trouble]:
            return [f"it is recovering shards {', '.join(map(str, starting))}{_because(status.last_error)}"]
        if in_trouble and not status.owned:
            return ["it serves no shard, as none of those assigned to it could be acquired"]
        return list(self.unsafe)

    def demand_permission(self) -> None:
        """Raise ConfigurationError if Kafka does not let this instance begin: to try again would not help.

        Ask it until this instance is ready for the first time; later on it is an operator's mistake to mend.
        """
        status = self._status()
        refused = next((code for code in _REFUSALS if code in (status.last_error or "")), None)
        if refused is not None and status.incarnation is None:
            raise ConfigurationError(
                f"Kafka refuses halfway's transactions ({refused}): grant Write and Describe on transactional ids that "
                f"begin with {self._prefix!r}, and IdempotentWrite on the cluster (ACLs), or set HALFWAY_KAFKA_PREFIX"
            )

    async def watch(self) -> None:
        """Verify the internal topics again and again; what is unsafe is logged and shown, never altered."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            try:
                problems = await self._topics.watch()
            except (ConfigurationError, KafkaUnavailableError) as error:
                log.warning("topics_not_verified", error=error.detail)
                continue
            self.unsafe = tuple(str(problem) for problem in problems)
            for problem in self.unsafe:
                log.error("topic_unsafe", problem=problem)


def _because(error: str | None) -> str:
    return "" if error is None else f" ({error})"


async def wait_for_topics(topics: InternalTopics, bootstrap: str) -> None:
    """Create or verify the internal topics, however long Kafka cannot be reached; ConfigurationError if unsafe."""
    while True:
        asking = asyncio.ensure_future(topics.ensure())
        try:
            while not (await asyncio.wait({asking}, timeout=_SAY_AFTER_S))[0]:
                log.warning("kafka_does_not_answer_yet", bootstrap_servers=bootstrap)
            asking.result()
        except asyncio.CancelledError:
            asking.cancel()
            raise
        except KafkaUnavailableError as error:
            log.warning("kafka_not_reachable", bootstrap_servers=bootstrap, error=error.detail, again_in_s=_RETRY_S)
            await asyncio.sleep(_RETRY_S)
        else:
            return


@asynccontextmanager
async def running(settings: Settings, config: KafkaConfig, observer: Observer) -> AsyncIterator[Backend]:
    """Run everything below the REST layer; at the end shards are released and what is in flight is finished.

    Raises:
        ConfigurationError: an unsafe topic, wrong credentials, a missing ACL.

    """
    clock = SystemClock()
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        topics = InternalTopics(config, observer.skipped_record)
        stack.callback(topics.close)
        await wait_for_topics(topics, config.properties["bootstrap.servers"])

        groups = await _groups(stack, config, observer)
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
        destinations = Destinations(config)
        cluster = KafkaCluster(config, observer, destinations, cursors)
        caller = await stack.enter_async_context(_check_caller(settings))
        coordinator = Coordinator(
            limits=settings.limits(),
            lane=cluster.lane,
            half_log=half_log,
            cursors=cursors,
            groups=groups,
            topics=destinations,
            caller=caller,
            authority=OpenAccess(),
            clock=clock,
            observer=observer,
            owners=owners,
            peers=peers,
        )
        scheduler = ScanScheduler(coordinator, clock, interval_s=settings.scan_interval_s)
        stack.push_async_callback(scheduler.stop)
        scheduler.start()

        backend = Backend(coordinator, lambda: cluster.membership.status, topics, prefix=config.prefix)

        async def leave() -> None:
            await coordinator.drain()
            deadline = backend.leave_by or loop.time() + settings.shutdown_timeout_s
            await cluster.membership.stop(deadline=deadline)

        stack.push_async_callback(leave)
        await cluster.membership.start(ScannedShards(coordinator.listener, scheduler.arm, scheduler.disarm))
        watching = asyncio.create_task(backend.watch())
        stack.callback(watching.cancel)
        if peers is None:
            warning = asyncio.create_task(_warn_of_others(backend, owners))
            stack.callback(warning.cancel)
        yield backend


def check_authorities(settings: Settings) -> ssl.SSLContext | None:
    """Return what endpoints' certificates are judged by, None for the system's; ConfigurationError for no PEM file."""
    authorities = settings.check_ca_file
    try:
        return None if authorities is None else ssl.create_default_context(cafile=authorities)
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"HALFWAY_CHECK_CA_FILE {str(authorities)!r} holds no certificate in PEM: {error}"
        ) from None


def _check_caller(settings: Settings) -> HttpCheckCaller:
    return HttpCheckCaller(
        timeout_s=settings.check_timeout_s,
        connect_timeout_s=settings.check_connect_timeout_s,
        demand_nonce=settings.check_demand_nonce,
        urls=AllowedHosts(settings.check_hosts, settings.check_networks),
        ssl_context=check_authorities(settings),
    )


async def _peers(stack: AsyncExitStack, settings: Settings) -> HttpPeers | None:
    if settings.peer_credential is None:
        log.info("forwarding_off", reason="HALFWAY_PEER_CREDENTIAL is not set: this is right for one instance only")
        return None
    return await stack.enter_async_context(HttpPeers(settings.peer_credential.get_secret_value()))


async def _warn_of_others(backend: Backend, owners: Owners) -> None:
    """Warn if another instance serves shards that requests to this one do not reach."""
    count = backend.coordinator.shards.count
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        if backend.not_ready():
            continue  # a former owner's record may stand until the shard is acquired
        others = {hint.url for shard in range(count) if (hint := owners.find(shard)) is not None}
        if others:
            log.warning(
                "other_instances_are_not_asked",
                others=sorted(others),
                remedy="set HALFWAY_PEER_CREDENTIAL to the same secret on every instance",
            )
            await asyncio.sleep(_SAY_AGAIN_S)


async def _groups(stack: AsyncExitStack, config: KafkaConfig, observer: Observer) -> KafkaGroups:
    """Read the groups, however long Kafka cannot be reached."""
    loop = asyncio.get_running_loop()
    while True:
        groups = KafkaGroups(config, observer)
        try:
            await groups.start(deadline=loop.time() + _GROUPS_READ_S)
        except KafkaUnavailableError as error:
            log.warning("groups_not_read", error=error.detail, again_in_s=_RETRY_S)
            await groups.stop()
            await asyncio.sleep(_RETRY_S)
        else:
            stack.push_async_callback(groups.stop)
            return groups
