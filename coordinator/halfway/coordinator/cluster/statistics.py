"""The statistics of all instances. They name the shards that are unavailable (docs/api.md#statistics).

Each instance tells what it has: the counts of its shards, the totals of its metrics, and its failures. The reader makes
rates, from the difference of two totals.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final
from zlib import crc32

import msgspec

from halfway.coordinator.checkback.dispatcher import CheckDispatcher
from halfway.coordinator.cluster.forward import Forwarder
from halfway.coordinator.ports import Authority, Clock, Lane, OwnerHint
from halfway.coordinator.queries.activity import MAX_ENTRIES, Activity
from halfway.coordinator.records import (
    Away,
    Counts,
    Failures,
    FiguresCall,
    GroupFigures,
    HealthWarning,
    InstanceFigures,
    InstanceState,
    ShardFigures,
    ShardState,
    Statistics,
    Totals,
)
from halfway.coordinator.requests import Moment, moment
from halfway.coordinator.shards.groups import Groups
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.protocol.errors import HalfwayError
from halfway.protocol.principal import ANYBODY, PEER, Permission, Principal

MAX_GROUPS: Final = 100
"""Groups in the statistics; those with the most parked and pending transactions."""
_OF_INSTANCE: Final = 500
_ASK_S: Final = 3.0
_FRESH_S: Final = 0.5
_SAMPLE_MS: Final = 5_000
_SAMPLES: Final = 180  # 15 minutes
_HIDDEN: Final = "an instance does not answer"
"""The detail that a group sees. It does not learn the addresses of instances."""


class ClusterStatistics:
    """Gathers the figures of all instances. Concurrent callers share one result."""

    def __init__(
        self,
        authority: Authority,
        shards: ShardTable,
        groups: Groups,
        checks: CheckDispatcher,
        activity: Activity,
        lane: Lane,
        forwarder: Forwarder,
        clock: Clock,
    ) -> None:
        self._authority = authority
        self._shards = shards
        self._groups = groups
        self._checks = checks
        self._activity = activity
        self._lane = lane
        self._forwarder = forwarder
        self._clock = clock
        self.instance = ""
        """The URL of this instance."""
        self.warnings: Callable[[], Sequence[HealthWarning]] = tuple
        """What is unsafe on this instance."""
        self.totals: Callable[[str | None], Totals] = lambda _: Totals()
        """The totals of this instance's metrics: of one group, or of all."""
        self._samples: deque[Totals] = deque(maxlen=_SAMPLES)
        self._shared: dict[tuple[str | None, bool], tuple[float, asyncio.Task[Statistics]]] = {}

    async def watch(self) -> None:
        """Keep the totals of every fifth second for a while, so that a chart is filled when its page opens."""
        while True:
            now = self._clock.now_ms()
            await asyncio.sleep((_SAMPLE_MS - now % _SAMPLE_MS) / 1000)
            at = (now // _SAMPLE_MS + 1) * _SAMPLE_MS
            self._samples.append(msgspec.structs.replace(self.totals(None), at=Moment(at)))

    async def gather(
        self, *, group: str | None = None, samples: bool = False, principal: Principal = ANYBODY
    ) -> Statistics:
        """Return the figures of one group or of everything, up to half a second old: concurrent callers share them.

        Samples are of everything.
        """
        self._authority.require(principal, Permission.READ_STATISTICS, group)
        now, wanted = asyncio.get_running_loop().time(), (group, samples and group is None)
        self._shared = {key: shared for key, shared in self._shared.items() if now - shared[0] < _FRESH_S}
        shared = self._shared.get(wanted)
        if shared is None:
            shared = self._shared[wanted] = (now, asyncio.create_task(self._gather(*wanted)))
        return await asyncio.shield(shared[1])

    async def _gather(self, group: str | None, samples: bool) -> Statistics:  # noqa: FBT001 - of a key
        call = FiguresCall(group=group, samples=samples)
        owners = self._forwarder.others()
        until = asyncio.get_running_loop().time() + _ASK_S
        answers: list[Any] = await asyncio.gather(
            *(self._forwarder.ask(owner, call, deadline=until, principal=PEER) for owner in owners),
            return_exceptions=True,
        )
        silent: dict[str, str] = {}
        instances = [self.here(call)]
        for owner, answer in zip(owners, answers, strict=True):
            if isinstance(answer, InstanceFigures):
                instances.append(msgspec.structs.replace(answer, url=owner.url))
            elif isinstance(answer, HalfwayError):
                silent[owner.url] = answer.detail
            elif isinstance(answer, BaseException):
                raise answer
        served = {shard.shard: instance.url for instance in instances for shard in instance.shards}
        away = tuple(self._away(number, silent) for number in range(self._shards.count) if number not in served)
        groups = _merge_groups(figures for instance in instances for figures in instance.groups)
        at, starts = Moment(self._clock.now_ms()), sorted(instance.since for instance in instances)
        statistics = Statistics(
            at=at,
            complete=not away,
            away=away,
            totals=_counts(instances),
            counted=_add_up(at, [instance.counted for instance in instances]),
            counted_by=f"{crc32(repr(starts).encode()):08x}",
            samples=tuple(_add_samples(instances)),
            groups=tuple(groups[:MAX_GROUPS]),
            groups_left_out=max(0, len(groups) - MAX_GROUPS),
        )
        if group is not None:
            hidden = tuple(msgspec.structs.replace(one, instance=None, detail=_HIDDEN) for one in away)
            return msgspec.structs.replace(statistics, away=hidden)
        figures = {shard.shard: msgspec.structs.asdict(shard) for instance in instances for shard in instance.shards}
        return msgspec.structs.replace(
            statistics,
            instances=tuple(map(_state_of, instances)),
            shards=tuple(
                ShardState(**{"shard": number, "instance": served.get(number), **figures.get(number, {})})
                for number in range(self._shards.count)
            ),
            failures=_failures(instances),
        )

    def _away(self, number: int, silent: dict[str, str]) -> Away:
        owner: OwnerHint | None = self._forwarder.owner_of(number)
        if owner is None:
            return Away(shard=number, instance=None, detail="it is being recovered or moved")
        return Away(shard=number, instance=owner.url, detail=silent.get(owner.url, "it is being moved"))

    # --- this instance

    async def answer(self, call: FiguresCall, _: float, principal: Principal) -> InstanceFigures:
        self._authority.require(principal, Permission.READ_STATISTICS, call.group)
        return msgspec.structs.replace(self.here(call), asked=False)

    def here(self, call: FiguresCall) -> InstanceFigures:
        """Return the figures of this instance, of everything or of one group."""
        activity, group = self._activity, call.group
        figures = InstanceFigures(
            url=self.instance,
            asked=True,
            since=activity.since,
            shards=tuple(self._shard_figures(group)),
            counted=self.totals(group),
            groups=tuple(self._group_figures(group)),
        )
        if group is not None:
            return figures
        topics, writes, skipped = activity.failing
        return msgspec.structs.replace(
            figures,
            samples=tuple(self._samples) if call.samples else (),
            resolving=len(self._shards.claims),
            last_failure=activity.lane_failure,
            topics=topics,
            writes=writes,
            quarantined=tuple(self._lane.quarantined(MAX_ENTRIES)),
            skipped=skipped,
            warnings=tuple(self.warnings()),
        )

    def held_back(self) -> dict[str, int]:
        """Return how many ends, topics and transactions the lane does not write for now, the latest 100 of each."""
        _, writes, _ = self._activity.failing
        apart = self._lane.quarantined(MAX_ENTRIES)
        topics = sum(one.id is None for one in apart)
        return {"refused_end": len(writes), "topic": topics, "transaction": len(apart) - topics}

    def _shard_figures(self, group: str | None) -> Iterable[ShardFigures]:
        for figures in self._shards.figures():
            pending, parked = (0, 0) if group is None else self._shards.counts_here(group, figures.shard)
            yield figures if group is None else ShardFigures(shard=figures.shard, pending=pending, parked=parked)

    def _group_figures(self, group: str | None) -> Iterable[GroupFigures]:
        counts = self._shards.group_counts()
        names = [group] if group is not None else [known.name for known in self._groups.all()]
        if len(names) > _OF_INSTANCE:
            names.sort(key=lambda name: sum(counts.get(name, (0, 0))), reverse=True)
        for name in names[:_OF_INSTANCE]:
            pending, parked = counts.get(name, (0, 0))
            running, due, until, _ = self._checks.figures(name)
            yield GroupFigures(
                group=name,
                pending=pending,
                parked=parked,
                checks_in_flight=running,
                checks_due=due,
                breaker="closed" if until is None else "open",
                breaker_until=moment(until),
                endpoints=self._activity.endpoints(name),
            )


def _counts(instances: Sequence[InstanceFigures]) -> Counts:
    shards = [shard for instance in instances for shard in instance.shards]
    return Counts(
        pending=sum(shard.pending for shard in shards),
        parked=sum(shard.parked for shard in shards),
        remembered=sum(shard.remembered for shard in shards),
        oldest_pending_s=max((shard.oldest_pending_s for shard in shards), default=0.0),
        resolving=sum(instance.resolving for instance in instances),
        committed=sum((Counter(shard.committed) for shard in shards), Counter()),
        rolled_back=sum((Counter(shard.rolled_back) for shard in shards), Counter()),
        counted_since=min((shard.counted_since for shard in shards if shard.counted_since is not None), default=None),
    )


def _add_up(at: int, parts: Iterable[Totals]) -> Totals:
    rows = [msgspec.structs.asdict(part) for part in parts]
    return Totals(**{name: sum(row[name] for row in rows) for name in Totals.__struct_fields__} | {"at": Moment(at)})


def _add_samples(instances: Sequence[InstanceFigures]) -> Iterator[Totals]:
    """Add up the samples of each moment, unless an instance has none of it that had started then."""
    rings = [(instance.since, {sample.at: sample for sample in instance.samples}) for instance in instances]
    for at in sorted({at for _, ring in rings for at in ring}):
        if all(at in ring or at < since for since, ring in rings):
            yield _add_up(at, [ring[at] for _, ring in rings if at in ring])


def _state_of(figures: InstanceFigures) -> InstanceState:
    return InstanceState(
        url=figures.url,
        asked=figures.asked,
        since=figures.since,
        shards=tuple(shard.shard for shard in figures.shards),
        resolving=figures.resolving,
        counted=figures.counted,
        last_failure=figures.last_failure,
        warnings=figures.warnings,
    )


def _failures(instances: Sequence[InstanceFigures]) -> Failures:
    return Failures(
        topics=tuple(topic for instance in instances for topic in instance.topics),
        refused=tuple(write for instance in instances for write in instance.writes),
        quarantined=tuple(
            msgspec.structs.replace(entry, instance=instance.url)
            for instance in instances
            for entry in instance.quarantined
        ),
        skipped=tuple(records for instance in instances for records in instance.skipped),
    )


def _merge_groups(parts: Iterable[GroupFigures]) -> list[GroupFigures]:
    """Add up the figures of each group over all instances; those with the most parked and pending first."""
    merged: dict[str, GroupFigures] = {}
    for part in parts:
        before = merged.get(part.group)
        if before is None:
            merged[part.group] = part
            continue
        endpoints = sorted((*before.endpoints, *part.endpoints), key=lambda endpoint: endpoint.at)
        until = max(before.breaker_until or Moment(), part.breaker_until or Moment()) or None
        merged[part.group] = GroupFigures(
            group=part.group,
            pending=before.pending + part.pending,
            parked=before.parked + part.parked,
            checks_in_flight=before.checks_in_flight + part.checks_in_flight,
            checks_due=before.checks_due + part.checks_due,
            breaker="closed" if until is None else "open",
            breaker_until=until,
            endpoints=tuple({endpoint.host: endpoint for endpoint in endpoints}.values()),
        )
    return sorted(merged.values(), key=lambda part: (-part.parked, -part.pending, part.group))
