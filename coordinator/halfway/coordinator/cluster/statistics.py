"""The statistics of all instances. They name the shards that are unavailable (docs/rest.md#statistics)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from halfway.coordinator.queries.activity import MAX_ENTRIES
from halfway.coordinator.records import (
    Away,
    Endpoint,
    FiguresCall,
    GroupFigures,
    InstanceFigures,
    ShardFigures,
    ShardPlace,
    Statistics,
    Tally,
)
from halfway.coordinator.requests import Moment, moment
from halfway.protocol.errors import HalfwayError
from halfway.protocol.principal import ANYBODY, PEER, Permission

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from halfway.coordinator.checkback.dispatcher import CheckDispatcher
    from halfway.coordinator.cluster.forward import Forwarder
    from halfway.coordinator.ports import Authority, Clock, Lane, OwnerHint
    from halfway.coordinator.queries.activity import Activity
    from halfway.coordinator.records import HealthWarning
    from halfway.coordinator.shards.groups import Groups
    from halfway.coordinator.shards.shard_table import ShardTable
    from halfway.protocol.principal import Principal


MAX_GROUPS: Final = 100
"""Groups in the statistics; those with the most parked and pending transactions."""
_OF_INSTANCE: Final = 500
_ASK_S: Final = 3.0
_FRESH_S: Final = 0.5


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
        self._shared: dict[str | None, tuple[float, asyncio.Task[Statistics]]] = {}

    async def gather(self, *, group: str | None = None, principal: Principal = ANYBODY) -> Statistics:
        """Return the figures of one group or of everything, if the caller may read them."""
        self._authority.require(principal, Permission.READ_STATISTICS, group)
        return await self.get(group)

    async def get(self, group: str | None) -> Statistics:
        """Return the figures of one group or of everything, up to half a second old: concurrent callers share them."""
        now = asyncio.get_running_loop().time()
        self._shared = {key: shared for key, shared in self._shared.items() if now - shared[0] < _FRESH_S}
        shared = self._shared.get(group)
        if shared is None:
            shared = self._shared[group] = (now, asyncio.create_task(self._gather(group)))
        return await asyncio.shield(shared[1])

    async def _gather(self, group: str | None) -> Statistics:
        here = self.here(group)
        owners = self._forwarder.others()
        until = asyncio.get_running_loop().time() + _ASK_S
        call = FiguresCall(group=group)
        answers: list[Any] = await asyncio.gather(
            *(self._forwarder.ask(owner, call, deadline=until, principal=PEER) for owner in owners),
            return_exceptions=True,
        )
        silent: dict[str, str] = {}
        instances = [here]
        for owner, answer in zip(owners, answers, strict=True):
            if isinstance(answer, InstanceFigures):
                instances.append(msgspec.structs.replace(answer, url=owner.url))
            elif isinstance(answer, HalfwayError):
                silent[owner.url] = answer.detail
            elif isinstance(answer, BaseException):
                raise answer
        places = tuple(self._places(instances))
        away = tuple(self._away(place.shard, silent) for place in places if place.figures is None)
        groups = _merge_groups(group for instance in instances for group in instance.groups)
        return Statistics(
            at=Moment(self._clock.now_ms()),
            asked=here.url,
            instances=tuple(instances),
            shards=() if group is not None else places,
            away=away,
            groups=tuple(groups[:MAX_GROUPS]),
            groups_left_out=max(0, len(groups) - MAX_GROUPS),
            ends=_add_up(tally for instance in instances for tally in instance.ends),
            checks=_add_up(tally for instance in instances for tally in instance.checks),
        )

    def _places(self, instances: list[InstanceFigures]) -> Iterable[ShardPlace]:
        served = {shard.shard: (instance.url, shard) for instance in instances for shard in instance.shards}
        for number in range(self._shards.count):
            url, figures = served.get(number, (None, None))
            yield ShardPlace(shard=number, instance=url, figures=figures)

    def _away(self, number: int, silent: dict[str, str]) -> Away:
        owner: OwnerHint | None = self._forwarder.owner_of(number)
        if owner is None:
            return Away(shard=number, instance=None, detail="it is being recovered or moved")
        return Away(shard=number, instance=owner.url, detail=silent.get(owner.url, "it is being moved"))

    # --- this instance

    async def answer(self, call: FiguresCall, _: float, principal: Principal) -> InstanceFigures:
        self._authority.require(principal, Permission.READ_STATISTICS, call.group)
        return self.here(call.group)

    def here(self, group: str | None) -> InstanceFigures:
        activity = self._activity
        topics, writes, skipped = activity.failing
        figures = InstanceFigures(
            url=self.instance,
            since=activity.since,
            shards=tuple(self._shard_figures(group)),
            prepares_per_s=activity.prepares(group),
            ends=tuple(activity.ends(group)),
            checks=tuple(activity.checks(group)),
            groups=tuple(self._group_figures(group)),
        )
        if group is not None:
            return figures
        return msgspec.structs.replace(
            figures,
            resolving=len(self._shards.claims),
            lane=activity.lane,
            topics=topics,
            writes=writes,
            quarantined=tuple(self._lane.quarantined(MAX_ENTRIES)),
            skipped=skipped,
            warnings=tuple(self.warnings()),
        )

    def _shard_figures(self, group: str | None) -> Iterable[ShardFigures]:
        for stats in self._shards.stats():
            pending, parked = stats.pending, stats.parked
            if group is not None:
                pending, parked = self._shards.counts_here(group, stats.shard)
            yield ShardFigures(
                shard=stats.shard,
                pending=pending,
                parked=parked,
                remembered=stats.ended if group is None else 0,
                oldest_pending_s=stats.oldest_pending_s if group is None else 0.0,
                half_lag=stats.half_lag if group is None else 0,
                op_lag=stats.op_lag if group is None else 0,
                due=stats.due if group is None else 0,
                strays=stats.strays if group is None else 0,
            )

    def _group_figures(self, group: str | None) -> Iterable[GroupFigures]:
        counts = self._shards.group_counts()
        names = [group] if group is not None else [known.name for known in self._groups.all()]
        if len(names) > _OF_INSTANCE:
            names.sort(key=lambda name: sum(counts.get(name, (0, 0))), reverse=True)
        for name in names[:_OF_INSTANCE]:
            pending, parked = counts.get(name, (0, 0))
            running, due, until = self._checks.figures(name)
            yield GroupFigures(
                group=name,
                pending=pending,
                parked=parked,
                prepares_per_s=self._activity.prepares(name),
                ends_per_s=sum(tally.per_s for tally in self._activity.ends(name)),
                checks_in_flight=running,
                checks_due=due,
                breaker_until=moment(until),
                endpoints=self._activity.endpoints(name),
            )


def _merge_groups(parts: Iterable[GroupFigures]) -> list[GroupFigures]:
    """Add up the figures of each group over all instances; those with the most parked and pending first."""
    merged: dict[str, GroupFigures] = {}
    for part in parts:
        before = merged.get(part.group)
        if before is None:
            merged[part.group] = part
            continue
        latest: dict[str, Endpoint] = {}
        for endpoint in sorted((*before.endpoints, *part.endpoints), key=lambda endpoint: endpoint.at):
            latest[endpoint.host] = endpoint
        merged[part.group] = GroupFigures(
            group=part.group,
            pending=before.pending + part.pending,
            parked=before.parked + part.parked,
            prepares_per_s=before.prepares_per_s + part.prepares_per_s,
            ends_per_s=before.ends_per_s + part.ends_per_s,
            checks_in_flight=before.checks_in_flight + part.checks_in_flight,
            checks_due=before.checks_due + part.checks_due,
            breaker_until=max(before.breaker_until or Moment(), part.breaker_until or Moment()) or None,
            endpoints=tuple(latest.values()),
        )
    return sorted(merged.values(), key=lambda part: (-part.parked, -part.pending, -part.ends_per_s, part.group))


def _add_up(parts: Iterable[Tally]) -> tuple[Tally, ...]:
    totals: dict[tuple[str, ...], Tally] = {}
    for part in parts:
        before = totals.get(part.names, Tally(names=part.names, total=0, per_s=0.0))
        totals[part.names] = Tally(names=part.names, total=before.total + part.total, per_s=before.per_s + part.per_s)
    return tuple(totals[key] for key in sorted(totals))
