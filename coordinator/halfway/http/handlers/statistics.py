"""The statistics of all instances as callers see them (docs/rest.md#statistics)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from halfway.coordinator.records import (
    Away,
    FailingTopic,
    GroupFigures,
    HealthWarning,
    LaneFigures,
    Quarantined,
    RefusedWrite,
    Skipped,
)
from halfway.coordinator.requests import Moment

if TYPE_CHECKING:
    from halfway.coordinator.records import InstanceFigures, ShardPlace, Statistics

AWAY: Final = "an instance does not answer"
"""The detail that a group sees. It does not learn the addresses of instances."""
_DIGITS: Final = 3


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of all shards that are included."""

    pending: int
    parked: int
    remembered: int
    """Outcomes in memory."""
    oldest_pending_s: float
    resolving: int
    """Transactions that wait for a lane, or are in one."""
    prepares_per_s: float
    ends_per_s: float


class Ends(msgspec.Struct, frozen=True, kw_only=True):
    """Written outcomes, by their cause."""

    outcome: str
    cause: str
    per_s: float
    total: int


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """Checks, by verdict; `none` means that no verdict came."""

    verdict: str
    per_s: float
    total: int


class InstanceState(msgspec.Struct, frozen=True, kw_only=True):
    """One instance."""

    url: str
    asked: bool
    """Whether this instance answered the request."""
    since: Moment
    shards: tuple[int, ...]
    resolving: int
    lane: LaneFigures | None
    warnings: tuple[HealthWarning, ...]


class ShardState(msgspec.Struct, frozen=True, kw_only=True):
    """One shard. Its figures are null if they are not included."""

    shard: int
    instance: str | None
    pending: int | None = None
    parked: int | None = None
    remembered: int | None = None
    oldest_pending_s: float | None = None
    half_lag: int | None = None
    op_lag: int | None = None
    due: int | None = None
    strays: int | None = None


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """Failures that need attention: at most the latest 100 of each kind and instance."""

    topics: tuple[FailingTopic, ...]
    refused: tuple[RefusedWrite, ...]
    quarantined: tuple[Quarantined, ...]
    skipped: tuple[Skipped, ...]


class StatisticsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of all instances."""

    at: Moment
    complete: bool
    """False if a shard is in `away`: the figures do not include it."""
    away: tuple[Away, ...]
    totals: Totals
    ends: tuple[Ends, ...]
    checks: tuple[Checks, ...]
    groups: tuple[GroupFigures, ...]
    """At most 100; the groups with the most parked and pending transactions come first."""
    groups_left_out: int
    instances: tuple[InstanceState, ...]
    shards: tuple[ShardState, ...]
    failures: Failures


def to_response(statistics: Statistics, *, of_one_group: bool) -> StatisticsResponse:
    """Put the figures together; with `of_one_group`, without the addresses and the figures of instances."""
    instances = statistics.instances
    hidden = {"instance": None, "detail": AWAY} if of_one_group else {}
    return StatisticsResponse(
        at=statistics.at,
        complete=not statistics.away,
        away=tuple(msgspec.structs.replace(place, **hidden) for place in statistics.away),
        totals=_totals(statistics),
        ends=tuple(
            Ends(outcome=count.names[0], cause=count.names[1], per_s=_rounded(count.per_s), total=count.total)
            for count in statistics.ends
        ),
        checks=tuple(
            Checks(verdict=count.names[0], per_s=_rounded(count.per_s), total=count.total)
            for count in statistics.checks
        ),
        groups=tuple(_group(figures) for figures in statistics.groups),
        groups_left_out=statistics.groups_left_out,
        instances=() if of_one_group else tuple(_instance(figures, statistics.asked) for figures in instances),
        shards=tuple(_shard(place) for place in statistics.shards),
        failures=Failures(
            topics=tuple(topic for instance in instances for topic in instance.topics),
            refused=tuple(write for instance in instances for write in instance.writes),
            quarantined=tuple(
                msgspec.structs.replace(entry, instance=instance.url)
                for instance in instances
                for entry in instance.quarantined
            ),
            skipped=tuple(records for instance in instances for records in instance.skipped),
        ),
    )


def _totals(statistics: Statistics) -> Totals:
    instances = statistics.instances
    shards = [shard for instance in instances for shard in instance.shards]
    return Totals(
        pending=sum(shard.pending for shard in shards),
        parked=sum(shard.parked for shard in shards),
        remembered=sum(shard.remembered for shard in shards),
        oldest_pending_s=max((shard.oldest_pending_s for shard in shards), default=0.0),
        resolving=sum(instance.resolving for instance in instances),
        prepares_per_s=_rounded(sum(instance.prepares_per_s for instance in instances)),
        ends_per_s=_rounded(sum(count.per_s for count in statistics.ends)),
    )


def _group(figures: GroupFigures) -> GroupFigures:
    return msgspec.structs.replace(
        figures,
        prepares_per_s=_rounded(figures.prepares_per_s),
        ends_per_s=_rounded(figures.ends_per_s),
        breaker="closed" if figures.breaker_until is None else "open",
    )


def _instance(figures: InstanceFigures, asked: str) -> InstanceState:
    return InstanceState(
        url=figures.url,
        asked=figures.url == asked,
        since=figures.since,
        shards=tuple(shard.shard for shard in figures.shards),
        resolving=figures.resolving,
        lane=figures.lane,
        warnings=figures.warnings,
    )


def _shard(place: ShardPlace) -> ShardState:
    shown = ShardState(shard=place.shard, instance=place.instance)
    return shown if place.figures is None else msgspec.structs.replace(shown, **msgspec.structs.asdict(place.figures))


def _rounded(number: float) -> float:
    return round(number, _DIGITS)
