"""Figures of all instances, put together; a shard that is away is named (docs/rest.md#statistics)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from halfway.domain.errors import HalfwayError
from halfway.domain.principal import ANYBODY, PEER, Permission
from halfway.service.activity import MOST_KEPT
from halfway.service.figures import GroupFigures, InstanceFigures, ShardFigures, ShardPlace, Statistics, Tallied
from halfway.service.job_records import Away
from halfway.service.peer_calls import FiguresCall

if TYPE_CHECKING:
    from collections.abc import Iterable

    from halfway.domain.principal import Principal
    from halfway.service.activity import Activity
    from halfway.service.checkback.dispatcher import CheckDispatcher
    from halfway.service.cluster.forward import Forwarder
    from halfway.service.ports import Authority, Clock, Lane, OwnerHint
    from halfway.service.shards.groups import Groups
    from halfway.service.shards.shard_table import ShardTable

MOST_GROUPS: Final = 100
"""Shown of all groups; those with the most to look at."""
_OF_INSTANCE: Final = 500
_ASK_S: Final = 3.0
_FRESH_S: Final = 0.5


class StatisticsDesk:
    """Gathers figures; callers at one time share one computation."""

    def __init__(
        self,
        authority: Authority,
        shards: ShardTable,
        groups: Groups,
        checks: CheckDispatcher,
        activity: Activity,
        lane: Lane,
        forwarding: Forwarder,
        clock: Clock,
    ) -> None:
        """Keep the parts."""
        self._authority = authority
        self._shards = shards
        self._groups = groups
        self._checks = checks
        self._activity = activity
        self._lane = lane
        self._forwarder = forwarding
        self._clock = clock
        self.instance = ""
        """What this instance is called."""
        self._shared: dict[str | None, tuple[float, asyncio.Task[Statistics]]] = {}

    async def gather(self, *, group: str | None = None, principal: Principal = ANYBODY) -> Statistics:
        """Show one group, or all, to a caller who may see that."""
        self._authority.require(principal, Permission.READ_STATISTICS, group)
        return await self.of(group)

    async def of(self, group: str | None) -> Statistics:
        """Show one group, or all; at most half a second old, as those who ask at one time get the same."""
        now = asyncio.get_running_loop().time()
        self._shared = {key: one for key, one in self._shared.items() if now - one[0] < _FRESH_S}
        found = self._shared.get(group)
        if found is None:
            found = self._shared[group] = (now, asyncio.create_task(self._gather(group)))
        return await asyncio.shield(found[1])

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
        away = tuple(self._away(one.shard, silent) for one in places if one.figures is None)
        groups = _merged_groups(one for instance in instances for one in instance.groups)
        return Statistics(
            at=self._clock.now_ms(),
            asked=here.url,
            instances=tuple(instances),
            shards=() if group is not None else places,
            away=away,
            groups=tuple(groups[:MOST_GROUPS]),
            groups_left_out=max(0, len(groups) - MOST_GROUPS),
            ends=_summed(one for instance in instances for one in instance.ends),
            checks=_summed(one for instance in instances for one in instance.checks),
        )

    def _places(self, instances: list[InstanceFigures]) -> Iterable[ShardPlace]:
        found = {one.shard: (instance.url, one) for instance in instances for one in instance.shards}
        for number in range(self._shards.count):
            url, figures = found.get(number, (None, None))
            yield ShardPlace(shard=number, instance=url, figures=figures)

    def _away(self, number: int, silent: dict[str, str]) -> Away:
        owner: OwnerHint | None = self._forwarder.owner_of(number)
        if owner is None:
            return Away(shard=number, instance=None, detail="it is being recovered or moved")
        return Away(shard=number, instance=owner.url, detail=silent.get(owner.url, "it is being moved"))

    # --- this instance

    async def answer(self, call: FiguresCall, _: float, principal: Principal) -> InstanceFigures:
        """Do a call of another instance."""
        self._authority.require(principal, Permission.READ_STATISTICS, call.group)
        return self.here(call.group)

    def here(self, group: str | None) -> InstanceFigures:
        """Show what this instance knows: of all groups, or of one alone."""
        activity = self._activity
        topics, writes, skipped = activity.failing
        shown = InstanceFigures(
            url=self.instance,
            since=activity.since,
            shards=tuple(self._shard_figures(group)),
            prepares_per_s=activity.prepares(group),
            ends=tuple(activity.ends(group)),
            checks=tuple(activity.checks(group)),
            groups=tuple(self._group_figures(group)),
        )
        if group is not None:
            return shown
        return msgspec.structs.replace(
            shown,
            resolving=len(self._shards.claims),
            lane=activity.lane,
            topics=topics,
            writes=writes,
            quarantined=tuple(self._lane.quarantined(MOST_KEPT)),
            skipped=skipped,
        )

    def _shard_figures(self, group: str | None) -> Iterable[ShardFigures]:
        for one in self._shards.stats():
            pending, parked = one.pending, one.parked
            if group is not None:
                pending, parked = self._shards.counts_here(group, one.shard)
            yield ShardFigures(
                shard=one.shard,
                pending=pending,
                parked=parked,
                remembered=one.ended if group is None else 0,
                oldest_pending_s=one.oldest_pending_s if group is None else 0.0,
                half_lag=one.half_lag if group is None else 0,
                op_lag=one.op_lag if group is None else 0,
                due=one.due if group is None else 0,
                strays=one.strays if group is None else 0,
            )

    def _group_figures(self, only: str | None) -> Iterable[GroupFigures]:
        counts = self._shards.group_counts()
        names = [only] if only is not None else [group.name for group in self._groups.all()]
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
                ends_per_s=sum(one.per_s for one in self._activity.ends(name)),
                checks_in_flight=running,
                checks_due=due,
                breaker_until=until,
                endpoints=self._activity.endpoints(name),
            )


def _merged_groups(parts: Iterable[GroupFigures]) -> list[GroupFigures]:
    """Add up the figures of each group over instances; those with the most to look at first."""
    found: dict[str, GroupFigures] = {}
    for one in parts:
        before = found.get(one.group)
        if before is None:
            found[one.group] = one
            continue
        latest = {}
        for endpoint in sorted((*before.endpoints, *one.endpoints), key=lambda endpoint: endpoint.at):
            latest[endpoint.host] = endpoint
        found[one.group] = GroupFigures(
            group=one.group,
            pending=before.pending + one.pending,
            parked=before.parked + one.parked,
            prepares_per_s=before.prepares_per_s + one.prepares_per_s,
            ends_per_s=before.ends_per_s + one.ends_per_s,
            checks_in_flight=before.checks_in_flight + one.checks_in_flight,
            checks_due=before.checks_due + one.checks_due,
            breaker_until=max(before.breaker_until or 0, one.breaker_until or 0) or None,
            endpoints=tuple(latest.values()),
        )
    return sorted(found.values(), key=lambda one: (-one.parked, -one.pending, -one.ends_per_s, one.group))


def _summed(parts: Iterable[Tallied]) -> tuple[Tallied, ...]:
    found: dict[tuple[str, ...], Tallied] = {}
    for one in parts:
        before = found.get(one.names, Tallied(names=one.names, total=0, per_s=0.0))
        found[one.names] = Tallied(names=one.names, total=before.total + one.total, per_s=before.per_s + one.per_s)
    return tuple(found[key] for key in sorted(found))
